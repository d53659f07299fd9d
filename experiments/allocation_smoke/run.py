"""Recipes that sample adaptively, on the embedded task, at equal generated tokens.

Command:  python -m experiments.allocation_smoke.run

All recipes start from the same warm-started policies, one per seed, train on the same
few prompts, make one optimizer update per step, and are sized to draw about as much per
update as GRPO does, 128 completions. Each goes on until every seed generated TOKENS,
pilots and what was thrown away included; `results.json` has the held-out pass rate of
every seed at every tenth update, with the tokens and updates it took until then.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

from curax.config import Config, load, override
from experiments import smoke

HERE = Path(__file__).parent
TOKENS = 120_000  # per seed
MOST = 480  # updates, where a recipe draws little
PROMPTS = 512  # to train on: 16 per update come back after 32, so a memory has use

# Recipe: what is changed so that an update takes about 128 completions.
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"sampling.prompts": 16},
    "rloo": {"sampling.prompts": 16, "sampling.group_size": 8},
    "dapo": {"sampling.prompts": 8},
    "ada_seq_balanced_published": {"sampling.prompts": 8},
    "ada_seq_balanced_exact": {"sampling.prompts": 8},
    "neyman": {"sampling.prompts": 16},
    "pods_published": {"sampling.prompts": 4},
    "gvm_raft_published": {
        "sampling.prompts": 8,
        "sampling.budget": 128,
        "kl": None,  # the config had none when this was measured
    },
    "gvm_raft_exact": {
        "sampling.prompts": 8,
        "sampling.budget": 128,
        "correct.rows": 12.0,
    },
}


def sized(name: str, seeds: int = smoke.SEEDS) -> Config:
    """The recipe with the sizes of this comparison."""
    config = load(smoke.ROOT / "configs" / f"{name}.py")
    return smoke.sized(config, RECIPES[name], seeds)


def main() -> None:
    """Run what is not in results.json yet."""

    @cache
    def start() -> Any:
        return smoke.warmed(sized("grpo"))

    def of(name: str) -> dict[str, Any]:
        config = override(sized(name), {"task.num_prompts": PROMPTS})
        return smoke.trained(config, start(), tokens=TOKENS, most=MOST)

    smoke.measure(HERE / "results.json", sys.argv[1:] or RECIPES, of)


if __name__ == "__main__":
    main()
