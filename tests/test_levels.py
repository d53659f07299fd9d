"""What hints make of a recipe: by enumeration, in closed form and by simulation."""

from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contracts import binomial, close
from test_law import PLAIN
from test_predict import listed

from curax import advantage, hint, stop
from curax import memory as memories
from curax.arrays.metrics import Tally
from curax.config import Hint, Sampling, Stop, Update
from curax.step import learn
from curax.step.methods import hints, prefixes
from curax.step.types import Graded, StepRollouts, grid_of
from curax.theory import expect, hint_levels, outcome_states, predict
from curax.types import Contexts, Difficulty, Hints, Prompts

ALL = np.array([0.2, 0.5, 0.8])  # pass rates of some population
HINT = Hint(
    source=hint.reference_prefix, levels=2, width=4, trigger=hint.all_wrong, most=1.0
)
# Standardised by the group alone.
SCORE = partial(advantage.standardised, eps=0.0)


def composed(group, how, prompts=2, **stages):
    sizes = Sampling(prompts=prompts, group_size=group, max_tokens=8)
    stages = {"advantage": SCORE, "update": Update()} | stages
    methods = (prefixes.method,)  # which the source of some hints reads
    return replace(PLAIN, sampling=sizes, hint=how, methods=methods, **stages)


def seen(config, p, lift, population=ALL):
    return predict.predict(config, np.atleast_1d(p), population, lift=lift)


def lift_of(p, other):
    return np.log(other / (1 - other)) - np.log(p / (1 - p))


def test_every_level_adds_as_much_to_the_log_odds():
    p = np.array([0.01, 0.5, 0.9])
    got = hint_levels.lifted(p, 0.7, 3)
    np.testing.assert_array_equal(got[0], p)
    for level, row in enumerate(got):
        close(lift_of(p, row), 0.7 * level)
    far = hint_levels.lifted(p, 20.0, 9)
    assert ((far > 0) & (far < 1)).all()


# ----- the search


def test_the_published_example_has_its_coefficients():
    """SAGE 3: 2.4 of the reference, groups of 4, p_0 = .07, p_1 = .4.

    Its 1.7057 without a hint is of a simulation, 0.2% off the sum over all k.
    """
    config = composed(4, replace(HINT, levels=1))
    found = seen(config, 0.07, lift_of(0.07, 0.4))
    hints = found.hints
    close(hints.weight[:, 0], [1.7018, 1.2123], rtol=0, atol=5.1e-5)
    close(hints.weight[0], 1.7057, rtol=3e-3)
    q = np.arange(5) / 4
    for row, p in enumerate((0.07, 0.4)):
        want = binomial(4, p) @ np.sqrt(q * (1 - q)) / (p * (1 - p))
        close(hints.weight[row], want * (0.93**4 if row else 1))
    # Without hints it is as before, and draws and signal follow.
    close(found.weight, hints.weight[0])
    close(hints.drawn[:, 0], [1, 0.93**4])
    close(hints.trains[:, 0], [1 - 0.93**4, 0.93**4])
    close(hints.draws[:, 0], [4, 4 * 0.93**4])
    both = predict.with_hints(config, found)
    close(both.signal, 1 - 0.07**4 - 0.93**4 + 0.93**4 * (1 - 0.4**4 - 0.6**4))
    close(both.draws, 4 * (1 + 0.93**4))
    close(both.weight, found.weight)
    close(both.right / 0.07 - both.wrong / 0.93, both.weight)


RULE = Stop(rule=partial(stop.positives, right=2), round_size=2)


def counted(p, group, rule):
    """Chances of (n, k), from all sequences of labels."""
    met = rule and (lambda labels: sum(labels) >= 2)
    found = {}
    for (n, k, _), chance in listed(p, group, 2 if rule else group, met).items():
        found[n, k] = found.get((n, k), 0.0) + chance
    return found


def opened(n, k, group):
    q = k / n
    return 1 - q**group - (1 - q) ** group


@pytest.mark.first(2)
@pytest.mark.parametrize("rule", [None, RULE], ids=["whole", "stopped"])
@pytest.mark.parametrize("trigger", [hint.all_wrong, hint.no_signal])
def test_a_search_is_that_of_all_sequences_of_groups(trigger, rule):
    """SAGE 8: which level trains, in which state, and how many are drawn."""
    group, rates = 5, np.array([0.1, 0.3, 0.65])
    how = replace(HINT, trigger=trigger)

    def collapsed(n, k):
        return k == 0 or (trigger is hint.no_signal and k == n)

    trains, drawn = {}, {}
    for ends in product(*(counted(p, group, rule).items() for p in rates)):
        states, masses = zip(*ends, strict=True)
        level, at, mass = 0, states[0], np.prod(masses)
        drawn[0, at] = drawn.get((0, at), 0.0) + mass
        if collapsed(*at):
            for new in (1, 2):
                n, k = states[new]
                drawn[new, (n, k)] = drawn.get((new, (n, k)), 0.0) + mass
                # Symmetric counts are equally open, whatever floats say.
                if opened(n, k, group) > opened(*at, group) - 1e-9:
                    level, at = new, (n, k)
                if not collapsed(n, k):
                    break
        trains[level, at] = trains.get((level, at), 0.0) + mass

    which, chance = outcome_states.states(
        rates, most=group, **({"size": 2, "met": RULE.rule} if rule else {})
    )
    one = chance[:, None]  # [L + 1, R, S], R = 1
    both = np.concatenate([one, one], 1)  # the prompt, and the population
    got = hint_levels.searched(how, which, both, size=(2, group), own=1, visits=1)
    for part, want in zip(got, (trains, drawn), strict=True):
        sums = {}
        for level, state in product(range(3), range(len(which))):
            key = level, tuple(which[state, :2].tolist())
            sums[key] = sums.get(key, 0.0) + part[level, 0, state]
        for key, mass in sums.items():
            assert mass == pytest.approx(want.get(key, 0.0), abs=1e-12), key
    close(got[0].sum((0, 2)), 1, rtol=1e-12)
    # The place of the first right one is as it falls.
    k = which[:, 1]
    if not rule:
        first = got[0][2, 0][(k == 2) & (which[:, 2] == 1)].sum()
        close(first / got[0][2, 0][k == 2].sum(), 2 / 5)


@pytest.mark.parametrize("most", [0.0, 0.3, 0.5, 0.75, 1.0])
def test_as_many_are_hinted_as_may_be(most):
    chance, prompts, total = 0.4, 4, 0.0
    for others in product([0, 1], repeat=prompts - 1):
        for place in range(prompts):
            mass = np.prod([chance if one else 1 - chance for one in others])
            wanted = np.insert(others, place, 1).astype(bool)
            mine = bool(hints.limit(jnp.asarray(wanted), most)[place])
            total += mass * mine / prompts
    close(hint_levels.admitted(most, prompts, chance), total)


def test_the_hints_of_a_batch_go_to_those_that_collapse():
    how = replace(HINT, levels=1, most=0.5)
    p, others = 0.1, np.array([0.05, 0.6])
    found = seen(composed(3, how, prompts=2), p, 1.0, population=others).hints
    dead = ((1 - others) ** 3).mean()
    close(found.drawn[1], 0.9**3 * (1 - dead / 2))
    close(found.trains.sum(0), 1)


# ----- simulation


def rows(labels, exists, group):
    """Rows of a grid as a sampler leaves them, of one token."""
    place = jnp.arange(labels.size, dtype=jnp.int32)
    tokens = labels.reshape(-1, 1).astype(jnp.int32)
    where = {"prompt": place // group, "member": place % group}
    made = tiny.rollouts(tokens, exists.reshape(-1, 1), **where)
    return jax.tree.map(jnp.asarray, made)


def simulated(config, rates):
    """Levels and outcomes of groups that train, their credit, and what was counted."""
    prompts, group = grid_of(config)
    count, how = prompts * group, config.hint
    task = SimpleNamespace(end=(1,), pad=0, terms=None)
    parts: Any = SimpleNamespace(config=config, rows=count, task=task)
    state: Any = SimpleNamespace(seed=jnp.uint32(0), step=jnp.int32(0))

    def draw(key, level, wanted):
        noise = jax.random.uniform(key, (prompts, group))
        labels = noise < jnp.asarray(rates, jnp.float32)[level][:, None]
        there = jnp.broadcast_to(wanted[:, None], labels.shape)
        drawn = rows(labels & there, there, group)
        outcome = jnp.where(there, labels.astype(jnp.float32), jnp.nan)
        return drawn, outcome.reshape(-1)

    @jax.jit
    def run(key):
        empty = jnp.zeros((prompts, 1), jnp.int32)
        there = jnp.ones((prompts, 1), bool)
        asked = Prompts(tokens=empty, mask=there, id=jnp.arange(prompts), target=empty)
        contexts = Contexts(tokens=jnp.tile(empty, 2), mask=jnp.tile(there, 2))
        none = jnp.zeros(prompts, jnp.int32)
        rollouts, outcome = draw(key, none, jnp.ones(prompts, bool))
        zero = jnp.zeros(prompts)
        first = StepRollouts(
            prompts=asked,
            contexts=contexts,
            rollouts=rollouts,
            outcome=outcome,
            known=Difficulty(
                draws=zero, solved=zero, pass_rate=zero, norm=zero, tokens=zero
            ),
            level=none,
            memory=memories.forget(prompts),
            attempts=jnp.int32(1),
            tally=Tally(means={}, counts={}),
            found={},
            shape=(prompts, group),
        )
        every = jnp.ones((prompts, how.levels, 1), bool)
        made = Hints(tokens=every.astype(jnp.int32), mask=every)
        wanted = hints.collapsed_groups(parts, first)
        search = hints.begin(parts, first, wanted, (made, first.tally))
        for level in range(1, how.levels + 1):
            now = hints.ask(parts, state, search)
            key_ = jax.random.fold_in(key, level)
            drawn = now.rows
            asked = jnp.zeros(prompts, bool).at[drawn.prompt].max(drawn.exists)
            rollouts, outcome = draw(key_, now.level, asked)
            graded = Graded.of(now, rollouts, outcome)
            search = hints.take(parts, search, now, graded)
        last = search.drawn
        now = last.groups
        arrays = now.outcome, now.outcome, now.exists, now.finished
        rate = last.known.pass_rate
        credit = learn.compute_credit(config, key, *arrays, rate).credit
        return last.level, now.outcome, credit, last.tally.counts

    return run(jax.random.key(0))


@pytest.mark.long
def test_the_search_that_trains_ends_as_predicted():
    """SAGE 3: 8192 prompts are searched; four standard errors, each at most 3%."""
    prompts, group, p = 8192, 5, 0.12
    how = replace(HINT, most=0.4)
    config = composed(group, how, prompts)
    want = seen(config, p, 0.8, population=np.array([p])).hints
    *found, counts = simulated(config, want.p[:, 0])
    level, outcome, credit = map(np.asarray, found)

    def near(values, mean):
        error = values.std() / np.sqrt(prompts)
        assert 0 < error < 0.03 * max(mean, 0.5)
        assert abs(values.mean() - mean) < 4 * error

    for at, rate in enumerate(want.p[:, 0]):
        mine = level == at
        near(mine.astype(float), want.trains[at, 0])
        # The score of right and wrong in the logit of the rate; grad p = p (1 - p).
        pull = (credit * (outcome - rate)).mean(-1) * mine / (rate * (1 - rate))
        near(pull, want.weight[at, 0])
        near((credit != 0).any(-1) & mine, want.signal[at, 0])
        # And in the logit without a hint, each weighed by how much likelier it is.
        ratio = np.where(outcome == 1, p / rate, (1 - p) / (1 - rate))
        back = hint.sequence_weighted(
            credit, outcome, np.ones(outcome.shape, bool), np.log(ratio), mine
        )
        back = (np.asarray(back) * (outcome - p)).mean(-1) * mine / (p * (1 - p))
        near(back, want.weight[at, 0])
    asked = [1.0, *(float(counts[f"hint/asked_{i}"]) / prompts for i in (1, 2))]
    close(asked, want.drawn[:, 0], rtol=0, atol=4 * 0.5 / np.sqrt(prompts))


# ----- what trains the prompt itself


def test_weighted_sequences_of_every_group_asked_train_the_prompt():
    """SAGE 7: w = 1 + P(level 1 asked) + P(level 2 asked), with leave-one-out."""
    how = replace(HINT, credit=hint.sequence_weighted)
    config = composed(4, how, advantage=advantage.leave_one_out)
    p = np.array([0.02, 0.3, 0.9])
    found = seen(config, p, 0.9)
    both = predict.with_hints(config, found)
    rates = hint_levels.lifted(p, 0.9, 2)
    first = (1 - p) ** 4
    close(both.weight, 1 + first + first * (1 - rates[1]) ** 4)
    close(both.weight, found.hints.drawn.sum(0))
    close(found.weight, 1)
    assert hint_levels.credited(how) == 0
    assert hint_levels.credited(HINT) == 1


def test_what_has_no_coefficient_is_given_none():
    for credit in (hint.dropped, hint.self_normalised):
        how = replace(HINT, credit=credit)
        config = composed(3, how)
        found = seen(config, 0.2, 1.0)
        assert hint_levels.credited(how) is None
        assert np.isnan(found.hints.weight[1:]).all()
        close(predict.with_hints(config, found).weight, found.weight)
        p = found.hints.p[:, 0]
        dead, all_right = 0.8**3, p**3
        mixed = 1 - all_right - (1 - p) ** 3
        if credit is hint.self_normalised:  # which trains on groups all right
            mixed = 1 - (1 - p) ** 3
        close(found.hints.signal[1], dead * mixed[1:2])


def test_credit_of_groups_that_are_drawn_again_is_lost():
    """With credit of -1 for wrong ones a dead group is no longer without any."""
    config = composed(3, HINT, advantage=advantage.signed)
    found = seen(config, 0.2, 1.0)
    close(found.weight, 2.0)
    # Of C- / (1 - p) the part of dead groups is missing: -(1-p)^2.
    close(found.hints.weight[0], 2.0 - 0.8**2)


# ----- levels set between visits


def states(rates, group):
    """Chances `[L + 1, R, S]` of whole groups, R once more as their population."""
    which, chance = outcome_states.states(rates.reshape(-1), most=group, first=False)
    chance = chance.reshape(*rates.shape, -1)
    return which, np.concatenate([chance, chance], 1)


def test_moves_are_those_of_the_published_table():
    """SAGE 9: at level 1 of 3, groups of 8."""
    rates = np.array([[0.3], [0.3], [0.4], [0.5]])
    which, chance = states(rates, 8)
    mass = binomial(8, 0.3)
    for rule, wants in {
        hint.paper: (0, mass[3:].sum(), mass[:3].sum()),
        partial(hint.hysteresis, low=0.1, high=0.35): (
            mass[3:].sum(), mass[1:3].sum(), mass[0],
        ),
    }.items():  # fmt: skip
        how = replace(HINT, levels=3, controller=rule)
        got = hint_levels.moves(how, which, chance, group=8)
        close(got[0, 1], [*wants, 0])
        close(got.sum(-1), 1, rtol=1e-12)
        top = binomial(8, 0.5)[:3].sum() if rule is hint.paper else None
        if top is not None:
            close(got[0, 3], [0, 0, 0, 1])
            close(got[0, 2], [0, 0, 1 - sum(binomial(8, 0.4)[:3]),
                              sum(binomial(8, 0.4)[:3])])  # fmt: skip


def test_levels_rest_where_long_runs_end():
    random = np.random.default_rng(0)
    steps = random.dirichlet(np.ones(4), (5, 4))
    got = hint_levels.resting(steps)
    close(np.einsum("rl,rlm->rm", got, steps), got)
    close(got, np.linalg.matrix_power(steps, 200)[:, 0])
    # One that goes in circles, and one from which there is no way back.
    close(hint_levels.resting(np.eye(2)[::-1]), [0.5, 0.5])
    one_way = np.array([[0.9, 0.1, 0], [0, 0.999, 0.001], [0, 0, 1]])
    close(hint_levels.resting(one_way), [0, 0, 1])


def test_the_visits_of_a_run_begin_without_a_hint():
    rates = np.array([[0.2], [0.5], [0.8]])
    which, chance = states(rates, 3)
    how = replace(HINT, controller=partial(hint.hysteresis, low=0.0, high=0.5))
    steps = hint_levels.moves(how, which, chance, group=3)[0]
    want, level = np.zeros(3), np.eye(3)[0]
    for visits in range(1, 5):
        want, level = want + level, level @ steps
        options = {"size": (2, 3), "own": 1, "visits": visits}
        got, end = hint_levels.visited(how, which, chance, **options)
        close(got[:, 0].sum(-1), want / visits)
        close(got[:, 0], want[:, None] / visits * chance[:, 0])
        close(end[:, 0], hint_levels.resting(steps)[:, None] * chance[:, 0])
    many = hint_levels.visited(how, which, chance, size=(2, 3), own=1, visits=10**6)
    close(many[0], many[1], atol=1e-5)
    # Where none may be hinted, all wait at level 0.
    none = replace(how, most=0.4)
    got, _ = hint_levels.visited(none, which, chance, size=(2, 3), own=1, visits=4)
    close(got[0], chance[0])
    # Where one of two may, the second waits if the first is hinted too.
    half = replace(how, most=0.5)
    got, _ = hint_levels.visited(half, which, chance, size=(2, 3), own=1, visits=2)
    up = steps[0, 1]
    close(got[1].sum(-1), up * (1 - up / 2) / 2)


def test_a_controller_is_predicted_whole():
    """SAGE 9: the coefficients of a level are its share of visits times w(p_l)."""
    how = replace(HINT, controller=hint.paper, most=1.0)
    config = composed(4, how, steps=1)
    found = seen(config, 0.3, 1.0)
    close(found.hints.weight[:, 0], [found.weight[0], 0, 0])
    close(found.hints.end[:, 0], [0, 0, 1])
    close(found.hints.draws.sum(0), 4)
    q = np.arange(5) / 4
    p = found.hints.p[2, 0]
    want = binomial(4, p) @ np.sqrt(q * (1 - q)) / (p * (1 - p))
    close(found.hints.end_weight[:, 0], [0, 0, want])


# ----- hints that are right completions of earlier visits


def test_what_was_never_solved_is_visited_without_a_hint():
    """Runs of 4 visits simulated, 12 prompts to a batch; 3 standard errors of each."""
    low, high, most, lift, visits, group, levels = 0.25, 0.75, 0.5, 0.7, 4, 5, 2
    how = replace(
        HINT,
        source=prefixes.own_prefix,
        controller=partial(hint.hysteresis, low=low, high=high),
        most=most,
    )
    config, p, runs = composed(group, how, prompts=12), 0.06, 40_000
    random = np.random.default_rng(0)
    rates = random.choice(ALL, (runs, 12))
    rates[:, 0] = p
    level, solved = np.zeros(rates.shape, int), np.zeros(rates.shape, bool)
    count = np.zeros((runs, levels + 1))
    for _ in range(visits):
        order = random.random(rates.shape).argsort(-1)  # another batch at every visit
        rates, level, solved = (
            np.take_along_axis(x, order, -1) for x in (rates, level, solved)
        )
        first = (level > 0).cumsum(-1) <= most * 12
        drawn = np.where(solved & first, level, 0)
        odds = rates / (1 - rates) * np.exp(lift * drawn)
        right = random.binomial(group, odds / (1 + odds))
        count += np.eye(levels + 1)[drawn[rates == p]]
        share, move = right / group, drawn == level
        level = level + move * (share <= low) - move * (share > high)
        level, solved = np.clip(level, 0, levels), solved | (right > 0)
    found = predict.predict(config, [p], ALL, lift=lift, often=visits)
    error = 3 * count.std(0) / visits / np.sqrt(runs)
    assert error.max() < 0.005
    assert (np.abs(count.mean(0) / visits - found.hints.drawn[:, 0]) < error).all()
    close(found.hints.weight[0], found.hints.drawn[0] * found.weight)
    every = replace(config, hint=replace(how, source=hint.reference_prefix))
    other = predict.predict(every, [p], ALL, lift=lift, often=visits)
    assert (other.hints.drawn[0] < 0.7 * found.hints.drawn[0]).all()
    close(other.hints.end, found.hints.end)


def test_a_search_has_nothing_to_show_before_the_first_success():
    how = replace(HINT, source=prefixes.own_prefix, levels=1)
    p, visits = np.array([0.1, 0.6]), 3
    found = predict.predict(composed(4, how), p, ALL, lift=1.0, often=visits).hints
    dead = (1 - p) ** 4
    known = 1 - (1 + dead + dead**2) / visits
    close(found.drawn, [np.ones(2), known * dead])
    close(found.trains.sum(0), 1)
    once = predict.predict(composed(4, how), p, ALL, lift=1.0, often=1).hints
    close(once.trains, [np.ones(2), np.zeros(2)], atol=1e-12)


# ----- elsewhere


def test_nothing_is_expected_of_hinted_runs():
    assert expect.expected(composed(4, HINT), np.full(8, 0.5), 8) == {}
