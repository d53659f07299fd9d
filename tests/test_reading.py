import json

import numpy as np
import pytest
import scipy.stats
from outputs import message

from curax.runs import reading


def lines(path, rows, end="\n"):
    path.write_text("\n".join(map(json.dumps, rows)) + end)


def test_a_run_is_read_back_as_it_was_written(tmp_path):
    rows = [{"step": 0, "eval/pass_rate": 0.25}, {"step": 1, "loss/mean": None}]
    warm = [{"step": 0, "warm/loss_nats": 2.0}]
    rollout = {"step": 1, "text": "1 + 1", "outcome": None, "reward": 0.5}
    lines(tmp_path / "metrics.jsonl", rows)
    lines(tmp_path / "warm_start.jsonl", warm)
    lines(tmp_path / "rollouts.jsonl", [rollout])
    (tmp_path / "config.json").write_text('{"steps": 1}')
    (tmp_path / "evaluation.json").write_text(
        '{"before": {"pass_rates": [0, null, 1], "samples": 4, "step": 0}}'
    )
    run = reading.read(tmp_path)
    assert run.config == {"steps": 1}
    assert run.rows == rows
    assert run.warm == warm
    assert run.rollouts == [rollout]
    assert run.samples == 4
    assert run.after is None
    np.testing.assert_array_equal(run.before, [[0, np.nan, 1]])


def test_only_metrics_must_be_there(tmp_path):
    lines(tmp_path / "metrics.jsonl", [{"step": 0}])
    empty = reading.Run(config={}, rows=[{"step": 0}], warm=[], rollouts=[])
    assert reading.read(tmp_path) == empty


def test_a_last_line_cut_off_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "loss/mea')
    assert reading.read(tmp_path).rows == [{"step": 0}]


FIX = "repair or delete this line."


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        (
            "metrics.jsonl",
            '{"step": 0}\n{"step": 1\n{"step": 2}\n',
            f":2: not a JSON object; {FIX}",
        ),
        ("metrics.jsonl", '{"step": 0}\n[1]\n', f":2: not a JSON object; {FIX}"),
        ("metrics.jsonl", "\xff\n", f":1: not a JSON object; {FIX}"),
        ("metrics.jsonl", '\n{"loss/mean": 1}\n', f":2: no number under step; {FIX}"),
        (
            "metrics.jsonl",
            '{"step": 0, "loss/mean": "1"}\n',
            f":1: loss/mean is neither a number nor a list of numbers; {FIX}",
        ),
        (
            "metrics.jsonl",
            '{"step": 0, "a": [1, 2]}\n{"step": 1, "b": [1, 2, 3]}\n',
            f":2: b has 3 numbers where the lines before have 2; {FIX}",
        ),
        *(
            ("metrics.jsonl", f'{{"step": 0}}\n{text}\n', f":2: {what}; {FIX}")
            for text, what in {
                "5": "not a JSON object",
                "null": "not a JSON object",
                "[" * 99_999: "not a JSON object",
                '{"a": 1}': "no number under step",
                '{"step": "1"}': "no number under step",
                '{"step": true}': "no number under step",
                '{"step": NaN}': "no number under step",
                '{"step": -1}': "no number under step",
                '{"step": 1.5}': "no number under step",
                '{"step": 0}': "step 0 behind step 0",
                '{"step": 1, "x": true}': "x is neither a number nor a list of numbers",
                f'{{"step": 1, "x": 1{"0" * 999}}}': "x is neither a number nor a list "
                "of numbers",
            }.items()
        ),
        *(
            ("rollouts.jsonl", f'{{"step": 2}}\n{text}\n', f":2: {what}; {FIX}")
            for text, what in {
                '{"step": 1}': "step 1 behind step 2",
                '{"step": 2, "tokens": 5}': "tokens is 5, which is not a list",
                '{"step": 2, "weights": ["a"]}': 'weights is ["a"], which is not a '
                "list of numbers",
            }.items()
        ),
        *(
            ("expected.json", text, what + "; repair or delete the file.")
            for text, what in {
                "5": ":1: not a JSON object",
                '{"before": 5}': ": before is no object of numbers",
                '{"after": {"group/draws": "4"}}': ": after is no object of numbers",
            }.items()
        ),
        ("metrics.jsonl", "", ": no rows yet; try again after the first step."),
        ("warm_start.jsonl", "{}\n", f":1: no number under step; {FIX}"),
        (
            "warm_start.jsonl",
            '{"step": 1, "a": [1, 2]}\n{"step": 2, "a": [1, 2, 3]}\n',
            f":2: a has 3 numbers where the lines before have 2; {FIX}",
        ),
        (
            "rollouts.jsonl",
            '{"step": 0, "outcome": "yes"}\n',
            f':1: outcome is "yes", which is not a number; {FIX}',
        ),
        ("config.json", '{"steps":\n 1,\n', ":3: not JSON; repair or delete the file."),
        ("config.json", "[]", ":1: not a JSON object; repair or delete the file."),
        *(
            ("evaluation.json", text, f": {what}; repair or delete the file.")
            for text, what in {
                '{"before": {"pass_rates": "all"}}': "before.pass_rates is neither a "
                "list of numbers nor a list of those per seed",
                f'{{"before": {{"pass_rates": [1{"0" * 400}]}}}}': "before.pass_rates "
                "is neither a list of numbers nor a list of those per seed",
                '{"after": {"pass_rates": [0.5, 7e300]}}': "after.pass_rates has "
                "7e+300, and rates lie in [0, 1]",
                '{"before": {"pass_rates": [[0.5, null, -3]]}}': "before.pass_rates "
                "has -3, and rates lie in [0, 1]",
                '{"before": {"pass_rates": [1]}, "after": {"pass_rates": [1, 0]}}': ""
                "before.pass_rates and after.pass_rates are of other prompts",
            }.items()
        ),
    ],
)
def test_a_file_that_no_run_writes_is_named_with_its_line(
    tmp_path, name, text, sentence
):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / name).write_text(text, encoding="latin-1")
    said = message(reading.DamagedError, reading.read, tmp_path)
    assert said == f"{tmp_path / name}{sentence}"


def test_a_folder_that_is_no_run_is_named(tmp_path):
    for path, what in (
        (tmp_path / "x", "no such folder"),
        (tmp_path, "no metrics.jsonl in it"),
    ):
        said = message(reading.DamagedError, reading.read, path)
        assert said == f"{path}: {what}; give the folder of a run."


def test_column_leaves_out_steps_without_a_value_and_marks_seeds_without_one():
    rows = [
        {"step": 0},
        {"step": 1, "x": [1.0, None]},
        {"step": 2, "x": [None, None]},
        {"step": 3, "x": 5},
        {"step": 4, "x": None},
    ]
    steps, values = reading.column(rows, "x")
    np.testing.assert_array_equal(steps, [1, 3])
    np.testing.assert_array_equal(values, [[1, np.nan], [5, 5]])
    assert reading.means(rows, "x") == {1: 1.0, 3: 5.0}
    assert reading.means(rows, "y") == {}


@pytest.mark.parametrize("n", [2, 3, 5, 30, 31, 32, 100, 1000])
def test_interval_is_students_t(n):
    values = np.random.default_rng(n).normal(size=(3, n + 2))
    values[:, [0, 3]] = np.nan  # absent values count for nothing
    kept = np.delete(values, [0, 3], axis=-1)
    mean, half = reading.t_interval(values)
    t = scipy.stats.t.ppf(0.975, n - 1)
    np.testing.assert_allclose(mean, kept.mean(-1), rtol=1e-12)
    np.testing.assert_allclose(
        half, t * kept.std(-1, ddof=1) / np.sqrt(n), rtol=2e-5, atol=0
    )


def test_a_single_value_has_no_interval():
    mean, half = reading.t_interval(np.array([[np.nan, 2.0]]))
    assert mean == [2.0]
    assert np.isnan(half).all()


def test_stages_are_timed_by_their_metrics_and_sorted_by_cost():
    rows = [
        {"step": 1, "time/update_s": 1.0, "time/rollout_s": 2.0, "loss/mean": 9.0},
        # Of what overlaps others, seconds or a share of them, nothing is added.
        {"step": 2, "time/update_s": 4.0, "time/verify_all_s": 3.0}
        | {"time/verify_hidden_s": 7.0, "time/hidden_fraction": 0.9},
    ]
    times = reading.stage_seconds(rows)
    assert {stage: seconds.sum() for stage, (_, seconds) in times.items()} == {
        "update": 5.0,
        "verify all": 3.0,
        "rollout": 2.0,
    }
    assert list(times) == ["update", "verify all", "rollout"]


def timed(**stages):
    """Rows of steps 1, 2, ... with these seconds, None where a stage has none."""
    each = zip(*stages.values(), strict=True)
    return [
        {"step": t}
        | {f"time/{k}_s": v for k, v in zip(stages, row, strict=True) if v is not None}
        for t, row in enumerate(each, 1)
    ]


def test_first_values_of_a_stage_are_apart_from_the_rest():
    rows = timed(
        update=(20.0, 20.0, 1.0, 3.0), evaluate=(5.0, None, None, 4.0)
    )  # a chunk of two steps
    found = reading.times(rows)
    assert found
    assert (found.total, found.first, found.once) == (53.0, 45.0, {})
    behind = {name: pair for name, (_, *pair) in found.stages.items()}
    assert {name: pair[0].tolist() for name, pair in behind.items()} == {
        "update": [1.0, 3.0],
        "evaluate": [4.0],
    }


def test_what_is_hidden_behind_another_stage_takes_no_time():
    rows = timed(rollout=(3.0, 2.0), verify_hidden=(1.0, 1.5))
    found = reading.times(rows)
    assert found
    assert (found.total, [*found.stages]) == (5.0, ["rollout"])


def test_the_parts_of_a_step_are_in_its_time():
    whole = (9.0, 4.0, 5.0)
    once = reading.times(timed(step=whole, rollout=(1.0, None, None)))
    assert once
    assert (once.total, once.first, once.once) == (18.0, 9.0, {"rollout": 1.0})
    assert [*once.stages] == ["step"]
    always = reading.times(timed(step=whole, rollout=(6.0, 3.0, 2.0)))
    assert always
    assert (always.total, always.first, always.once) == (18.0, 9.0, {})
    assert [*always.stages] == ["rollout"]


def test_without_later_values_the_first_are_all():
    found = reading.times(timed(update=(2.0, 2.0)))
    assert found
    assert found.total == found.first == 4.0
    assert found.stages["update"][1].tolist() == [2.0, 2.0]
    assert reading.times([{"step": 0}]) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *((0, "0"), (1, "1"), (950, "950"), (1000, "1 k"), (12_345, "12.3 k")),
        *((999_400, "999 k"), (999_999, "1 M"), (4_560_000, "4.56 M")),
    ],
)
def test_counts_are_said_as_people_say_them(value, words):
    assert reading.count_text(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.0000271, "0.027 ms"),
        (0.0027, "2.7 ms"),
        (0.0123, "0.012 s"),
        (4.24, "4.2 s"),
        (9.97, "10 s"),
        (59.7, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.9, "1 h 0 min"),
        (7500, "2 h 5 min"),
    ],
)
def test_times_are_said_as_people_say_them(seconds, words):
    assert reading.duration_text(seconds) == words
