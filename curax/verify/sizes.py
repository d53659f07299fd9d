r"""Magnitudes of powers and factorials in a text, without computing them.

`9^{9^{9^9}}` and `(10^{10})!` have more digits than memory can hold; a library that
computes them does not end, and cannot be interrupted.
"""

import math
import re

MAX_OPERATORS = 64  # powers and factorials in a text; one with more is costly
FACTORIAL, EXPONENT, DIGITS = 4.0, 5.0, 6.0  # largest decimal logarithms that are cheap

_TOKEN = re.compile(r"[0-9]+|[\^!(){}+*]")
_SPELLINGS = (
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "*"),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])|\s|\\[,;:! ]"), ""),
    (re.compile(r"\\\{"), "("),
    (re.compile(r"\\\}"), ")"),
)
# Operations that make a number smaller, but not cheaper to compute.
_LARGER = ((re.compile(r"\\[dt]?frac(?![A-Za-z])|\\sqrt(?![A-Za-z])"), ""),)
_LARGER += ((re.compile("/"), "*"), (re.compile("-"), "+"))


def log10(text: str) -> float:
    """The approximate decimal logarithm of a number as `9^{9^9}` or `2 (10^8)! + 1`.

    The text may hold integers, powers, factorials, sums and products.

    Returns:
        The logarithm; infinity beyond 10^(10^300), NaN for any other text.
    """
    return _log10(_substituted(text, _SPELLINGS))


def costly(text: str) -> bool:
    """Whether computing a power or factorial in a text takes much time or memory."""
    text = _substituted(text, _SPELLINGS + _LARGER)
    sites = [n for n, sign in enumerate(text) if sign in "^!"]
    if len(sites) > MAX_OPERATORS:
        return True
    for n in sites:
        before = _log10(text[_begin(text, n) : n])
        if text[n] == "!":
            if before > FACTORIAL:
                return True
            continue
        if before <= 0:  # of 0 or 1
            continue
        exponent = _log10(text[n + 1 : _end(text, n + 1)])
        if exponent > EXPONENT or before * 10 ** min(exponent, 300.0) > 10**DIGITS:
            return True
    return False


def _substituted(text: str, spellings: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    for pattern, spelling in spellings:
        text = pattern.sub(spelling, text)
    return text


def _begin(text: str, end: int) -> int:
    """Index where the operand that ends at `end` begins: `2^{3}!` of `5 + 2^{3}!`."""
    while True:
        while end and text[end - 1] == "!":
            end -= 1
        if end and text[end - 1] in ")}":
            depth = 0
            while end:
                end -= 1
                depth += {")": 1, "}": 1, "(": -1, "{": -1}.get(text[end], 0)
                if depth == 0:
                    break
        else:
            while end and text[end - 1].isdigit():
                end -= 1
        if not end or text[end - 1] != "^":
            return end
        end -= 1


def _end(text: str, begin: int) -> int:
    """Index where the exponent from `begin` on ends: `2^{3}!` of `2^{3}! + 5`."""
    while begin < len(text):
        if text[begin] in "({":
            depth = 0
            while begin < len(text):
                depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(text[begin], 0)
                begin += 1
                if depth == 0:
                    break
        else:
            while begin < len(text) and text[begin].isdigit():
                begin += 1
        while begin < len(text) and text[begin] == "!":
            begin += 1
        if begin == len(text) or text[begin] != "^":
            break
        begin += 1
    return begin


def _log10(text: str) -> float:
    tokens = _TOKEN.findall(text)
    if not tokens or sum(map(len, tokens)) != len(text):
        return math.nan
    tokens.reverse()  # the next is the last
    try:
        size = _sum(tokens)
    except (IndexError, RecursionError):
        return math.nan
    return math.nan if tokens else size


def _sum(tokens: list[str]) -> float:
    if tokens[-1] == "+":  # a sign
        tokens.pop()
    size = _product(tokens)
    while tokens and tokens[-1] == "+":
        tokens.pop()
        size = max(size, _product(tokens))
    return size


def _product(tokens: list[str]) -> float:
    size = _power(tokens)
    while tokens and tokens[-1] not in "+)}":
        if tokens[-1] == "*":
            tokens.pop()
        size += _power(tokens)
    return size


def _power(tokens: list[str]) -> float:
    size = _atom(tokens)
    while tokens and tokens[-1] == "!":
        tokens.pop()
        size = _factorial(size)
    if tokens and tokens[-1] == "^":
        tokens.pop()
        exponent = _power(tokens)
        if size > 0:  # of 0 and 1, every power is taken for themselves
            size = size * 10**exponent if exponent < 300 else math.inf
    return size


def _atom(tokens: list[str]) -> float:
    token = tokens.pop()
    if token in "({":
        size = _sum(tokens)
        if tokens.pop() != {"(": ")", "{": "}"}[token]:
            raise IndexError
        return size
    if not token.isdigit():
        raise IndexError
    digits = token.lstrip("0")
    return math.log10(int(digits[:15])) + len(digits[15:]) if digits else -math.inf


def _factorial(size: float) -> float:
    if size < 2:
        return math.lgamma(10**size + 1) / math.log(10)
    return 10**size * (size - math.log10(math.e)) if size < 300 else math.inf
