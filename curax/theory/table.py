"""A summary as text for a terminal: one row per pass rate, then notes and warnings."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from curax.settings import tables
from curax.theory.population import SHOWN

NEAR = 1.3  # an objective that a weight follows within this factor has a name
COLUMNS = {
    "p": "{p:.2f}",
    "w(p)": "{weight:.3f}",
    "f(p)": "{objective:.3f}",
    "asked": "{claimed_weight:.3f}",
    "w/asked": "{over_claimed:.2f}x",
    "signal": "{signal:.1%}",
    "energy": "{advantage_energy:.3f}",
    "draws": "{draws:.1f}",
    "tokens": "{most}{tokens:.0f}",
    "bias": "{pass_rate_bias:+z.3f}",
    "noise": "{noise_against_grpo:.2f}x",
    "": "w +- {half:.2g}",
}


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
    """Lines of the table by pass rates of SHOWN, and of means over the population."""
    by = {key: np.array(v, float) for key, v in found["by_pass_rate"].items()}
    mean = {key: float(np.array(v, float)) for key, v in found["mean"].items()}
    most = "< " if found["tokens_are"] == "at most" else ""
    middle = int(np.flatnonzero(by["p"] == 0.5)[0])
    by["claimed_weight"] *= by["weight"][middle] / by["claimed_weight"][middle]
    by["objective"] -= by["objective"][np.flatnonzero(by["p"] == SHOWN[0])[0]]
    rows = []
    for i in np.flatnonzero(np.isin(by["p"], SHOWN)):
        half = by["half_interval"][i]
        unsure = {"half": half} if half >= 0.0005 else {}
        rows.append({key: x[i] for key, x in by.items()} | {"most": most} | unsure)
    means = {name: mean[name] for name in ("signal", "draws", "tokens")}
    means |= {"p": "mean", "most": most, "pass_rate_bias": mean["pass_rate_bias"]}
    return tables.table(COLUMNS, [*rows, means])


def _hint_rows(found: Mapping[str, Any]) -> list[str]:
    """Lines by pass rate: groups drawn, coefficients and signal at each level."""
    hints = found["hints"]
    by = {key: np.array(x, float) for key, x in found["by_pass_rate"].items()}
    by["plain"] = np.array(hints["signal_without"], float)
    of = {key: np.array(x, float) for key, x in hints["by_level"].items()}
    if hints["controller"]:
        by["w"] = of["end_weight"].sum(0)
    rows = [
        {key: x[i] for key, x in by.items()}
        | {"of": {key: x[:, i] for key, x in of.items()}}
        for i in np.flatnonzero(np.isin(by["p"], SHOWN))
    ]
    every = range(hints["levels"] + 1)
    above = every[1:]

    def each(head: str, form: str, levels: range) -> dict[str, str]:
        return {f"{head}{i}": form.replace("#", str(i)) for i in levels}

    columns = {"p": "{p:.2f}", **each("p", "{of[pass_rate][#]:.2f}", above)}
    columns |= each("at ", "{of[drawn][#]:.1%}", above)
    columns |= each("w", "{of[weight][#]:.2f}", every)
    columns |= {"draws": "{draws:.1f}", "signal": "{signal:.1%}"}
    columns |= {"plain": "{plain:.1%}"}
    what = "visits" if hints["controller"] else "prompts"
    lines = [
        f"With hints, each level of which is believed to add {hints['lift']:g} to the "
        "log-odds of p (--lift).",
        *tables.table(columns, rows, gap=1),
        f"At: {what} drawn at a level. Plain: the signal without hints.",
    ]
    if hints["controller"]:
        ends = {
            "p": "{p:.2f}",
            **each("at ", "{of[end][#]:.1%}", every),
            "w": "{w:.3f}",
        }
        lines += [
            "",
            "In the end, if all may be hinted; w: the mean over levels of visits.",
            *tables.table(ends, rows),
        ]
    return lines
