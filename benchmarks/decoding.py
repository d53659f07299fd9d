"""python -m benchmarks.decoding: what a decoding step costs as completions grow.

Draws of random Qwen3-style decoders of 4.1 M parameters in float32 over contexts that
`--group` completions share. Seconds are those of the processor and of the clock, the
least of some draws in turn. `--size` draws from the shape of a Qwen3 in bfloat16, and
`--by` says how columns are held and read: in rings, all of them; in rings, blocks that
hold tokens, by the platform's kernel; or also in pages, where memory bounds slots.

With `--data N` nothing runs: a draw of two layers of the width of Qwen3-0.6B, 256 rows
in 64 slots, is compiled from shapes for N devices of the host along `mesh.data`, and
what a device receives by collectives is read from the program.
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workload import EMBEDDING_STD, QWEN3
from curax import allocate, rollout
from curax.config import Mesh as Sizes
from curax.models import softmax, transformer
from curax.planning import hlo
from curax.step import mesh
from curax.types import Contexts, Model

VOCAB, GROUP = 512, 8
SHAPE = ("layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "vocab_size")
POLICY = partial(
    transformer.model,
    vocab_size=VOCAB,
    width=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    mlp_width=1024,
)


def policy_of(size: str | None) -> Model:
    """A small policy, or one of the shape of a Qwen3, with about equal logits."""
    if not size:
        return POLICY()
    shape = {name: getattr(QWEN3[size](), name) for name in SHAPE}
    of = {"dtype": "bfloat16", "param_dtype": "bfloat16", "scan_layers": True}
    return transformer.model(**shape, **of, tied=True, embedding_std=EMBEDDING_STD)


def draws(
    context: int,
    tokens: int,
    *,
    size: str | None,
    by: str,
    cache_gib: float,
    groups: int,
    group: int,
    slots: int,
    mean: int,
):
    """A compiled draw of a policy, its arguments, and the seconds to compile it.

    Args:
        context: P.
        tokens: T.
        size: of `QWEN3`; None: a small policy.
        by: `rings`, `kernel` or `pages`.
        cache_gib: bound of keys and values; 0: none.
        groups: contexts.
        group: completions of each.
        slots: completions decoded at a time; 0: all.
        mean: length of completions, about, geometrically distributed; 0: all take T.
    """
    policy = policy_of(size)
    if by == "rings":
        softmax.BY_PLATFORM.clear()
    elif by == "kernel":
        policy = dataclasses.replace(policy, paged=None)
    params = jax.jit(policy.init)(jax.random.key(0))
    vocab = params["embed"].shape[0]
    if "head" in params:
        params["head"] = params["head"] * 0.01  # tokens are about equally likely
    seen = Contexts(
        tokens=jax.random.randint(jax.random.key(1), (groups, context), 0, vocab),
        mask=jnp.ones((groups, context), bool),
    )
    asked = allocate.rows_to_draw(jnp.full(groups, group), rows=group * groups)
    end = tuple(range(max(1, vocab // mean))) if mean else ()
    how = rollout.Settings(
        max_tokens=tokens, end=end, pad=0, slots=slots, cache_bytes=cache_gib * 2**30
    )
    args = params, seen, asked, jax.random.key(2)
    start = time.monotonic()
    jitted = jax.jit(partial(rollout.sample, policy, how=how))
    program = jitted.lower(*args).compile()
    return program, args, time.monotonic() - start


def print_moved(devices: int) -> None:
    """Print MiB that a device receives in a draw, and in the text of its loop."""
    policy = transformer.model(
        vocab_size=2048,
        width=1024,
        layers=2,
        heads=16,
        kv_heads=8,
        head_dim=128,
        mlp_width=3072,
        dtype="bfloat16",
    )
    tokens = jnp.zeros((32, 512), jnp.int32)
    seen = Contexts(tokens=tokens, mask=jnp.ones(tokens.shape, bool))
    asked = allocate.rows_to_draw(jnp.full(32, GROUP), rows=32 * GROUP)
    made = mesh.make(Sizes(data=devices))
    assert made is not None
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    where = mesh.of_params(made, policy.axes, shapes)

    def draw(params, key):
        how = rollout.Settings(max_tokens=64, end=(1,), pad=0, slots=64)
        return rollout.sample(policy, params, seen, asked, key, how)

    with mesh.use(made):
        jitted = jax.jit(draw, in_shardings=(where, None))
        program = jitted.lower(shapes, jax.random.key(0)).compile()
    text, analysis = program.as_text(), program.memory_analysis()
    assert text
    assert analysis is not None
    each = (hlo.collectives(lines) for lines in hlo.computations(text).values())
    everywhere = sum(one.received for ones in each for one in ones) / 2**20
    loop = sum(one.received for one in hlo.in_loops(text)) / 2**20
    print(
        f"{devices} devices: {everywhere:.3f} MiB in all, {loop:.3f} in the loop; "
        f"temporaries {analysis.temp_size_in_bytes / 2**20:.0f} MiB"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print what draws cost, or what one moves between devices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group", type=int, default=GROUP)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--mean", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size", choices=QWEN3)
    parser.add_argument("--by", default="pages", choices=("rings", "kernel", "pages"))
    parser.add_argument("--cache-gib", type=float, default=0.0)
    parser.add_argument("--data", type=int, help="compile for so many devices instead")
    args = parser.parse_args(argv)
    if args.data:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.data}"
        print_moved(args.data)
        return
    print_costs(args)


def print_costs(args: argparse.Namespace) -> None:
    """Print a line for each number of tokens."""
    names = ("size", "by", "cache_gib", "groups", "group", "slots", "mean")
    sizes = {name: getattr(args, name) for name in names}
    made = {n: draws(args.context, n, **sizes) for n in args.tokens}
    taken = {n: [] for n in made}
    longest, count = {}, {}
    for _ in range(args.repeats):
        for n, (program, inputs, _) in made.items():
            wall, own = time.monotonic(), time.process_time()
            rows = jax.block_until_ready(program(*inputs))
            taken[n].append((time.process_time() - own, time.monotonic() - wall))
            length = np.asarray(rows.mask).sum(-1)
            longest[n], count[n] = int(length.max()), int(length.sum())
    for n, (program, _, compiling) in made.items():
        own, wall = (min(each) for each in zip(*taken[n], strict=True))
        analysis = program.memory_analysis()
        assert analysis is not None
        memory = analysis.temp_size_in_bytes / 2**20
        print(
            f"{args.context} + {n} tokens, {args.groups} x {args.group} rows, longest "
            f"{longest[n]}, all {count[n]}: {own:.2f} processor s, {wall:.2f} s; "
            f"temporaries {memory:.0f} MiB; compiled in {compiling:.1f} s"
        )


if __name__ == "__main__":
    main()
