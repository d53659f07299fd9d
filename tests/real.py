"""A real run, shrunk: a checkpoint of Hugging Face, files, graders in processes."""

from functools import cache, partial
from pathlib import Path

import from_nothing
import optax
import words

from curax import update
from curax.config import (
    Config,
    Evaluation,
    Logging,
    Update,
    WarmStart,
    load,
    transferred,
)
from curax.models import pretrained
from curax.tasks import file_task, text

FILE = Path(__file__)
RECIPE = FILE.parents[1] / "configs" / "quickstart.py"
SIZES = {"layers": 1, "heads": 4, "kv_heads": 2, "width": 64, "mlp_width": 128}


@cache
def checkpoint(architecture="Qwen3ForCausalLM", *, small=False):
    """A folder with a random policy and the tokenizer of the word problems."""
    there = words.folder() / f"{architecture}{'-small' * small}"
    if there.exists():
        return there
    spoken = text.load(words.folder() / "tokenizer")
    sizes = SIZES | {"tied": architecture.startswith("Qwen3")}
    sizes |= {"width": 32, "mlp_width": 48} if small else {}
    # More rows than words, as real ones have.
    vocab_size = -(-spoken.size // 64) * 64
    from_nothing.checkpoint(
        there, architecture=architecture, vocab_size=vocab_size, **sizes
    )
    for file in spoken.path.iterdir():
        (there / file.name).write_bytes(file.read_bytes())
    return there


def get_config() -> Config:
    """Everything but the files, which `named` names."""
    warm = partial(update.warmup_cosine, peak=8e-3, warmup=10, steps=150, end=3e-4)
    return transferred(
        load(RECIPE),
        max_tokens=16,
        task=partial(
            file_task.task,
            train="train.jsonl",
            held_out="test.jsonl",
            max_prompt_tokens=64,
            max_trace_tokens=16,
            workers=1,
        ),
        model=partial(
            pretrained.model, path="checkpoint", scan_layers=False, dtype="float32"
        ),
        warm_start=WarmStart(
            steps=150,
            rows=64,
            micro_batches=2,
            optimizer=partial(optax.adamw, learning_rate=warm),
        ),
        optimizer=partial(optax.adam, learning_rate=4e-4, b2=0.99),
        update=Update(minibatches=2, token_chunk=128),
        evaluation=Evaluation(every=30, prompts=64, samples=4),
        logging=Logging(every=1, checkpoint_every=20),
        steps=60,
    )


def named(architecture="Qwen3ForCausalLM"):
    """What `--set` has to name: the checkpoint and the files."""
    folder = words.folder()
    return [
        f"model.path={checkpoint(architecture)}",
        f"task.train={folder / 'train.jsonl'}",
        f"task.held_out={folder / 'test.jsonl'}",
    ]
