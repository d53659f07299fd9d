"""Signals that stop a run: SIGINT, SIGTERM and SIGHUP.

The first one requests a stop after the current chunk; a second SIGINT or SIGTERM ends
the process. A closing terminal may send SIGHUP several times, so it never counts as a
second signal.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable

URGENT = (signal.SIGINT, signal.SIGTERM)
SIGNALS = (*URGENT, signal.SIGHUP)


class Interrupt:
    """Context that records the first signal; to be entered in the main thread.

    Python runs signal handlers in the main thread between two bytecodes, so only after
    a running device program has ended. Here a thread receives each signal at once
    through the wake-up descriptor, and the handlers do nothing.
    """

    def __init__(self, on_signal: Callable[[bool], None]):
        """Set the callback.

        Args:
            on_signal: called in the thread with False at the first signal, and with
                True at a second SIGINT or SIGTERM, before the process ends.
        """
        self.number: int | None = None  # of the first signal
        self._on_signal = on_signal

    def __enter__(self) -> "Interrupt":
        """Install the handlers and start the thread."""
        self._here, self._there = socket.socketpair()
        self._there.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._there.fileno())
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        caught = URGENT if nohup else SIGNALS
        self._old = {n: signal.signal(n, lambda *_: None) for n in caught}
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers from before."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._there.close()
        self._thread.join()
        self._here.close()

    def _receive(self) -> None:
        """The thread: record the first signal, end the process at a second."""
        urged = False
        while data := self._here.recv(1):
            number = data[0]
            if number not in SIGNALS:
                continue
            if self.number is None:
                self.number = number
                self._on_signal(False)
            elif urged and number in URGENT:
                self._on_signal(True)
                os._exit(128 + number)
            urged = urged or number in URGENT
