"""python -m benchmarks.collectives: what an update moves between devices.

`update.gradient` of a policy with the width of Qwen3-8B is compiled for a mesh of eight
devices of the host, from shapes alone. Collectives are read from the program as the
partitioner leaves it, with the types that the model computes in, before a processor's
own passes: the largest array, and what passes the links of a device in a micro-batch.
As by rings, an all-reduce counts twice its result, a reduce-scatter its operand, others
their result.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import argparse
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import machine
from curax import loss, update
from curax.config import Mesh as Sizes
from curax.models import transformer
from curax.step import mesh
from curax.types import Batch, Contexts

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import hlo  # pyright: ignore[reportMissingImports]  # the reader of programs that the tests have

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
BYTES = {"pred": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}
LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")


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


def moved(text: str) -> Iterator[tuple[str, str, int, int]]:
    """Collectives of a micro-batch: kind, largest array, its bytes, times on links.

    An all-reduce is counted twice, and a loop's as often as it runs.
    """
    every = hlo.computations(text)

    def inside(name: str, times: int) -> Iterator[tuple[str, str, int, int]]:
        for line in every[name]:
            if found := hlo.COLLECTIVE.search(line):
                arrays = {
                    f"{kind}[{shape}]": BYTES[kind]
                    * math.prod(int(n) for n in shape.split(",") if n)
                    for kind, shape in hlo.ARRAY.findall(found[1])
                }
                largest = max(arrays, key=lambda name: arrays[name])
                links = 2 if found[2] == "all-reduce" else 1
                links = group(line) if found[2] == "reduce-scatter" else links
                yield found[2], largest, arrays[largest], times * links
            loop = LOOP.search(line)
            for called in hlo.called(line):
                if called in every:
                    yield from inside(called, times * (trips(loop) if loop else 1))

    def group(line: str) -> int:
        """Devices that take part in one collective."""
        if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
            return int(found[1])
        (first, *_) = re.findall(r"replica_groups=\{\{([\d,]+)\}", line)
        return first.count(",") + 1

    def trips(loop: re.Match[str]) -> int:
        """Iterations of a loop: the only number that its condition compares with."""
        lines = "\n".join(every[loop[1]])
        return max(int(n) for n in re.findall(r"s32\[\] constant\((\d+)\)", lines))

    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.M)
    assert entry is not None
    loops = [found for line in every[entry[1]] if (found := LOOP.search(line))]
    # The loop over micro-batches moves more than any other that begins there.
    each = [list(inside(loop[2], 1)) for loop in loops]
    yield from max(each, key=lambda ones: sum(size * n for *_, size, n in ones))


def main(argv: Sequence[str] | None = None) -> None:
    """Print one row of a table for each mesh."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mesh", nargs="*", default=["1x4x2", "2x2x2"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument(
        "--chunk", default="token_chunk=512", help="NAME=NUMBER of update.Settings"
    )
    parser.add_argument("--every", action="store_true", help="print each collective")
    args = parser.parse_args(argv)
    name, _, number = args.chunk.partition("=")
    chunk: Any = {name: int(number)}
    settings = update.Settings(micro_batches=args.micro_batches, **chunk)
    print(f"commit {machine.commit()}, JAX {jax.__version__}, {args.layers} layers")
    for sizes in args.mesh:
        shape = tuple(map(int, sizes.split("x")))
        ones = list(moved(compiled(shape, args.layers, settings)))
        mib: Counter[str] = Counter()
        for kind, _, size, times in ones:
            mib[kind] += size * times
        kinds = ", ".join(f"{kind} {n / 2**20:,.0f}" for kind, n in mib.most_common())
        kind, array, size, times = max(ones, key=lambda one: one[2])
        print(
            f"{sizes}: largest {kind} of {array}, {size / 2**20:,.0f} MiB; in all "
            f"{sum(mib.values()) / 2**20:,.0f} MiB on the links ({kinds})"
        )
        if args.every:
            for kind, array, size, times in sorted(ones, key=lambda one: -one[2]):
                print(f"  {size / 2**20:10.2f} MiB x {times} {kind} {array}")


if __name__ == "__main__":
    main()
