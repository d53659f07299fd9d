"""R3 in a run: a whole step against its formula; which prompts are chosen; both loops.

The model is tiny, and everything it is asked is asked again of a plain forward over
context, thought and reference as one sequence. What R3 makes of log-probs is in
`test_reflect`.
"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from contracts import close, equal, same_rows
from tiny import P, V

from curax import (
    advantage,
    aggregate,
    allocate,
    correct,
    data,
    downsample,
    gate,
    loss,
    modulate,
    objective,
    off_policy,
    reflect,
)
from curax.arrays import lines
from curax.config import (
    Config,
    ConfigError,
    Logging,
    Mesh,
    Queries,
    Reflection,
    Sampling,
    Update,
    load,
    override,
)
from curax.models import transformer
from curax.runs import checkpoint
from curax.settings.config_paths import options
from curax.step import build, draw, drivers, learn, loops, states
from curax.step.methods import candidates, queries, references
from curax.step.step import step as one_step
from curax.step.types import Ungraded
from curax.tasks import rationale
from curax.types import Prompts, Task

B, G, T, Y = 5, 4, 6, 4
WANTED = (4, 2, 0, 3, 1)  # lengths of the references
DELIMITER, END, PAD = (7, 8), 9, 0
RARE = 6  # a token of completions alone
TEMPERATURE = 0.8  # of the policy; references are scored at 1
LENGTH = 5.0  # tokens, the divisor of the loss
IDS = np.arange(B, dtype=np.int32)


def task(*, delimiter=DELIMITER):
    """Prompts of a table, each with a reference; what is right is all the same."""
    random = np.random.default_rng(1)
    tokens = random.integers(0, RARE, (B, P)).astype(np.int32)
    mask = np.arange(P) >= P - np.array((6, 3, 1, 4, 2))[:, None]
    wanted = random.integers(1, RARE, (B, Y)).astype(np.int32)
    there = np.arange(Y) < np.array(WANTED)[:, None]

    def prompts(ids):
        own, seen = (jnp.asarray(table)[ids % B] for table in (tokens, mask))
        return Prompts(tokens=own, mask=seen, id=ids, target=ids)

    def reference(prompts):
        row = prompts.id % B
        return jnp.asarray(wanted)[row], jnp.asarray(there)[row]

    return Task(
        vocab_size=V,
        pad=PAD,
        end=(END,),
        num_prompts=64,
        num_held_out=512,
        prompts=prompts,
        held_out=prompts,
        traces=None,
        verify=lambda target, tokens, mask: jnp.zeros(target.shape, jnp.float32),
        on_device=True,
        decode=str,
        reference=reference,
        delimiter=delimiter,
    )


HOW = Reflection(
    weights=reflect.sigma,
    scorer_every=0,
    length=partial(reflect.length_term, slope=0.5),
)
CONFIG = Config(
    task=task,
    model=partial(tiny.model, width=8, layers=1, heads=2, head_dim=4, mlp_width=8),
    sampling=Sampling(
        prompts=B,
        group_size=G,
        max_tokens=T,
        temperature=TEMPERATURE,
        top_p=0.9,
        off_policy=off_policy.none,
    ),
    reflection=HOW,
    allocate=allocate.uniform,
    gate=gate.overlong,
    downsample=downsample.none,
    correct=correct.none,
    advantage=advantage.group_mean,
    objective=partial(objective.prompt_weight, f=objective.linear),
    modulate=modulate.none,
    loss=loss.clipped_ratio,
    aggregate=partial(aggregate.constant_length, length=LENGTH),
    optimizer=partial(optax.sgd, learning_rate=1.0),
    update=Update(clip_norm=float("inf")),
    logging=Logging(rollout_prompts=B),
)


def built(**how):
    how.setdefault("task", CONFIG.task)
    config = replace(CONFIG, task=how.pop("task"))
    return build.build(replace(config, reflection=replace(HOW, **how)))


def with_methods(state, **own):
    return replace(state, methods={**state.methods, **own})


@cache
def start():
    """A state in which another policy scores, and what it was asked."""
    own = built()
    state = states.begin(own, tiny.warm(own.model, seed=5))
    other = jax.tree.map(lambda leaf: 1.5 * leaf + 0.05, state.params)
    return with_methods(state, references=other)


# ----- completions made by hand


def rows(delimiter=DELIMITER, seed=0):
    """Random completions, rows in any order; what is not drawn has no tokens.

    Prompt 0 has four thoughts, 1 none that ends in two of its completions, 2 has no
    reference, of 3 one thought ends alone, and 4 said the same four times. One of
    prompt 0 was cut off, counts in its group and does not train.
    """
    random = np.random.default_rng(seed)
    n, size = B * G, len(delimiter)
    order = random.permutation(n)
    prompt, member = (order // G).astype(np.int32), (order % G).astype(np.int32)
    tokens = random.integers(1, 7, (n, T)).astype(np.int32)
    # Thoughts without their delimiter: one is empty, one is all that is said.
    thought = np.where(
        prompt > 1, random.integers(0, 3, n), np.array([0, 4, 1, 3])[member]
    )
    thought = np.minimum(thought, T - size)
    length = random.integers(np.maximum(thought + size, 3), T + 1)
    ends = (prompt != 3) | (member == 2)
    ends &= (prompt != 1) | (member > 1)
    for row in range(n):
        if ends[row]:
            tokens[row, thought[row] : thought[row] + size] = delimiter
    same = prompt == 4
    tokens[same], length[same] = tokens[same][0], length[same][0]
    exists = (prompt != 3) | (member != 1)
    mask = (np.arange(T) < length[:, None]) & exists[:, None]
    # A delimiter behind the end is none.
    cut = (prompt == 3) & (member == 0)
    length[cut], mask[cut] = 2, np.arange(T) < 2
    tokens[cut, 3 : 3 + size] = delimiter
    tokens = np.where(mask | cut[:, None], tokens, PAD)
    known = {"prompt": prompt, "member": member, "exists": exists}
    known["finished"] = exists & ((prompt > 0) | (member != 3))
    return jax.tree.map(jnp.asarray, tiny.rollouts(tokens, mask, **known))


def asked():
    """Four prompts and their contexts, as a step asks for completions of them."""
    own, state = built(), start()
    prompts = task().prompts(jnp.asarray(IDS))
    request = draw.ask(own, state, state.memory, prompts, jnp.int32(0))
    return draw.allocated(own, request)


def sampled(rollouts):
    request = asked()
    return request.prompts, request.contexts, rollouts


def thought_of(tokens, mask, delimiter):
    """Tokens up to the end of the first delimiter, None where there is none."""
    said, size = tokens[mask].tolist(), len(delimiter)
    for k in range(len(said) - size + 1):
        if said[k : k + size] == list(delimiter):
            return k + size
    return None


# ----- the same, naively


@cache
def plain_forward():
    return jax.jit(partial(tiny.full_logits, built().model))


def written(rollouts, thoughts, contexts, references):
    """Sequences of context, thought and reference, and where each of these begins."""
    sequences, starts = [], []
    for row, thought in enumerate(thoughts):
        c = int(rollouts.context[row])
        before = np.asarray(contexts.tokens[c])[np.asarray(contexts.mask[c])]
        said = np.asarray(rollouts.tokens[row])[: thought or 0]
        wanted, there = (np.asarray(x[int(rollouts.prompt[row])]) for x in references)
        sequences.append([*before, *said, *wanted[there]])
        starts.append(len(before) + len(said))
    width = P + T + Y
    whole = np.array([[*s, *[0] * (width - len(s))] for s in sequences], np.int32)
    return whole, np.array(starts)


def naive_scores(params, rollouts, thoughts, contexts, references):
    """`[N, Y]` log-probs of references, and their ranks; 0 where there is none."""
    whole, starts = written(rollouts, thoughts, contexts, references)
    place = np.broadcast_to(np.arange(whole.shape[1], dtype=np.int32), whole.shape)
    logits = np.asarray(plain_forward()(params, whole, place), np.float64)
    logp = np.zeros((len(whole), Y))
    rank = np.zeros((len(whole), Y), int)
    for row, start in enumerate(starts):
        count = int(np.sum(references[1][int(rollouts.prompt[row])]))
        for j in range(count):
            z = logits[row, start + j - 1]
            own = z[whole[row, start + j]]
            logp[row, j] = own - np.log(np.exp(z).sum())
            rank[row, j] = 1 + int((z > own).sum())
    return logp, rank


def sigma_weights(logp):
    """`[G, Y]` to `[Y]`: shares of the standard deviations, even ones if all are 0."""
    deviation = np.maximum(logp, -8).std(0)
    if deviation.max() < 1e-9:
        return np.full(logp.shape[1], 1 / logp.shape[1])
    return deviation / deviation.sum()


# ----- the scoring pass


@pytest.mark.long
@pytest.mark.parametrize("delimiter", [(7,), (7, 8)])
def test_references_are_scored_as_by_a_naive_forward(delimiter):
    """Whatever the lengths of contexts, thoughts and references; ranks likewise."""
    own, state = built(task=partial(task, delimiter=delimiter)), start()

    @jax.jit
    def read(params, scorer, rollouts):
        there = with_methods(replace(state, params=params), references=scorer)
        prompts, contexts, _ = sampled(rollouts)
        wanted, mask = own.task.reference(prompts)  # pyright: ignore[reportOptionalCall]
        thought = references.thoughts(rollouts, delimiter)
        given = wanted[rollouts.prompt], mask[rollouts.prompt]
        args = own, there, contexts, rollouts.context, rollouts.tokens, thought
        both = [
            references.logprobs(*args, given, ranks=ranks) for ranks in (False, True)
        ]
        return thought, *(jnp.where(given[1], x, 0) for x in both)

    scorer = state.methods["references"]
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)
    for seed in range(3):
        rollouts = rows(delimiter, seed)
        _, contexts, _ = sampled(rollouts)
        found, logp, rank = read(broken, scorer, rollouts)
        pairs = zip(np.asarray(rollouts.tokens), np.asarray(rollouts.mask), strict=True)
        thoughts = [thought_of(*pair, delimiter) for pair in pairs]
        assert found.tolist() == [t or 0 for t in thoughts]
        given = own.task.reference(sampled(rollouts)[0])  # pyright: ignore[reportOptionalCall]
        want = naive_scores(scorer, rollouts, thoughts, contexts, given)
        close(logp, want[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(rank, want[1])
        assert want[1].max() > 2


# ----- a whole step against its formula


def graded_of(own, state, rollouts):
    """Completions of `asked()`, graded by references."""
    drawn = Ungraded(request=asked(), rollouts=rollouts)
    return references.grade(drivers.Traced(), own, state, drawn)


@cache
def walked(answers):
    """A compiled step: `(direct, length_weight, rollouts) ->` what becomes of it."""

    @jax.jit
    def walk(direct, length_weight, rollouts):
        config = replace(CONFIG, reflection=replace(HOW, answers=answers))
        told = {"reflection.direct": direct, "reflection.length_weight": length_weight}
        own, state = build.build(override(config, told)), start()
        graded = graded_of(own, state, rollouts)
        outcome, scored = graded.outcome, graded.found[references.NAME]
        drawn = draw.collect(own, asked(), graded, None)
        after, (values, shown) = learn.learn(own, state, drawn)
        change = jax.tree.map(jnp.subtract, after.params, state.params)
        return (outcome, scored), shown.credit, values, change

    return walk


def naive_credits(rollouts, logp, thoughts, length_weight):
    """`[N]` credit of the thought, of the answer alone, and `[N, Y]` weights."""
    prompt = np.asarray(rollouts.prompt)
    said = np.asarray(rollouts.mask).sum(-1)
    whole, answer = np.zeros(len(prompt)), np.zeros(len(prompt))
    weight, value = np.zeros(logp.shape), np.full(len(prompt), np.nan)
    for b, count in enumerate(WANTED):
        group = [
            i
            for i in np.flatnonzero(prompt == b)
            if thoughts[i] is not None and rollouts.exists[i]
        ]
        if count == 0 or len(group) < 2:
            continue
        w = sigma_weights(logp[group, :count])
        weight[group, :count] = w
        r3 = logp[group, :count] @ w
        extra = [
            max(-1, 1 - 0.5 * abs(count - (said[i] - thoughts[i])) / count)
            for i in group
        ]
        extra = length_weight * np.array(extra)
        value[group] = r3
        whole[group] = r3 + extra - (r3 + extra).mean()
        answer[group] = extra - extra.mean()
    for trained in (whole, answer, weight):
        trained[~np.asarray(rollouts.finished)] = 0
    return whole, answer, weight, value


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("answers", "direct", "length_weight"),
    [(False, 0.0, 0.0), (False, 0.5, 0.3), (True, 0.0, 0.3)],
    ids=["thoughts-alone", "all-terms", "answers-too"],
)
def test_a_step_ascends_what_its_formula_says(answers, direct, length_weight):
    """P7, P15: the change is credit times score, of thoughts and of answers.

    Plus direct times the gradient of mean_i sum_j w_j log pi(y_j), temperature 1.
    """
    rollouts, state = rows(), start()
    own = built()
    _, contexts, _ = given = sampled(rollouts)
    mask = np.asarray(rollouts.mask)
    pairs = zip(np.asarray(rollouts.tokens), mask, strict=True)
    thoughts = [thought_of(*pair, DELIMITER) for pair in pairs]
    wanted = jax.device_get(own.task.reference(given[0]))  # pyright: ignore[reportOptionalCall]
    scorer = state.methods[references.NAME]
    logp, _ = naive_scores(scorer, rollouts, thoughts, contexts, wanted)
    whole, answer, weight, value = naive_credits(
        rollouts, logp, thoughts, length_weight
    )
    (outcome, scored), credit, told, change = walked(answers)(
        jnp.float32(direct), jnp.float32(length_weight), rollouts
    )

    # Rewards and credits.
    close(outcome, np.exp(value), rtol=1e-4)
    missing = int(np.isnan(value).sum() - (~np.asarray(rollouts.exists)).sum())
    assert told["outcome/missing"] == missing
    on_grid = np.zeros((B, G))
    on_grid[np.asarray(rollouts.prompt), np.asarray(rollouts.member)] = whole
    close(credit, on_grid, rtol=1e-3, atol=1e-5)
    assert not np.asarray(credit)[2:].any()  # exactly: nothing to compare, or all alike
    assert scored.certainty.flat.tolist() == [False, False, True, True, True]
    ended = [t is not None for t in thoughts]
    close(told["reflect/thought_fraction"], sum(ended) / rollouts.exists.sum())
    close(told["reflect/certainty_nats"], np.nanmean(value), rtol=1e-4)
    close(told["reflect/flat_fraction"], 1 / 3)  # of those with anything to compare

    # The gradient, by a plain forward over whole rows.
    column = np.arange(T)[None]
    thinks = column < np.array([t or 0 for t in thoughts])[:, None]
    coefficient = np.where(thinks | answers, whole[:, None], answer[:, None])
    coefficient = np.where(mask, coefficient, 0) / (B * G * LENGTH)
    sequence, place = tiny.whole(
        contexts, np.asarray(rollouts.tokens), np.asarray(rollouts.context)
    )
    behind, starts = written(rollouts, thoughts, contexts, wanted)
    columns = np.minimum(starts[:, None] + np.arange(Y), behind.shape[1] - 1)
    wanted = np.take_along_axis(behind, columns, 1)

    @jax.jit
    @jax.grad
    def ascends(params):
        args = tiny.full_logits, own.model, params
        policy = jax.nn.log_softmax(args[0](*args[1:], sequence, place) / TEMPERATURE)
        taken = jnp.take_along_axis(policy, rollouts.tokens[..., None], -1)[..., 0]
        scorer = jax.nn.log_softmax(
            args[0](*args[1:], behind, (columns - 1).astype(np.int32))
        )
        own_ = jnp.take_along_axis(scorer, jnp.asarray(wanted)[..., None], -1)[..., 0]
        share = jnp.asarray(weight, jnp.float32) * direct / (B * G)
        return jnp.sum(jnp.asarray(coefficient, jnp.float32) * taken) + jnp.sum(
            share * own_
        )

    jax.tree.map(partial(close, rtol=1e-3, atol=2e-6), change, ascends(state.params))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(change)) > 1e-3


@cache
def scoring(baseline=None):
    """Compiled: rewards under a scorer, by a rule for the baseline."""
    own = built(baseline=baseline, length=None)

    @jax.jit
    def read(scorer, rollouts):
        state = with_methods(start(), references=scorer)
        graded = graded_of(own, state, rollouts)
        return graded.outcome, graded.found[references.NAME]

    return read


def test_a_log_prob_that_is_not_finite_drops_its_completion_and_no_other():
    """P15: one thought has a token whose embedding is broken."""
    rollouts, scorer = rows(), start().methods[references.NAME]
    row = int(np.flatnonzero((rollouts.prompt == 0) & (rollouts.member == 1))[0])
    tokens = jnp.where(rollouts.tokens == RARE, 5, rollouts.tokens)
    said = replace(rollouts, tokens=tokens)
    never = replace(said, mask=rollouts.mask.at[row, -1].set(False))  # it never ends
    broken = scorer | {"embed": scorer["embed"].at[RARE].set(jnp.nan)}
    seen = replace(said, tokens=tokens.at[row, 0].set(RARE))
    outcome, got = scoring()(broken, seen)
    want_outcome, want = scoring()(scorer, never)
    assert np.isnan(outcome[row])
    assert np.isfinite(outcome[(rollouts.prompt == 0) & (rollouts.member != 1)]).all()
    close(outcome, want_outcome)
    close(got.reward, want.reward)
    assert np.isfinite(got.reward).all()


@pytest.mark.long
def test_a_baseline_of_the_whole_group_cancels_and_one_of_each_completion_does_not():
    """P7: log-probs of the reference behind no thought are the same for the group."""
    rollouts, scorer = rows(), start().methods[references.NAME]
    (outcome, plain), (_, group), (_, rollout) = (
        scoring(rule)(scorer, rollouts)
        for rule in (None, reflect.no_thought, reflect.blank_thought)
    )
    prompt, there = np.asarray(rollouts.prompt), np.isfinite(outcome)
    bare = replace(rollouts, tokens=jnp.tile(jnp.array(DELIMITER), (B * G, T // 2)))
    prompts, contexts, _ = sampled(bare)
    given = jax.device_get(task().reference(prompts))  # pyright: ignore[reportOptionalCall]
    logp, _ = naive_scores(scorer, bare, [2] * (B * G), contexts, given)

    def centred(scored, b):
        reward = np.asarray(scored.reward)[there & (prompt == b)]
        return reward - reward.mean()

    for b in (0, 1):
        close(centred(group, b), centred(plain, b), atol=1e-5)
        assert np.abs(centred(rollout, b) - centred(plain, b)).max() > 1e-3
        # By as much as the reference is likely behind the delimiter alone.
        row = int(np.flatnonzero(there & (prompt == b))[0])
        level = logp[row] @ np.asarray(plain.certainty.weight)[b, 0]
        apart = np.asarray(plain.reward - group.reward)[there & (prompt == b)]
        close(apart, np.full(apart.shape, level), rtol=1e-3, atol=1e-5)


def test_who_scores_is_frozen_synced_or_lags():
    """0: the policy RL starts from; 1: the policy; K: a copy of it every K steps."""
    params = {"x": jnp.float32(0)}
    nothing: Any = None
    for every, want in ((0, [0] * 6), (1, None), (3, [0, 0, 3, 3, 3, 6])):
        own, drive = built(scorer_every=every), drivers.Traced()
        scorer = references.init(drive, own, replace(start(), params=params), None)
        seen = []
        for step in range(6):
            there = with_methods(
                replace(
                    start(),
                    params={"x": jnp.float32(step + 1)},
                    step=jnp.int32(step + 1),
                ),
                references=scorer,
            )
            scorer = references.after_update(drive, own, there, nothing)
            seen.append(scorer and float(scorer["x"]))
        assert seen == (want or [None] * 6)


# ----- which prompts are worth training on


@pytest.mark.long
def test_candidates_are_measured_as_by_naive_log_probs():
    """The same completions, asked again."""
    how = Queries(every=2, draws=8, keep=reflect.null_test)
    own = built(task=partial(task, delimiter=(7,)), queries=how)
    state = with_methods(replace(start(), step=jnp.int32(4)), queries=None)
    ids, number = jnp.asarray(IDS), jnp.int32(3)

    @jax.jit
    def look(state):
        prompts = own.task.prompts(ids)
        request = queries.ask(own, state, prompts, number)
        rollouts = drivers.Traced().draw(own, state, request)
        given = request, rollouts, references.references_of(own, prompts)
        return queries.probe_scores(own, state, *given), rollouts

    (hard, flat, null, tokens), rollouts = look(state)
    prompts, contexts, _ = sampled(rollouts)
    pairs = zip(np.asarray(rollouts.tokens), np.asarray(rollouts.mask), strict=True)
    thoughts = [thought_of(*pair, (7,)) for pair in pairs]
    given = jax.device_get(own.task.reference(prompts))  # pyright: ignore[reportOptionalCall]
    scorer = state.methods[references.NAME]
    logp, rank = naive_scores(scorer, rollouts, thoughts, contexts, given)
    for b, count in enumerate(WANTED):
        group = [
            i
            for i in np.flatnonzero(np.asarray(rollouts.prompt) == b)
            if thoughts[i] is not None
        ]
        if count == 0 or len(group) < 2:
            assert (hard[b], flat[b], null[b]) == (np.inf, 0, 1)
            continue
        worst = max(1, int(np.ceil(round(0.2 * count, 6))))
        ranks = np.sort(rank[group, :count], -1)[:, ::-1][:, :worst]
        close(hard[b], ranks.mean(-1).min())
        deviation = np.maximum(logp[group, :count], -8).std(0)
        close(flat[b], deviation.max(), rtol=1e-4, atol=1e-5)
        again = candidates.null_chance(
            jnp.asarray(logp[group, :count], jnp.float32),
            jnp.ones(len(group), bool),
            jnp.ones(count, bool),
        )
        close(null[b], again, rtol=1e-3, atol=1e-3)
    assert np.isfinite(hard).sum() >= 2
    assert float(tokens.sum()) == np.asarray(rollouts.mask).sum() > 0


@pytest.mark.long
def test_runs_side_by_side_look_at_prompts_only_when_it_is_due(monkeypatch):
    """A branch that is mapped over is taken by all, always."""
    probed = []

    def probe_scores(build, state, request, rollouts, reference):
        jax.debug.callback(probed.append, request.prompts.id)
        fine = jnp.ones(request.prompts.id.shape, jnp.float32)
        return fine, fine, fine * 0, fine

    monkeypatch.setattr(queries, "probe_scores", probe_scores)
    monkeypatch.setattr(draw, "draw", lambda *_: None)
    own = built(queries=Queries(every=3, candidates=2, keep=reflect.null_test))
    fresh = {queries.NAME: queries.init(drivers.Traced(), own, start(), None)}
    state = replace(start(), params=None, methods=fresh, opt_state=None)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)

    @jax.jit
    @jax.vmap
    def renew(state):
        return queries.choose(drivers.Traced(), own, state, None)

    for step, due in enumerate((True, False, False, True)):
        probed.clear()
        at = replace(several, step=jnp.full(2, step, jnp.int32))
        several, taken = jax.block_until_ready(renew(at))
        jax.effects_barrier()
        assert (len(probed) > 0) == due
        ids = np.asarray(several.methods[queries.NAME].ids)
        place = step % 3 * B
        np.testing.assert_array_equal(taken, ids[:, place : place + B])
        assert (ids[0] == ids[1]).all()
    assert several.position.tolist() == [2 * 2 * 3 * B] * 2


# ----- whole runs

ROOT = Path(__file__).parents[1]
STEPS, EVERY = 5, 2
SMALL = {
    "task.depth": 1,
    "task.words": 2,
    "task.num_prompts": 64,
    "task.num_held_out": 32,
    "model.width": 16,
    "model.layers": 1,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.head_dim": 8,
    "model.mlp_width": 16,
    "sampling.prompts": 4,
    "sampling.group_size": 8,
    "sampling.max_tokens": 12,
    "optimizer.learning_rate": 3e-3,
    # Or Adam makes full steps of gradients that are rounding alone.
    "optimizer.eps": 1e-3,
    "reflection.scorer_every": 2,
    "reflection.queries.every": EVERY,
    "reflection.queries.draws": 6,
    "reflection.queries.carried": 0.25,
    "reflection.queries.keep.level": 0.5,
    "evaluation.prompts": 8,
    "evaluation.samples": 2,
    "logging.every": 4,
    "logging.rollout_prompts": 4,
    "steps": STEPS,
}


@cache
def config():
    return small("dro", SMALL)


def small(name, changes):
    return override(
        replace(load(ROOT / "configs" / f"{name}.py"), warm_start=None), changes
    )


@cache
def loop():
    return loops.Jitted(build.build(config()))


def begun(own):
    """Some thoughts end by chance; committed, as a restored state is."""
    return own.begin(jax.device_put(tiny.warm(own.parts.model), jax.devices()[0]))


def whole(own, state, steps):
    """Rows, what was shown, and the states between, on the host."""
    states, rows_, shown_ = [jax.device_get(state)], [], []
    for _ in range(steps):
        state, row, shown = own.advance(state, 1)
        rows_ += row
        shown_ += shown
        states.append(jax.device_get(state))
    return rows_, shown_, states


@cache
def run():
    return whole(loop(), begun(loop()), STEPS)


@pytest.mark.long
def test_the_recipe_trains_on_the_prompts_it_chose_in_their_order():
    """P8: each look takes the next candidates; of a pool a share is the last one's."""
    rows_, shown, states = run()
    prompts = config().sampling.prompts
    size, carried = prompts * EVERY, 2
    before = None
    for step, (row, seen) in enumerate(zip(rows_, shown, strict=True)):
        state = states[step + 1]
        chosen = state.methods[queries.NAME]
        pool = chosen.ids
        place = step % EVERY * prompts
        assert seen.prompts.id.tolist() == pool[place : place + prompts].tolist()
        looks = step // EVERY + 1
        assert state.position == looks * 2 * size
        ids = data.prompt_ids(
            state.seed,
            jnp.int32((looks - 1) * 2 * size),
            count=2 * size,
            num_prompts=64,
        ).tolist()
        fresh = pool if before is None else pool[: size - carried]
        assert set(fresh.tolist()) <= set(ids)
        order = [ids.index(i) for i in dict.fromkeys(fresh.tolist())]
        assert order == sorted(order)  # those kept stand in the order of the candidates
        if before is not None:
            assert pool[size - carried :].tolist() == before[:carried].tolist()
        assert 0 < row["query/kept_fraction"] == chosen.kept <= 1
        if (step + 1) % EVERY == 0:
            before = pool
        assert np.isfinite(row["loss/mean"])
        assert np.isfinite(row["reflect/certainty_nats"])
    assert any(row["update/count"] > 0 for row in rows_)
    assert any(0 < row["query/kept_fraction"] < 1 for row in rows_)


@pytest.mark.long
def test_a_scorer_that_lags_is_the_policy_of_the_last_even_step():
    _, _, states = run()
    for step, state in enumerate(states):
        equal(state.methods[references.NAME], states[step // 2 * 2].params)
    with pytest.raises(AssertionError):
        equal(states[1].methods[references.NAME], states[1].params)


@pytest.mark.long
def test_a_run_cut_in_two_is_the_whole_run(tmp_path):
    """Between two looks, and between two copies of the scorer."""
    rows_, _, states = run()
    saved = checkpoint.Checkpoints(tmp_path / "saved", keep=1)
    saved.save(3, states[3], {})
    state, _ = saved.restore(3, loop().abstract)
    saved.close()
    again, _, later = whole(loop(), state, STEPS - 3)
    jax.tree.map(np.testing.assert_array_equal, later[-1], states[-1])
    for mine, theirs in zip(again, rows_[3:], strict=True):
        for name in ("loss/mean", "reflect/certainty_nats", "query/kept_fraction"):
            assert mine[name] == theirs[name]


@pytest.mark.long
def test_the_staged_loop_gives_the_same_in_micro_batches():
    """A quarter of the rows at a time; prompts and references that the host reads."""

    def in_files(**options):
        made = rationale.task(**options)

        def on_host(make):
            return lambda *args: jax.device_get(jax.jit(make)(*map(tree, args)))

        def tree(values):
            return jax.tree.map(jnp.asarray, values)

        return replace(
            made,
            prompts=on_host(made.prompts),
            reference=on_host(made.reference),
            in_files=True,
        )

    other = replace(config(), task=partial(in_files, **options(config().task)))
    other = override(other, {"update.micro_batches": 4})
    own = loops.Staged(build.build(other))
    own.rehearse()
    rows_, shown, states = whole(own, begun(own), 3)
    want_rows, want_shown, want = run()
    mine, theirs = states[-1], want[3]
    jax.tree.map(close, mine.params, theirs.params)
    for name in mine.methods:
        compare = close if name == references.NAME else np.testing.assert_array_equal
        both = (state.methods[name] for state in (mine, theirs))
        if name == queries.NAME:
            both = (chosen.ids for chosen in both)
        jax.tree.map(compare, *both)
    for mine, theirs in zip(shown, want_shown, strict=False):
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        close(mine.reward, theirs.reward, atol=1e-5)
    same_rows(rows_, want_rows[: len(rows_)])


def test_groups_that_show_nothing_do_not_train_where_the_step_itself_is_the_look():
    """Their completions are missing, as those of which no thought ends."""
    prompts, contexts, rollouts = sampled(rows())
    keep = partial(reflect.percentile, flattest=0.5)

    @jax.jit
    def read(rollouts):
        wanted = references.references_of(built(), prompts)
        args = start(), contexts, rollouts, wanted
        every = built(), built(keep=keep), built(keep=partial(keep, flattest=0.7))
        return [references.score(parts, *args) for parts in every]

    found = jax.device_get(read(rollouts))
    (outcome, plain, _), (left, gated, _), (_, few, _) = found
    assert plain.kept is None
    # A share of those that were measured, three.
    assert few.kept.sum() == 1
    # 2 has no reference, 3 has one thought; 4 said the same, and is flattest of 0, 1.
    flat = np.where(plain.certainty.spread.max(-1) > 0, 0, 1)
    assert gated.kept.sum() == 2
    assert not (gated.kept & (flat == 1)).any()
    trains = gated.kept[np.asarray(rollouts.prompt)]
    np.testing.assert_array_equal(left[trains], outcome[trains])
    assert np.isnan(left[~trains]).all()
    np.testing.assert_array_equal(gated.reward[trains], plain.reward[trains])
    for wrong, says in (
        (reflect.ema, "remembers"),
        (partial(keep, hardest=4.0), "hardest to None"),
    ):
        with pytest.raises(ConfigError, match=says):
            replace(CONFIG, reflection=replace(HOW, keep=wrong))
    recipe = load(ROOT / "configs" / "dro_in_step.py")
    dro = load(ROOT / "configs" / "dro.py").reflection
    assert recipe.reflection == replace(dro, queries=None, keep=reflect.null_test)


@pytest.mark.long
def test_the_recipe_as_published_takes_a_step():
    """Its choice of prompts too, of which the program is made and not run."""
    changes = {
        k: v for k, v in SMALL.items() if "queries" not in k and "scorer" not in k
    }
    recipe = small("dro_published", changes)
    own = build.build(recipe)
    before = states.begin(own, tiny.warm(own.model))
    drive = drivers.Traced()
    jax.eval_shape(lambda state: queries.choose(drive, own, state, None), before)
    assert recipe.reflection
    alone = replace(recipe, reflection=replace(recipe.reflection, queries=None))
    train = jax.jit(partial(one_step, drive, build.build(alone)))
    own_states = {k: v for k, v in before.methods.items() if k != queries.NAME}
    state, (row, _) = train(replace(before, methods=own_states))
    assert all(np.isfinite(row[name]) for name in ("loss/mean", "kl/ref_nats"))
    assert row["update/count"] > 0
    assert row["update/nonfinite"] == 0
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params, before.params)
    assert min(jax.tree.leaves(moved)) > 0


@pytest.mark.long
def test_references_of_all_draws_are_scored_on_a_mesh_where_few_of_them_train():
    def first(mesh):
        config = replace(
            CONFIG,
            task=rationale.task,
            model=partial(transformer.model, width=16, layers=1, heads=2, kv_heads=1),
            sampling=replace(CONFIG.sampling, prompts=4, max_tokens=22),
            update=replace(CONFIG.update, tokens_per_micro_batch=64),
            gate=gate.none,
            downsample=partial(downsample.random, m=2),
            mesh=mesh,
        )
        loop = loops.Jitted(build.build(config))
        with loop.context():
            _, (row,), _ = loop.advance(loop.begin(loop.initial()), 1)
        return {name: float(np.mean(value)) for name, value in row.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "AT_HOME", 1)
        got, want = first(Mesh(data=2)), first(Mesh())
    assert want["train/rows"]
    for name in ("train/rows", "reward/mean", "group/signal_fraction", "gradient/norm"):
        assert got[name] == pytest.approx(want[name], rel=1e-3)
