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
        f"By pass rate in the first {half} completions; of the last {half} of them",
        f"{'pass rate':14}{'prompts':>8}{'V':>10}{'G^2 p(1-p)':>12}{'G^2':>10}"
        f"{'--explained':>13}",
        *(
            f"{row['low']:.2f} to {row['high']:.2f}{row['prompts']:10}"
            f"{row['variance']:10.3g}{row['norms']:12.3g}{row['square']:10.3g}"
            f"{row['explained']:13.2g}"
            for row in found["by_pass_rate"]
        ),
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
        f"  --varied {found['varied']:.3g}   variance of right ones over that of wrong",
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
    if "law" in found:
        lines += ["", *_law_rows(found["law"])]
    return "\n".join(lines)


def _law_rows(law: Mapping[str, Any]) -> list[str]:
    """Lines of a table of `law_residual.residual`: cosine and scale by stage."""
    lines = [
        f"Expected update of {law['repeats']} draws of the next step, against sum "
        "w(p) grad p and against the row above",
        f"{'':14}{'cosine':>8}{'scale':>11}{'':4}{'cosine':>8}{'scale':>11}"
        f"{'one draw, cosine':>20}",
    ]
    for row in law["rows"]:
        cells = [
            "-" if row[key] is None else f"{row[key]:.3g}"
            for key in ("cosine", "scale", "cosine_before", "scale_before")
        ]
        one = "-" if row["single_cosine"] is None else f"{row['single_cosine']:.3g}"
        a, b, c, d = cells
        lines.append(f"{row['stage']:14}{a:>8}{b:>11}{'':4}{c:>8}{d:>11}{one:>20}")
    return lines
