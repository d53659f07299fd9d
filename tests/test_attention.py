"""Attention: each implementation against naive numpy, and which one is taken where."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import close

from curax.arrays import sharding
from curax.arrays.lines import Lines, Visible
from curax.config import Mesh
from curax.models import attention, packed, transformer
from curax.step import mesh as meshes


def naive(q, k, v, mask):
    """One query of one head at a time; q `[heads, Q, d]`, k and v `[kv_heads, S, d]`"""
    out = np.zeros_like(q)
    for h, t in np.ndindex(*q.shape[:2]):
        own = h // (len(q) // len(k))
        score = np.exp(k[own][mask[t]] @ q[h, t] / np.sqrt(q.shape[-1]))
        out[h, t] = score / score.sum() @ v[own][mask[t]]
    return out


def arrays(n, heads, kv_heads, queries, length, d=8):
    """Random q, k, v; keys seen, padded on the left; the mask of causal queries."""
    random = np.random.default_rng(0)
    q = random.normal(size=(n, heads, queries, d)).astype(np.float32)
    k, v = random.normal(size=(2, n, kv_heads, length, d)).astype(np.float32)
    hidden = random.integers(0, length - queries + 1, n)
    hidden[0] = length - queries
    seen = np.arange(length) >= hidden[:, None]
    own = np.arange(length) <= np.arange(queries)[:, None] + length - queries
    return (q, k, v, seen), seen[:, None] & own


def through_xla(monkeypatch):
    """`flash` with all its reshaping, but without the kernel that a CPU lacks."""
    attend = jax.nn.dot_product_attention

    def dot_product_attention(*arrays, implementation, **options):
        assert implementation == "cudnn"
        assert all(x.shape[1] % 2 == 0 for x in arrays)
        return attend(*arrays, **options, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    return attention.flash


@pytest.mark.first(3)
@pytest.mark.parametrize("length", [3, 5, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("choice", ["plain", "flash"])
def test_causal_attention_is_its_definition(
    choice, heads, kv_heads, length, monkeypatch
):
    attend = attention.plain if choice == "plain" else through_xla(monkeypatch)
    inputs, mask = arrays(2, heads, kv_heads, 3, length)
    got = attend(*inputs, causal=True)
    for n, own in enumerate(zip(*inputs[:3], mask, strict=True)):
        close(got[n], naive(*own), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("length", [140, 165])
@pytest.mark.parametrize(
    ("choice", "lanes"), [("chunked", 128), ("chunked", 32), ("flash_long", 128)]
)
def test_long_rows_are_attended_to_as_short_ones_are(
    choice, lanes, length, monkeypatch
):
    for name in ("LANES", "CHUNK_ON_CPU"):  # 2 groups of 1 chunk; 2, 2 and 1
        monkeypatch.setattr(attention, name, lanes)
    flash = through_xla(monkeypatch)
    assert flash
    (q, k, v, _), _ = arrays(2, 4, 2, 140, length)
    seen = np.arange(length) >= np.array([0, length - 138])[:, None]
    weight = np.where(seen[:, None, -140:, None], q, 0)  # others see nothing

    def run(attend, *arrays):
        return jnp.sum(weight * attend(*arrays, seen, causal=True) ** 2)

    got, want = (
        jax.value_and_grad(partial(run, attend), (0, 1, 2))(q, k, v)
        for attend in (getattr(attention, choice), attention.plain)
    )
    jax.tree.map(partial(close, rtol=1e-4, atol=1e-4), got, want)


def test_the_kernel_for_long_rows_gets_no_mask(monkeypatch):
    given = []
    attend = partial(through_xla(monkeypatch), causal=True)
    plain, long = jax.nn.dot_product_attention, attention.flash_long
    assert attend

    def spy(*arrays, **options):
        given.append(set(options))
        return plain(*arrays, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    inputs, _ = arrays(2, 4, 2, 3, 5)
    long(*inputs, causal=True)
    lengths = {"query_seq_lengths", "key_value_seq_lengths"}
    assert given == [{"is_causal", "implementation", *lengths}]


@pytest.mark.parametrize(
    ("kind", "long", "chunk"),
    [
        ("cpu", attention.LONG_ON_CPU, attention.CHUNK_ON_CPU),
        ("gpu", attention.LONG, attention.LANES),
    ],
)
def test_in_chunks_neither_scores_nor_a_mask_of_a_long_row_exist(
    kind, long, chunk, monkeypatch
):
    monkeypatch.setattr(attention, "platform", lambda: kind)
    row = jax.ShapeDtypeStruct((1, 1, long, 8), jnp.float32)
    seen = jax.ShapeDtypeStruct((1, long), bool)

    def run(q, k, v, seen):
        choice = attention.choose(q.shape[-2], q.shape[-1], q.dtype)
        return jnp.sum(choice(q, k, v, seen, causal=True))

    text = jax.jit(jax.grad(run, (0, 1, 2))).lower(row, row, row, seen).as_text()
    sizes = [
        math.prod(map(int, found.split("x")[:-1]))
        for found in re.findall(r"tensor<((?:\d+x)+\w+)>", text)
    ]
    assert long * chunk <= max(sizes) < long**2 / 4


@pytest.mark.first(2)
@pytest.mark.parametrize("choice", ["plain", "flash"])
@pytest.mark.parametrize("queries", [1, 3])
def test_attention_that_is_not_causal_sees_all_it_is_shown(
    choice, queries, monkeypatch
):
    attend = attention.plain if choice == "plain" else through_xla(monkeypatch)
    (q, k, v, _), _ = arrays(2, 4, 2, queries, 6)
    seen = np.array([[True, False, True, True, False, True], [False] * 5 + [True]])
    got = attend(q, k, v, seen, causal=False)
    for n in range(2):
        mask = np.broadcast_to(seen[n], (queries, 6))
        close(got[n], naive(q[n], k[n], v[n], mask), atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (6, 2), (3, 1)])
def test_attention_on_gpus_lies_over_the_mesh(heads, kv_heads, monkeypatch):
    attend = through_xla(monkeypatch)
    inputs, mask = arrays(4, heads, kv_heads, 3, 5)
    tensor = 4 if heads == 4 else 2
    with meshes.use(meshes.make(Mesh(data=2, fsdp=4 // tensor, tensor=tensor))):
        got = jax.jit(partial(attend, causal=True))(*inputs)
    for n, own in enumerate(zip(*inputs[:3], mask, strict=True)):
        close(got[n], naive(*own), atol=1e-5)


def test_under_vmap_the_lengths_go_with_the_queries(monkeypatch):
    """cuDNN's rule makes lengths that are not mapped over fit by force, and fails."""

    @jax.custom_batching.custom_vmap
    def kernel(q, k, v, queries, keys):
        return q

    @kernel.def_vmap
    def _(size, mapped, q, k, v, queries, keys):
        assert mapped == [True] * 5
        assert queries.shape == keys.shape == (2, 2)
        return q, True

    def attend(*arrays, query_seq_lengths, key_value_seq_lengths, **_):
        return kernel(*arrays, query_seq_lengths, key_value_seq_lengths)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    (q, k, v, seen), _ = arrays(2, 4, 2, 3, 5)
    of = partial(attention.flash_long, seen=seen, causal=True)
    got = jax.vmap(of)(*(np.stack([x, 2 * x]) for x in (q, k, v)))
    np.testing.assert_array_equal(got[1], 2 * q)


def test_a_query_that_may_look_nowhere_gets_the_mean():
    (q, k, v, seen), _ = arrays(2, 4, 2, 3, 5)
    got = attention.plain(q, k, v, np.zeros_like(seen), causal=True)
    mean = np.repeat(v.mean(-2, keepdims=True), 2, 1)
    close(got, np.broadcast_to(mean, q.shape), atol=1e-5)


def test_what_is_not_seen_does_not_matter():
    (q, k, v, seen), _ = arrays(2, 4, 2, 3, 6)
    hidden = ~seen[:, None, :, None]
    want = attention.plain(q, k, v, seen, causal=True)
    got = attention.plain(
        q,
        np.where(hidden, np.float32(1e4), k),
        np.where(hidden, np.float32(1e4), v),
        seen,
        causal=True,
    )
    np.testing.assert_array_equal(got, want)


# ----- the TPU kernel, step by step


def loss(attend, shown, inputs, seen):
    out = attend(*inputs, seen, causal=True)
    return jnp.sum(jnp.where(shown, out, 0.0) ** 2), out


def against_plain(inputs, mask, within=None):
    """Output and gradients of the kernel are those of `plain`, where either is read."""
    *inputs, seen = inputs
    shown = mask.any(-1)[:, None, :, None]  # elsewhere: finite, and of no effect

    def both(attend):
        of = jax.value_and_grad(partial(loss, attend, shown), has_aux=True)
        return jax.jit(of)(tuple(inputs), seen)

    (_, want), gradient = both(attention.plain)
    with meshes.use(within):
        (_, got), slopes = both(attention.splash)
    assert np.isfinite(got).all()
    close(np.where(shown, got, 0), np.where(shown, want, 0), atol=2e-5)
    for one, other in zip(slopes, gradient, strict=True):
        close(one, other, rtol=1e-4, atol=5e-5)


def test_the_kernel_for_tpus_is_plain_attention_behind_a_padded_prefix():
    inputs, mask = arrays(2, 4, 2, 100, 228, 16)
    assert mask.any(-1).all()
    assert not inputs[3].all(-1).any()
    against_plain(inputs, mask)


@pytest.mark.long
def test_queries_that_may_look_nowhere_have_no_effect_in_the_kernel_for_tpus():
    (q, k, v, seen), mask = arrays(2, 2, 1, 130, 130, 16)
    seen = seen & (np.arange(130) >= np.array([[5], [129]]))
    mask = mask & seen[:, None]
    assert not mask.any(-1).all()
    against_plain((q, k, v, seen), mask)


@pytest.mark.long
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_the_kernel_for_tpus_lies_over_the_mesh(kv_heads):
    inputs, mask = arrays(4, 2, kv_heads, 3, 5, 16)
    against_plain(inputs, mask, meshes.make(Mesh(data=2, fsdp=2, tensor=2)))


# ----- which one is taken


def taken(monkeypatch, platform, q, length=200, causal=True, chip="9.0"):
    """The implementation that runs, by name."""
    names = []
    for name in ("plain", "chunked", "flash", "flash_long", "splash"):

        def spy(q, *_, name=name, **__):
            names.append(name)
            return q

        monkeypatch.setattr(attention, name, spy)
    device = type("Device", (), {"compute_capability": chip})
    monkeypatch.setattr(attention, "platform", lambda: platform)
    monkeypatch.setattr(jax, "local_devices", lambda: [device()])
    k = jnp.zeros((*q.shape[:2], length, q.shape[-1]), q.dtype)
    seen = jnp.ones((q.shape[0], length), bool)
    attention.by_platform(q, k, k, seen, causal=causal)
    return names


def queries(size=128, d=64, dtype=jnp.bfloat16):
    return jnp.zeros((1, 1, size, d), dtype)


@pytest.mark.parametrize(
    ("platform", "q", "options", "want"),
    [
        ("cpu", queries(), {}, "plain"),
        ("gpu", queries(), {}, "flash"),
        ("gpu", queries(3), {}, "flash"),
        ("gpu", queries(dtype=jnp.float16), {"chip": "8.0"}, "flash"),
        ("gpu", queries(), {"chip": "7.5"}, "plain"),
        ("gpu", queries(), {"chip": "gfx942"}, "plain"),
        ("gpu", queries(dtype=jnp.float32), {}, "plain"),
        ("gpu", queries(d=36), {}, "plain"),
        ("gpu", queries(d=256), {}, "plain"),
        ("gpu", queries(1), {}, "plain"),
        ("gpu", queries(2048), {}, "flash_long"),
        ("gpu", queries(2048, d=36), {}, "chunked"),
        ("cpu", queries(2048), {}, "chunked"),
        ("gpu", queries(), {"causal": False}, "plain"),
        ("tpu", queries(), {}, "splash"),
        ("tpu", queries(dtype=jnp.float32), {}, "splash"),
        ("tpu", queries(127), {}, "plain"),
        ("tpu", queries(d=80), {}, "plain"),
        ("tpu", queries(), {"causal": False}, "plain"),
    ],
)
def test_the_implementation_follows_device_and_shapes(
    platform, q, options, want, monkeypatch
):
    assert taken(monkeypatch, platform, q, **options) == [want]


def test_runs_of_many_seeds_take_a_kernel_that_can_be_mapped_over(monkeypatch):
    def taken_in(q, name):
        names = []
        run = partial(taken, monkeypatch, "gpu")
        jax.vmap(lambda q: names.extend(run(q)), axis_name=name)(q)
        return names

    q = jnp.stack([queries(), queries()])
    assert taken_in(q, sharding.SEEDS) == ["flash_long"]
    assert taken_in(q, "others") == ["flash"]


def test_the_platform_is_that_of_the_mesh_in_context_else_the_default(monkeypatch):
    assert sharding.platform() == "cpu"
    with meshes.use(meshes.make(Mesh(data=2))):
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        assert sharding.platform() == "cpu"
    assert sharding.platform() == "tpu"


def test_rows_that_are_mapped_one_by_one_over_a_mesh_take_the_plain_one(monkeypatch):
    mesh = meshes.make(Mesh(data=2))
    assert mesh
    for platform, kernel in (("tpu", "splash"), ("gpu", "flash")):
        with meshes.use(mesh):
            assert taken(monkeypatch, platform, queries()) == [kernel]
        with jax.set_mesh(mesh):
            assert taken(monkeypatch, platform, queries()) == ["plain"]


# ----- rows packed into lines


def test_how_rows_are_packed_follows_from_the_platform_and_the_prompt(monkeypatch):
    policy = transformer.model(vocab_size=8, heads=2, kv_heads=1, head_dim=64)
    assert policy.packs
    assert policy.packs(4096, 2000, 512) == Lines(4096)
    monkeypatch.setattr(attention, "platform", lambda: "tpu")
    assert policy.packs(4096, 2000, 512) == Lines(2048, 4, 2)
    assert policy.packs(1024, 32768, 1024) == Lines(32768, 8, 1)
    assert policy.packs(4096, 2000, 1025) is None  # one row would fill a line
    monkeypatch.setattr(attention, "platform", lambda: "gpu")
    monkeypatch.setattr(attention, "ampere", lambda: True)
    low = transformer.model(vocab_size=8, head_dim=64, dtype="bfloat16")
    assert policy.packs(4096, 2000, 512) == Lines(4096)  # float32: no kernel
    assert low.packs
    assert low.packs(4096, 2000, 512) is None


def test_the_kernel_of_lines_and_the_loops_over_tiles_agree_and_so_do_gradients():
    random = np.random.default_rng(0)
    tile, wide, d = 32, 128, 64

    def some(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    q = some(2, 2, wide, d)
    own, prefix = (
        tuple(some(*shape) for _ in range(2))
        for shape in ((2, 1, wide, d), (3, 1, 24, d))
    )
    lines = Visible(  # three rows, then two and an empty tile
        row=jnp.array([[0, 0, 1, 2], [0, 1, 1, 3]], jnp.int32),
        place=jnp.array([[0, 1, 0, 0], [0, 0, 1, 0]], jnp.int32),
        contexts=jnp.array([[2, 2, 0], [1, 0, 0]], jnp.int32),
        seen=jnp.arange(24)[None] >= jnp.array([[0], [9], [20]]),
        tile=tile,
    )
    real = np.repeat(np.asarray(lines.row) < 3, tile, 1)[:, None, :, None]
    weight = real * random.normal(size=q.shape).astype(np.float32)

    def by_kernel(q, own, prefix):
        return packed.segments(q, *own, prefix, lines)

    def by_loops(q, own, prefix):  # a line at a time
        parts = (
            jax.tree.map(lambda x, n=n: x[n : n + 1], (q, own, lines.row, lines.place))
            for n in range(2)
        )
        out = [
            packed.attend(
                q,
                *own,
                prefix,
                lines.replace(row=row, place=place, contexts=lines.contexts[n : n + 1]),
            )
            for n, (q, own, row, place) in enumerate(parts)
        ]
        return jnp.concatenate(out)

    def total(attend, *args):
        out = attend(*args)
        return jnp.sum(weight * out), out

    got, want = (
        jax.jit(jax.value_and_grad(partial(total, way), (0, 1, 2), has_aux=True))(
            q, own, prefix
        )
        for way in (by_kernel, by_loops)
    )
    close(
        np.where(real, got[0][1], 0), np.where(real, want[0][1], 0), rtol=0, atol=1e-5
    )
    jax.tree.map(partial(close, rtol=1e-4, atol=1e-4), got[1], want[1])
