"""What attention of a layer and its gradient cost, by each implementation.

    python -m benchmarks.attention

Rows of bfloat16, padded on the left by chance, 16 heads of 128 features and 8 of keys.
Milliseconds are medians of five, of five calls each; temporaries those of the compiled
program. An implementation that the device lacks is left out.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from curax.models import attention
from curax.settings.tables import markdown

SHAPES = ((64, 128, 192), (64, 512, 768), (64, 128, 1152), (16, 1024, 1536))
NAMES = ("plain", "flash", "flash_long")
HEADS, KV_HEADS, FEATURES = 16, 8, 128


def arrays(rows: int, queries: int, keys: int) -> tuple[jax.Array, ...]:
    """Queries, keys, values, which keys are visible, and weights of the result."""
    each = jax.random.split(jax.random.key(0), 5)
    sizes = ((HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys), (HEADS, queries))
    q, k, v, weight = (
        jax.random.normal(key, (rows, *size, FEATURES), jnp.bfloat16)
        for key, size in zip(each[:4], sizes, strict=True)
    )
    hidden = jax.random.randint(each[4], (rows, 1), 0, keys - queries + 1)
    return q, k, v, jnp.arange(keys)[None] >= hidden, weight


def measured(name: str, given: tuple[jax.Array, ...]) -> str:
    """Milliseconds, MiB of temporaries."""
    q, k, v, seen, weight = given
    attend = getattr(attention, name)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        weighed = attend(q, k, v, seen, causal=True) * weight
        return weighed.astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, v).compile()
    jax.block_until_ready(compiled(q, k, v))
    took = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([compiled(q, k, v) for _ in range(5)])
        took.append((time.perf_counter() - start) / 5)
    memory = compiled.memory_analysis()
    mib = memory.temp_size_in_bytes / 2**20 if memory else float("nan")
    return f"{1e3 * statistics.median(took):.2f}, {mib:.0f}"


def main(argv: list[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shrunken", action="store_true", help="tiny shapes: a try")
    shapes = ((2, 4, 6),) if parser.parse_args(argv).shrunken else SHAPES
    body = []
    for shape in shapes:
        given, row = arrays(*shape), [", ".join(map(str, shape))]
        for name in NAMES:
            try:
                row.append(measured(name, given))
            except RuntimeError:  # as without cuDNN
                row.append("-")
        body.append(row)
    print(markdown(["rows, queries, keys", *NAMES], body))


if __name__ == "__main__":
    main()
