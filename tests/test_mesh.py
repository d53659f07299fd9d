"""Meshes: where parameters lie, what cannot be, and that nothing else changes."""

import math
import os
import re
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from contracts import close
from outputs import message

from curax import allocate, loss, memory, rollout, update
from curax.arrays import choice, lines, micro_batches
from curax.config import ConfigError
from curax.config import Mesh as Sizes
from curax.models import decoding, softmax
from curax.planning.hlo import in_loops
from curax.step import mesh
from curax.types import TrainState

V = 12  # as 11, but it divides over two devices
MODEL = tiny.model(vocab_size=V)
FEW = allocate.rows_to_draw(jnp.array([3, 1, 4]), rows=8)
SHARDS = {  # of each parameter, on a mesh of 2 x 2 x 2
    "embed": ("tensor", "fsdp"),
    "head": ("tensor", "fsdp"),
    "attention_norm": (None,),
    "down": ("tensor", "fsdp"),
    "gate": ("fsdp", "tensor"),
    "k": ("fsdp", "tensor"),
    "k_norm": (None,),
    "mlp_norm": (None,),
    "o": ("tensor", "fsdp"),
    "q": ("fsdp", "tensor"),
    "q_norm": (None,),
    "up": ("fsdp", "tensor"),
    "v": ("fsdp", "tensor"),
    "norm": (None,),
}


@cache
def cube():
    made = mesh.make(Sizes(data=2, fsdp=2, tensor=2))
    assert made is not None
    return made


@cache
def params():
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0))

    def leaf(shape):
        return np.asarray(0.3 * random.normal(size=shape.shape), np.float32)

    return jax.tree.map(leaf, shapes)  # of numpy: the first who asks may be traced


def by_name(tree):
    """The last name of a path but for `kernel` and `scale`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [[key.key for key in path] for path, _ in leaves]
    return {
        [name for name in path if name not in ("kernel", "scale")][-1]: leaf
        for path, (_, leaf) in zip(names, leaves, strict=True)
    }


# ----- meshes


def test_one_device_needs_no_mesh():
    assert mesh.make(Sizes()) is None
    with mesh.use(None):
        assert jax.sharding.get_abstract_mesh().empty


@pytest.mark.parametrize(
    "sizes",
    [{"data": 8}, {"fsdp": 2}, {"data": 2, "tensor": 4}, {"data": 1, "fsdp": 3}],
)
def test_a_mesh_has_the_sizes_it_was_asked_for(sizes):
    made = mesh.make(Sizes(**sizes))
    want = {axis: sizes.get(axis, 1) for axis in mesh.AXES}
    assert dict(made.shape) == want
    assert len(set(made.devices.flat)) == np.prod(list(want.values()))


def test_too_large_a_mesh_is_refused_in_a_sentence():
    sentence = (
        "mesh.data=4 x mesh.fsdp=3 x mesh.tensor=1 takes 12 devices; set them so that "
        "their product is at most the 8 that are here."
    )
    with pytest.raises(ConfigError, match=f"^{sentence}$"):
        mesh.make(Sizes(data=4, fsdp=3))


def test_a_mesh_that_leaves_out_devices_of_a_process_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for sizes in (Sizes(), Sizes(data=4)):
        with pytest.raises(ConfigError, match="of the 8 devices of 2 processes"):
            mesh.make(sizes)
    assert mesh.make(Sizes(fsdp=-1)) is not None


# ----- shardings


def test_parameters_lie_where_their_logical_axes_say():
    got = by_name(mesh.of_params(cube(), MODEL.axes, params()))
    assert {name: tuple(s.spec) for name, s in got.items()} == SHARDS
    assert all(s.mesh == cube() for s in got.values())


def test_leading_axes_of_seeds_are_not_sharded():
    stacked = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct((3, *p.shape), p.dtype), params()
    )
    got = by_name(mesh.of_params(cube(), MODEL.axes, stacked))
    want = {name: (None, *spec) for name, spec in SHARDS.items()}
    assert {name: tuple(s.spec) for name, s in got.items()} == want


def test_a_vocabulary_that_does_not_divide_is_copied():
    odd = tiny.model(vocab_size=11)
    shapes = jax.eval_shape(odd.init, jax.random.key(0))
    got = by_name(mesh.of_params(cube(), odd.axes, shapes))
    want = SHARDS | dict.fromkeys(("embed", "head"), (None, "fsdp"))
    assert {name: tuple(s.spec) for name, s in got.items()} == want


def test_a_dimension_that_does_not_divide_is_refused_in_a_sentence():
    odd = tiny.model(vocab_size=V, mlp_width=25)
    shapes = jax.eval_shape(odd.init, jax.random.key(0))
    assert message(ConfigError, mesh.of_params, cube(), odd.axes, shapes) == (
        "mesh.tensor=2 does not divide the 25 of parameter ['layers']['0']['down']"
        "['kernel'], (25, 16); set mesh.tensor to 1."
    )
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0))
    three = mesh.make(Sizes(fsdp=3))
    with pytest.raises(ConfigError, match=r"set mesh\.fsdp to 2, 4 or 8\.$"):
        mesh.of_params(three, MODEL.axes, shapes)


def test_minus_one_takes_the_devices_that_the_other_axes_leave():
    sizes = {
        (-1, 1, 1): (8, 1, 1),
        (2, -1, 1): (2, 4, 1),
        (2, 2, -1): (2, 2, 2),
        (1, -1, 8): (1, 1, 8),
    }
    for typed, want in sizes.items():
        made = mesh.make(Sizes(**dict(zip(mesh.AXES, typed, strict=True))))
        assert made
        assert made.axis_sizes == want
    assert message(ConfigError, mesh.make, Sizes(data=3, fsdp=-1)) == (
        "mesh.data=3 x mesh.fsdp=-1 x mesh.tensor=1 shares out 8 devices, which 3 does "
        "not divide; set the sizes that are not -1 so that their product is 2."
    )


@pytest.mark.parametrize("referred", [True, False])
def test_moments_and_reference_lie_like_the_parameters_and_the_rest_everywhere(
    referred,
):
    tx = update.transformation(partial(optax.adam, 1e-3), 1.0)

    def begin():
        return TrainState(
            params=params(),
            opt_state=tx.init(params()),
            reference=params() if referred else None,
            memory=memory.forget(7),
            position=jnp.int32(0),
            step=jnp.int32(0),
            seed=jnp.uint32(0),
        )

    shapes = jax.eval_shape(begin)
    got = mesh.of_state(cube(), MODEL.axes, shapes)
    want = mesh.of_params(cube(), MODEL.axes, params())
    assert got.params == want
    assert got.reference == (want if referred else None)
    assert optax.tree.get(got.opt_state, "mu") == want
    assert optax.tree.get(got.opt_state, "nu") == want
    everywhere = [got.memory.draws, got.step, optax.tree.get(got.opt_state, "count")]
    assert {tuple(s.spec) for s in everywhere} == {()}
    assert jax.tree.structure(got) == jax.tree.structure(shapes)


OPTIMIZERS: dict[str, Any] = {  # and how many statistics have the shape of a matrix
    "adafactor": (partial(optax.adafactor, 1e-3, min_dim_size_to_factor=2), 0),
    "muon": (partial(optax.contrib.muon, 1e-3), 1),
    "partition": (
        lambda: optax.partition(
            {"moved": optax.adam(1e-3), "rest": optax.sgd(1e-3)},
            lambda tree: jax.tree.map(
                lambda leaf: "moved" if leaf.ndim > 1 else "rest", tree
            ),
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_statistics_lie_like_parameters_whatever_tree_they_are_of(name):
    """A moment as its parameter; a row of one, which has no parameter's shape, not."""
    make, moments = OPTIMIZERS[name]
    tx = make()

    def begin():
        state = {"memory": memory.forget(7), "position": jnp.int32(0)}
        numbers = {"step": jnp.int32(0), "seed": jnp.uint32(0)}
        own = {"params": params(), "opt_state": tx.init(params()), "reference": None}
        return TrainState(**own, **state, **numbers)

    with mesh.use(cube()):
        shapes = jax.eval_shape(begin)
        got = mesh.of_state(cube(), MODEL.axes, shapes)
        made = jax.jit(begin, out_shardings=got)()
    cut = [
        sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(tree))
        for tree in (made.params, made.opt_state)
    ]
    assert cut[0] > 4
    assert cut[1] == moments * cut[0]


# ----- one device equals eight


def draw_and_differentiate(params):
    def known(rows):
        return {"logp": rows.logp_policy, "logp_old": rows.logp_policy - 0.1}

    def token_loss(logp, entropy, rows):
        value = loss.clipped_ratio(logp, rows.logp_old, rows.credit, rows.mask)
        return value - 0.01 * entropy

    how = update.Settings(micro_batches=2, token_chunk=6)
    drawn = MODEL, params, FEW, tiny.settings(slots=4)
    return tiny.draw_and_differentiate(*drawn, known, token_loss, how)


def test_sampling_and_gradients_on_eight_devices_are_those_on_one():
    want = jax.jit(draw_and_differentiate)(params())
    where = mesh.of_params(cube(), MODEL.axes, params())
    lying = jax.device_put(params(), where)
    run = jax.jit(draw_and_differentiate, out_shardings=(None, None, where, None))
    with mesh.use(cube()):
        got = run(lying)
    # A quarter of each matrix, and of its gradient, on each device.
    for tree in (lying, got[2]):
        for name, leaf in by_name(tree).items():
            parts = 2 ** sum(axis is not None for axis in SHARDS[name])
            assert leaf.addressable_shards[0].data.size * parts == leaf.size
    assert got[0].tokens.addressable_shards[0].data.shape == (2, tiny.T)
    assert got[3].logp.addressable_shards[0].data.shape == (2, tiny.T)
    got = jax.device_get(got)
    np.testing.assert_array_equal(got[0].tokens, want[0].tokens)
    jax.tree.map(partial(close, rtol=1e-5, atol=1e-5), got, jax.device_get(want))


# ----- what moves between devices at every token

CONTEXTS = tiny.left_padded((6, 3, 1, 5, 4, 6, 2, 6))
ROWS = allocate.rows_to_draw(jnp.full(8, 4), rows=32)
UNEVEN = allocate.rows_to_draw(jnp.array([12, 0, 1, 7, 3, 0, 2, 5]), rows=32)
RULE = rollout.Stopping(
    met=lambda outcome, exists: jnp.any(outcome > 0, -1),
    outcome=lambda prompt, tokens, mask: (tokens[:, 0] % 2).astype(jnp.float32),
    size=2,
    most=4,
)
MESHES = {(2, 2, 2): 2, (1, 8, 1): 1, (2, 1, 4): 1, (8, 1, 1): 2}  # to heads of keys


# A loop keeps what does not change: on CPUs JAX 0.12 moves even what is gathered out.
AS_WRITTEN = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


@cache
def compiled(sizes, kv_heads, *, slots, cut=False, **options):
    """The text of a sampler, compiled for a mesh, and its policy."""
    policy = tiny.model(vocab_size=V, heads=4, kv_heads=kv_heads)
    made = mesh.make(Sizes(**dict(zip(mesh.AXES, sizes, strict=True))))
    assert made is not None
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    where = mesh.of_params(made, policy.axes, shapes)

    draw = partial(drawn, policy, slots=slots, **options)
    shardings = (where, None, None)
    jitted = jax.jit(draw, in_shardings=shardings, compiler_options=AS_WRITTEN)
    with mesh.use(made, cut_sampler=cut):
        program = jitted.lower(shapes, ROWS, jax.random.key(0)).compile()
    return policy, where, program


def drawn(policy, params, asked, key, **options):
    """Completions of rows over the contexts."""
    how = tiny.settings(**options)
    return rollout.sample(policy, params, CONTEXTS, asked, key, how)


def moved(program):
    """What the decoding loop moves between devices to refill its slots, and besides."""
    found = in_loops(program.as_text())
    assert found, "the loop exchanges something: its tokens at least"
    return found


def contexts_held(program):
    """The most contexts times heads whose keys or values a device holds at a time."""
    shapes = re.findall(rf"f32\[([\d,]+),{tiny.P},8\]", program.as_text())
    return max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)


@pytest.mark.first(1)
@pytest.mark.parametrize(("sizes", "kv_heads"), MESHES.items())
def test_no_token_moves_parameters_or_caches_between_devices(sizes, kv_heads):
    slots = 8
    program = compiled(sizes, kv_heads, slots=slots)[2]
    for one in moved(program):
        assert one.entries <= slots * V, one
    # Prefixes stay where they were made: a shard has its own contexts.
    own = len(CONTEXTS.tokens) // (sizes[0] * sizes[1])
    assert contexts_held(program) == own * 4 // sizes[2]


@pytest.mark.long
def test_a_cut_sampler_gathers_layers_at_every_token_and_never_the_head():
    policy, _, program = compiled((2, 2, 2), 2, slots=4, cut=True)
    layers = jax.eval_shape(policy.init, jax.random.key(0))["layers"]
    halves = [leaf.size // 2 for leaf in jax.tree.leaves(layers) if leaf.ndim == 2]
    found = [one for one in moved(program) if one.kind == "all-gather"]
    got = [one.entries for one in found if one.entries > 4 * V]
    assert sorted(got) == sorted(halves)  # a half: `tensor` stays


@pytest.mark.first(1)
@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "heads", "how"),
    [
        ((2, 2, 2), 2, softmax.of_blocks),
        ((3, 1, 1), 2, softmax.of_blocks),
        ((2, 2, 2), 2, softmax.of_kernel),
        ((2, 2, 2), 2, None),
        ((2, 1, 4), 2, None),  # with copies of heads of keys
    ],
)
def test_rounds_that_open_slots_move_no_cache_either(sizes, heads, how, monkeypatch):
    monkeypatch.setattr(decoding, "COPIED", 1)  # tiles of slots one by one
    if how:
        monkeypatch.setattr(softmax, "LEAST", 1)  # and blocks of columns
        monkeypatch.setattr(softmax, "BLOCK", 4)
        monkeypatch.setitem(softmax.BY_PLATFORM, "cpu", how)
    else:
        monkeypatch.setattr(softmax, "TRANSPOSED", 1)  # and keys with columns last
    # Anew, or it would be what was compiled for another layout.
    policy, where, program = compiled.__wrapped__(sizes, heads, slots=9, stopping=RULE)
    for one in moved(program):
        assert one.entries <= 12 * V, one  # four shards have three slots each
    params, key = tiny.random_params(policy), jax.random.key(5)
    want = jax.jit(partial(drawn, policy, stopping=RULE))(params, ROWS, key)
    assert 8 < want.exists.sum() < 32
    tiny.agree(program(jax.device_put(params, where), ROWS, key), want)


@pytest.mark.first(1)
@pytest.mark.long
@pytest.mark.parametrize("stopping", [RULE, None])
@pytest.mark.parametrize(
    ("sizes", "kv_heads"), {(2, 2, 2): 2, (2, 1, 4): 1, (3, 1, 1): 2}.items()
)
def test_pages_stay_where_they_are_and_change_nothing(sizes, kv_heads, stopping):
    steps, tokens = 16, 25  # of which rings on a device would hold, one of each
    one = 4 * 2 * 8 * kv_heads // (sizes[2] if kv_heads % sizes[2] == 0 else 1)
    shards = sizes[0] * sizes[1]
    own = len(CONTEXTS.tokens) // math.gcd(len(CONTEXTS.tokens), shards)
    options = {"stopping": stopping, "max_tokens": steps, "end": (10,)}
    room = 2.0 * one * (tokens + own * tiny.P)  # of two layers
    with tiny.in_pages(2):
        policy, where, program = compiled(
            sizes, kv_heads, slots=0, cache_bytes=room, **options
        )
        assert re.search(r"f32\[1,9,\d,2,8\]", program.as_text())  # nine pages
        for one in moved(program):
            assert one.entries <= 12 * V, one
        params, key = tiny.random_params(policy), jax.random.key(5)
        got = program(jax.device_put(params, where), ROWS, key)
    want = jax.jit(partial(drawn, policy, **options))(params, ROWS, key)
    assert want.mask.sum(-1).max() > tiny.T
    tiny.agree(got, want)


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "kv_heads"), MESHES.items())
def test_samples_are_those_of_one_device_whatever_mesh_and_slots(sizes, kv_heads):
    policy, where, program = compiled(sizes, kv_heads, slots=8)
    params, key = tiny.random_params(policy), jax.random.key(5)
    for asked in (ROWS, UNEVEN):
        want = jax.jit(partial(drawn, policy))(params, asked, key)
        tiny.agree(program(jax.device_put(params, where), asked, key), want)


# ----- what moves between devices in an update

LARGE = 256  # of a vocabulary, so that the head is the largest array
SHARDED = {"vocab_size": LARGE, "heads": 4, "width": 20}  # no two arrays of a size
SHARDED |= {"scan_layers": True, "remat": True}  # gradients are added in place
UPDATES = {(2, 2, 2): 2, (1, 2, 4): 1}  # sizes of a mesh, to heads of keys
SCORED = {
    "rows": update.Settings(micro_batches=2, token_chunk=4),
    "lines": update.Settings(tokens_per_micro_batch=10, token_chunk=4),
    "pieces": update.Settings(tokens_per_micro_batch=10),  # of the vocabulary
    "home": update.Settings(
        tokens_per_micro_batch=10, token_chunk=4, rows_per_context=2
    ),
}
BOTH = [(*one, how) for one in UPDATES.items() for how in SCORED]


@cache
def scored():
    """Rows of all contexts, two of each, and the weight of each token."""
    random = np.random.default_rng(0)
    shape = (2 * len(CONTEXTS.tokens), tiny.T)
    noise = partial(random.normal, size=shape)
    mask = np.arange(tiny.T) < random.integers(1, tiny.T + 1, (shape[0], 1))
    logp = -jnp.abs(jnp.asarray(noise(), jnp.float32))
    rows = tiny.batch(
        jnp.asarray(mask),
        logp,
        tokens=jnp.asarray(random.integers(0, LARGE, shape), jnp.int32),
        context=jnp.arange(shape[0], dtype=jnp.int32) // 2,
        credit=jnp.asarray(noise(), jnp.float32),
        multiplier=jnp.ones(shape, jnp.float32),
        logp_old=None,
    )
    return rows, jnp.where(rows.mask, 0.1, 0.0)


def differentiate(policy, how, params, rows, weight):
    """Loss, gradient and log-probs of an update."""

    def token_loss(logp, entropy, rows):
        value = loss.clipped_ratio(logp, rows.logp_policy, rows.credit, rows.mask)
        return value - 0.01 * entropy

    args = CONTEXTS, rows, weight, token_loss, SCORED[how]
    return update.gradient(policy, params, *args, still_old=True)


@cache
def updating(sizes, kv_heads, how):
    """An update compiled for a mesh: policy, layout, program, words of the compiler."""
    policy = tiny.model(**SHARDED, kv_heads=kv_heads)
    made = mesh.make(Sizes(**dict(zip(mesh.AXES, sizes, strict=True))))
    assert made is not None
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    where = mesh.of_params(made, policy.axes, shapes)
    jitted = jax.jit(
        partial(differentiate, policy, how),
        in_shardings=(where, None, None),
        out_shardings=(None, where, None),
        compiler_options=AS_WRITTEN,
    )
    # A program that is not kept is compiled each time, and warned of each time.
    name = "jax_persistent_cache_min_compile_time_secs"
    kept = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    rows = scored()  # on no mesh
    try:
        columns = 48 if how == "pieces" else 0
        with (
            pytest.MonkeyPatch.context() as patch,
            mesh.use(made),
            hlo.compiler_log() as said,
            tiny.in_pieces(columns),
        ):
            patch.setattr(lines, "AT_HOME", 2)
            program = jitted.lower(shapes, *rows).compile()
    finally:
        jax.config.update(name, kept)
    return policy, where, program, said


@pytest.mark.long
def test_a_token_of_a_sharded_vocabulary_is_drawn_where_its_logits_lie():
    rows, vocabulary, blocks = 8, 4224, 128
    logits = jax.random.normal(jax.random.key(0), (rows, vocabulary))
    key = jax.random.split(jax.random.key(1), rows)
    where = jax.sharding.PartitionSpec("data", "tensor")
    parts = jax.device_put(logits, jax.sharding.NamedSharding(cube(), where))
    program = jax.jit(choice.choose).lower(key, parts).compile()
    for one in hlo.everywhere(program.as_text() or ""):
        assert one.entries <= rows * blocks < rows * vocabulary // 16
    for got, want in zip(program(key, parts), choice.choose(key, logits), strict=True):
        close(got, want, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "kv_heads", "how"), BOTH)
def test_an_update_gathers_the_head_once_and_its_gradient_never(sizes, kv_heads, how):
    policy, _, compiled, said = updating(sizes, kv_heads, how)
    program = compiled.as_text() or ""
    shape = jax.eval_shape(policy.init, jax.random.key(0))["head"].shape
    head = np.prod(shape) // sizes[-1]  # of a device, once gathered over `fsdp`
    large = [one for one in hlo.everywhere(program) if one.entries >= head]
    assert [one.kind for one in large] == ["all-gather"], large
    assert large[0] in in_loops(program)  # once for each micro-batch
    if sizes[0] > 1:  # copies of the parameters: summed over once, behind the loop
        sums = [
            one
            for one in hlo.everywhere(program)
            if one.kind == "all-reduce" and one.entries >= head // sizes[1]
        ]
        assert sums
        assert not set(sums) & set(in_loops(program))
    remade = [line for line in said if "full rematerialization" in line]
    assert not remade


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "kv_heads"), UPDATES.items())
def test_contexts_that_lie_with_their_rows_are_not_gathered(sizes, kv_heads):
    shards = sizes[-1] if kv_heads % sizes[-1] == 0 else 1
    keys = CONTEXTS.tokens.size * kv_heads // shards * 8
    moved = {}
    for how in ("lines", "home"):
        program = updating(sizes, kv_heads, how)[2].as_text() or ""
        moved[how] = [one for one in in_loops(program) if one.entries == keys]
    assert moved["lines"]
    assert not moved["home"]


@pytest.mark.parametrize("together", [1, 2])
def test_rows_of_a_shard_stay_on_it_line_by_line(together):
    random, shape = np.random.default_rng(0), (4, 6, 5)
    length = random.integers(0, 6, shape[:2])
    mask = jnp.asarray(np.arange(5) < length[..., None]).reshape(24, 5)
    shard = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 6)
    said = jnp.asarray(random.normal(size=(24, 5)), jnp.float32)

    def function(total, rows, line):
        said, mask, shard = rows
        own = shard.reshape(4, -1)
        kept = jnp.where(mask, said, 0)
        strays = jnp.sum((own != jnp.arange(4)[:, None]) & (own > 0))
        return micro_batches.added(total, (jnp.sum(kept), strays)), kept

    def run(said, mask):
        how = lines.Lines(8, together=together, at_home=True)
        rows = said, mask, shard
        none = jnp.float32(0), jnp.float32(0)
        return micro_batches.over_lines(function, none, rows, mask, how)

    with mesh.use(cube()):
        (total, strays), own = jax.jit(run)(said, mask)
    assert strays == 0
    close(total, np.sum(np.where(mask, said, 0)), rtol=1e-5)
    np.testing.assert_array_equal(own, np.where(mask, said, 0))


@cache
def on_one_device(kv_heads):
    """Parameters, and the update of rows that are not packed, without a mesh."""
    policy = tiny.model(**SHARDED, kv_heads=kv_heads)
    params = tiny.random_params(policy)
    return params, jax.jit(partial(differentiate, policy, "rows"))(params, *scored())


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "kv_heads", "how"), BOTH)
def test_loss_and_gradient_are_those_of_one_device(sizes, kv_heads, how):
    _, where, program, _ = updating(sizes, kv_heads, how)
    params, want = on_one_device(kv_heads)
    got = program(jax.device_put(params, where), *scored())
    assert jax.tree.map(lambda x: x.sharding, got[1]) == where
    mask = scored()[0].mask  # elsewhere log-probs may be anything
    got, want = (
        (*x[:2], jax.tree.map(lambda own: jnp.where(mask, own, 0), x[2]))
        for x in (got, want)
    )
    jax.tree.map(partial(close, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.long
def test_micro_batches_follow_from_tokens_and_lie_on_all_shards_of_the_rows():
    few = update.Settings(tokens_per_micro_batch=10)
    assert [few.count(16, steps) for steps in (1, 5, 7, 100)] == [2, 8, 16, 16]
    with mesh.use(cube()):  # four shards
        assert [few.count(16, steps) for steps in (1, 5, 7, 100)] == [1, 2, 4, 4]
        assert few.count(24, 5) == 3  # 20 tokens on each; 4 would be 15 rows
        assert few.count(6, 20) == 3  # rows that do not divide anyway


def test_the_compiler_makes_little_effort_on_cpus_unless_flags_say_how_much(
    monkeypatch,
):
    def places(platform):
        devices = np.array([SimpleNamespace(platform=platform)])
        return [SimpleNamespace(mesh=SimpleNamespace(devices=devices))]

    assert mesh.EFFORT in os.environ["XLA_FLAGS"]
    assert mesh.compiler_options(None) is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    for where in (None, places("cpu")):
        little = mesh.compiler_options(where)
        assert little == {mesh.EFFORT: 1}
    monkeypatch.setenv("XLA_FLAGS", "flags.txt")
    assert mesh.compiler_options(None) is None
    close(jax.jit(jnp.tanh, compiler_options=little)(1.0), np.tanh(1.0))
    assert mesh.compiler_options(places("gpu"), updates=True) is None
    assert mesh.compiler_options(places("tpu")) is None
    (option,) = mesh.compiler_options(places("tpu"), updates=True)
    assert option == "xla_disable_hlo_passes"
