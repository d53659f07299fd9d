"""Measured gradients as text for a terminal."""

from collections.abc import Mapping
from typing import Any

WORDS = {
    "labels": "p (1 - p)",
    "norms": "G^2 p (1 - p)",
    "square": "G^2",
    "length": "length",
    "variance": "V of other draws",
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
        f"Correlation of V, from the last {half} completions of a prompt, with what "
        f"the first {half} say",
        f"{'':18}{'Pearson':>8}{'Spearman':>10}",
    ]
    for key, row in found["correlations"].items():
        both = f"{row['pearson']:8.2f}{row['spearman']:10.2f}"
        lines.append(f"{WORDS[key]:18}{both}")
    lines += [
        "",
        "What --advise believes, measured (--measured):",
        f"  --explained {found['explained']:.3g}   share of a score along the outcome",
        f"  --shared {found['shared']:.3g}   cosine of the gradients of two prompts",
        "",
        f"Variance within prompts that an allocator leaves, over that of "
        f"{found['group']} completions each",
        f"{'':22}{'of the pass rate':^27}{'of its log':^18}",
        f"{'':22}{'labels':>8}{'norms':>8}{'measured':>10}{'norms':>9}{'measured':>10}"
        f"{'tokens':>8}{'most':>6}",
    ]
    for key, row in found["allocations"].items():
        lines.append(
            f"{key:22}{row['labels']:8.2f}{row['norms']:8.2f}{row['measured']:10.2f}"
            f"{row['log_norms']:9.2f}{row['log_measured']:10.2f}{row['tokens']:8.2f}"
            f"{row['most']:6.0f}"
        )
    low, high = "least", "reached"
    lines += [
        "",
        f"Labels and norms: as predicted if V were p (1 - p), or G^2 p (1 - p). "
        f"Allocators know {half} draws",
        "of a prompt, the oracle their scores too; every prompt counts the same.",
        "",
        "Variance that perfect knowledge leaves   no less than   reached",
    ]
    for key, words in {
        "counts": "counts, within prompts",
        "prompts": "choice of prompts, of a step",
        "both": "both, of a step",
    }.items():
        row = found["floors"][key]
        lines.append(f"{words:40}{row[low]:13.2f}{row[high]:10.2f}")
    return "\n".join(lines)
