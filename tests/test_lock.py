"""One process per folder, whatever processes do. None of them imports JAX."""

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from curax.config import ConfigError
from curax.settings import lock

# Holds a folder until its stdin is closed.
HOLDER = """
import sys
from pathlib import Path
from curax.settings import lock
from curax.settings.config_paths import ConfigError

try:
    with lock.hold(Path(sys.argv[1]), "--workdir"):
        print("held", flush=True)
        sys.stdin.read()
except ConfigError as error:
    print(error, flush=True)
"""


def holder(folder, code=HOLDER) -> subprocess.Popen:
    root = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )


def said(process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def held_by(folder) -> str:
    with pytest.raises(ConfigError) as caught, lock.hold(folder, "--workdir"):
        pass
    return str(caught.value)


def test_a_second_process_is_told_which_one_writes_there(tmp_path):
    folder = tmp_path / "a" / "run"
    with holder(folder) as process:
        assert said(process) == "held"
        assert re.fullmatch(
            rf"--workdir {folder} is being written by process {process.pid} on \S+, "
            r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d; wait until that process ends, or "
            "name another folder.",
            held_by(folder),
        )
        process.kill()
    with lock.hold(folder, "--workdir"):  # a lock ends with its process
        assert (folder / lock.FILE).exists()
    assert not (folder / lock.FILE).exists()


def test_of_processes_that_start_at_once_one_has_the_folder(tmp_path):
    folder = tmp_path / "run"
    processes = [holder(folder) for _ in range(6)]
    first = [said(process) for process in processes]
    assert first.count("held") == 1
    winner = processes[first.index("held")].pid
    for text in first:
        assert text == "held" or f" process {winner} on " in text or "another" in text
    for process in processes:
        process.communicate()
    # The folder goes, unless one that made it came second to the lock.
    assert [path for path in tmp_path.rglob("*") if path != folder] == []


def test_what_was_made_for_nothing_goes_and_all_else_stays(tmp_path):
    with lock.hold(tmp_path / "a" / "b", "--workdir"):
        pass
    assert list(tmp_path.iterdir()) == []
    with lock.hold(tmp_path / "a" / "b", "--workdir"):
        (tmp_path / "a" / "b" / "file").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]


# A process that leaves two children behind, which sleep. A fork lets go of the lock
# in its first moments: it says when it has.
PARENT = """
import os, subprocess, sys, time
from pathlib import Path
from curax.settings import lock

with lock.hold(Path(sys.argv[1]), "--workdir"):
    children = [subprocess.Popen(["sleep", "60"], close_fds=False).pid]
    reader, writer = os.pipe()
    children.append(os.fork())
    if children[1] == 0:
        os.write(writer, b"x")
        time.sleep(60)
    os.read(reader, 1)
    print(*children, flush=True)
    sys.stdin.read()
    os._exit(0)
"""


def test_children_neither_let_go_of_the_folder_nor_keep_it(tmp_path):
    with holder(tmp_path, PARENT) as process:
        children = [int(word) for word in said(process).split()]
        assert f" process {process.pid} on " in held_by(tmp_path)
    with lock.hold(tmp_path, "--workdir"):
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_where_there_are_no_locks_it_is_said_once_and_the_run_goes_on(
    tmp_path, monkeypatch, capsys
):
    def fails(file, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fails)
    with lock.hold(tmp_path, "--workdir"):
        assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == (
        f"Warning: {tmp_path} cannot be locked (No locks available), so see to it that "
        "no second process writes there.\n"
    )


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    assert held_by(tmp_path / "file" / "a") == (
        f"--workdir {tmp_path}/file/a cannot be written: Not a directory; name another "
        "folder."
    )


@pytest.mark.parametrize("text", ["", "5", "{", '{"pid": 3}'])
def test_a_holder_that_has_not_yet_said_who_it_is_is_another_process(tmp_path, text):
    with lock.hold(tmp_path, "--workdir"):
        (tmp_path / lock.FILE).write_text(text)
        assert f"--workdir {tmp_path} is being written by another process; " in held_by(
            tmp_path
        )
