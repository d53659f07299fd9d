"""python -m benchmarks.decoding: what a decoding step costs as completions grow.

Draws of random Qwen3-style decoders of 4.1 M parameters in float32 over contexts that
groups of 8 share. Seconds are those of the processor and of the clock, the least of
some draws in turn.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from curax import allocate, rollout
from curax.models import transformer
from curax.types import Contexts

VOCAB, GROUP = 512, 8
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


def draws(context: int, tokens: int, *, groups: int, slots: int, mean: int):
    """A compiled draw of a policy, its arguments, and the seconds to compile it.

    Args:
        context: P.
        tokens: T.
        groups: contexts.
        slots: completions decoded at a time; 0: all.
        mean: length of completions, about, geometrically distributed; 0: all take T.
    """
    policy = POLICY()
    params = jax.jit(policy.init)(jax.random.key(0))
    params["head"] = params["head"] * 0.01  # tokens are about equally likely
    seen = Contexts(
        tokens=jax.random.randint(jax.random.key(1), (groups, context), 0, VOCAB),
        mask=jnp.ones((groups, context), bool),
    )
    plan = allocate.plan(jnp.full(groups, GROUP), rows=GROUP * groups)
    end = tuple(range(max(1, VOCAB // mean))) if mean else ()
    options = {"max_tokens": tokens, "end": end, "pad": 0, "slots": slots}
    args = params, seen, plan, jax.random.key(2)
    start = time.monotonic()
    jitted = jax.jit(partial(rollout.sample, policy, **options))
    program = jitted.lower(*args).compile()
    return program, args, time.monotonic() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--mean", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    sizes = {"groups": args.groups, "slots": args.slots, "mean": args.mean}
    made = {n: draws(args.context, n, **sizes) for n in args.tokens}
    taken = {n: [] for n in made}
    longest = {}
    for _ in range(args.repeats):
        for n, (program, inputs, _) in made.items():
            wall, own = time.monotonic(), time.process_time()
            rows = jax.block_until_ready(program(*inputs))
            taken[n].append((time.process_time() - own, time.monotonic() - wall))
            longest[n] = int(np.asarray(rows.mask).sum(-1).max())
    for n, (program, _, compiling) in made.items():
        own, wall = (min(each) for each in zip(*taken[n], strict=True))
        analysis = program.memory_analysis()
        assert analysis is not None
        memory = analysis.temp_size_in_bytes / 2**20
        print(
            f"{args.context} + {n} tokens, {args.groups} x {GROUP} rows, longest "
            f"{longest[n]}: {own:.2f} processor s, {wall:.2f} s; temporaries "
            f"{memory:.0f} MiB; compiled in {compiling:.1f} s"
        )


if __name__ == "__main__":
    main()
