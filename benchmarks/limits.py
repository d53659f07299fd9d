"""python -m benchmarks.limits: what the device can do, and what work asks of it.

Measured in the run that uses it: how fast a large array is read, and how fast large
matrices are multiplied.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import machine
from benchmarks.workload import Workload

REPEATS = 3  # the best counts


@dataclass(frozen=True)
class Limits:
    """What the device can do."""

    bytes_per_s: float  # read
    flops_per_s: float  # of a large product

    def seconds(self, *, size: float, flops: float) -> float:
        """The least time to read `size` bytes and to make `flops`, side by side."""
        return max(size / self.bytes_per_s, flops / self.flops_per_s)


def measured(dtype: str = "float32", *, size: int = 0, width: int = 0) -> Limits:
    """Measure them.

    Args:
        dtype: of the array and of the matrices.
        size: elements of the array, beyond any cache; 0: 2^31 on a GPU, which reads
            fewer before a call is over, else 2^28.
        width: rows and columns of the matrices; 0: 8192 on a GPU, else 2048.
    """
    import jax
    import jax.numpy as jnp

    gpu = jax.default_backend() == "gpu"
    x = jnp.ones(size or (2**31 if gpu else 2**28), dtype)
    total, product = jax.jit(jnp.max), jax.jit(jnp.matmul)
    read = _quickest(lambda: total(x))
    width = width or (8192 if gpu else 2048)
    # Not of ones, of which GPUs make products in less time than of anything else.
    a = jax.random.normal(jax.random.key(0), (width, width), dtype)
    multiply = _quickest(lambda: product(a, a))
    return Limits(x.nbytes / read, 2 * width**3 / multiply)


def _quickest(function: Callable[[], Any]) -> float:
    """Seconds, after a call that compiles."""
    import jax

    def call() -> None:
        jax.block_until_ready(function())

    call()
    return min(machine.repeated(call, REPEATS))


def forward_flops(work: Workload, tokens: float) -> float:
    """FLOPs of the products of a pass over the completions and over their contexts.

    Args:
        work: shapes; a context is computed once for its group.
        tokens: of all completions, which are taken to be of equal length.
    """
    length = tokens / work.rows
    new = _flops(work, tokens, work.prompt_tokens + length / 2, tokens)
    context = work.prompts * work.prompt_tokens
    return new + _flops(work, context, work.prompt_tokens / 2, work.prompts)


def _flops(work: Workload, tokens: float, keys: float, heads: float) -> float:
    """Of `tokens`, each looking at `keys`, with the logits of `heads` of them."""
    embedding = work.vocab_size * work.width
    attention = 4 * work.layers * work.heads * work.head_dim * keys
    layers = 2 * (work.parameters - embedding) + attention
    return tokens * layers + 2.0 * embedding * heads


def decoded_bytes(work: Workload, tokens: float, item: int) -> float:
    """Bytes that decoding has to read, every slot being busy all the time.

    A step reads all parameters, the keys and values of each row, half written, and
    those of each context once for its group.

    Args:
        work: shapes.
        tokens: of all completions.
        item: bytes of a number.
    """
    slots = min(work.slots, work.rows)
    cached = 2 * work.layers * work.kv_heads * work.head_dim  # numbers per token
    own = slots * tokens / work.rows / 2
    contexts = slots / work.group_size * work.prompt_tokens
    return tokens / slots * item * (work.parameters + cached * (own + contexts))


if __name__ == "__main__":
    print(json.dumps(asdict(measured())))
