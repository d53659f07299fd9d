"""Several processes make one run: the same one, in one folder, or none."""

import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import killed_many
import many
import numpy as np
import pytest
from outputs import printed, refusal
from run_files import rows
from test_folder import lines
from test_train import compiled  # noqa: F401, as a fixture

from curax import train
from curax.config import ConfigError, load, override
from curax.processes import clusters, peers
from curax.reward import Verdicts
from curax.runs import checkpoint, ending, folder
from curax.settings.cli import recipe_of
from curax.step import grading

NAMES = (folder.METRICS, folder.ROLLOUTS, folder.WARM, folder.ALARMS)
WORDS = ("logging.checkpoint_every=50",)
STAGED = (*WORDS, "task.on_device=false", "sampling.chunks=2")
long = pytest.mark.long


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Pictures take a second; other tests look at them."""
    monkeypatch.setattr(ending.page, "write", lambda workdir: workdir / "report.html")


def call(workdir, *words, resume=False):
    """Exit status and stderr of a run in this process, of eight devices."""
    argv = ["--config", many.FILE, "--workdir", workdir]
    argv += ["--set", *words] if words else []
    return printed(train.main, *argv, *(["--resume"] if resume else []))[::2]


def wait_for(path: Path, processes):
    """Until a folder is there, or a row in a file."""
    for _ in range(15_000):
        if path.is_dir() or (path.exists() and path.read_bytes()):
            return
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)
    raise TimeoutError


def assert_same_files(got, want):
    for name in NAMES:
        assert rows(got, name) == rows(want, name), name
    for name in (folder.EVALUATION, folder.MEMORY):
        assert (got / name).read_text() == (want / name).read_text()


def statuses(ends):
    return [(status, err) for status, _, err in ends]


# ----- the same run


@pytest.mark.first(1)
@pytest.mark.parametrize("words", [STAGED, WORDS], ids=["host", "device"])
def test_two_processes_one_of_them_interrupted_make_the_run_of_one(tmp_path, words):
    one, two = tmp_path / "one", tmp_path / "two"
    words = (*words, "warm_start.steps=20")
    assert call(one, *words, "mesh.data=2") == (0, "")
    processes = many.start([two, two], *words)
    wait_for(two / folder.WARM, processes)
    processes[1].send_signal(signal.SIGTERM)
    first, second = many.ends(processes)
    assert statuses((first, second)) == [(143, ""), (143, "")]
    assert "Stopped; to go on: " in first[1]
    assert "Stopped" not in second[1]
    saved = checkpoint.latest(two / folder.WARM_CHECKPOINTS)
    assert saved == lines(two / folder.WARM)[-1]["step"] < 20
    ends = many.ends(many.start([two, two], *words, resume=True))
    assert statuses(ends) == [(0, ""), (0, "")]
    assert_same_files(two, one)


@long
def test_two_processes_share_the_grading_and_one_goes_on_with_their_run(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert call(one, *STAGED, "mesh.data=2") == (0, "")
    ends = many.ends(many.start([two, two], *STAGED))
    assert statuses(ends) == [(0, ""), (0, "")]
    assert_same_files(two, one)
    shown = {}
    for path, mesh in ((one, "mesh.data=2"), (two, "mesh.data=1")):
        assert call(path, *STAGED, mesh, "steps=6", resume=True) == (0, "")
        shown[path] = [
            (row["step"], row["tokens"], row["outcome"])
            for row in lines(path / folder.ROLLOUTS)
        ]
    assert shown[one] == shown[two]


@long
def test_two_processes_share_the_turns_that_the_host_answers(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    words = (*WORDS, "task.turns=true", "warm_start=None", "sampling.max_tokens=12")
    assert call(one, *words, "mesh.data=2") == (0, "")
    ends = many.ends(many.start([two, two], *words))
    assert statuses(ends) == [(0, ""), (0, "")]
    assert_same_files(two, one)
    last = lines(two / folder.METRICS)[-1]
    assert last["turns/count"] > 1
    assert last["turns/observed_tokens"] > 0


# ----- none


def test_a_process_that_is_killed_ends_the_others_in_a_sentence(tmp_path):
    """Their verifiers answer at random, and until then the processes are equal."""
    words = ("task.on_device=false", "task.moody=true", "steps=500")
    processes = many.start([tmp_path, tmp_path], *words)
    wait_for(tmp_path / folder.CHECKPOINTS / "4", processes)
    processes[0].kill()
    start = time.monotonic()
    _, (status, _, err) = many.ends(processes)
    assert time.monotonic() - start < 60
    assert status == 1
    told = killed_many.SENTENCE.search(err)
    assert told
    last = checkpoint.latest(tmp_path / folder.CHECKPOINTS)
    assert told[1] == f"the checkpoint of step {last} is intact"
    soon = ("--start-timeout", "2")
    processes = many.start([tmp_path] * 2, *words, resume=True, typed=soon)
    processes[1].kill()  # which has not been found yet
    (status, _, err), _ = many.ends(processes)
    assert status == 1
    never = killed_many.SENTENCE.search(err)
    assert never
    assert never[1] == told[1]


def test_a_folder_for_each_process_is_told_and_left_as_it_was(tmp_path):
    soon = {"SHARING": "1"}
    ends = many.ends(many.start([tmp_path / "0", tmp_path / "1"], env=soon))
    for process, (status, _, err) in enumerate(ends):
        place = tmp_path / str(process)
        assert status == 2
        assert err.startswith(f"curax.train: --workdir {place} of process 1 on ")
        assert err.endswith("; name a folder that all processes share.\n")
        assert not place.exists()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "--processes 2 --process 0",
            "--coordinator is missing; name the processes of a run by --coordinator "
            "HOST:PORT --processes N --process I, or leave all three to the cluster.",
        ),
        *(
            (
                f"--coordinator {place} --processes 2 --process 0",
                f"--coordinator {place} is no HOST:PORT; name the machine of process 0 "
                "and a free port of it, such as 10.0.0.2:8476.",
            )
            for place in ("localhost", "a:0", "a:65536")
        ),
        (
            "--coordinator a:1 --processes 0 --process 0",
            "--processes 0 is no number of processes; name how many the run has, from "
            "1 on.",
        ),
        (
            "--coordinator a:1 --processes 2 --process 2",
            "--process 2 is not from 0 to 1; number the --processes 2 of the run from "
            "0 on.",
        ),
    ],
)
def test_processes_that_are_named_by_halves_are_refused(typed, said):
    assert refusal(train.main, *typed.split()) == f"curax.train: {said}\n"


def test_a_process_that_is_aborted_says_so(capfd):
    """As JAX does where one process more than were asked for has come."""
    code = (
        "import os; from curax.processes import watch; watch.GRACE = 0.1; "
        "one = watch.Watch(1, 2, lambda: 'it is intact'); one.begin(); os.abort()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=many.ROOT, timeout=60)
    assert done.returncode == 1
    assert capfd.readouterr().err == (
        "curax.train: process 1 of 2 was aborted, see above; go on with --resume: it "
        "is intact.\n"
    )


@pytest.mark.parametrize("typed", ["--resume", "--dry-run", "--profile 2"])
def test_an_option_of_one_process_alone_is_refused(typed, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "start", lambda *_, **__: None)
    monkeypatch.setattr(peers, "gather", lambda value: [value, 0])
    named = f"--coordinator a:1 --processes 2 --process 0 --workdir {tmp_path / 'run'}"
    name, *_ = words = typed.split()
    assert refusal(train.main, *named.split(), *words) == (
        f"curax.train: {name} of process 1 differs from that of process 0; start all "
        "processes with the same command, code and files.\n"
    )
    assert not (tmp_path / "run").exists()


# ----- pieces


@pytest.mark.parametrize(
    ("raised", "first", "other"),
    [
        (ConfigError("no."), ConfigError("no."), ConfigError("no.")),
        (OSError("full"), OSError("full"), RuntimeError("process 0: OSError: full")),
        (None, None, None),
    ],
)
def test_what_the_first_process_raises_no_other_one_waits_for(
    monkeypatch, raised, first, other
):
    """The exchange stands for two processes, which call the same in turn."""
    sent = []

    def function():
        if raised:
            raise raised

    def gave(is_first):
        monkeypatch.setattr(peers, "is_first", lambda: is_first)
        try:
            peers.on_first(function)
        except Exception as error:
            return error

    monkeypatch.setattr(peers, "count", lambda: 2)
    monkeypatch.setattr(peers, "broadcast", lambda value: sent.append(value) or sent[0])
    assert [repr(gave(one)) for one in (True, False)] == [repr(first), repr(other)]
    assert len(sent) == 2


@pytest.mark.parametrize(
    ("env", "many"),
    [
        ({}, False),
        ({"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}, True),
        ({"SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "1"}, False),
        ({"SLURM_NTASKS": "2"}, False),  # of a batch script, not of srun
        ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"KUBERNETES_SERVICE_HOST": "1", "JOB_COMPLETION_INDEX": "0"}, True),
        ({"KUBERNETES_SERVICE_HOST": "1"}, False),
    ],
)
def test_a_cluster_is_detected_where_it_started_several_processes(env, many, tmp_path):
    assert clusters.detected(env, ()) is many
    tpu = (str(tmp_path),)  # a file that is there
    assert clusters.detected(env | {"JAX_PLATFORMS": "cpu"}, tpu) is many
    if not env:
        assert clusters.detected(env, tpu)


def test_verdicts_of_processes_are_those_of_one():
    nan = np.float32(np.nan)
    parts = [
        Verdicts(np.array([1, nan, nan, 0], np.float32), {}),
        Verdicts(np.array([nan, 0, nan, nan], np.float32), {2: "error: of two"}),
    ]
    both = grading.merged(parts)
    np.testing.assert_array_equal(both.outcome, np.array([1, 0, nan, 0], np.float32))
    assert (both.missing, both.reason) == (Counter(error=1), "error: of two")
    (alone,) = grading.join(parts[:1])
    assert alone.outcome is parts[0].outcome


def test_what_the_page_says_to_type_is_understood(monkeypatch):
    monkeypatch.chdir(many.ROOT)
    text = (many.ROOT / "docs" / "run_on_a_pod.md").read_text()
    text = text.replace("\\\n", " ").replace("$resume", "--resume")
    typed = re.findall(r"python -m curax\.train ([^\"\n]*)", text)
    assert len(typed) > 5
    for words in typed:
        argv = shlex.split(words.replace("&", " "))
        args = train.parser().parse_args(argv)
        override(load(recipe_of(args, train.DEFAULT)), args.assignments)
        assert train.is_one_of_many(args) == (args.process is not None)
