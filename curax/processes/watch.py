"""Connections that tell a process when another process of its run has ended.

Process 0 has a connection with each of the others. The kernel closes the connections of
a process that dies, so its end is noticed at once; both ends send a byte every two
seconds, so a machine that is gone is noticed as well. JAX notices either by itself, but
then ends the process without a word of ours, or waits.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

EVERY, SILENCE = 2.0, 30.0  # seconds between two bytes; without any, until one is lost
GRACE = 3.0  # seconds in which a process may say by itself why it ends
BEAT, DONE, FAILED = b".", b"q", b"x"


class Address(NamedTuple):
    """Port of process 0, and the token by which it recognises its run's processes."""

    port: int
    token: bytes


def _on_abort(call: Callable[[], None]) -> Any:
    """Set the handler of SIGABRT, by which JAX ends a process that has lost others.

    It runs in the thread that aborts, unlike Python's handlers. What is returned must
    live as long as the handler.
    """
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: call())
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)
    return handler


@contextlib.contextmanager
def within(seconds: float, saved: Callable[[], str]) -> Iterator[None]:
    """Context that ends this process with status 1 unless all are found in time.

    Also where JAX aborts earlier, as its own message does not help a user.

    Args:
        seconds: time to find them.
        saved: text on the last checkpoint, for the message.
    """
    ending = threading.Lock()

    def give_up() -> None:
        with ending:
            text = (
                "curax.train: the processes of this run did not all find each other "
                f"within {seconds:g} s, so this one ends; start all of them again, "
                "with --start-timeout SECONDS where they need longer: "
                f"{saved()}.\n"
            )
            os.write(2, text.encode())
            os._exit(1)

    handler = _on_abort(give_up)  # alive until it is taken back
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        ctypes.CDLL(None).signal(signal.SIGABRT, ctypes.c_void_p(0))  # the default
        del handler


class Watch:
    """The connections of one process, and what it does when another has ended.

    If a process is lost, this one reports it and ends with status 1. A process that
    fails reports why before it ends; the others wait `GRACE` for it, and meanwhile
    report errors of their own, which may be the same.
    """

    def __init__(self, index: int, count: int, saved: Callable[[], str]):
        """Set the number of this process and of all; nothing is opened.

        Args:
            index: number of this process, from 0.
            count: processes of the run.
            saved: text on the last checkpoint, for messages.
        """
        self._index, self._count = index, count
        self._links: dict[int, socket.socket] = {}  # by the other process
        self._threads: dict[int, threading.Thread] = {}
        self._lock, self._leaving = threading.Lock(), False
        self._dead = threading.Event()  # a process is gone that did not say so
        self._saved = saved

    # ----- begin

    def listen(self) -> Address:
        """Address of a new listening socket; called by process 0."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(
            ("", 0), family=family, backlog=self._count, dualstack_ipv6=both
        )
        self._token = secrets.token_bytes(16)
        return Address(self._server.getsockname()[1], self._token)

    def accept(self) -> None:
        """Wait until all others have connected; called by process 0."""
        with self._server as server:
            while len(self._links) < self._count - 1:
                link, _ = server.accept()
                link.settimeout(GRACE)
                try:
                    message = link.recv(20, socket.MSG_WAITALL)
                except OSError:
                    message = b""
                if message[:16] == self._token:
                    self._links[int.from_bytes(message[16:])] = link
                else:
                    link.close()

    def connect(self, host: str, address: Address) -> None:
        """Connect with process 0.

        Raises:
            OSError: it cannot be reached.
        """
        link = socket.create_connection((host, address.port), timeout=SILENCE)
        link.sendall(address.token + self._index.to_bytes(4))
        self._links[0] = link

    def begin(self) -> None:
        """Watch the connections from now on."""
        for peer, link in self._links.items():
            link.settimeout(SILENCE)
            thread = threading.Thread(target=self._hear, args=(peer, link), daemon=True)
            self._threads[peer] = thread
        self._handler = _on_abort(self._aborted)
        beats = threading.Thread(target=self._beat, daemon=True)
        for thread in (*self._threads.values(), beats):
            thread.start()

    # ----- while the run goes on

    def _beat(self) -> None:
        while not self._leaving:
            self._say(BEAT)
            time.sleep(EVERY)

    def _say(self, what: bytes) -> None:
        for link in self._links.values():
            try:
                link.sendall(what)
            except OSError:  # it has ended, which its own thread notices
                continue

    def _hear(self, peer: int, link: socket.socket) -> None:
        """Read messages of another process until it is done or lost."""
        while True:
            try:
                message = link.recv(64)
            except TimeoutError:
                self._dead.set()
                return self._lost(peer, f"was not heard of for {SILENCE:.0f} s", GRACE)
            except OSError:
                message = b""
            if DONE in message:
                return None
            if FAILED in message:
                return self._lost(peer, "has failed", GRACE)
            if not message:
                self._dead.set()
                # JAX ends this process at once where process 0 has died.
                return self._lost(peer, "has ended", GRACE if peer else 0.0)

    def _aborted(self) -> None:
        """Say that this process is aborted, unless the end of another is said first."""
        time.sleep(2 * GRACE)  # for the thread that hears of that
        self._finish(f"process {self._index} of {self._count} was aborted, see above")

    def _lost(self, peer: int, what: str, grace: float) -> None:
        """Report a lost process and end this one, unless it is already ending."""
        time.sleep(grace)
        ends = f"process {peer} of {self._count} {what}, so process {self._index} ends"
        self._finish(ends)

    def _finish(self, why: str) -> None:
        """Say why this process ends, and end it with status 1, unless it is ending."""
        with self._lock:
            if self._leaving:
                return
            self._leaving = True
        text = f"curax.train: {why}; go on with --resume: {self._saved()}.\n"
        os.write(2, text.encode())
        self._end(1)

    # ----- the end

    def done(self) -> None:
        """Tell the others that this process ends normally."""
        self._leaving = True
        self._say(DONE)

    def settle(self) -> None:
        """Wait for the watch to end this process if another is lost; else return.

        The watch reports the lost process, and ends this one meanwhile.
        """
        if self._dead.wait(1.0):
            time.sleep(4 * GRACE)

    def leave(self, status: int) -> None:
        """End this process with a status, without JAX's wait for the others.

        A process that fails by itself has reported why.
        """
        with self._lock:
            if self._leaving:  # a thread of this object ends the process
                time.sleep(4 * SILENCE)
            self._leaving = True
        self._end(status)

    def _end(self, status: int) -> None:
        """Exit; process 0 waits for the others, which JAX would end without it."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._say(FAILED)
        if self._index == 0:
            end = time.monotonic() + 2 * GRACE
            for thread in self._threads.values():
                if thread is not threading.current_thread():
                    thread.join(max(end - time.monotonic(), 0.0))
        os._exit(status)
