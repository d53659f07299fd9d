"""What commands tell JAX and XLA, and what they leave to the user."""

import os
import subprocess
import sys

import jax
import pytest

from curax.runs import libraries
from curax.step import mesh as meshes

EXTRA, _, _ = meshes.PLAIN_LOOPS.partition("=")
NAMED = ("flags.txt", f"--{meshes.EFFORT}=2", f"{EXTRA}=other")


@pytest.mark.parametrize(
    ("given", "jaxlib", "then"),
    [
        (None, "0.12.0", None),
        ("--a=1", "0.12.0", "--a=1"),
        (f"--{libraries.DEVICES}=8", "0.10.2", f"--{libraries.DEVICES}=8"),
        (
            f"--{libraries.DEVICES}=8",
            "0.12.0",
            f"--{libraries.DEVICES}=8 {libraries.IN_ORDER}=false",
        ),
        (f"--{libraries.DEVICES}=8 {libraries.IN_ORDER}", "0.12.0", None),
    ],
)
def test_devices_of_one_cpu_take_up_collectives_in_one_order(
    given, jaxlib, then, monkeypatch
):
    monkeypatch.setattr(libraries, "version", lambda _: jaxlib)
    monkeypatch.setattr(libraries.meshes, "effort_is_named", lambda: True)
    monkeypatch.delenv("XLA_FLAGS")
    if given:
        monkeypatch.setenv("XLA_FLAGS", given)
    libraries.set_up()
    assert os.environ.get("XLA_FLAGS") == (then or given)


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ("", meshes.PLAIN_LOOPS),
        ("--a=1", f"--a=1 {meshes.PLAIN_LOOPS}"),
        *((given, given) for given in NAMED),
    ],
)
def test_commands_compile_plain_loops_unless_flags_say_how(given, then, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", given)
    libraries.set_up()
    assert os.environ["XLA_FLAGS"] == then


def test_flags_of_plain_loops_are_known_to_the_compiler():
    what = (
        "import jax; print(jax.jit(lambda x: (x.T * 2).sum())(jax.numpy.ones((2, 3))))"
    )
    told = subprocess.run(
        [sys.executable, "-c", what],
        env=os.environ | {"XLA_FLAGS": meshes.PLAIN_LOOPS},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split() == ["12.0"]


def test_a_user_without_a_home_has_no_cache_of_programs(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for no user
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        libraries.set_up()
        assert jax.config.values["jax_compilation_cache_dir"] is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
