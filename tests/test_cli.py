"""What the command lines have in common."""

import errno
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from outputs import ran
from small import get_config

from curax import __main__ as commands
from curax.config import ConfigError
from curax.settings import cli, errors
from curax.settings.cli import command_line

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["train", "evaluate", "export", "xray"])
def test_help_comes_at_once(name):
    """Nothing heavy is imported before the input is read."""
    code = (
        "import atexit, sys; from curax import __main__ as commands; "
        f"one = commands.module('{name}'); sys.argv[1:] = ['--help']; "
        "heavy = {'jax', 'matplotlib', 'optax'}; "
        "atexit.register(lambda: print(heavy & {*sys.modules})); "
        "one.main()"
    )
    status, shown, _ = ran("-c", code)
    assert status == 0
    assert shown.startswith(f"usage: python -m curax {name} ")
    assert shown.endswith("\nset()\n")


@pytest.mark.first(2)
@pytest.mark.parametrize("name", commands.BY_PYTHON)
def test_python_runs_commands_as_modules_too(name):
    status, shown, _ = ran("-m", f"curax.{name}", "--help")
    assert status == 0
    assert shown.startswith(f"usage: python -m curax {name} ")


def test_an_option_that_is_nearly_one_is_told_before_what_is_missing():
    parser = cli.Parser("one")
    parser.add_argument("--topology", required=True)
    for typed in (["--topolgy", "v5e"], ["--topolgy=v5e"]):
        with pytest.raises(ConfigError) as told:
            parser.parse_args(typed)
        assert str(told.value) == "--topolgy is no option; did you mean --topology?"
    assert parser.parse_args(["--topology", "--topolgy is a value"])
    for typed in (
        ["--topology", "v5e", "--", "--topolgy"],
        ["--topology=v5e", "--top"],
    ):
        with pytest.raises(ConfigError, match="unrecognized arguments: --"):
            parser.parse_args(typed)


# Prints until its reader has gone, and on; what it was to do is done.
CHATTY = """
import sys
from functools import partial
from pathlib import Path
from curax.settings.cli import survives_closed_output
from curax.runs.progress import Progress

@survives_closed_output
def main():
    with Progress() as progress:
        for number in range(3_000):
            progress.say(f"line {number}")
            print("said", file=sys.stderr)
    print("x" * 100_000)
    Path(sys.argv[1]).write_text("done")
    return 0

sys.exit(main())
"""


def chatty(path, end):
    """Exit status of a shell that ends so, and what it says itself."""
    shell = f'set -o pipefail; "$0" -c "$1" "$2" {end}'
    done = subprocess.run(
        ["bash", "-c", shell, sys.executable, CHATTY, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return done.returncode, done.stdout


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("end", "heard"),
    [
        ("2> /dev/null | head -1", "line 0\n"),
        ("2>&1 > /dev/null | head -1", "said\n"),
        ("> /dev/full 2>&1", ""),
        (">&- 2>&-", ""),
    ],
)
def test_who_is_read_no_longer_goes_on_to_the_end(tmp_path, end, heard):
    assert chatty(tmp_path / "file", end) == (0, heard)
    assert (tmp_path / "file").read_text() == "done"


def test_nothing_is_said_of_a_reader_that_has_gone(tmp_path):
    complaints = tmp_path / "complaints"
    end = f"2> >(grep -v said > {complaints}) | head -1"
    assert chatty(tmp_path / "file", end) == (0, "line 0\n")
    assert complaints.read_text() == ""


ELSEWHERE = """
import sys
from curax.config import ConfigError
from curax.runs.progress import Progress
from curax.settings.cli import command_line

@command_line("curax.train")
def main(argv):
    with Progress() as progress:
        progress.say("begins in прогон")
    print("Written: прогон/π.html")
    raise ConfigError("прогон is there already.")

sys.exit(main())
"""


@pytest.mark.first(1)
@pytest.mark.parametrize("terminal", ["ascii", "ascii:strict", "latin-1"])
def test_a_path_in_another_script_ends_nothing_where_a_terminal_lacks_it(terminal):
    name = "прогон".encode("ascii", "backslashreplace").decode()
    assert ran("-X", "utf8", "-c", ELSEWHERE, PYTHONIOENCODING=terminal) == (
        2,
        f"begins in {name}\nWritten: {name}/\\u03c0.html\n",
        f"curax.train: {name} is there already.\n",
    )


AGAIN = """
from curax.settings.cli import again
print(again("train", ["a b", "--resume"]))
"""


@pytest.mark.parametrize(
    ("run", "begin"),
    [
        ("-P -W error -m told", "-P -W error -m"),
        ("told.py -m", "-m"),  # an option of the script
    ],
)
def test_the_command_to_go_on_has_options_of_the_interpreter(run, begin, tmp_path):
    (tmp_path / "told.py").write_text(AGAIN)
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    status, shown, _ = ran(*run.split(), cwd=tmp_path, PYTHONPATH=path)
    assert status == 0
    assert shown == f"{sys.executable} {begin} curax.train 'a b' --resume\n"


# A Ctrl-C comes inside of a callback of the garbage collector, which JAX has as well.
COLLECTING = """
import gc, os, signal, sys, time
from curax.settings.cli import command_line

def callback(*_):
    gc.callbacks.remove(callback)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)

@command_line("curax.one")
def main(argv):
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(60)
    return 0

sys.exit(main())
"""


def test_an_interrupt_that_comes_while_garbage_is_collected_is_heard():
    assert ran("-c", COLLECTING, timeout=30) == (130, "", "")


COMPILING = """
import atexit, signal, sys
from curax.settings.cli import command_line

@command_line("curax.one")
def main(argv):
    import jax, jax.numpy as jnp
    atexit.register(print, "ended")

    def slow(x):
        for add in range(1000):
            x = jnp.sin(x) @ x + add
        return x

    program = jax.jit(slow).lower(jnp.ones((64, 64)))
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    program.compile()
    print("compiled")
    return 0

sys.exit(main())
"""


def test_an_interrupt_while_jax_compiles_for_minutes_ends_the_process():
    slow = {"XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    assert ran("-c", COMPILING, timeout=30, **slow) == (130, "ended\n", "")


BEHIND = """
import sys
from curax.settings.cli import command_line

@command_line("curax.one")
def main(argv):
    import jax, jax.numpy as jnp
    from curax.step.compiling import Beside, Program

    def slow(x):
        for add in range(1000):
            x = jnp.sin(x) @ x + add
        return x

    Beside(2)("slow", Program(slow, None), (jax.ShapeDtypeStruct((64, 64), "f"),))
    print("left")
    return 143

sys.exit(main())
"""


def test_a_command_that_ends_waits_for_no_program_that_compiles_beside_it():
    slow = {"XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    assert ran("-c", BEHIND, timeout=30, **slow) == (143, "left\n", "")


def test_what_else_python_drops_is_told_as_before(monkeypatch):
    told, dropped = [], SimpleNamespace(exc_type=ValueError)
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with cli.hears_interrupts():
        sys.unraisablehook(dropped)
    sys.unraisablehook(dropped)
    assert told == [dropped, dropped]


FULL = "Out of memory allocating 8 bytes."


@pytest.mark.parametrize(
    "error",
    [MemoryError(FULL), OSError(errno.ENOMEM, FULL), jax.errors.JaxRuntimeError(FULL)],
    ids=lambda error: type(error).__name__,
)
def test_what_there_is_no_memory_for_is_told_in_a_sentence(error, capsys):
    assert commanded(error) == 1
    assert re.fullmatch(
        r"curax\.one: there is not enough memory \(.*Out of memory allocating 8 "
        r"bytes\b.*\); ask for less, or allow more\.\n",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG])
def test_a_path_that_is_closed_is_told_in_a_sentence(number, capsys, monkeypatch):
    closed = OSError(number, os.strerror(number), "a/b")
    with pytest.raises(OSError, match="a/b"):  # in a function of the user's
        commanded(closed)
    monkeypatch.setattr(errors, "PACKAGE", str(Path(__file__).parent))
    assert commanded(closed) == 2
    why = f"a/b cannot be used: {closed.strerror}; name another path"
    assert capsys.readouterr().err == f"curax.one: {why}.\n"


@pytest.mark.parametrize("asked", ["cuda", None])
@pytest.mark.parametrize("why", ["", "Unable to initialize backend 'cuda'"])
def test_a_device_that_jax_does_not_have_is_told(asked, why, capsys, monkeypatch):
    """Without a package for it JAX asserts; one that finds no device says why."""
    error = RuntimeError(why) if why else AssertionError()
    with pytest.raises(type(error)):  # of something else: there are devices
        commanded(error)

    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if asked:
        monkeypatch.setenv("JAX_PLATFORMS", asked)
    assert commanded(error) == 2
    where = f" for JAX_PLATFORMS={asked}" if asked else ""
    fix = "unset that, or install JAX for it" if asked else "set JAX_PLATFORMS=cpu"
    said = f"JAX has no device{where}{f' ({why})' if why else ''}; {fix}."
    assert capsys.readouterr().err == f"curax.one: {said}\n"
    with pytest.raises(ConfigError) as refused, errors.config_errors(get_config()):
        raise error
    assert str(refused.value) == said


def test_an_interrupt_where_a_program_calls_back_for_python_stops_the_command(
    capsys, caplog
):
    def interrupted(x):
        raise KeyboardInterrupt

    @command_line("curax.compare", goes_on=True)
    def main(argv):
        return int(jax.jit(partial(jax.pure_callback, interrupted, x))(x))

    x = np.int32(0)
    assert main([]) == 130
    assert capsys.readouterr().out.startswith("Stopped; to go on: ")
    assert not caplog.records


def test_an_interrupt_of_the_compiler_of_a_gpu_stops_the_command():
    said = "INTERNAL: ptxas exited with non-zero error code {}, output: "
    assert commanded(jax.errors.JaxRuntimeError(said.format(2))) == 130
    with pytest.raises(jax.errors.JaxRuntimeError):
        commanded(jax.errors.JaxRuntimeError(said.format(255)))


def test_an_interrupt_where_a_module_is_imported_stops_the_command():
    error = ImportError("initialization failed")
    with pytest.raises(ImportError):
        commanded(error)
    error.__cause__ = KeyboardInterrupt()
    assert commanded(error) == 130


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EACCES, "no path"),
        RuntimeError(FULL),
        *map(jax.errors.JaxRuntimeError, ("", " Ctrl-C")),
    ],
)
def test_a_fault_of_the_program_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        commanded(error)


@pytest.mark.parametrize("kind", [ConfigError, KeyboardInterrupt])
@pytest.mark.parametrize("writes", [False, True])
def test_what_fails_leaves_no_folder_that_is_empty(kind, writes, tmp_path):
    (there := tmp_path / "there").mkdir()

    def work(out):
        with cli.made_folder(out):
            assert out.is_dir()
            if writes:
                (out / "file").touch()
            raise kind

    with pytest.raises(kind):
        work(there)
    with pytest.raises(kind):
        work(there / "deep" / "er")
    left = {"file", "deep", "deep/er", "deep/er/file"} if writes else set()
    assert {str(path.relative_to(there)) for path in there.rglob("*")} == left
    assert there.is_dir()


def test_the_home_folder_stands_behind_an_equals_sign_too(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    got = []

    @command_line("curax.one")
    def main(argv):
        got.extend(argv)
        return 0

    words = ["title=a ~/b", "~x", "a=~x/y", "a=~/ b", "a=~/{b}", "http://x?y=~/z"]
    assert main(["--workdir=~/x", "model.path=~/m", *words]) == 0
    assert got == ["--workdir=/home/me/x", "model.path=/home/me/m", *words]


def commanded(error):
    """What a command returns that fails so."""

    @command_line("curax.one")
    def main(argv):
        raise error

    return main([])


@pytest.mark.first(10)
@pytest.mark.parametrize("name", commands.MODULES)
def test_every_command_line_goes_on(name):
    assert hasattr(commands.module(name).main, "__wrapped__")


@pytest.mark.parametrize(
    ("terminal", "term", "said"),
    [
        (True, "xterm", "".join(f"\r{n} of 8 done" for n in range(1, 9)) + "\n"),
        (True, "dumb", "2 of 8 done\n4 of 8 done\n6 of 8 done\n8 of 8 done\n"),
        (False, "xterm", "2 of 8 done\n4 of 8 done\n6 of 8 done\n8 of 8 done\n"),
    ],
)
def test_progress_is_one_line_of_a_terminal_that_redraws_it(
    terminal, term, said, capsys, monkeypatch
):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    for n in range(1, 9):
        cli.count("done", n, 8)
    assert capsys.readouterr().err == said
