"""Programs compiled for TPUs that are not here, by libtpu: what they read, and how."""

import importlib.metadata
import json
import re
import subprocess
import sys

import pytest
from outputs import ran

CHILD = """
import dataclasses, json, sys
from curax.config import load, override
from curax.planning import chips, hbm, planner, programs
from curax.step import mesh, states

(place, sizes), options = json.loads(sys.argv[1]), sys.argv[2:]
run = planner.traced(override(load("quickstart"), options))
of = dataclasses.replace(run.parts.config.mesh, **sizes)
on = mesh.make(of, chips.devices(chips.topology(place)))
where = states.sharding_of(run.parts, on, run.state)
texts, counted = [], programs.hbm.of
programs.hbm.of = lambda text: texts.append(text) or counted(text)
report, _ = programs.planned(run.parts, on, where, run.calls[0], quick=True)
print(json.dumps([report.name, report.refusal, *texts]))
"""
HEAD = """
import json
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from curax.arrays import masked
from curax.config import Mesh
from curax.planning import chips
from curax.step import mesh

here = chips.devices(chips.topology("v5e:2x2"))
on = mesh.make(Mesh(data=1, fsdp=2, tensor=2), here)

def loss(head, features, tokens):
    cast = head.astype(jnp.bfloat16)
    return sum(x.sum() for x in masked.token_logprobs(features, cast, tokens))

def shaped(shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on, spec))

with mesh.use(on):
    args = (
        shaped((75_968, 256), jnp.float32, P("tensor", "fsdp")),
        shaped((8, 64, 256), jnp.bfloat16, P("fsdp")),
        shaped((8, 64), jnp.int32, P("fsdp")),
    )
    print(json.dumps(jax.jit(jax.grad(loss)).lower(*args).compile().as_text()))
"""
HELD = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from curax.config import Mesh
from curax.planning import chips, programs
from curax.step import mesh

on = mesh.make(Mesh(data=1, fsdp=1, tensor=1), chips.devices(chips.topology("v5e:1x1")))

def grown(x):
    eight = jax.lax.optimization_barrier(jnp.tile(x, (8, 1)) * 2)

    def body(carry):
        i, whole = carry
        twelve = jnp.tile(whole[: len(x)], (12, 1)) + i
        return i + 1, whole + jax.lax.optimization_barrier(twelve)[: len(whole)]

    start = jnp.float32(0), eight
    _, whole = jax.lax.while_loop(lambda carry: carry[0] < 10, body, start)
    return jax.lax.optimization_barrier(jnp.tile(whole, (2, 1))).sum()

found, given = [], NamedSharding(on, P())
with mesh.use(on):
    for mib in json.loads(sys.argv[1]):
        x = jax.ShapeDtypeStruct((256 * mib, 1024), jnp.float32, sharding=given)
        for kept in (True, False):
            one, done = programs.compiled("grown", jax.jit(grown), (x,), kept=kept)
            told = done.memory_analysis().temp_size_in_bytes if done else 0
            found.append([one.refusal, one.in_use / 2**20 / mib, told / 2**20 / mib])
print(json.dumps(found))
"""
LAYERS, SLOTS, COLUMNS, KV_HEADS, D = 2, 16, 384, 2, 128
OPTIONS = {
    "model.layers": LAYERS,
    "model.width": 256,
    "model.heads": 4,
    "model.kv_heads": KV_HEADS,
    "model.head_dim": D,
    "model.dtype": "bfloat16",
    "sampling.prompts": 4,
    "sampling.group_size": 8,
    "sampling.slots": SLOTS,
    "sampling.max_tokens": COLUMNS,
}


@pytest.fixture(scope="module")
def libtpu(request):
    """Folder with the compiler that this JAX is made for, which is kept."""
    wanted = importlib.metadata.requires("jax") or []
    (name,) = {re.split("[; ]", one)[0] for one in wanted if one.startswith("libtpu")}
    folder = request.config.cache.mkdir(re.sub(r"[^\w.]", "", name))
    if not list(folder.glob("libtpu/libtpu.so")):
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        done = subprocess.run(
            [*pip, str(folder), name], check=False, capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"{name} cannot be installed: {done.stderr.strip()[-300:]}")
    return folder


def drawn(folder, place, sizes, **more):
    """Text of the sampler, compiled for a slice."""
    options = [f"{name}={value}" for name, value in (OPTIONS | more).items()]
    name, refusal, *texts = said(folder, CHILD, json.dumps([place, sizes]), *options)
    assert (name, refusal) == ("draw", None)
    return texts[0]


def said(folder, code, *words, **env):
    """JSON that a process prints which has the compiler."""
    env |= {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    env |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # a run beside it may compile too
    status, out, err = ran("-c", code, *words, **env)
    assert status == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "sizes", "kv_heads", "d"),
    [
        ("v5e:1x1", {}, KV_HEADS, D),
        ("v4:1x1x1", {}, KV_HEADS, D),  # two cores share its memory
        ("v5p:1x1x1", {}, KV_HEADS, D),  # and here
        ("v6e:1x1", {}, KV_HEADS, D),
        ("v6e:1x1", {}, 2 * KV_HEADS, D // 2),  # two heads side by side
        ("v6e:1x1", {}, 2 * KV_HEADS - 1, D // 2),  # and half a row filled up
        ("v5e:2x2", {"data": 1, "fsdp": 2, "tensor": 2}, KV_HEADS, D),
        ("v5e:2x2", {"data": 1, "fsdp": 2, "tensor": 2}, 2 * KV_HEADS, D // 2),
    ],
)
def test_a_tpu_reads_keys_and_values_by_one_kernel_in_one_loop(
    libtpu, place, sizes, kv_heads, d
):
    """No whole ring or prefix is read, copied or gathered, nothing computed besides."""
    from curax.config import load, override
    from curax.planning import estimate, hbm, hlo, planner

    heads_of = {"model.heads": 2 * kv_heads, "model.kv_heads": kv_heads}
    heads_of["model.head_dim"] = d
    text = drawn(libtpu, place, sizes, **heads_of)
    assert len(re.findall('%decode_attention.*"tpu_custom_call"', text)) == 2 * LAYERS
    rows, heads = (SLOTS // 2, KV_HEADS // 2) if sizes else (SLOTS, KV_HEADS)
    ring = f"bf16[{rows},{heads},{COLUMNS},{D}]"
    moved = [one for n, one in hbm.of(text).turn for _ in range(int(n))]
    read = [one.read for one in moved if one.array == ring]
    rings = 2 * rows * heads * COLUMNS * D * 2  # bytes of keys and values of a layer
    assert sorted(x > rings for x in read)[-LAYERS:] == [True] * LAYERS
    assert sum(read) < 1.3 * LAYERS * rings  # once each; and what is put into them
    given = [f"{name}={value}" for name, value in (OPTIONS | heads_of).items()]
    run, n = planner.traced(override(load("quickstart"), given)), 2 if sizes else 1
    cut = estimate.Cut(rows=n, fsdp=n, data=1, tensor=n, heads=n)
    need = estimate.draw(run.sizes, cut, cut_sampler=False).turn
    # A vocabulary of 23 is whole on each of the two.
    whole = 2 * SLOTS / n * run.sizes.vocab * run.sizes.width * (1 - 1 / n)
    did = hbm.moved(hbm.of(text).turn).flops
    assert did == need.flops - need.attention + whole
    # Weights are gathered once they are cast.
    gathers = re.findall(r"= (\w+)\[([\d,]+)\][^=\n]* all-gather\(", text)
    wide = {dtype for dtype, shape in gathers if hlo.entries(shape) > 4096}
    assert wide == ({"bf16"} if sizes else set())


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "sizes"),
    [("v6e:1x1", {}), ("v5e:2x2", {"data": 1, "fsdp": 2, "tensor": 2})],
)
def test_where_memory_bounds_slots_a_tpu_reads_pages_where_they_are(
    libtpu, place, sizes
):
    """No page is copied or gathered; what they hold is read once a token."""
    from curax.planning import hbm

    tokens = 6 * 1024  # of a device, where rings would have room for six
    heads = 1 if sizes else KV_HEADS
    room = tokens * 2 * LAYERS * heads * D * 2 / 2**30
    text = drawn(
        *(libtpu, place, sizes),
        **{"sampling.max_tokens": 1024, "sampling.slots": 0, "sampling.prompts": 8},
        **{"sampling.cache_gib": room},
    )
    head = "(?:1,)?" if heads == 1 else f"{heads},"
    pool = rf"bf16\[(?:1,)?(\d+),{head}128,{D}\]"
    (most,) = {int(n) for n in re.findall(rf"{pool}[^\n]* scatter\(", text)}
    slots = tokens // (1024 // 4 + 3 * 128 // 2)
    assert tokens // 128 - slots - 2 <= most <= tokens // 128 - slots  # and prefixes
    # Of a layer: the block that is written, pages, and prefixes.
    assert len(re.findall('%decode_attention.*"tpu_custom_call"', text)) == 3 * LAYERS
    moves = r"copy|copy-start|all-gather|all-to-all|collective-permute|gather"
    assert not re.findall(rf"= \(?{pool}[^\n]*? (?:{moves})\(", text)
    moved = [one for n, one in hbm.of(text).turn for _ in range(int(n))]
    read = [one.read for one in moved if one.array == f"bf16[{most},{heads},128,{D}]"]
    whole = 2 * most * heads * 128 * D * 2  # bytes of keys and values of a layer
    assert whole * LAYERS < sum(read) < 1.1 * whole * LAYERS


@pytest.mark.long
def test_the_gradient_of_the_head_is_scattered_and_never_whole(libtpu):
    """Pieces of the vocabulary that do not fill it made a TPU sum it whole."""
    from curax.planning import hlo

    found = hlo.collectives(said(libtpu, HEAD).splitlines())
    wide = {one.kind for one in found if one.entries > 75_968}
    assert wide == {"all-gather", "reduce-scatter"}


@pytest.mark.long
def test_what_a_tpu_program_holds_is_what_its_compiler_refuses_by(libtpu):
    """25 times its argument: of 640 MiB it fits the 15.75 GiB of a chip, of 700 not.

    The size of temporaries that a compiled program tells is 20 GiB of 640 MiB.
    """
    found = said(libtpu, HELD, "[640, 700]", XLA_FLAGS="")  # all passes, as in a run
    *fit, (refused, *_), (again, *_) = found
    assert [refusal for refusal, *_ in fit] == [None, None]
    assert [held for _, held, _ in fit] == pytest.approx([25, 25], rel=1e-5)
    assert [told for *_, told in fit] == pytest.approx([32, 32], rel=1e-5)
    assert refused == again
    assert f"HLO temporaries ({25 * 700 / 1024:.2f}G) exceeds available HBM" in refused
