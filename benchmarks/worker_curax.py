"""curax, used as a run uses it: a config, its parts, and the loop that goes by steps.

The verifier is a Python function here as it is in the peers, so the loop is the staged
one; the verifier's first call is the moment at which the rollout is complete.
"""

# ruff: noqa: E402 (the clock starts before the libraries are imported)

from benchmarks.worker import Worker

WORKER = Worker()

import jax

from benchmarks.recipe import config
from curax.runs import libraries
from curax.step import build, loops


def heard(length: int) -> None:
    """A completion is being verified."""
    if not WORKER.lengths:
        WORKER.rolled_out()
    WORKER.lengths.append(length)


def main() -> None:
    """Iterate for ever."""
    WORKER.imported("jax", "flax", "optax")
    WORKER.wait()
    libraries.set_up()
    recipe = config(
        WORKER.work,
        heard,
        micro_batches=WORKER.micro_batches,
        devices=jax.device_count(),
    )
    loop = loops.Staged(build.build(recipe))
    with loop.context(), loop.compiling(evaluates=False):
        state = loop.begin(loop.initial())
        while True:
            state, _, _ = loop.advance(state, 1)
            jax.block_until_ready(state)
            WORKER.done()
            WORKER.wait()


if __name__ == "__main__":
    main()
