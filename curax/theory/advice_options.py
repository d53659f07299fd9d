"""python -m curax.xray --advise: its options, checks and output."""

import json
import math
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from curax.config import Config, ConfigError
from curax.settings.cli import check_absent, count, keep, made_folder
from curax.settings.files import json_bytes
from curax.theory import population
from curax.theory.population import Population

# Numeric options: type, least and largest value, an example, and what they are.
NUMBERS: dict[str, tuple[Any, float, float, str, str]] = {
    "prompts": (int, 1, 1e9, "1024", "training prompts (default: of the task of "
                "RECIPE)"),
    "visits": (int, 0, 1e6, "0", "visits of a run to each; 0: no prompt comes back "
               "(default: by the steps of RECIPE, else 200)"),
    "budget": (int, 1, 1e6, "128", "completions whose draw and training a step may "
               "cost as much as (default: 128)"),
    "tokens": (float, 1, 1e9, "512", "tokens per completion (default: as measured, "
               "else alike)"),
    "shared": (float, 0, 1, "0.02", "believed cosine of the gradients of two prompts "
               "(default: 0.02)"),
    "explained": (float, 1e-9, 1, "0.3", "believed share of a score that lies along "
                  "the outcome (default: 0.3)"),
    "varied": (float, 0, 1e3, "1", "believed variance of the scores of right "
               "completions over that of wrong ones; 0: one alone is right (default: "
               "1)"),
}  # fmt: skip
FIELDS = (*NUMBERS, "cost", "references")  # options that are fields of `advice.Known`


def add_options(parser: ArgumentParser) -> None:
    """Add `--advise` and the options that only it reads; none has a default."""
    group = parser.add_argument_group(
        "which recipe",
        "--advise says which recipes of configs/ are predicted to end above or below "
        "RLOO, or RECIPE if one is named, and which are not told apart; with sizes",
    )
    group.add_argument("--advise", action="store_true", help="draw nothing")
    for name, (kind, *_, text) in NUMBERS.items():
        group.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    group.add_argument(
        "--measured",
        metavar="FILE",
        help="gradients.json of --gradients: these three as measured there",
    )
    group.add_argument(
        "--cost",
        nargs=2,
        type=float,
        metavar=("A", "B"),
        help="cost of a token drawn and of a token trained (default: 1 1)",
    )
    group.add_argument(
        "--references",
        action="store_true",
        default=None,
        help="the prompts have reference solutions",
    )


def check(args: Namespace) -> None:
    """Check the options of `--advise`, and that no other command gets them.

    Raises:
        ConfigError: in a sentence with the option, its value and a fix.
    """
    given = {name: getattr(args, name) for name in (*FIELDS, "measured")}
    given = {name: value for name, value in given.items() if value is not None}
    if not args.advise:
        check_absent(args, given, "--advise; add that, or leave it out")
        return
    if args.lift is not None:
        raise ConfigError("--lift is not for --advise; leave it out.")
    for name, (_, low, high, example, _) in NUMBERS.items():
        if name in given and not low <= given[name] <= high:
            raise ConfigError(
                f"--{name} {given[name]:g} must be from {low:g} to {high:g}; write "
                f"{example}."
            )
    cost = given.get("cost", (1.0, 1.0))
    if not (min(cost) >= 0 and 0 < sum(cost) < math.inf):
        raise ConfigError(
            f"--cost {cost[0]:g} {cost[1]:g}: neither may be below 0, nor both be 0; "
            "write 1 1."
        )


def beliefs(path: Path, *, rates: bool = True) -> dict[str, Any]:
    """Measured kappa, rho and nu of a gradients.json, clipped to their ranges.

    Args:
        path: the file.
        rates: kappa, G^2 and rho by pass rate too, where it has them.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
        if found["shared"] is None and found["explained"] <= 0:
            raise ConfigError(
                f"--measured {path}: no gradient stands out of the noise there, its "
                f"explained is {found['explained']:.2g}; measure more prompts, or more "
                "completions of each, with --probe."
            )
        shared, explained = float(found["shared"]), float(found["explained"])
        varied = float(found.get("varied", 1.0))  # older files have none
        if not math.isfinite(shared + explained + varied):
            raise ValueError
        more = {}
        if rates and "cosines" in found:
            more = by_rate(found["by_pass_rate"], found["cosines"])
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        why = getattr(error, "strerror", None) or "numbers are missing"
        raise ConfigError(
            f"--measured {path} cannot be read ({why}); name a gradients.json that "
            "--gradients wrote."
        ) from error
    # Estimates are unbiased, so noise may take them out of their range.
    options = {
        "shared": min(max(shared, 0.0), 1.0),
        "explained": min(max(explained, 1e-9), 1.0),
        "varied": max(varied, 0.0),
    }
    return options | more


def by_rate(rows: list[dict[str, float]], cosines: list[list[float]]) -> dict[str, Any]:
    """kappa, G^2 and rho by pass rate.

    Args:
        rows: "by_pass_rate" of a gradients.json.
        cosines: its "cosines" between them.

    Returns:
        Fields of `advice.Known`; empty with fewer than two usable rows.

    Raises:
        ValueError: a number is not finite.
    """
    from curax.theory import progress

    place = [i for i, x in enumerate(rows) if 0 < x["pass_rate"] < 1 and x["norms"] > 0]
    place.sort(key=lambda i: rows[i]["pass_rate"])
    p, explained, square, prompts = (
        np.array([rows[i][name] for i in place])
        for name in ("pass_rate", "explained", "square", "prompts")
    )
    between = np.array(cosines)[np.ix_(place, place)]
    if not all(np.isfinite(x).all() for x in (explained, square, prompts, between)):
        raise ValueError
    explained = np.clip(explained, 0.0, 1.0)
    if len(place) < 2 or not explained.any():
        return {}
    axes = progress.axes_of(between, prompts)
    return {"by_rate": progress.ByRate(p, explained, square, axes)}


def advise(
    args: Namespace, prompts: Population, named: tuple[str, Config] | None
) -> None:
    """Print what is told apart, with progress on stderr, and write it as JSON.

    Args:
        args: options, checked.
        prompts: pass rates.
        named: name and config of the user's own recipe, if any.

    Raises:
        ConfigError: the number of prompts is not known; or the file cannot be written.
    """
    fields = {name: getattr(args, name) for name in FIELDS}
    fields = {name: value for name, value in fields.items() if value is not None}
    if args.measured:
        # What is said of kappa holds for all pass rates.
        fields = beliefs(Path(args.measured), rates="explained" not in fields) | fields
    own = dict([named]) if named else {}
    if named:
        fields |= {"steps": named[1].steps, "loaded": named[1].memory.load is not None}
    if "prompts" not in fields:
        size = population.task_size(named[1]) if named else None
        if size is None:
            raise ConfigError(
                "--advise must know how many prompts there are to train on, since that "
                "decides whether they come back; add --prompts 7473, say."
            )
        fields["prompts"] = size
    with made_folder(args.out):
        from curax.theory import advice
        from curax.theory.advice_table import table

        known = advice.Known(population=prompts, **fields)
        among = advice.candidates(own, references=known.references)
        found = advice.rank(among, known, partial(count, "sizes predicted"))
        kept = keep(args.out, {"advice.json": json_bytes(found)})
        print(f"{table(found)}\n{kept}")
