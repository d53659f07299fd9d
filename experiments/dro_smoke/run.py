"""Rewards by reference answers, weighed in several ways, without any verifier.

Command:  python -m experiments.dro_smoke.run

All recipes start from the same warm-started policies, one per seed, draw as many
completions per update, make one optimizer update per step, and go on until every seed
generated TOKENS, those drawn to choose prompts included. Held-out completions are
graded by a verifier that none of the recipes but the control has ever asked.
"""

import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from curax import advantage, reflect
from curax.config import Config, load
from experiments import smoke

HERE = Path(__file__).parent
TOKENS = 600_000  # per seed
MOST = 300  # updates


def control(config: Config) -> Config:
    """The same recipe with the outcome of the verifier as its reward."""
    plain = partial(advantage.standardised)
    return replace(config, reflection=None, advantage=plain)


def weighed(config: Config, weights: Any) -> Config:
    """Every prompt in turn, reference tokens weighed like this."""
    assert config.reflection
    how = replace(config.reflection, weights=weights, queries=None)
    return replace(config, reflection=how)


RECIPES: dict[str, Any] = {
    "mean": partial(weighed, weights=reflect.mean),
    "sigma": partial(weighed, weights=reflect.sigma),
    "denoised": partial(weighed, weights=reflect.denoised),
    "verifier": control,
    "dro": lambda config: config,
}
WATCHED = ("reflect/certainty_nats", "reflect/thought_tokens", "reflect/top_weight")


def sized(name: str, seeds: int = smoke.SEEDS) -> Config:
    """The recipe with the sizes of this comparison."""
    config = RECIPES[name](load(smoke.ROOT / "configs" / "dro.py"))
    sizes = {"sampling.prompts": 8, "evaluation.samples": 4}
    return smoke.sized(config, sizes, seeds)


def main() -> None:
    """Run what is not in results.json yet."""

    @cache
    def start() -> Any:
        return smoke.warmed(sized("mean"))

    def of(name: str) -> dict[str, Any]:
        config = sized(name)
        watched = WATCHED if config.reflection else ()
        return smoke.trained(config, start(), tokens=TOKENS, most=MOST, watched=watched)

    smoke.measure(HERE / "results.json", sys.argv[1:] or RECIPES, of)


if __name__ == "__main__":
    main()
