"""The model card of an exported policy: where it came from, what it learnt, and how."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from curax import hub
from curax.config import Config, ConfigError
from curax.runs import reading
from curax.settings import errors
from curax.settings.config_paths import full_name, option
from curax.settings.packages import VERSION
from curax.settings.sizes import checkpoint_of
from curax.settings.tables import markdown
from curax.theory import predict
from curax.theory.population import LIFT

STAGES = (
    *("allocate", "objective", "gate", "downsample", "correct", "advantage"),
    *("modulate", "loss", "aggregate"),
)
RATES = (0.1, 0.3, 0.5, 0.7, 0.9)
PROMPTS = 64  # of the population that allocators see, evenly spread over (0, 1)


def text(
    config: Config, run: Path, *, name: str, step: int, prompts: int, adapter: bool
) -> str:
    """The card in Markdown, with the header that the hub reads.

    Args:
        config: config of the run.
        run: its folder; figures are those of its metrics.jsonl, if that is there.
        name: of the exported folder.
        step: step of the checkpoint that is exported.
        prompts: number of training prompts.
        adapter: whether adapters alone are exported.
    """
    figures = list(_figures(config, run, step))
    parts = [
        _header(config, adapter=adapter),
        f"# {name}",
        _origin(config, step),
        markdown(("", ""), figures) if figures else "",
        "## Recipe",
        markdown(("stage", "function"), _functions(config)),
        *_weights(config, prompts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _names(config: Config) -> Iterator[tuple[str, str, hub.Name]]:
    """(header field, words, name) of checkpoint and data that came from the hub."""
    named = {
        ("base_model", "Began from"): (checkpoint_of(config), "model"),
        ("datasets", "Trained on"): (option(config.task, "train"), "dataset"),
    }
    for (field, words), (path, kind) in named.items():
        if isinstance(path, str) and (name := hub.parsed(path, kind)):
            yield field, words, name


def _header(config: Config, *, adapter: bool) -> str:
    """The YAML that the hub reads."""
    library = "peft" if adapter else "transformers"
    header = {"library_name": library, "tags": ["curax", "rlvr"]}
    header |= {field: [name.repo] for field, _, name in _names(config)}
    return f"---\n{yaml.safe_dump(header, sort_keys=False)}---"


def _origin(config: Config, step: int) -> str:
    """Sentences on the program, the checkpoint and the data."""
    kind = "reinforcement learning from verifiable rewards"
    if config.steps == 0:
        kind = "supervised fine-tuning"
    lines = [
        f"Step {step} of {config.steps} of {kind} with curax {VERSION}{_commit()}, "
        f"seed {config.seed}."
    ]
    for _, words, name in _names(config):
        inside = f", {name.inside}" if name.inside else ""
        lines.append(f"{words} `{name.repo}` at commit `{name.revision}`{inside}.")
    return "\n".join(lines)


def _commit() -> str:
    """The commit of curax, where it is a clone; else nothing."""
    clone = Path(__file__).parents[2]
    if not (clone / ".git").exists():
        return ""
    command = ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return f", commit {done.stdout.strip()}" if done.returncode == 0 else ""


def _figures(config: Config, run: Path, step: int) -> Iterator[tuple[str, str]]:
    """(what, figure) pairs of the run up to a step."""
    try:
        rows = [row for row in reading.read(run).rows if row["step"] <= step]
    except reading.DamagedError:
        return
    sizes = config.evaluation
    words = {
        "eval/pass_rate": f"held-out pass rate, {sizes.samples} samples of each prompt",
        "eval/greedy_pass_rate": "held-out pass rate, greedy",
    }
    for metric, what in words.items():
        found = sorted(reading.means(rows, metric).items())
        rates = [f"{rate:.3f} at step {at:.0f}" for at, rate in found]
        if rates:
            first = f"{rates[0]}, " if len(rates) > 1 else ""
            yield what, f"{first}{rates[-1]}, {sizes.prompts} prompts"
    if tokens := rows[-1].get("rollout/tokens"):
        yield "tokens generated", reading.count_text(float(np.sum(tokens)))


def _functions(config: Config) -> Iterator[tuple[str, str]]:
    """(stage, function) pairs of the recipe, options that are bound included."""
    for stage in STAGES:
        function = getattr(config, stage)
        bound = getattr(function, "keywords", {})
        plain = {k: v for k, v in bound.items() if isinstance(v, int | float | str)}
        shown = ", ".join(f"{key}={json.dumps(value)}" for key, value in plain.items())
        called = full_name(function).removeprefix("curax.")
        yield stage, f"`{called}{f'({shown})' if shown else ''}`"


def _weights(config: Config, prompts: int) -> Iterator[str]:
    """Heading, sentence and table of w(p); nothing where it is not defined."""
    if config.reflection or not config.steps:
        return
    population = (np.arange(PROMPTS) + 0.5) / PROMPTS
    found: Any
    try:
        with errors.config_errors(config):
            found = predict.predict(
                config, np.array(RATES), population, lift=LIFT, prompts=prompts
            )
            found = predict.with_hints(config, found)
    except ConfigError:
        return
    yield "## What it optimises"
    yield (
        "The expected update of a prompt with pass rate p is w(p) times the gradient "
        "of p, computed from the functions above:"
    )
    weights = [f"{weight:.3g}" for weight in found.weight]
    yield markdown(["p", *map(str, RATES)], [["w(p)", *weights]])
