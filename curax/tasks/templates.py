"""Chat templates, in a sandbox."""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any


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
