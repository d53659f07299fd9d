"""Tunix, with its own sampler and GRPO learner, which owns the loop.

The learner draws the prompts of its next step from an iterator, so this is where it
waits between iterations.
"""

# ruff: noqa: E402 (the clock starts before the libraries are imported)
# pyright: reportMissingImports=false

from benchmarks.worker import Worker

WORKER = Worker()

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from benchmarks import workload

# Gradients of 16 rows at a time, summed up: on nano faster than 128, 32 or 8 rows, and
# less than half the memory of 128; on small 128 rows take more than 15 GB.
ROWS_PER_MICRO_BATCH = 16


class Tokenizer:
    """A token is its number, written out: tunix passes text to and fro."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """Text to tokens."""
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        """Tokens to text."""
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        """No token begins a prompt: 0 stands for none."""
        return 0

    def eos_id(self) -> int:
        """Unused: the workload's ends are given to the sampler. No token has it."""
        return WORKER.work.vocab_size

    def pad_id(self) -> int:
        """In front of prompts and behind completions."""
        return workload.PAD


def batches(actor: Any) -> Iterator[dict[str, np.ndarray]]:
    """The prompts of one iteration after another; the first is already asked for."""
    work, position = WORKER.work, 0
    texts = [" ".join(map(str, tokens)) for tokens in workload.prompts(work)]
    while True:
        yield {"prompts": np.array(texts[position : position + work.prompts])}
        position = (position + work.prompts) % len(texts)
        jax.block_until_ready(nnx.state(actor))
        WORKER.done()
        WORKER.wait()


def rewards(prompts: Any, completions: list[str], **_: Any) -> list[float]:
    """The reward that all systems share."""
    tokens = [[int(word) for word in text.split()] for text in completions]
    WORKER.lengths.extend(map(len, tokens))
    return [workload.reward(row) for row in tokens]


def main() -> None:
    """Build everything and train for ever."""
    WORKER.imported("google-tunix", "jax", "flax", "optax")
    WORKER.wait()
    work = WORKER.work
    config = qwen3.ModelConfig(
        num_layers=work.layers,
        vocab_size=work.vocab_size,
        embed_dim=work.width,
        hidden_dim=work.mlp_width,
        num_heads=work.heads,
        head_dim=work.head_dim,
        num_kv_heads=work.kv_heads,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    micro_batches = WORKER.micro_batches or max(1, work.rows // ROWS_PER_MICRO_BATCH)
    micro_batches = min(micro_batches, work.prompts)  # of whole groups
    optimizer = optax.chain(
        optax.clip_by_global_norm(workload.CLIP_NORM),
        optax.adamw(workload.LEARNING_RATE, weight_decay=workload.WEIGHT_DECAY),
    )
    sampling = base_rollout.RolloutConfig(
        max_tokens_to_generate=work.max_tokens,
        max_prompt_length=work.prompt_tokens,
        kv_cache_size=work.prompt_tokens + work.max_tokens,
        temperature=1.0,
        top_p=1.0,
        eos_tokens=list(work.ends) or None,
    )
    with mesh:
        actor = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
        cluster = rl_cluster.RLCluster(
            actor=actor,
            tokenizer=Tokenizer(),
            cluster_config=rl_cluster.ClusterConfig(
                # One mesh: sampler and trainer share the parameters.
                role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optimizer,
                    eval_every_n_steps=10**9,
                    max_steps=10**9,
                    mini_batch_size=work.prompts,
                    # Sizes count prompts. What does not fit the slots is sampled in
                    # batches, each as long as its longest row: there is no refill.
                    train_micro_batch_size=work.prompts // micro_batches,
                    rollout_micro_batch_size=work.slots // work.group_size,
                ),
                rollout_config=sampling,
            ),
        )
        generate, calls = cluster.rollout.generate, iter(range(10**9))

        def timed(*args: Any, **kwargs: Any) -> Any:
            # Without a seed every call would draw with the same noise.
            sampling.seed = jax.random.PRNGKey(next(calls))
            with WORKER.rollout():
                return generate(*args, **kwargs)

        cluster.rollout.generate = timed
        learner = grpo_learner.GRPOLearner(
            rl_cluster=cluster,
            algo_config=grpo_learner.GRPOConfig(
                num_generations=work.group_size, beta=0.0
            ),
            reward_fns=rewards,
        )
        learner.train(batches(actor))


if __name__ == "__main__":
    main()
