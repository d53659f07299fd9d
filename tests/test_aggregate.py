"""Token weights: definitions, and what lengthening or dropping a row changes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import (
    are_the_same_however_they_run,
    close,
    defined,
    follow_permutations,
    name,
    run_compiled_and_on_a_mesh,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import aggregate, loss

ten_tokens = partial(aggregate.constant_length, length=10)
# Every rule with its definition: (tokens of the row, tokens of all rows) -> weight.
DEFINITIONS = {
    aggregate.token_mean: lambda own, rows: 1 / sum(rows),
    aggregate.sequence_mean: lambda own, rows: 1 / own / np.count_nonzero(rows),
    ten_tokens: lambda own, rows: 1 / (10 * len(rows)),
}
for_every_rule = pytest.mark.parametrize("rule", DEFINITIONS, ids=name)
masks = hnp.arrays(np.bool_, (3, 4))


def naive(rule, mask):
    want, rows = np.zeros((3, 4)), mask.sum(-1)
    for i, t in zip(*mask.nonzero(), strict=True):
        want[i, t] = DEFINITIONS[rule](rows[i], rows)
    return want


test_a_rule_is_its_definition = defined(DEFINITIONS, masks, naive=naive)


@pytest.mark.parametrize(
    "rule", [aggregate.token_mean, aggregate.sequence_mean], ids=name
)
@given(masks)
def test_the_weights_of_a_mean_sum_to_one(rule, mask):
    close(np.sum(jax.jit(rule)(mask)), float(mask.any()))


@given(masks, st.permutations(range(3)), st.permutations(range(4)))
def test_weights_follow_their_tokens(mask, rows, tokens):
    follow_permutations(DEFINITIONS, mask, order=rows, axis=0)
    follow_permutations(DEFINITIONS, mask, order=tokens, axis=1)


def test_a_rule_is_the_same_however_it_runs():
    mask = np.random.default_rng(0).random((8, 3, 4)) < 0.7
    are_the_same_however_they_run(DEFINITIONS, mask)
    weights = run_compiled_and_on_a_mesh(DEFINITIONS, mask[:, 0])
    assert {weight.dtype for weight in weights} == {jnp.dtype(jnp.float32)}


@for_every_rule
def test_the_losses_of_micro_batches_add_up(rule):
    random = np.random.default_rng(0)
    logp, mask = -random.random((8, 4), np.float32), random.random((8, 4)) < 0.7
    weight, credit = rule(mask), random.normal(size=8).astype(np.float32)

    def step(rows):
        def total(logp):
            token = loss.reinforce(logp, logp, credit[rows], mask[rows])
            return jnp.sum(weight[rows] * token)

        return jax.grad(total)(logp[rows])

    parts = np.concatenate([step(slice(i, i + 2)) for i in range(0, 8, 2)])
    close(parts, step(slice(0, 8)))
