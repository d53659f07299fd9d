"""SIGINT and SIGTERM: the first asks the run to stop, the second ends the process."""

import os
import signal
import socket
import threading
from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Whether a signal has asked to stop; a context, to be entered in the main thread.

    Python runs signal handlers in the main thread between two bytecodes, so not before
    a program on the device has ended. Here the handlers do nothing; a thread is sent
    the number of each signal at once.
    """

    def __init__(self, said: Callable[[bool], None]):
        """At each signal the thread calls `said` with whether it is not the first."""
        self.number: int | None = None  # of the first signal
        self._said = said

    def __enter__(self) -> "Interrupt":
        """From here on signals are caught."""
        self._here, self._there = socket.socketpair()
        self._there.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._there.fileno())
        self._old = {n: signal.signal(n, lambda *_: None) for n in SIGNALS}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """From here on they do what they did before."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._there.close()
        self._thread.join()
        self._here.close()

    def _watch(self) -> None:
        while data := self._here.recv(1):
            number = data[0]
            if number not in SIGNALS:
                continue
            again, self.number = self.number is not None, self.number or number
            self._said(again)
            if again:
                os._exit(128 + number)
