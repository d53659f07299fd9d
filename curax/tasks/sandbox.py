"""What the child process does with files of strangers, and its limits.

An untrusted template is a program. Jinja's sandbox denies it access to objects; only
the limits of a process bound its time and memory. The same holds for a tokenizer, whose
rules may make any text of a letter.
"""

import contextlib
import json
import os
import resource
import signal
from datetime import date
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from curax.settings import machine
from curax.tasks import tokenizer_backends
from curax.tasks.tokenizer_backends import error_line

SECONDS = 1.0  # of processor time per rendering
SPACE = 2**29  # bytes of address space, beside those of the process itself
# To templates: the day that Llama's name where they are told none. So prompts of a run,
# and of an evaluation that goes on, are the same tomorrow.
TODAY = date(2024, 7, 26)
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
    sandbox.globals["strftime_now"] = TODAY.strftime
    return sandbox.from_string(template)


def rendered(template: str, context: dict[str, Any]) -> dict[str, Any]:
    """`{"text": ...}`, or `{"error": ..., "line": ...}` of a template that fails."""
    try:
        text = compiled(template).render(context)
        if len(text) <= CHARACTERS:
            return {"text": text}
        return {"error": f"more than {CHARACTERS} characters of text"}
    except MemoryError:
        raise
    except Exception as error:  # a template may fail in any way that code may
        return {"error": error_line(error), "line": getattr(error, "lineno", None)}


def probed(folder: str) -> dict[str, Any]:
    """`{}`, or `{"said": ...}` of a tokenizer that cannot be used, a sentence."""
    try:
        tokenizer_backends.probe(Path(folder))
    except ValueError as error:
        return {"said": str(error)}
    return {}


FUNCTIONS = {"render": rendered, "probe": probed}


def serve(number: int) -> None:
    """Answer the requests of a pipe until it is closed.

    What takes too long ends the process, by a signal that nothing handles, so that code
    outside Python ends as well.
    """
    import jinja2.sandbox

    assert jinja2.sandbox  # imported before the limits, which are for templates
    with contextlib.suppress(OSError, ValueError):  # not every system has all of them
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe: Any = Connection(number)
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, args, seconds, space = json.loads(pipe.recv_bytes())
            machine.limit_bytes(space)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                reply = json.dumps(FUNCTIONS[name](*args)).encode()
            except MemoryError:
                reply = {"error": f"MemoryError: more than {space >> 20} MiB"}
                reply = json.dumps(reply).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(reply)
    os._exit(0)
