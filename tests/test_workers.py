"""Processes that grade: whatever a check does, it costs that check alone.

The graders here stand at the top level, where the processes find them.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import json
import math
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from curax import config
from curax.settings.declared import declares
from curax.settings.packages import install
from curax.verify import graders, workers
from curax.verify.workers import Workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
ROOT = Path(__file__).parents[1]
DEADLINE = 3.0  # of honest checks as well, which take no time


def act(prompt, completion, answer, *, add=0.0):
    """Do what the completion says; the answer is what it needs to know."""
    match completion:
        case "sleep":
            time.sleep(600)
        case "backtrack":  # holds the interpreter's lock
            re.match(r"(a+)+$", "a" * 100 + "b")
        case "raise":
            raise ValueError("no\n such   thing")
        case "leave":
            sys.exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "hog":
            return len([bytearray(2**20) for _ in range(10**6)])
        case "pid":
            return os.getpid() / 2**32
        case "pid, sleep":
            Path(answer).write_text(str(os.getpid()))
            time.sleep(600)
        case "environment":
            return float(
                os.environ["JAX_PLATFORMS"] == "cpu" and sys.stdin.read() == ""
            )
        case "value":
            return answer
    return add + float(completion)


SPOILT = {
    "raise": "error: ValueError: no such thing",
    "leave": "error: SystemExit: 3",
    "segfault": "crash",
    "exit": "crash",
    "hog": "error: MemoryError",
    "sleep": "timeout",
    "backtrack": "timeout",
}


def alive(pid):
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def until(met, seconds=30.0):
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end
        time.sleep(0.01)


def written(path):
    """The number in a file that another process writes."""
    until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def children():
    """Processes of this one that run; helpers of pytest are not counted."""
    while True:
        tasks = Path("/proc/self/task").glob("*/children")
        with contextlib.suppress(OSError):  # a thread has ended meanwhile
            found = {pid for task in tasks for pid in task.read_text().split()}
            return {pid for pid in found if alive(pid)}


@pytest.fixture(scope="module")
def two():
    with Workers(act, deadline=DEADLINE, memory_mb=256) as found:
        yield found


@pytest.mark.first(5)
@pytest.mark.parametrize(("spoil", "reason"), SPOILT.items())
def test_what_a_check_does_costs_that_check_alone(two, spoil, reason):
    checks = [("", str(i / 64), None) for i in range(65)]
    checks[10:10] = [("", spoil, 1)]
    checks[40:40] = [("", spoil, 2)]
    verdicts = two.grade(checks)
    assert verdicts == [reason if c == spoil else float(c) for _, c, _ in checks]


def test_all_of_them_together_lose_nothing(two):
    checks = [("", spoil, 3) for spoil in [*SPOILT, "0.25", "1"]]
    assert two.grade(checks) == [*SPOILT.values(), 0.25, 1.0]


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (None, "none"),
        (True, 1.0),
        (1, 1.0),
        (0.5, 0.5),
        (3, "error: returned 3.0, which is not in [0, 1]"),
        (-0.1, "error: returned -0.1, which is not in [0, 1]"),
        (math.nan, "error: returned nan, which is not in [0, 1]"),
        (math.inf, "error: returned inf, which is not in [0, 1]"),
        ("right", "error: returned 'right', which is not a number"),
        ([1.0], "error: returned [1.0], which is not a number"),
        ("a" * 999, f"error: returned '{'a' * 196}..., which is not a number"),
    ],
)
def test_what_is_no_share_is_missing_and_said(two, value, verdict):
    (got,) = two.grade([("", "value", value)])
    assert got == verdict
    assert type(got) is type(verdict)


def test_nothing_asked_starts_nothing():
    before = children()
    with Workers(act) as some:
        assert some.grade([]) == []
        assert children() == before


def test_the_order_is_kept_and_equal_checks_are_graded_once(two):
    checks = [("", str(i % 7 / 8), None) for i in range(500)]
    assert two.grade(checks) == [i % 7 / 8 for i in range(500)]
    verdicts = two.grade([("", "pid", None)] * 50 + [("", "pid", 1), ("a", "pid", 1)])
    assert len(set(verdicts[:50])) == 1


def test_an_answer_that_cannot_be_sent_is_an_error_of_its_check(two):
    sent = two.grade([("", "1", None), ("", "1", lambda: 0), ("", "0", None)])
    assert sent[::2] == [1.0, 0.0]
    assert re.match(r"error: (PicklingError|AttributeError): .*lambda", sent[1])


def test_a_worker_sees_no_accelerator_and_no_keyboard(two):
    assert two.grade([("", "environment", None)]) == [1.0]


def test_options_are_bound_by_partial():
    with Workers(partial(act, add=0.5), count=1) as some:
        assert some.grade([("", "0.25", None)]) == [0.75]


@pytest.mark.long
def test_mathematics_is_graded_in_the_main_thread_of_a_worker():
    grade = partial(graders.mathematics, seconds=0.5)
    with Workers(grade, deadline=30.0) as some:
        some.start()
        assert some.grade(
            [
                ("", r"\boxed{(x+1)^2}", "x^2+2x+1"),
                ("", r"\boxed{(x+1)^{5000}}", "7"),
                ("", r"\boxed{7}", "7"),
                ("", r"\boxed{7}", ""),
            ]
        ) == [
            *(1.0, "none", 1.0),
            "error: ValueError: the answer is empty; give text or a number.",
        ]


@pytest.mark.long
def test_what_a_grader_loads_is_not_time_of_a_check(own):
    path = Path(own.__file__)
    late = "import time\nplain.start = lambda: time.sleep(2)\n"
    path.write_text(path.read_text() + late)
    with Workers(own.plain, count=1, deadline=1.0) as some:
        assert some.grade([("", "a", "a")]) == [0.5]


@pytest.mark.long
def test_a_task_of_reasoning_gym_is_graded_by_a_worker():
    gym = pytest.importorskip("reasoning_gym")
    entries = list(gym.create_dataset("chain_sum", size=3, seed=1))
    grade = partial(graders.reasoning_gym_score, dataset="chain_sum")
    with Workers(grade, count=1, deadline=30.0) as some:
        checks = [
            (e["question"], f"<answer>{e['answer']}</answer>", e) for e in entries
        ]
        assert some.grade(checks) == [1.0] * 3


# What is written to the trainer, and by whom


def internal(name):
    """A variable of the worker that runs a grader, as a grader may find it."""
    frame = sys._getframe()
    while name not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals[name]


def later(seconds, act):
    threading.Thread(target=lambda: (time.sleep(seconds), act()), daemon=True).start()


def attack(prompt, completion, answer):
    """Do to its worker what the completion says."""
    pipe, nonce, number = map(internal, ("pipe", "nonce", "number"))

    def verdict(number, worth):
        return json.dumps([nonce, number, worth]).encode() + b"\n"

    def write(data):
        os.write(pipe, data)

    match completion:
        case "fork, raise" if os.fork() == 0:
            raise RuntimeError
        case "fork, leave" if os.fork() == 0:
            sys.exit()
        case "fork, write" if os.fork() == 0:
            with contextlib.suppress(OSError):
                write(b"half a li")
            os._exit(0)
        case "fork behind Python, die":
            if ctypes.CDLL(None).fork() == 0:
                time.sleep(600)
            os._exit(0)
        case "garbage":
            write(b"\x80\x04garbage\n")
        case "pickle":
            write(pickle.dumps(Touches(answer)) + b"\n")
        case "a frame of gigabytes":
            write(b"\x7f\xff\xff\xff")
            time.sleep(600)
        case "half a line":
            write(verdict(number, 1.0)[:-9])
            time.sleep(600)
        case "no line ends":
            while True:
                write(b"1" * 2**16)
        case "one byte and another":
            while True:
                write(b"1")
                time.sleep(0.05)
        case "twice":
            write(verdict(number, 1.0))
        case "the next":
            write(verdict(number + 1, 1.0))
        case "out of [0, 1]":
            write(verdict(number, 2.0))
        case "another nonce":
            write(b'["", %d, 1.0]\n' % number)
        case "late":
            later(0.2, lambda: write(verdict(number + 1, 1.0)))
        case "close":
            os.closerange(3, 256)
        case "print":
            print("much " * 10**6)
        case "its group":
            os.killpg(0, signal.SIGKILL)
        case "its keeper":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        case "its limit":
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            return float(soft == hard != resource.RLIM_INFINITY)
        case "escape the screen":
            raise ValueError("\x1b[2J \ud800")
    return 0.0 if not completion.replace(".", "").isdigit() else float(completion)


class Touches:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


ATTACKS = {
    "fork, raise": 0.0,
    "fork, leave": 0.0,
    "fork, write": 0.0,
    "fork behind Python, die": "crash",
    "garbage": "crash",
    "pickle": "crash",
    "a frame of gigabytes": "timeout",
    "half a line": "timeout",
    "no line ends": "crash",
    "one byte and another": "timeout",
    "the next": "crash",
    "out of [0, 1]": "crash",
    "another nonce": "crash",
    "close": "crash",
    "print": 0.0,
    "its group": "crash",
    "its keeper": "crash",
    "its limit": 1.0,
    "escape the screen": r"error: ValueError: \x1b[2J \ud800",
}


def test_whatever_a_grader_does_to_its_worker_moves_no_outcome(tmp_path, monkeypatch):
    path = tmp_path / "made"
    checks = [("", str(i / 64), i) for i in range(64)]
    for at, kind in enumerate(ATTACKS):
        checks.insert(3 * at, ("", kind, str(path)))
    wanted = [ATTACKS.get(c) if c in ATTACKS else float(c) for _, c, _ in checks]
    with Workers(attack, deadline=1.5) as some:
        assert some.grade(checks) == wanted
        assert not path.exists()
        assert some.grade([("", "0.5", i) for i in range(9)]) == [0.5] * 9


@pytest.mark.long
def test_what_nobody_asked_for_is_of_no_check():
    with Workers(attack, count=1) as some:
        for kind in ("twice", "late"):
            verdicts = some.grade([("", kind, 0), ("", "0.5", 0), ("", "0.25", 0)])
            assert verdicts == [1.0 if kind == "twice" else 0.0, 0.5, 0.25]
            time.sleep(0.5)
            assert some.grade([("", "0.125", kind)]) == [0.125]


@pytest.mark.long
def test_a_worker_that_stopped_reading_is_late():
    with Workers(act, count=1, deadline=1.0) as some:
        pid = round(some.grade([("", "pid", None)])[0] * 2**32)
        os.kill(pid, signal.SIGSTOP)
        large = bytes(10**7)
        assert some.grade([("", "0.5", large), ("", "1", large)]) == ["timeout", 1.0]


NONCE = "0123"
LINES = [
    ("0.5", 0.5),
    ("1.0", 1.0),
    ('"none"', "none"),
    ('"error: no"', "error: no"),
    *((text, None) for text in ("0", "1", "true", "null", "2.0", "-0.5", "1e999")),
    *(
        (text, None)
        for text in ("NaN", "Infinity", "-Infinity", "9" * 4000, "9" * 5000)
    ),
    *((text, None) for text in ("[]", "{}", "[0.5]", "[" * 2000, '"timeout"', '""')),
    *(
        (text, None)
        for text in ('"0.5"', "", "0.5, 0.5", '"error: ' + "a" * 5000 + '"')
    ),
]


@pytest.mark.parametrize(("text", "verdict"), LINES)
def test_a_verdict_is_a_share_or_a_reason(text, verdict):
    line = f'["{NONCE}", 3, {text}]'.encode()
    if verdict is not None:
        assert workers.parse_verdict(line, NONCE, 3) == verdict
        for nonce, number in (("", 3), (NONCE, 2), (NONCE, 4), (NONCE, 0)):
            with pytest.raises(ValueError, match="not the verdict of this check"):
                workers.parse_verdict(line, nonce, number)
        return
    with pytest.raises(ValueError, match="verdict"):
        workers.parse_verdict(line, NONCE, 3)


@pytest.mark.parametrize(
    "line", [b"", b"5", b"null", b"\xff\xfe", b'["0123", true, 0.5]']
)
def test_what_is_no_line_of_a_worker_is_refused(line):
    with pytest.raises(ValueError, match="verdict"):
        workers.parse_verdict(line, NONCE, 1)


def test_the_first_line_says_that_a_worker_is_ready_or_why_not():
    assert workers.parse_verdict(b'["0123", 0, null]', NONCE, 0) is None
    assert workers.parse_verdict(b'["0123", 0, "no"]', NONCE, 0) == "no"
    with pytest.raises(ValueError, match="no verdict"):
        workers.parse_verdict(b'["0123", 0, 0.5]', NONCE, 0)


def test_what_ended_two_workers_is_not_asked_a_third_time(tmp_path):
    with Workers(counted_exit, count=1) as some:
        check = ("", "", str(tmp_path / "times"))
        assert [some.grade([check]) for _ in range(4)] == [["crash"]] * 4
        assert len((tmp_path / "times").read_text()) == 2


def counted_exit(prompt, completion, answer):
    with open(answer, "a") as file:
        file.write("a")
    os._exit(3)


# A worker that is killed, from outside or with this process


def test_a_worker_killed_from_outside_loses_one_check(tmp_path):
    checks = [("", "0.5", i) for i in range(20)]
    checks[3:3] = [("", "pid, sleep", str(tmp_path / "pid"))]
    with Workers(act, deadline=60.0) as some:
        killer = threading.Thread(
            target=lambda: os.kill(written(tmp_path / "pid"), signal.SIGKILL)
        )
        killer.start()
        assert some.grade(checks) == [0.5] * 3 + ["crash"] + [0.5] * 17
        killer.join()


def test_workers_killed_while_they_had_nothing_to_do_cost_nothing():
    before = children()
    with Workers(act) as some:
        some.start()
        killed = children() - before
        assert len(killed) == 2
        for pid in killed:
            os.kill(int(pid), signal.SIGKILL)
        until(lambda: not any(map(alive, killed)))
        assert some.grade([("", "0.5", i) for i in range(9)]) == [0.5] * 9


def test_a_worker_ignores_the_keyboard(tmp_path):
    with Workers(act, count=1) as some:
        pid = round(some.grade([("", "pid", None)])[0] * 2**32)
        os.kill(pid, signal.SIGINT)
        assert some.grade([("", "pid", 1)]) == [pid / 2**32]


def test_after_an_interrupt_the_next_call_gets_its_own_answers(tmp_path):
    with Workers(act, deadline=60.0) as some:
        heard = threading.Thread(
            target=lambda: (
                written(tmp_path / "pid"),
                os.kill(os.getpid(), signal.SIGINT),
            )
        )
        heard.start()
        with pytest.raises(KeyboardInterrupt):
            some.grade([("", "pid, sleep", str(tmp_path / "pid")), ("", "1", None)])
        heard.join()
        assert not alive(written(tmp_path / "pid"))
        assert some.grade([("", "0.25", None), ("", "0", None)]) == [0.25, 0.0]


def test_calls_from_many_threads_are_served_one_by_one(two):
    said = {}

    def call(i):
        said[i] = two.grade([("", str(i / 8), j) for j in range(40)])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {i: [i / 8] * 40 for i in range(8)}


def test_nothing_is_left_after_close_even_of_what_a_grader_started(tmp_path):
    before = children()
    some = Workers(with_a_child, count=1)
    some.grade([("", "", str(tmp_path / "pid"))])
    assert alive(written(tmp_path / "pid"))
    some.close()
    some.close()
    assert children() == before
    until(lambda: not alive(written(tmp_path / "pid")))


def test_nothing_is_left_when_nobody_holds_the_workers():
    before = children()
    some = Workers(act)
    some.start()
    assert len(children() - before) == 2
    del some
    gc.collect()
    assert children() == before


def with_a_child(prompt, completion, answer):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(answer).write_text(str(child.pid))
    return 1.0


def with_a_daemon(prompt, completion, answer):
    """Leave a process whose parent has ended, in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            path = Path(answer)
            path.with_suffix(".tmp").write_text(str(os.getpid()))
            path.with_suffix(".tmp").rename(path)
            time.sleep(600)
        os._exit(0)
    written(Path(answer))
    if completion == "hang":
        time.sleep(600)
    if completion == "die":
        os._exit(1)
    return 1.0


def test_nothing_is_left_of_what_left_its_session(tmp_path):
    kinds = {"return": 1.0, "die": "crash", "hang": "timeout"}
    with Workers(with_a_daemon, count=1, deadline=2.0) as some:
        checks = [("", kind, str(tmp_path / kind)) for kind in kinds]
        assert some.grade(checks) == list(kinds.values())
    for kind in kinds:
        assert not alive(written(tmp_path / kind))


def test_what_left_its_session_ends_with_a_keeper_that_is_terminated(tmp_path):
    before = children()
    with Workers(with_a_daemon, count=1) as some:
        some.grade([("", "return", str(tmp_path / "pid"))])
        (keeper,) = children() - before
        os.kill(int(keeper), signal.SIGTERM)
        until(lambda: not alive(written(tmp_path / "pid")))


def act_or_daemon(prompt, completion, answer):
    does = with_a_daemon if completion == "daemon" else act
    return does(prompt, completion, answer)


PROGRAM = """
import sys, threading
import test_workers
from curax.verify.workers import Workers

def grade():
    checks = [("", "pid, sleep", sys.argv[2]), ("", "backtrack", None), ("", "1", None)]
    daemon = ("", "daemon", sys.argv[2] + ".daemon")
    workers.grade([daemon])
    found = workers.grade(checks)

print("started", flush=True)
if __name__ == "__main__":
    workers = Workers(test_workers.act_or_daemon, deadline=600.0)
    {do}
"""


def program(tmp_path, do):
    """A process that begins to grade what never ends; and the processes it started."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(do=do))
    process = subprocess.Popen(
        [sys.executable, file, "--", tmp_path / "pid"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    written(tmp_path / "pid")
    started = Path(f"/proc/{process.pid}/task").glob("*/children")
    pids = [pid for task in started for pid in task.read_text().split()]
    assert len(pids) == 2
    files = [Path(f"/proc/{pid}/task/{pid}/children") for pid in pids]

    def kept():
        return [pid for file in files for pid in file.read_text().split()]

    # What each keeps, and an orphan, which is a keeper's once its parent has ended.
    until(lambda: len(kept()) == 3 and all(file.read_text() for file in files))
    pids += kept()
    assert str(written(tmp_path / "pid.daemon")) in pids
    assert all(map(alive, pids))
    return process, pids


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("do", "number", "status", "traces"),
    [
        ("grade()", signal.SIGKILL, -signal.SIGKILL, 0),
        ("grade()", signal.SIGTERM, -signal.SIGTERM, 0),
        ("grade()", signal.SIGINT, -signal.SIGINT, 1),
        ("threading.Thread(target=grade, daemon=True).start(); input()", None, 0, 0),
    ],
    ids=["killed", "terminated", "interrupted", "at its end"],
)
def test_workers_end_with_the_process_that_started_them(
    tmp_path, do, number, status, traces
):
    process, pids = program(tmp_path, do)
    if number is not None:
        os.killpg(process.pid, number)  # as the terminal does
    out, err = process.communicate("go on\n", timeout=30)
    assert process.returncode == status, err
    assert out == "started\n"  # the program is not run once more by a worker
    assert err.count("Traceback") == traces, err
    until(lambda: not any(map(alive, pids)))


# Where a grader is found


CONFIG = """
import functools
from curax.config import load

LIMIT = 0.5

def plain(prompt, completion, answer):
    return LIMIT * (completion == answer)

def scaled(prompt, completion, answer, *, by):
    return by(LIMIT) if completion == answer else None

def half(value):
    return value / 2

class Judge:
    @staticmethod
    def judge(prompt, completion, answer):
        return 0.125

    def method(self, prompt, completion, answer):
        return 0.0

def get_config():
    return load({quickstart!r})
"""


@pytest.fixture
def own(tmp_path):
    """The module of a config file, as a run loads it."""
    file = tmp_path / "own.py"
    file.write_text(CONFIG.format(quickstart=str(ROOT / "configs" / "quickstart.py")))
    config.load(file)
    yield sys.modules["config_own"]
    del sys.modules["config_own"]


def test_a_grader_of_a_config_file_is_found(own):
    checks = [("", "a", "a"), ("", "a", "b")]
    with Workers(own.plain) as some:
        assert some.grade(checks) == [0.5, 0.0]
        # What was read first stays, for processes that are started later.
        Path(own.__file__).write_text("raise SystemExit")
        some.close()
        assert some.grade(checks) == [0.5, 0.0]
    with pytest.raises(
        RuntimeError, match=r"own.py: no process .*'plain': SystemExit;"
    ):
        Workers(own.plain).start()


def test_a_grader_of_a_module_stays_what_it_was_when_it_was_named(
    tmp_path, monkeypatch
):
    """Or one batch would be graded by both, where a worker is replaced."""
    path = tmp_path / "curax_mine.py"
    path.write_text("def within(question, completion, answer):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("curax_mine")
    monkeypatch.setitem(sys.modules, "curax_mine", mine)
    with Workers(mine.within, count=1) as some:
        assert some.grade([("", "a", "a")]) == [1.0]
        for changed in ("def within(*_):\n    return 0.0\n", "def within(:"):
            path.write_text(changed)
            some.close()
            assert some.grade([("", "a", "a")]) == [1.0]


def test_its_options_may_be_functions_of_the_file(own):
    with Workers(partial(own.scaled, by=own.half), count=1) as some:
        assert some.grade([("", "a", "a"), ("", "a", "b")]) == [0.25, "none"]
    with Workers(own.Judge.judge, count=1) as some:
        assert some.grade([("", "a", "a")]) == [0.125]


def test_a_grader_of_a_file_that_was_loaded_again_is_found(own):
    config.load(own.__file__)
    assert sys.modules["config_own"] is not own
    with Workers(own.plain, count=1) as some:
        assert some.grade([("", "a", "a")]) == [0.5]


def test_a_module_that_cannot_be_imported_by_its_name_is_executed(own, monkeypatch):
    path = Path(own.__file__).with_name("odd.py")
    path.write_text(CONFIG.format(quickstart=""))
    spec = importlib.util.spec_from_file_location("curax_odd", path)
    odd = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "curax_odd", odd)
    spec.loader.exec_module(odd)
    with Workers(partial(odd.scaled, by=odd.half), count=1) as some:
        assert some.grade([("", "a", "a")]) == [0.25]


KINDS = ["lambda", "closure", "method", "object", "renamed", "typed in"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_grader_without_a_place_is_refused_in_a_sentence(own, kind):
    def closure(prompt, completion, answer):
        return 1.0

    own.renamed = own.plain
    graders_ = {
        "lambda": (lambda p, c, a: 1.0, r".*<lambda>"),
        "closure": (closure, r".*<locals>.closure"),
        "method": (own.Judge().method, "Judge.method"),
        "object": (own.Judge(), "Judge"),
    }
    if kind == "typed in":  # as in a notebook
        del own.__file__
        graders_["typed in"] = (own.plain, "plain")
    if kind == "renamed":
        own.plain = None
        graders_["renamed"] = (own.renamed, "plain")
    grader, name = graders_[kind]
    said = (
        f"^the grader '{name}' cannot be found by its name in another process; define "
        "it with def at the top level of a file.$"
    )
    with pytest.raises(ValueError, match=said):
        Workers(grader)


def of_two(prompt, completion):
    return 1.0


def of_four(prompt, completion, answer, tolerance):
    return 1.0


def of_an_option(prompt, completion, answer, *, tolerance):
    return 1.0


async def asynchronous(prompt, completion, answer):
    return 1.0


def yielding(prompt, completion, answer):
    yield 1.0


def without_answer(function):
    return functools.wraps(function)(lambda p, c, a: function(p, c))


@without_answer
def decorated(prompt, completion):
    return 1.0


THREE = "let it take these three, and give each further option a default or bind it by "


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        (of_two, f"{{}}too many positional arguments; {THREE}"),
        (of_four, f"{{}}missing a required argument: 'tolerance'; {THREE}"),
        (of_an_option, f"{{}}missing a required .*argument: 'tolerance'; {THREE}"),
        (partial(of_two, "p"), f"{{}}too many positional arguments; {THREE}"),
        (partial(act, "p"), f"{{}}too many positional arguments; {THREE}"),
        (partial(act, answer=1), f"{{}}too many positional arguments; {THREE}"),
        (partial(act, ad=1), f"{{}}it has no option of a name that is bound; {THREE}"),
        (asynchronous, "the grader '{name}' is asynchronous; define it with def, and "),
        (yielding, "the grader '{name}' yields; define it with def, and return a nu"),
    ],
    ids=[
        "two",
        "four",
        "option",
        "bound",
        "third",
        "answer",
        "unknown",
        "async",
        "yield",
    ],
)
def test_a_grader_that_cannot_be_called_is_refused_in_a_sentence(grader, said):
    name = getattr(grader, "func", grader).__name__
    call = (
        f"the grader '{name}' cannot be called as "
        rf"{name}\(prompt, completion, answer\): "
    )
    before = children()
    with pytest.raises(ValueError, match=f"^{said.format(call, name=name)}") as error:
        Workers(grader)
    assert "\n" not in str(error.value)
    assert children() == before


def test_a_grader_that_can_be_called_is_not_refused():
    for grader in (
        decorated,
        partial(of_four, tolerance=0.1),
        partial(of_an_option, tolerance=0.1),
        graders.mathematics,
    ):
        Workers(grader).close()


class Here:
    """A pool without processes."""

    def __init__(self, *, add, more=0.0):
        self.worth = add + more

    def grade(self, checks):
        return [self.worth + os.getpid() * len(checks)] * len(checks)


@declares(pool=Here)
def of_here(prompt, completion, answer, *, add, more=0.25):
    return None


def test_a_grader_that_declares_a_pool_is_graded_by_it_with_its_options():
    before = children()
    said = workers.pool(partial(of_here, add=0.5), count=3).grade([("", "", "")] * 2)
    assert said == [0.75 + 2 * os.getpid()] * 2
    assert children() == before
    with pytest.raises(ValueError, match=r"'of_here' cannot be called as .* 'add'"):
        workers.pool(of_here)
    assert isinstance(workers.pool(act, count=1), Workers)


def test_options_that_cannot_be_sent_are_refused_in_a_sentence():
    with pytest.raises(
        ValueError, match="the options bound to the grader 'act' cannot"
    ):
        Workers(partial(act, add=lambda: 0))


@pytest.mark.parametrize("wrong", [{"count": 0}, {"deadline": 0.0}, {"memory_mb": -1}])
def test_numbers_must_be_positive(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"^{name}={value} must be positive; raise it"):
        Workers(act, **wrong)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "import no_such_module",
            "the package no_such_module is not installed; run pip install no_such",
        ),
        (
            "import sys; sys.modules['reasoning_gym'] = None; import reasoning_gym",
            f"the package reasoning-gym is not installed; run {install('gym')}.",
        ),
        (
            "del plain",
            "AttributeError: module 'config_own' has no attribute 'plain'; me",
        ),
        ("import os; os._exit(7)", "3 in a row ended with status 7 while they started"),
    ],
)
def test_a_file_that_fails_in_a_worker_ends_the_call_in_a_sentence(own, line, said):
    path = Path(own.__file__)
    path.write_text(path.read_text() + line)
    before = children()
    some = Workers(own.plain)
    for _ in range(2):  # and so does the next
        with pytest.raises(RuntimeError) as error:
            some.grade([("", "a", "a")])
        assert said in str(error.value)
        place = f"{path}: no process can start for grader 'plain': "
        assert str(error.value).startswith(place)
        assert "\n" not in str(error.value)
    assert children() == before


@pytest.mark.long
def test_a_worker_that_never_gets_ready_is_not_waited_for(own, monkeypatch):
    monkeypatch.setattr(workers, "START_SECONDS", 0.2)
    path = Path(own.__file__)
    path.write_text(path.read_text() + "import time; time.sleep(600)")
    with pytest.raises(RuntimeError, match=r"it is not ready after 0.2 s; import less"):
        Workers(own.plain).start()
