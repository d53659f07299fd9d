"""The workload as a user of curax writes it: a task, and a config that is GRPO."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import workload
from benchmarks.workload import Workload
from curax import (
    advantage,
    aggregate,
    allocate,
    correct,
    downsample,
    gate,
    loss,
    modulate,
    objective,
)
from curax.config import Config, Evaluation, Mesh, Sampling, Update
from curax.models import transformer
from curax.types import Prompts, Task

# Four rows at a time: activations stay in the cache of a processor.
ROWS_PER_MICRO_BATCH = 4
# Where completions end by themselves, micro-batches are cut to 16, 32 or 64 tokens;
# from `LONG` tokens on rows are packed, so many tokens to a micro-batch.
LENGTH_BUCKETS = 3
LONG, PACKED_TOKENS = 256, 1024


def task(work: Workload, heard: Callable[[int], None]) -> Task:
    """The workload's prompts, and its reward, on the host as in the peers.

    Args:
        work: shapes.
        heard: told the length of every completion as it is verified.
    """
    table = jnp.asarray(workload.prompts(work), jnp.int32)

    def prompts(prompt_id: jax.Array) -> Prompts:
        tokens = table[prompt_id]
        mask = jnp.ones(tokens.shape, bool)
        return Prompts(tokens=tokens, mask=mask, id=prompt_id, target=prompt_id)

    def verify(_: Any, tokens: Any) -> float:
        heard(len(tokens))
        return workload.reward(tokens.tolist())

    return Task(
        vocab_size=work.vocab_size,
        pad=workload.PAD,
        end=work.ends,
        num_prompts=workload.PROMPTS,
        num_held_out=1,
        prompts=prompts,
        held_out=prompts,
        traces=None,
        verify=verify,
        on_device=False,
        decode=str,
    )


def config(
    work: Workload,
    heard: Callable[[int], None] = lambda _: None,
    *,
    micro_batches: int = 0,
    token_chunk: int = 0,
    devices: int = 1,
) -> Config:
    """GRPO, as `configs/grpo.py` but without its KL term and its warm start.

    Args:
        work: shapes.
        heard: see `task`.
        micro_batches: of gradients; 0: as many as was found fastest.
        token_chunk: see `curax.config.Update`.
        devices: over which rows lie.
    """
    packs = bool(work.ends) and work.max_tokens >= LONG and not micro_batches
    parts = work.rows // (ROWS_PER_MICRO_BATCH * devices)
    return Config(
        task=partial(task, work=work, heard=heard),
        model=partial(
            transformer.model,
            width=work.width,
            layers=work.layers,
            heads=work.heads,
            kv_heads=work.kv_heads,
            head_dim=work.head_dim,
            mlp_width=work.mlp_width,
            tied=True,
            embedding_std=workload.EMBEDDING_STD,
        ),
        sampling=Sampling(
            prompts=work.prompts,
            group_size=work.group_size,
            max_tokens=work.max_tokens,
            slots=work.slots,
        ),
        allocate=allocate.uniform,
        gate=gate.none,
        downsample=downsample.none,
        correct=correct.none,
        advantage=advantage.standardised,
        objective=partial(objective.prompt_weight, f=objective.linear),
        modulate=modulate.none,
        loss=loss.clipped_ratio,
        aggregate=aggregate.sequence_mean,
        optimizer=partial(
            optax.adamw,
            learning_rate=workload.LEARNING_RATE,
            weight_decay=workload.WEIGHT_DECAY,
        ),
        update=Update(
            micro_batches=1 if packs else micro_batches or parts,
            tokens_per_micro_batch=PACKED_TOKENS if packs else 0,
            length_buckets=LENGTH_BUCKETS if work.ends and not packs else 1,
            token_chunk=token_chunk,
            clip_norm=workload.CLIP_NORM,
        ),
        evaluation=Evaluation(prompts=1),
        mesh=Mesh(data=devices),
    )
