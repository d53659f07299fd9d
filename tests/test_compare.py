"""The command: programs side by side, a comparison that was killed, bad input."""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny_experiment
import words
from outputs import refusal

from curax import advantage, loss
from curax.compare import __main__ as compare
from curax.compare import analysis, comparison, figures, programs, runner
from curax.compare import experiment as experiments
from curax.config import ConfigError, Evaluation, Logging, override
from curax.models import pretrained
from curax.step import loops
from curax.step.build import build

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "tiny_experiment.py"
SEEDS = 2


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Programs of equal sweeps serve again; `test_comparison` looks at all pictures."""
    lanes, made = programs.lanes, {}

    def remembered(sweep):
        if sweep.key not in made:
            made[sweep.key] = lanes(sweep)
        return made[sweep.key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "lanes", remembered)
        patch.setattr(figures, "PICTURES", figures.PICTURES[:1])
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a comparison that nobody disturbed, its costs measured."""
    workdir = tmp_path_factory.mktemp("compare") / "whole"
    assert compare.main([str(FILE), "--workdir", str(workdir)]) == 0
    return workdir


ON_HOST = """
import dataclasses
import tiny_experiment
from curax.types import Terms

def terms(**options):
    made = tiny_experiment.small.get_config().task()
    return dataclasses.replace(
        made, terms=Terms(weights={}, outcome="right", verify_all=dict), on_device=False
    )

ON_HOST = {"task.on_device": False}

def get_experiment():
    own = tiny_experiment.get_experiment()
    name, *_ = own.recipes
    recipes = {name: own.recipes[name]}
    return dataclasses.replace(own, recipes=recipes, sweep={}, common=ON_HOST)
"""
OF_FILES = """
from functools import partial
import tiny_experiment, tiny
from dataclasses import replace
from curax.config import override
from curax.tasks import file_task
from curax.verify import graders

def get_experiment():
    own = tiny_experiment.get_experiment()
    task = partial(
        file_task.task, tokenizer="{folder}/tokenizer", train="{folder}/train.jsonl",
        held_out="{folder}/test.jsonl", grader=graders.numbers, workers=1,
    )
    config = replace(own.recipes["plain"], task=task, warm_start=None)
    return replace(own, recipes={{"plain": config}}, sweep={{}}, steps=2)
"""


def histories(workdir):
    """Of all arms, without seconds, which are never the same."""
    found = json.loads((workdir / "results.json").read_text())["histories"]
    return {
        name: {key: value for key, value in own.items() if key != "seconds"}
        for name, own in found.items()
    }


def test_every_arm_runs_to_the_budget_of_every_seed(whole):
    found = json.loads((whole / "results.json").read_text())
    names = [arm["name"] for arm in found["arms"]]
    assert names == [
        *("plain", "plain optimizer.learning_rate=0.003"),
        *("centred", "centred optimizer.learning_rate=0.003"),
    ]
    assert sorted(found["histories"]) == sorted(names)
    for history in found["histories"].values():
        assert min(history["drawn"][-1]) >= 100 or history["steps"][-1] == 8
        assert history["steps"] == list(range(len(history["steps"])))
        assert len(history["rate"]) == len(history["trained"]) == len(history["steps"])
        assert len(history["watched"]["outcome/mean"]) == len(history["steps"]) - 1
        assert {len(row) for row in history["updates"]} == {SEEDS}
    # One program per recipe, whose files hold the arms of both rates.
    arms = [json.loads(path.read_text()) for path in (whole / "arms").iterdir()]
    assert [len(own["arms"]) for own in arms] == [2, 2]
    assert not (whole / "checkpoints").exists()
    assert found["measured"]["drawn_s"] > 0
    assert found["measured"]["trained_s"] > 0
    assert found["prices"] == [
        found["measured"]["drawn_s"],
        found["measured"]["trained_s"],
    ]


@pytest.mark.long
def test_a_killed_comparison_goes_on_as_if_it_had_not_been(whole, tmp_path, capsys):
    workdir = tmp_path / "killed"
    words = [str(FILE), "--workdir", str(workdir), "--cost", "1:3"]
    process = subprocess.Popen(
        [sys.executable, "-m", "curax.compare", *words],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        stdout=subprocess.DEVNULL,
    )
    running = workdir / "checkpoints"
    while process.poll() is None:
        saved = [int(p.name) for p in running.glob("*/*") if p.name.isdecimal()]
        if max(saved, default=0) >= 2:
            break
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -9
    assert not list((workdir / "arms").iterdir())
    assert compare.main(words) == 0
    assert histories(workdir) == histories(whole)
    # At its end, the same command writes the report again, at another cost too.
    assert "prices" in json.loads((workdir / "results.json").read_text())
    capsys.readouterr()
    assert compare.main([*words[:-1], "2:1"]) == 0
    assert json.loads((workdir / "results.json").read_text())["prices"] == [2, 1]
    assert "warm start" not in capsys.readouterr().out


def test_a_comparison_that_was_begun_without_greedy_rates_goes_on_with_them(
    whole, tmp_path, monkeypatch
):
    path = tmp_path / "plain.py"
    path.write_text(ON_HOST.replace(", sweep={}, common=ON_HOST", ""))
    workdir = tmp_path / "runs"
    words = [str(path), "--workdir", str(workdir), "--cost", "1:3"]
    pass_rates, begun = loops.Lanes.pass_rates, []

    def sampled(self, state):
        begun.append(None)
        if len(begun) > 3:
            raise KeyboardInterrupt
        return pass_rates(self, state)[:1]

    with monkeypatch.context() as before:
        before.setattr(analysis, "RATES", ("rate",))
        before.setattr(loops.Lanes, "pass_rates", sampled)
        assert compare.main(words) == 130
    assert compare.main(words) == 0
    found = histories(workdir)
    assert len(found) == 2
    for arm, got in found.items():
        want, greedy = histories(whole)[arm], got.pop("greedy")
        assert greedy == [[None] * SEEDS] * 3 + want["greedy"][3:]
        assert got == {name: want[name] for name in got}


@pytest.mark.parametrize("name", ["reinforce_ada", "sage", "dro"])
def test_the_arms_of_an_experiment_share_their_warm_start(name):
    experiment = experiments.load_experiment(ROOT / "experiments" / name)
    found = experiments.arms(experiment)
    assert [arm.name for arm in found] == list(experiment.recipes)
    assert len({experiments.warm_key(experiment, arm) for arm in found}) == 1
    assert {arm.config.update.minibatches for arm in found} == {1}


def test_the_experiment_of_the_page_can_be_run(tmp_path):
    page = (ROOT / "docs" / "compare.md").read_text()
    (text,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "rates.py").write_text(text)
    experiment = experiments.load_experiment(tmp_path / "rates.py")
    names = [arm.name for arm in experiments.arms(experiment)]
    assert names[::3] == ["rloo", "pods"]
    assert names[1] == "rloo optimizer.learning_rate=0.0001"
    assert len(names) == 6
    fields = {field.name for field in dataclasses.fields(experiment)}
    rows = re.findall(r"^\| (`.*?) \|", page, re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == fields


def test_a_group_may_be_set_of_which_the_experiment_decides_a_field():
    """It was told that it undid `every`, which nobody had written."""
    own = {"evaluation": Evaluation(prompts=8, samples=2), "logging": Logging(keep=3)}
    experiment = replace(tiny_experiment.get_experiment(), common=own, every=4)
    for arm in experiments.arms(experiment):
        assert arm.config.evaluation == Evaluation(every=4, prompts=8, samples=2)
        assert arm.config.logging == Logging(every=4, rollout_prompts=0, keep=3)


@cache
def lanes():
    experiment = tiny_experiment.get_experiment()
    arms = experiments.arms(experiment)[:2]
    (sweep,) = programs.sweeps(arms, experiment)
    return sweep, programs.lanes(sweep), experiments.warm_config(experiment, arms[0])


@pytest.mark.long
def test_a_lane_is_what_its_seed_and_magnitude_give_alone():
    sweep, many, config = lanes()
    assert sweep.settings == ("optimizer.learning_rate",)
    loop = loops.Jitted(build(config))
    warm, _ = loop.warm(loop.initial(), 1)
    alone = loops.Jitted(build(override(config, {"optimizer.learning_rate": 0.003})))
    state, want, updates = many.begin(warm), alone.begin(warm), 0
    mine = slice(SEEDS, None)  # of the second setting
    while updates < SEEDS:  # most groups of such a policy are dead
        state, (values,), _ = many.advance(state, 1)
        want, rows, _ = alone.advance(want, 1)
        for metric in programs.COUNTED.values():
            np.testing.assert_array_equal(values[metric][mine], rows[0][metric])
        updates += rows[0]["update/count"].sum()
    for got, one in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(want.params), strict=True
    ):
        np.testing.assert_allclose(got[mine], one, rtol=1e-5, atol=1e-6)
        assert np.abs(got[:SEEDS] - got[mine]).max() > 1e-3


def test_what_is_no_magnitude_runs_as_a_program_of_its_own():
    experiment = replace(
        tiny_experiment.get_experiment(), sweep={"sampling.group_size": (4, 2)}
    )
    sweeps = programs.sweeps(experiments.arms(experiment)[:2], experiment)
    assert [sweep.name for sweep in sweeps] == ["plain", "plain sampling.group_size=2"]
    assert len({sweep.key for sweep in sweeps}) == 2


def test_another_experiment_is_refused_and_arms_may_be_added(whole):
    experiment = tiny_experiment.get_experiment()
    check = partial(runner.check, whole)
    check(experiment, experiments.arms(experiment))
    more = replace(experiment, recipes={**experiment.recipes, "new": "grpo"})
    check(more, experiments.arms(more))
    for changed, said in (
        (
            replace(experiment, tokens=200),
            "a comparison with tokens=100, and it is 200",
        ),
        (replace(experiment, sweep={}), "plain optimizer.learning_rate=0.003, which"),
        (
            replace(experiment, common={"sampling.temperature": 0.5}),
            "runs of plain with sampling.temperature=1.0, and it is 0.5 now",
        ),
    ):
        with pytest.raises(experiments.ConfigError, match=said):
            check(changed, experiments.arms(changed))


def test_arms_from_other_weights_are_not_added(tmp_path):
    folder, workdir = tmp_path / "model", tmp_path / "runs"
    for path in (folder, workdir):
        path.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    model = partial(pretrained.model, path=str(folder))
    own = replace(tiny_experiment.small.get_config(), model=model)
    experiment = experiments.Experiment(recipes={"own": own}, updates=1, steps=1)
    arms = experiments.arms(experiment)
    about = runner.about(experiment, arms)
    (workdir / "experiment.json").write_text(json.dumps(about))
    runner.check(workdir, experiment, arms)
    (folder / "model.safetensors").write_bytes(b"others!")
    with pytest.raises(ConfigError, match="of own from another checkpoint than model"):
        runner.check(workdir, experiment, arms)
    (workdir / "experiment.json").write_text(json.dumps(about | {"weights": {}}))
    runner.check(workdir, experiment, arms)  # of an earlier curax


def test_arms_whose_questions_are_asked_otherwise_are_not_added(tmp_path, monkeypatch):
    folder = shutil.copytree(words.folder(), tmp_path / "words")
    path = tmp_path / "files.py"
    path.write_text(OF_FILES.format(folder=folder))
    experiment = experiments.load_experiment(path)
    arms = experiments.arms(experiment)
    about = runner.about(experiment, arms)
    (tmp_path / "experiment.json").write_text(json.dumps(about))
    file = folder / "tokenizer" / "tokenizer_config.json"
    file.write_text(file.read_text().replace("assistant", "user"))
    monkeypatch.setattr(programs, "_tasks", {})  # as another process
    with pytest.raises(ConfigError, match="another tokenizer or chat template asked"):
        runner.check(tmp_path, experiment, arms)


def test_arms_are_not_added_by_another_grader(tmp_path, monkeypatch):
    grader, path = tmp_path / "own_grader.py", tmp_path / "files.py"
    monkeypatch.syspath_prepend(tmp_path)
    grade = "def grade(prompt, completion, answer):\n    return {}\n"
    text = OF_FILES.format(folder=words.folder())
    for file, name in ((grader, "own_grader.grade"), (path, "grade")):
        grader.write_text(grade.format(0.0))
        own = text.replace("graders.numbers", name)
        path.write_text(grade.format(0.0) + "import own_grader\n" + own)
        experiment = experiments.load_experiment(path)
        arms = experiments.arms(experiment)
        about = runner.about(experiment, arms)
        (tmp_path / "experiment.json").write_text(json.dumps(about))
        file.write_text(file.read_text().replace("0.0", "1.0"))
        refused = pytest.raises(ConfigError, match="plain by another content of the f")
        with refused if file is grader else contextlib.nullcontext():
            runner.check(tmp_path, experiment, arms)


@pytest.mark.parametrize("name", ["experiment.json", "cost.json", "arms"])
def test_a_damaged_file_of_a_comparison_is_a_sentence(whole, tmp_path, name):
    workdir = tmp_path / "damaged"
    shutil.copytree(whole, workdir)
    path = workdir / name
    path = min(path.iterdir()) if path.is_dir() else path
    path.write_bytes(path.read_bytes()[:20])
    said = rf"curax\.compare: {path}:\d+: not JSON; repair or delete the file\.\n"
    assert re.fullmatch(said, refusal(compare.main, FILE, "--workdir", workdir))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A comparison that tunes two magnitudes: its experiment, its folder, the run."""
    experiment = replace(
        tiny_experiment.get_experiment(),
        sweep={},
        tune={
            "optimizer.learning_rate": (0.003, 0.03),
            "sampling.temperature": (1.0, 0.5),
        },
        tuning_seeds=3,
        tokens=40,
    )
    workdir = tmp_path_factory.mktemp("compare") / "tuned"
    run = partial(
        *(comparison.compare, experiment, experiments.arms(experiment), workdir),
        cost=(1.0, 3.0),
        name="tuned",
    )
    run()
    return experiment, workdir, run


def test_results_name_the_devices_that_ran_the_programs(tuned, tmp_path):
    experiment, workdir, run = tuned
    copied = shutil.copytree(workdir, tmp_path / "copied")
    path, *_ = sorted((copied / "arms").iterdir())
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "NVIDIA"'))
    arms = experiments.arms(experiment)
    comparison.compare(experiment, arms, copied, **run.keywords)
    found = json.loads((copied / "results.json").read_text())
    assert (found["device"], found["jax"]) == ("NVIDIA, cpu", jax.__version__)


def test_each_recipe_takes_the_best_of_its_trials_and_runs_by_fresh_seeds(tuned):
    experiment, workdir, _ = tuned
    found = json.loads((workdir / "results.json").read_text())
    assert [arm["name"] for arm in found["arms"]] == ["plain", "centred"]
    # Of each recipe one program of its trials, and one of what they took.
    each = [json.loads(path.read_text()) for path in (workdir / "arms").iterdir()]
    assert sorted(len(own["arms"]) for own in each) == [1, 1, 4, 4]
    assert sorted(own["lanes"] for own in each) == [2, 2, 12, 12]
    done, arms = runner.finished(workdir), experiments.arms(experiment)
    trials = experiments.trials(experiment, arms)
    assert {(arm.config.seed, arm.config.seeds) for arm in arms} == {(3, SEEDS)}
    assert {(arm.config.seed, arm.config.seeds) for arm in trials} == {(3 + SEEDS, 3)}
    for name in experiment.recipes:
        own = found["tuned"][name]
        tried = [arm for arm in trials if arm.recipe == name]
        assert [dict(arm.changed) for arm in tried] == [
            trial["settings"] for trial in own["trials"]
        ]
        for arm, trial in zip(tried, own["trials"], strict=True):
            history = done[arm.name]
            drawn, rate = (np.transpose(history[x]) for x in ("drawn", "rate"))
            ends = map(np.interp, [own["place"]] * 3, drawn, rate)
            assert trial["rate"] == pytest.approx(np.mean(list(ends)))
        rates = [trial["rate"] for trial in own["trials"]]
        assert own["taken"] == int(np.argmax(rates))
        assert own["axis"] == "tokens"
        assert own["place"] <= experiment.tokens
    page = (workdir / "report.html").read_text()
    assert "Tuned beforehand" in page
    assert "optimizer.learning_rate" in page


def test_an_arm_that_was_tuned_is_what_its_setting_gives_without_tuning(
    tuned, tmp_path
):
    experiment, workdir, _ = tuned
    found = json.loads((workdir / "results.json").read_text())
    own = found["tuned"]["plain"]
    plain = replace(
        experiment,
        recipes={"plain": experiment.recipes["plain"]},
        common=own["trials"][own["taken"]]["settings"],
        tune={},
    )
    comparison.compare(
        *(plain, experiments.arms(plain), tmp_path), cost=(1.0, 3.0), name="plain"
    )
    assert histories(tmp_path)["plain"] == histories(workdir)["plain"]


def test_a_tuned_comparison_goes_on_and_refuses_other_trials(tuned):
    experiment, workdir, run = tuned
    before = histories(workdir)
    for path in (workdir / "arms").iterdir():
        if "(trial)" not in path.read_text():
            path.unlink()
    run()
    assert histories(workdir) == before
    more = replace(experiment, tune={"sampling.group_size": (2,)})
    with pytest.raises(experiments.ConfigError, match=r"comparison with tune\."):
        runner.check(workdir, more, experiments.arms(more))


def test_trials_that_differ_by_a_count_are_programs_of_their_own():
    rates, sizes = (0.003, 0.03), (2, 4)
    tune = {"optimizer.learning_rate": rates, "sampling.group_size": sizes}
    experiment = replace(tiny_experiment.get_experiment(), sweep={}, tune=tune)
    trials = experiments.trials(experiment, experiments.arms(experiment)[:1])
    found = programs.sweeps(trials, experiment)
    assert [sweep.name for sweep in found] == [
        f"plain sampling.group_size={n} (trial)" for n in sizes
    ]
    for sweep in found:
        assert sweep.settings == ("optimizer.learning_rate",)
        lanes = programs.lanes(sweep).magnitudes["optimizer.learning_rate"]
        np.testing.assert_allclose(lanes, np.repeat(rates, 4))


def test_what_is_swept_is_swept_around_what_tuning_took():
    tune = {"optimizer.learning_rate": (0.003, 0.03)}
    sweep = {"sampling.temperature": (0.5,)}
    experiment = replace(tiny_experiment.get_experiment(), sweep=sweep, tune=tune)
    arms = experiments.arms(experiment)
    trials = experiments.trials(experiment, arms)
    assert len(trials) == 2 * len(experiment.recipes)
    taken = [trials[1], trials[2]]  # of plain the higher, of centred the lower
    found = {
        arm.name: [experiments.setting_of(arm.config, name) for name in (*tune, *sweep)]
        for arm in experiments.settled(arms, taken)
    }
    assert found == {
        "plain": [0.03, 1.0],
        "plain sampling.temperature=0.5": [0.03, 0.5],
        "centred": [0.003, 1.0],
        "centred sampling.temperature=0.5": [0.003, 0.5],
    }


def test_trials_are_compared_where_all_their_runs_have_come():
    def history(rates, updates):
        spent = np.array(updates, float)
        rate = np.array(rates)
        return analysis.History(rate, rate, spent * 9, spent, spent)

    slow = history([[0.0, 0.0], [0.4, 0.2], [0.9, 0.9]], [[0, 0], [2, 2], [4, 3]])
    fast = history([[0.0, 0.0], [0.5, 0.1]], [[0, 0], [5, 8]])
    axis, place, rates = analysis.trial_rates([slow, fast], {"updates": 6})
    assert (axis, place) == ("updates", 3)
    want = [(0.65 + 0.9) / 2, (0.5 * 3 / 5 + 0.1 * 3 / 8) / 2]
    np.testing.assert_allclose(rates, want)
    budgets = {"tokens": 18, "updates": 6}
    axis, place, rates = analysis.trial_rates([slow, fast], budgets)
    assert (axis, place) == ("tokens", 18)
    np.testing.assert_allclose(rates[0], 0.3)


def test_a_trial_without_outcomes_is_never_taken():
    """It has no rate, and diverged: the first NaN was the highest."""
    assert analysis.best_of([0.3, math.nan, 0.4, 0.4]) == 2
    assert analysis.best_of([math.nan, math.nan]) is None


def test_functions_that_are_swept_or_tuned_have_the_same_names_in_every_process():
    clipped = partial(loss.clipped_ratio, high=0.3)
    values = {"advantage": (advantage.leave_one_out, "curax.advantage:raw")}
    experiment = replace(
        tiny_experiment.get_experiment(), sweep=values, tune={"loss": (clipped,)}
    )
    arms = experiments.arms(experiment)
    named = [*arms, *experiments.trials(experiment, arms)]
    texts = [json.dumps([x.label, x.name, x.settings]) for x in named]
    texts.append(json.dumps(experiments.budget(experiment)))
    assert not [text for text in texts if " at 0x" in text]
    assert {arm.label for arm in named} >= {
        "plain advantage=curax.advantage.leave_one_out",
        "plain advantage=curax.advantage:raw",
        "plain loss=curax.loss.clipped_ratio(high=0.3)",
    }
    nothing = {name: [[0.0]] for name in analysis.History._fields}
    histories = {arm.name: nothing for arm in arms}
    for entry in comparison.entries(experiment, arms, histories):
        json.dumps([entry.own, entry.value])  # as results.json has them


def test_what_a_trained_token_costs_is_that_of_steps_in_which_some_train(monkeypatch):
    """A step that trains none would cost the whole update for one."""
    seconds = {"time/update_s": 2.0, "time/rollout_s": 1.0}

    def staged(parts):
        def advance(step, steps):
            numbers = range(step, step + steps)
            tokens = [
                {"train/tokens": 100 * (i > 8), "rollout/tokens": 50} for i in numbers
            ]
            return step + steps, [seconds | some for some in tokens], None

        return SimpleNamespace(advance=advance, begin=lambda warm: 0)

    monkeypatch.setattr(runner.loops, "Staged", staged)
    config = experiments.arms(tiny_experiment.get_experiment())[0].config
    found = runner.measured_cost(replace(config, seeds=1), None)
    assert (found["drawn_s"], found["trained_s"], found["steps"]) == (0.02, 0.02, 10)
    monkeypatch.setattr(runner, "MOST", 0)
    with pytest.raises(
        ConfigError, match=r"^no token trained in 0 steps .* --cost 1:3"
    ):
        runner.measured_cost(replace(config, seeds=1), None)


def test_a_cost_is_measured_again_where_the_baseline_is_another(
    whole, tmp_path, monkeypatch
):
    copied, measured = shutil.copytree(whole, tmp_path / "copied"), []

    def cost(config, warm):
        measured.append(config.advantage)
        return {"drawn_s": 1.0, "trained_s": 3.0, "device": "cpu", "steps": 5}

    monkeypatch.setattr(runner, "measured_cost", cost)
    own = tiny_experiment.get_experiment()
    for baseline in ("plain", "centred", "centred"):
        experiment = replace(own, baseline=baseline)
        arms = experiments.arms(experiment)
        comparison.compare(experiment, arms, copied, cost=None, name="copied")
    assert measured == [advantage.group_mean]
    assert json.loads((copied / "results.json").read_text())["prices"] == [1.0, 3.0]


def test_where_an_end_of_what_was_tried_is_taken_it_is_said():
    switch = [{"settings": {"a": a}, "rate": 0.0} for a in (False, True)]
    assert analysis.ends_taken({"trials": switch, "taken": 1}) == []  # nothing beyond
    rates = [{"settings": {"a": a}, "rate": 0.0} for a in np.geomspace(1, 4, 3)]
    assert analysis.ends_taken({"trials": rates, "taken": 2}) == ["a"]
    trials = [{"settings": {"a": a, "b": "x"}, "rate": 0.0} for a in (1, 2, 3)]
    tuned = [{"trials": trials, "taken": i} for i in range(3)]
    assert list(map(analysis.ends_taken, tuned)) == [["a"], [], ["a"]]
    assert analysis.tuned_texts({}) == []
    found = {"tuned": {"x": tuned[1], "y": tuned[2]}}
    assert analysis.tuned_texts(found) == [
        "x was tuned to a=2 b=x.",
        "y was tuned to a=3 b=x, an end of what was tried of a.",
    ]


HEAD = "from curax.compare.experiment import Experiment\ndef get_experiment():\n"
WHOLE = "recipes={'a': 'grpo'}, tokens=1000, steps=10"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipes={'a': 'grpoo'}, tokens=9, steps=9", "did you mean grpo or"),
        (WHOLE + ", common={'loss.hihg': 0.3}", "did you mean 'high'?"),
        (WHOLE + ", sweep={'loss.hihg': (0.3,)}", "recipe a: loss.hihg=0.3: loss"),
        (WHOLE + ", sweep={'loss.high': (0.3, 0.3)}", "two arms of one name"),
        (WHOLE + ", sweep={'loss.high': 0.3}", "is no list of values"),
        (WHOLE + ", sweep={'steps': (1, 2)}", "sets steps, which is decided by steps"),
        (WHOLE + ", tune={'loss.hihg': (0.3,)}", "recipe a: loss.hihg=0.3: loss"),
        (WHOLE + ", tune={'loss.high': 0.3}", "tune['loss.high']=0.3 is no list"),
        (WHOLE + ", tune={'seeds': (1, 2)}", "tune sets seeds, which is decided by"),
        (WHOLE + ", tune={'seed': (1, 2)}", "tune sets seed, and trials have seeds of"),
        (
            WHOLE + ", tune={'loss.high': (0.3,)}, sweep={'loss.high': (0.2,)}",
            "loss.high is swept and tuned",
        ),
        (
            WHOLE
            + ", sweep={'loss.high': (0.4,)}, conditions={'b': {'loss.high': 0.3}, "
            "'c': {}}",
            "loss.high is swept or tuned, and conditions of a differ in it (0.2 or "
            "0.3); leave it out of conditions, or of sweep and tune.",
        ),
        (
            WHOLE + ", tune={'loss': ('loss.gspo', 'loss.cispo')}, conditions={'b': "
            "{'loss.high': 0.3}, 'c': {}}",
            "loss is swept or tuned, and conditions of a differ in it (",
        ),
        (WHOLE + ", seeds=0", "seeds=0 must be at least 1; set seeds to 1."),
        (WHOLE + ", baseline='b'", "baseline='b' is none of the recipes"),
        (WHOLE + ", cost=(0.0, 0.0)", "makes everything free"),
        (WHOLE + ", common={'staged': True, 'seeds': 1}", "common sets seeds"),
        (WHOLE + ", common={'mesh.data': 2}", "mesh.data=2, and a comparison runs on"),
        (WHOLE + ", common={'memory.load': 'm.jsonl'}", "memory.load=m.jsonl is read"),
        ("recipes={'a': 'grpo', 'a': 'rloo'}, tokens=1, steps=1", "stands twice"),
        ("recipes={}, tokens=1, steps=1", "recipes is empty"),
        ("recipes={'a': 'b' * 300}, tokens=1, steps=1", "too long; name another path."),
        ("recipes={'a/b': 'grpo'}, tokens=1, steps=1", "cannot be part of a file's"),
        ("recipes={'a' * 240: 'grpo'}, tokens=1, steps=1", ", at most 200 bytes."),
        ("recipes={'a': 'grpo'}, steps=1", "neither tokens nor updates is set"),
        ("recipe={'a': 'grpo'}, steps=1", "unexpected keyword argument 'recipe'"),
        ("recipes=['grpo'], tokens=1, steps=1", "recipes=['grpo'] is no dict"),
        ("recipes={1: 'grpo'}, tokens=1, steps=1", "recipes names 1, which is no text"),
        (
            "recipes={'a': ('grpo', {}, 3)}, tokens=1, steps=1",
            "recipes['a']=('grpo', {}, 3) is no recipe; write 'grpo', or",
        ),
        ("recipes={'a': ['grpo']}, tokens=1, steps=1", "recipes['a']=['grpo'] is no r"),
        (
            "recipes={'a': ('grpo', 'loss.high=1')}, tokens=1, steps=1",
            "the second of recipes['a']='loss.high=1' is no dict",
        ),
        (WHOLE + ", common={3: 3}", "common names 3, which is no text; write '3'."),
        (WHOLE + ", sweep={3: (1,)}", "sweep names 3, which is no text"),
        (WHOLE + ", conditions={'b': None}", "conditions['b']=None is no dict"),
        (WHOLE + ", baseline=3", "baseline=3 must be text or none"),
        (WHOLE + ", cost='1:3'", "cost='1:3' must be a tuple of 2 numbers"),
        (WHOLE + ", cost=(float('inf'), 1.0)", "cost=(inf, 1.0) has no end"),
        (WHOLE + ", cost=(1e-320, 1.0)", "1.0) has no end"),
    ],
)
def test_bad_input_is_a_sentence_and_leaves_nothing(tmp_path, text, said):
    path, workdir = tmp_path / "bad.py", tmp_path / "runs"
    path.write_text(f"{HEAD}    return Experiment({text})\n")
    err = refusal(compare.main, path, "--workdir", workdir)
    assert err.startswith("curax.compare: ")
    assert said in err
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cost", "3"], "--cost 3 is not what a drawn and a trained token cost"),
        (["--cost", "1:-1"], "write two numbers from 0 on"),
        (["--cost", "a:b"], "--cost a:b"),
        (["--cost", "0:0"], "as --cost 1:3."),
        (["--cost", ""], "is not what a drawn and a trained token cost"),
        (["--cost", "1:inf"], "as --cost 1:3."),
        (["--cost", "1e-320:1"], "as --cost 1:3."),
        (["--cost", "1e307:1"], "as --cost 1:3."),
        (["no_such.py"], "no_such.py: there is no such file"),
        (["a" * 300], "cannot be used: File name too long; name another path."),
        ([str(ROOT / "configs" / "grpo.py")], "define one that returns an Experiment"),
    ],
)
def test_a_wrong_command_line_is_a_sentence(words, said):
    words = [str(FILE), *words] if words[0] == "--cost" else words
    assert said in refusal(compare.main, *words)


@pytest.mark.long
def test_a_metric_that_no_recipe_has_is_told_before_anything_is_written(tmp_path):
    experiment = replace(tiny_experiment.get_experiment(), watched=("outcome/maen",))
    arms = experiments.arms(experiment)[:1]
    with pytest.raises(experiments.ConfigError, match="did you mean 'outcome/mean'"):
        runner.Comparison(experiment, arms, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_task_of_the_host_stands_side_by_side_as_one_of_the_device(whole, tmp_path):
    """Its verifier is Python: the same histories, bit for bit."""
    path = tmp_path / "host.py"
    path.write_text(ON_HOST)
    workdir = tmp_path / "runs"
    words = [str(path), "--workdir", str(workdir), "--cost", "1:3"]
    assert compare.main(words) == 0
    (there,) = histories(workdir)
    assert histories(workdir)[there] == histories(whole)[there]


def test_a_task_that_programs_cannot_call_is_refused_and_nothing_written(tmp_path):
    path = tmp_path / "host.py"
    path.write_text(ON_HOST.replace('"task.on_device": False', '"task": terms'))
    said = refusal(compare.main, path, "--workdir", tmp_path / "runs")
    # Several recipes run: it says which of them is wrong.
    assert said.startswith("curax.compare: plain: the reward of the task has several")
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_comparison_does_not_go_on_with_another_file(tmp_path, monkeypatch):
    folder = shutil.copytree(words.folder(), tmp_path / "words")
    path = tmp_path / "files.py"
    path.write_text(OF_FILES.format(folder=folder))
    how = [str(path), "--workdir", str(tmp_path / "runs"), "--cost", "1:3"]
    assert compare.main(how) == 0
    assert compare.main(how) == 0
    file = folder / "train.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[1:]))
    monkeypatch.setattr(programs, "_tasks", {})  # as another process
    said = refusal(compare.main, *how)
    assert "holds runs of plain on other questions than those of its task now" in said
    file.unlink()
    monkeypatch.setattr(programs, "_tasks", {})
    said = refusal(compare.main, *how)
    assert re.fullmatch(r"curax.compare: .*train\.jsonl.*\n", said)
