"""TRL on a CPU, with the sampler of transformers; its trainer owns the loop.

A callback waits before each step and reports behind it.
"""

# ruff: noqa: E402 (the clock starts before the libraries are imported)
# pyright: reportMissingImports=false

from benchmarks.worker import Worker

WORKER = Worker()

import os
import tempfile
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl

from benchmarks import workload

# Gradients of 32 rows at a time, summed up: on nano faster than 128 or 16 rows.
ROWS_PER_MICRO_BATCH = 32


class Steps(transformers.TrainerCallback):
    """Waits before each optimizer step but the first, which is already asked for."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer."""
        if state.global_step:
            WORKER.wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer, behind the optimizer."""
        WORKER.done()


def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward that all systems share."""
    WORKER.lengths.extend(map(len, completion_ids))
    return [workload.reward(tokens) for tokens in completion_ids]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token is its number, written out; trl wants prompts as text."""
    vocabulary = {str(token): token for token in range(WORKER.work.vocab_size)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    # An end is demanded; this one is behind the vocabulary, so it is never drawn.
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=str(workload.PAD), eos_token="end"
    )


def model() -> transformers.Qwen3ForCausalLM:
    """The random decoder."""
    work = WORKER.work
    made = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=work.vocab_size,
            hidden_size=work.width,
            intermediate_size=work.mlp_width,
            num_hidden_layers=work.layers,
            num_attention_heads=work.heads,
            num_key_value_heads=work.kv_heads,
            head_dim=work.head_dim,
            rope_theta=10_000.0,
            rms_norm_eps=1e-6,
            initializer_range=workload.EMBEDDING_STD,
            tie_word_embeddings=True,
            max_position_embeddings=work.prompt_tokens + work.max_tokens,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    made.generation_config.eos_token_id = list(work.ends) or None
    return made


def main() -> None:
    """Build everything and train for ever."""
    WORKER.imported("trl", "torch", "transformers")
    WORKER.wait()
    work = WORKER.work
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    # What does not fit the slots is sampled in batches of `slots` rows, each as long as
    # its longest row, and their gradients add up to one optimizer update.
    batches = work.rows // work.slots
    micro_batches = WORKER.micro_batches or work.rows // ROWS_PER_MICRO_BATCH
    micro_batches = max(1, micro_batches // batches)  # of gradients, per batch sampled
    gpu = torch.cuda.is_available()
    if gpu:
        WORKER.peak_mib = lambda: torch.cuda.max_memory_allocated() / 2**20
    args = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=work.slots // micro_batches,
        gradient_accumulation_steps=batches * micro_batches,
        steps_per_generation=micro_batches,
        num_generations=work.group_size,
        max_completion_length=work.max_tokens,
        max_steps=10**6,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=workload.LEARNING_RATE,
        weight_decay=workload.WEIGHT_DECAY,
        max_grad_norm=workload.CLIP_NORM,
        lr_scheduler_type="constant",
        use_cpu=not gpu,
        # Both are on by default, and both are wrong for a CPU.
        bf16=gpu,
        gradient_checkpointing=gpu,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    policy, words = model(), tokenizer()
    texts = [" ".join(map(str, tokens)) for tokens in workload.prompts(work)]
    trainer = trl.GRPOTrainer(
        model=policy,
        reward_funcs=rewards,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
        processing_class=words,
        callbacks=[Steps()],
    )
    generate = policy.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        with WORKER.rollout():
            return generate(*args, **kwargs)

    policy.generate = timed
    trainer.train()


if __name__ == "__main__":
    main()
