"""Token losses and KL estimators: definitions, gradients, what the mask hides."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import (
    close,
    defined,
    each,
    follow_permutations,
    ignores_absent_entries,
    name,
    run_alike,
    run_compiled_and_on_a_mesh,
    together,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import aggregate, loss

clip_higher = partial(loss.clipped_ratio, low=0.2, high=0.28)
dual_clip = partial(loss.clipped_ratio, dual=3.0)
loose_gspo = partial(loss.gspo, low=0.1, high=0.2)
tight_cispo = partial(loss.cispo, low=0.1, high=0.2)


def clipped(ratio, credit, low, high, dual=np.inf):
    surrogate = min(ratio * credit, np.clip(ratio, 1 - low, 1 + high) * credit)
    return -surrogate if credit >= 0 else min(-surrogate, -dual * credit)


# Every loss with its definition, token by token: (logp, ratio, mean log-ratio, A).
DEFINITIONS = {
    loss.reinforce: lambda logp, ratio, row, a: -a * logp,
    loss.clipped_ratio: lambda logp, ratio, row, a: clipped(ratio, a, 0.2, 0.2),
    clip_higher: lambda logp, ratio, row, a: clipped(ratio, a, 0.2, 0.28),
    dual_clip: lambda logp, ratio, row, a: clipped(ratio, a, 0.2, 0.2, dual=3.0),
    loss.gspo: lambda logp, ratio, row, a: clipped(np.exp(row), a, 3e-4, 4e-4),
    loose_gspo: lambda logp, ratio, row, a: clipped(np.exp(row), a, 0.1, 0.2),
    loss.cispo: lambda logp, ratio, row, a: -min(ratio, 5) * a * logp,
    tight_cispo: lambda logp, ratio, row, a: -np.clip(ratio, 0.9, 1.2) * a * logp,
}
LOSSES = list(DEFINITIONS)
GRADIENTS = {
    f: jax.grad(lambda logp, *rest, f=f: jnp.sum(f(logp, *rest))) for f in LOSSES
}
SLOPES = [GRADIENTS[loss_] for loss_ in LOSSES]
for_every_loss = pytest.mark.parametrize("loss_", LOSSES, ids=name)
KL = [loss.k1, loss.k2, loss.k3]

logps = hnp.arrays(np.float32, (3, 4), elements=st.floats(-4, 0, width=32))
advantages = hnp.arrays(np.float32, 3, elements=st.floats(-2, 2, width=32))
masks = hnp.arrays(np.bool_, (3, 4))


def naive(loss_, logp, logp_old, advantage, mask):
    want = np.zeros((3, 4))
    log_ratio = logp.astype(np.float64) - logp_old
    for i, t in zip(*mask.nonzero(), strict=True):
        row = log_ratio[i, mask[i]].mean()
        token = logp[i, t], np.exp(log_ratio[i, t]), row, advantage[i]
        want[i, t] = DEFINITIONS[loss_](*token)
    return want


ARRAYS = logps, logps, advantages, masks
test_a_loss_is_the_same_however_it_runs = run_alike(LOSSES, *ARRAYS)
test_a_loss_is_its_definition = defined(
    LOSSES, *ARRAYS, naive=naive, rtol=1e-4, atol=1e-5
)


each_advantage = hnp.arrays(np.float32, (3, 4), elements=st.floats(-2, 2, width=32))


@pytest.mark.first(3)
@for_every_loss
@given(logps, logps, each_advantage, masks)
def test_the_advantage_of_a_token_is_its_own_or_that_of_its_row(
    loss_, logp, logp_old, advantage, mask
):
    """Token by token what a row with that advantage would cost."""
    got = loss_(logp, logp_old, advantage, mask)
    for t in range(4):
        row = loss_(logp, logp_old, advantage[:, t], mask)
        np.testing.assert_array_equal(got[:, t], row[:, t])


@given(*ARRAYS)
def test_what_the_mask_hides_costs_nothing_and_pulls_nowhere(
    logp, logp_old, advantage, mask
):
    arrays, slopes = (logp, logp_old, advantage, mask), together(tuple(SLOPES))
    for loss_ in LOSSES:
        ignores_absent_entries(loss_, *arrays, counts=mask)
    wanted = slopes(*arrays)
    for junk in (np.nan, np.inf, -np.inf, 1e30):
        hidden = (np.where(mask, x, np.float32(junk)) for x in (logp, logp_old))
        missing = np.where(mask.any(-1), advantage, np.float32(junk))
        found = slopes(*hidden, missing, mask)
        for loss_, got, want in zip(LOSSES, found, wanted, strict=True):
            np.testing.assert_array_equal(got, want, err_msg=name(loss_))
            assert not np.asarray(got)[~mask].any(), name(loss_)


@given(st.tuples(*ARRAYS), st.permutations(range(3)))
def test_a_row_costs_the_same_wherever_it_stands(arrays, order):
    follow_permutations(LOSSES, *arrays, order=order, axis=0)


@for_every_loss
def test_on_policy_every_loss_is_the_policy_gradient(loss_):
    logp = -np.random.default_rng(0).random((3, 4), np.float32)
    advantage = np.array([1.5, -0.5, 0.0], np.float32)
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]], bool)
    got = GRADIENTS[loss_](logp, logp, advantage, mask)
    close(got, np.where(mask, -advantage[:, None], 0))


@pytest.mark.first(3)
@for_every_loss
def test_ratios_beyond_all_bounds_leave_loss_and_gradient_finite(loss_):
    logp = np.array([[-200.0, -1e-3], [-200.0, -1e-3]], np.float32)
    logp_old = logp[:, ::-1]
    arrays = logp, logp_old, np.array([1.0, -1.0], np.float32), np.ones((2, 2), bool)
    assert np.isfinite(loss_(*arrays)).all()
    assert np.isfinite(GRADIENTS[loss_](*arrays)).all()


@pytest.mark.first(3)
@for_every_loss
def test_a_token_pulls_on_its_own_log_prob_alone(loss_):
    logp, logp_old = -np.random.default_rng(0).random((2, 1, 4), np.float32)
    mask = np.array([[True, True, True, False]])
    for junk in (0.0, np.nan):  # eagerly, so that no compiler tidies up
        hidden = np.where(mask, logp, np.float32(junk))
        arrays = hidden, logp_old, np.float32([0.5]), mask
        slopes = np.asarray(jax.jacobian(loss_)(*arrays))[0, :, 0]
        assert np.isfinite(slopes).all()
        assert not slopes[~np.eye(4, dtype=bool)].any()
        assert slopes[3, 3] == 0


@for_every_loss
def test_no_gradient_reaches_the_old_policy_or_the_advantage(loss_):
    logp, logp_old = -np.random.default_rng(0).random((2, 3, 4), np.float32)
    arrays = logp, logp_old, np.ones(3, np.float32), np.ones((3, 4), bool)
    for argument in (1, 2):
        gradient = jax.grad(lambda *a: jnp.sum(loss_(*a)), argnums=argument)(*arrays)
        assert not np.asarray(gradient).any()


def gradient_at(loss_, ratio, advantage):
    """d loss / d ratio of one token, from its gradient in the log-prob."""
    logp = np.log(np.float32([[ratio]]))
    arrays = logp, logp * 0, np.float32([advantage]), np.ones((1, 1), bool)
    return GRADIENTS[loss_](*arrays)[0, 0] / ratio


RATIOS = [0.1, 0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 2.0, 5.0]


@pytest.mark.first(1)
@pytest.mark.parametrize("low", [0.0, 0.2, 1.0])
def test_raft_plus_plus_is_silent_above_its_upper_bound_and_only_there(low):
    """L3: the slope in the ratio."""
    raft = partial(loss.clipped_ratio, low=low, high=0.28)
    GRADIENTS[raft] = jax.grad(lambda logp, *rest: jnp.sum(raft(logp, *rest)))
    for ratio in RATIOS:
        close(gradient_at(raft, ratio, 1.0), -1.0 if ratio < 1.28 else 0.0)
        close(gradient_at(raft, ratio, 0.0), 0.0)


def test_at_a_bound_itself_a_token_still_moves():
    """As where the first update of a step begins, at a ratio of 1."""
    for bounds in ({"low": 0.0}, {"high": 0.0}):
        rule = partial(loss.clipped_ratio, **bounds)
        GRADIENTS[rule] = jax.grad(
            lambda logp, *rest, of=rule: jnp.sum(of(logp, *rest))
        )
        close([gradient_at(rule, 1.0, a) for a in (1.0, -1.0)], [-1, 1])


def test_a_wrong_token_falls_silent_once_lowered_enough():
    for ratio in RATIOS:
        close(gradient_at(loss.clipped_ratio, ratio, -2.0), 2.0 * (ratio > 0.8))
        close(gradient_at(dual_clip, ratio, -2.0), 2.0 * (0.8 < ratio < 3))
        close(gradient_at(dual_clip, ratio, 2.0), -2.0 * (ratio < 1.2))


def test_no_token_falls_silent_under_cispo():
    for ratio in RATIOS:
        for advantage in (1.0, -1.0):
            weight = np.clip(ratio, 0.9, 1.2)
            close(
                gradient_at(tight_cispo, ratio, advantage) * ratio, -advantage * weight
            )


@pytest.mark.long
def test_gspo_has_the_gradient_of_its_sequence_form():
    random = np.random.default_rng(0)
    logp_old = -random.random((16, 5), np.float32)
    logp = logp_old + random.normal(size=(16, 5), scale=0.2).astype(np.float32)
    advantage = random.normal(size=16).astype(np.float32)
    mask = np.arange(5) < random.integers(1, 6, (16, 1))

    def sequence_form(logp):
        count = jnp.sum(mask, axis=-1).astype(jnp.float32)
        ratio = jnp.exp(jnp.sum(jnp.where(mask, logp - logp_old, 0.0), -1) / count)
        clip = jnp.clip(ratio, 0.9, 1.2)
        return -jnp.mean(jnp.minimum(ratio * advantage, clip * advantage))

    def token_form(logp):
        weight = aggregate.sequence_mean(mask)
        return jnp.sum(weight * loose_gspo(logp, logp_old, advantage, mask))

    (want, wanted_gradient), (got, gradient) = (
        jax.value_and_grad(form)(logp) for form in (sequence_form, token_form)
    )
    close(got, want)
    close(gradient, wanted_gradient)
    silent = ~np.any(gradient, axis=-1)
    assert 0 < silent.sum() < 16


@given(logps, logps)
def test_kl_estimators_are_their_definitions(logp, logp_ref):
    d = logp_ref.astype(np.float64) - logp
    found = together(tuple(KL))(logp, logp_ref)
    each(KL, found, (-d, d**2 / 2, np.exp(d) - d - 1), atol=1e-5)
    assert (np.asarray(found[-1]) >= 0).all()


def test_a_kl_estimator_is_the_same_however_it_runs():
    logp, logp_ref = -np.random.default_rng(0).random((2, 8, 4), np.float32)
    run_compiled_and_on_a_mesh(KL, logp, logp_ref)
    for estimate in KL:
        assert not np.asarray(estimate(logp, logp)).any(), name(estimate)


@pytest.mark.parametrize("estimate", KL, ids=name)
def test_kl_estimators_stay_finite_far_from_the_reference(estimate):
    logp, logp_ref = np.float32([-300, -1e-3]), np.float32([-1e-3, -300])
    assert np.isfinite(estimate(logp, logp_ref)).all()
    slope = jax.grad(lambda x: jnp.sum(estimate(x, logp_ref)))(logp)
    assert np.isfinite(slope).all()


def test_kl_estimators_have_the_means_and_gradients_the_docstrings_state():
    logits, reference = jnp.array([0.3, -0.5, 1.0]), jnp.array([-0.2, 0.4, 0.1])
    logp_ref = jax.nn.log_softmax(reference)

    def forward(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - logp_ref))

    def reverse(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp_ref) * (logp_ref - logp))

    chance = jax.nn.softmax(logits)  # of drawing each action; not differentiated

    def expected(estimate, logits):
        return jnp.sum(chance * estimate(jax.nn.log_softmax(logits), logp_ref))

    for estimate in (loss.k1, loss.k3):
        close(expected(estimate, logits), forward(logits))
    gradients = [jax.grad(partial(expected, estimate))(logits) for estimate in KL]
    wanted = [jnp.zeros(3), jax.grad(forward)(logits), jax.grad(reverse)(logits)]
    close(gradients, wanted)
