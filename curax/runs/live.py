"""Pages of runs, served while the runs go on.

A page is rendered when it is asked for and a file of its run has changed since; nothing
is written. Pages hold completions of a model: they are served to this machine alone
unless another address is named.
"""

import hashlib
import os
import socket
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from curax.config import ConfigError
from curax.runs import page, reading, side_by_side
from curax.runs.reading import Run
from curax.runs.templates import filled

FILES = (
    *("config.json", "metrics.jsonl", "rollouts.jsonl", "warm_start.jsonl"),
    *("evaluation.json", "expected.json", "alarms.jsonl"),
)
PATIENCE = 30.0  # seconds for which a reader may be silent
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Site:
    """The pages of some runs: of each, and of all side by side."""

    def __init__(self, runs: Mapping[str, Path], title: str | None = None):
        """Set folders by name; nothing is read yet. `title` is that of `/`."""
        self._runs, self._title = dict(runs), title
        self._pages: dict[str, tuple[str, bytes]] = {}  # path: version, page
        self._lock = threading.Lock()  # rendering takes a second: one at a time

    def answer(self, path: str) -> bytes | None:
        """Body for a path, `/`, `/version`, `/0/` or `/0/version`; None: not found."""
        place, _, name = path.strip("/").rpartition("/")
        if path.endswith("/"):
            place, name = path.strip("/"), ""
        runs = self._runs_at(place)
        if runs is None or name not in ("", "version"):
            return None
        if name == "version":
            return version(runs.values()).encode()
        with self._lock:
            now = version(runs.values())
            known = self._pages.get(place)
            if known is None or known[0] != now:
                known = now, self._render(runs, now)
                self._pages[place] = known
            return known[1]

    def _runs_at(self, place: str) -> dict[str, Path] | None:
        if not place:
            return self._runs
        several = self._runs if len(self._runs) > 1 else {}
        by_number = {str(i): {name: several[name]} for i, name in enumerate(several)}
        return by_number.get(place)

    def _render(self, runs: Mapping[str, Path], now: str) -> bytes:
        found: dict[str, Run] = {}
        waiting: dict[str, str] = {}
        for name, folder in runs.items():
            try:
                found[name] = reading.read(folder)
            except (reading.DamagedError, OSError) as error:
                waiting[name] = str(error)
        title = self._title if runs == self._runs and self._title else None
        if not found:
            return filled(
                "curax.runs/waits.html",
                version=now,
                title=title or ", ".join(runs),
                reasons=list(waiting.values()),
            )
        if len(runs) == 1:
            ((name, read),) = found.items()
            return page.render(read, title or name, version=now)[0]
        links = [f"{i}/" for i, name in enumerate(runs) if name in found]
        title = title or f"{len(runs)} runs"
        return side_by_side.render(
            found, title, version=now, links=links, waiting=waiting
        )


def version(folders: Iterable[Path]) -> str:
    """Digest of names, times and sizes of the files that pages are made of."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in folders:
        for name in FILES:
            try:
                stat = (folder / name).stat()
            except OSError:
                continue
            mark = f"{folder}/{name} {stat.st_mtime_ns} {stat.st_size}\n"
            digest.update(os.fsencode(mark))
    return digest.hexdigest()


def names_of(runs: Sequence[Path]) -> dict[str, Path]:
    """Run folders by a name for each: its last part, or its path where these agree.

    Raises:
        ConfigError: a folder is missing or named twice.
    """
    for run in runs:
        if not run.is_dir():
            raise ConfigError(f"{run}: no such folder; give the folder of a run.")
    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError("a run is named twice; name each folder once.")
    short = [run.resolve().name for run in runs]
    names = short if len(set(short)) == len(short) else [str(run) for run in runs]
    return dict(zip(names, runs, strict=True))


def server(site: Site, host: str, port: int) -> ThreadingHTTPServer:
    """A server of the site's pages, bound to its address; `serve_forever` runs it.

    Bound to this machine alone, it answers requests by a name of this machine only, so
    that a page of another site cannot read it.

    Raises:
        ConfigError: the address cannot be taken.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE

        def do_GET(self) -> None:
            asked = (self.headers.get("Host") or "").rpartition(":")
            name = (asked[0] or asked[2]).strip("[]")
            if host in LOOPBACK and name not in LOOPBACK:
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            found = site.answer(self.path.partition("?")[0])
            if found is None:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.OK)
            kind = "plain" if self.path.endswith("version") else "html"
            self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(found)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(found)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a line for each look of each reader is of no use."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # a reader that left
                super().handle_error(request, client_address)

    try:
        made = Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--host {host} --port {port} cannot be taken ({why}); name another port."
        ) from error
    return made
