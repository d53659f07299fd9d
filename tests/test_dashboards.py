"""Dashboards get the rows of a run, go on with theirs, and never stop it."""

import json
import os
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import small
from outputs import message

from curax.config import ConfigError, load, override
from curax.runs import dashboards, folder
from curax.settings import groups
from curax.settings.packages import install

ROWS = [
    {"step": 1, "a": np.array([1.0, 3.0]), "b": [np.nan, 4.0], "c": np.nan},
    {"step": 2, "a": 5.0},
]
MEANS = [(1, {"a": 2.0, "b": 4.0}), (2, {"a": 5.0})]
DONE = {
    **{"step": 2, "seed": 7, "prompt_id": np.int32(3), "prompt": "2 + 2 ="},
    **{"slot": 0, "text": "4", "tokens": np.arange(2), "outcome": np.float32(1.0)},
    **{"reward": None, "advantage": np.float32(0.5), "kept": np.bool_(True)},
}
CELLS = [2, 3, "2 + 2 =", "4", 1.0, None, 0.5, True]
CONFIG = {"seed": 7}


class Fake:
    """A package that keeps its runs `{id: [(step, values)]}`, and fails if told to."""

    def __init__(self):
        self.runs, self.tables, self.opened, self.fails = {}, {}, [], ()

    def open(self, run, **options):
        if "open" in self.fails:
            raise ConnectionError("no network for key secret")
        self.opened.append((run, options))
        self.runs.setdefault(run, [])
        self.tables.setdefault(run, [])

    def put(self, run, values, step):
        if step in self.fails:
            raise OSError("no network for key secret")
        if table := values.pop("rollouts", None):
            self.tables[run].append((step, table))
        if values:
            self.runs[run].append((step, values))

    def end(self, run):
        self.runs[run].append("end")


def table(columns, data):
    assert len(columns) == len(data[0])
    return data


def wandb(fake):
    def init(*, id, project, name, dir, config, resume, settings):
        fake.open(id, project=project, name=name, config=config)
        assert (resume, settings) == ("allow", {"console": "off", "silent": True})
        assert os.path.isdir(dir)
        return SimpleNamespace(
            log=lambda values, step: fake.put(id, values, step),
            finish=lambda: fake.end(id),
        )

    return {"init": init, "Settings": dict, "Table": table}


def trackio(fake):
    run = []

    def init(*, project, name, config, resume, embed):
        fake.open(name, project=project, config=config)
        assert (resume, embed) == ("allow", False)
        run[:] = [name]

    return {
        "init": init,
        "log": lambda values, step: fake.put(run[0], values, step),
        "finish": lambda: fake.end(run[0]),
        "Table": table,
    }


def mlflow(fake):
    class Client:
        def get_experiment_by_name(self, name):
            self.project = name

        def create_experiment(self, name):
            assert name == self.project
            return "17"

        def create_run(self, experiment, run_name):
            assert experiment == "17"
            fake.open("of-mlflow", project=self.project, name=run_name, config=CONFIG)
            return SimpleNamespace(info=SimpleNamespace(run_id="of-mlflow"))

        def update_run(self, run, status):
            fake.open(run, status=status)

        def log_dict(self, run, value, file):
            assert (run, value, file) == ("of-mlflow", CONFIG, "config.json")

        def log_batch(self, run, metrics):
            (step,) = {metric[3] for metric in metrics}
            fake.put(run, {key: value for key, value, _, _ in metrics}, step)

        def log_table(self, run, value, artifact_file):
            rows = [list(row) for row in zip(*value.values(), strict=True)]
            assert tuple(value) == dashboards.COLUMNS
            assert artifact_file == "rollouts/00000002.json"
            fake.put(run, {"rollouts": rows}, 2)

        def set_terminated(self, run):
            fake.end(run)

    def metric(key, value, timestamp, step):
        assert timestamp > 1e12  # milliseconds
        return key, value, timestamp, step

    return {"MlflowClient": Client, "entities": SimpleNamespace(Metric=metric)}


@pytest.fixture(params=[wandb, trackio, mlflow], ids=lambda one: one.__name__)
def board(request, monkeypatch):
    """(name of a dashboard, its fake package)"""
    fake, name = Fake(), request.param.__name__
    for variable in ("WANDB_PROJECT", "TRACKIO_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**request.param(fake)))
    return name, fake


def opened(workdir, *named, step=-1):
    warnings = []
    made = dashboards.Dashboards(
        named, workdir, CONFIG, step=step, warn=warnings.append
    )
    return made, warnings


def test_rows_and_completions_are_shown_and_a_resumed_run_goes_on(tmp_path, board):
    name, fake = board
    dashboards.check([name])
    first, warnings = opened(tmp_path, "tensorboard", name)
    first.write(ROWS, [DONE])
    first.close()
    (run,) = fake.runs
    assert fake.runs[run] == [*MEANS, "end"]
    assert fake.tables[run] == [(2, [CELLS])]
    ((_, options),) = fake.opened
    assert options["project"] == "curax"
    assert options["config"] == CONFIG
    assert json.loads((tmp_path / dashboards.IDS).read_text()) == {name: run}
    again, _ = opened(tmp_path, partial(dashboards.NAMED[name], project="p"), step=1)
    again.write(ROWS[1:], [])
    again.close()
    assert fake.runs == {run: [*MEANS, "end", MEANS[1], "end"]}
    opened(tmp_path, name)[0].close()  # from step 0 on: another run
    assert len(fake.opened) == 3
    assert warnings == []


def test_one_that_fails_is_left_with_one_warning(tmp_path, board):
    name, fake = board
    left = "so the run goes on without it; the run folder has everything."
    fake.fails = (2,)
    made, warnings = opened(tmp_path, "tensorboard", name)
    made.write(ROWS, [DONE])
    made.write(ROWS, [DONE])
    made.close()
    assert warnings == [f"{name} failed (OSError), {left}"]
    assert len(list(made.files())) == 1  # TensorBoard stays
    fake.fails = ("open",)
    made, warnings = opened(tmp_path, name)
    made.write(ROWS, [])
    assert warnings == [f"{name} failed (ConnectionError), {left}"]


def test_a_missing_package_is_named_before_the_run_begins(monkeypatch):
    for name in ("wandb", "trackio", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        assert message(ConfigError, dashboards.check, ["tensorboard", name]) == (
            f"logging.dashboards: for {name}, the package {name} is not installed; run "
            f"{install(name)}."
        )


def mine(session):
    """A dashboard of one's own."""
    seen = []
    return SimpleNamespace(
        id="x",
        file=None,
        seen=seen,
        write=lambda rows, rollouts: seen.extend(row["step"] for row in rows),
        close=lambda: (session.workdir / "seen").write_text(str(seen)),
    )


def test_the_config_names_them_or_has_functions_of_its_own(tmp_path):
    assert (*dashboards.NAMED,) == groups.DASHBOARDS
    config = load(small.FILE)
    assert config.logging.dashboards == ("tensorboard",)
    named = override(config, ['logging.dashboards=["wandb", "mlflow"]'])
    assert named.logging.dashboards == ("wandb", "mlflow")
    for wrong in ('["wand"]', '["wandb", "wandb"]'):
        with pytest.raises(ConfigError, match="name"):
            override(config, [f"logging.dashboards={wrong}"])
    twice = ("wandb", partial(dashboards.wandb, project="b"))
    with pytest.raises(ConfigError, match="names wandb twice; name it once"):
        override(config, {"logging.dashboards": twice})
    own = override(config, {"logging.dashboards": (mine,)})
    folder.make(tmp_path, own)
    folder.check(tmp_path, config, resume=True)  # a resumed run may have others
    made, _ = opened(tmp_path, *own.logging.dashboards)
    made.write(ROWS, [])
    made.close()
    assert (tmp_path / "seen").read_text() == "[1, 2]"


def test_wandb_itself_takes_it_offline(tmp_path):
    assert os.environ["WANDB_MODE"] == "offline"  # for all tests
    for step in (-1, 1):
        made, warnings = opened(tmp_path, "wandb", step=step)
        made.write(ROWS, [DONE])
        made.close()
        assert warnings == []
    assert {*json.loads((tmp_path / dashboards.IDS).read_text())} == {"wandb"}
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
