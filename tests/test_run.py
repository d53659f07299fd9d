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


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (
            "allocate/dropped_rows",
            "allocate=allocate.uniform asked in step 2 for 68 completions more than "
            "there is room for, and they were dropped; mend it: ",
        ),
        (
            "outcome/out_of_range",
            "the verifier of task gave 68 outcomes outside [0, 1] in step 2; mend it, ",
        ),
    ],
)
def test_a_step_that_breaks_a_promise_ends_the_run_in_a_sentence(
    tmp_path, monkeypatch, metric, says
):
    class Breaking(Loop):
        def advance(self, state, times):
            state, rows, shown = super().advance(state, times)
            return state, [*rows[:-1], rows[-1] | {metric: 68.0}], shown

    loop: Any = Breaking(*[4.0] * 9)
    with pytest.raises(run.RunError) as caught:
        follow(tmp_path, loop, monkeypatch)
    assert str(caught.value).startswith(says)
    assert str(caught.value).endswith(", and start anew in another --workdir.")


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
