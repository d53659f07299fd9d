"""The command line and the run folder, from end to end."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import killed
import numpy as np
import pytest
import small
from outputs import message, printed, refusal, snapshot
from run_files import assert_same_run, rows, state
from test_folder import events, files_of_at_most, lines

from curax import train
from curax.config import load, override
from curax.models import transformer
from curax.runs import checkpoint, dashboards, dry_run, ending, folder, run
from curax.runs.profile import Profile
from curax.runs.rows import NotWrittenError
from curax.settings import lock
from curax.settings.config_paths import describe
from curax.step import loops

ROOT = Path(__file__).parents[1]
FIXED = {
    *("outcome/mean", "group/dead_fraction", "rollout/drawn", "rollout/tokens"),
    *("update/count", "train/tokens", "time/step_s"),
    *("policy/entropy_nats", "kl/behaviour_nats", "loss/mean", "gradient/norm"),
}
EVALUATED = {"eval/pass_rate", "eval/greedy_pass_rate", "time/evaluate_s"}
FORMS = ("entropy_nats", "effective_number", "top_fraction", "within_prompt_nats")
EVALUATED |= {f"format/{name}" for name in FORMS}
WRITTEN = {
    *("config.json", "recipe.json", "metrics.jsonl", "rollouts.jsonl"),
    "warm_start.jsonl",
    *("evaluation.json", "memory.jsonl", "expected.json", "tensorboard", "checkpoints"),
    "alarms.jsonl",
}

long = pytest.mark.long

BUILT: dict[str, loops.Loop] = {}
# What the host alone reads, and no program; the seed is an argument of them.
OF_HOST = {
    "": ("steps", "seed"),
    "task": ("slow", "broken"),  # of `small`: of decoding, and of grading on the host
    "update": ("patience",),
    "evaluation": ("every",),
    "memory": ("load",),
    "warm_start": ("steps",),
    "logging": ("checkpoint_every", "keep", "drift_nats", "dashboards"),
}
PROGRAMS = ("_initial", "_warm", "_begin")
PROGRAMS += ("_chunk", "_warm_ids", "_warm_once")  # of one of the two loops


def programs_of(config) -> str:
    """What the programs of a run follow from."""
    told = describe(config)
    for group, names in OF_HOST.items():
        for name in names:
            ((told[group] or {}) if group else told).pop(name, None)
    return json.dumps(told)


def remembered(config, build=run.make_loop, **options):
    """Loops have no state: one that was traced and compiled serves again.

    Its programs serve a config too that differs in what the host alone reads.
    """
    key, of_programs = json.dumps(describe(config)), programs_of(config)
    if key in BUILT:
        return BUILT[key]
    like = BUILT.get(of_programs)
    if like and config.steps and like.parts.config.steps:
        parts = replace(like.parts, config=config)
        if describe(like.parts.config)["task"] != describe(config)["task"]:
            parts = replace(parts, task=config.task())
        BUILT[key] = type(like)(parts)
        share(like, BUILT[key])
    else:
        BUILT[key] = BUILT[of_programs] = build(config, **options)
    return BUILT[key]


def share(one: loops.Loop, other: loops.Loop) -> None:
    """Give another loop the programs of one."""
    for name in PROGRAMS:
        if hasattr(one, name):
            setattr(other, name, getattr(one, name))
    for (function, parts, *options), program in one._drive._jitted.items():
        own = other.parts if parts is one.parts else other._held_out
        other._drive._jitted[function, own, *options] = program


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Loops that are built are kept, for all runs of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_loop", remembered)
        yield
    BUILT.clear()


def without_pictures(patch):
    patch.setattr(ending.page, "write", lambda workdir: workdir / "report.html")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Pictures take a second; other tests look at them."""
    without_pictures(monkeypatch)


main = partial(printed, train.main)


def call(workdir, *assignments, resume=False) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a run of the small config in this process."""
    argv = ["--config", str(small.FILE), "--workdir", str(workdir)]
    argv += ["--set", *assignments] if assignments else []
    return main(*argv, *(["--resume"] if resume else []))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compiled):
    """A run of six steps that nothing interrupted, and what it printed."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    status, out, err = call(workdir)
    assert (status, err) == (0, "")
    return workdir, out


# A run


def test_a_run_leaves_a_folder_with_all_that_it_did(whole):
    workdir, _ = whole
    names = {file.name for file in workdir.iterdir()}
    assert {name for name in names if not name.endswith(".png")} == WRITTEN | {
        "report.html"
    }
    assert {"learning.png", "warm_start.png"} < names
    rates = {
        row["step"]: row["eval/pass_rate"]
        for row in lines(workdir / "metrics.jsonl")
        if "eval/pass_rate" in row
    }
    best = max(rates, key=lambda step: (rates[step], step))
    kept = {file.name for file in (workdir / "checkpoints").iterdir()}
    assert kept == {"4", "6", str(best)}
    config = json.loads((workdir / "config.json").read_text())
    assert config == describe(load(small.FILE))
    assert [row["step"] for row in lines(workdir / "warm_start.jsonl")] == [
        1,
        2,
        3,
        4,
        5,
    ]
    evaluation = json.loads((workdir / "evaluation.json").read_text())
    assert [evaluation[side]["step"] for side in ("before", "after")] == [0, 6]
    shown = [row["step"] for row in lines(workdir / "rollouts.jsonl")]
    assert sorted(set(shown)) == [1, 2, 3, 4, 5, 6]
    assert len(shown) == 6 * 2 * 4


def test_every_step_has_one_row_with_all_metrics(whole):
    first, *steps = lines(whole[0] / "metrics.jsonl")
    assert set(first) == {"step", "rollout/tokens", "update/count"} | EVALUATED
    assert [first[name] for name in ("step", "rollout/tokens", "update/count")] == [
        0
    ] * 3
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    for row in steps:
        evaluated = EVALUATED if row["step"] % 3 == 0 else set()
        assert set(row) >= FIXED | evaluated
        assert (set(row) & EVALUATED) == evaluated
        assert row["rollout/drawn"] == 16
        done = row["update/count"] + sum(
            r["update/skipped"] for r in steps[: row["step"]]
        )
        assert done == 2 * row["step"]
        assert 0 < row["train/tokens"] <= 32
    tokens = np.diff([0, *(row["rollout/tokens"] for row in steps)])
    lengths = [row["rollout/length_tokens"] for row in steps]
    np.testing.assert_allclose(tokens, np.multiply(16, lengths), rtol=1e-6)
    assert any(row["outcome/mean"] > 0 for row in steps)


def test_the_terminal_shows_progress_and_at_the_end_what_came_of_it(whole):
    workdir, out = whole
    # A step of sixteen completions may well have nothing to train on.
    said = [line for line in out.splitlines() if "Warning: nothing to" not in line]
    assert said.pop(0).startswith("Cache: ")
    took = r"( \(took [\w. ]+ the last time\))?"
    what = "compiling the supervised update"
    assert re.fullmatch(rf"warm start 0/5  {what}{took}", said[0])
    assert re.fullmatch(r"warm start 4/5  loss \d.\d{3} nats  left 0:\d\d", said[2])
    assert re.fullmatch(rf"compiling the held-out sampler{took}", said[4])
    what = "compiling the sampler and the update"
    assert re.fullmatch(rf"RL 0/6  held-out 0\.\d{{3}}  {what}{took}", said[5])
    assert re.fullmatch(
        r"RL 4/6  held-out 0\.\d{3}  train 0\.\d{3}  dead groups \d+%  [\d,]+ tokens/s"
        r"  left 0:\d\d",
        said[8],
    )
    metrics = lines(workdir / "metrics.jsonl")
    before, after = (metrics[i]["eval/pass_rate"] for i in (0, -1))
    tokens = metrics[-1]["rollout/tokens"]
    end = f"Held-out pass rate {before:.3f} -> {after:.3f}: 6 steps, {tokens} tokens"
    assert re.fullmatch(rf"{end} generated in [\w. ]+\.", said[-2])
    assert said[-1] == f"Report: {workdir / 'report.html'}"


@pytest.mark.long
def test_many_seeds_run_side_by_side(tmp_path):
    workdir = tmp_path / "run"
    words = ("seeds=2", "seed=5", "warm_start=none", "steps=3")
    assert call(workdir, *words)[::2] == (0, "")
    first, *steps = rows(workdir)
    assert first["rollout/tokens"] == first["update/count"] == [0, 0]
    written = events(workdir / folder.EVENTS)
    for row in steps:
        for name in set(row) - {"step"}:
            assert len(row[name]) == 2
        one, other = row["policy/entropy_nats"]
        assert one != other
        mean = written[row["step"], "policy/entropy_nats"]
        assert mean == np.float32((one + other) / 2)
    seeds = [row["seed"] for row in lines(workdir / "rollouts.jsonl")]
    assert seeds == ([5] * 8 + [6] * 8) * 3
    after = json.loads((workdir / "evaluation.json").read_text())["after"]
    assert np.shape(after["pass_rates"]) == (2, 8)


@long
def test_a_staged_run_leaves_the_same_files_and_the_time_of_its_verifier(
    tmp_path, whole
):
    assert call(tmp_path / "run", "staged=true", "steps=3")[::2] == (0, "")
    assert {file.name for file in (tmp_path / "run").iterdir()} == WRITTEN
    staged, jitted = (
        lines(path / "metrics.jsonl") for path in (tmp_path / "run", whole[0])
    )
    for row, other in zip(staged[1:], jitted[1:], strict=False):
        times = {f"time/{stage}_s" for stage in ("rollout", "verify", "update")}
        assert set(row) - times >= set(other) - {"time/step_s"} - EVALUATED
        assert set(row) >= times
        assert row["rollout/tokens"] == other["rollout/tokens"]
        np.testing.assert_allclose(row["loss/mean"], other["loss/mean"], atol=1e-5)


# What is missing, dead or not finite


def test_what_a_verifier_cannot_tell_is_null_and_counted(tmp_path):
    status, _, _ = call(
        tmp_path / "run", "task.on_device=false", "task.broken=2", "steps=2"
    )
    assert status == 0
    text = (tmp_path / "run/rollouts.jsonl").read_text()
    assert "NaN" not in text + (tmp_path / "run/metrics.jsonl").read_text()
    completions = lines(tmp_path / "run/rollouts.jsonl")
    told = [row["outcome"] is not None for row in completions]
    assert 0 < sum(told) < len(told)
    assert all(row["advantage"] == 0 for row in completions if row["outcome"] is None)
    missing = [
        row["outcome/missing"] for row in lines(tmp_path / "run/metrics.jsonl")[1:]
    ]
    assert 0 < max(missing) < 16


@long
def test_a_verifier_that_knows_nothing_stops_a_run_and_its_steps_change_nothing(
    tmp_path, monkeypatch
):
    config = {"task.on_device": False, "task.broken": 1, "steps": 8}
    words = ("task.on_device=false", "task.broken=1", "steps=8")
    why = "(error: ValueError: cannot tell)"
    assert call(tmp_path / "run", *words)[::2] == (
        1,
        "curax.train: the verifier gave no outcome for any held-out completion "
        f"{why}, so the run stops before its first step; mend the verifier and go on "
        "with --resume.\n",
    )
    known = [(np.full(8, rate), np.full(8, rate), {}) for rate in (0.0, 0.5, 1.0)]
    # The best checkpoint is kept: that of step 0.
    monkeypatch.setattr(loops.Loop, "evaluate", lambda self, state: known.pop())
    assert call(tmp_path / "run", *words, resume=True)[::2] == (
        1,
        "curax.train: the verifier gave no outcome for any completion in the last 5 "
        f"steps up to step 5 {why}, so the run stops, saved as step 6; mend the "
        "verifier and go on with --resume.\n",
    )
    for row in lines(tmp_path / "run/metrics.jsonl")[1:]:
        assert row["outcome/mean"] is None
        assert row["outcome/missing"] == row["rollout/drawn"] == 16
        assert (row["update/count"], row["update/skipped"], row["train/tokens"]) == (
            0,
            2,
            0,
        )
        assert row["loss/mean"] == row["gradient/norm"] == 0
    changed = override(small.get_config(), config)
    (start, _), (end, _) = (state(tmp_path / "run", step, changed) for step in (0, 6))
    jax.tree.map(np.testing.assert_array_equal, start.params, end.params)


def test_updates_that_are_not_finite_are_skipped_until_there_were_too_many(tmp_path):
    words = ("optimizer.learning_rate=1e+30", "update.patience=3", "steps=20")
    status, out, err = call(tmp_path / "run", *words)
    assert status == 1
    metrics = lines(tmp_path / "run/metrics.jsonl")
    first = next(row["step"] for row in metrics if row.get("update/nonfinite"))
    assert re.search(
        rf"\nWarning: (loss/mean|gradient/norm) is (nan|inf) at step {first}: the "
        r"update was skipped; after 3 such steps in a row the run stops\.\n",
        out,
    )
    assert out.count("Warning") == 1
    assert re.fullmatch(
        rf"curax\.train: (loss/mean|gradient/norm) is (nan|inf) at step {first + 2}, "
        r"as in all of the last 3 steps, so the run stops; what it had learnt until "
        rf"then is saved as step {metrics[-1]['step']}; start anew with a lower "
        r"optimizer\.learning_rate\.\n",
        err,
    )
    assert "Report" not in out
    for row in metrics[first:]:
        assert (row["update/nonfinite"] > 0) == (row["step"] >= first)
        assert row["update/skipped"] >= row["update/nonfinite"]
    last, totals = state(tmp_path / "run", metrics[-1]["step"])
    jax.tree.map(lambda x: np.testing.assert_array_equal(np.isfinite(x), True), last)
    assert totals["nonfinite_in_a_row"] == metrics[-1]["step"] - first + 1
    # It is no better for being resumed, and says so at once.
    assert call(tmp_path / "run", *words, resume=True)[0] == 1
    assert lines(tmp_path / "run/metrics.jsonl")[-1]["step"] <= metrics[-1]["step"] + 2


@long
def test_a_few_steps_that_are_not_finite_are_let_pass(tmp_path, monkeypatch):
    advance = loops.Jitted.advance

    def now_and_then(self, state, times):
        state, metrics, shown = advance(self, state, times)
        for row, number in zip(metrics, range(int(state.step), 0, -1), strict=False):
            row["update/nonfinite"] = np.float32(number % 3 != 0)
        return state, metrics, shown

    monkeypatch.setattr(loops.Jitted, "advance", now_and_then)
    assert call(tmp_path / "run", "update.patience=3")[::2] == (0, "")


@pytest.mark.long
def test_of_many_seeds_one_may_diverge(tmp_path, monkeypatch):
    advance = loops.Jitted.advance

    def first_seed(self, state, times):
        state, metrics, shown = advance(self, state, times)
        for row in metrics:
            row["update/nonfinite"] = np.array([1.0, 0.0])
        return state, metrics, shown

    monkeypatch.setattr(loops.Jitted, "advance", first_seed)
    words = ("update.patience=1", "seeds=2", "seed=5", "warm_start=none", "steps=3")
    status, out, err = call(tmp_path / "run", *words)
    assert (status, err) == (0, "")
    assert out.count("the update was skipped") == 1


@pytest.mark.first(1)
@pytest.mark.parametrize("bound", [1e-9, 1.0])
def test_ratios_off_one_before_any_update_are_told_with_the_likely_cause(
    tmp_path, bound
):
    status, out, _ = call(tmp_path / "run", f"logging.drift_nats={bound}")
    assert status == 0
    drift = lines(tmp_path / "run/metrics.jsonl")[1]["sampler/drift_nats"]
    sentence = f"Warning: sampler/drift_nats is {drift:.3g} at step 1, above 1e-09: "
    assert (sentence in out) == (bound < drift)


def test_the_bound_of_the_alarm_is_the_rounding_of_the_dtype():
    config = small.get_config()
    assert run.drift_bound(config, "cpu") == 1e-4
    assert run.drift_bound(override(config, ["logging.drift_nats=0.3"]), "cpu") == 0.3
    assert run.drift_bound(config, "tpu") == 0.2
    coarse = partial(config.model, dtype=jax.numpy.bfloat16)
    assert run.drift_bound(replace(config, model=coarse), "cpu") == 0.2


# Stopped and resumed


@pytest.fixture
def signals(monkeypatch):
    """Send a signal when the loop does something for the n-th time."""

    def when(method: str, n: int, number: signal.Signals):
        original, calls = getattr(loops.Jitted, method), []

        def sending(self, *args):
            calls.append(args)
            if len(calls) == n:
                os.kill(os.getpid(), number)
                time.sleep(0.2)
            return original(self, *args)

        monkeypatch.setattr(loops.Jitted, method, sending)

    return when


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("method", "n", "number", "steps"),
    [
        ("warm", 2, signal.SIGINT, None),
        ("evaluate", 1, signal.SIGTERM, 0),
        ("advance", 2, signal.SIGINT, 3),
        ("advance", 3, signal.SIGTERM, 4),
    ],
)
def test_a_signal_ends_the_chunk_and_the_resumed_run_is_the_same(
    tmp_path, whole, signals, method, n, number, steps
):
    workdir = tmp_path / "run"
    signals(method, n, number)
    status, out, err = call(workdir)
    assert (status, err) == (128 + number, "")
    assert "Stopping after this chunk of steps; once more to stop at once.\n" in out
    command = f"-m curax.train --config {small.FILE} --workdir {workdir} --resume"
    assert out.splitlines()[-1] == f"Stopped; to go on: {sys.orig_argv[0]} {command}"
    assert checkpoint.latest(workdir / "checkpoints") == steps
    assert call(workdir, resume=True)[::2] == (0, "")
    assert_same_run(workdir, whole[0])


def test_a_run_killed_between_its_rows_and_its_checkpoint_loses_and_doubles_nothing(
    tmp_path, whole
):
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints" / "6")
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss/me')
    assert call(workdir, resume=True)[::2] == (0, "")
    assert_same_run(workdir, whole[0])


@long
def test_a_finished_run_goes_on_with_more_steps(tmp_path, whole):
    short, long = tmp_path / "short", tmp_path / "long"
    shutil.copytree(whole[0], short)
    status, out, err = call(short, "steps=8", resume=True)
    assert (status, err) == (0, "")
    assert re.search(r"tokens generated, the last 2 steps in [\w. ]+\.\nReport", out)
    assert call(long, "steps=8")[::2] == (0, "")
    assert json.loads((short / "config.json").read_text())["steps"] == 8
    assert_same_run(short, long, step=8)


@long
def test_a_run_goes_on_with_8_then_1_then_4_devices_and_is_the_run_that_it_was(
    tmp_path, whole
):
    workdir = tmp_path / "run"
    meshes = {2: (4, 2, 1), 4: (1, 1, 1), 6: (1, 2, 2)}
    for steps, sizes in meshes.items():
        axes = dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))
        words = [f"mesh.{axis}={size}" for axis, size in axes.items()]
        got = call(workdir, f"steps={steps}", *words, resume=steps > 2)
        assert got[::2] == (0, ""), sizes
        now = json.loads((workdir / "config.json").read_text())["mesh"]
        assert now == axes | {"cut_sampler": False, "draw_share": None}
    drawn = [lines(path / "rollouts.jsonl") for path in (workdir, whole[0])]
    same = ("step", "prompt_id", "slot", "tokens", "outcome", "kept")
    for mine, theirs in zip(*drawn, strict=True):
        assert [mine[name] for name in same] == [theirs[name] for name in same]
    mine, theirs = (state(path)[0].params for path in (workdir, whole[0]))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), mine, theirs)


def test_a_report_for_which_there_is_no_room_is_told_in_a_sentence(
    tmp_path, whole, monkeypatch
):
    monkeypatch.undo()
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    before = snapshot(workdir)
    with files_of_at_most(50_000):
        status, _, err = call(workdir, resume=True)
    assert status == 1
    assert re.fullmatch(
        rf"curax\.train: the run is complete, but {workdir}/\w+\.(png|html) cannot be "
        r"written \(File too large\); mend that and write it with --resume\.\n",
        err,
    )
    after = snapshot(workdir)
    assert set(after) == set(before)
    page = workdir / "report.html"
    assert after.get(page) == before.get(page)


@long
def test_a_finished_run_says_so_and_its_report_is_written_again(
    tmp_path, whole, monkeypatch
):
    monkeypatch.undo()
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    (workdir / "report.html").unlink()
    before = snapshot(workdir)
    status, out, err = call(workdir, resume=True)
    assert (status, err) == (0, "")
    assert out.startswith(
        "Complete at step 6; to go on, --set a higher steps.\nHeld-out "
    )
    assert (workdir / "report.html").exists()
    for path in before:
        if path.suffix != ".png" and path != workdir:
            assert snapshot(workdir)[path] == before[path]


@pytest.mark.parametrize("latest", ["6", "4"])
@pytest.mark.parametrize(
    ("name", "line", "text", "what"),
    [
        ("metrics.jsonl", 3, '{"step": 2, "lo', ":3: not a JSON object; "),
        ("metrics.jsonl", 3, "null", ":3: not a JSON object; "),
        ("metrics.jsonl", 4, '{"step": 2}', ":4: step 2 behind step 2; "),
        ("rollouts.jsonl", 9, '{"step": "2"}', ":9: no number under step; "),
        ("warm_start.jsonl", 2, '{"a": 1}', ":2: no number under step; "),
        ("evaluation.json", 1, "[1]", ":1: not a JSON object; "),
        ("questions.json", 1, "[]", ":1: not a JSON object; "),
        ("config.json", 1, "5", ":1: not a JSON object; "),
    ],
)
def test_files_damaged_in_front_of_a_checkpoint_are_told_and_left_alone(
    tmp_path, whole, latest, name, line, text, what
):
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    if latest == "4":
        shutil.rmtree(workdir / "checkpoints" / "6")
    path = workdir / name
    rows = path.read_text().splitlines(keepends=True) if path.exists() else [""]
    rows[line - 1 :] = [text + "\n", *(rows[line:] if name.endswith("l") else ())]
    path.write_text("".join(rows))
    before = snapshot(workdir)
    for words in ((), ("steps=8",)):
        status, out, err = call(workdir, *words, resume=True)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"curax.train: {path}{what}")
        assert snapshot(workdir) == before


def spoil(workdir, step):
    """Cut the data of a checkpoint in half."""
    for file in (workdir / "checkpoints" / str(step) / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@long
def test_a_truncated_checkpoint_is_told_and_the_one_before_it_used(tmp_path, whole):
    workdir, other = tmp_path / "run", tmp_path / "other"
    for path in (workdir, other):
        shutil.copytree(whole[0], path)
    spoil(workdir, 6)
    status, out, err = call(workdir, "steps=8", resume=True)
    assert (status, err) == (0, "")
    aside = workdir / "checkpoints" / "6.unreadable"
    assert re.search(
        r"Warning: the checkpoint of step 6 cannot be read \(\w+\), so the run goes on "
        rf"from step 4; it is kept as {aside}\.\n",
        out,
    )
    assert "generated, the last 4 steps in " in out
    assert aside.is_dir()
    assert call(other, "steps=8", resume=True)[0] == 0
    assert_same_run(workdir, other, step=8)


def test_of_a_complete_run_the_last_steps_are_made_again_where_they_cannot_be_read(
    tmp_path, whole
):
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    spoil(workdir, 6)
    status, out, err = call(workdir, resume=True)
    assert (status, err) == (0, "")
    assert "Complete at step" not in out
    assert "Warning: the checkpoint of step 6 cannot be read (" in out
    assert "generated, the last 2 steps in " in out
    assert_same_run(workdir, whole[0])


@pytest.mark.parametrize("words", [(), ("steps=8",)])
def test_where_no_checkpoint_can_be_read_the_run_stops_and_changes_nothing(
    tmp_path, whole, words
):
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    for path in (workdir / "checkpoints").iterdir():
        spoil(workdir, path.name)
    metrics = (workdir / "metrics.jsonl").read_bytes()
    status, _, err = call(workdir, *words, resume=True)
    assert status == 1
    assert re.fullmatch(
        rf"curax\.train: no checkpoint can be read, the newest is {workdir}/checkpoints"
        r"/6 \(\w+\); bring one back, or start anew in another --workdir\.\n",
        err,
    )
    assert (workdir / "metrics.jsonl").read_bytes() == metrics


def test_a_run_whose_model_has_other_shapes_by_now_is_refused_and_left_alone(
    tmp_path, whole, monkeypatch
):
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    before = snapshot(workdir)
    # As where the code behind a config has changed, of which config.json says nothing.
    wider = override(load(small.FILE), ["model.mlp_width=24"])
    monkeypatch.setattr(run, "make_loop", lambda _: remembered(wider))
    assert call(workdir, "steps=8", resume=True) == (
        2,
        "",
        f"curax.train: params.layers.0.down.kernel is float32[16, 16] in {workdir}/"
        "checkpoints/6 and float32[24, 16] now; bring back the model or method that "
        "the run began with, or name another run folder.\n",
    )
    assert snapshot(workdir) == before


@long
def test_a_warm_start_goes_on_where_it_was_saved(tmp_path, whole, monkeypatch):
    workdir, done = tmp_path / "run", []
    warm = loops.Loop.warm

    def killed(self, state, times):
        if sum(done) == 4:
            raise KeyboardInterrupt
        done.append(times)
        return warm(self, state, times)

    with monkeypatch.context() as patch:
        patch.setattr(loops.Loop, "warm", killed)
        assert call(workdir)[0] == 130
    assert (workdir / "warm_start").is_dir()
    monkeypatch.setattr(
        loops.Loop, "warm", lambda *args: done.append(args[-1]) or warm(*args)
    )
    assert call(workdir, resume=True)[::2] == (0, "")
    assert done == [2, 2, 1]
    assert not (workdir / "warm_start").exists()
    assert_same_run(workdir, whole[0])


def test_a_damaged_warm_start_begins_again(tmp_path, whole, signals):
    workdir = tmp_path / "run"
    signals("warm", 2, signal.SIGTERM)
    assert call(workdir)[0] == 143
    (saved,) = (workdir / "warm_start").iterdir()
    (saved / "state" / "_METADATA").write_text("{")
    status, out, _ = call(workdir, resume=True)
    assert status == 0
    assert re.search(
        rf"Warning: {saved} \(\w+\) cannot be read; the warm start begins again\.\n",
        out,
    )
    assert_same_run(workdir, whole[0])


def environment() -> dict[str, str]:
    """Of processes: as strict as this one."""
    strict = ("jax_numpy_rank_promotion", "jax_numpy_dtype_promotion")
    return {name.upper(): str(jax.config.values[name]) for name in strict}


def wait_for_row(path: Path, step: int, process: subprocess.Popen):
    """Until a step is in the metrics; its chunk may still be going on."""
    for _ in range(15_000):
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise TimeoutError


@pytest.fixture(scope="module")
def slow(tmp_path_factory, compiled):
    """The run of `killed`, which nothing interrupted."""
    workdir = tmp_path_factory.mktemp("long") / "run"
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        assert call(workdir, *killed.WORDS[1:])[::2] == (0, "")
    return workdir


@pytest.mark.first(1)
@pytest.mark.parametrize("times", [1, len(killed.MOMENTS)])
def test_a_run_killed_at_any_moment_time_and_again_is_the_run_that_was_not(
    tmp_path, slow, times
):
    """Once in the first, or each, of the moments; `killed.py` kills more often."""

    def finish(workdir, env):
        assert call(workdir, *killed.WORDS[1:], resume=True)[::2] == (0, "")

    moments, env = [], environment()
    for moment, workdir, stopped in killed.kill(
        tmp_path, times, seed=0, env=env, finish=finish
    ):
        moments.append(moment)
        if not stopped:
            assert_same_run(workdir, slow, step=killed.STEPS)
    assert set(moments) == {*killed.MOMENTS[:times], "end"}


@long
def test_an_interrupted_process_saves_and_says_how_to_go_on(tmp_path, slow):
    workdir = tmp_path / "run"
    metrics, env = workdir / "metrics.jsonl", environment()
    command = None
    for number, step in ((signal.SIGTERM, 5), (signal.SIGINT, 17)):
        process = killed.start(workdir, env, command)
        wait_for_row(metrics, step, process)
        process.send_signal(number)
        out, err = process.communicate()
        assert (process.returncode, err) == (128 + number, "")
        command = shlex.split(out.splitlines()[-1].removeprefix("Stopped; to go on:"))
        last = lines(metrics)[-1]["step"]
        assert step <= last < killed.STEPS
        assert checkpoint.latest(workdir / "checkpoints") == last
    assert call(workdir, *killed.WORDS[1:], resume=True)[0] == 0
    assert_same_run(workdir, slow, step=killed.STEPS)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("room", "what", "behind"),
    [
        (15, "warm_start", "there is no checkpoint yet, so it will start again"),
        (35, "rollouts.jsonl", r"the checkpoint of step (\d+) is intact"),
    ],
)
def test_a_disk_without_room_stops_the_run_in_a_sentence_and_nothing_is_lost(
    tmp_path, slow, room, what, behind, monkeypatch
):
    workdir, close = tmp_path / "run", dashboards.TensorBoard.close

    def full(self):
        close(self)
        raise OSError(28, "No space left on device")

    with files_of_at_most(room << 10), monkeypatch.context() as patch:
        patch.setattr(dashboards.TensorBoard, "close", full)  # the first is told
        status, out, err = call(workdir, *killed.WORDS[1:])
    assert status == 1, (out, err)
    told = re.fullmatch(
        rf"curax\.train: {workdir}/{what} cannot be written \(File too large\); mend "
        rf"that and go on with --resume: {behind}\.\n",
        err,
    )
    assert told, err
    if told.groups():
        assert checkpoint.latest(workdir / "checkpoints") == int(told[1])
    assert call(workdir, *killed.WORDS[1:], resume=True)[::2] == (0, "")
    assert_same_run(workdir, slow, step=killed.STEPS)


@long
def test_a_run_for_which_there_is_no_memory_stops_in_a_sentence(tmp_path, monkeypatch):
    def full(*_):
        raise MemoryError("a.safetensors has 1.5 GiB")

    what = "curax.train: there is not enough memory (a.safetensors has 1.5 GiB); "
    with monkeypatch.context() as patch:
        patch.setattr(run, "make_loop", full)
        assert call(tmp_path / "none") == (
            1,
            "",
            f"{what}ask for less, or allow more.\n",
        )
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr(loops.Jitted, "advance", full)
    workdir = tmp_path / "run"
    assert call(workdir, "warm_start=none")[::2] == (
        1,
        f"{what}mend that and go on with --resume: the checkpoint of step 0 is "
        "intact.\n",
    )


@long
def test_a_folder_that_is_removed_during_a_run_is_told_and_not_made_again(
    tmp_path, monkeypatch
):
    workdir, advance = tmp_path / "run", loops.Jitted.advance

    def removing(self, state, times):
        shutil.rmtree(workdir)
        return advance(self, state, times)

    monkeypatch.setattr(loops.Jitted, "advance", removing)
    assert call(workdir, "warm_start=none")[::2] == (
        1,
        f"curax.train: {workdir} was removed or renamed while the run wrote to it, so "
        "the run stops; bring it back and go on with --resume, or start anew in "
        "another --workdir.\n",
    )
    assert not workdir.exists()


# Bad input

# What is typed, and the sentence that is printed; the names in braces are paths.
USAGE = "; python -m curax train --help lists what there is."
SMALL = "--config {small} --workdir {new}"
THERE = "--config {small} --workdir {run}"
BAD = {
    "--foo": f"unrecognized arguments: --foo{USAGE}",
    "--work a": "--work is no option; did you mean --workdir?",
    "--config": f"argument --config: expected one argument{USAGE}",
    "--set": f"argument --set: expected at least one argument{USAGE}",
    "--config {new}/quick.py": "{new}/quick.py: there is no such file; no Python file "
    "is beside it either.",
    "--config {syntax} --workdir {new}": "{syntax}:2: SyntaxError: '(' was never "
    "closed; mend that line.",
    "--config {traced} --workdir {new}": "loss=config_traced.loss fails at {traced}:6 "
    "(TypeError: dot_general requires contracting dimensions to have the same shape, "
    "got (6,) and (4,)); mend that line, or the options of loss.",
    f"{SMALL} --set model.dtype=bf16": "model.dtype='bf16' fails at {transformer}: "
    "TypeError: data type 'bf16' not understood; set model.dtype to another value.",
    f"{SMALL} --set loss.hihg=0.3": "loss.hihg=0.3: loss.clipped_ratio has no option "
    "'hihg'; did you mean 'high'?",
    f"{SMALL} --set stepz=3": "stepz=3: the config has no option 'stepz'; did you mean "
    "'steps'?",
    f"{SMALL} --set steps": "'steps' sets nothing; write --set NAME=VALUE, for example "
    "--set steps=200.",
    f"{SMALL} --set steps=many": "steps=many: expected an integer (it is 6 now); write "
    "for example --set steps=6.",
    f"{SMALL} --set update.minibatches=3": "update.minibatches=3 times "
    "update.micro_batches=1 must divide the 16 rows trained per step; set them to 2 "
    "and 1.",
    "--config {pods} --workdir {new} --set downsample.m=99": "sampling.group_size=32 "
    "cannot keep downsample.m=99 completions; set downsample.m to at most 32.",
    f"{SMALL} --set model.layers=0": "model.layers=0 must be at least 1; set "
    "model.layers to 1.",
    f"{SMALL} --set model.kv_heads=4": "model.heads=2 is no multiple of kv_heads=4; "
    "set model.kv_heads to 2.",
    f"{SMALL} --set model.head_dim=7": "model.head_dim=7 must be even, for rotary "
    "halves; set it to 8.",
    f"{SMALL} --set task.num_held_out=0": "task.num_held_out=0 must be at least 1; set "
    "task.num_held_out to 1.",
    f"{SMALL} --set evaluation.prompts=33": "evaluation.prompts=33 are more than "
    "the task holds out; set evaluation.prompts to at most 32.",
    f"{SMALL} --set mesh.data=64": "mesh.data=64 x mesh.fsdp=1 x mesh.tensor=1 takes "
    "64 devices; set them so that their product is at most the 8 that are here.",
    "--config {small} --workdir {file}": "--workdir {file}: {file} is a file; name a "
    "folder.",
    "--config {small} --workdir {file}/a": "--workdir {file}/a: {file} is a file; name "
    "a folder.",
    "--config {small} --workdir /proc/run": "--workdir /proc/run cannot be written: No "
    "such file or directory; name another folder.",
    THERE: "--workdir {run} holds config.json of a run already; add --resume to go on "
    "with that run, or name another folder.",
    f"{SMALL} --resume": "--workdir {new} holds no config.json, so no run to resume; "
    "leave --resume out to start one, or name the folder of a run.",
    "quickstart --workdir {run} --resume": "--resume: {run} holds a run of {small}, "
    "and task=curax.tasks.chain.task of quickstart differs from config.task there; "
    "name {small}, or another --workdir.",
    f"{THERE} --resume --set steps=5": "--resume: steps=5 differs from 6 in "
    "{run}/config.json; steps may only grow, so set steps back or name another "
    "--workdir.",
    f"{THERE} --resume --set steps=8 loss.high=0.5": "--resume: loss.high=0.5 differs "
    "from 0.28 in {run}/config.json; a run keeps its config, so set loss.high back or "
    "name another --workdir.",
}
TRACED = """
from dataclasses import replace
from small import get_config as small

def loss(logp, logp_old, advantage, mask):
    return logp @ logp

def get_config():
    return replace(small(), loss=loss)
"""


def test_a_folder_that_another_process_writes_is_refused_and_left_alone(whole):
    workdir, before = whole[0], None
    with lock.hold(workdir, "--workdir"):
        before = snapshot(workdir)
        for resume in (False, True):
            status, out, err = call(workdir, "steps=8", resume=resume)
            assert (status, out) == (2, "")
            assert err.startswith(
                f"curax.train: --workdir {workdir} is being written by process "
                f"{os.getpid()} on "
            )
        assert snapshot(workdir) == before


@long
def test_a_folder_of_a_run_killed_before_its_first_write_is_begun(tmp_path):
    (tmp_path / lock.FILE).write_text('{"pid": 1')
    assert call(tmp_path, "stepz=3")[0] == 2
    assert call(tmp_path, "steps=0", "warm_start=none")[0] == 0
    assert not (tmp_path / lock.FILE).exists()


def line_of_dtypes() -> int:
    """The line of the transformer that reads its dtypes."""
    lines = Path(transformer.__file__).read_text().splitlines()
    (at,) = (i for i, line in enumerate(lines, 1) if "=jnp.dtype(dtype)," in line)
    return at


@pytest.mark.parametrize("typed", BAD)
def test_bad_input_gets_one_sentence_and_nothing_is_written(tmp_path, whole, typed):
    paths = {
        "small": small.FILE,
        "pods": ROOT / "configs" / "pods_published.py",
        "run": whole[0],
        "transformer": f"{Path(transformer.__file__)}:{line_of_dtypes()}",
        **{name: tmp_path / name for name in ("new", "file", "syntax", "traced")},
    }
    for name, text in (("file", ""), ("syntax", "\nx = (1"), ("traced", TRACED)):
        paths[name].write_text(text)
    before = snapshot(tmp_path), snapshot(whole[0])
    got = main(*typed.format(**paths).split())
    assert got == (2, "", f"curax.train: {BAD[typed].format(**paths)}\n")
    assert (snapshot(tmp_path), snapshot(whole[0])) == before


def test_the_default_is_the_quickstart_in_a_folder_of_its_name(monkeypatch):
    seen = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run, "train", lambda *args, **named: seen.append(args) or 0)
    monkeypatch.setattr(folder, "check", lambda *args, **named: None)
    said = "No recipe is named, so this is quickstart; curax recipes lists all.\n"
    assert main() == (0, said, "")
    assert main("--config", str(small.FILE)) == (0, "", "")
    assert [str(workdir) for _, workdir in seen] == ["runs/quickstart", "runs/small"]
    assert describe(seen[0][0]) == describe(load(small.QUICKSTART))


def test_a_trace_for_which_there_is_no_room_is_told(tmp_path, monkeypatch):
    def full():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED; No space left on device")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    traced = Profile(tmp_path, 1)
    traced.begin(1, 1)
    assert message(NotWrittenError, traced.end, 2) == (
        f"{tmp_path / 'profile'} cannot be written (No space left on device)"
    )


@pytest.mark.long
def test_a_profile_traces_some_steps_and_changes_none(whole, tmp_path):
    workdir, _ = whole
    status, out, err = main(
        *("--config", str(small.FILE), "--workdir", str(tmp_path / "run")),
        *("--profile", "3"),
    )
    assert (status, err) == (0, "")
    assert f"A trace of 3 steps is written to {tmp_path}/run/profile.\n" in out
    files = {path.name for path in (tmp_path / "run" / "profile").rglob("*.*")}
    assert "perfetto_trace.json.gz" in files
    assert any(name.endswith(".xplane.pb") for name in files)
    config = load(small.FILE)
    assert_same_run(tmp_path / "run", workdir, step=6, config=config)
    for wrong in ("0", "-1", "two"):
        said = refusal(train.main, "quickstart", f"--profile={wrong}")
        assert f"argument --profile: {wrong} is no whole number from 1 on;" in said


@pytest.mark.first(1)
@pytest.mark.parametrize("staged", [False, True])
def test_a_dry_run_compiles_all_and_writes_nothing(
    whole, tmp_path, monkeypatch, staged
):
    ran = []
    monkeypatch.setattr(loops.Jitted, "advance", lambda *_: ran.append("advance"))
    monkeypatch.setattr(loops.Loop, "evaluate", lambda *_: ran.append("evaluate"))
    argv = ["--config", str(small.FILE), "--set", f"staged={staged}"]
    folder = tmp_path / "run"
    status, out, err = main(*argv, "--workdir", str(folder), "--dry-run")
    assert (status, err, ran) == (0, "", [])
    assert not folder.exists()
    assert "A step: 4 prompts, 16 completions of at most 2 tokens, 16 of them" in out
    assert "GiB of a device for 16 slots of 2 tokens, and 4 prompts of" in out
    assert f"without --dry-run: a new run in {folder}." in out
    state, rows = out.partition("State, MiB of a device: ")[2].split("\n\n")[:2]
    assert "parameters" in state
    assert "optimizer" in state
    programs = {
        row.split("  ")[0].strip(): row.split()[-6:-2] for row in rows.splitlines()
    }
    update = "learn" if staged else "steps"
    assert {"initial", "warm start", "begin", "held-out draw", update} <= set(programs)
    for name in ("held-out draw", update):
        arguments, outputs, temporaries, total = map(float, programs[name])
        assert total == pytest.approx(arguments + outputs + temporaries, abs=0.03)
        assert temporaries > 0

    before = snapshot(whole[0])
    monkeypatch.setattr(dry_run, "device_bytes", lambda: 1)
    argv = [*argv[:2], "--workdir", str(whole[0]), "--dry-run"]
    status, out, err = main(*argv, "--resume", "--set", "steps=8")
    assert (status, err) == (1, "")
    assert "It does not fit: at most" in out
    assert f"without --dry-run: {whole[0]}, step 6." in out
    status, out, err = main(*argv)  # sizes are asked for, not whether a run may begin
    assert (status, err) == (1, "")
    assert f"{whole[0]} holds a run, so add --resume or name another --workdir." in out
    assert snapshot(whole[0]) == before


@pytest.mark.long
def test_a_dry_run_of_a_run_at_step_0_names_that_step(tmp_path, monkeypatch):
    where = tmp_path / "run"
    argv = ["--config", str(small.FILE), "--workdir", str(where)]
    assert main(*argv, "--set", "steps=0")[0] == 0
    monkeypatch.setattr(folder, "grader_warning", lambda *_: "another grader.")
    status, out, err = main(*argv, "--resume", "--dry-run")
    assert (status, err) == (0, "")
    assert "Warning: another grader.\n" in out
    assert f"without --dry-run: {where}, step 0." in out
