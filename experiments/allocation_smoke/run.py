"""Recipes that sample adaptively, on the embedded task, at equal generated tokens.

Command:  python -m experiments.allocation_smoke.run

All recipes start from the same warm-started policies, one per seed, train on the same
few prompts, make one optimizer update per step, and are sized to draw about as much per
update as GRPO does, 128 completions. Each goes on until every seed generated TOKENS,
pilots and what was thrown away included; `results.json` has the held-out pass rate of
every seed at every tenth update, with the tokens and updates it took until then.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from curax import loops
from curax.config import Config, load, override
from curax.parts import build

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SEEDS = 8
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
    "gvm_raft_published": {"sampling.prompts": 8, "sampling.budget": 128},
    "gvm_raft_exact": {
        "sampling.prompts": 8,
        "sampling.budget": 128,
        "correct.rows": 12.0,
    },
}


def sized(name: str, seeds: int = SEEDS) -> Config:
    """The recipe with the sizes of this comparison."""
    config = load(ROOT / "configs" / f"{name}.py")
    common = {
        "seeds": seeds,
        "update.minibatches": 1,
        "evaluation.every": 10,
        "logging.every": 10,
        "logging.rollout_prompts": 0,
    }
    return override(config, common | RECIPES[name])


def warmed(config: Config) -> Any:
    """The policies that all recipes start from, on the host."""
    loop = loops.Jitted(build(config))
    assert config.warm_start
    state = loop.initial()
    for done in range(0, config.warm_start.steps, 10):
        state, losses = loop.warm(state, 10)
        if done % 100 == 0:
            print(f"  warm start {done}: {losses[-1].mean():.3f} nats", flush=True)
    return jax.device_get(state)


def trained(config: Config, warm: Any) -> dict[str, Any]:
    """Held-out pass rates `[points, seeds]` with tokens and updates until then."""
    loop = loops.Jitted(build(config))
    loop._timed_draw = lambda state: 0.0  # it would be compiled, and is not needed
    state = loop.begin(jax.device_put(warm))
    tokens, updates = np.zeros(SEEDS), np.zeros(SEEDS)
    told: dict[str, list[Any]] = {name: [] for name in ("tokens", "updates", "rate")}
    groups: dict[str, list[Any]] = {"signal": [], "draws": []}
    start, first = time.monotonic(), None  # held-out pass rates before RL
    for done in range(0, MOST + 1, 10):
        each = loop.evaluate(state)[0]
        rates = np.nanmean(each, -1)
        first = each if first is None else first
        for key, value in (("tokens", tokens), ("updates", updates), ("rate", rates)):
            told[key].append(np.asarray(value, float).tolist())
        print(
            f"  {done} updates, {tokens.mean():,.0f} tokens: {rates.mean():.3f} "
            f"({time.monotonic() - start:.0f} s)",
            flush=True,
        )
        if tokens.min() >= TOKENS or done == MOST:
            break
        state, rows, _ = loop.advance(state, 10)
        for row in rows:
            tokens = tokens + row["rollout/tokens"]
            updates = updates + row["update/count"]
            groups["signal"].append(float(row["group/signal_fraction"].mean()))
            groups["draws"].append(float(row["rollout/drawn"].mean()))
    assert first is not None
    return told | {"group": groups, "start": first.tolist()}


def main() -> None:
    """Run what is not in results.json yet."""
    path = HERE / "results.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    warm = None
    for name in sys.argv[1:] or RECIPES:
        if name in found:
            continue
        config = sized(name)
        print(name, flush=True)
        warm = warmed(config) if warm is None else warm
        result = trained(override(config, {"task.num_prompts": PROMPTS}), warm)
        git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        result["commit"] = subprocess.check_output(git, text=True).strip()
        result["device"] = jax.devices()[0].device_kind
        result["jax"] = jax.__version__
        found[name] = result
        path.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
