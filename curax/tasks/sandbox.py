"""Chat templates rendered in a process of its own, whose time and memory are limited.

A template of a stranger is a program. Jinja's sandbox keeps it from reaching anything;
that it ends, and how much it makes on the way, only a process can hold it to.
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

from curax.tasks.engines import reason

SECONDS = 1.0  # of processor time for a rendering
MEMORY = 2**29  # bytes of address space
MOST = 2**20  # characters of what is rendered


@lru_cache(maxsize=8)
def compiled(template: str) -> Any:
    """A chat template in a sandbox: it makes text, and reaches nothing else."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` says which text is the model's: that stays as it is."""

        tags = {"generation"}  # noqa: RUF012 - as the library has it

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, **form):
        # The library's own escapes what HTML needs escaped, and no tokenizer does.
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox.from_string(template)


def rendered(template: str, context: dict[str, Any]) -> dict[str, Any]:
    """`text`; or `error`, with `line` if that is known, of a template that fails."""
    try:
        text = compiled(template).render(context)
        if len(text) <= MOST:
            return {"text": text}
        return {"error": f"more than {MOST} characters of text"}
    except MemoryError:
        return {"error": f"MemoryError: more than {MEMORY >> 20} MiB"}
    except Exception as error:  # a template may fail in any way that code may
        return {"error": reason(error), "line": getattr(error, "lineno", None)}


def serve(number: int) -> None:
    """Render what is asked for through a pipe until that is closed.

    A rendering that takes too long is ended with the process, by a signal that nothing
    in it handles: whatever it is doing, in Python or not, ends there.
    """
    import jinja2.sandbox

    assert jinja2.sandbox  # before the limits, which are for templates
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
