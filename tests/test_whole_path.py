"""Whole steps of every recipe on a policy that is a table: L1, L23, L24, P3, P4.

All completions of a few prompts are listed, each with its chance, and fed through
`draw.collect` and `learn.learn`. The mean change of the parameters is then known
without sampling, and by the law it is w(p) grad p, with w from the docstring of the
recipe: whatever stands between an outcome and a parameter has to be right for that.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contracts import close, sides
from kinds import one_of_each_first
from test_law import loaded, recipes, small, stated

from curax import (
    advantage,
    aggregate,
    allocate,
    downsample,
    loss,
    modulate,
    off_policy,
    reward,
    score,
)
from curax.arrays import choice, supports
from curax.arrays.metrics import Tally
from curax.config import KL, Update, override
from curax.settings.config_paths import option
from curax.step import draw, drivers, learn
from curax.step.build import build
from curax.step.step import step as one_step
from curax.step.types import Graded
from curax.types import (
    Difficulty,
    Model,
    PromptMemory,
    Prompts,
    Rollouts,
    Task,
    TrainState,
)

ACTIONS, PROMPTS = 3, 4
LOGITS = np.random.default_rng(0).normal(size=(PROMPTS, ACTIONS)).astype(np.float32)
RIGHT = np.array([[1, 0, 0], [0, 1, 1], [1, 0, 1], [0, 0, 1]], bool)  # which actions
POLICY = np.exp(np.float64(LOGITS))
POLICY /= POLICY.sum(-1, keepdims=True)
RATES = (POLICY * RIGHT).sum(-1)
GRAD_P = POLICY * (RIGHT - RATES[:, None])

for_every_recipe = pytest.mark.parametrize("recipe", one_of_each_first(recipes()))


def model(*, vocab_size):
    """A table of logits: the features of a token say which row it is."""

    def features(params, tokens, positions, mask, cache=None, column=None):
        return jax.nn.one_hot(tokens, PROMPTS, dtype=jnp.float32), cache

    return Model(
        init=lambda key: {"logits": jnp.asarray(LOGITS)},
        features=features,
        head=lambda params: params["logits"].T,
        axes={"logits": (None, "vocab")},
    )


def task():
    """One action is a completion; prompts differ in which of them are right."""

    def prompts(ids):
        return Prompts(
            tokens=ids[:, None],
            mask=jnp.ones((ids.shape[0], 1), bool),
            id=ids,
            target=jnp.asarray(RIGHT)[ids],
        )

    def verify(target, tokens, mask):
        return jnp.take_along_axis(target, tokens, -1)[:, 0].astype(jnp.float32)

    return Task(
        vocab_size=ACTIONS,
        pad=0,
        end=tuple(range(ACTIONS)),
        num_prompts=PROMPTS,
        num_held_out=512,
        prompts=prompts,
        held_out=prompts,
        traces=None,
        verify=verify,
        on_device=True,
        decode=str,
    )


def tabular(recipe, **changes):
    """The recipe on the table, at sizes at which all draws can be listed."""
    config = small(loaded(recipe))
    changes = {
        "task": task,
        "model": model,
        "warm_start": None,
        "hint": None,  # of a group, under its own context
        "methods": (),  # of hints
        "modulate": modulate.none,  # on top of credit, which is what w(p) is of
        "aggregate": partial(aggregate.constant_length, length=1),
        "optimizer": partial(optax.sgd, learning_rate=1.0),
    } | changes
    return override(replace(config, **changes), {"logging.rollout_prompts": PROMPTS})


def start(parts):
    """The first state, with something to remember of every prompt."""
    params = parts.model.init(jax.random.key(0))
    memory = PromptMemory(
        draws=jnp.array([2.0, 1.0, 4.0, 1.5]),
        solved=jnp.array([0.75, 0.5, 0.1, 1.5]),
        square=jnp.array([0.5, 0.75, 3.0, 1.0]),
        tokens=jnp.array([2.0, 1.0, 4.0, 1.5]),
    )
    return TrainState(
        params=params,
        opt_state=parts.tx.init(params),
        reference=params if parts.config.kl else None,
        memory=memory,
        position=jnp.int32(0),
        step=jnp.int32(0),
        seed=jnp.uint32(0),
    )


def piloted(state, ids):
    """What pilots may have said: little of the first prompt was right."""
    solved = jnp.arange(1.0, len(ids) + 1)
    count = jnp.full(len(ids), 4.0)
    difficulty = Difficulty(
        draws=count,
        solved=solved,
        pass_rate=solved / count,
        norm=jnp.ones_like(count),
        tokens=jnp.ones_like(count),
    )
    tally = Tally(means={}, counts={})
    return {"known": difficulty, "memory": state.memory, "explored": tally}


class Rows:
    """Completions, numpy `[S, N]`: S steps that might be made of the same prompts.

    `judge` is the prompt that a row is graded as, its own unless something is wrong.
    """

    def __init__(self, tokens, prompt, member, exists):
        self.tokens, self.prompt, self.member, self.exists = (
            np.broadcast_to(array, tokens.shape)
            for array in (tokens, prompt, member, exists)
        )
        self.judge = self.prompt

    def arrays(self):
        return {name: jnp.asarray(values) for name, values in vars(self).items()}

    def but(self, **changes):
        changed = Rows(self.tokens, self.prompt, self.member, self.exists)
        vars(changed).update(changes)
        return changed

    def taken(self, which):
        """Some of the steps."""
        return self.but(**{k: v[which] for k, v in vars(self).items()})

    def moved(self, order):
        """In another order, `[S, N]`."""
        rows = {k: np.take_along_axis(v, order, -1) for k, v in vars(self).items()}
        return self.but(**rows)


class Path:
    """A recipe from its outcomes to its parameters, compiled once."""

    def __init__(self, recipe, *, lag=0.0, **changes):
        self.sampler = np.float32(LOGITS + lag)  # logits of what draws
        self.config = tabular(recipe, **changes)
        self.parts = build(self.config)
        self.state = start(self.parts)
        alone = self.config.sampling.group_size == 1
        # Statistics that span a batch have a closed form where all prompts are alike.
        self.ids = np.array([2] * 4 if alone else [2, 0], np.int32)
        self.explored = piloted(self.state, self.ids) if self.config.pilot else None
        self.compiled = jax.jit(jax.vmap(self.step, in_axes=(None, None, 0)))

    def step(self, ids, explored, rows):
        parts, state = self.parts, self.state
        prompts = parts.task.prompts(ids)
        logits = jnp.asarray(self.sampler)[ids][rows["prompt"]]
        logp = jax.nn.log_softmax(logits)
        own = jnp.take_along_axis(logp, rows["tokens"][:, None], -1)
        sizes = self.config.sampling
        cut = choice.truncate(logp, top_k=sizes.top_k, top_p=sizes.top_p)
        noted = supports.packed(cut, top_k=sizes.top_k)[:, None]
        chance = jnp.exp(logp)
        entropy = -jnp.sum(chance * logp, -1, keepdims=True)
        square = 1 - 2 * jnp.exp(own) + jnp.sum(chance**2, -1, keepdims=True)
        rollouts = Rollouts(
            tokens=rows["tokens"][:, None],
            mask=rows["exists"][:, None],
            logp_behaviour=jnp.take_along_axis(cut, rows["tokens"][:, None], -1),
            logp_policy=own,
            entropy=entropy,
            score_sq_norm=square,
            finished=rows["exists"],
            prompt=rows["prompt"],
            member=rows["member"],
            context=rows["prompt"],
            exists=rows["exists"],
            support=noted if sizes.replay_support else None,
        )
        as_judged = replace(rollouts, prompt=rows["judge"])
        outcome = reward.on_device(parts.task, prompts, as_judged)
        request = draw.ask(parts, state, state.memory, prompts, jnp.int32(0))
        if explored:
            request = replace(request, visited=True, **explored)
        request = draw.allocated(parts, request)
        graded = Graded.of(request, rollouts, outcome)
        drawn = draw.collect(parts, request, graded, None)
        taken = {}

        def spy(parts, state, trains):
            batch = batch_of(parts, state, trains)
            taken.update(row=trains.row, used=trains.used, credit=batch.credit[:, 0])
            return batch

        batch_of = learn.batch_of
        with mock.patch.object(learn, "batch_of", spy):
            new, (values, shown) = learn.learn(parts, state, drawn)
        return {
            "change": new.params["logits"] - state.params["logits"],
            "outcome": shown.outcome,
            "credit": shown.credit,
            "keep": shown.keep,
            "memory": drawn.memory,
            "history": drawn.known.pass_rate,
            "trained": taken,
            "updates": values["update/count"],
            "metrics": {k: v for k, v in values.items() if k.startswith("off_policy/")},
        }

    def __call__(self, rows, ids=None, explored=None):
        """What becomes of each of S steps."""
        ids = self.ids if ids is None else ids
        explored = explored or self.explored
        found = self.compiled(jnp.asarray(ids), explored, rows.arrays())
        return SimpleNamespace(**jax.device_get(found))

    def history(self):
        """`[B]`: pass rates as pilots or the memory have them."""
        if self.explored:
            return self.explored["known"].pass_rate
        known, prior = self.state.memory, self.config.memory.prior
        rate = (known.solved + prior[0]) / (known.draws + sum(prior))
        return np.asarray(rate)[self.ids]

    def counts(self):
        """`[B]`: completions of each prompt, at most where a rule stops it."""
        even = self.parts.rows // len(self.ids)
        unequal = 1 if self.config.sampling.budget else 0
        return np.array([even + unequal, even - unequal] * (len(self.ids) // 2))

    def drawn_from(self):
        """`[PROMPTS, ACTIONS]`, mu: the sampler's, less what top-k cuts off."""
        k = self.config.sampling.top_k or ACTIONS
        kept = np.sort(self.sampler, -1)[:, [-k]] <= self.sampler
        mu = np.exp(np.float64(self.sampler)) * kept
        return mu / mu.sum(-1, keepdims=True)

    def listed(self):
        """All draws: the rows, and the chance `[S]` of each."""
        asked = allocate.rows_to_draw(jnp.asarray(self.counts()), rows=self.parts.rows)
        prompt, member = np.asarray(asked.prompt), np.asarray(asked.member)
        assert asked.exists.all()
        every = np.array(list(product(range(ACTIONS), repeat=len(prompt))), np.int32)
        exists = np.ones(every.shape, bool)
        if self.config.stop:
            right = RIGHT[self.ids[prompt], every]
            for b in range(len(self.ids)):
                exists[:, prompt == b] = stopped(self.config, right[:, prompt == b])
        chance = self.drawn_from()[self.ids[prompt], every].prod(-1)
        close(chance.sum(), 1, rtol=1e-12)
        return Rows(every, prompt, member, exists), chance


def stopped(config, right):
    """`[S, G]` which of the draws with these labels are made, in rounds of 2."""
    wrong = option(config.stop.rule, "wrong", 0)
    exists = np.zeros(right.shape, bool)
    for labels, made in zip(right.tolist(), exists, strict=True):
        n = 2
        while n < len(labels) and not (
            True in labels[:n] and labels[:n].count(False) >= wrong
        ):
            n += 2
        made[:n] = True
    return exists


@cache
def path(recipe):
    return Path(recipe)


@cache
def walked(recipe):
    """All draws of a recipe, their chances, and what becomes of them."""
    rows, chance = path(recipe).listed()
    return rows, chance, path(recipe)(rows)


def gridded(rows, values, shape, fill):
    """`[S, B, G]`, by name."""
    grid = np.full((len(rows.tokens), *shape), fill, values.dtype)
    step, row = rows.exists.nonzero()
    grid[step, rows.prompt[step, row], rows.member[step, row]] = values[step, row]
    return grid


def expected_change(recipe, chance, change):
    """E[change] and what the law makes of it, both `[PROMPTS, ACTIONS]` float64."""
    own, want = path(recipe), np.zeros(GRAD_P.shape)
    for i, n, q in zip(own.ids, own.counts(), own.history(), strict=True):
        n = None if own.config.sampling.group_size == 1 else int(n)
        w = stated(recipe, own.config, RATES[i], n=n, q=float(q))
        want[i] += w * GRAD_P[i] / len(own.ids)
    return np.einsum("s,sba->ba", chance, np.float64(change)), want


@pytest.mark.first(1)
@for_every_recipe
def test_the_mean_change_of_the_parameters_is_w_grad_p(recipe):
    """L1, L2, L9, L15, P4: over all draws, to the last digits of float32.

    L23: what was known of the prompts before is the same whatever is drawn.
    """
    rows, chance, found = walked(recipe)
    before = np.broadcast_to(path(recipe).history(), found.history.shape)
    close(found.history, before)
    mean, want = expected_change(recipe, chance, found.change)
    close(mean, want, rtol=1e-5, atol=1e-6)
    # In float64 from the same coefficients, which labels alone decide.
    own = path(recipe)
    right = RIGHT[own.ids[rows.prompt], rows.tokens]
    shape = found.credit.shape[1:]
    c = np.float64(found.credit) / own.parts.train_rows
    labels = gridded(rows, np.float32(right), shape, 0.0)
    np.testing.assert_array_equal(
        found.outcome, gridded(rows, np.float32(right), shape, np.nan)
    )
    scores = np.eye(ACTIONS)[gridded(rows, rows.tokens, shape, 0)]
    scores = scores - POLICY[own.ids][:, None]
    pull = np.einsum("sbg,sbga->sba", c, scores)
    for b, i in enumerate(own.ids):
        w = chance @ sides(c[:, b], labels[:, b], RATES[i])
        close(chance @ pull[:, b], w * GRAD_P[i], rtol=1e-12, atol=1e-12)
    # And each change is the sum of coefficient times score, of every single step.
    total = np.zeros(found.change.shape)
    np.add.at(total, (slice(None), own.ids), pull)
    close(found.change, total, atol=2e-6)


@pytest.mark.first(3)
@for_every_recipe
def test_what_trains_trains_once_and_with_its_own_credit(recipe):
    """L24: each (prompt, member) that is kept is one row, and no row stands for two."""
    rows, _, found = walked(recipe)
    row, used, credit = (found.trained[k] for k in ("row", "used", "credit"))
    assert row.shape[-1] == path(recipe).parts.train_rows
    step, place = used.nonzero()
    row = row[step, place]
    assert rows.exists[step, row].all()
    prompt, member = rows.prompt[step, row], rows.member[step, row]
    times = np.zeros(found.keep.shape, int)
    np.add.at(times, (step, prompt, member), 1)
    np.testing.assert_array_equal(times, found.keep)
    np.testing.assert_array_equal(credit[used], found.credit[step, prompt, member])
    assert not credit[~used].any()
    assert found.keep.any()


@for_every_recipe
def test_the_places_of_rows_change_nothing(recipe):
    """P3: rows are found by prompt and member."""
    rows, _, found = walked(recipe)
    order = np.random.default_rng(1).random(rows.tokens.shape).argsort(-1)
    moved = path(recipe)(rows.moved(order))
    for name in ("outcome", "credit", "keep", "change", "updates"):
        np.testing.assert_array_equal(getattr(moved, name), getattr(found, name))
    jax.tree.map(np.testing.assert_array_equal, moved.memory, found.memory)


@for_every_recipe
def test_permuted_prompts_are_permuted_results(recipe):
    """L24."""
    own, (rows, chance, found) = path(recipe), walked(recipe)
    order = np.arange(len(own.ids))[::-1]
    explored = None
    if own.explored:
        known = jax.tree.map(lambda leaf: leaf[order], own.explored["known"])
        explored = own.explored | {"known": known}
    prompt = order[rows.prompt].astype(np.int32)
    moved = own(rows.but(prompt=prompt, judge=prompt), own.ids[order], explored)
    np.testing.assert_array_equal(moved.outcome, found.outcome[:, order])
    np.testing.assert_array_equal(moved.history, found.history[:, order])
    np.testing.assert_array_equal(moved.updates, found.updates)
    jax.tree.map(close, moved.memory, found.memory)
    chooses, first = own.config.downsample, option(own.config.downsample, "first")
    if chooses is downsample.none or first:
        close(moved.credit, found.credit[:, order])
        close(moved.change, found.change, atol=2e-6)
    else:  # each place of the batch has lots of its own; labels decide how many
        by_size = np.sort(moved.credit, -1), np.sort(found.credit[:, order], -1)
        close(*by_size)
        mean, want = expected_change(recipe, chance, moved.change)
        close(mean, want, rtol=1e-5, atol=1e-6)


@pytest.mark.first(1)
@pytest.mark.parametrize("recipe", ["rloo", "neyman", "gvm_raft_exact"])
def test_a_row_graded_as_another_prompt_is_noticed(recipe):
    """P3: the law fails, and the counts of rows named wrongly do not add up.

    So misaligned are the rows of released trainers as soon as counts differ: they are
    graded in the order of equal shares.
    """
    own, (rows, chance, found) = path(recipe), walked(recipe)
    equal = np.int32(np.arange(rows.prompt.shape[-1]) % len(own.ids))
    equal = np.broadcast_to(equal, rows.prompt.shape)
    wrong = own(rows.but(judge=equal))
    assert (wrong.outcome != found.outcome).any()
    mean, want = expected_change(recipe, chance, wrong.change)
    assert np.abs(mean - want).max() > 0.05 * np.abs(want).max()

    counts = own.counts()

    def counted(rows):
        """`[S, B]`: how many rows each prompt has in the grid."""
        return np.isfinite(own(rows).outcome).sum(-1)

    np.testing.assert_array_equal(
        counted(rows), np.broadcast_to(counts, (len(chance), 2))
    )
    renamed = rows.prompt.copy()
    renamed[:, [0, -1]] = renamed[:, [-1, 0]]
    assert (counted(rows.but(prompt=renamed)) != counts).any(-1).all()


def possible(own):
    """Draws of prompts 0 and 2 that the sampler can make, and their chances."""
    own.ids = np.array([0, 2], np.int32)
    rows, chance = own.listed()
    return rows.taken(chance > 0), chance[chance > 0]


def expectations(own, rows, chance, found):
    """E[change]; of each prompt its number, its p under mu, w(p), and E[C-]."""
    mean = np.einsum("s,spa->pa", chance, np.float64(found.change))
    shape = found.credit.shape[1:]
    right = gridded(rows, RIGHT[own.ids[rows.prompt], rows.tokens], shape, False)
    c = np.float64(found.credit) / own.parts.train_rows
    of_each, mu = [], own.drawn_from()
    for b, i in enumerate(own.ids):
        p = mu[i] @ RIGHT[i]
        minus = chance @ np.where(right[:, b], 0, c[:, b]).sum(-1)
        of_each.append((i, p, chance @ sides(c[:, b], right[:, b], p), minus))
    return mean, of_each


@pytest.mark.first(1)
@pytest.mark.parametrize("estimate", [advantage.raw, advantage.leave_one_out])
def test_of_truncated_draws_weights_give_the_part_that_is_inside(estimate):
    """Truncation: w(p) grad pi(right, S) + E[C-] / (1 - p) grad pi(S).

    With one token, sequences and tokens are the same.
    """
    sampling = replace(
        tabular("rloo").sampling, top_k=2, off_policy=off_policy.truncated_ratio
    )
    own = Path("rloo", sampling=sampling, advantage=estimate)
    rows, chance = possible(own)
    found, mu = own(rows), own.drawn_from()
    mean, of_each = expectations(own, rows, chance, found)
    for i, p, w, minus in of_each:
        assert 0.1 < p < 0.9
        kept, scores = mu[i] > 0, np.eye(ACTIONS) - POLICY[i]
        of_right, of_kept = (
            (POLICY[i] * side) @ scores for side in (RIGHT[i] & kept, kept)
        )
        want = w * of_right + minus / (1 - p) * of_kept
        close(mean[i], want, rtol=1e-5, atol=1e-6)
    mass = np.where(mu > 0, POLICY, 0).sum(-1)[own.ids[rows.prompt]]
    close(found.metrics["off_policy/weight_mean"], mass.mean(-1), rtol=1e-5)
    close(found.metrics["off_policy/weight_max"], mass.max(-1), rtol=1e-5)
    assert not found.metrics["off_policy/cut_fraction"].any()


@pytest.mark.first(1)
@pytest.mark.parametrize("estimate", [advantage.raw, advantage.leave_one_out])
def test_of_replayed_draws_the_update_is_w_grad_p_of_what_is_drawn(estimate):
    """Replay: L1 of mu, what is cut off held fixed; nothing is left to correct.

    A KL has no gradient where the policy is the reference, which is cut like it.
    """
    sampling = replace(tabular("rloo").sampling, top_k=2, replay_support=True)
    kl = KL(estimator=loss.k3, coefficient=0.5)
    own = Path("rloo", sampling=sampling, advantage=estimate, kl=kl)
    rows, chance = possible(own)
    found, mu = own(rows), own.drawn_from()
    mean, of_each = expectations(own, rows, chance, found)
    for i, p, w, _ in of_each:
        slope = mu[i] * (RIGHT[i] - p)
        assert np.abs(slope).max() > 0.1
        close(mean[i], w * slope, rtol=1e-5, atol=1e-6)
    assert not found.metrics


LAG = np.random.default_rng(11).normal(size=LOGITS.shape)  # of the sampler's logits


def lagging(rule, *, bypass=False, **changes):
    """Steps of a recipe whose sampler lags: path, rows, their chances, what became."""
    update = Update(clip_norm=np.inf, behaviour_as_old=bypass)
    sampling = replace(tabular("rloo").sampling, off_policy=rule)
    own = Path("rloo", lag=LAG, sampling=sampling, update=update, **changes)
    rows, chance = possible(own)
    return own, rows, chance, own(rows)


def pulled(own, rows, found, factor):
    """`[S, B, A]`: sum over rows of factor `[S, M]` times credit times score."""
    used, credit, which = (found.trained[k] for k in ("used", "credit", "row"))
    prompt, token = (
        np.take_along_axis(np.asarray(x), which, -1) for x in (rows.prompt, rows.tokens)
    )
    score = np.eye(ACTIONS)[token] - POLICY[own.ids[prompt]]
    at = np.eye(PROMPTS)[own.ids[prompt]]
    weight = np.where(used, factor(own.ids[prompt], token) * np.float64(credit), 0)
    return np.einsum("sm,smp,sma->spa", weight, at, score) / own.parts.train_rows


@pytest.mark.first(1)
@pytest.mark.parametrize("estimate", [advantage.raw, advantage.leave_one_out])
def test_of_lagging_draws_ratios_give_the_gradient_of_the_policy(estimate):
    """Lag: w(p) grad p of the policy, p the pass rate of what drew; and what is told.

    With one token, sequences and tokens are the same.
    """
    own, rows, chance, found = lagging(off_policy.ratio, advantage=estimate)
    mu = own.drawn_from()
    mean, of_each = expectations(own, rows, chance, found)
    for i, p, w, _ in of_each:
        assert abs(p - RATES[i]) > 0.05
        close(mean[i], w * GRAD_P[i], rtol=1e-5, atol=1e-6)
    told = {name.removeprefix("off_policy/"): v for name, v in found.metrics.items()}
    close(chance @ told["ratio_mean"], 1, rtol=1e-5)
    square = ((POLICY - mu) ** 2 / mu).sum(-1)[own.ids]
    close(chance @ told["chi_square"], square.mean(), rtol=1e-4)
    gap = (mu * np.log(mu / POLICY)).sum(-1)[own.ids]
    close(chance @ told["perplexity_gap_nats"], gap.mean(), rtol=1e-4)
    for name in ("ratio_mean", "ratio_max", "effective_fraction", "chi_square"):
        np.testing.assert_array_equal(told[f"engine_{name}"], told[name])
    assert not any("truncation" in name for name in told)
    close(told["weight_effective_fraction"], told["effective_fraction"], rtol=1e-5)
    assert not told["cut_fraction"].any()


@pytest.mark.long
def test_of_lagging_and_truncated_draws_both_causes_are_told_apart():
    """Lag: log pi - log mu is what truncation does and what is left."""
    cut = replace(tabular("rloo").sampling, top_k=2, off_policy=off_policy.ratio)
    own = Path("rloo", lag=LAG, sampling=cut)
    rows, chance = own.listed()
    possible = chance > 0
    rows = rows.taken(possible)
    told, mu = own(rows).metrics, own.drawn_from()
    whole = np.exp(np.float64(own.sampler))
    whole /= whole.sum(-1, keepdims=True)
    i = own.ids[rows.prompt], rows.tokens
    for cause, rho in (
        ("", POLICY[i] / mu[i]),
        ("truncation_", whole[i] / mu[i]),
        ("engine_", POLICY[i] / whole[i]),
    ):
        close(told[f"off_policy/{cause}ratio_mean"], rho.mean(-1), rtol=1e-4)
        close(told[f"off_policy/{cause}ratio_max"], rho.max(-1), rtol=1e-4)
        gap = -np.log(rho).mean(-1)
        close(told[f"off_policy/{cause}perplexity_gap_nats"], gap, rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("inside", [False, True])
def test_normalised_weights_are_those_of_all_rows_of_an_update(inside):
    """Lag: w / mean w over the rows that train, in however many micro-batches."""
    rule = partial(off_policy.self_normalised, weigh=off_policy.ratio)
    if inside:  # of a rule that drops nothing
        wide = {"by": "token", "low": 0.0, "high": 1e9}
        rule = partial(off_policy.rejected, weigh=rule, **wide)
    own, rows, _, found = lagging(rule)
    mu = own.drawn_from()

    def factor(prompt, token):
        rho = POLICY[prompt, token] / mu[prompt, token]
        used = found.trained["used"]
        return rho / np.mean(rho, -1, where=used, keepdims=True)

    assert found.trained["used"].all()
    close(found.change, pulled(own, rows, found, factor), rtol=1e-4, atol=1e-6)
    close(found.metrics["off_policy/weight_mean"], 1, rtol=1e-5)
    assert not found.metrics["off_policy/cut_fraction"].any()
    own.config = override(own.config, {"update.micro_batches": 2})
    own.parts = build(own.config)
    own.compiled = jax.jit(jax.vmap(own.step, in_axes=(None, None, 0)))
    close(own(rows).change, found.change, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_bypass_clips_the_ratio_over_what_was_drawn_from():
    """Decoupled: in the first update already, where decoupled clipping never binds."""
    own, rows, _, found = lagging(
        None, bypass=True, loss=partial(loss.clipped_ratio, low=0.2, high=0.3)
    )
    mu = own.drawn_from()

    def factor(prompt, token):
        rho = POLICY[prompt, token] / mu[prompt, token]
        credit = found.trained["credit"]
        silent = np.where(credit > 0, rho > 1.3, rho < 0.8)
        return np.where(silent, 0, rho)

    want = pulled(own, rows, found, factor)
    close(found.change, want, rtol=1e-4, atol=1e-6)
    plain = pulled(own, rows, found, lambda i, a: POLICY[i, a] / mu[i, a])
    assert np.abs(plain - want).max() > 0.01
    assert {"off_policy/engine_ratio_max"} <= {*found.metrics}
    assert "off_policy/weight_mean" not in found.metrics


# ----- what an allocation may change, and what may change it


@pytest.mark.long
def test_the_number_of_updates_does_not_depend_on_the_allocation():
    """L24: nor how many rows train. All completions are right: all have credit."""
    own = Path("gvm_raft_published", update=Update(minibatches=2, epochs=3))
    shares = [(n, 6 - n) for n in range(2, 5)]
    assert own.parts.train_rows == 6
    requests = [allocate.rows_to_draw(jnp.array(share), rows=6) for share in shares]
    prompt, member = (
        np.array([getattr(asked, name) for asked in requests])
        for name in ("prompt", "member")
    )
    right = RIGHT[own.ids].argmax(-1).astype(np.int32)
    found = own(Rows(right[prompt], prompt, member, np.True_))
    np.testing.assert_array_equal(found.updates, 2 * 3)
    np.testing.assert_array_equal(found.trained["used"].sum(-1), 6)
    np.testing.assert_array_equal(found.keep.sum(-1), shares)


@pytest.mark.first(1)
@pytest.mark.parametrize("recipe", ["ada_est_published", "gvm_raft_exact"])
def test_a_prompt_is_allotted_completions_by_earlier_ones_alone(recipe):
    """L23: turning round every outcome of a step leaves the counts of that step."""
    config, numbers = tabular(recipe), {"main": 12, "pilot": 8}
    sizes = {"sampling.prompts": PROMPTS, "sampling.group_size": 6}
    sizes["sampling.budget"] = numbers["main"]
    if config.pilot:
        sizes |= {"pilot.draws": 2, "pilot.norm": score.logits}
        sizes["sampling.budget"] += numbers["pilot"]
    config = override(config, sizes)
    parts = build(config)
    assert parts.rows == numbers["main"]

    @jax.jit
    def step(state, turned):
        """`turned`: whose outcomes are turned round; their number tells them apart."""

        def verify(target, tokens, mask):
            outcome = parts.task.verify(target, tokens, mask)
            for kind, number in numbers.items():
                if len(tokens) == number:
                    outcome = jnp.where(turned[kind], 1 - outcome, outcome)
            return outcome

        other = replace(parts, task=replace(parts.task, verify=verify))
        state, (_, shown) = one_step(drivers.Traced(), other, state)
        return state, jnp.isfinite(shown.outcome).sum(-1), shown.outcome

    def taken(state, main=False, pilot=False):
        state, counts, outcome = step(state, {"main": main, "pilot": pilot})
        return state, np.asarray(counts), np.asarray(outcome)

    first = start(parts)
    plain, counts, outcome = taken(first)
    turned, same, opposite = taken(first, main=True)
    assert counts.sum() == 12
    assert np.ptp(counts) > 0
    np.testing.assert_array_equal(same, counts)
    np.testing.assert_array_equal(opposite, 1 - outcome)
    if config.pilot:
        assert (taken(first, pilot=True)[1] != counts).any()
    else:  # what it has learnt of them counts in the next step
        assert (taken(plain)[1] != taken(turned)[1]).any()
