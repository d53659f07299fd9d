r"""Conversion of mathematical signs of Unicode to LaTeX.

`３½` becomes `3\frac{1}{2}`, `x²` becomes `x^{2}`, `√2` becomes `\sqrt{2}`; invisible
signs are dropped. Time is linear in the length.
"""
# ruff: noqa: RUF001

import re
import unicodedata

# Soft hyphens, joiners and marks of direction, but for those that reverse digits.
_INVISIBLE = re.compile(
    "[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202c\u2060-\u2069\ufe00-\ufe0f\ufeff]"
)
_SPACED_THOUSANDS = re.compile(
    r"(?<=[0-9])[\u00a0\u2007\u2009\u202f](?=[0-9]{3}(?![0-9]))"
)
_FRACTIONS = {
    sign: r"\frac{{{}}}{{{}}}".format(
        *unicodedata.normalize("NFKC", sign).split("\u2044")
    )
    for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙᵢₖ", "0123456789+-=()nik")
_RAISED_FRACTION = re.compile("([⁰¹²³⁴-⁹]{1,20})[/⁄∕]([₀-₉]{1,20})")
_SETS = {
    sign: rf"\mathbb{{{unicodedata.normalize('NFKC', sign)}}}" for sign in "ℂℕℙℚℝℤ"
}
_ROOTS = {"√": "", "∛": "[3]", "∜": "[4]"}
_ROOT = re.compile(r"([√∛∜])\s*(?:([0-9]+(?:\.[0-9]+)?|[A-Za-z])|(\([^()]*\))|(?=\{))")
_SIGNS = {
    **dict.fromkeys("\u2010\u2011\u2212\u02d7", "-"),
    **dict.fromkeys("\u2044\u2215\u00f7", "/"),
    **dict.fromkeys("\u00b7\u22c5\u2219\u2022", r"\cdot "),
    **dict.fromkeys("\u2217\u204e", "*"),
    **dict.fromkeys("€£¥₹", ""),
    **{
        "。": ".",
        "、": ",",
        "×": r"\times ",
        "±": r"\pm ",
        "∓": r"\mp ",
        "°": r"^{\circ}",
    },
    **{"∞": r"\infty ", "∅": r"\emptyset ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne "},
    **{"⩽": r"\le ", "⩾": r"\ge ", "≈": r"\approx ", "≡": r"\equiv ", "∈": r"\in "},
    **{"→": r"\to ", "⇒": r"\implies ", "↦": r"\mapsto "},
    **{"∪": r"\cup ", "∩": r"\cap ", "∧": r"\land ", "∨": r"\lor "},
}
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho "
    "sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
for _name in _GREEK.split(" "):
    _case = "SMALL" if _name.islower() else "CAPITAL"
    _letter = _name.upper().replace("LAMBDA", "LAMDA")
    _SIGNS[unicodedata.lookup(f"GREEK {_case} LETTER {_letter}")] = rf"\{_name} "
_FIRST, _LAST = str.maketrans(_FRACTIONS | _SETS), str.maketrans(_SIGNS)


def as_latex(text: str) -> str:
    """A text with its mathematical signs as LaTeX; ASCII text is unchanged."""
    if text.isascii():
        return text
    text = _SPACED_THOUSANDS.sub(",", _INVISIBLE.sub("", text)).translate(_FIRST)
    text = _RAISED_FRACTION.sub(
        lambda m: rf"\frac{{{m[1].translate(_RAISED)}}}{{{m[2].translate(_LOWERED)}}}",
        text,
    )
    text = re.sub("[⁰¹²³⁴-⁹⁺-⁾ⁿⁱ]+", lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    text = re.sub("[₀-₎ₙᵢₖ]+", lambda m: f"_{{{m[0].translate(_LOWERED)}}}", text)
    text = unicodedata.normalize("NFKC", text)
    # A dash between digits is a range.
    text = re.sub("(?<![0-9])[\u2012-\u2015]", "-", text)
    text = _ROOT.sub(
        lambda m: (
            rf"\sqrt{_ROOTS[m[1]]}" + (f"{{{m[2] or m[3]}}}" if m[2] or m[3] else "")
        ),
        text,
    )
    return text.translate(_LAST)
