"""Slots that share pages: who has which, who waits, and that nothing else changes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import turning
from contracts import close
from hypothesis import given, settings
from hypothesis import strategies as st

from curax import allocate, rollout
from curax.arrays import cache_sizes
from curax.arrays.pages import Pages
from curax.models import softmax

STEPS, TOKEN = 16, 2 * 2 * 8 * 4  # bytes of a token: k and v of two layers
PREFIXES = 3 * tiny.P
ROWS = allocate.rows_to_draw(jnp.array([9, 3, 8]), rows=22)  # two rows do not exist


@pytest.fixture
def flushes(monkeypatch):
    """Of each block: slots that worked at its end, and those that begin anew."""
    seen, flushed = [], Pages.flushed

    def spy(self, blocks, count, active):
        pages, anew = flushed(self, blocks, count, active)
        jax.debug.callback(lambda *both: seen.append(both), active, anew)
        return pages, anew

    monkeypatch.setattr(Pages, "flushed", spy)
    with tiny.in_pages(2):
        yield seen


def bound(tokens):
    """Bytes of prefixes and so many tokens of completions."""
    return float(TOKEN * (PREFIXES + tokens))


def drawn(policy, tokens=0):
    """Completions, with room for so many tokens of theirs; 0: for all."""
    room = bound(tokens) if tokens else 0.0
    how = tiny.settings(max_tokens=STEPS, end=(10,), cache_bytes=room)
    draw = jax.jit(partial(rollout.sample, policy, how=how))
    return jax.device_get(draw(tiny.params(), tiny.CONTEXTS, ROWS, jax.random.key(3)))


@pytest.mark.first(1)
@pytest.mark.parametrize(("tokens", "slots"), [(25, 3), (48, 6)])
def test_slots_that_share_pages_draw_what_each_would_in_a_ring(tokens, slots, flushes):
    """Where rings would have room for one, or three; some rows begin anew."""
    want = drawn(tiny.MODEL)
    assert not flushes
    got = drawn(tiny.MODEL, tokens)
    jax.effects_barrier()
    tiny.agree(got, want)
    active, anew = np.swapaxes(flushes, 0, 1)
    assert active.shape[1] == active.sum(1).max() == slots
    assert 0 < anew.sum() < want.exists.sum()


@pytest.mark.long
def test_policies_with_pages_are_mapped_over(flushes):
    want = drawn(tiny.MODEL)
    how = tiny.settings(max_tokens=STEPS, end=(10,), cache_bytes=bound(48))

    def draw(params):
        key = jax.random.key(3)
        return rollout.sample(tiny.MODEL, params, tiny.CONTEXTS, ROWS, key, how)

    stacked = jax.tree.map(lambda x: jnp.stack([0.5 * x, x]), tiny.params())
    got = jax.jit(jax.vmap(draw))(stacked)
    tiny.agree(jax.tree.map(lambda leaf: leaf[1], got), want)


def test_an_environment_forgets_what_begins_anew(flushes):
    def draw(room):
        made = turning.sampler(cache_bytes=room)
        key = jax.random.key(1)
        return jax.device_get(made(tiny.params(), tiny.CONTEXTS, tiny.ROWS, key))

    want, got = draw(0.0), draw(bound(20))
    jax.effects_barrier()
    assert np.sum([anew for _, anew in flushes])
    tiny.agree(got, want)


# ----- who has which

K, HELD, POOL, SIZE, LIMIT = 5, 3, 6, 2, 4
flushed, room, seen, begun = map(
    jax.jit, (Pages.flushed, Pages.room, Pages.seen, Pages.begun)
)


@jax.jit
def joined(q, k, v):
    """The first four keys and the others, joined."""

    def part(cut):
        visible = jnp.ones((1, k[..., cut, :].shape[2]), bool)
        e, top, total = softmax.exponentials(q, k[..., cut, :], visible)
        return softmax.mixed(e, jnp.ones_like(top), v[..., cut, :]), top, total

    return softmax.joined(part(slice(None, 4)), part(slice(4, None)))


@st.composite
def states(draw):
    """Slots, some with rows of several tokens, and pages that no two of them have."""
    order = draw(st.permutations(range(POOL)))
    at, held = np.zeros((K, HELD), np.int32), np.zeros(K, np.int32)
    active = np.array(draw(st.lists(st.booleans(), min_size=K, max_size=K)))
    count = np.zeros(K, np.int32)
    for k in range(K):
        held[k] = draw(st.integers(0, min(HELD - 1, len(order))))
        at[k, : held[k]], order = order[: held[k]], order[held[k] :]
        count[k] = SIZE * held[k] + draw(st.integers(0, 1))
    waits = ~active & draw(st.booleans())
    return at, held, waits, count, active


def of(at, held, waits):
    pool = np.broadcast_to(-1.0 - np.arange(POOL)[:, None], (POOL, SIZE))
    pool = pool.reshape(1, POOL, 1, SIZE, 1)
    limit = np.full(1, LIMIT, np.int32)
    return Pages(pool=pool, at=at, held=held, waits=waits, limit=limit)


@given(states())
def test_a_full_block_goes_into_a_page_or_its_row_begins_anew(state):
    at, held, waits, count, active = state
    blocks = np.broadcast_to(1.0 + np.arange(K)[:, None], (K, SIZE))
    blocks = blocks.reshape(K, 1, SIZE, 1)
    got, anew = jax.device_get(flushed(of(at, held, waits), blocks, count, active))
    left, want = POOL, np.zeros(K, bool)
    for k in sorted(range(K), key=lambda k: -count[k]):  # the longest first
        cost = held[k] + 1 if active[k] and count[k] else 0
        left -= cost
        want[k] = cost > 0 and left < 0
    np.testing.assert_array_equal(anew, want)
    np.testing.assert_array_equal(got.waits, waits | want)
    assert got.limit == (np.sum(active & ~want) if want.any() else LIMIT + 1)
    taken = [page for k in range(K) for page in got.at[k, : got.held[k]]]
    assert len(set(taken)) == len(taken)
    pool = got.pool.reshape(POOL, SIZE)
    for k in range(K):
        goes_on = active[k] and count[k] and not want[k]
        assert got.held[k] == (held[k] + 1 if goes_on else 0)
        if goes_on:
            np.testing.assert_array_equal(got.at[k, : held[k]], at[k, : held[k]])
            for page in at[k, : held[k]]:
                assert (pool[page] == -1 - page).all()
            assert (pool[got.at[k, held[k]]] == k + 1).all()


@settings(max_examples=300)
@given(states())
def test_slots_begin_where_pages_are_left_and_first_those_that_wait(state):
    at, held, waits, _, active = state
    again, idle = jax.device_get(room(of(at, held, waits), active))
    left = min(POOL - (held + 1)[active].sum(), LIMIT - active.sum())
    for who, may in ((waits, again), (~active & ~waits, idle)):
        for k in np.flatnonzero(who):
            assert may[k] == (left > 0)
            left -= 1
        assert not may[~who].any()


@given(states(), st.integers(0, 2**K - 1))
def test_a_slot_that_begins_has_no_pages_and_waits_no_more(state, which):
    at, held, waits, _, _ = state
    new = (which >> np.arange(K)) % 2 == 1
    got = jax.device_get(begun(of(at, held, waits), new))
    np.testing.assert_array_equal(got.held, np.where(new, 0, held))
    np.testing.assert_array_equal(got.waits, waits & ~new)


@given(st.floats(-300, 300))
def test_parts_of_a_softmax_are_joined_however_far_apart(away):
    """Weighted values over both, of scores of which neither part need matter."""
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(1, 2, n, 8)).astype(np.float32) for n in (3, 6, 6))
    k[..., 4:, :] += np.float32(away) * q[..., :1, :] / np.sum(q[..., :1, :] ** 2)
    out, top, total = jax.device_get(joined(q, k, v))
    scores = np.einsum("...rd,...sd->...rs", q.astype(float), k) / 8**0.5
    want = np.exp(scores - scores.max(-1, keepdims=True))
    close(top, scores.max(-1), rtol=1e-5, atol=1e-5)
    close(total, want.sum(-1), rtol=1e-3)
    close(out, want @ v, rtol=1e-3, atol=1e-3)


@given(st.integers(1, 9), st.integers(0, 7))
def test_a_slot_sees_the_tokens_of_its_row_and_no_others(count, start):
    """What its block holds of the time before is in a page, or another row's."""
    time = start + count - 1  # of its last token
    held = time // SIZE - start // SIZE
    pages = of(
        np.zeros((1, 6), np.int32), np.full(1, held, np.int32), np.zeros(1, bool)
    )
    got = seen(pages, np.full(1, count, np.int32), np.int32(time))[0]
    now, first = time // SIZE * SIZE, start // SIZE * SIZE
    times = [*range(now, now + SIZE), *range(first, first + 6 * SIZE)]
    want = [start <= t <= time for t in times[:SIZE]]
    want += [start <= t < now for t in times[SIZE:]]
    np.testing.assert_array_equal(got, want)


# ----- how many


def test_there_are_slots_for_completions_of_a_quarter_of_the_longest():
    where = cache_sizes.Places(contexts=4, prompt=256, steps=2048, shards=2)
    for tokens, most, slots, pages in (
        (32 * 2048, 1000, 2 * 93, 512 - 93),
        (32 * 2048, 70, 70, 512 - 35),
        (2048 + 512, 1000, 2 * 3, 20 - 3),
    ):
        bound = 8.0 * (tokens + 2 * 256)
        room = where.room(most, bound=bound, token=8.0, page=128)
        assert room == cache_sizes.Room(slots=slots, page=128, pages=pages)
        assert room.slots // 2 * 128 + room.pages * room.page <= tokens
    less = 8.0 * (2048 + 384 + 2 * 256)  # the longest would have too few pages
    rings = where.room(1000, bound=less, token=8.0, page=128)
    assert rings == cache_sizes.Room(slots=2)
    few = where.room(64, bound=8.0 * (32 * 2048 + 512), token=8.0, page=128)
    assert few == cache_sizes.Room(slots=64)  # there is a ring for each
