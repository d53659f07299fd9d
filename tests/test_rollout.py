"""The sampler: the trainer's numbers, no influence of order, slots or neighbours."""

import dataclasses
import re
from functools import cache, partial
from types import SimpleNamespace
from unittest import mock

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contracts import close
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from outputs import message

from curax import allocate, rollout, stop, update
from curax.arrays import cache_sizes, choice, queues
from curax.config import ConfigError
from curax.models import decoding, lanes, softmax
from curax.types import SharedCache

KEY = jax.random.key(1)
logprobs = jax.jit(
    lambda params, rows, temperature: update.logprobs(
        tiny.MODEL,
        params,
        tiny.CONTEXTS,
        rows.tokens,
        rows.mask,
        rows.context,
        update.Settings(temperature=temperature),
    )
)
full_logits = jax.jit(partial(tiny.full_logits, tiny.MODEL))


@jax.jit
def traced(params, asked, key, temperature, top_p):
    """The sampler with magnitudes that are arrays, and with a top-k."""
    how = tiny.settings(temperature=temperature, top_p=top_p, top_k=9)
    return rollout.sample(tiny.MODEL, params, tiny.CONTEXTS, asked, key, how)


@cache
def truncated():
    return traced(tiny.params(), tiny.ROWS, KEY, *np.float32([0.7, 0.8]))


def log_softmax(rows, temperature=1.0):
    """`[N, T, V]` of a plain forward over the context and completion of each row."""
    sequence = tiny.whole(tiny.CONTEXTS, rows.tokens, rows.context)
    logits = np.asarray(full_logits(tiny.params(), *sequence), np.float64)
    return logits / temperature - np.log(
        np.exp(logits / temperature).sum(-1, keepdims=True)
    )


def entropies(logp):
    return -(np.exp(logp) * logp).sum(-1)


def of_tokens(logp, rows):
    return np.take_along_axis(logp, np.asarray(rows.tokens)[..., None], -1)[..., 0]


def reordered(tree, order):
    return jax.tree.map(lambda leaf: leaf[order], tree)


# ----- numbers


@pytest.mark.first(1)
@pytest.mark.parametrize("slots", [0, 3])
def test_sampler_and_trainer_agree_to_a_ten_thousandth_of_a_nat(slots):
    rows = tiny.drawn(slots)
    want = np.asarray(logprobs(tiny.params(), rows, np.float32(1)))
    assert rows.mask.sum() > 20
    close(rows.logp_policy, np.where(rows.mask, want, 0), rtol=0, atol=1e-4)
    np.testing.assert_array_equal(rows.logp_behaviour, rows.logp_policy)
    close(want, of_tokens(log_softmax(rows), rows), rtol=0, atol=1e-5)
    entropy = np.where(rows.mask, entropies(log_softmax(rows)), 0)
    close(rows.entropy, entropy, rtol=0, atol=1e-5)


@pytest.mark.long
def test_sampler_and_trainer_agree_at_every_temperature():
    rows = truncated()
    want = np.asarray(logprobs(tiny.params(), rows, np.float32(0.7)))
    close(rows.logp_policy, np.where(rows.mask, want, 0), rtol=0, atol=1e-4)
    logp = log_softmax(rows, 0.7)
    close(want, of_tokens(logp, rows), rtol=0, atol=1e-5)
    close(rows.entropy, np.where(rows.mask, entropies(logp), 0), rtol=0, atol=1e-5)


@pytest.mark.long
def test_in_bfloat16_sampler_and_trainer_differ_by_less_than_a_fiftieth_of_a_nat():
    # Measured: 5e-7 here, 2e-3 over wider random models; one flipped rounding does it.
    low = tiny.model(dtype=jnp.bfloat16)
    draw = jax.jit(partial(rollout.sample, low, how=tiny.settings(slots=3)))
    rows = draw(tiny.params(), tiny.CONTEXTS, tiny.ROWS, KEY)
    assert rows.logp_policy.dtype == jnp.float32
    read = jax.jit(partial(update.logprobs, low, settings=update.Settings()))
    want = read(tiny.params(), tiny.CONTEXTS, rows.tokens, rows.mask, rows.context)
    assert np.abs(np.where(rows.mask, want - rows.logp_policy, 0)).max() < 0.02
    precise = logprobs(tiny.params(), rows, np.float32(1))
    off = np.abs(np.where(rows.mask, precise - rows.logp_policy, 0))
    assert 1e-4 < off.max() < 0.3


# ----- what a row is


def test_a_completion_ends_at_the_end_token_or_at_max_tokens():
    rows = jax.device_get(tiny.drawn())
    drawn = rows.exists
    assert not rows.finished[drawn].all()
    assert (np.diff(rows.mask.astype(int)) <= 0).all()  # no gaps
    length = rows.mask.sum(-1)
    last = np.take_along_axis(rows.tokens, np.maximum(length - 1, 0)[:, None], 1)[:, 0]
    ends = np.isin(rows.tokens, tiny.END) & rows.mask
    assert set(rows.tokens[ends]) == set(tiny.END)
    np.testing.assert_array_equal(rows.finished, np.isin(last, tiny.END) & drawn)
    np.testing.assert_array_equal(ends.sum(-1), rows.finished)
    assert (length[drawn & ~rows.finished] == tiny.T).all()
    assert (length[drawn] > 0).all()
    assert (rows.tokens[~rows.mask] == tiny.PAD).all()
    for field in tiny.FLOATS:
        assert (getattr(rows, field)[~rows.mask] == 0).all()


@pytest.mark.parametrize("slots", [0, 3])
def test_rows_that_do_not_exist_draw_nothing(slots):
    rows = tiny.drawn(slots)
    absent = ~np.asarray(rows.exists)
    assert absent.sum() == 2
    assert not rows.mask[absent].any()
    assert not rows.finished[absent].any()
    nobody = dataclasses.replace(tiny.ROWS, exists=jnp.zeros(10, bool))
    rows = tiny.sampler(slots)(tiny.params(), tiny.CONTEXTS, nobody, KEY)
    assert not rows.mask.any()
    assert (rows.tokens == tiny.PAD).all()


@pytest.mark.first(2)
@pytest.mark.parametrize("slots", [3, 7, 9])
def test_the_number_of_slots_changes_nothing(slots):
    tiny.agree(tiny.drawn(slots), tiny.drawn())


@pytest.mark.long
def test_a_bound_of_the_cache_makes_rows_wait_and_changes_nothing():
    token = 2 * 2 * 8 * 4  # two layers, keys and values of one head of 8, float32
    bound = token * (3 * tiny.P + 3 * tiny.T) + token
    how = tiny.settings(cache_bytes=bound)
    draw = jax.jit(partial(rollout.sample, tiny.MODEL, how=how))
    lowered = draw.lower(tiny.params(), tiny.CONTEXTS, tiny.ROWS, KEY)
    held = set(re.findall(rf"tensor<(\d+)x1x{tiny.T}x8xf32>", lowered.as_text()))
    assert held == {"3"}  # slots that have columns, of ten rows
    got = draw(tiny.params(), tiny.CONTEXTS, tiny.ROWS, KEY)
    jax.tree.map(np.testing.assert_array_equal, got, tiny.drawn(3))
    tiny.agree(got, tiny.drawn())


def test_slots_follow_from_a_bound_and_one_at_least_must_fit():
    where = cache_sizes.Places(contexts=6, prompt=10, steps=7, shards=4)
    assert where.tokens(9) == (21, 30)
    wants = {0: 9, 1e9: 9, 2 * (30 + 14): 8, 2 * (30 + 14) - 1: 4, 2 * (30 + 7): 4}
    for bound, want in wants.items():
        assert where.slots(9, bound=bound, token=2.0) == want
    said = message(ConfigError, where.slots, 9, bound=2.0 * 36, token=2.0)
    assert said.startswith("sampling.cache_gib leaves 6.706e-08 GiB for")
    assert "completion of 7 tokens beside 6 prompts of 10 takes 6.899e-08; set" in said


def test_heads_that_fill_a_row_up_are_counted(monkeypatch):
    policy = tiny.model(layers=1, heads=6, kv_heads=3)
    prefix = rollout.prefill(policy, tiny.random_params(policy), tiny.CONTEXTS)

    def counted():
        return rollout.token_bytes(policy, prefix.cache, tiny.CONTEXTS)

    d, item = prefix.cache[0][0].shape[-1], 4
    assert counted() == 2 * 3 * d * item
    monkeypatch.setattr(lanes, "side_by_side", lambda *_: 2)
    assert counted() == 2 * 4 * d * item


@pytest.mark.parametrize("slots", [0, 3])
def test_permuted_rows_are_permuted_completions(slots):
    order = np.random.default_rng(0).permutation(10)
    asked = reordered(tiny.ROWS, order)
    got = tiny.sampler(slots)(tiny.params(), tiny.CONTEXTS, asked, KEY)
    tiny.agree(got, reordered(tiny.drawn(), order))


def test_a_row_does_not_depend_on_which_others_are_drawn():
    asked = allocate.rows_to_draw(jnp.array([1, 6, 2]), rows=10)
    got = tiny.sampler(3)(tiny.params(), tiny.CONTEXTS, asked, KEY)
    # The rows of both, by their prompts and slots.
    here, there = np.array([0, 1, 7, 8]), np.array([0, 3, 4, 5])
    tiny.agree(reordered(got, here), reordered(tiny.drawn(), there))


def test_a_context_may_serve_several_prompts():
    # Prompts 0 and 1 share a context, so they differ by their keys alone.
    asked = dataclasses.replace(tiny.ROWS, context=tiny.ROWS.prompt // 2 * 2)
    got = tiny.sampler()(tiny.params(), tiny.CONTEXTS, asked, KEY)
    same = np.array([0, 1, 2, 4, 5, 6, 7, 8, 9])
    tiny.agree(reordered(got, same), reordered(tiny.drawn(), same))
    np.testing.assert_array_equal(got.context[:4], 0)
    want = of_tokens(log_softmax(got), got)
    close(got.logp_policy, np.where(got.mask, want, 0), rtol=0, atol=1e-5)


@pytest.mark.long
def test_a_context_is_read_once_and_a_slot_is_never_idle_while_rows_wait():
    spied, shapes, steps = tiny.spied(tiny.MODEL)
    draw = jax.jit(partial(rollout.sample, spied, how=tiny.settings(slots=1)))
    rows = draw(tiny.params(), tiny.CONTEXTS, tiny.ROWS, KEY)
    jax.effects_barrier()
    assert set(shapes) == {(3, tiny.P), (1, 1)}
    assert steps.count((3, tiny.P)) == 1
    assert steps.count((1, 1)) == rows.mask.sum()
    tiny.agree(rows, tiny.drawn())


@pytest.mark.long
def test_sampling_maps_over_policies_and_keys():
    def draw(params, key):
        sample = partial(rollout.sample, tiny.MODEL, how=tiny.settings(slots=3))
        return sample(params, tiny.CONTEXTS, tiny.ROWS, key)

    weights = [jax.tree.map(lambda p, s=s: p * s, tiny.params()) for s in (1.0, 0.9)]
    keys = jax.random.split(KEY, 2)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    got = jax.jit(jax.vmap(draw))(stacked, keys)
    assert (got.tokens[0] != got.tokens[1]).any()
    for i in range(2):
        own = tiny.sampler(3)(weights[i], tiny.CONTEXTS, tiny.ROWS, keys[i])
        tiny.agree(jax.tree.map(lambda leaf, i=i: leaf[i], got), own)


# ----- stages


def test_a_stage_reads_at_most_three_quarters_of_the_next_and_there_are_three():
    assert cache_sizes.widths(20, 255) == (255,)
    assert cache_sizes.widths(20, 256) == (128, 256)
    assert cache_sizes.widths(20, 4096) == (1024, 2048, 4096)
    assert cache_sizes.widths(512, 1024) == (256, 512, 1024)
    assert cache_sizes.widths(512, 512) == (256, 512)
    assert cache_sizes.widths(512, 511) == (511,)
    assert cache_sizes.widths(512, 255) == (255,)
    assert cache_sizes.widths(8192, 1024) == (1024,)


@pytest.mark.long
@pytest.mark.parametrize("slots", [0, 3])
def test_stages_change_nothing_and_read_no_more_than_the_longest_has_needed(
    slots, monkeypatch
):
    monkeypatch.setattr(cache_sizes, "widths", lambda context, steps: (1, 2, 4, steps))
    monkeypatch.setattr(decoding, "COPIED", 1)  # tiles one by one
    steps = []

    def spy(params, tokens, positions, seen, *rest):
        if tokens.shape[1] == 1:
            jax.debug.callback(lambda: steps.append(seen.shape[1] - tiny.P))
        return tiny.MODEL.features(params, tokens, positions, seen, *rest)

    spied = dataclasses.replace(tiny.MODEL, features=spy)
    draw = jax.jit(partial(rollout.sample, spied, how=tiny.settings(slots=slots)))
    rows = draw(tiny.params(), tiny.CONTEXTS, tiny.ROWS, KEY)
    jax.effects_barrier()
    tiny.agree(rows, tiny.drawn())
    want = np.asarray(logprobs(tiny.params(), rows, np.float32(1)))
    close(rows.logp_policy, np.where(rows.mask, want, 0), rtol=0, atol=1e-4)
    if slots:  # here a slot is never at the end of a column's row alone
        assert steps[:3] == [1, 2, 4]
        assert steps == sorted(steps)
    else:
        assert steps == [1, 2, 4, 4, 5]


@pytest.fixture(params=["blocks", "mosaic", "triton"])
def ragged(request, monkeypatch):
    """Blocks of two columns, read by the loop of a CPU or by a kernel, interpreted.

    As a function of keys and values `[N, kv_heads, S, d]`.
    """
    how, read = softmax.of_blocks, mock.Mock(called=True)
    if request.param != "blocks":
        how, read = softmax.of_kernel, mock.Mock(wraps=getattr(softmax, request.param))
        monkeypatch.setattr(softmax, "mosaic", read)
    monkeypatch.setitem(softmax.BY_PLATFORM, "cpu", how)
    monkeypatch.setattr(softmax, "LEAST", 1)
    monkeypatch.setattr(softmax, "BLOCK", 2)
    monkeypatch.setattr(softmax, "TILE", 2)
    monkeypatch.setattr(softmax, "piece", lambda *_: 4)

    def read_by(q, k, v, seen):  # a new one, or programs of others would be taken
        if how is softmax.of_blocks:
            k, v = (in_blocks(x, softmax.BLOCK) for x in (k, v))
            k = jnp.swapaxes(k, -1, -2)
        return how(q, k, v, seen)

    yield read_by
    assert read.called


def in_blocks(x, size):
    """`[N, heads, S, d]` as `[N, b, heads, size, d]`."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % size), (0, 0)))
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1, size, x.shape[3]), 1, 2)


@pytest.mark.long
def test_blocks_of_columns_that_hold_tokens_are_read_and_change_nothing(ragged):
    for slots in (0, 3):  # all rows at a time, and rings that several use in turn
        sample = partial(rollout.sample, tiny.MODEL, how=tiny.settings(slots=slots))
        draw = jax.jit(lambda *given, sample=sample: sample(*given))
        rows = draw(tiny.params(), tiny.CONTEXTS, tiny.ROWS, KEY)
        tiny.agree(rows, tiny.drawn())


@pytest.mark.parametrize("slots", [0, 3])
def test_keys_with_columns_last_change_nothing(slots, monkeypatch):
    monkeypatch.setattr(softmax, "TRANSPOSED", tiny.T)
    own = tiny.MODEL.ragged([(jnp.zeros((3, 1, 0, 8)),) * 2], tiny.T)
    assert [x.shape for x in own[0]] == [(3, 1, 8, tiny.T), (3, 1, tiny.T, 8)]
    sample = partial(rollout.sample, tiny.MODEL, how=tiny.settings(slots=slots))
    draw = jax.jit(lambda *given: sample(*given))
    rows = draw(tiny.params(), tiny.CONTEXTS, tiny.ROWS, KEY)
    tiny.agree(rows, tiny.drawn())


def test_keys_lie_with_columns_last_where_several_queries_read_many(monkeypatch):
    assert softmax.transposes(64, 2, 4)
    assert softmax.transposes(255, 16, 4)
    assert not softmax.transposes(63, 2, 4)
    assert not softmax.transposes(256, 2, 4)  # these are read by blocks
    assert not softmax.transposes(64, 1, 4)
    assert not softmax.transposes(64, 2, 2)
    monkeypatch.setattr(softmax, "platform", lambda: "gpu")
    assert not softmax.transposes(64, 2, 4)


@pytest.mark.first(1)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (6, 3), (2, 1)])
def test_heads_side_by_side_change_nothing(heads, kv_heads, monkeypatch):
    """Heads of keys two to a row, the last of them filled up, whatever reads them."""
    policy = tiny.model(layers=1, heads=heads, kv_heads=kv_heads)
    sample = partial(rollout.sample, policy, how=tiny.settings(slots=3))

    def draw():
        run = jax.jit(lambda *given: sample(*given))
        return run(tiny.random_params(policy), tiny.CONTEXTS, tiny.ROWS, KEY)

    apart = draw()
    monkeypatch.setattr(lanes, "side_by_side", lambda *_: 2)
    tiny.agree(draw(), apart)
    with monkeypatch.context() as patch:
        patch.setattr(softmax, "TRANSPOSED", 1)
        tiny.agree(draw(), apart)
    monkeypatch.setattr(softmax, "LEAST", 1)
    monkeypatch.setattr(softmax, "BLOCK", 2)
    for read in (softmax.of_blocks, softmax.of_kernel):
        monkeypatch.setitem(softmax.BY_PLATFORM, "cpu", read)
        tiny.agree(draw(), apart)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "cut", "many"),
    [
        (14, 2, 64, 1, 2),
        (32, 8, 64, 2, 2),
        (14, 2, 64, 2, 1),  # a shard would have half a row
        (32, 8, 32, 1, 4),
        (15, 5, 64, 1, 2),  # half of the last row is filled up
        (15, 5, 64, 5, 1),  # no shard would have whole rows
        (15, 5, 64, 3, 1),
        (4, 1, 64, 1, 2),
        (16, 8, 128, 1, 1),
        (8, 4, 256, 1, 1),
        (8, 4, 80, 1, 1),
    ],
)
def test_heads_lie_side_by_side_where_they_fill_lanes(
    heads, kv_heads, d, cut, many, monkeypatch
):
    asked = heads, kv_heads, d
    assert lanes.side_by_side(*asked) == 1  # but for a TPU
    monkeypatch.setattr(lanes, "platform", lambda: "tpu")
    monkeypatch.setattr(lanes, "shards", lambda _, n: 1 if n % cut else cut)
    assert lanes.side_by_side(*asked) == many


def test_a_piece_is_of_so_many_bytes():
    assert softmax.piece(2, 16, 4) == 32
    assert softmax.piece(2, 64, 4) == 8
    assert softmax.piece(8, 128, 4) == 4  # at least


@pytest.mark.parametrize(
    ("columns", "blocks", "size"),
    [(256, 2, 128), (257, 3, 86), (300, 3, 100), (384, 3, 128), (16_513, 130, 128)],
)
def test_blocks_hold_few_columns_more_than_there_are(columns, blocks, size):
    none = jnp.zeros((3, 2, 0, 8), jnp.bfloat16)
    ((k, v),) = jax.eval_shape(lambda x: softmax.transposed(((x, x),), columns), none)
    assert (k.shape, v.shape) == ((3, blocks, 2, 8, size), (3, blocks, 2, size, 8))
    assert k.dtype == v.dtype == none.dtype


@pytest.mark.long
def test_columns_grow_where_a_model_has_no_prefixes_that_slots_share():
    """`Model.ragged` is of these, and a cache may be one array."""
    alone = dataclasses.replace(tiny.MODEL, shared=None)
    how = tiny.settings(max_tokens=softmax.LEAST)
    given = tiny.params(), tiny.CONTEXTS, tiny.ROWS, KEY
    got, want = (rollout.sample(x, *given, how=how) for x in (alone, tiny.MODEL))
    tiny.agree(got, want)

    def features(params, tokens, positions, seen, cache=None, column=None):
        wide = jnp.ones((*tokens.shape, 1))
        if isinstance(cache, SharedCache):
            assert cache.own.shape == (len(tokens), 1, how.max_tokens, 1)
            return wide, cache
        return wide, jnp.ones((len(tokens), 1, tokens.shape[1], 1))

    single = dataclasses.replace(
        tiny.MODEL,
        features=features,
        head=lambda params: jnp.zeros((tiny.V, 1)),
        ready=None,
        shared=lambda cache: cache,
        ragged=cache_sizes.widened,
    )
    rows = rollout.sample(single, *given, how=how)
    assert rows.mask.any(1).tolist() == tiny.ROWS.exists.tolist()


@pytest.mark.first(1)
def test_blocks_without_tokens_are_not_read(ragged, monkeypatch):
    """Keys that nobody sees may be anything, even no number."""
    for name in ("BLOCK", "TILE"):
        monkeypatch.setattr(softmax, name, 64)
    random = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(random.normal(size=(4, 2, *shape)), jnp.float32)
        for shape in ((3, 8), (300, 8), (300, 8))
    )
    place = np.arange(300)
    seen = (place >= 130) & (place < np.array([[131], [180], [300], [130]]))
    hidden = (place < 128)[None, None, :, None]
    run = jax.jit(ragged)
    junk = (jnp.where(hidden, jnp.nan, x) for x in (k, v))
    out, top, total = run(q, *junk, jnp.asarray(seen))
    e, high, sum_ = softmax.exponentials(q, k, jnp.asarray(seen))
    want = softmax.mixed(e, 1 / sum_, v)
    close((out / total[..., None])[:3], want[:3], rtol=0, atol=1e-6)
    close((top + jnp.log(total))[:3], (high + jnp.log(sum_))[:3], rtol=1e-5)
    assert not out[3].any()  # sees nothing
    large = run(q.at[0].multiply(1e4), k, v, jnp.asarray(seen))
    for got, own in zip(large, run(q, k, v, jnp.asarray(seen)), strict=True):
        np.testing.assert_array_equal(got[1:], own[1:])  # scores of others are others'
    batched = jax.jit(jax.vmap(ragged))(
        *(jnp.stack([x, x]) for x in (q, k, v, jnp.asarray(seen)))
    )
    close(batched[0][1], run(q, k, v, jnp.asarray(seen))[0], rtol=0, atol=1e-6)


@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_a_step_fetches_what_it_needs_and_else_what_is_there(steps, seed):
    random = np.random.default_rng(seed)
    found = np.sort(random.choice(40, steps, replace=False))
    some = random.random((steps, softmax.FETCHES)) < 0.4
    some[np.arange(steps), random.integers(softmax.FETCHES, size=steps)] = True
    got = np.asarray(softmax.fetched(jnp.asarray(found), jnp.asarray(some)))
    own = found[:, None] * softmax.FETCHES + np.arange(softmax.FETCHES)
    np.testing.assert_array_equal(got[some], own[some])
    again = ~some[1:]
    np.testing.assert_array_equal(got[1:][again], got[:-1][again])
    assert set(got[0]) <= set(own[0][some[0]])


@pytest.mark.parametrize(
    ("kv_heads", "slots", "queries", "heads"),
    [(8, 1, 2, 8), (8, 8, 2, 8), (8, 32, 4, 4), (32, 32, 1, 4), (3, 32, 8, 3)],
)
def test_a_step_reads_as_many_heads_as_have_room(kv_heads, slots, queries, heads):
    assert softmax.heads_at_once(kv_heads, slots, queries, 128, 2) == heads


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend")
@pytest.mark.parametrize(
    ("paged", "queries", "width"), [(False, 2, 300), (False, 96, 32), (True, 7, 256)]
)
def test_the_kernel_of_gpus_is_lowered_where_there_is_none(paged, queries, width):
    array = jax.ShapeDtypeStruct
    device = AbstractDevice("NVIDIA H100", num_cores=None, platform="gpu")
    keys = array((9, 2, softmax.BLOCK if paged else width, 64), jnp.bfloat16)
    q, seen = array((4, 2, queries, 64), keys.dtype), array((4, width), bool)
    source = array((4, width // softmax.BLOCK) if paged else (4,), jnp.int32)
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(softmax.of_kernel).trace(q, keys, keys, seen, source)
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("platform", "d", "item", "chip", "read"),
    [
        ("gpu", 64, 2, "8.0", "of_kernel"),
        ("gpu", 64, 2, "7.5", None),
        ("gpu", 64, 2, "gfx942", None),
        ("gpu", 96, 2, "9.0", None),
        ("gpu", 8, 2, "9.0", None),
        ("gpu", 128, 2, "8.6", "of_kernel"),
        ("gpu", 128, 4, "8.6", None),
        ("gpu", 256, 2, "9.0", None),
        ("tpu", 128, 2, "", "of_kernel"),
        ("tpu", 64, 2, "", None),
        ("cpu", 8, 2, "", "of_blocks"),
    ],
)
def test_columns_are_read_by_blocks_where_a_head_fits(
    platform, d, item, chip, read, monkeypatch
):
    device = SimpleNamespace(compute_capability=chip)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(softmax, "platform", lambda: platform)
    assert softmax.by_blocks(255, d, item) is None
    assert softmax.by_blocks(256, d, item) is (read and getattr(softmax, read))
    monkeypatch.setattr(softmax, "TRITON", "jax.experimental.pallas.gone")
    assert (softmax.by_blocks(256, d, item) is None) == (platform == "gpu" or not read)


# ----- shards


@pytest.mark.long
@given(st.lists(st.integers(0, 16), min_size=12, max_size=12), st.integers(1, 16))
def test_shards_have_queues_of_about_equal_length_that_hold_every_row_once(
    counts, shards
):
    wanted = jnp.array(counts, jnp.int32)
    queue = queues.Queue(row=wanted, first=wanted, wanted=wanted, shards=shards)
    order = np.asarray(queue.dealt())
    np.testing.assert_array_equal(np.sort(order), np.arange(12))
    blocks = np.array(counts)[order].reshape(queue.blocks, -1)
    assert np.ptp(blocks.sum(-1)) <= max(counts)
    held = np.asarray(queue.shares(wanted[order]))
    assert held.shape == (shards, blocks.shape[1])
    for own, groups in zip(np.split(held, queue.blocks), blocks, strict=True):
        np.testing.assert_array_equal(own.sum(0), groups)
        assert (np.ptp(own, 0) <= 1).all()


# ----- stopping

MOST, ALL = 6, allocate.rows_to_draw(jnp.array([6, 0, 5]), rows=14)
SHALLOW = tiny.model(layers=1)  # what stops does not depend on the depth
SOME_STOP = jax.random.key(7)  # draws that meet either rule early, of some prompts


@cache
def unstopped():
    """The shallow policy's weights, and all completions that it may draw."""
    params = tiny.random_params(SHALLOW)
    draw = jax.jit(partial(rollout.sample, SHALLOW, how=tiny.settings()))
    return params, jax.device_get(draw(params, tiny.CONTEXTS, ALL, SOME_STOP))


def says(prompt, tokens, mask):
    """Half of the completions are right; of a fifth the verifier cannot tell."""
    total = jnp.sum(tokens, -1, where=mask) + prompt
    return jnp.where(total % 5 == 4, jnp.nan, (total % 2).astype(jnp.float32))


def naively_stopped(rows, rule, size):
    """Which rows a prompt-by-prompt loop draws, from completions of all of them."""
    outcome = np.asarray(says(rows.prompt, rows.tokens, rows.mask))
    drawn = np.zeros(len(outcome), bool)
    for b in range(3):
        own = np.flatnonzero(rows.exists & (rows.prompt == b))
        for start in range(0, len(own), size):
            drawn[own[start : start + size]] = True
            known = outcome[own[: start + size]]
            known = known[~np.isnan(known)]
            if rule((known == 1).sum(), (known == 0).sum()):
                break
    return drawn


# Two rules, and what each says of numbers of right and of wrong completions.
RULES = (
    (stop.positives, lambda right, wrong: right >= 1),
    (partial(stop.balanced, right=2, wrong=1), lambda r, w: r >= 2 and w >= 1),
)


@cache
def stopping(size, slots):
    """A sampler of both rules; the first argument says which of them holds."""

    def draw(second, params, *args):
        def met(*grids):
            return jnp.where(second, *(rule(*grids) for rule, _ in RULES[::-1]))

        rule = rollout.Stopping(met=met, outcome=says, size=size, most=MOST)
        how = tiny.settings(slots=slots, stopping=rule)
        return rollout.sample(SHALLOW, params, *args, how)

    return jax.jit(draw)


@pytest.mark.first(1)
@pytest.mark.parametrize("size", [1, 2, 4, 6])
@pytest.mark.parametrize("second", [False, True])
def test_a_prompt_stops_after_the_round_in_which_its_rule_is_met(second, size):
    """Whatever the number of slots, what is drawn is what is drawn without a rule."""
    params, whole = unstopped()
    want = naively_stopped(whole, RULES[second][1], size)
    assert want.sum() < whole.exists.sum() or size == MOST
    for slots in (0, 2):
        draw = stopping(size, slots)
        got = jax.device_get(draw(second, params, tiny.CONTEXTS, ALL, SOME_STOP))
        np.testing.assert_array_equal(got.exists, want)
        np.testing.assert_array_equal(got.tokens[want], whole.tokens[want])
        np.testing.assert_array_equal(got.mask[want], whole.mask[want])
        assert not got.mask[~want].any()
        close(got.logp_behaviour[want], whole.logp_behaviour[want], atol=1e-5)


@pytest.mark.long
def test_slots_of_a_prompt_that_stopped_go_to_others_at_once():
    """One slot never idles: as many steps as tokens, and none for rows not drawn.

    Lanes of one program ask a verifier at every token: of what has ended alone.
    """
    asked = []

    def of(prompt, tokens, mask):
        jax.debug.callback(lambda mask: asked.append(mask.any(-1).sum()), mask)
        return says(prompt, tokens, mask)

    spied, _, steps = tiny.spied(SHALLOW)
    stopping = rollout.Stopping(met=stop.positives, outcome=of, size=1, most=MOST)
    options = {"slots": 1, "stopping": stopping}
    draw = jax.jit(partial(rollout.sample, spied, how=tiny.settings(**options)))
    rows = draw(unstopped()[0], tiny.CONTEXTS, ALL, SOME_STOP)
    jax.effects_barrier()
    assert steps.count((1, 1)) == rows.mask.sum()
    assert sum(asked) == rows.exists.sum()


def test_the_norm_of_the_score_in_the_logits_is_its_definition():
    rows = jax.device_get(tiny.drawn())
    chance = np.exp(log_softmax(rows))
    away = np.eye(tiny.V)[rows.tokens] - chance
    want = np.where(rows.mask, (away**2).sum(-1), 0)
    close(rows.score_sq_norm, want, rtol=0, atol=1e-5)


# ----- what is drawn


def test_greedy_completions_are_the_argmax_of_a_full_forward():
    rows = jax.device_get(tiny.drawn(0, 0))
    logp = log_softmax(rows)
    np.testing.assert_array_equal(
        rows.tokens[rows.mask], logp.argmax(-1).astype(int)[rows.mask]
    )
    assert not rows.logp_behaviour.any()
    want = np.where(rows.mask, of_tokens(logp, rows), 0)
    close(rows.logp_policy, want, rtol=0, atol=1e-5)
    for c in range(3):
        group = rows.tokens[(rows.context == c) & rows.exists]
        assert (group == group[0]).all()


def test_first_tokens_are_distributed_as_the_softmax_at_the_temperature():
    each = 1500
    asked = allocate.rows_to_draw(jnp.full(3, each), rows=3 * each)
    options = {"max_tokens": 1, "temperature": 1.7}
    draw = jax.jit(partial(rollout.sample, tiny.MODEL, how=tiny.settings(**options)))
    rows = draw(tiny.params(), tiny.CONTEXTS, asked, KEY)
    first = np.asarray(rows.tokens).reshape(3, each)
    some = reordered(rows, np.arange(0, 3 * each, each))
    logp = log_softmax(some, 1.7)[:, 0]
    close(logprobs(tiny.params(), some, np.float32(1.7)), some.logp_policy, atol=1e-5)
    for c in range(3):
        want = each * np.exp(logp[c])
        chi_square = (
            (np.bincount(first[c], minlength=tiny.V) - want) ** 2 / want
        ).sum()
        assert chi_square < 29.6  # 10 degrees of freedom: exceeded once in a thousand


def test_top_k_and_top_p_cut_the_distribution_drawn_from_and_not_the_policy():
    rows = jax.device_get(truncated())
    logp = log_softmax(rows, 0.7)
    cut = np.array([naive_cut(row, 9, 0.8) for row in logp.reshape(-1, tiny.V)])
    want = of_tokens(cut.reshape(logp.shape), rows)
    assert np.isfinite(want[rows.mask]).all()
    close(rows.logp_behaviour, np.where(rows.mask, want, 0), rtol=0, atol=1e-5)
    assert (rows.logp_behaviour > rows.logp_policy + 0.05)[rows.mask].all()


def test_the_mass_cut_off_is_what_the_kept_tokens_lack():
    rows = jax.device_get(truncated())
    logp = log_softmax(rows, 0.7)
    cut = np.array([naive_cut(row, 9, 0.8) for row in logp.reshape(-1, tiny.V)])
    kept = np.isfinite(cut).reshape(logp.shape)
    want = np.where(kept, 0.0, np.exp(logp)).sum(-1)
    got = np.asarray(choice.cut_mass(rows))
    close(got, np.where(rows.mask, want, 0.0), rtol=0, atol=1e-5)
    assert (got[rows.mask] > 0.04).all()
    whole = dataclasses.replace(rows, logp_behaviour=rows.logp_policy)
    assert not np.asarray(choice.cut_mass(whole)).any()


def naive_cut(logp, top_k, top_p):
    """Log-probs of the kept tokens, likeliest first, renormalised twice."""
    order = np.argsort(-logp)
    kept = order[: top_k or None]
    share = np.exp(logp[kept]) / np.exp(logp[kept]).sum()
    enough = 1 + int((np.cumsum(share) < top_p).sum())
    kept = kept[:enough]
    out = np.full(logp.shape, -np.inf)
    out[kept] = logp[kept] - np.log(np.exp(logp[kept]).sum())
    return out


truncate = jax.jit(choice.truncate, static_argnames="top_k")


@pytest.mark.parametrize("top_k", [0, 1, 4, 50])
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-6, 0.3, 0.5, 0.9, 1.0]))
def test_a_truncated_distribution_is_its_definition(top_k, seed, top_p):
    z = 2 * np.random.default_rng(seed).normal(size=(4, tiny.V)).astype(np.float32)
    logp = np.asarray(jax.nn.log_softmax(z))
    got = np.asarray(truncate(logp, top_k=top_k, top_p=np.float32(top_p)))
    want = [naive_cut(row.astype(np.float64), top_k, top_p - 1e-9) for row in logp]
    close(got, want, atol=1e-5)
    close(np.exp(got).sum(-1), 1)


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1.0), st.sampled_from([1.0, 8.0]))
def test_of_a_large_vocabulary_the_smallest_set_with_the_mass_is_kept(
    seed, top_p, scale
):
    z = np.random.default_rng(seed).normal(size=(3, choice.MANY))
    logp = np.asarray(jax.nn.log_softmax(scale * z.astype(np.float32)))
    got = np.asarray(truncate(logp, top_k=0, top_p=np.float32(top_p)))
    for row, cut in zip(logp.astype(np.float64), got, strict=True):
        kept, chance = np.isfinite(cut), np.exp(row)
        assert row[kept].min() > row[~kept].max(initial=-np.inf)
        assert chance[kept].sum() > top_p - 1e-5
        assert chance[row > row[kept].min()].sum() < top_p + 1e-5
        close(cut[kept], row[kept] - np.log(chance[kept].sum()), atol=1e-5)
    got = np.asarray(truncate(logp, top_k=5, top_p=1.0))
    want = np.sort(logp, -1)[:, -5:]
    np.testing.assert_array_equal(np.isfinite(got), logp >= want[:, :1])


def test_equally_likely_tokens_are_kept_or_cut_together():
    logp = np.log(np.array([[0.4, 0.2, 0.2, 0.2]], np.float32))
    want = [[True, True, True, True]]
    np.testing.assert_array_equal(np.exp(truncate(logp, top_k=2, top_p=1.0)) > 0, want)
    np.testing.assert_array_equal(np.exp(truncate(logp, top_k=0, top_p=0.5)) > 0, want)
    many = np.full((1, choice.MANY), -np.inf, np.float32)
    many[:, 7:11] = logp
    kept = np.exp(truncate(many, top_k=0, top_p=0.5)) > 0
    np.testing.assert_array_equal(kept, many > -np.inf)


def test_only_allowed_tokens_are_drawn_and_each_of_them_is():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    key = jax.random.split(KEY, 500)
    rows = jnp.broadcast_to(logits, (500, 4))
    drawn = choice.choose(key, rows, top_k=3, top_p=0.75)
    token, behaviour, policy, entropy, _ = drawn
    assert set(np.asarray(token)) == {1, 3}
    close(behaviour, np.log(np.where(token == 1, 4 / 7, 3 / 7)))
    close(policy, logits[token])
    close(entropy, -(np.exp(logits) * logits).sum())
    assert 0.5 < np.mean(token == 1) < 0.64


@cache
def on(platform, function):
    @jax.jit
    def call(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choice, "platform", lambda: platform)
            return function(*args)

    return call


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@given(st.integers(0, 2**32 - 1))
def test_the_largest_entry_is_the_first_one_and_what_jax_draws_is_drawn(platform, seed):
    rng = np.random.default_rng(seed)
    values = np.float32([-np.inf, -3, -0.0, 0, 1e-30, 2, 1e30])
    x = rng.choice(values, (6, 40))
    x[0] = -np.inf
    got = np.asarray(on(platform, choice.largest)(x))
    np.testing.assert_array_equal(got, np.argmax(x, -1))
    x[1:, rng.integers(40)] = np.nan
    got = np.asarray(on(platform, choice.largest)(x))
    assert got.min() >= 0
    assert got.max() < 40
    key, logp = jax.random.split(jax.random.key(seed), 6), rng.normal(size=(6, 40))
    logp = np.where(rng.random((6, 40)) < 0.3, -np.inf, logp).astype(np.float32)
    got = on(platform, choice.categorical)(key, logp)
    want = jax.vmap(jax.random.categorical)(key, logp)
    np.testing.assert_array_equal(got, want)


inverse = jax.jit(choice.inverse)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 0.9]))
def test_the_inverse_is_its_definition_and_finds_no_place_without_mass(seed, empty):
    rng = np.random.default_rng(seed)
    mass = np.exp(3 * rng.normal(size=(50, 40))) * (rng.random((50, 40)) >= empty)
    mass[:, rng.integers(40)] += 0.1
    mass = mass.astype(np.float32)
    share = rng.choice(np.float32([0, 0.1, 0.5, 1 - 2**-23]), 50)
    share[10:] = rng.random(40) * (1 - 2**-23)
    got = np.asarray(inverse(mass, share))
    assert (mass[np.arange(50), got] > 0).all()
    upto = np.cumsum(mass, -1, dtype=np.float64)
    target = share * upto[:, -1]
    want = np.argmax(upto > target[:, None], -1)
    near = np.abs(upto - target[:, None]).min(-1) < 1e-5 * upto[:, -1]
    assert (got[~near] == want[~near]).all()
    assert (~near).sum() > 20


def chosen_at(key, logits, temperature):
    return choice.choose(key, logits, temperature=temperature)


LARGE = (choice.MANY + 16, choice.MANY + 24, choice.MANY + 3)  # cut 1, 32 and 256 ways


@pytest.mark.parametrize("vocabulary", LARGE)
def test_each_token_of_a_large_vocabulary_lies_in_one_block(vocabulary):
    every = jnp.arange(vocabulary, dtype=jnp.float32)
    blocks = np.asarray(choice.in_blocks(every[None], fill=-1.0))[0]
    assert len(blocks) >= choice.FEW
    np.testing.assert_array_equal(blocks[blocks >= 0], every)
    alone = choice.in_blocks(jnp.where(jnp.eye(vocabulary)[::97] > 0, 0.0, -1e9))
    keys = jax.random.split(KEY, len(alone))
    token, _ = choice.of_blocks(keys, jnp.exp(alone).sum(-1), alone, vocabulary)
    np.testing.assert_array_equal(token, every[::97])


@pytest.mark.parametrize("vocabulary", LARGE)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 1.0, 4.0]))
def test_of_a_large_vocabulary_what_is_noted_is_its_definition(
    platform, vocabulary, seed, temperature
):
    logits = 6 * np.random.default_rng(seed).normal(size=(3, vocabulary))
    logits = logits.astype(np.float32)
    key = jax.random.split(jax.random.key(seed), 3)
    drawn = on(platform, chosen_at)(key, logits, np.float32(temperature))
    token, behaviour, policy, entropy, score = map(np.asarray, drawn)
    z = logits.astype(np.float64) / np.float32(temperature)
    logp = z - z.max(-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    chance = np.exp(logp)
    np.testing.assert_array_equal(behaviour, policy)
    close(policy, logp[np.arange(3), token], atol=1e-5)
    close(entropy, -(chance * logp).sum(-1), atol=1e-5)
    one = np.arange(vocabulary) == token[:, None]
    close(score, ((one - chance) ** 2).sum(-1), atol=1e-5)
    by_logp = choice.categorical(key, jnp.asarray(logp, jnp.float32))
    assert np.mean(token == by_logp) > 0.6  # but where a share is within rounding


@pytest.mark.long
@pytest.mark.parametrize("top_p", [0.999, 1.0])
@pytest.mark.parametrize("vocabulary", [4096, 4099, 4104])
def test_tokens_of_a_large_vocabulary_are_drawn_by_their_chances(vocabulary, top_p):
    places = np.array([0, 15, 16, 700, 701, vocabulary - 1])
    chance = np.array([0.05, 0.3, 0.1, 0.2, 0.25, 0.1])
    logits = np.full(vocabulary, -np.inf, np.float32)
    logits[places] = np.log(chance) + 5
    rows = 3000
    given_logits = jnp.broadcast_to(logits, (rows, vocabulary))
    token, behaviour, *_ = jax.jit(partial(choice.choose, top_p=top_p))(
        jax.random.split(KEY, rows), given_logits
    )
    count = (np.asarray(token)[:, None] == places).sum(0)
    assert count.sum() == rows
    chi_square = ((count - rows * chance) ** 2 / (rows * chance)).sum()
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in a thousand
    close(behaviour, np.log(chance)[np.searchsorted(places, token)], atol=1e-5)


# ----- many samplers side by side


@pytest.mark.long
@pytest.mark.parametrize("slots", [0, 3])
def test_samplers_side_by_side_draw_what_each_draws_alone(slots):
    many = jax.tree.map(lambda p: jnp.stack([p, 1.5 * p]), tiny.params())
    draw = partial(rollout.sample, tiny.MODEL, how=tiny.settings(slots=slots))
    both = jax.vmap(draw, in_axes=(0, None, None, None))
    args = tiny.CONTEXTS, tiny.ROWS, KEY
    got = jax.jit(both)(many, *args)
    steps = []
    for i in range(2):
        alone = jax.jit(draw)(jax.tree.map(lambda p, i=i: p[i], many), *args)
        np.testing.assert_array_equal(got.tokens[i], alone.tokens)
        np.testing.assert_array_equal(got.mask[i], alone.mask)
        for name in tiny.FLOATS:
            close(getattr(got, name)[i], getattr(alone, name), atol=1e-5)
        steps.append(int(alone.mask.sum()))
    assert steps[0] != steps[1]
    # No step chooses between old and new caches because one sampler may be done.
    for equation in hlo.equations(jax.make_jaxpr(both)(many, *args).jaxpr):
        if equation.primitive.name == "while":
            body = equation.params["body_jaxpr"].jaxpr
            chosen = [
                e.outvars[0].aval.shape
                for e in body.eqns
                if e.primitive.name == "select_n"
            ]
            caches = [s for s in chosen if len(s) == 5 and s[-2] == tiny.T]
            assert not caches, chosen


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{"scan_layers": True}, {"lora_rank": 2}, {"qkv_bias": True}]
)
def test_what_is_made_ready_for_decoding_changes_no_bit(dtype, options):
    layers = 2 if "scan_layers" in options else 1
    policy = tiny.model(dtype=dtype, layers=layers, **options)
    params = tiny.random_params(policy)
    got, want = (
        jax.jit(partial(rollout.sample, one, how=tiny.settings()))(
            params, tiny.CONTEXTS, tiny.ROWS, jax.random.key(1)
        )
        for one in (policy, dataclasses.replace(policy, ready=None))
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.long
def test_a_tpu_reads_the_last_token_too_and_finds_the_same(monkeypatch):
    prefix = rollout.prefill(tiny.MODEL, tiny.params(), tiny.CONTEXTS)
    tokens = jnp.arange(3 * tiny.T, dtype=jnp.int32).reshape(3, -1) % tiny.V
    given = tiny.params(), prefix, tiny.CONTEXTS.mask, tokens
    found = []
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(rollout, "platform", lambda platform=platform: platform)
        found.append(jax.jit(partial(rollout.extend, tiny.MODEL))(*given))
    close(found[1], found[0], rtol=1e-5, atol=1e-6)
