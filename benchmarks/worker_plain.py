"""The plain sampler and update of `benchmarks.plain`, as a system of its own."""

# ruff: noqa: E402 (the clock starts before the libraries are imported)

from benchmarks.worker import Worker

WORKER = Worker()

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import plain, workload


def main() -> None:
    """Iterate for ever."""
    WORKER.imported("jax", "optax")
    WORKER.wait()
    work = WORKER.work
    params = jax.jit(partial(plain.parameters, work))(jax.random.key(0))
    state = jax.jit(plain.OPTIMIZER.init)(params)
    table = np.array(workload.prompts(work), np.int32)
    for step in range(2**31):
        place = step * work.prompts % (len(table) - work.prompts + 1)
        prompts = jnp.asarray(table[place : place + work.prompts])
        with WORKER.rollout():
            drawn = plain.sample(work, params, prompts, jax.random.key(step))
            tokens, mask = (np.asarray(each) for each in drawn[:2])
        rows = zip(
            tokens.reshape(work.rows, -1), mask.reshape(work.rows, -1), strict=True
        )
        texts = [row[:length].tolist() for row, m in rows if (length := m.sum())]
        WORKER.lengths.extend(map(len, texts))
        reward = np.array([workload.reward(text) for text in texts], np.float32)
        reward = jnp.asarray(reward.reshape(work.prompts, work.group_size))
        params, state = plain.update(work, params, state, prompts, drawn, reward)
        jax.block_until_ready(params)
        WORKER.done()
        WORKER.wait()


if __name__ == "__main__":
    main()
