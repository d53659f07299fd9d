"""Token multipliers: which tokens a share chooses."""

from functools import partial

import jax
import numpy as np
import pytest
from contracts import (
    close,
    follows_permutations,
    ignores_absent_entries,
    is_the_same_however_it_runs,
    name,
    runs_compiled_and_on_a_mesh,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import modulate

half = partial(modulate.forking_tokens, share=0.5)
RULES = [modulate.none, modulate.forking_tokens, half]
for_every_rule = pytest.mark.parametrize("rule", RULES, ids=name)
for_every_share = pytest.mark.parametrize("rule", RULES[1:], ids=name)
entropies = hnp.arrays(np.float32, (3, 4), elements=st.floats(0, 4, width=32))
masks = hnp.arrays(np.bool_, (3, 4))


@pytest.mark.parametrize(("rule", "share"), [(RULES[1], 0.2), (half, 0.5)])
@given(entropies, masks)
def test_the_share_with_the_highest_entropy_counts(rule, share, entropy, mask):
    want = np.zeros((3, 4), np.float32)
    if mask.any():
        ranked = sorted(entropy[mask], reverse=True)
        threshold = ranked[max(round(share * len(ranked)), 1) - 1]
        want[mask & (entropy >= threshold)] = 1
    np.testing.assert_array_equal(jax.jit(rule)(entropy, mask), want)


def test_without_modulation_every_token_counts_once():
    entropy, mask = np.zeros((2, 3), np.float32), np.zeros((2, 3), bool)
    np.testing.assert_array_equal(modulate.none(entropy, mask), np.ones((2, 3)))


@for_every_share
@given(entropies, masks, st.permutations(range(3)), st.permutations(range(4)))
def test_the_choice_ignores_the_masked_and_follows_its_tokens(
    rule, entropy, mask, rows, tokens
):
    ignores_absent_entries(rule, entropy, mask, counts=mask)
    follows_permutations(rule, entropy, mask, order=rows, axis=0)
    follows_permutations(rule, entropy, mask, order=tokens, axis=1)


@for_every_rule
def test_a_rule_is_the_same_however_it_runs(rule):
    random = np.random.default_rng(0)
    entropy, mask = random.random((8, 3, 4), np.float32), random.random((8, 3, 4)) < 0.7
    is_the_same_however_it_runs(rule, entropy, mask)
    runs_compiled_and_on_a_mesh(rule, entropy[:, 0], mask[:, 0])


def test_the_threshold_is_that_of_all_rows_together():
    entropy = np.float32([[0.1, 0.2, 0.3, 0.4], [1.1, 1.2, 1.3, 1.4]])
    got = half(entropy, np.ones((2, 4), bool))
    np.testing.assert_array_equal(got, [[0] * 4, [1] * 4])


@pytest.mark.parametrize("share", [0.001, 0.1, 0.2, 0.7, 1.0])
def test_a_share_may_be_traced_and_is_rounded_to_tokens(share):
    entropy = np.random.default_rng(0).random((10, 10), np.float32)
    everything = np.ones((10, 10), bool)
    got = jax.jit(lambda s: modulate.forking_tokens(entropy, everything, share=s))(
        share
    )
    close(got.sum(), max(round(100 * share), 1))


def test_wrong_shapes_and_dtypes_are_refused():
    entropy, mask = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    for bad in [
        (entropy, mask[:1]),
        (mask, mask),
        (entropy, entropy),
        (entropy[0], mask[0]),
    ]:
        for rule in RULES:
            with pytest.raises(AssertionError):
                rule(*bad)
