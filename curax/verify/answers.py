r"""The answer a completion claims, and whether it equals another, exactly.

Nothing here computes more than two fractions, so no text makes it slow: time is linear
in the length, long numbers are not read, no power beyond 10^100 is taken. What needs
algebra is told apart (`same` returns None) and left to math-verify, which these rules
follow: a percentage equals its hundredth, so 50% = 1/2 = 0.5, and of two integers the
percent sign may be missing, so 50% = 50; units and currencies are dropped; `x = 5`
equals 5. They differ where math-verify misreads what is written: `5.`, `90°`, `1 1/2`,
`1\,234`, `\frac12\%`, `-2.5\%`, `\frac{1,000}{3}`, `+1,000`, `x = 1,000`,
`1,000^\circ`, fractions as `0.00356 \times 10^3` and several words in `\text{}` are
right here; `5\text{ percent}`, `5\text{ million}` and `5\text{ or 6}`, which it takes
for 5, are not told.
"""

import re
from collections import deque
from fractions import Fraction
from typing import NamedTuple

TAIL = 2**17  # characters, the last ones, in which a completion may state its answer
DIGITS = 200  # characters of a number at most
EXPONENT = 100  # of ten, at most

_BOX = re.compile(
    r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?:(?P<open>\{)|(?P<bare>[-+]?[0-9.][^\s$\\{}]{0,99}))"
    r"|\\(?!\\?(?:boxed|fbox)).|[{}]",
    re.DOTALL,
)
_STATED = re.compile(r"####|\banswer[ \t*]{0,8}(?::|is\b)", re.IGNORECASE)
_DISPLAY = re.compile(r"\$\$[^$]+\$\$|\\\[.+?\\\]", re.DOTALL)
_LAST_NUMBER = re.compile(
    r"(?<![\w.])-?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?"
    r"|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:\\?%)?"
)
_FENCES = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def final_answer(text: str, *, last_number: bool = False) -> str | None:
    r"""What a completion claims, or None if it claims nothing.

    The last balanced `\boxed{...}` or `\fbox{...}` (or `\boxed 7`) that is not empty;
    else what follows the last `#### ` (GSM8K), `Answer:` or `The answer is`, to the end
    of its line; else, if asked for, the last number.

    Args:
        text: the completion; only its last 131,072 characters are looked at.
        last_number: whether a number anywhere is a claim when nothing else is.

    Returns:
        The claim without dollar signs, stars and full stop around it; never empty.
    """
    text = text[-TAIL:]
    claim = _boxed(text)
    if claim is None and (stated := last_match(_STATED, text)) is not None:
        rest = text[stated.end() :].lstrip(" \t\r\n*:")
        display = _DISPLAY.match(rest)
        claim = _bare(display[0] if display else rest.partition("\n")[0])
    if not claim and last_number:
        found = last_match(_LAST_NUMBER, text)
        claim = found and found[0]
    return claim or None


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last of the matches that do not overlap, or None."""
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def _boxed(text: str) -> str | None:
    """The content of the balanced box that starts last, of those not empty."""
    if r"\boxed" not in text and r"\fbox" not in text:
        return None
    opened: list[int | None] = []  # where each open brace's box begins, if it is one
    last, claim = -1, None
    for token in _BOX.finditer(text):
        word = token[0]
        if word == "{":
            opened.append(None)
        elif token["open"]:
            opened.append(token.end())
        elif token["bare"] or (word == "}" and opened):
            start = token.start("bare") if token["bare"] else opened.pop()
            end = token.end() if token["bare"] else token.start()
            # A box within this one has its brace closed first, and begins later.
            if start is not None and start > last:
                content = _bare(text[start:end])
                last, claim = (start, content) if content else (last, claim)
    return claim


def _bare(text: str) -> str:
    """Text without what is written around an answer."""
    for _ in range(3):
        text = text.strip().strip("*").rstrip(".").strip()
        for left, right in _FENCES:
            inside = text[len(left) : -len(right)]
            if text == left + inside + right and left not in inside:
                text = inside
    return text


class Number(NamedTuple):
    """A number, and how it was written."""

    value: Fraction  # with the percent sign counted
    percent: bool
    integer: bool  # digits alone, a percent sign aside
    name: str  # of the variable it was assigned to; empty without one


_PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?:(?P<name>\\?[A-Za-z]+(?:_(?:[0-9A-Za-z]|\{{[0-9A-Za-z]+\}}))?)=)?
    (?P<sign>[-+]?)
    (?: (?:(?P<whole>[0-9]+)\ ?)?
        \\frac\{{(?P<top>[-+]?{_PLAIN})\}}\{{(?P<bottom>[-+]?{_PLAIN})\}}
      | (?:(?P<whole_>[0-9]+)\ )?(?P<top_>{_PLAIN})/(?P<bottom_>{_PLAIN})
      | (?:(?P<factor>{_PLAIN})(?:\\times|\\cdot|\u00d7|\*)\ ?)?
        10\^(?:(?P<digit>[0-9])|\{{(?P<exponent>[-+]?[0-9]{{1,3}})\}})
      | (?P<plain>{_PLAIN}) )
    (?P<percent>\ ?%)?
    (?:\^\{{?\\circ\}}?|\\degree|\ ?°)?
    (?:\ ?\\(?:text|mathrm|mbox)\{{(?P<unit>[A-Za-z ./]*)\}}
        (?:\^(?:[0-9]|\{{[0-9]\}}))?)?
    """,
    re.VERBOSE,
)
# Words behind a number that say more than its unit.
_NO_UNIT = re.compile(
    r"\b(?:and|or|not|per ?cent(?:age)?|pct|dozens?|k"
    r"|(?:hundred|thousand|million|billion|trillion)(?:s|ths?)?)\b",
    re.IGNORECASE,
)
_OTHER_SPELLINGS = (
    (re.compile(r"\\[()\[\]]|\\?\$"), ""),
    (re.compile(r"\\(?:left|right|displaystyle|textstyle)(?![A-Za-z])\s*"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"(?<=[0-9])\\[,;:]\s*(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\\!\s*"), ""),
    (re.compile(r"(?:\\[,;: ]|\\q?quad(?![A-Za-z])|[~\s])+"), " "),
    (re.compile(r"\{ ?, ?\}"), ","),
    (re.compile(r"\\%"), "%"),
    (re.compile("\u2212"), "-"),
    (re.compile(r"\\frac ?([0-9]) ?([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac ?([0-9]) ?\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac ?\{[^{}]*\}) ?([0-9])"), r"\1{\2}"),
)
# Not beside commas: "1, 234" are two numbers.
_LOOSE_IN_NUMBER = re.compile(r" +(?=[-+/{}\\=^%*])|(?<=[-+/{}=^*]) +")
_WRAPPED = re.compile(
    r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}"
)
_LOOSE = re.compile(r" (?![\w. ])|(?<![\w. ]) ")


def number(text: str) -> Fraction | None:
    r"""The number that a text is, or None if it is none that can be read exactly.

    Integers with signs and thousands commas, decimals, percentages (their hundredth),
    fractions `\frac{a}{b}`, `\frac12` and `a/b`, mixed numbers `1\frac{1}{2}`, `1.2
    \times 10^{3}`; in dollars, degrees or `\text{units}`; also as `x = 5`.
    """
    read = _read(_respelled(text)) if len(text) <= 2 * DIGITS else None
    return read and read.value


def normalized(text: str) -> str:
    r"""A text without what LaTeX may spell in several ways.

    `\dfrac` and `\frac12` become `\frac{1}{2}`; `\left`, `\right`, dollar signs,
    spacing, `\text{}` around words, and a full stop at the end are removed.
    """
    return _unwrapped(_respelled(text))


def same(gold: str, answer: str) -> bool | None:
    """Whether two answers are the same, where that can be told exactly.

    Two numbers are compared as fractions. Unequal ones that are closer than 1e-5 are
    not told apart, since decimals may be rounded.

    Args:
        gold: the right answer.
        answer: what is claimed; the order does not matter.

    Returns:
        True for equal numbers, or where nothing but the spelling differs; False for
        unequal numbers; None where it takes algebra to tell.
    """
    gold, answer = _respelled(gold), _respelled(answer)
    a, b = _read(gold), _read(answer)
    if a is not None and b is not None:
        return _same_number(a, b)
    spelling = _unwrapped(gold)
    return True if spelling and spelling == _unwrapped(answer) else None


def _respelled(text: str) -> str:
    for pattern, spelling in _OTHER_SPELLINGS:
        text = pattern.sub(spelling, text)
    return text.strip().rstrip(". ")


def _unwrapped(text: str) -> str:
    text = " ".join(_WRAPPED.sub(r"\1", text).split())
    return _LOOSE.sub("", text).rstrip(". ")


def _read(text: str) -> Number | None:
    """The number that a text is, once it is respelled."""
    text = _LOOSE_IN_NUMBER.sub("", text) if len(text) <= 2 * DIGITS else text
    match = _NUMBER.fullmatch(text) if len(text) <= DIGITS else None
    if match is None or _NO_UNIT.search(match["unit"] or ""):
        return None
    exponent = int(match["digit"] or match["exponent"] or 0)
    whole = match["whole"] or match["whole_"]
    top, bottom = match["top"] or match["top_"], match["bottom"] or match["bottom_"]
    if abs(exponent) > EXPONENT:
        return None
    if bottom is None:
        digits = match["plain"] or match["factor"] or "1"
        value = _plain(digits) * Fraction(10) ** exponent
    elif _plain(bottom) == 0:
        return None
    else:
        value = _plain(top) / _plain(bottom)
    if whole is not None:
        if not (f"{top}{bottom}".isdigit() and value < 1):
            return None
        value += int(whole)
    percent = match["percent"] is not None
    return Number(
        value=value * (-1 if match["sign"] == "-" else 1) / (100 if percent else 1),
        percent=percent,
        integer=match["plain"] is not None and "." not in match["plain"],
        name=match["name"] or "",
    )


def _plain(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip("."))


def _same_number(a: Number, b: Number) -> bool | None:
    if a.name and b.name and a.name != b.name:
        return None
    if a.value == b.value:
        return True
    if a.percent != b.percent:
        as_written = [n.value * (100 if n.percent else 1) for n in (a, b)]
        if as_written[0] == as_written[1]:
            return True if a.integer and b.integer and a.value > 0 else None
    if a.value.denominator == b.value.denominator == 1:
        return False
    gap, size = abs(a.value - b.value), max(abs(a.value), abs(b.value))
    return None if gap < Fraction(1, 10**5) or gap < size / 10**12 else False
