"""A real run, shrunk: a checkpoint of Hugging Face, files, graders in processes."""

from functools import cache
from pathlib import Path

import words

from curax.commands import demo
from curax.config import Config, load, override

FILE = Path(__file__)
SMALL = {"width": 32, "mlp_width": 48}


@cache
def checkpoint(architecture="Qwen3ForCausalLM", *, small=False):
    """A folder with a random policy and the tokenizer of the word problems."""
    there = words.folder() / f"{architecture}{'-small' * small}"
    if there.exists():
        return there
    sizes = {"tied": architecture.startswith("Qwen3")}
    sizes |= SMALL if small else {}
    demo.write_model(there, words.tokenizer(), architecture=architecture, **sizes)
    return there


def get_config() -> Config:
    """That of `curax demo`, shorter; `named` names the files."""
    shorter = ["steps=60", "evaluation.every=30", "loss.high=0.28", "task.workers=1"]
    return override(load(words.folder() / "words.py"), shorter)


def named(architecture="Qwen3ForCausalLM", *, small=False):
    """What `--set` has to name: the checkpoint and the files."""
    folder = words.folder()
    return [
        f"model.path={checkpoint(architecture, small=small)}",
        f"task.train={folder / 'train.jsonl'}",
        f"task.held_out={folder / 'test.jsonl'}",
    ]
