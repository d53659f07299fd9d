"""Hints, modulated tokens and both beside GRPO, at equal generated tokens.

Command:  python -m experiments.hints_smoke.run

All recipes start from the same warm-started policies, one per seed, which know how to
read a hint and how to write one; train on the same prompts, most of which no completion
of a group solves at first; and make one optimizer update per step. Each goes on until
every seed generated TOKENS, completions under hints and the writing of hints included.
Held-out prompts never have a hint.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

from curax import hint
from curax.config import Config, Writing, load
from experiments import smoke

HERE = Path(__file__).parent
TOKENS = 120_000  # per seed
MOST = 480  # updates, where a recipe draws little
ERRORS = (0.05, 0.40, 0.97)  # of the teacher: reverse subtractions hardly ever succeed

# Recipe: its config, and what is changed of it.
SELF = {"hint.source": hint.self_written, "hint.writing": Writing(max_tokens=8)}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("sage", {"hint": None}),
    "sage": ("sage", {}),
    "sage_self": ("sage", SELF),
    "sage_light": ("sage_light", {}),
    "sage_exact": ("sage_exact", {}),
    "dynamo": ("dynamo", {}),
    "ada_seq": ("ada_seq_sage", {"hint": None, "sampling.prompts": 8}),
    "ada_seq_sage": ("ada_seq_sage", {"sampling.prompts": 8}),
}
WATCHED = ("hint/hinted_fraction", "hint/pass_rate", "hint/transfer_pass_rate")
WATCHED = (*WATCHED, "outcome/mean", "group/failed_fraction")


def sized(name: str, seeds: int = smoke.SEEDS) -> Config:
    """The recipe with the sizes of this comparison."""
    file, changes = RECIPES[name]
    config = load(smoke.ROOT / "configs" / f"{file}.py")
    task = {"task.hints": True, "task.errors": ERRORS}
    return smoke.sized(config, task | changes, seeds)


def main() -> None:
    """Run what is not in results.json yet."""

    @cache
    def start() -> Any:
        return smoke.warmed(sized("grpo"))

    def of(name: str) -> dict[str, Any]:
        config = sized(name)
        watched = WATCHED if config.hint else WATCHED[3:]
        return smoke.trained(config, start(), tokens=TOKENS, most=MOST, watched=watched)

    smoke.measure(HERE / "results.json", sys.argv[1:] or RECIPES, of)


if __name__ == "__main__":
    main()
