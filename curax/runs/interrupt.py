"""SIGINT, SIGTERM, SIGHUP: the first asks the run to stop.

A second SIGINT or SIGTERM ends the process. A terminal that is closed sends SIGHUP
more than once, and with others, so it never counts as a second one.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable

URGENT = (signal.SIGINT, signal.SIGTERM)
SIGNALS = (*URGENT, signal.SIGHUP)


class Interrupt:
    """Whether a signal has asked to stop; a context, to be entered in the main thread.

    Python runs signal handlers in the main thread between two bytecodes, so not before
    a program on the device has ended. Here the handlers do nothing; a thread is sent
    the number of each signal at once.
    """

    def __init__(self, said: Callable[[bool], None]):
        """The thread calls `said` with whether the process ends at once.

        At the first signal it does not; at a second SIGINT or SIGTERM it does.
        """
        self.number: int | None = None  # of the first signal
        self._said = said

    def __enter__(self) -> "Interrupt":
        """From here on signals are caught."""
        self._here, self._there = socket.socketpair()
        self._there.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._there.fileno())
        deaf = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as nohup does
        caught = URGENT if deaf else SIGNALS
        self._old = {n: signal.signal(n, lambda *_: None) for n in caught}
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
        urged = False
        while data := self._here.recv(1):
            number = data[0]
            if number not in SIGNALS:
                continue
            if self.number is None:
                self.number = number
                self._said(False)
            elif urged and number in URGENT:
                self._said(True)
                os._exit(128 + number)
            urged = urged or number in URGENT
