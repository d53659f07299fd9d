"""Measure the map, a piece of minutes at a time.

Command:  python -m experiments.map.run            what is left, and how long it takes
          python -m experiments.map.run --next 5   the next five pieces
          python -m experiments.map.run --all      all that is left

A piece is a small JSON file in `results/REGIME`; what is there is not measured again.
Killed at any time, the piece that was running is measured anew. Warm starts lie in
runs/map, and are made again where they are missing.
"""

import argparse
import json
import pickle
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from curax.compare import programs, statistics
from curax.compare.analysis import RATES
from curax.compare.experiment import arms, warm_config, warm_key
from curax.config import override
from curax.runs import libraries
from curax.settings.cli import write_file
from curax.step import draw, drivers, loops, validation
from curax.step.build import build
from curax.step.types import Subject
from experiments.map import regimes
from experiments.map.regimes import CLAIMING, RECIPES, REGIMES, TUNING, Setting

RUNS = Path("runs", "map")
SEEDS = (*TUNING, *CLAIMING, *regimes.FRESH)  # of warm starts
SEEDS_AT_A_TIME = 8  # of a warm start
BINS = (0.0, 1e-9, 0.05, 0.2, 0.4, 0.6, 0.8, 1 - 1e-9, 1.0 + 1e-9)  # of pass rates
SAMPLES = 32  # of a prompt, for its pass rate before RL
# Seconds of a piece before one of its kind was measured, on one core.
GUESS = {"warm": 150.0, "start": 30.0, "tune": 40.0, "claim": 60.0, "long": 240.0}


class Piece(NamedTuple):
    """A part of the map that is measured in one go."""

    regime: str
    kind: str  # warm, start, tune, claim or long
    recipe: str = ""
    number: int = 0  # of a warm start or of a chunk of settings

    @property
    def name(self) -> str:
        """Regime, kind, recipe and number."""
        parts = [self.regime, self.kind, self.recipe]
        parts += [str(self.number)] * (self.kind in ("warm", "tune"))
        return " ".join(part for part in parts if part)

    @property
    def path(self) -> Path:
        """The file that holds it, once it is measured."""
        if self.kind == "warm":
            return RUNS / _warm_key(self.regime) / f"warm-{self.number}.pickle"
        name = "-".join(self.name.split()[1:])
        return regimes.RESULTS / self.regime / f"{name}.json"


def pieces(regime: str) -> Iterator[Piece]:
    """All pieces of a regime, in the order in which they are measured."""
    yield from warm_pieces(regime, (*TUNING, *CLAIMING))
    yield Piece(regime, "start")
    for name in REGIMES[regime].recipes:
        for number, _ in enumerate(REGIMES[regime].chunks(name)):
            yield Piece(regime, "tune", name, number)
        yield Piece(regime, "claim", name)
        if name in REGIMES[regime].long:
            yield Piece(regime, "long", name)


def warm_pieces(regime: str, seeds: Iterable[int]) -> list[Piece]:
    """The warm starts among which those of some seeds are, in order."""
    numbers = sorted({SEEDS.index(seed) // SEEDS_AT_A_TIME for seed in seeds})
    return [Piece(regime, "warm", "", number) for number in numbers]


def left(only: str | None = None) -> list[Piece]:
    """Pieces that are not there; warm starts only where something else needs them."""
    found: dict[Path, Piece] = {}  # regimes of one warm start share its files
    for regime in [only] if only else regimes.MAPPED:
        missing = [piece for piece in pieces(regime) if not piece.path.exists()]
        if any(piece.kind != "warm" for piece in missing):
            found |= {piece.path: piece for piece in missing if piece.path not in found}
    return list(found.values())


def seconds() -> dict[str, float]:
    """Median seconds of the pieces of each kind."""
    found: dict[str, list[float]] = {}
    for path in regimes.RESULTS.glob("*/*.json"):
        kind, own = path.stem.split("-")[0], json.loads(path.read_text())
        if "seconds" in own:
            found.setdefault(kind, []).append(own["seconds"])
        if "warm_seconds" in own:
            found.setdefault("warm", []).append(own["warm_seconds"])
    return GUESS | {kind: float(np.median(own)) for kind, own in found.items()}


# ----- pieces


def measure(piece: Piece) -> None:
    """Measure a piece and write its file."""
    begun = time.monotonic(), time.process_time()
    kinds = {"warm": _warm, "start": _start, "tune": _tune}
    found = kinds.get(piece.kind, _claim)(piece)
    if piece.kind == "warm":
        found = {"state": found, "seconds": time.monotonic() - begun[0]}
        write(piece.path, pickle.dumps(found))
        return
    found |= {
        "seconds": round(time.monotonic() - begun[0], 1),
        "processor_seconds": round(time.process_time() - begun[1], 1),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    write(piece.path, (json.dumps(found) + "\n").encode())


def write(path: Path, data: bytes) -> None:
    """Write a file and its folder, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data)


def _first(regime: str) -> Setting:
    """A setting of the first recipe: for what all settings share."""
    return REGIMES[regime].chunks(regimes.BASELINES[0])[0][0]


def warm_config_of(regime: str):
    """The config of the warm start of a regime."""
    chosen = {regimes.BASELINES[0]: _first(regime)}
    return warm_config(
        regimes.experiment(regime, chosen),
        regimes.arm(regime, regimes.BASELINES[0], _first(regime), "claim"),
    )


@cache
def _warm_key(regime: str) -> str:
    """Digest of the warm start of a regime: equal for equal ones alone."""
    chosen = {regimes.BASELINES[0]: _first(regime)}
    (arm,) = arms(regimes.experiment(regime, chosen))
    return warm_key(regimes.experiment(regime, chosen), arm)


def _warm(piece: Piece) -> Any:
    """The warm starts of some seeds, on the host."""
    seeds = SEEDS[piece.number * SEEDS_AT_A_TIME :][:SEEDS_AT_A_TIME]
    config = replace(warm_config_of(piece.regime), seed=seeds[0], seeds=len(seeds))
    loop = loops.Jitted(build(config))
    assert config.warm_start
    state, total = loop.initial(), config.warm_start.steps
    for after, done, losses in loop.warm_up(state):
        state = after
        if not done % 100:
            loss = float(np.mean(losses[-1]))
            print(f"  {piece.name}: {done} of {total}, loss {loss:.3f}", flush=True)
    return jax.device_get(state)


def warmed(regime: str, seeds: tuple[int, ...]) -> Any:
    """The warm starts of some seeds of a regime."""
    files = [piece.path for piece in warm_pieces(regime, seeds)]
    states = [pickle.loads(path.read_bytes())["state"] for path in files]
    every = jax.tree.map(lambda *x: np.concatenate(x), *states)
    rows = [every.seed.tolist().index(seed) for seed in seeds]
    state = jax.tree.map(lambda x: x[np.array(rows)], every)
    assert state.seed.tolist() == list(seeds), "warm starts of other seeds"
    return jax.device_put(state, jax.devices()[0])


def _lanes(regime: str, recipe: str, settings: list[Setting], stage: str):
    arms = [regimes.arm(regime, recipe, setting, stage) for setting in settings]
    sweep = programs.Sweep(tuple(arms), RECIPES[recipe].magnitudes)
    return programs.lanes(sweep)


def _start(piece: Piece) -> dict[str, Any]:
    """What a regime is, in numbers, before RL; of the training prompts it draws."""
    config = replace(warm_config_of(piece.regime), seed=0, seeds=len(TUNING))
    about = REGIMES[piece.regime]
    options = {f"task.{name}": value for name, value in about.task.items()}
    parts = build(override(config, options))
    warm = warmed(piece.regime, TUNING)
    count = parts.config.evaluation.prompts
    prompts = parts.task.prompts(jax.numpy.arange(count, dtype=jax.numpy.int32))

    examined = Subject(task=parts.task, model=parts.model)

    def graded(warm):
        key, how = validation.draw_key(warm.seed), draw.settings(parts)
        asked = draw.plain(prompts, SAMPLES, key, how)
        return drivers.Traced().draw_and_grade(examined, warm, asked)

    found = jax.device_get(jax.jit(jax.vmap(graded))(warm))
    rollouts, outcome = found.rollouts, found.outcome
    rates = validation.pass_rates(parts, rollouts, outcome)  # [seeds, prompts]
    length = np.asarray(rollouts.mask).sum(-1)
    shares = np.histogram(rates, BINS)[0] / rates.size
    files = [p.path for p in pieces(piece.regime) if p.kind == "warm"]
    took = [pickle.loads(path.read_bytes())["seconds"] for path in files]
    return {
        "pass_rate": float(rates.mean()),
        "histogram": [round(float(share), 4) for share in shares],
        "never": float((rates == 0).mean()),
        "always": float((rates == 1).mean()),
        # How many prompts of how many have k right ones of SAMPLES, k = 0 .. SAMPLES.
        "right": np.bincount(
            np.rint(rates * SAMPLES).astype(int).ravel(), minlength=SAMPLES + 1
        ).tolist(),
        "samples": SAMPLES,
        "length_mean": float(length.mean()),
        "length_cv": float(length.std() / length.mean()),
        "prompts": parts.task.num_prompts,
        "warm_seconds": round(float(np.mean(took)), 1),
    }


def history(
    lanes: loops.Lanes,
    warm: Any,
    every: int,
    said: str,
    *,
    whole: float,
    steps: int,
    cost: tuple[float, float] = (1.0, 0.0),
    watched: Mapping[str, str] = {},
):
    """Evaluations of all lanes until each has spent the whole cost, `[K][L]` each.

    Args:
        lanes: of one program.
        warm: their warm starts.
        every: steps between two evaluations.
        said: what progress is printed of.
        whole: what every lane spends at least.
        steps: at most.
        cost: of a token drawn and of one trained.
        watched: name -> metric, whose means between evaluations are kept, `[K - 1][L]`.
    """
    state = lanes.begin(warm)
    found: dict[str, list[Any]] = {"steps": [0]}
    found |= {name: [] for name in (*RATES, *watched)}
    _append_rates(found, lanes, state)
    totals = {name: np.zeros(lanes.seeds.size) for name in programs.COUNTED}
    found |= {name: [own.astype(int).tolist()] for name, own in totals.items()}
    spent = 0.0
    while spent < whole and found["steps"][-1] < steps:
        state, rows, _ = lanes.advance(state, every)
        for name, metric in programs.COUNTED.items():
            totals[name] += np.sum([row[metric] for row in rows], 0, np.float64)
            found[name].append(totals[name].astype(int).tolist())
        for name, metric in watched.items():
            mean = np.mean([row[metric] for row in rows], 0, np.float64)
            found[name].append(mean.round(5).tolist())
        found["steps"].append(found["steps"][-1] + every)
        _append_rates(found, lanes, state)
        spent = (cost[0] * totals["drawn"] + cost[1] * totals["trained"]).min()
        rate = np.mean(found["rate"][-1])
        print(f"  {said}: {spent / whole:.0%}, held-out {rate:.3f}", flush=True)
    return found


def _append_rates(found: dict[str, list[Any]], lanes: loops.Lanes, state: Any):
    for name, each in zip(RATES, lanes.pass_rates(state), strict=True):
        found[name].append(np.round(each, 5).tolist())


def _run(piece: Piece, settings: list[Setting], stage: str) -> dict[str, Any]:
    recipe = RECIPES[piece.recipe]
    lanes = _lanes(piece.regime, piece.recipe, settings, stage)
    seeds = TUNING if stage == "tune" else CLAIMING
    warm = warmed(piece.regime, seeds)
    about = REGIMES[piece.regime]
    limits = {"whole": about.whole(stage), "steps": regimes.STEPS[stage]}
    every = min(recipe.every, about.every)
    found = history(lanes, warm, every, piece.name, cost=about.cost, **limits)
    return {"settings": settings, "seeds": seeds, "whole": about.whole(stage)} | found


def _tune(piece: Piece) -> dict[str, Any]:
    settings = REGIMES[piece.regime].chunks(piece.recipe)[piece.number]
    return _run(piece, settings, "tune")


def _claim(piece: Piece) -> dict[str, Any]:
    found = choose(piece.regime)
    setting = Setting(*found[piece.recipe]["setting"])
    return _run(piece, [setting], piece.kind)


# ----- the rule


def choose(regime: str) -> dict[str, Any]:
    """Best setting of each recipe that is tuned whole, by the rule; written too.

    The rule, written before anything was measured: the setting of 15 with the highest
    held-out pass rate, mean over 4 seeds, where each run has spent the cost of tuning;
    the first of equals. The baseline is the better of RLOO and GRPO by the same
    number.
    """
    found: dict[str, Any] = {}
    for name in REGIMES[regime].recipes:
        tried = [p for p in pieces(regime) if (p.kind, p.recipe) == ("tune", name)]
        if not all(piece.path.exists() for piece in tried):
            continue
        rates, settings = [], []
        for piece in tried:
            own = json.loads(piece.path.read_text())
            rates += trial_rates(own, regime).tolist()
            settings += own["settings"]
        best = int(np.argmax(rates))
        found[name] = {
            "setting": settings[best],
            "rate": round(rates[best], 4),
            "trials": [
                [*setting, round(rate, 4)]
                for setting, rate in zip(settings, rates, strict=True)
            ],
        }
    path = regimes.RESULTS / regime / "tuned.json"
    write(path, (json.dumps(found) + "\n").encode())
    return found


def trial_rates(own: dict[str, Any], regime: str) -> np.ndarray:
    """`[settings]` mean rates over seeds where each run has spent the same."""
    drawn, trained = REGIMES[regime].cost
    spent = drawn * np.array(own["drawn"]) + trained * np.array(own["trained"])
    place = min(spent[-1].min(), REGIMES[regime].whole("tune"))
    rates = statistics.at(spent, np.array(own["rate"]), place)
    return rates.reshape(len(own["settings"]), -1).mean(-1)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m experiments.map.run")
    parser.add_argument("--next", type=int, nargs="?", const=1, metavar="N", default=0)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--regime", choices=list(REGIMES))
    args = parser.parse_args(argv)
    missing = left(args.regime)
    count = len(missing) if args.all else args.next
    libraries.set_up()
    for piece in missing[:count]:
        begun = time.monotonic()
        measure(piece)
        print(f"{piece.name}: {time.monotonic() - begun:.0f} s", flush=True)
    missing, each = left(args.regime), seconds()
    for regime in REGIMES:
        own = [piece for piece in missing if piece.regime == regime]
        took = sum(each[piece.kind] for piece in own)
        if own:
            print(f"{regime}: {len(own)} pieces left, about {took / 60:.0f} minutes")
    whole = sum(each[piece.kind] for piece in missing)
    print(f"{len(missing)} pieces left, about {whole / 60:.0f} minutes in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
