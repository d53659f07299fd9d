"""Turns: an environment in the sampler's loop, and what it wrote trains nothing."""

import dataclasses
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_rollout
import tiny
import turning
from contracts import close

from curax import aggregate, loss, reward, rollout, update
from curax.arrays import choice, keys, metrics, turns
from curax.monitors import diversity
from curax.tasks import episodes
from curax.types import Batch, Environment, Prompts, Turns

KEY = test_rollout.KEY
full_logits = jax.jit(partial(tiny.full_logits, tiny.MODEL))
choose = jax.jit(choice.choose)


@cache
def sampler(slots):
    return turning.sampler(slots)


@cache
def drawn(slots=0):
    """What the tiny policy and its environment say to the tiny rows."""
    made = sampler(slots)(tiny.params(), tiny.CONTEXTS, tiny.ROWS, KEY)
    return jax.device_get(made)


def outcomes(rows):
    return np.asarray(rows.turns.reward).sum(-1)


# ----- definition


def naive(n):
    """A row, token by token in Python, by whole forwards of the policy."""
    prompt, member = (int(x[n]) for x in (tiny.ROWS.prompt, tiny.ROWS.member))
    (own,) = keys.row_keys(KEY, jnp.array([prompt]), jnp.array([member]))
    start = jax.random.fold_in(own, turns.RESET)
    world = turning.InPython(start, turning.TARGET[prompt])
    tokens, mask, logp, gains, turn, done = [], [], [], [], [], False
    while len(tokens) < turning.STEPS and not done:
        row = np.zeros((1, turning.STEPS), np.int32)
        row[0, : len(tokens)] = tokens
        where = tiny.whole(tiny.CONTEXTS, row, np.array([prompt]))
        logits = full_logits(tiny.params(), *where)[:, len(tokens)]
        key = jax.random.fold_in(own, len(tokens))[None]
        token, _, said, *_ = (x[0] for x in choose(key, logits))
        tokens, mask = [*tokens, int(token)], [*mask, True]
        logp, turn = [*logp, float(said)], [*turn, int(token)]
        if token in turning.END:
            says, done, gain = world.answer(turn)
            gains, turn = [*gains, (len(tokens) - 1, gain)], []
            says = [] if done else says[: turning.STEPS - len(tokens)]
            tokens, mask = [*tokens, *says], [*mask, *[False] * len(says)]
            logp = [*logp, *[0.0] * len(says)]
    return tokens, mask, logp, gains, done, world


def test_a_completion_is_what_a_loop_in_python_over_turns_draws():
    rows = drawn()
    several, trapped = 0, np.isin(rows.tokens, turning.END) & rows.turns.observed
    for n in np.flatnonzero(rows.exists):
        tokens, mask, logp, gains, done, world = naive(n)
        width = len(tokens)
        assert rows.tokens[n].tolist() == tokens + [tiny.PAD] * (turning.STEPS - width)
        assert rows.mask[n, :width].tolist() == mask
        assert rows.turns.observed[n, :width].tolist() == [not own for own in mask]
        assert not rows.written[n, width:].any()
        assert rows.finished[n] == done
        assert rows.turns.count[n] == len(gains) == world.turns
        close(rows.logp_policy[n, :width], logp, rtol=0, atol=1e-5)
        wanted = np.zeros(turning.STEPS)
        wanted[[place for place, _ in gains]] = [gain for _, gain in gains]
        close(rows.turns.reward[n], wanted)
        assert rows.turns.found["parity"][n] == world.total % 2
        several += len(gains) > 1 and not all(mask)
    assert several >= 3
    assert trapped.any()
    assert 0 < rows.finished.sum() < rows.exists.sum()


@pytest.mark.first(1)
@pytest.mark.parametrize("slots", [0, 3])
def test_the_trainer_gives_the_log_probs_of_the_sampler(slots):
    rows = drawn(slots)
    want = test_rollout.logprobs(tiny.params(), rows, np.float32(1))
    close(rows.logp_policy, np.where(rows.mask, want, 0), rtol=0, atol=1e-4)
    close(rows.logp_behaviour, rows.logp_policy)
    for field in tiny.FLOATS:
        assert (getattr(rows, field)[~rows.mask] == 0).all()


@pytest.mark.long
@pytest.mark.parametrize("slots", [1, 3])
def test_slots_refill_while_others_are_in_the_middle_of_a_turn(slots):
    tiny.agree(drawn(slots), drawn())


@pytest.mark.long
def test_rows_are_read_a_token_a_step_whoever_wrote_them():
    """No program of a turn, no slot that waits: steps of one slot are tokens."""
    spied, shapes, steps = tiny.spied(tiny.MODEL)
    rows = turning.sampler(1, spied)(tiny.params(), tiny.CONTEXTS, tiny.ROWS, KEY)
    jax.effects_barrier()
    assert set(shapes) == {(3, tiny.P), (1, 1)}
    assert steps.count((1, 1)) == rows.written.sum() > rows.mask.sum()


@pytest.mark.long
def test_policies_and_keys_are_mapped_over():
    def draw(params, key):
        how = turning.settings(slots=3)
        return rollout.sample(tiny.MODEL, params, tiny.CONTEXTS, tiny.ROWS, key, how)

    stacked = jax.tree.map(lambda x: jnp.stack([x, 0.9 * x]), tiny.params())
    got = jax.jit(jax.vmap(draw))(stacked, jnp.stack([KEY, KEY]))
    tiny.agree(jax.tree.map(lambda leaf: leaf[0], got), drawn())


@pytest.mark.long
def test_a_stopping_rule_goes_by_what_the_environment_gives():
    """Of the rows that no rule stops, those up to the round that meets it."""
    whole = drawn()
    right = outcomes(whole) > 0.04

    def met(outcome, exists):
        return jnp.any(exists & (outcome > 0.04), -1)

    def never(*_):
        raise AssertionError("the verifier is not asked")

    rule = rollout.Stopping(met=met, outcome=never, size=1, most=4)
    draw = turning.sampler(2, stopping=rule)
    got = jax.device_get(draw(tiny.params(), tiny.CONTEXTS, tiny.ROWS, KEY))
    wanted = np.zeros(10, bool)
    for b in range(3):
        own = np.flatnonzero(whole.exists & (whole.prompt == b))
        until = next((i for i, n in enumerate(own, 1) if right[n]), len(own))
        wanted[own[:until]] = True
    np.testing.assert_array_equal(got.exists, wanted)
    assert wanted.sum() < whole.exists.sum()
    np.testing.assert_array_equal(got.tokens[wanted], whole.tokens[wanted])


# ----- what an environment writes trains nothing


def batch_of(rows, junk=None):
    """Rows to train on; what stands where the policy wrote nothing is `junk`."""
    random = np.random.default_rng(0)
    shape, mask = rows.mask.shape, np.asarray(rows.mask)

    def hidden(values):
        values = np.asarray(values, np.float32)
        return jnp.asarray(values if junk is None else np.where(mask, values, junk))

    credit = random.normal(size=(shape[0], 1)) * np.ones(shape)
    return Batch(
        tokens=jnp.asarray(rows.tokens),
        mask=jnp.asarray(mask),
        context=jnp.asarray(rows.context),
        credit=hidden(credit),
        multiplier=hidden(np.ones(shape)),
        logp_behaviour=hidden(rows.logp_behaviour),
        logp_policy=hidden(rows.logp_policy),
        logp_old=hidden(rows.logp_behaviour),
        logp_ref=None,
    )


@jax.jit
def gradient(batch):
    def of_tokens(logp, _, part):
        value = loss.clipped_ratio(logp, part.logp_old, part.credit, part.mask)
        return jnp.where(part.mask, value * part.multiplier, 0.0)

    return update.gradient(
        tiny.MODEL,
        tiny.params(),
        tiny.CONTEXTS,
        batch,
        aggregate.token_mean(batch.mask),
        of_tokens,
        update.Settings(length_buckets=2),
        still_old=False,
    )[:2]


def test_poison_at_tokens_of_observations_changes_no_gradient():
    want = gradient(batch_of(drawn()))
    got = gradient(batch_of(drawn(), junk=np.nan))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


def test_what_an_environment_says_is_read():
    """Another observation changes what the policy says after it, and not before."""
    rows = drawn()
    n, t = next(
        (n, int(np.flatnonzero(rows.turns.observed[n])[0]))
        for n in range(10)
        if (np.diff(rows.mask[n].astype(int)) == 1).any()
    )
    other = rows.tokens.copy()
    other[n, t] = (other[n, t] + 1) % 9
    changed = dataclasses.replace(rows, tokens=other)
    one, two = (
        np.asarray(test_rollout.logprobs(tiny.params(), x, np.float32(1)))
        for x in (rows, changed)
    )
    own = rows.mask[n]
    close(one[n, :t], two[n, :t])
    assert (np.abs(one - two)[n, t:][own[t:]] > 1e-4).all()
    close(np.delete(one, n, 0), np.delete(two, n, 0))


def test_tokens_of_observations_count_in_no_metric_of_the_policy():
    rows = drawn()
    poisoned = dataclasses.replace(
        rows,
        entropy=np.where(rows.mask, rows.entropy, np.nan),
        tokens=np.where(rows.mask, rows.tokens, 10**6),
    )
    grid = np.zeros((3, 4), np.float32), np.ones((3, 4), bool)
    one, two = (
        jax.device_get(
            metrics.finish(metrics.of_rollouts(x, *grid, graded=outcomes(rows)))
        )
        for x in (rows, poisoned)
    )
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name], err_msg=name)
    assert one["rollout/tokens"] == rows.mask.sum()
    own = rows.mask.sum(-1)[rows.exists].mean()
    close(one["rollout/length_tokens"], own)
    observed = rows.turns.observed.sum(-1)[rows.exists].mean()
    close(one["turns/observed_tokens"], observed)
    close(one["turns/count"], rows.turns.count[rows.exists].mean())
    parity = rows.turns.found["parity"][rows.exists].mean()
    close(one["environment/parity"], parity)
    first, *others = np.flatnonzero(rows.exists)
    some = rows.turns.found["parity"].copy()
    some[first] = np.nan  # of a completion that is cut off in its first turn
    few = dataclasses.replace(rows.turns, found={"parity": some})
    rows = dataclasses.replace(rows, turns=few)
    told = metrics.finish(metrics.of_rollouts(rows, *grid, graded=outcomes(rows)))
    close(told["environment/parity"], some[others].mean())


def test_the_outcome_is_the_sum_of_the_rewards_and_missing_where_one_is():
    rows: Any = drawn()
    task: Any = SimpleNamespace(verify=None)
    got = reward.on_device(task, None, rows)  # pyright: ignore[reportArgumentType]
    close(got, outcomes(rows))
    broken = rows.turns.reward.copy()
    broken[0, 0] = np.nan
    lost = dataclasses.replace(rows.turns, reward=broken)
    assert np.isnan(lost.outcome).tolist() == [True, *[False] * 9]


# ----- environments that are wrong


def wrong(**changes):
    def observe(state, tokens, length):
        after, seen = turning.observe(state, tokens, length)
        state_of = changes.get("state", lambda state: state)
        fields = {k: v(seen) for k, v in changes.items() if k != "state"}
        return state_of(after), dataclasses.replace(seen, **fields)

    return observe


WRONG = {
    "gives int32 [] as reward, and must give float32 []": wrong(
        reward=lambda seen: seen.length
    ),
    "gives int32 [] as tokens, and must give int32 [W]": wrong(
        tokens=lambda seen: seen.length
    ),
    "gives float32 [] where reset gave int32 []": wrong(
        state=lambda state: state | {"total": state["total"].astype(jnp.float32)}
    ),
    "a state keeps its fields": wrong(state=lambda state: state | {"more": 0}),
    "gives a tuple beside the state": lambda *args: (args[0], (1, 2)),
    "gives None; let it give a state and a types.Observation": lambda *_: None,
    "gives 3 values; let it give a state and a": lambda *args: args,
    "gives 'up' as tokens, which is no array": wrong(tokens=lambda seen: "up"),
    "is None; let it be a function of (state, tokens, length).": None,
    "is called with (state, tokens, length): too many": lambda state, tokens: state,
}
WRONG_MEASURES = {
    "gives a float; let it give numbers by name.": lambda state: 1.0,
    "gives 'odd' as parity, which is no array": lambda state: {"parity": "odd"},
    "is called with (state): missing a required": lambda state, other: {},
}


def refusal(**fields):
    """What is said of the environment with other functions."""
    made = dataclasses.replace(turning.ENVIRONMENT, **fields)
    how = dataclasses.replace(turning.EPISODES, environment=made)
    draw = partial(rollout.sample, tiny.MODEL, how=turning.settings(episodes=how))
    (name,) = fields
    with pytest.raises(ValueError, match=rf"^task\.environment\.{name} ") as caught:
        jax.eval_shape(draw, tiny.params(), tiny.CONTEXTS, tiny.ROWS, KEY)
    return str(caught.value)


@pytest.mark.first(3)
@pytest.mark.parametrize("words", WRONG)
def test_an_environment_of_other_shapes_is_refused_in_a_sentence(words):
    assert words in refusal(observe=WRONG[words])


@pytest.mark.first(1)
@pytest.mark.parametrize("words", WRONG_MEASURES)
def test_what_measures_no_numbers_is_refused_in_a_sentence(words):
    assert words in refusal(measure=WRONG_MEASURES[words])


def test_a_state_is_asked_for_by_key_and_target():
    said = refusal(reset=lambda key: {})
    assert "is called with (key, target): too many positional arguments" in said


def test_an_observation_may_be_a_list():
    def listed(state, tokens, length):
        after, seen = turning.observe(state, tokens, length)
        words = [seen.tokens[0], seen.tokens[1], seen.tokens[2]]
        return after, dataclasses.replace(seen, tokens=words)

    state = {"turns": jnp.zeros(5, jnp.int32), "total": jnp.arange(5)}
    turn = jnp.tile(jnp.arange(turning.STEPS), (5, 1)), jnp.full(5, 3)
    got, want = (turns.observed(x, state, *turn) for x in (listed, turning.observe))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got[1].tokens.shape == (5, turning.WIDTH)


@pytest.mark.parametrize("parts", [7, 10, 11, 13, 15, 24])
def test_rewards_that_add_up_to_one_are_one_wherever_they_stand(parts):
    rng = np.random.default_rng(parts)
    reward = np.zeros((200, 64), np.float32)
    for row in reward:
        row[rng.permutation(64)[:parts]] = np.float32(1) / parts
    none = {"observed": reward > 0, "count": np.zeros(200, np.int32), "found": {}}
    outcome = jax.jit(lambda x: Turns(reward=x, **none).outcome)(reward)
    np.testing.assert_array_equal(outcome, 1)


def test_how_a_completion_begins_is_what_the_policy_says():
    """However long the answers between its turns are."""
    said, seen = np.array([3, 1, 4, 1, 5], np.int32), 9
    rows, own = np.full((4, 12), seen, np.int32), np.zeros((4, 12), bool)
    for length, (row, mask) in enumerate(zip(rows, own, strict=True)):
        mask[[0, 1, *range(2 + length, 5 + length)]] = True
        row[mask] = said
    tokens, mask = turns.in_front(rows, own)
    np.testing.assert_array_equal(tokens[:, :5], np.tile(said, (4, 1)))
    np.testing.assert_array_equal(mask, np.tile(np.arange(12) < 5, (4, 1)))
    assert len(set(np.asarray(diversity.opening(tokens, mask)).tolist())) == 1


def said_by(rows):
    """`[N, 4, T]` turns that the policy wrote, `[N, 4]` lengths; its last is ended.

    And `[N]`, whether each of them has room for an end.
    """
    number, steps = rows.tokens.shape
    said = np.full((number, 4, steps), turning.END[0], np.int32)
    length, room = np.ones((number, 4), np.int32), rows.exists.copy()
    for n in np.flatnonzero(rows.exists):
        own = rows.tokens[n][rows.mask[n]]
        ends = np.flatnonzero(np.isin(own, turning.END)) + 1
        for place, turn in enumerate(np.split(own, ends)):
            whole = place < len(ends)
            room[n] &= whole or len(turn) < steps
            if room[n] and len(turn):
                said[n, place, : len(turn)] = turn
                length[n, place] = len(turn) + (not whole)
    return said, length, room


LENGTHS = {
    "left out": lambda own: None,
    "too long": lambda own: jnp.int32(99),
    "below 0": lambda own: jnp.int32(-1),
    "its own": lambda own: own,
}


@pytest.mark.first(2)
@pytest.mark.parametrize("name", LENGTHS)
def test_a_teacher_who_says_what_the_policy_said_plays_what_the_sampler_drew(name):
    def observe(state, tokens, length):
        after, seen = turning.observe(state, tokens, length)
        return after, dataclasses.replace(seen, length=LENGTHS[name](seen.length))

    world = dataclasses.replace(turning.ENVIRONMENT, observe=observe)
    how = dataclasses.replace(turning.EPISODES, environment=world)
    draw = turning.sampler(episodes=how)
    rows = jax.device_get(draw(tiny.params(), tiny.CONTEXTS, tiny.ROWS, KEY))
    said, length, room = map(jnp.asarray, said_by(rows))
    own = keys.row_keys(KEY, tiny.ROWS.prompt, tiny.ROWS.member)
    number = jnp.arange(len(own), dtype=jnp.int32)
    target = {"world": how.begin(own, tiny.ROWS.prompt).state, "row": number}

    def play(state, tokens, length):
        after, seen = observe(state["world"], tokens, length)
        return state | {"world": after}, seen

    def teacher(key, state):
        place = state["row"], jnp.minimum(state["world"]["turns"], 3)
        return said[place], length[place]

    made = episodes.played(
        Environment(reset=lambda key, target: target, observe=play),
        teacher,
        KEY,
        Prompts(tokens=number[:, None], mask=room[:, None], id=number, target=target),
        turns=5,
        max_tokens=turning.STEPS,
        pad=tiny.PAD,
    )
    room = np.asarray(room)
    assert 0 < rows.finished[room].sum() < room.sum()
    np.testing.assert_array_equal(made.tokens[room], rows.tokens[room])
    np.testing.assert_array_equal(made.mask[room], rows.mask[room])
    close(made.outcome[room], rows.turns.outcome[room], rtol=0, atol=1e-5)


@pytest.mark.long
def test_an_observation_that_says_it_is_longer_than_it_is_is_cut():
    def long(state, tokens, length):
        after, seen = turning.observe(state, tokens, length)
        return after, dataclasses.replace(seen, length=jnp.int32(99))

    made = dataclasses.replace(turning.ENVIRONMENT, observe=long)
    how = dataclasses.replace(turning.EPISODES, environment=made)
    draw = turning.sampler(episodes=how, model=tiny.model(layers=1))
    params = test_rollout.unstopped()[0]
    rows = draw(params, tiny.CONTEXTS, tiny.ROWS, KEY)
    gaps = rows.turns.observed.sum(-1)
    most = turning.WIDTH * rows.turns.count
    assert (np.asarray(gaps) <= np.asarray(most)).all()
