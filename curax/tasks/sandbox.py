"""The child process that renders chat templates, with limits of time and memory.

An untrusted template is a program. Jinja's sandbox denies it access to objects; only
the limits of a process bound its time and memory.
"""

import contextlib
import json
import os
import resource
import signal
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from curax.tasks.tokenizer_backends import error_line

SECONDS = 1.0  # of processor time per rendering
MEMORY = 2**29  # bytes of address space
CHARACTERS = 2**20  # of rendered text, at most


@lru_cache(maxsize=8)
def compiled(template: str) -> Any:
    """A chat template compiled in Jinja's immutable sandbox, as transformers does."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the model's text, and renders as its content."""

        tags = {"generation"}  # noqa: RUF012 - as the library has it

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, **form):
        # Jinja's own filter escapes for HTML, which no tokenizer does.
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox.from_string(template)


def rendered(template: str, context: dict[str, Any]) -> dict[str, Any]:
    """`{"text": ...}`, or `{"error": ..., "line": ...}` of a template that fails."""
    try:
        text = compiled(template).render(context)
        if len(text) <= CHARACTERS:
            return {"text": text}
        return {"error": f"more than {CHARACTERS} characters of text"}
    except MemoryError:
        return {"error": f"MemoryError: more than {MEMORY >> 20} MiB"}
    except Exception as error:  # a template may fail in any way that code may
        return {"error": error_line(error), "line": getattr(error, "lineno", None)}


def serve(number: int) -> None:
    """Render the requests of a pipe until it is closed.

    A rendering that takes too long ends the process, by a signal that nothing handles,
    so that code outside Python ends as well.
    """
    import jinja2.sandbox

    assert jinja2.sandbox  # imported before the limits, which are for templates
    with contextlib.suppress(OSError, ValueError):  # not every system has all of them
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    pipe: Any = Connection(number)
    with contextlib.suppress(EOFError, OSError):
        while True:
            template, context, seconds = json.loads(pipe.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, seconds)
            reply = json.dumps(rendered(template, context)).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(reply)
    os._exit(0)
