"""Measured gradients as text for a terminal."""

from collections.abc import Mapping
from typing import Any

from curax.settings import tables

WORDS = {
    "labels": "p (1 - p)",
    "norms": "G^2 p (1 - p)",
    "square": "G^2",
    "length": "length",
    "variance": "V of other draws",
    "counts": "counts, within prompts",
    "prompts": "choice of prompts, of a step",
    "both": "both, of a step",
}
RATES = {
    "pass rate": "{low:.2f} to {high:.2f}",
    "prompts": "{prompts}",
    "V": "{variance:.3g}",
    "G^2 p(1-p)": "{norms:.3g}",
    "G^2": "{square:.3g}",
    "--explained": "{explained:.2g}",
}
CORRELATIONS = {"": "{name}", "Pearson": "{pearson:.2f}", "Spearman": "{spearman:.2f}"}
ALLOCATIONS = {
    "": "{name}",
    "labels": "{labels:.2f}",
    "norms": "{norms:.2f}",
    "measured": "{measured:.2f}",
    "log, norms": "{log_norms:.2f}",
    "log, measured": "{log_measured:.2f}",
    "tokens": "{tokens:.2f}",
    "most": "{most:.0f}",
}
FLOORS = {
    "Variance that perfect knowledge leaves": "{name}",
    "no less than": "{least:.2f}",
    "reached": "{reached:.2f}",
}
LAW = {
    "": "{stage}",
    "cosine": "{cosine:.3g}",
    "scale": "{scale:.3g}",
    "cosine, above": "{cosine_before:.3g}",
    "scale, above": "{scale_before:.3g}",
    "one draw, cosine": "{single_cosine:.3g}",
}


def table(name: str, found: Mapping[str, Any]) -> str:
    """Lines of correlations, beliefs, variances that allocators leave, and floors.

    Args:
        name: of the run or recipe.
        found: of `gradients.summarise`.
    """
    half = found["completions"] // 2
    lines = [
        f"{name}, step {found['step']}: gradients of {found['probed']} prompts x "
        f"{found['completions']} completions by {found['parameters']:,} parameters",
        "",
        f"By pass rate in the first {half} completions; of the last {half} of them",
        *tables.table(RATES, found["by_pass_rate"]),
        "",
        f"Correlation of V, from the last {half} completions of a prompt, with what "
        f"the first {half} say",
        *tables.table(CORRELATIONS, _named(found["correlations"])),
        "",
        "What --advise believes, measured (--measured):",
        f"  --explained {found['explained']:.3g}   share of a score along the outcome",
        f"  --shared {found['shared']:.3g}   cosine of the gradients of two prompts",
        f"  --varied {found['varied']:.3g}   variance of right ones over that of wrong",
        "",
        f"Variance within prompts that an allocator leaves, over that of "
        f"{found['group']} completions each",
        *tables.table(ALLOCATIONS, _named(found["allocations"])),
        "",
        f"Labels and norms: as predicted if V were p (1 - p), or G^2 p (1 - p). "
        f"Allocators know {half} draws",
        "of a prompt, the oracle their scores too; every prompt counts the same.",
        "",
        *tables.table(FLOORS, _named(found["floors"])),
    ]
    if "law" in found:
        lines += [
            "",
            f"Expected update of {found['law']['repeats']} draws of the next step, "
            "against sum w(p) grad p and against the row above",
            *tables.table(LAW, found["law"]["rows"]),
        ]
    return "\n".join(lines)


def _named(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the words for their keys."""
    return [{"name": WORDS.get(key, key), **row} for key, row in rows.items()]
