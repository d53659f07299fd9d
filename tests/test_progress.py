import io
import logging
import re
import sys
from typing import Any

import numpy as np
import pytest
import terminal
from rich.console import Console

from curax.runs import progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def shown(**options):
    file = io.StringIO()
    named = {"file": file, "width": 100, "_environ": {}}  # whatever TERM is here
    return progress.Progress(Console(**named | options)), file


def row(step, tokens, outcome: Any = 0.25, dead: Any = 0.5):
    return {
        "step": step,
        "rollout/tokens": tokens,
        "outcome/mean": outcome,
        "group/dead_fraction": dead,
    }


DUMB = {"force_terminal": True, "_environ": {"TERM": "dumb"}}  # no cursor to move


@pytest.mark.parametrize("options", [{}, DUMB], ids=["pipe", "dumb"])
def test_a_run_is_plain_lines_where_nothing_can_be_redrawn(clock, options):
    told, file = shown(**options)
    with told:
        told.begin("warm start", 0, 300)
        for clock[0], done in ((9, 10), (10, 20), (38, 300)):
            told.warm(done, np.float32(1.5))
        with told.waiting("compiling the held-out sampler"):
            told.evaluated(np.array([0.25, 0.5]))
        told.begin("RL", 0, 40)
        clock[0] = 60  # the first chunk compiles: no rate, no time left
        told.step([row(9, 900, 0.0), row(10, 1_000, 0.5)])
        clock[0] = 62
        told.evaluated(np.array([0.5, 0.5]))
        told.step([row(20, 11_000)])
        clock[0] = 262
        told.step([row(30, 12_000)])
        told.step([row(40, 13_000)])
    assert file.getvalue().splitlines() == [
        "warm start 0/300  compiling",
        "warm start 10/300  loss 1.500 nats",
        "warm start 20/300  loss 1.500 nats  left 0:28",
        "warm start 300/300  loss 1.500 nats",
        "compiling the held-out sampler",
        "RL 0/40  held-out 0.375  compiling",
        "RL 10/40  held-out 0.375  train 0.250  dead groups 50%",
        "RL 20/40  held-out 0.500  train 0.250  dead groups 50%  5,000 tokens/s"
        "  left 0:04",
        "RL 30/40  held-out 0.500  train 0.250  dead groups 50%  5 tokens/s  left 1:41",
        "RL 40/40  held-out 0.500  train 0.250  dead groups 50%  1,000,000,000,000 "
        "tokens/s",
    ]


def test_many_seeds_show_their_mean_and_their_tokens_together(clock):
    told, file = shown()
    with told:
        told.begin("RL", 4, 9)
        missing = [np.nan, np.nan]
        told.step([row(5, [100, 200], missing, missing)])
        clock[0] = 2.0
        told.step([row(6, [200, 300], [np.nan, 0.5], [0.25, 0.75])])
    assert file.getvalue().splitlines() == [
        "RL 4/9  compiling",
        "RL 5/9  train nan  dead groups nan%",
        "RL 6/9  train 0.500  dead groups 50%  100 tokens/s  left 0:06",
    ]


def test_a_terminal_gets_a_live_display_and_lines_above_it():
    told, file = shown(force_terminal=True)
    with told:
        told.begin("RL", 0, 40)
        told.step([row(10, 100)])
        told.stopping(False)
        told.step([row(40, 1_000)])
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "Stopping after this chunk of steps; once more to stop at once.\n" in text
    assert "40/40 train 0.250  dead groups 50%" in text.splitlines()[-1]
    assert file.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_a_process_that_leaves_at_once_gives_the_cursor_back():
    told, file = shown(force_terminal=True)
    told.stopping(True)
    assert file.getvalue() == "\x1b[?25h"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_logged_on_a_terminal_stands_above_the_display(
    is_terminal, monkeypatch
):
    stderr = io.StringIO()
    stderr.isatty = lambda: is_terminal
    handler = logging.StreamHandler(stderr)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    told, file = shown(force_terminal=True)
    with told:
        told.begin("RL", 0, 40)
        logging.getLogger("curax").warning("No outcome [for] 2 completions")
    logging.getLogger("curax").warning("afterwards")
    above, below = terminal.lines(file.getvalue()), stderr.getvalue().splitlines()
    said = "No outcome [for] 2 completions"
    assert (said in above) == is_terminal
    assert below == [said, "afterwards"][is_terminal:]


@pytest.mark.parametrize("width", [20, 40, 200])
def test_a_terminal_shows_what_is_waited_for_beside_phases(width):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True)
    told = progress.Progress(console)
    with told:
        told.begin("warm start", 0, 4)
        told.warm(4, np.float32(1.5))
        told._bars.refresh()
        with told.waiting("evaluating the policy on held-out prompts"):
            told._bars.refresh()  # as the thread of the display does
        shown = terminal.lines(file.getvalue())
        assert width < 40 or not any("…" in line for line in shown)
        told.begin("a program", 3.0, 100, share=True)
        told.note(99.7, "held-out 0.250")
    lines = terminal.lines(file.getvalue())
    assert width > 20 or all(map(str.strip, lines))  # notes are not crushed to nothing
    text = " ".join(lines)
    assert "evaluating" in text
    assert "4/4" in text
    assert "99 %" in text  # it is not done


def test_a_terminal_of_ascii_gets_ascii():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    with progress.Progress(Console(file=file, width=80, force_terminal=True)) as told:
        told.begin("RL", 1, 4)
        with told.waiting("evaluating"):
            told._bars.refresh()
        told.step([row(4, 100)])
