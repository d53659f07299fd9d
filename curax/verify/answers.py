r"""Extraction of a completion's final answer, and exact comparison of two answers.

Only fractions are computed, in time linear in the length of a text: long numbers and
powers beyond 10^100 are not read. Where equality needs algebra, `same` returns None and
`graders.mathematics` asks math-verify, which these rules follow: a percentage equals
its hundredth, so 50% = 1/2 = 0.5, and of two integers the percent sign may be missing,
so 50% = 50; units and currencies are dropped; `x = 5` equals 5. They differ where
math-verify misreads what is written: `5.`, `90°`, `1 1/2`,
`1\,234`, `1 234`, `\frac12\%`, `-2.5\%`, `\frac{1,000}{3}`, `+1,000`, `x = 1,000`,
`1,000^\circ`, fractions as `0.00356 \times 10^3`, `1.2e3`, `0.\overline{3}`, "three",
several words in `\text{}` and signs of Unicode (`unicode_math`) are right here;
`5\text{ million}` is 5,000,000, `5\text{ percent}` 5%, and `5\text{ or 6}`, which it
takes for 5, is no number. `tests/data/answers.jsonl` holds hundreds of pairs of answers
with the verdict of mathematicians.
"""

import re
from collections import deque
from fractions import Fraction
from typing import NamedTuple

from curax.verify import sizes
from curax.verify.unicode_math import as_latex

TAIL = 2**17  # characters at the end of a completion, where an answer is looked for
DIGITS = 200  # characters of a number at most
EXPONENT = 100  # of ten, at most
LARGEST = 2 * (DIGITS + EXPONENT)  # decimal logarithm of a number, at most

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
    r"""The final answer of a completion; None where it states none.

    It is the content of the last balanced `\boxed{...}` or `\fbox{...}` (or `\boxed 7`)
    that is not empty; else what follows the last `#### ` (GSM8K), `Answer:` or `The
    answer is`, to the end of its line; else, with `last_number`, the last number.

    Args:
        text: the completion, of which the last 131,072 characters are read.
        last_number: whether the last number is the answer where nothing else is.

    Returns:
        The answer without dollar signs, stars and full stop around it; never empty.
    """
    text = as_latex(text[-TAIL:])
    claim = _boxed(text)
    if claim is None and (stated := last_match(_STATED, text)) is not None:
        rest = text[stated.end() :].lstrip(" \t\r\n*:")
        display = _DISPLAY.match(rest)
        claim = _stripped(display[0] if display else rest.partition("\n")[0])
    if not claim and last_number:
        found = last_match(_LAST_NUMBER, text)
        claim = found and found[0]
    return claim or None


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last non-overlapping match; None: there is none."""
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def _boxed(text: str) -> str | None:
    """The content of the last balanced box that is not empty; None: there is none."""
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
                content = _stripped(text[start:end])
                last, claim = (start, content) if content else (last, claim)
    return claim


def _stripped(text: str) -> str:
    """Text without surrounding white space, stars, full stops and math delimiters."""
    for _ in range(3):
        text = text.strip().strip("*")
        text = (text if text.endswith("...") else text.rstrip(".")).strip()
        for left, right in _FENCES:
            inside = text[len(left) : -len(right)]
            if text == left + inside + right and left not in inside:
                text = inside
    return text


class Number(NamedTuple):
    """A number and its notation."""

    value: Fraction  # 1/2 for 50%
    percent: bool
    integer: bool  # digits alone, a percent sign aside
    name: str  # of the variable it was assigned to; empty without one


_PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?:(?P<name>(?!\\pi(?![A-Za-z]))\\?[A-Za-z]+(?:_(?:[0-9A-Za-z]|\{{[0-9A-Za-z]+\}}))?)=)?
    (?P<sign>[-+]?)
    (?: (?:(?P<whole>[0-9]+)\ ?)?
        \\frac\{{(?P<top>[-+]?{_PLAIN})\}}\{{(?P<bottom>[-+]?{_PLAIN})\}}
      | (?:(?P<whole_>[0-9]+)\ )?(?P<top_>{_PLAIN})/(?P<bottom_>{_PLAIN})
      | (?:(?P<factor>{_PLAIN})(?:\\times|\\cdot|\u00d7|\*)\ ?)?
        10\^(?:(?P<digit>[0-9])|\{{(?P<exponent>[-+]?[0-9]{{1,3}})\}})
      | (?P<mantissa>{_PLAIN})[eE](?P<shift>[-+]?[0-9]{{1,3}})
      | (?P<plain>{_PLAIN}) )
    (?P<percent>\ ?%)?
    (?:\^\{{?\\circ\}}?|\\degree|\ ?°)?
    (?:\ ?\\(?:text|mathrm|mbox)\{{(?P<unit>[A-Za-z ./]*)\}}
        (?:\^(?:[0-9]|\{{[0-9]\}}))?)?
    """,
    re.VERBOSE,
)
# Words after a number that are no unit.
_NO_UNIT = re.compile(
    r"\b(?:and|or|not|per ?cent(?:age)?|pct|dozens?|k"
    r"|(?:hundred|thousand|million|billion|trillion)(?:s|ths?)?)\b",
    re.IGNORECASE,
)
# Signs of more than one number.
_SEVERAL = re.compile(
    r"\b(?:or|and|either|not|oder|und|ou|et)\b|\\(?:lor|vee|land|wedge|pm|mp|cup|to"
    r"|(?:long)?rightarrow|implies|mapsto)(?![A-Za-z])",
    re.IGNORECASE,
)
_GROUPED = re.compile(
    r"[-+]?(?:[0-9]{1,3}(?: [0-9]{3})+(?:[.,][0-9]+)?|[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]+)"
)
_DECIMAL_COMMA = re.compile(r"([-+]?[0-9]+),([0-9]{1,2}|[0-9]{4,})")
_WORDS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen"),
    *("seventeen", "eighteen", "nineteen", "twenty"),
]
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(
    rf"(.+?) ?(?:({'|'.join(_SCALES)})s?|(per ?cent|pct)|dollars?|euros?|pounds?)",
    re.IGNORECASE,
)
_REPEATING = re.compile(r"([-+]?)([0-9]*)\.([0-9]*)\\(?:overline|bar) ?\{([0-9]+)\}")
_CHOICE = re.compile(r"\(?([A-J])(?:\)|[.:](?= |$)|$)(.*)", re.DOTALL)
_NAME = re.compile(
    r"\\?[A-Za-z]+(?: ?\\[A-Za-z]+| [A-Za-z]+)*(?:_\w|_\{\w+\})?'?(?:\([^()]*\))?"
)
_KNOWN = re.compile(
    r"\\(?:[dt]?frac|sqrt|pi|infty|cdot|times|left|right|circ|log|ln|sin|cos|tan|d?binom"
    r"|lfloor|rfloor|lceil|rceil)(?![A-Za-z])"
)
_RELATIONS = re.compile(
    r"\\(?:equiv|sim|simeq|cong|doteq|triangleq|coloneqq?)(?![A-Za-z])"
    r"|\\(?:stackrel|overset|underset) ?\{[^{}]*\} ?\{=\}"
)
_BRACKETED = re.compile(r" *\\?[(\[{](.*)\\?[)\]}] *", re.DOTALL)
# Units outside \text.
_MEASURED = re.compile(
    r"(.*[0-9]) ?(?:[kcm]?m|ft|in|yd|mi)(?:\^(?:[23]|\{[23]\})| ?/ ?(?:s|h|min))"
)
_OTHER_SPELLINGS = (
    (re.compile(r"\\textcolor ?\{[^{}]*\} ?\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\pmod ?\{? ?([0-9]+) ?\}?"), r"\\pmod{\1}"),
    (re.compile(r"\\color ?\{[^{}]*\}"), ""),
    (re.compile(r"\\(?:checkmark|(?:black)?square)(?![A-Za-z])"), ""),
    (
        re.compile(
            r"(\.[0-9]{0,20}?)([0-9])\2{2,20}(?:\.\.\.|\\[lc]?dots(?![A-Za-z]))"
        ),
        r"\1\\overline{\2}",
    ),
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
    r"\\(?:emph|underline|text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}"
)
_BEFORE_DIGIT = re.compile(r"(\\[A-Za-z]+) (?=[0-9])")
_LOOSE = re.compile(r" (?![\w. ])|(?<![\w. ]) ")


def number(text: str) -> Fraction | None:
    r"""The number that a text denotes, exactly; None where it denotes none.

    Read are integers with signs and thousands commas, decimals, percentages (as their
    hundredth), fractions `\frac{a}{b}`, `\frac12` and `a/b`, mixed numbers
    `1\frac{1}{2}`, `1.2 \times 10^{3}` or `1.2e3`; in dollars, degrees or
    `\text{units}`; also as `x = 5`.
    """
    read = _read(_respelled(text)) if len(text) <= 2 * DIGITS else None
    return read and read.value


def normalized(text: str) -> str:
    r"""A text in a canonical LaTeX spelling.

    `\dfrac` and `\frac12` become `\frac{1}{2}`; `\left`, `\right`, dollar signs,
    spacing, `\text{}` around words, and a full stop at the end are removed.
    """
    return _unwrapped(_respelled(text))


def same(gold: str, answer: str) -> bool | None:
    """Whether two answers are equal; None where that cannot be decided exactly.

    Two numbers are compared as fractions. For unequal ones closer than 1e-5 the result
    is None, since decimals may be rounded.

    Args:
        gold: the right answer.
        answer: the other; the order does not matter.

    Returns:
        True for equal numbers and for texts that differ in spelling alone; False for
        unequal numbers; None where the comparison needs algebra.
    """
    gold, answer = _respelled(gold), _respelled(answer)
    a, b = _read(gold), _read(answer)
    if a is not None and b is not None:
        return _same_number(a, b)
    spelling = _unwrapped(gold), _unwrapped(answer)
    if spelling[0] == spelling[1]:
        return True if spelling[0] else None
    for number, text in ((a, spelling[1]), (b, spelling[0])):
        if number is not None:
            return _is_number(number, text)
    a, b = (_read_words(text) for text in spelling)
    if a is not None and b is not None:
        return _same_number(a, b)
    one, other = map(_choice, spelling)
    if one and other and "" in (one[1], other[1]):
        return one[0] == other[0]
    return None


def _is_number(number: Number, text: str) -> bool | None:
    """Whether a text that `_read` cannot read denotes this number; None: undecided."""
    if _SEVERAL.search(text):
        return False
    other = _read_words(text)
    if other is not None:
        return _same_number(number, other)
    if _GROUPED.fullmatch(text):  # equal or undecided: "1.234,5" may be a list
        digits = re.sub("[ .]", "", text) if "," in text else text.replace(" ", "")
        if number.value == Fraction(digits.replace(",", ".")):
            return True
    return False if sizes.log10(text) > LARGEST else None


def _respelled(text: str) -> str:
    text = as_latex(text)
    for pattern, spelling in _OTHER_SPELLINGS:
        text = pattern.sub(spelling, text)
    return text.strip().rstrip(". ")


def _unwrapped(text: str) -> str:
    text = " ".join(_WRAPPED.sub(r"\1", text).split())
    return _LOOSE.sub("", _BEFORE_DIGIT.sub(r"\1", text)).rstrip(". ")


def _read(text: str) -> Number | None:
    """The number that a respelled text denotes; None: it denotes none."""
    text = _LOOSE_IN_NUMBER.sub("", text) if len(text) <= 2 * DIGITS else text
    match = _NUMBER.fullmatch(text) if len(text) <= DIGITS else None
    if match is None or _NO_UNIT.search(match["unit"] or ""):
        return None
    exponent = int(match["digit"] or match["exponent"] or match["shift"] or 0)
    whole = match["whole"] or match["whole_"]
    top, bottom = match["top"] or match["top_"], match["bottom"] or match["bottom_"]
    if abs(exponent) > EXPONENT:
        return None
    if bottom is None:
        digits = match["plain"] or match["factor"] or match["mantissa"] or "1"
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


def _read_words(text: str) -> Number | None:
    """The number denoted by words, or by digits and a word; None: there is none."""
    if len(text) > DIGITS:
        return None
    repeating = _REPEATING.fullmatch(text)
    if repeating:
        sign, whole, first, again = repeating.groups("")
        value = Fraction(f"{whole or 0}.{first or 0}")
        value += Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(first))
        return Number(-value if sign == "-" else value, False, False, "")
    if measured := _MEASURED.fullmatch(text):
        return _read(measured[1])
    scaled = _SCALED.fullmatch(text)
    digits, scale, percent = scaled.groups() if scaled else (text, None, None)
    if digits.lower() in _WORDS:
        digits = str(_WORDS.index(digits.lower()))
    number = _read(digits)
    if number is None or (number.percent and scaled):
        return None
    value = number.value * 10 ** _SCALES.get((scale or "").lower(), 0)
    return number._replace(
        value=value / 100 if percent else value, percent=bool(percent or number.percent)
    )


def matches(gold: str, claim: str) -> bool | None:
    """As `same`, but `0,5` also equals 0.5, though it may be two numbers."""
    equal = same(gold, claim)
    comma = _DECIMAL_COMMA.fullmatch(_respelled(claim)) if equal is None else None
    if comma and (value := number(gold)) is not None and value.denominator > 1:
        equal = same(gold, f"{comma[1]}.{comma[2]}") or None
    return equal


def equation_sides(text: str) -> list[str]:
    """The sides of an equation: a text split at equals signs outside brackets."""
    text = _RELATIONS.sub("=", _respelled(text))
    found = _split(text, "=")
    for _ in range(3):  # (x = 3)
        bracketed = _BRACKETED.fullmatch(text) if "=" in text else None
        if len(found) > 1 or bracketed is None:
            break
        text = bracketed[1]
        found = _split(text, "=")
    return [side.rstrip(" :") for side in found]


def list_items(text: str) -> list[str]:
    """The items of a list: a text split at commas and semicolons outside brackets."""
    return _split(_respelled(text), ",;")


def _split(text: str, signs: str) -> list[str]:
    found, depth, begin = [], 0, 0
    for n, sign in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(sign, 0)
        if depth == 0 and sign in signs and text[n - 1 : n] not in ("<", ">", "!"):
            found.append(text[begin:n])
            begin = n + 1
    return [*found, text[begin:]]


def is_name(text: str) -> bool:
    r"""Whether a text is a variable or a function application: `x_1`, `\angle A`."""
    return _NAME.fullmatch(_unwrapped(text)) is not None


def is_constant(text: str) -> bool:
    r"""Whether a text contains no variable: `2+2`, `\sqrt{16}`, `\pi`."""
    text = _KNOWN.sub("1", _unwrapped(text))
    return any(map(str.isdigit, text)) and not any(map(str.isalpha, text))


def _choice(text: str) -> tuple[str, str] | None:
    """The letter of a multiple choice and the text after it; None: it is none."""
    found = _CHOICE.fullmatch(text)
    if found is None or re.search(r"\b[A-J]\b", found[2]):
        return None
    return found[1], found[2].strip()


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
