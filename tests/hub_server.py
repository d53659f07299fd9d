"""A server on loopback that speaks as much of the hub's protocol as downloads need."""

import contextlib
import hashlib
import http.server
import json
from urllib.parse import unquote, urlsplit

import judge_server

COMMITS = {"main": "a" * 40, "later": "b" * 40}
CUT = 1000  # bytes that are sent of a file whose connection breaks


class Hub:
    """Repositories `{(kind, name): {path: bytes}}`, and what was asked of them.

    Attributes:
        gated: names whose files need a token that nobody has.
        broken: paths whose next answer breaks off after `CUT` bytes.
        asked: `(method, path, Range header or None)` of each request.
        tokens: the tokens that were sent.
    """

    def __init__(self, repositories):
        self.repositories, self.gated, self.broken = repositories, set(), set()
        self.asked, self.tokens = [], set()
        self.commits = dict(COMMITS)


def handler(hub):
    """A request handler on the repositories of a `Hub`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers["Range"]))
            hub.tokens.add(self.headers["Authorization"])
            parts = path.strip("/").split("/")
            kind = "dataset" if "datasets" in parts[:2] else "model"
            of_api = parts[0] == "api"
            names = parts[1 + of_api :] if kind == "dataset" else parts[2 * of_api :]
            name, rest = "/".join(names[:2]), names[2:]
            files = hub.repositories.get((kind, name))
            if files is None:
                return self.refuse(401, "RepoNotFound")
            if name in hub.gated:
                return self.refuse(403, "GatedRepo")
            revision = rest[1] if len(rest) > 1 else "main"
            commit = hub.commits.get(revision, revision)
            if commit not in COMMITS.values():
                return self.refuse(404, "RevisionNotFound")
            if of_api and rest and rest[0] == "tree":
                return self.tree(files, "/".join(rest[2:]))
            if of_api:
                siblings = [{"rfilename": one} for one in files]
                return self.answer({"id": name, "sha": commit, "siblings": siblings})
            return self.file(files, "/".join(rest[2:]), commit)

        def refuse(self, status, code):
            self.send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

        def answer(self, value):
            body = json.dumps(value).encode()
            self.send(200, body, {"Content-Type": "application/json"})

        def tree(self, files, below):
            inside = {p: data for p, data in files.items() if p.startswith(below)}
            self.answer(
                [
                    {"type": "file", "path": p, "size": len(d), "oid": etag(d)}
                    for p, d in inside.items()
                ]
            )

        def file(self, files, path, commit):
            if path not in files:
                return self.refuse(404, "EntryNotFound")
            data, status = files[path], 200
            headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": commit}
            if asked := self.headers["Range"]:
                first = int(asked.removeprefix("bytes=").split("-")[0])
                last = len(data) - 1
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                data, status = data[first:], 206
            self.send(status, data, headers, path if self.command == "GET" else None)

        def send(self, status, body, headers, path=None):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if path in hub.broken:
                hub.broken.discard(path)
                body, self.close_connection = body[:CUT], True
            if self.command == "GET":
                self.wfile.write(body)

    return Handler


def etag(data):
    """The name of a blob, as git has it for small files."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextlib.contextmanager
def serving(repositories):
    """`(Hub, its address)` of a server that runs in a thread."""
    hub = Hub(repositories)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    with judge_server.running(server) as url:
        yield hub, url
