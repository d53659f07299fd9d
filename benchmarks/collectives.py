"""python -m benchmarks.collectives: what an update moves between devices.

`update.gradient` of a policy with the width of Qwen3-8B is compiled for a mesh of eight
devices of the host, from shapes alone. Collectives are read from the program as the
partitioner leaves it, with the types that the model computes in, before a processor's
own passes: bytes that a device receives by rings in one update, with all micro-batches
and contexts, and the largest array.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import machine
from curax import loss, update
from curax.config import Mesh as Sizes
from curax.models import transformer
from curax.planning import hlo
from curax.step import mesh
from curax.types import Batch, Contexts

PROMPTS, WIDTH, ROWS, STEPS = 8, 128, 32, 256
POLICY = partial(
    transformer.model,
    vocab_size=151936,
    width=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp_width=12288,
    dtype="bfloat16",
    remat=True,
)


def compiled(sizes: tuple[int, ...], layers: int, settings: update.Settings) -> str:
    """The text of the partitioned program of an update."""
    policy = POLICY(layers=layers)
    made = mesh.make(Sizes(**dict(zip(mesh.AXES, sizes, strict=True))))
    assert made is not None
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    where = mesh.of_params(made, policy.axes, shapes)
    array: Any = jax.ShapeDtypeStruct
    number = array((ROWS, STEPS), jnp.float32)
    tokens, mask = array((ROWS, STEPS), jnp.int32), array((ROWS, STEPS), jnp.bool_)
    batch = Batch(
        tokens=tokens,
        mask=mask,
        context=array((ROWS,), jnp.int32),
        credit=number,
        multiplier=number,
        logp_behaviour=number,
        logp_policy=number,
        logp_old=number,
        logp_ref=None,
    )
    contexts = Contexts(
        tokens=array((PROMPTS, WIDTH), jnp.int32),
        mask=array((PROMPTS, WIDTH), jnp.bool_),
    )

    def gradient(params, contexts, batch, weight):
        def token_loss(logp, entropy, rows):
            return loss.clipped_ratio(logp, rows.logp_old, rows.credit, rows.mask)

        args = params, contexts, batch, weight, token_loss, settings
        return update.gradient(policy, *args, still_old=False)

    jitted = jax.jit(
        gradient,
        in_shardings=(where, None, None, None),
        out_shardings=(None, where, None),
    )
    with mesh.use(made), tempfile.TemporaryDirectory() as folder:
        options: Any = {
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": "spmd-partitioning",
        }
        lowered = jitted.lower(shapes, contexts, batch, number)
        lowered.compile(compiler_options=options)
        (text,) = Path(folder).glob("*jit_gradient*after_spmd-partitioning*.txt")
        return text.read_text()


def largest(text: str) -> str:
    """Words on the collective that makes the largest array."""
    every = hlo.computations(text).values()
    one = max((x for lines in every for x in hlo.collectives(lines)), key=by_entries)
    return f"largest {one.kind} of {one.entries:,} entries for {one.source}"


def by_entries(one: hlo.Collective) -> int:
    """Entries of the array that a collective makes."""
    return one.entries


def main(argv: Sequence[str] | None = None) -> None:
    """Print one row of a table for each mesh."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mesh", nargs="*", default=["1x4x2", "2x2x2"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument(
        "--chunk", default="token_chunk=512", help="NAME=NUMBER of update.Settings"
    )
    args = parser.parse_args(argv)
    name, _, number = args.chunk.partition("=")
    chunk: Any = {name: int(number)}
    settings = update.Settings(micro_batches=args.micro_batches, **chunk)
    print(
        f"commit {machine.commit()}, JAX {jax.__version__}, {args.layers} layers, "
        f"{args.micro_batches} micro-batches"
    )
    for sizes in args.mesh:
        shape = tuple(map(int, sizes.split("x")))
        text = compiled(shape, args.layers, settings)
        moved = hlo.traffic(text).call
        kinds = ", ".join(
            f"{kind} {size / 2**20:,.0f} in {moved.count[kind]:.0f}"
            for kind, size in sorted(moved.received.items(), key=lambda one: -one[1])
        )
        print(f"{sizes}: {moved.total / 2**20:,.0f} MiB ({kinds}); {largest(text)}")


if __name__ == "__main__":
    main()
