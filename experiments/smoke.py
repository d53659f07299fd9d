"""Recipes from the same warm-started policies, each up to a number of tokens.

What the comparisons on embedded tasks have in common: runs side by side of all seeds,
held-out pass rates at every tenth update with the tokens and updates it took until
then, results kept in a JSON file, and tables and pictures of them.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from curax.config import Config, override
from curax.runs import record
from curax.runs.pictures import LIGHT, canvas, label, percent
from curax.step import loops
from curax.step.build import build

ROOT = Path(__file__).parents[1]
SEEDS = 8
EVERY = 10  # updates between two evaluations
COLORS = ("#1b1f24", "#882255", "#5b6470", "#d55e00", "#0072b2", "#009e73", "#cc79a7")
COLORS = (*COLORS, "#e69f00", "#56b4e9")


def sized(config: Config, changes: Mapping[str, Any], seeds: int = SEEDS) -> Config:
    """The recipe with the sizes of a comparison: one update per step, many seeds."""
    common = {
        "seeds": seeds,
        "update.minibatches": 1,
        "evaluation.every": EVERY,
        "logging.every": EVERY,
        "logging.rollout_prompts": 0,
    }
    return override(config, common | dict(changes))


def warmed(config: Config) -> Any:
    """The policies that all recipes start from, on the host."""
    loop = loops.Jitted(build(config))
    assert config.warm_start
    state = loop.initial()
    for done in range(0, config.warm_start.steps, EVERY):
        state, losses = loop.warm(state, EVERY)
        if done % 100 == 0:
            print(f"  warm start {done}: {losses[-1].mean():.3f} nats", flush=True)
    return jax.device_get(state)


def trained(
    config: Config, warm: Any, *, tokens: float, most: int, watched: Iterable[str] = ()
) -> dict[str, Any]:
    """Held-out pass rates `[points, seeds]` with tokens and updates until then.

    Args:
        config: `sized`.
        warm: `warmed`.
        tokens: that every seed generates, dropped and hint-writing ones included.
        most: updates after which a recipe that draws little ends.
        watched: metrics whose means over the updates between two points are kept too;
            0 where none of them has one.
    """
    loop = loops.Jitted(build(config))
    state = loop.begin(jax.device_put(warm))
    spent, updates = np.zeros(config.seeds), np.zeros(config.seeds)
    told: dict[str, list[Any]] = {name: [] for name in ("tokens", "updates", "rate")}
    seen: dict[str, list[Any]] = {name: [] for name in watched}
    groups: dict[str, list[Any]] = {"signal": [], "draws": []}
    start, first = time.monotonic(), None  # held-out pass rates before RL
    for done in range(0, most + 1, EVERY):
        each = loop.evaluate(state)[0]
        rates = np.nanmean(each, -1)
        first = each if first is None else first
        for key, value in (("tokens", spent), ("updates", updates), ("rate", rates)):
            told[key].append(np.asarray(value, float).tolist())
        print(
            f"  {done} updates, {spent.mean():,.0f} tokens: {rates.mean():.3f} "
            f"({time.monotonic() - start:.0f} s)",
            flush=True,
        )
        if spent.min() >= tokens or done == most:
            break
        state, rows, _ = loop.advance(state, EVERY)
        for name, values in seen.items():
            found = np.array([row[name] for row in rows], float)
            known = np.isfinite(found)
            sums = np.where(known, found, 0.0).sum(0)
            values.append((sums / np.maximum(known.sum(0), 1)).tolist())
        for row in rows:
            spent = spent + row["rollout/tokens"]
            updates = updates + row["update/count"]
            groups["signal"].append(float(row["group/signal_fraction"].mean()))
            groups["draws"].append(float(row["rollout/drawn"].mean()))
    assert first is not None
    return told | {"group": groups, "start": first.tolist(), "seen": seen}


def measure(
    path: Path, recipes: Iterable[str], of: Callable[[str], dict[str, Any]]
) -> None:
    """Run what is not in the file yet, and write it there, with what it ran on."""
    found = json.loads(path.read_text()) if path.exists() else {}
    for name in recipes:
        if name in found:
            continue
        print(name, flush=True)
        git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        found[name] = of(name) | {
            "commit": subprocess.check_output(git, text=True).strip(),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
        }
        path.write_text(json.dumps(found) + "\n")


def at(own: Mapping[str, Any], axis: str, place: float) -> np.ndarray:
    """Pass rates of the seeds where each had so many tokens or updates, `[seeds]`."""
    spent, rates = np.array(own[axis]), np.array(own["rate"])
    assert place <= spent[-1].min(), f"{axis}={place} was not reached by every seed"
    return np.array(
        [
            np.interp(place, spent[:, seed], rates[:, seed])
            for seed in range(rates.shape[-1])
        ]
    )


def shown(values: np.ndarray, *, signed: bool = False) -> str:
    """Mean and half a 95 % t-interval over seeds."""
    middle, half = record.t_interval(values)
    return f"{middle:{'+' if signed else ''}.3f} ± {half:.3f}"


def table(found: Mapping[str, Any], base: str, tokens: Iterable[float], updates: int):
    """Rows of pass rates at equal tokens and at equal updates, beside those of base."""
    last = max(tokens)
    head = ["recipe", *(f"{record.count_text(t)} tokens" for t in tokens)]
    head += [f"less {base}", f"{updates} updates", f"less {base}", "updates then"]
    lines = [head, ["---"] * len(head)]
    for name, own in found.items():
        there, then = at(own, "tokens", last), at(own, "updates", updates)
        plain = found[base]
        gap = there - at(plain, "tokens", last)
        later = then - at(plain, "updates", updates)
        spent = np.array(own["tokens"]).mean(1)
        line = [name, *(shown(at(own, "tokens", t)) for t in tokens)]
        line += ["" if name == base else shown(gap, signed=True), shown(then)]
        line += ["" if name == base else shown(later, signed=True)]
        line += [f"{np.interp(last, spent, np.array(own['updates']).mean(1)):.0f}"]
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(path: Path, found: Mapping[str, Any], base: str, tokens: float) -> None:
    """Held-out pass rate over tokens: as it is, and less that of base."""
    figure, (left, right) = canvas(LIGHT, (1, 1))
    figure.set_size_inches(11, 4.6)
    places = np.linspace(0, tokens, 41)
    plain = np.array([at(found[base], "tokens", t) for t in places])
    for (name, own), color in zip(found.items(), COLORS, strict=False):
        rates = np.array([at(own, "tokens", t) for t in places])
        left.plot(places, rates.mean(1), color=color, label=name, linewidth=1.8)
        if name != base:
            middle, half = record.t_interval(rates - plain)
            right.plot(places, middle, color=color, linewidth=1.8)
            right.fill_between(
                places, middle - half, middle + half, color=color, alpha=0.08
            )
    right.axhline(0, color=LIGHT.ink, linewidth=1)
    percent(left)
    label(left, LIGHT, "generated tokens", "held-out pass rate")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    label(right, LIGHT, "generated tokens", f"less that of {base}, 95% over seeds")
    for axes in (left, right):
        axes.xaxis.set_major_formatter(lambda value, _: record.count_text(value))
    figure.savefig(path, metadata={"Software": None})
