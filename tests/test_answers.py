r"""What a completion claims, and when two answers are the same.

Wanted are the definition written naively, tables, and what math-verify says.
"""

import logging
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from curax.verify import answers, sizes

logging.getLogger("math_verify").setLevel(logging.ERROR)


# Claims

CLAIMS = [
    ("no claim here, 5 or not", None),
    (r"so \boxed{5}", "5"),
    (r"so \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
    (r"\fbox{a}", "a"),
    (r"\boxed 7 is it", "7"),
    (r"\boxed  -3/4$ is it", "-3/4"),
    (r"\boxed{7} in \boxed form", "7"),
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"\boxed{1} then \boxed{2", "1"),
    (r"\boxed{1} then \boxed{}", "1"),
    (r"\boxed{1} then \boxed 2", "2"),
    (r"\boxed{so \boxed{7}}", "7"),
    (r"{ {} \boxed{7} and }", "7"),
    (r"} \boxed{7", None),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{ x \right.}", r"\left\{ x \right"),
    (r"\boxed{\text{a } b}", r"\text{a } b"),
    (r"\\boxed{7}", "7"),
    (r"\boxedness{7} and \boxed {8}", "8"),
    (r"$\boxed{$5$}$", "5"),
    (r"\boxed{42.}", "42"),
    ("1 + 1 = 2\n#### 2", "2"),
    ("#### 1\n#### 1,234 \n", "1,234"),
    ("#### Step 1\nso\nThe answer is 5.", "5"),
    ("The answer is 5.\n#### 6", "6"),
    ("Answer: 42", "42"),
    ("**Answer:** 42", "42"),
    ("**Final Answer**: $\\frac{1}{2}$.", r"\frac{1}{2}"),
    ("**Answer: 42**", "42"),
    ("Answer:\n\n  42\nmore", "42"),
    (r"the final ANSWER is: \(x+1\).", "x+1"),
    ("Answer: $$5$$", "5"),
    ("The answer is:\n\n$$\nx\n+ 1\n$$\nas asked", "x\n+ 1"),
    ("The answer is\n\\[\n5\n\\]", "5"),
    ("The answer is: $$", None),
    ("Answer: $5 and $6", "$5 and $6"),
    ("Answer: a\nAnswer: b", "b"),
    ("the answer is 5, no, the answer is 6", "6"),
    ("answering: 5", None),
    ("Answer:", None),
    (r"Answer: 5 but \boxed{6}", "6"),
]
NUMBERS_IN_TEXT = [
    ("", None),
    ("none", None),
    ("3 and -4.5", "-4.5"),
    ("10-5", "5"),
    ("costs $1,234.50.", "$1,234.50"),
    ("5, 6, 7.", "7"),
    ("1,2", "2"),
    ("50% of them", "50%"),
    ("x2 is .5", ".5"),
    ("12 then a3", "12"),
    ("the answer is 5 of 7", "5 of 7"),
]


@pytest.mark.parametrize(("text", "claim"), CLAIMS)
def test_a_completion_claims_what_it_states_last(text, claim):
    assert answers.final_answer(text) == claim


@pytest.mark.parametrize(("text", "claim"), NUMBERS_IN_TEXT)
def test_the_last_number_is_a_claim_if_nothing_else_is(text, claim):
    assert answers.final_answer(text, last_number=True) == claim


def naive_claim(text):
    """Try each box from the last one on; count the braces behind it."""
    for start in reversed(range(len(text))):
        if text[start:].startswith(r"\boxed{"):
            depth, begin = 1, start + len(r"\boxed{")
            for end in range(begin, len(text)):
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                if depth == 0:
                    if text[begin:end].strip():
                        return text[begin:end].strip()
                    break
    return None


@given(st.lists(st.sampled_from(["{", "}", r"\boxed{", "a", " "])).map("".join))
def test_the_last_balanced_box_is_found_as_if_each_were_tried(text):
    assert answers.final_answer(text) == naive_claim(text)


# Numbers

NUMBERS = [
    ("0", 0),
    ("-0", 0),
    ("007", 7),
    ("+5", 5),
    ("- 5", -5),
    ("\u22125", -5),
    ("5.", 5),
    (".5", "1/2"),
    ("1,234,567.50", "2469135/2"),
    ("1{,}234", 1234),
    (r"1,\!234", 1234),
    (r"1\,234", 1234),
    (r"1{,}\!234", 1234),
    ("50%", "1/2"),
    (r"12.5 \%", "1/8"),
    (r"\frac{100}{3}\%", "1/3"),
    (r"\frac12", "1/2"),
    (r"\frac1{25}", "1/25"),
    (r"\frac{12}5", "12/5"),
    (r"\frac 3 4", "3/4"),
    (r"-\dfrac { 3 } {-4}", "3/4"),
    (r"\tfrac{1,000}{0.5}", 2000),
    ("6/4", "3/2"),
    ("- 1 / 3", "-1/3"),
    (r"1\frac{1}{2}", "3/2"),
    (r"-2 \frac13", "-7/3"),
    ("3 1/7", "22/7"),
    (r"1.2 \times 10^{3}", 1200),
    (r"5\cdot10^{-3}", "1/200"),
    ("2\u00d710^5", 200000),
    ("10^{100}", 10**100),
    ("1e5", 100000),
    ("-1.5E-3", "-3/2000"),
    ("\uff11\uff12", 12),
    ("3\u00bd", "7/2"),
    ("\u200b5\u200b", 5),
    ("1\u202f234", 1234),
    ("10\u207b\u2077", "1/10000000"),
    (r"\$1,000.00", 1000),
    ("$5$", 5),
    (r"\(\left\lfloor 5 \right\rfloor\)", None),
    (r"5\text{ cm}^2", 5),
    (r"5\ \mathrm{km/h}", 5),
    (r"90^\circ", 90),
    (r"90^{\circ}", 90),
    ("90\u00b0", 90),
    ("x = 5", 5),
    (r"\theta_{1}=-\frac12", "-1/2"),
    *((text, None) for text in ("", "-", ".", "5-", "--5", "1/0", r"\frac{1}{0}")),
    *((text, None) for text in ("1 234", "1, 234", "1,23", "12345,678", "1.2.3")),
    *((text, None) for text in ("5 cm", "7,8", "1e", "x", "5x", "(5)", "101_2")),
    *((text, None) for text in ("10^{101}", "9^{9}", "10^{99999}", "x=y=5", "\u0665")),
    *((text, None) for text in (r"2\frac{7}{3}", r"1.5\frac{1}{2}", r"1\frac{.1}{2}")),
    *(
        (rf"5\text{{ {word}}}", None)
        for word in ("million", "percent", "or 6", "dozen")
    ),
    ("1" * 201, None),
]


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_a_number_is_read_or_not(text, value):
    want = None if value is None else Fraction(value)
    assert answers.number(text) == want


fractions = st.builds(
    Fraction,
    st.integers(-2000, 2000),
    st.sampled_from([1, 1, 1, 2, 3, 4, 5, 7, 8, 16, 25, 100]),
)


def decimal(value):
    """All digits of a value; None if they never end."""
    exact = Decimal(value.numerator) / Decimal(value.denominator)
    return f"{exact:f}" if Fraction(exact) == value else None


@st.composite
def spelled(draw, value, *, percent=True, as_math_verify=False):
    """One of the ways to write a number; only those that math-verify reads as well."""
    sign = "-" if value < 0 else draw(st.sampled_from(["", "", "+"]))
    size, times = abs(value), draw(st.integers(1, 3))
    digits = decimal(size)
    top, bottom = size.numerator * times, size.denominator * times
    ways = [
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
        rf"{sign}\dfrac{{{top}}}{{{bottom}}}",
        rf"{sign}{size.numerator}/{size.denominator}",
    ]
    if not as_math_verify:
        ways += [rf"{sign}\tfrac {{ {top} }} {{ {bottom} }}"]
    if max(top, bottom) < 10:
        ways += [rf"{sign}\frac{top}{bottom}"]
    whole, part = divmod(size.numerator, size.denominator)
    if whole and part:
        ways += [rf"{sign}{whole}\frac{{{part}}}{{{size.denominator}}}"]
    if digits is not None:
        ways += [sign + digits]
        if size.denominator == 1 or not as_math_verify:
            ways += [rf"{sign}{decimal(size / 1000)}\times 10^{{3}}"]
        ways += [f"{sign}{digits}.00" if "." not in digits else f"{sign}{digits}0"]
        ways += [f"{sign.replace('+', '')}{Decimal(digits):,}"]
        if percent and (value >= 0 or not as_math_verify):
            ways += [rf"{sign}{decimal(100 * size)}\%"]
    text = draw(st.sampled_from(ways))
    around = ["{}", "${}$", "x = {}", "  {} ", r"\displaystyle {}"]
    if "%" not in text:
        around += [r"{}\text{{ cm}}", r"{}^\circ"]
        around += [r"\${}"] if not sign else []
    if as_math_verify and "," in text:
        around = ["{}", "${}$"]
    return draw(st.sampled_from(around)).format(text)


@given(fractions, st.data())
def test_a_number_is_read_however_it_is_spelled(value, data):
    assert answers.number(data.draw(spelled(value))) == value


@given(fractions, fractions, st.booleans(), st.data())
def test_numbers_are_the_same_if_and_only_if_they_are_equal(a, b, equal, data):
    b = a if equal else b
    one, other = (data.draw(spelled(value, percent=False)) for value in (a, b))
    assert answers.same(one, other) is (a == b)


# Sameness

SAME = [
    ("50%", "50", True),
    ("50", r"50\%", True),
    ("0.5", r"50\%", True),
    ("50%", "50.0", None),
    ("-50%", "-50", None),
    ("50%", "5", False),
    (r"\frac{1}{3}", "0.333333", None),
    (r"\frac{1}{3}", "0.3333", False),
    ("1000000", "1000001", False),
    ("x=5", "5", True),
    ("x=5", "y=5", None),
    ("1/3", "2/6", True),
    ("12", "1 2", None),
    ("11/2", "1 1/2", False),
    (r"\text{Yes}", "Yes", True),
    ("Yes", "No", None),
    ("(3, 4)", r"\left(3,4\right)", True),
    (r"(3,\frac{\pi}{2})", r"\left( 3, \dfrac{\pi}2 \right)", True),
    (r"\sqrt{12}", r"2\sqrt3", None),
    ("a b", "ab", None),
    ("12", r"1\text{ }2", None),
    ("ab", r"\text{a} \text{b}", None),
    (r"5\text{ m}", r"5 \text{m}", True),
    (r"\frac{ \pi }{ 2 }", r"\dfrac{\pi}{2}", True),
    ("3", r"\text{3}", True),
    ("", "", None),
    ("$", "$", None),
    ("9" * 3000, "9" * 3000, True),
    ("9^{9^{9^{9}}}", "9^{9^{9^9}}", None),
    ("9^{9^{9^{9}}}", "7", False),
    ("7", "(10^{10})! + 1", False),
    ("10!", "3628800", None),
    ("5", r"5\text{ or 6}", False),
    ("5", r"5 \pm 1", False),
    ("5", r"5\text{ million}", False),
    ("3,000,000", r"3\text{ million}", True),
    ("1/20", r"5\text{ percent}", True),
    ("3", "three", True),
    ("1 234", "1234", True),
    ("1.234,5", "1234.5", True),
    ("1.234,5", "1234", None),
    ("0,5", "0.5", None),
    (r"\frac{1}{3}", r"0.\overline{3}", True),
    ("A", r"\textbf{(A)}\ 5", True),
    ("A", "(B) 5", False),
    ("A", "(A) 5 (B) 6", None),
    ("x\u00b2", "x^{2}", True),
    ("2\u221a3", r"2\sqrt{3}", True),
]


@pytest.mark.parametrize(("gold", "answer", "want"), SAME)
def test_sameness_is_told_where_it_can_be(gold, answer, want):
    assert answers.same(gold, answer) is want
    assert answers.same(answer, gold) is want


PIECES = (
    r"1 2 7 0 . , % \% / - + = x \pi ( ) { } \{ \} \frac \dfrac12 ^ _ $ \$ \text{ \,"
)
PIECES += r" \boxed{ \! \left \right ^\circ \times 10^ é \\ #### Answer: cm"
soup = st.lists(st.sampled_from([*PIECES.split(" "), " ", "\n"])).map("".join)


@given(soup, soup)
def test_whatever_the_text_nothing_is_raised_and_the_order_does_not_matter(a, b):
    assert answers.same(a, b) is answers.same(b, a)
    assert answers.same(a, a) in (True, None)
    claim = answers.final_answer(a + b, last_number=True)
    assert claim is None or claim == claim.strip() != ""


LONG = 200_000
PARTS = [
    *("{", "}", "\\", " ", "-", ".", "\n", "9", "1,", "1 ", "a ", "*$", "$ ", "{ , }"),
    *(r"\boxed{", r"\boxed", r"\boxed ", "#### ", "Answer: ", r"\frac{", r"\text{ }"),
    *("9^", "9!", "(", "=", "x = ", "a", "or ", ".1", ".11", "1 000", "A. ", ", ", "e"),
    *("\u00bd", "\u00b2", "\u221a", "\u221a(", "\u2013", "\uff11", "\u200b", "\u03c0"),
    *(r"\color{", r"0.\overline{3}", "..."),
    *(r"\text{", r"\,", r"\!", r"\left", "-1.", "answer*", r"\frac1"),
]


@pytest.mark.first(6)
@pytest.mark.parametrize("part", PARTS)
def test_no_text_is_slow(part):
    # As LaTeX, some are longer.
    text = part * (LONG // len(answers.normalized(part) or part))
    start = time.process_time()
    answers.final_answer(text, last_number=True)
    answers.number(text)
    answers.same(text, text + "1")
    answers.matches("5", text[:20_000])
    answers.matches("0.5", "0." + text[:20_000])
    for side in answers.equation_sides(text[:2000]) + answers.list_items(text[:2000]):
        answers.is_name(side)
        answers.is_constant(side)
    sizes.costly(text[:2000])
    sizes.log10(text[:20_000])
    # About 0.2 s; were time to grow with the square of the length, it would be hours.
    assert time.process_time() - start < 5


# Beside math-verify

BETTER = [  # where it misreads what is written; also listed in the module
    ("5", "5."),
    ("90", "90\u00b0"),
    ("90", r"90\degree"),
    (r"\frac{3}{2}", "1 1/2"),
    ("1234", r"1\,234"),
    ("0.005", r"\frac12\%"),
    (r"\frac{1000}{3}", r"\frac{1,000}{3}"),
    ("1000", "x = 1,000"),
    ("1000", r"1,000^\circ"),
    ("1000", "+1,000"),
    (r"\frac{-507}{8}", r"-6337.5\%"),
    (r"\frac{89}{25}", r"0.00356\times 10^{3}"),
    (r"\text{Yes}", "Yes."),
    ("a  b", "a~ b"),
    ("east side", r"\text{east} \text{side}"),
]


def verified(gold, answer):
    from math_verify import parse, verify

    def parsed(text):
        return parse(rf"\boxed{{{text}}}", parsing_timeout=None)

    return verify(parsed(gold), parsed(answer), timeout_seconds=None)


WIDER = len(SAME) - SAME.index(("9^{9^{9^{9}}}", "7", False))  # math-verify misreads
TOLD = [row[:2] for row in SAME[:-WIDER] if row[2] is not None]


@pytest.mark.parametrize(("gold", "answer"), TOLD)
def test_math_verify_is_not_contradicted(gold, answer):
    assert verified(gold, answer) is answers.same(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), BETTER)
def test_where_math_verify_misreads_it_is_known_to(gold, answer):
    assert answers.same(gold, answer) is True
    assert verified(gold, answer) is False


@given(fractions, fractions, st.booleans(), st.data())
def test_math_verify_is_not_contradicted_on_any_spelling(a, b, equal, data):
    b = a if equal else b
    one, other = (data.draw(spelled(value, as_math_verify=True)) for value in (a, b))
    told = answers.same(one, other)
    assume(told is not None)
    assert verified(one, other) is told
