"""A server on loopback for graders that ask one: it answers as a test wants it to."""

import contextlib
import http.server
import json
import threading
from collections import Counter


class Asked:
    """What a server was asked.

    Attributes:
        url: its address.
        bodies: JSON values of all requests, in order.
        tokens: values of `Authorization`.
        paths: that were asked.
        most: requests at the same time.
        times: how often each body came, by its text.
    """

    def __init__(self):
        self.url, self.bodies, self.tokens, self.paths = "", [], [], []
        self.now = self.most = 0
        self.times = Counter()
        self.lock = threading.Lock()


def reply(handler, status=200, body="", **headers):
    """Send an answer; `body` is text, or JSON values."""
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    handler.send_response(status)
    for name, value in {"Content-Length": len(data), **headers}.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()
    handler.wfile.write(data)


@contextlib.contextmanager
def running(server):
    """The address of a server, which answers in a thread."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def serve(behave):
    """Serve `behave(handler, body, n)`, n of how many equal requests it is, from 1."""
    asked = Asked()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_POST(self):
            size = int(self.headers["Content-Length"] or 0)
            text = self.rfile.read(size).decode()
            body = json.loads(text or "null")
            with asked.lock:
                asked.bodies.append(body)
                asked.paths.append(self.path)
                asked.tokens.append(self.headers["Authorization"])
                asked.times[text] += 1
                asked.now += 1
                asked.most = max(asked.most, asked.now)
            try:
                with contextlib.suppress(OSError):  # who asked has hung up
                    behave(self, body, asked.times[text])
            finally:
                with asked.lock:
                    asked.now -= 1

        do_GET = do_POST  # noqa: N815

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_):
            pass

    with running(Server(("127.0.0.1", 0), Handler)) as asked.url:
        yield asked
