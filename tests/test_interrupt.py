"""Signals, sent to processes of their own and to this one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from curax.runs.interrupt import Interrupt

# A main thread that computes and hears of no signal, as while a device computes.
DEAF = """
import hashlib
from curax.runs.interrupt import Interrupt

with Interrupt(lambda again: print(again, flush=True)):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def deaf(before="") -> subprocess.Popen:
    """The process of `DEAF`, with some code in front of it."""
    root = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", before + DEAF],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )


def line(process) -> str:
    return process.stdout.readline().rstrip("\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_leaves_at_once_whatever_the_main_thread_does(number):
    with deaf() as process:
        assert line(process) == "ready"
        process.send_signal(number)
        assert line(process) == "False"
        assert process.poll() is None
        process.send_signal(number)
        assert line(process) == "True"
        assert process.wait(10) == 128 + number


def test_a_terminal_that_is_closed_asks_once_however_often_it_does():
    listens = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    with deaf(listens) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGHUP)
        assert line(process) == "False"
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
            time.sleep(0.05)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert line(process) == "True"
        assert process.wait(10) == 128 + signal.SIGTERM


def test_who_is_deaf_to_a_closed_terminal_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt(lambda again: None) as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
            assert interrupt.number is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_signal_is_remembered_and_afterwards_all_is_as_before():
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    heard = []
    with Interrupt(heard.append) as interrupt:
        assert interrupt.number is None
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):
            if interrupt.number is None:
                time.sleep(0.01)
    assert interrupt.number == signal.SIGTERM
    assert heard == [False]
    assert {n: signal.getsignal(n) for n in before} == before
