"""Sentences about metrics: which, when, how often; and steps in a row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curax.runs import alarms

FINE = {
    "step": 3,
    "loss/mean": 0.1,
    "gradient/norm": 1.0,
    "update/count": 1.0,
    "update/nonfinite": 0.0,
    "sampler/drift_nats": 1e-6,
    "outcome/missing": 0.0,
    "rollout/drawn": 8.0,
    "group/failed_fraction": 0.25,
    "group/solved_fraction": 0.5,
}
# Updates are counted since the beginning, so they do not tell of a step.
DEAD = FINE | {"group/signal_fraction": 0.0}


def said(row, watcher=None):
    told = (watcher or alarms.Alarms(patience=4, drift_nats=1e-4)).check(row)
    return list(told.values())


@pytest.mark.parametrize("times", [1, 3])
def test_of_a_row_like_any_other_nothing_is_said(times):
    seeds = {name: np.repeat(value, times) for name, value in FINE.items()}
    assert said(FINE) == said(seeds | {"step": 3}) == []
    assert said({"step": 0}) == []  # the row of the first evaluation


def test_an_engine_far_from_the_trainer_is_told():
    assert said(FINE | {"engine/gap_nats": 0.02}) == []
    (text,) = said(FINE | {"engine/gap_nats": 0.2})
    assert text.startswith("engine/gap_nats is 0.2 at step 3, above 0.1: ")


@pytest.mark.parametrize(
    ("changed", "culprit"),
    [
        ({"loss/mean": np.nan, "gradient/norm": np.inf}, "loss/mean is nan"),
        ({"gradient/norm": -np.inf}, "gradient/norm is -inf"),
        ({"loss/mean": np.array([0.1, np.inf])}, "loss/mean is inf"),
        ({}, "the gradient of an epoch or mini-batch is not finite"),
    ],
)
def test_what_is_not_finite_is_named(changed, culprit):
    row = DEAD | {"update/nonfinite": 1.0} | changed
    assert said(row) == [
        f"{culprit} at step 3: the update was skipped; after 4 such steps in a row the "
        "run stops."
    ]


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        (
            {"outcome/missing": 8.0},
            "the verifier gave no outcome for any completion; look at the warnings "
            "that it logged",
        ),
        (
            {"outcome/missing": 8.0, "engine/missing": 8.0},
            "the engine gave no completion; look at the warnings that it logged",
        ),
        (
            {},
            "no completion passed the gate and the down-sampling with credit left; "
            "loosen gate or downsample, or raise sampling.group_size",
        ),
        (
            {"group/failed_fraction": 0.25, "group/solved_fraction": 0.75},
            "75% of the groups are solved by every completion; take harder prompts, or "
            "end the run",
        ),
        (
            {"group/failed_fraction": 1.0, "group/solved_fraction": 0.0},
            "100% of the groups are failed by every completion; raise "
            "sampling.group_size or sampling.attempts, warm-start for longer, or take "
            "easier prompts",
        ),
    ],
)
def test_a_step_without_anything_to_learn_gets_a_remedy(changed, remedy):
    want = [f"nothing to train on at step 3, so no update: {remedy}."]
    assert said(DEAD | changed) == want
    both = {name: np.repeat(value, 2) for name, value in (DEAD | changed).items()}
    assert said(both | {"step": 3}) == want
    one_learns = both | {"step": 3, "group/signal_fraction": np.array([0.0, 0.5])}
    assert said(one_learns) == []


def test_patience_steps_with_nothing_to_learn_in_a_row_are_a_collapse():
    failed = {"group/failed_fraction": 1.0, "group/solved_fraction": 0.0}
    watcher = alarms.Alarms(patience=3, drift_nats=1e-4)
    rows = [FINE, DEAD, DEAD, FINE, DEAD, DEAD, DEAD, DEAD, FINE, DEAD, DEAD, DEAD]
    told = [watcher.check(row | failed | {"step": i}) for i, row in enumerate(rows)]
    assert [set(one) for one in told] == [
        *(set(), {"dead"}, set(), set(), set(), set()),
        *({"collapse"}, set(), set(), set(), set(), set()),
    ]
    assert told[6]["collapse"] == (
        "nothing to train on in 3 steps in a row up to step 6, so no updates: 100% of "
        "the groups are failed by every completion; raise sampling.group_size or "
        "sampling.attempts, warm-start for longer, or take easier prompts; if it was "
        "otherwise before, the policy has collapsed: start anew with a lower "
        "optimizer.learning_rate."
    )
    # Of many seeds one is enough.
    seeds = alarms.Alarms(patience=3, drift_nats=1e-4)
    row = FINE | {"group/signal_fraction": np.array([0.5, 0.0])}
    row |= {"group/failed_fraction": np.array([0.2, 0.0])}
    row |= {"group/solved_fraction": np.array([0.2, 1.0])}
    told = [seeds.check(row) for _ in range(3)]
    assert list(map(set, told)) == [set(), set(), {"collapse"}]
    assert "100% of the groups are solved by every" in told[2]["collapse"]  # of that
    assert set(alarms.SHORT) >= {"collapse", "drift", "nonfinite"}


def test_hints_of_which_none_fits_are_told_and_a_few_that_do_not_are_no_matter():
    row = FINE | {"hint/overlong": 16.0, "hint/hinted_fraction": 0.0}
    assert said(row) == [
        "no group has a hint at step 3, and 16 hints are longer than hint.width with "
        "the words around them; raise hint.width."
    ]
    assert said(row | {"hint/hinted_fraction": 0.1}) == []
    assert said(row | {"hint/overlong": 0.0}) == []


def must_stop(totals, row):
    """Why a run must stop at a row of step 3, which is saved as step 4."""
    how = {"saved": 4, "allocator": "allocate=f", "verifier": "down"}
    return totals.must_stop({"step": 3} | row, patience=20, **how)


def test_steps_without_any_outcome_are_counted_in_a_row():
    totals = alarms.Totals()
    for missing, drawn, want in ((8, 8, 1), (8, 8, 2), (7, 8, 0), (0, 0, 0), (9, 8, 1)):
        row = {"outcome/missing": float(missing), "rollout/drawn": float(drawn)}
        assert must_stop(totals, row) is None
        assert totals.missing_in_a_row == want
    row = {"outcome/missing": 8.0, "rollout/drawn": 8.0, "engine/missing": 8.0}
    totals.missing_in_a_row = 19
    why = must_stop(totals, row)
    assert why.startswith("the engine gave no completion in the last 20 steps")
    assert why.endswith("mend the engine and go on with --resume.")


FEW = {"format/effective_number": 1.9, "reflect/thought_tokens": 90.0}
MANY = {"format/effective_number": 4.0, "reflect/thought_tokens": 1000.0}


def test_fewer_than_half_of_the_first_forms_are_told_with_a_remedy():
    watcher = alarms.Alarms(patience=4, drift_nats=1e-4)
    name = "format/effective_number"
    told = [said(FINE | {name: n}, watcher) for n in (np.nan, 4.0, 9.0, 2.0, 1.9, 1.0)]
    assert told[:4] == [[], [], [], []]
    ((sentence,), nothing) = told[4:]
    assert sentence.startswith(
        "format/effective_number is 1.9 at step 3, and was 4 at first: completions "
        "take one form; "
    )
    assert nothing == []


def test_thoughts_below_a_tenth_of_the_first_are_told_with_a_remedy():
    watcher = alarms.Alarms(patience=4, drift_nats=1e-4)
    rows = [FINE | {"reflect/thought_tokens": n} for n in (1000.0, 100.0, 99.0, 9.0)]
    told = [said(row, watcher) for row in rows]
    assert [len(one) for one in told] == [0, 0, 1, 0]
    assert told[2][0].startswith(
        "reflect/thought_tokens is 99 at step 3, and was 1e+03 at first: completions "
        "hardly think before they answer; "
    )


def test_each_seed_is_compared_with_its_own_first_value():
    watcher = alarms.Alarms(patience=4, drift_nats=1e-4)
    name = "format/effective_number"
    for values in ([8.0, 2.0], [4.0, 2.0], [np.nan, 1.0]):
        assert said(FINE | {name: np.array(values)}, watcher) == []
    (sentence,) = said(FINE | {name: np.array([3.5, 0.9])}, watcher)
    assert "is 3.5 at step 3, and was 8 at first" in sentence
    # Both kinds of trouble have sentences of their own.
    watcher = alarms.Alarms(patience=4, drift_nats=1e-4)
    assert [len(said(FINE | row, watcher)) for row in (MANY, FEW, FEW)] == [0, 2, 0]


@pytest.mark.parametrize(("sign", "word"), [(1, "more"), (-1, "fewer")])
def test_ten_surprises_in_a_row_are_told_once(sign, word):
    watcher = alarms.Alarms(patience=4, drift_nats=1e-4)
    name = "forecast/dead_z"
    rows = [5.0] * 9 + [4.0] + [5.0] * 9 + [np.nan] + [5.0] * 9 + [-5.0] + [4.1] * 12
    told = [said(FINE | {name: sign * z}, watcher) for z in rows]
    assert [len(one) for one in told] == [0] * 39 + [1, 0, 0]
    assert told[39][0].startswith(f"{word} groups are dead than the memory forecasts")
    seeds = alarms.Alarms(patience=4, drift_nats=1e-4)
    steps = [np.array([5.0, 5.0 * (i != 4)]) * sign for i in range(10)]
    assert [len(said(FINE | {name: z}, seeds)) for z in steps] == [0] * 9 + [1]


@pytest.mark.parametrize("drift", [2e-4, np.array([0.0, 2e-4, np.nan])])
def test_drift_above_the_bound_is_told_with_its_likely_cause(drift):
    (sentence,) = said(FINE | {"sampler/drift_nats": drift})
    assert sentence.startswith("sampler/drift_nats is 0.0002 at step 3, above 0.0001: ")
    assert said(FINE | {"sampler/drift_nats": 1e-4}) == []


def test_each_kind_is_said_once():
    watcher = alarms.Alarms(patience=4, drift_nats=1e-4)
    drifting = FINE | {"sampler/drift_nats": 1.0}
    assert [len(said(row, watcher)) for row in (FINE, DEAD, DEAD, drifting)] == [
        *(0, 1, 0, 1)
    ]
    assert len(said(DEAD | drifting | {"update/nonfinite": 1.0}, watcher)) == 1


def test_what_was_said_before_is_what_was_kept_and_of_kinds_never_kept_all():
    watcher = alarms.Alarms(patience=4, drift_nats=1e-4)
    drifting = DEAD | {"sampler/drift_nats": 1.0}
    watcher.resume([MANY | FINE, drifting], [{"kind": "engine"}])
    row = drifting | FEW | {"engine/gap_nats": 1.0}
    assert [*watcher.check(row)] == ["drift", "formats", "thought"]


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=2), max_size=12))
def test_steps_in_a_row_are_counted_per_seed(bad):
    totals = alarms.Totals()
    for i, flags in enumerate(bad):
        assert (
            must_stop(totals, {"update/nonfinite": np.array(flags, np.float32)}) is None
        )
        for seed in range(2):
            past = [f[seed] for f in bad[: i + 1]][::-1]
            want = past.index(False) if False in past else i + 1
            assert totals.nonfinite_in_a_row[seed] == want


def test_a_row_of_one_seed_keeps_a_number():
    totals = alarms.Totals(nonfinite_in_a_row=3)
    assert must_stop(totals, {"update/nonfinite": np.float32(2)}) is None
    assert totals.nonfinite_in_a_row == 4
    assert must_stop(totals, {}) is None
    assert totals.nonfinite_in_a_row == 0


def test_logits_that_are_not_finite_are_told():
    row = {"step": 3, "rollout/length_tokens": 9, "policy/entropy_nats": float("nan")}
    raised = alarms.Alarms(patience=3, drift_nats=1.0).check(row)
    assert raised["logits"].startswith("the logits of a draw were not finite at step 3")
    nothing = {"rollout/length_tokens": float("nan"), "rollout/tokens": 9}  # so far
    for fine in ({"policy/entropy_nats": 0.5}, nothing):
        assert alarms.Alarms(patience=3, drift_nats=1.0).check(row | fine) == {}
    skipped = row | {"update/nonfinite": 1, "loss/mean": float("nan")}
    assert [*alarms.Alarms(patience=3, drift_nats=1.0).check(skipped)] == ["nonfinite"]


NEAR = FINE | {
    "off_policy/effective_fraction": 0.9,
    "off_policy/ratio_mean": 1.1,
    "off_policy/engine_perplexity_gap_nats": 0.01,
}


@pytest.mark.parametrize("cause", alarms.CAUSES)
@pytest.mark.parametrize(
    "far",
    [
        {"off_policy/effective_fraction": 0.3},
        {"off_policy/ratio_mean": np.array([1.0, 2.5, np.nan])},
        {"off_policy/ratio_mean": 0.4},
    ],
)
def test_draws_far_from_the_policy_are_told_with_the_likeliest_cause(cause, far):
    assert said(NEAR) == []
    gap = {f"off_policy/{cause}_perplexity_gap_nats": np.array([0.9, -0.9, 0.9])}
    (sentence,) = said(NEAR | far | gap)
    assert sentence.startswith("draws are far from the policy at step 3: off_policy/")
    assert f"by a gap of 0.9 nats per token, {alarms.CAUSES[cause]};" in sentence
    assert set(alarms.SHORT) >= {"off_policy"}
