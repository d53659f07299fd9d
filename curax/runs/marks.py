"""Checksums of what a run is asked, graded and begun by, told from one to the next."""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from curax import hub
from curax.config import Config
from curax.settings import errors
from curax.settings.config_paths import option, unbound
from curax.settings.sizes import declared_option
from curax.tasks import file_task, records
from curax.types import Task
from curax.verify import graders, serve

ASKED = 64  # prompts that tell how questions are asked


def asked(task: Task) -> int:
    """Checksum of the tokens of the first prompts of a task; 0: it is not of files."""
    if not task.fingerprint:
        return 0
    prompts = task.prompts(np.arange(min(task.num_prompts, ASKED), dtype=np.int32))
    rows = zip(np.asarray(prompts.tokens), np.asarray(prompts.mask), strict=True)
    texts = [tokens[mask].astype("<i4").tobytes() for tokens, mask in rows]
    return zlib.crc32(b"|".join(texts))


def weights(path: str) -> int:
    """Checksum of a checkpoint, by its folder or its name on the hub.

    Raises:
        ValueError: it cannot be found.
    """
    there = hub.checkpoint(path)
    weights = sorted(there.glob("*.safetensors"))
    return records.checksum_of([there / "config.json", *weights])


def grader(config: Config) -> int:
    """Checksum of the files of a task's graders or environment; 0: of curax, or none.

    A file that holds a config or an experiment as well says nothing of its grader.
    """
    made = declared_option(config.task, "environment")
    if made is not None:
        return _mark(made, serve.ENVIRONMENT)
    if unbound(config.task) is not file_task.task:
        return 0
    own = option(config.task, "grader")
    sums = graders.terms_of(own)
    every = sums.terms.values() if sums else [own]
    return sum({_mark(one, serve.GRADER) for one in every})  # a file counts once


def _mark(made: Callable[..., Any], service: serve.Service) -> int:
    """As `code`; 0 where the file says nothing, or there is none."""
    beside = getattr(unbound(made), "__globals__", {})
    if "get_config" in beside or "get_experiment" in beside:
        return 0
    try:
        return code(made, service)
    except ValueError:  # it has none
        return 0


def code(served: Callable[..., Any], service: serve.Service) -> int:
    """Checksum of the file of a grader or an environment; 0: it is of curax.

    Raises:
        ValueError: as `serve.source_of`.
    """
    source = serve.source_of(served, service)
    own = source.path.startswith(errors.PACKAGE)
    return 0 if own else zlib.crc32(source.code)
