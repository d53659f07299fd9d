"""Hints in the loops: which groups are drawn again, and what becomes of the rest.

The search is walked with completions made up, so that every case is met, against the
same told naively; then with a policy that samples, in both loops. The verifier of these
is luck: a quarter is right, and no warm start is needed.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contracts import close, equal, same_rows, sides
from test_law import STATEMENTS

from curax import hint, rollout, update
from curax import memory as memories
from curax.arrays import metrics
from curax.arrays.keys import stage_key
from curax.config import ConfigError, Writing, load, override
from curax.runs import checkpoint, run
from curax.step import draw, drivers, loops, optimise, states, validation
from curax.step.build import build
from curax.step.learn import compute_credit, learn
from curax.step.methods import hint_sources, hints
from curax.step.types import Graded
from curax.tasks import chain
from curax.types import HintMemory, Model, Rollouts

CONFIGS = Path(__file__).parents[1] / "configs"
B, G, L, DEPTH, T = 4, 4, 3, 4, 3
WIDTH = DEPTH + 1  # of a hint
TIMES = 6  # steps
NUMBER = 8  # prompts to train on: each comes back in the second step after


def task(*, on_device=True, luck=4):
    """Chains with hints; a completion is right by its first token."""
    strict = chain.task(
        depth=DEPTH, num_prompts=NUMBER, num_held_out=32, hints=True, levels=L
    )

    def verify(target, tokens, mask):
        return (tokens[:, 0] % luck == 0).astype(jnp.float32)

    def verify_one(target, tokens):
        return float(tokens[0] % luck == 0)

    how = verify if on_device else verify_one
    return replace(strict, verify=how, on_device=on_device)


def model(*, vocab_size):
    """One layer that looks at all tokens alike: quick to compile, and it sees hints."""

    def init(key):
        return {"embed": jax.random.normal(key, (vocab_size, 8))}

    def features(params, tokens, positions, seen, cache=None, column=None):
        own = params["embed"][tokens]
        value = own[:, None]  # [N, 1, Q, D]
        looks = seen[:, None]
        if column is None:
            past = [] if cache is None else [cache]
            value = jnp.concatenate([*past, value], 2)
            last = value.shape[2] - tokens.shape[1] + jnp.arange(tokens.shape[1])
            before = jnp.arange(value.shape[2])[None] <= last[:, None]
            looks = looks & before[None]
        else:
            value = jax.lax.dynamic_update_slice_in_dim(cache, value, column, 2)
        looks = looks.astype(jnp.float32)
        number = jnp.maximum(jnp.sum(looks, -1, keepdims=True), 1.0)
        mean = looks @ value[:, 0] / number
        angle = positions[..., None].astype(jnp.float32)
        return jnp.tanh(own + 2 * mean) + 0.3 * jnp.sin(angle), value

    return Model(
        init=init,
        features=features,
        head=lambda params: 0.5 * params["embed"],
        axes={"embed": ("vocab", "embed")},
    )


@cache
def shrunk(recipe):
    """The recipe at sizes of a moment."""
    config = replace(
        load(CONFIGS / f"{recipe}.py"),
        task=task,
        model=model,
        warm_start=None,
        optimizer=partial(optax.adam, learning_rate=1e-2, eps=1e-3),
    )
    sizes = {
        "sampling.prompts": B,
        "sampling.group_size": G,
        "sampling.max_tokens": T,
        "aggregate.length": T,
        "hint.levels": L,
        "hint.width": WIDTH,
        "hint.most": 1.0,
        "evaluation.prompts": 8,
        "evaluation.samples": 2,
        "logging.every": TIMES,
        "logging.rollout_prompts": B,
    }
    if config.stop:
        sizes |= {"stop.round_size": 2, "downsample.m": 2, "correct.rows": 2}
    return override(config, sizes)


# ----- the search, with completions made up

PROMPTS = chain.task(depth=DEPTH, hints=True).prompts(jnp.arange(4, 4 + B))
LENGTH = np.asarray(PROMPTS.target[:, :-1] < chain.MODULUS).sum(-1)


def said(length):
    """Values of the solution that the hints say, by level; 0: there is none."""
    counts = [max(1, round(level * length / (L + 1))) for level in range(1, L + 1)]
    return [count if count < length else 0 for count in counts]


SAID = np.array([said(n) for n in LENGTH])  # [B, L]
ALL_IDS = chain.task(depth=DEPTH, hints=True).prompts(jnp.arange(NUMBER))
SAID_OF = np.array(
    [said(n) for n in np.asarray(ALL_IDS.target[:, :-1] < chain.MODULUS).sum(-1)]
)  # [NUMBER, L]


def test_prompts_with_hints_of_all_levels_and_of_none_are_among_these():
    assert {0, 2, 3} <= set((SAID > 0).sum(-1).tolist())


def at(place, tree):
    """Entries of all leaves."""
    return jax.tree.map(lambda leaf: leaf[place], tree)


def made_up(level, wanted, exists, order):
    """Rows of a draw: each names its level, prompt and member."""
    prompt, member = order // G, order % G
    name = (level * 100 + prompt * 10 + member).astype(jnp.int32)
    there = wanted[prompt] & exists[prompt, member]
    grid = jnp.broadcast_to(name[:, None], (B * G, T))
    value = grid.astype(jnp.float32)
    return Rollouts(
        tokens=grid,
        mask=there[:, None] & (jnp.arange(T)[None] <= (name % T)[:, None]),
        logp_behaviour=-value,
        logp_policy=-value,
        entropy=value,
        score_sq_norm=value / 1000,
        finished=name % 2 == 0,
        prompt=prompt,
        member=member,
        context=prompt,
        exists=there,
    )


class MadeUp(drivers.Traced):
    """Nothing is sampled: completions and outcomes of a level are those given."""

    def __init__(self, outcome, exists, orders):
        """`[L + 1, B, G]` outcomes, and which exist; `[L + 1, B G]` orders of rows."""
        self.outcome, self.exists, self.orders = outcome, exists, orders

    def draw_and_grade(self, parts, state, request):
        asked, there = request.rows.prompt, request.rows.exists
        wanted = jnp.zeros(B, bool).at[asked].max(there)
        level = jnp.max(request.level, where=wanted, initial=0)
        order = self.orders[level]
        rows = made_up(level, wanted, self.exists[level], order)
        outcome = self.outcome[level][rows.prompt, rows.member]
        return Graded.of(request, rows, outcome)


@cache
def walker(recipe):
    """Compiled and mapped over steps: the search of a recipe on outcomes by level."""
    unhinted = HintMemory(
        level=jnp.zeros(NUMBER, jnp.int32), hinted=jnp.zeros(NUMBER, bool)
    )
    state: Any = SimpleNamespace(
        seed=jnp.uint32(0), step=jnp.int32(0), methods={hints.NAME: unhinted}
    )

    def walk(outcome, exists, orders, most):
        config = override(shrunk(recipe), {"hint.most": most})
        parts, drive = build(config), MadeUp(outcome, exists, orders)
        memory = memories.forget(NUMBER)
        request = draw.ask(parts, state, memory, PROMPTS, jnp.int32(0))
        request = draw.allocated(parts, request)
        graded = drive.draw_and_grade(parts, state, request)
        first = draw.collect(parts, request, graded, None)
        drawn = hints.after_draw(drive, parts, state, first)
        seen = drawn.groups
        return {
            "drawn": drawn,
            "first": first,
            "level": drawn.level,
            "outcome": jnp.where(seen.exists, seen.outcome, jnp.nan),
            "arrays": (seen.outcome, seen.exists, seen.finished, drawn.known.pass_rate),
            "tokens": drawn.rollouts.tokens.at[seen.row].get(
                mode="fill", fill_value=-1
            ),
            "metrics": metrics.finish(drawn.tally),
            "memory": drawn.memory,
        }

    return jax.jit(jax.vmap(walk, in_axes=(0, 0, 0, None)))


STEPS = 64  # at a time: one program for all tests


def walked(outcome, exists=True, orders=None, recipe="sage", most=1.0):
    """What becomes of `[S, L + 1, B, G]` outcomes, NaN where missing; S at most 64."""
    outcome = np.asarray(outcome, np.float32)
    exists = np.broadcast_to(exists, outcome.shape)
    if orders is None:
        orders = np.broadcast_to(np.arange(B * G), (*outcome.shape[:2], B * G))
    arrays = (outcome, exists, np.int32(orders))
    arrays = [np.resize(array, (STEPS, *array.shape[1:])) for array in arrays]
    found = walker(recipe)(*arrays, np.float32(most))
    return SimpleNamespace(**jax.device_get(found))


def told(outcome, most=1.0):
    """The same for one step, told naively: levels, groups, and what was asked."""
    level, group = [0] * B, list(outcome[0])
    asked = dict.fromkeys(range(1, L + 1), 0)
    opened = dict.fromkeys(asked, 0)
    missing = 0

    def counts(group):
        return (~np.isnan(group)).sum(), np.nansum(group)

    def chance(group):
        n, right = counts(group)
        p = right / max(n, 1)
        return 1 - p**G - (1 - p) ** G

    collapsed = [b for b in range(B) if counts(group[b])[0] and not counts(group[b])[1]]
    for b in collapsed[: int(most * B)]:
        missing += (SAID[b] == 0).sum()
        for k in range(1, L + 1):
            if not SAID[b, k - 1]:
                continue
            asked[k] += 1
            new = outcome[k][b]
            n, right = counts(new)
            if n and chance(new) >= chance(group[b]) - 1e-9:
                level[b], group[b] = k, new
            if not n or right:
                opened[k] += 1
                break
    return level, np.array(group), asked, opened, missing


@cache
def assigning(recipe):
    credit = partial(compute_credit, shrunk(recipe), jax.random.key(0))
    return jax.jit(jax.vmap(credit))


def credited(got, recipe):
    """`[S, B, G]` credit of what was walked."""
    outcome, *rest = got.arrays
    return np.asarray(assigning(recipe)(outcome, outcome, *rest).credit, float)


GROUPS = np.array(
    [(0, 0, 0, 0)] * 4
    + [(1, 0, 0, 0), (0, 1, 1, 0), (1, 1, 1, 1), (0, 1, 1, 1)]
    + [(np.nan,) * 4, (np.nan, 0, 0, 0), (np.nan, 1, 1, 0)],
    np.float32,
)


@pytest.mark.first(1)
@pytest.mark.parametrize("most", [1.0, 0.5])
def test_the_search_is_the_algorithm_told_naively(most):
    """SAGE 4, SAGE 8: whole groups, levels in their order, and no more than needed."""
    random = np.random.default_rng(0)
    outcome = GROUPS[random.integers(0, len(GROUPS), (STEPS, L + 1, B))]
    order = random.random((STEPS, L + 1, B * G)).argsort(-1)
    plain = walked(outcome, most=most)
    moved = walked(outcome, orders=order, most=most)
    for i, step in enumerate(outcome):
        level, group, asked, opened, missing = told(step, most)
        b, member = np.arange(B)[:, None], np.arange(G)
        for got in (plain, moved):
            np.testing.assert_array_equal(got.level[i], level)
            np.testing.assert_array_equal(got.outcome[i], group)
            # Every completion of a group is of one draw, that of its level.
            name = np.array(level)[:, None] * 100 + b * 10 + member
            np.testing.assert_array_equal(got.tokens[i, ..., 0], name)
            told_ = {name: value[i] for name, value in got.metrics.items()}
            for k in range(1, L + 1):
                assert told_[f"hint/asked_{k}"] == asked[k]
                assert told_[f"hint/opened_{k}"] == opened[k]
            again = G * sum(asked.values())
            assert told_["rollout/drawn"] == B * G + again
            assert told_["hint/missing"] + told_["hint/leaked"] == missing
            # Outcomes under hints are no outcomes of the prompt.
            close(told_["outcome/mean"], np.nanmean(step[0]))
            draws = (~np.isnan(step[0])).sum(-1)
            np.testing.assert_array_equal(got.memory.draws[i][PROMPTS.id], draws)
            right = np.nansum(step[0], -1)
            np.testing.assert_array_equal(got.memory.solved[i][PROMPTS.id], right)
    np.testing.assert_array_equal(credited(plain, "sage"), credited(moved, "sage"))


def test_every_row_and_context_of_a_group_comes_from_the_draw_of_its_level():
    """SAGE 1, SAGE 4: all leaves; prompts that were not asked are left, bit for bit."""
    no, yes = [0] * G, [1, 0, 0, 1]
    outcome = np.array([[[no, no, yes, no], *[[no, yes, no, no]] * L]], np.float32)
    got = walked(outcome)
    level = got.level[0]
    last = [max(np.flatnonzero(SAID[b]) + 1, default=0) for b in range(B)]
    np.testing.assert_array_equal(level, [last[0], SAID[1, 0] > 0, 0, last[3]])
    drawn, first = at(0, got.drawn), at(0, got.first)
    tokens, mask = chain.solution(PROMPTS)
    for b in range(B):
        says = SAID[b, level[b] - 1] if level[b] else 0
        head = np.asarray(mask[b]) & (np.arange(DEPTH) < says)
        block = chain.wrap(tokens[b], jnp.asarray(head), depth=DEPTH)
        want = hint.joined(at(slice(b, b + 1), PROMPTS), *(x[None] for x in block))
        equal(at(0, want), at(b, drawn.contexts))
        rows = made_up(
            level[b], jnp.ones(B, bool), jnp.ones((B, G), bool), jnp.arange(B * G)
        )
        mine = np.arange(B * G) // G == b
        equal(at(mine, drawn.rollouts), at(mine, rows))
        if not level[b]:
            equal(at(b, drawn.contexts), at(b, first.contexts))
            equal(*(at(b, x.outcome.reshape(B, G)) for x in (drawn, first)))
    for name in ("known", "attempts", "memory", "prompts"):
        equal(getattr(drawn, name), getattr(first, name))


@pytest.mark.long
def test_a_pool_that_stopped_early_gives_all_its_places_to_a_longer_one():
    b = int(np.flatnonzero((SAID > 0).all(-1))[0])
    outcome = np.zeros((1, L + 1, B, G), np.float32)
    exists = np.ones(outcome.shape, bool)
    exists[0, 0, b, 2:] = False
    outcome[0, 1, b, 2:] = 1
    got = walked(outcome, exists, recipe="ada_seq_sage")
    assert got.level[0, b] == 1
    np.testing.assert_array_equal(got.outcome[0, b], [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("most", "size", "want"), [(0.5, 4, 2), (0.3, 10, 3), (0.24, 4, 0), (1.0, 3, 3)]
)
def test_the_first_prompts_are_hinted_as_many_as_may_be(most, size, want):
    everyone = np.ones(size, bool)
    got = np.asarray(hints.limit(jnp.asarray(everyone), most))
    np.testing.assert_array_equal(got, np.arange(size) < want)
    some = np.arange(size) % 2 == 1
    got = np.asarray(hints.limit(jnp.asarray(some), most))
    np.testing.assert_array_equal(np.flatnonzero(got), np.flatnonzero(some)[:want])


# ----- what that does to the objective

RATES = np.array([0.07, 0.4, 0.2, 0.9])  # without a hint, and under each level


def sequences(recipe):
    """All labels of a group and the draws that exist of it."""
    labels = np.array(list(product([0.0, 1.0], repeat=G)), np.float32)
    exists = np.ones(labels.shape, bool)
    if recipe == "ada_seq_sage":  # rounds of 2
        exists[:, 2:] = ~labels[:, :2].any(-1, keepdims=True)
    return labels, exists


@pytest.mark.parametrize("recipe", ["sage", "sage_exact", "ada_seq_sage"])
def test_every_level_adds_its_own_gradient_and_takes_nothing_from_others(recipe):
    """SAGE 3: over all labels of all levels.

    Groups without a right one are replaced and have had no part in the update, so that
    the part of a level, once it is reached, is the w of the docstring at its own p; and
    that of no hint is what it is without hints.
    """
    b = int(np.flatnonzero((SAID > 0).all(-1))[0])
    labels, exists = sequences(recipe)
    parts = build(shrunk(recipe))
    # A level is looked at when those before are all wrong; there is one such sequence.
    outcome = np.zeros((L + 1, len(labels), L + 1, B, G), np.float32)
    there = np.ones(outcome.shape, bool)
    for k in range(L + 1):
        outcome[k, :, k, b] = labels
        there[k, :, k, b] = exists
        outcome[k, :, k + 1 :, b, 0] = 1  # no further than the next
    flat = (-1, L + 1, B, G)
    stops = "ada_seq_sage" if parts.config.stop else "sage"
    got = walked(outcome.reshape(flat), there.reshape(flat), recipe=stops)
    level, credit = got.level[:, b], credited(got, recipe)[:, b]
    credit = credit.reshape(L + 1, len(labels), G) / (parts.train_rows / B)
    level = level.reshape(L + 1, len(labels))
    at = partial(SimpleNamespace, n=G, q=0.5, config=parts.config)
    for k, p in enumerate(RATES):
        right = labels.any(-1)
        np.testing.assert_array_equal(level[k][right], k)
        np.testing.assert_array_equal(level[k][~right], min(k + 1, L))
        chance = np.where(labels == 1, p, 1 - p).prod(-1)
        own = np.where(right[:, None], credit[k], 0.0)
        if k == L:
            assert not credit[k][~right].any()
        part = chance @ sides(own, labels, p)
        close(part, STATEMENTS[recipe][1](at(p=p)))


# ----- with a policy that samples


class Told(drivers.Hosted):
    """A driver that writes down what it draws, and can be told the outcomes."""

    def __init__(self, like, own):
        """Programs of another loop that are no different are not compiled again."""
        super().__init__()
        self._like, self._own = like, own
        if like:
            self._jitted = like.drive._jitted
        self.script: list[Any] | None = None
        self.draws: list[Any] = []
        self.learnt: Any = None

    def call(self, function, parts, *args):
        if self._like and function not in self._own:
            parts = self._like.parts
        return super().call(function, parts, *args)

    def finish(self, function, parts, *args):
        """Nothing is donated."""
        self.learnt = jax.device_get(args[1])
        return self.call(function, parts, *args)

    def draw_and_grade(self, parts, state, request):
        graded = super().draw_and_grade(parts, state, request)
        drawn = request.prompts, request.contexts, graded.rollouts
        self.draws.append(jax.device_get(drawn))
        if self.script is None:
            return graded
        rows = self.draws[-1][2]
        grid = np.asarray(self.script[len(self.draws) - 1], np.float32)
        return replace(graded, outcome=jnp.asarray(grid[rows.prompt, rows.member]))


class Scripted(loops.Staged):
    """A staged loop with such a driver."""

    def __init__(self, config, like=None, own=(learn,)):
        """Functions in `own` give something else than those of the other loop."""
        super().__init__(build(config))
        self.drive = self._drive = Told(like, own)
        if like:
            self._initial = like._initial
        if like and states.begin not in own:
            self._begin = like._begin

    def step(self, state, script=None):
        """A step; its outcomes by draw `[B, G]`, or those of the verifier."""
        self.drive.script, self.drive.draws = script, []
        state, (row,), (shown,) = self.advance(state, 1)
        return state, row, shown

    @property
    def draws(self):
        """Prompts, contexts and rollouts of all draws of the last step."""
        return self.drive.draws

    @property
    def drawn(self):
        """What was learnt from."""
        return self.drive.learnt


def begun(loop):
    """The first state of a loop."""
    with loop.context():
        return loop.begin(loop.initial())


@cache
def scripted(recipe="sage"):
    like = None if recipe == "sage" else scripted()
    return Scripted(shrunk(recipe), like)


NO, MIXED, ALL = [0.0] * G, [1.0, 0, 0, 1], [1.0] * G


def prompts_of(loop, state):
    """The next prompts."""
    drive, parts = loop.drive, loop.parts
    ids = drive.call(draw.next_ids, parts, state, jnp.int32(0))
    return drive.call(draw.prompts_of, parts, ids)


def hints_of(loop, prompts):
    """`[B, L]` bool: hints that prompts have."""
    args = loop.parts, begun(loop), prompts, jnp.ones(B, bool)
    made, lost = hint_sources.make(loop.drive, *args)
    return np.asarray(made.mask.any(-1)), jax.device_get(lost)


@pytest.mark.long
def test_a_batch_of_mixed_groups_is_that_without_hints():
    """SAGE 1: all right ones too; nothing is drawn again, and nothing differs."""
    loop = scripted()
    state, row, _ = loop.step(begun(loop), [[MIXED, ALL, MIXED, ALL]])
    assert len(loop.draws) == 1
    drawn, (prompts, contexts, rollouts) = loop.drawn, loop.draws[0]
    equal(drawn.prompts, prompts)
    equal(drawn.contexts, contexts)
    equal(drawn.rollouts, rollouts)
    assert not drawn.level.any()
    assert row["hint/hinted_fraction"] == 0
    assert row["rollout/drawn"] == B * G
    assert not state.methods["hints"].hinted.any()


def nothing(hinting, prompts, *, levels, written=None):
    """A source that has nothing to say."""
    tokens, mask = hint.reference_prefix(hinting, prompts, levels=levels, written=None)
    return tokens, jnp.zeros_like(mask)


def test_without_hints_to_give_the_update_is_that_of_the_recipe_without():
    """SAGE 2: from the same completions, in contexts padded wider; and it is told."""
    empty = override(shrunk("sage"), {"hint.source": nothing})
    loops_ = [
        Scripted(empty, scripted(), (hint_sources.read,)),
        Scripted(replace(shrunk("sage"), hint=None)),
    ]
    script = [[NO, MIXED, NO, MIXED]]
    (got, row, _), (want, bare, _) = (loop.step(begun(loop), script) for loop in loops_)
    tokens = [loop.drawn.rollouts.tokens for loop in loops_]
    np.testing.assert_array_equal(*tokens)
    jax.tree.map(partial(close, atol=1e-6), got.params, want.params)
    moved = jax.tree.map(
        lambda a, b: np.abs(a - b).max(), got.params, begun(loops_[0]).params
    )
    assert max(jax.tree.leaves(moved)) > 1e-3
    assert row["hint/missing"] == 2 * L
    assert not any(row[f"hint/asked_{k}"] for k in range(1, L + 1))
    same_rows([row], [bare], rtol=1e-4, atol=1e-5)


def test_only_what_is_unresolved_is_drawn_and_log_probs_see_the_hint():
    """SAGE 5, SAGE 8: and a group under a hint is not the one that was drawn before."""
    loop = scripted()
    first = begun(loop)
    prompts = prompts_of(loop, first)
    some, _ = hints_of(loop, prompts)
    opens = [MIXED if some[b, 0] else NO for b in range(B)]
    state, row, _ = loop.step(first, [[NO] * B, opens, [NO] * B, [NO] * B])
    rows = [set(draw[2].prompt[draw[2].exists].tolist()) for draw in loop.draws]
    assert rows[0] == set(range(B))
    assert rows[1] == set(np.flatnonzero(some[:, 0]))
    left = ~some[:, 0]
    for k, asked in enumerate(rows[2:], 2):
        assert asked == set(np.flatnonzero(left & some[:, k - 1]))
    assert row["rollout/drawn"] == G * sum(map(len, rows))
    assert row["sampler/drift_nats"] < 1e-4
    drawn = loop.drawn
    hinted_ = drawn.level > 0
    assert hinted_.sum() >= 2
    np.testing.assert_array_equal(
        state.methods["hints"].hinted[drawn.prompts.id], hinted_
    )

    @jax.jit
    def trainer(contexts, rollouts):
        how = optimise.settings(loop.parts.config)
        mask, context = rollouts.mask, rollouts.context
        model = draw.policy(loop.parts, first)
        args = contexts, rollouts.tokens, mask, context, how
        return update.logprobs(model, first.params, *args)

    mine = drawn.rollouts.mask & hinted_[drawn.rollouts.prompt][:, None]
    with_hint = np.asarray(trainer(drawn.contexts, drawn.rollouts))
    close(with_hint[mine], drawn.rollouts.logp_policy[mine], rtol=0, atol=1e-4)
    stripped = hint.widened(drawn.prompts, WIDTH)
    without = np.asarray(trainer(stripped, drawn.rollouts))
    apart = np.abs(without - drawn.rollouts.logp_policy)
    assert apart[mine].max() > 0.05
    assert apart[drawn.rollouts.mask & ~mine].max(initial=0) < 1e-4
    # Noise of its own, and not the tokens of the group that was replaced.
    old, new = loop.draws[0][2], drawn.rollouts
    own = hinted_[new.prompt]
    assert (old.tokens[own] != new.tokens[own]).any()


def test_training_without_the_hint_follows_the_direct_formula():
    """SAGE 7: rho (R - b) grad log pi(y | x) of every group, hinted or not."""
    sgd = partial(optax.sgd, learning_rate=1.0)
    config = override(
        replace(shrunk("sage_exact"), optimizer=sgd), {"update.clip_norm": np.inf}
    )
    loop = Scripted(config, scripted(), (learn, states.begin))
    first = begun(loop)
    some, _ = hints_of(loop, prompts_of(loop, first))
    opens = [MIXED if there else NO for there in some[:, 0]]
    opens[0] = NO
    script = [[MIXED, NO, NO, NO], opens, [NO] * B, [NO] * B]
    state, row, _ = loop.step(first, script)
    assert row["sampler/drift_nats"] < 1e-4
    drawn = loop.drawn
    got = jax.tree.map(jnp.asarray, drawn.rollouts)  # log-probs with the hint
    assert (drawn.level > 0).any()
    assert (drawn.level == 0).any()
    reward = np.nan_to_num(drawn.outcome).reshape(B, G)
    others = (reward.sum(-1, keepdims=True) - reward) / (G - 1)
    advantage = jnp.asarray((reward - others).reshape(-1), jnp.float32)
    contexts = jax.tree.map(jnp.asarray, hint.none(drawn.prompts))

    @jax.jit
    @jax.grad
    def gradient(params):
        logp = update.logprobs(
            loop.parts.model,
            params,
            contexts,
            got.tokens,
            got.mask,
            got.context,
            optimise.settings(config),
        )
        logp = jnp.sum(logp, -1, where=got.mask)
        behaviour = jnp.sum(got.logp_behaviour, -1, where=got.mask)
        rho = jax.lax.stop_gradient(jnp.exp(logp - behaviour))
        return jnp.sum(rho * advantage * logp) / (B * G * T)

    want = gradient(first.params)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(want)) > 1e-3
    change = jax.tree.map(lambda new, old: new - old, state.params, first.params)
    jax.tree.map(partial(close, rtol=1e-3, atol=1e-6), change, want)


# ----- hints that the policy writes


WRITES = replace(
    shrunk("sage").hint, source=hint.self_written, writing=Writing(max_tokens=6)
)
WRITER = replace(shrunk("sage"), hint=WRITES)


def written(parts, state, contexts, todo, number):
    """What the policy writes at a try."""
    request = hint_sources.ask(parts, state, PROMPTS, contexts, todo, number)
    writer = hint_sources.writer_of(parts, state)
    return drivers.Traced().draw(parts, writer, request)


@pytest.mark.long
def test_writings_of_different_tries_have_noise_of_their_own():
    """They are not greedy, and a second try is not the first one again."""
    parts = build(WRITER)
    state = begun(scripted())
    contexts = parts.task.hinting.writing_contexts(PROMPTS)
    todo = jnp.array([True, False, True, True])
    write = jax.jit(partial(written, parts))
    one, again, two = (write(state, contexts, todo, jnp.int32(n)) for n in (0, 0, 1))
    np.testing.assert_array_equal(one.tokens, again.tokens)
    assert (one.tokens != two.tokens).any(-1)[np.asarray(one.exists)].all()
    assert set(np.asarray(one.prompt)[np.asarray(one.exists)]) == {0, 2, 3}
    later = write(replace(state, step=jnp.int32(1)), contexts, todo, jnp.int32(0))
    assert (one.tokens != later.tokens).any()
    key = jax.random.fold_in(stage_key(state.seed, state.step, "hint"), 0)
    other = draw.draw_key(state, jnp.int32(0))
    assert (jax.random.key_data(other) != jax.random.key_data(key)).any()


@pytest.mark.long
def test_hints_written_before_rl_are_those_of_the_first_policy_at_every_visit():
    how = load(CONFIGS / "sage_offline.py").hint.writing
    config = replace(WRITER, hint=replace(WRITES, writing=replace(how, max_tokens=6)))
    parts = build(config)
    assert states.refers(parts)
    assert not states.refers(build(WRITER))
    state = begun(scripted())
    state = replace(state, reference=state.params)
    later = jax.tree.map(lambda leaf: -leaf, state.params)
    later = replace(state, params=later, step=jnp.int32(7))
    contexts, todo = parts.task.hinting.writing_contexts(PROMPTS), jnp.ones(B, bool)
    write = jax.jit(partial(written, parts))
    first = write(state, contexts, todo, jnp.int32(0))
    np.testing.assert_array_equal(
        first.tokens, write(later, contexts, todo, jnp.int32(0)).tokens
    )
    other = write(replace(state, reference=later.params), contexts, todo, jnp.int32(0))
    assert (first.tokens != other.tokens).any()


@pytest.mark.long
def test_what_cannot_be_read_is_written_again_and_all_of_it_is_paid():
    state, wanted = begun(scripted()), jnp.array([True, True, True, False])
    steps = 16

    @jax.jit
    def make(tries):
        parts = build(override(WRITER, {"hint.writing.tries": tries}))

        def at(step):
            return hint_sources.make(
                drivers.Traced(), parts, replace(state, step=step), PROMPTS, wanted
            )

        return jax.vmap(at)(jnp.arange(steps))

    some, paid, lost = [], [], []
    for tries in (1, 2, 3):
        made, tally = jax.device_get(make(tries))
        some.append(made)
        counts = tally.counts
        np.testing.assert_array_equal(
            counts["rollout/tokens"], counts["hint/written_tokens"]
        )
        assert "rollout/drawn" not in counts
        assert not made.mask[:, 3].any()
        names = ("missing", "leaked", "overlong")
        reasons = sum(counts[f"hint/{name}"].sum() for name in names)
        assert reasons == steps * 3 * L - made.mask.any(-1).sum()
        paid.append(counts["hint/written_tokens"].sum())
        lost.append(counts["hint/missing"].sum())
    # What can be read stays as it is.
    for before, after in pairwise(some):
        there = before.mask.any((-2, -1))
        np.testing.assert_array_equal(before.tokens[there], after.tokens[there])
        np.testing.assert_array_equal(before.mask[there], after.mask[there])
    # So does the host, where prompts lie in files.
    parts = build(override(WRITER, {"hint.writing.tries": 3}))
    parts = replace(parts, task=replace(parts.task, in_files=True))
    given = jax.device_get((PROMPTS, wanted))
    by_host = hint_sources.make(drivers.Hosted(), parts, state, *given)
    of_device = jax.tree.map(lambda x: x[0], (made, tally))
    jax.tree.map(np.testing.assert_array_equal, by_host, of_device)
    assert lost[0] > lost[1] > 0
    assert lost[1] >= lost[2]
    assert paid[0] < paid[1] < paid[2]


def test_what_there_is_no_hint_of_is_counted_by_its_first_reason():
    loop = scripted()
    _, tally = jax.device_get(hints_of(loop, PROMPTS))
    unsaid = (SAID == 0).sum()
    assert tally.counts["hint/leaked"] == unsaid > 0
    assert tally.counts["hint/missing"] == tally.counts["hint/overlong"] == 0
    narrow = build(override(shrunk("sage"), {"hint.width": DEPTH}))
    make = jax.jit(partial(hint_sources.make, drivers.Traced(), narrow))
    made, tally = jax.device_get(make(begun(loop), PROMPTS, jnp.arange(B) < 2))
    assert not made.mask.any()
    assert tally.counts["hint/overlong"] == (SAID[:2] > 0).sum()
    assert tally.counts["hint/leaked"] == (SAID[:2] == 0).sum()


# ----- SAGE-light


@pytest.mark.long
def test_the_level_of_a_visit_is_set_by_the_one_before(tmp_path):
    """SAGE 9: and it is saved; a prompt whose hint is missing keeps it."""
    loop = scripted("sage_light")
    state, levels = begun(loop), np.zeros(NUMBER, int)
    random, reached = np.random.default_rng(3), set()
    draws = np.zeros(NUMBER)
    everything = jnp.arange(NUMBER)
    said_ = SAID_OF[np.asarray(everything)]
    for number in range(12):
        outcome = np.float32(random.random((B, G)) < random.random((B, 1)) ** 2)
        state, row, _ = loop.step(state, [outcome])
        assert len(loop.draws) == 1
        who = loop.drawn.prompts.id
        meant = levels[who]
        there = np.array(
            [k and said_[i, k - 1] > 0 for i, k in zip(who, meant, strict=True)], bool
        )
        np.testing.assert_array_equal(loop.drawn.level, np.where(there, meant, 0))
        reached |= set(loop.drawn.level.tolist())
        for b, i in enumerate(who):
            if meant[b] == 0 or there[b]:
                p = outcome[b].mean()
                levels[i] = np.clip(meant[b] + (p <= 0.1) - (p > 0.35), 0, L)
        np.testing.assert_array_equal(state.methods["hints"].level, levels)
        plain = loop.drawn.level == 0
        assert row["hint/hinted_fraction"] == (~plain).mean()
        for k in range(1, L + 1):
            assert row[f"hint/asked_{k}"] == (loop.drawn.level == k).sum()
        lost = row["hint/leaked"] + row["hint/missing"]
        assert lost == (said_[who][meant > 0] == 0).sum()
        close(
            row["hint/plain_pass_rate"],
            outcome[plain].mean() if plain.any() else np.nan,
        )
        if not plain.all():
            close(row["hint/pass_rate"], outcome[~plain].mean())
        for b, i in enumerate(who):
            if plain[b]:
                draws[i] = draws[i] * 0.5 ** (1 / 6.6) + G
        close(state.memory.draws, draws, rtol=1e-4)
        if number == 6:
            saved = checkpoint.Checkpoints(tmp_path / "saved", keep=1)
            saved.save(7, state, {})
            saved.wait()
            like = jax.eval_shape(lambda state=state: state)
            state, _ = saved.restore(7, like)
            saved.close()
    assert reached == {0, 1, 2, 3}
    assert any(levels[i] and not said_[i].any() for i in range(NUMBER))


# ----- evaluation


def test_no_evaluation_is_hinted(monkeypatch):
    """Its program is that of the recipe without hints, and its contexts prompts."""
    seen = []
    sample = rollout.sample

    def spy(model, params, contexts, *args, **options):
        seen.append(contexts.tokens.shape)
        return sample(model, params, contexts, *args, **options)

    monkeypatch.setattr(rollout, "sample", spy)
    texts = set()
    state = begun(scripted())
    for how in ("sage", "sage_light", None):
        config = shrunk(how or "sage")
        parts = build(config if how else replace(config, hint=None))
        for number in range(2):  # sampled, greedy

            def drawn(state, parts=parts, number=number):
                drive = drivers.Traced()
                asked = validation.requests(drive, parts, state.seed)
                return drive.draw(parts, state, asked[number])

            texts.add((number, str(jax.make_jaxpr(drawn)(state))))
    assert len(texts) == 2
    assert set(seen) == {(8, 2 * DEPTH + 2)}


# ----- loops


def trained(config, kind):
    """Parameters, state of hints and rows after a few steps."""
    loop = kind(build(config))
    with loop.context():
        state, rows, _ = loop.advance(begun(loop), TIMES)
    return jax.device_get((state.params, state.methods["hints"], state.memory)), rows


def assert_same(got, want):
    jax.tree.map(partial(close, rtol=1e-4, atol=1e-5), got[0], want[0])
    for mine, theirs in zip(got[1], want[1], strict=True):
        for name in theirs.keys() | mine.keys():
            if not name.startswith(("time/", "verify/")):
                close(mine[name], theirs[name], rtol=1e-3, atol=1e-4, err_msg=name)


@cache
def in_one_program(recipe):
    return trained(shrunk(recipe), loops.Jitted)


def by_hand(recipe):
    """Staged, by the programs of the scripted loop."""
    loop = scripted(recipe)
    state, rows = begun(loop), []
    for _ in range(TIMES):
        state, row, _ = loop.step(state)
        rows.append(row)
    return jax.device_get((state.params, state.methods["hints"], state.memory)), rows


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["sage", "sage_light"])
def test_both_loops_hint_alike(recipe):
    want = in_one_program(recipe)
    assert_same(by_hand(recipe), want)
    assert any(row["hint/hinted_fraction"] > 0 for row in want[1])
    moved = [row["update/count"] for row in want[1]]
    assert sum(moved) > 0


@pytest.mark.long
def test_pools_that_stop_between_rounds_of_the_host_are_hinted_alike():
    want = in_one_program("ada_seq_sage")
    host = override(shrunk("ada_seq_sage"), ["task.on_device=false"])
    assert_same(trained(host, loops.Staged), want)
    assert any(row["hint/hinted_fraction"] > 0 for row in want[1])
    assert all(row["group/draws"] < G for row in want[1])


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "config", [shrunk("sage_light"), WRITER], ids=["levels", "writings"]
)
def test_a_step_of_the_host_with_hints_is_rehearsed(config):
    """Without a number computed."""
    loops.Staged(build(config)).rehearse()


# ----- what cannot be


def test_a_task_must_be_able_to_hint_as_it_is_asked_to():
    config = shrunk("sage")
    bare = replace(config, task=partial(chain.task, depth=DEPTH))
    with pytest.raises(ValueError, match=r"^hint needs a task that can give hints"):
        build(bare)

    def mute():
        made = task()
        return replace(made, hinting=replace(made.hinting, writing_contexts=None))

    with pytest.raises(ValueError, match=r"^hint\.writing asks the policy for hints"):
        build(replace(WRITER, task=mute))


@pytest.mark.first(1)
@pytest.mark.parametrize("where", [False, True])
def test_levels_that_the_task_has_not_are_told_before_the_run(where):
    """And not when the first group collapses."""
    config = replace(override(WRITER, {"hint.levels": 2}), staged=where)
    with pytest.raises(ConfigError, match=r"^hint\.levels=2, but .* hints of 3 levels"):
        run.make_loop(config)
