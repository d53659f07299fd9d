"""A summary as text for a terminal: one row per pass rate, then notes and warnings."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from curax.theory.population import SHOWN

NEAR = 1.3  # an objective that a weight follows within this factor has a name


def verdict(found: Mapping[str, Any]) -> str:
    """The nearest known objective, and how far the weight is from it, in words."""
    factor = found["nearest_factor"]
    if factor is None:
        return "follows no objective: some weights are not positive"
    if factor > NEAR:
        return f"follows none of the known, up to {factor:.1f}x off {found['nearest']}"
    if factor < 1.005:
        return f"follows {found['nearest']}"
    return f"follows {found['nearest']} within {factor:.2f}x"


def table(name: str, found: Mapping[str, Any]) -> str:
    """Lines of w(p), objective, signal, draws, tokens, bias and noise by pass rate.

    Args:
        name: of the recipe.
        found: of `summary.summarise`.
    """
    lines = [
        f"{name}: claims {found['claim']}, {verdict(found)}",
        f"Prompts: {found['population']}. Noise: per draw, against GRPO with groups of "
        f"{found['grpo_group']}.",
        "",
        "   p     w(p)     f(p)    asked  w/asked signal energy  draws  tokens   bias"
        "  noise",
        *_rows(found),
        "",
        "f(p) is from the first row on; asked is the claimed weight, scaled to w(0.5);",
        "energy is w p (1 - p), of the advantages.",
    ]
    if found["averaged"]:
        what = "; ".join(found["averaged"])
        lines.append(f"Averaged over random draws: {what}. The rest is exact.")
    else:
        lines.append("Exact: every number of right completions is counted.")
    if "hints" in found:
        lines += ["", *_hint_rows(found)]
    lines += [f"Note: {text}" for text in found["notes"]]
    lines += [f"Warning: {name} {text}" for text in found["warnings"]]
    return "\n".join(lines)


def _rows(found: Mapping[str, Any]) -> list[str]:
    """A line per pass rate of SHOWN, and one of means over the population."""
    by = {key: np.array(v, float) for key, v in found["by_pass_rate"].items()}
    mean = {key: float(np.array(v, float)) for key, v in found["mean"].items()}
    most = "<" if found["tokens_are"] == "at most" else " "
    lines = []
    middle = int(np.flatnonzero(by["p"] == 0.5)[0])
    scale = by["weight"][middle] / by["claimed_weight"][middle]
    start = by["objective"][np.flatnonzero(by["p"] == SHOWN[0])[0]]
    for i in np.flatnonzero(np.isin(by["p"], SHOWN)):
        row = {key: column[i] for key, column in by.items()}
        half = row["half_interval"]
        lines.append(
            f"{row['p']:5.2f} {row['weight']:8.3f} {row['objective'] - start:8.3f} "
            f"{scale * row['claimed_weight']:8.3f} {row['over_claimed']:7.2f}x "
            f"{row['signal']:6.1%} {row['advantage_energy']:6.3f} {row['draws']:6.1f} "
            f"{most}{row['tokens']:6.0f} "
            f"{row['pass_rate_bias']:+z7.3f} {row['noise_against_grpo']:5.2f}x"
            + (f"  w +- {half:.2g}" if half >= 0.0005 else "")
        )
    lines.append(
        f" mean {'':36}{mean['signal']:6.1%} {'':6} {mean['draws']:6.1f} "
        f"{most}{mean['tokens']:6.0f} {mean['pass_rate_bias']:+z7.3f}"
    )
    return lines


def _hint_rows(found: Mapping[str, Any]) -> list[str]:
    """Lines by pass rate: groups drawn, coefficients and signal at each level."""
    hints = found["hints"]
    by = {key: np.array(x, float) for key, x in found["by_pass_rate"].items()}
    of = {key: np.array(x, float) for key, x in hints["by_level"].items()}
    plain = np.array(hints["signal_without"], float)
    places = np.flatnonzero(np.isin(by["p"], SHOWN))
    every = range(hints["levels"] + 1)
    above = every[1:]

    def cells(values: Iterable[Any], form: str) -> str:
        width = form.partition(".")[0]
        return "".join(
            f"{x:>{width}}" if isinstance(x, str)
            else f"{'-':>{width}}" if np.isnan(x)
            else f"{x:{form}}"
            for x in values
        )  # fmt: skip

    lines = [
        f"With hints, each level of which is believed to add {hints['lift']:g} to the "
        "log-odds of p (--lift).",
        "    p"
        + cells([f"p{i}" for i in above], "5.2f")
        + cells([f"at {i}" for i in above], "7.1%")
        + cells([f"w{i}" for i in every], "6.2f")
        + "  draws signal  plain",
    ]
    lines += [
        f"{by['p'][i]:5.2f}"
        + cells(of["pass_rate"][1:, i], "5.2f")
        + cells(of["drawn"][1:, i], "7.1%")
        + cells(of["weight"][:, i], "6.2f")
        + f"{by['draws'][i]:7.1f} {by['signal'][i]:6.1%} {plain[i]:6.1%}"
        for i in places
    ]
    what = "visits" if hints["controller"] else "prompts"
    lines.append(f"At: {what} drawn at a level. Plain: the signal without hints.")
    if hints["controller"]:
        lines += [
            "",
            "In the end, if all may be hinted; w: the mean over levels of visits.",
            "    p" + cells([f"at {i}" for i in every], "7.1%") + "      w",
        ]
        lines += [
            f"{by['p'][i]:5.2f}"
            + cells(of["end"][:, i], "7.1%")
            + f"{of['end_weight'][:, i].sum():7.3f}"
            for i in places
        ]
    return lines
