"""Forms of answers: the published vectors, definitions by counting, the classifier."""

from collections import Counter

import jax
import numpy as np
import pytest
from contracts import close, equal, is_the_same_however_it_runs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax.monitors import diversity

B, G = 3, 4
few = settings(max_examples=25)
kinds = hnp.arrays(np.int32, (B, G), elements=st.sampled_from([-7, 0, 2, 2**30]))
existing = hnp.arrays(np.bool_, (B, G))
spread = jax.jit(diversity.spread)


def of_shares(*counts):
    kind = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[None]
    return diversity.spread(kind, np.ones(kind.shape, bool))


def test_entropy_and_effective_number_are_those_of_the_published_vectors():
    """P14: formats."""
    even = of_shares(25, 25, 25, 25)
    close([even.entropy, even.effective, even.top], [1.386294, 4, 0.25])
    collapsed = of_shares(91, 3, 3, 3)
    close(collapsed.entropy, 0.401413)
    close(collapsed.effective, 1.494, rtol=0, atol=5e-4)
    close(collapsed.top, 0.91)


def entropy(kind):
    shares = np.array(list(Counter(kind).values())) / max(len(kind), 1)
    return -np.sum(shares * np.log(shares)) if len(kind) else 0.0


@few
@given(kinds, existing)
def test_the_spread_is_its_definition(kind, exists):
    got = spread(kind, exists)
    own = [row[e].tolist() for row, e in zip(kind, exists, strict=True)]
    every = [one for row in own for one in row]
    count = Counter(every)
    whole, some = entropy(every), max(len(every), 1)
    within = sum(len(row) * entropy(row) for row in own) / some
    close(got.entropy, whole)
    close(got.effective, np.exp(whole) if every else 0)
    close(got.within, within)
    assert got.entropy - got.within > -1e-6
    close(got.top, max(count.values(), default=0) / some)


@few
@given(kinds, existing)
def test_what_is_absent_is_of_no_kind(kind, exists):
    other = np.where(exists, kind, np.int32(5))
    equal(spread(kind, exists), spread(other, exists))


def test_prompts_that_are_each_answered_in_one_way_vary_between_alone():
    kind = np.repeat(np.int32([[0], [1], [2]]), 4, -1)
    here = np.ones(kind.shape, bool)
    one, other = spread(kind, here), spread(np.int32([[0, 1, 2, 3]] * 3), here)
    close([one.within, one.entropy], [0, np.log(3)])
    close([other.within, other.entropy], [np.log(4), np.log(4)])


@pytest.mark.long
def test_the_spread_is_the_same_however_it_runs():
    random = np.random.default_rng(0)
    kind = random.integers(0, 3, (8, B, G)).astype(np.int32)
    exists = random.random((8, B, G)) < 0.8
    is_the_same_however_it_runs(
        lambda *args: diversity.spread(*args).within, kind, exists
    )


# ----- openings


@few
@given(
    hnp.arrays(np.int32, (6, 5), elements=st.sampled_from([0, 1, 2, 258, 150_000])),
    hnp.arrays(np.int32, 6, elements=st.integers(0, 5)),
    st.integers(1, 7),
)
def test_openings_are_alike_where_their_tokens_are(tokens, length, n):
    mask = np.arange(5) < length[:, None]
    found = np.asarray(diversity.opening(tokens, mask, n=n))
    shown = [tuple(row[:size][:n]) for row, size in zip(tokens, length, strict=True)]
    for i, one in enumerate(shown):
        assert [found[i] == other for other in found] == [one == x for x in shown]


def test_openings_of_all_pairs_of_tokens_differ():
    # Among 16 million numbers of 32 bits about 2**15 pairs are alike by chance; these
    # are as many fewer as there are fewer pairs.
    at = np.arange(0, 150_000, 97, dtype=np.int32)
    tokens = np.stack(np.meshgrid(at, at[:40]), -1).reshape(-1, 2)
    found = np.asarray(diversity.opening(tokens, np.ones(tokens.shape, bool)))
    expected = len(found) ** 2 / 2**33
    assert len(found) - len(np.unique(found)) < expected + 4 * expected**0.5 + 4


# ----- kinds of texts


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "empty"),
        (" \n\t\n", "empty"),
        ('<tool_call>{"name": "add"}</tool_call>', "call"),
        ('{"answer": 3}', "call"),
        ("Here it is:\n```python\nprint(3)\n```\nso 3.", "code"),
        ("def solve(x):\n    y = x + 1\n    return y\n", "code"),
        ("1. Add both.\n2. Halve it.\nThe answer is 3.", "list"),
        ("- one\n- two", "list"),
        ("Step 1: add\nStep 2: halve", "list"),
        ("x + 2 = 5\nx = 3", "equations"),
        ("(3+4)*5", "equations"),
        ("First 3 + 4 = 7\n7 * 5 = 35\n35", "equations"),
        ("There are 3 apples and 4 pears, which is 7.", "prose"),
        ("-5 is the answer, as the sum is below zero", "prose"),
        ("Forty, for one.", "prose"),
    ],
)
def test_a_text_is_of_the_kind_that_one_sees(text, kind):
    assert diversity.KINDS[diversity.kind_of(text)] == kind
