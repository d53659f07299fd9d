"""What a run tells of its rows when it goes on, and of a function that fails."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small

from curax import checkpoint, folder, held_out, run

FORMS = "format/effective_number"


class Loop:
    """Makes steps out of nothing; evaluations say these in turn."""

    def __init__(self, *said: Any, steps=4):
        config = replace(small.get_config(), warm_start=None, steps=steps)
        task = SimpleNamespace(told="", in_files=False, decode=str)
        self.parts = SimpleNamespace(config=config, task=task)
        self.seeds, self._said = np.uint32(0), iter(said)
        self.abstract = self.sharding = None

    def context(self):
        return pytest.MonkeyPatch.context()

    def whole(self, state):
        return state

    def initial(self):
        return SimpleNamespace(frozen=None, memory=None)

    begin = whole

    def evaluate(self, state):
        said = next(self._said)
        if isinstance(said, Exception):
            raise said
        return np.zeros(1), np.zeros(1), {FORMS: np.float32(said)}

    def advance(self, state, times):
        names = ("outcome/mean", "group/dead_fraction", "loss/mean", "gradient/norm")
        row = dict.fromkeys(names, 0.0) | {"update/count": 1.0}
        return state, [row | {"sampler/drift_nats": 1.0} for _ in range(times)], []


def follow(workdir, loop, monkeypatch, *, step=None) -> list[str]:
    """Warnings of a run, which goes on from the checkpoint of this step."""
    told, state = [], SimpleNamespace(frozen=None, memory=None)
    found = None if step is None else checkpoint.Found(step, state, {}, {})
    saved = SimpleNamespace(
        newest=lambda *_: found,
        save=lambda *_, **__: None,
        wait=lambda: None,
        close=lambda: None,
    )
    with monkeypatch.context() as patch:
        patch.setattr(run.checkpoint, "Checkpoints", lambda *_, **__: saved)
        patch.setattr(run.loops, "saved", lambda state: state)
        patch.setattr(run.recall, "write", lambda *_: None)
        patch.setattr(run.Progress, "say", lambda _, text: told.append(text))
        run.Run(loop, workdir).go()
    _, *warnings = "".join(f"\n{text}" for text in told).split("\nWarning: ")
    return [text.split(" is ")[0] for text in warnings]


def test_a_resumed_run_compares_with_the_first_steps_and_repeats_nothing(
    tmp_path, monkeypatch
):
    # Evaluated at 0, 3 and 4: drift is told at once, forms have not yet halved.
    begun = follow(tmp_path, Loop(4.0, 3.0, 2.5), monkeypatch)
    assert begun == ["sampler/drift_nats"]
    rest = follow(tmp_path, Loop(1.5, 1.0, steps=7), monkeypatch, step=4)
    assert rest == [FORMS]
    # That it was told is known as well, up to the checkpoint.
    assert follow(tmp_path, Loop(1.0, steps=8), monkeypatch, step=7) == []
    assert follow(tmp_path, Loop(1.0, steps=5), monkeypatch, step=4) == [FORMS]


def test_a_format_that_fails_ends_the_run_in_a_sentence(tmp_path, monkeypatch):
    what = "evaluation.format gave 1.0, which is no integer, for the completion '2'"
    loop: Any = Loop(held_out.FormatError(what))
    with pytest.raises(run.RunError) as caught:
        follow(tmp_path, loop, monkeypatch)
    assert str(caught.value) == (
        f"{what}; mend that and go on with --resume: there is no checkpoint yet, so it "
        "will start again."
    )
    assert (tmp_path / folder.METRICS).read_text() == ""


def no_package():
    raise ModuleNotFoundError("No module named 'sklearn_x'", name="sklearn_x")


def test_a_task_that_needs_what_is_not_installed_gets_the_line_that_installs_it():
    config = replace(small.get_config(), task=no_package)
    with pytest.raises(run.ConfigError) as caught:
        run.build(config)
    assert str(caught.value) == (
        "the package sklearn_x is not installed; run pip install sklearn_x, or put its "
        "folder on PYTHONPATH if it is yours."
    )
