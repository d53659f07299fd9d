"""The difficulty memory as a file, from which another run can start.

    {"prompt": "4f1c...", "draws": 14.2, "solved": 9.0, "square": 20.1, "tokens": 51.0}

One line per prompt that was drawn. A prompt is named by a digest of its tokens, not by
its id, so a file serves any seed and any task with some of the same prompts.
"""

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from curax.config import ConfigError
from curax.processes import peers
from curax.runs.rows import write_errors
from curax.settings import files
from curax.settings.cli import write_whole
from curax.types import PromptMemory, Task, TrainState

# Fields of PromptMemory, in the order of a line.
SUMS = ("draws", "solved", "square", "tokens")
CHUNK = 4096  # prompts made by one call
LARGEST = 1e30  # largest sum that is read; float32 holds the total of many


class LoadedMemory(NamedTuple):
    """A difficulty memory read from a file."""

    memory: PromptMemory  # [num_prompts] numpy
    lines: int  # lines of the file
    unknown: int  # lines whose prompt is not in the task; they are left out


def prompt_keys(task: Task) -> list[str]:
    """Name of each training prompt in a memory file, by id.

        key = blake2b(tokens under the mask, as little-endian int32), 16 bytes in hex

    Padding does not matter. Equal prompts under two ids have one key.
    """
    size = min(CHUNK, task.num_prompts)

    def tokens_and_mask(prompt_id: Any) -> tuple[Any, Any]:
        prompts = task.prompts(prompt_id)
        return prompts.tokens, prompts.mask

    if not task.in_files:
        tokens_and_mask = jax.jit(tokens_and_mask)
    result = []
    for start in range(0, task.num_prompts, size):
        ids = np.arange(start, start + size, dtype=np.int32)
        # The last chunk is padded, so that one program serves all chunks.
        made = tokens_and_mask(np.minimum(ids, np.int32(task.num_prompts - 1)))
        tokens, mask = peers.fetch(made)
        for row, counts in zip(tokens.astype("<i4"), mask, strict=True):
            digest = hashlib.blake2b(row[counts].tobytes(), digest_size=16)
            result.append(digest.hexdigest())
    return result[: task.num_prompts]


def write(path: Path, task: Task, memory: PromptMemory) -> None:
    """Write a memory file atomically; of several processes the first writes.

    Sums of equal prompts, and of seeds, are added: up to discounts, the memory of one
    run that had seen all of these completions. Sums that were loaded from a file count
    once per id and seed. Prompts with non-finite sums are left out.

    Args:
        path: file to write.
        task: task whose prompt ids index the memory.
        memory: `[..., num_prompts]` with leading axes of seeds.

    Raises:
        NotWrittenError: disk full, or no permission.
    """
    every = [np.asarray(getattr(memory, name), np.float64) for name in SUMS]
    sums = np.stack(every, -1).reshape(-1, task.num_prompts, len(SUMS)).sum(0)
    known = (sums[:, 0] > 0) & np.isfinite(sums).all(-1)
    added: dict[str, np.ndarray] = {}
    for key, row, counts in zip(prompt_keys(task), sums, known, strict=True):
        if counts:
            added[key] = added.get(key, 0.0) + row
    lines = []
    for key, row in added.items():
        values = dict(zip(SUMS, row.tolist(), strict=True))
        # Rounding may leave solved a bit above draws.
        values["solved"] = min(values["solved"], values["draws"])
        lines.append(json.dumps({"prompt": key, **values}) + "\n")
    if not peers.is_first():
        return
    with write_errors(path):
        write_whole(path, "".join(lines).encode())


def read(path: Path, task: Task) -> LoadedMemory:
    """Read a memory file for the prompts of a task.

    Lines with the same key are added, so files can be concatenated. Equal prompts under
    two ids both get the sums of their key; prompts without a line get zeros.

    Args:
        path: file to read.
        task: task whose prompt ids index the memory.

    Returns:
        The memory, float32, and the number of lines without a prompt in the task.

    Raises:
        ConfigError: the file is missing or a line is invalid; the message names file,
            line, value and fix.
    """
    try:
        with files.opened(path) as (file, _):
            data = file.read()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"memory.load={path} cannot be read: {why}; name the memory.jsonl of a "
            "run, or set memory.load to none."
        ) from error
    added: dict[str, np.ndarray] = {}
    names = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            name, sums = _parse_line(line)
        except ValueError as error:
            raise ConfigError(
                f"memory.load={path}:{number}: {error}; mend or delete this line."
            ) from None
        names.append(name)
        added[name] = added.get(name, 0.0) + sums
    wanted = prompt_keys(task)
    nothing = np.zeros(len(SUMS))
    table = np.array([added.get(key, nothing) for key in wanted], np.float32)
    there = set(wanted)
    return LoadedMemory(
        memory=PromptMemory(**dict(zip(SUMS, table.T, strict=True))),
        lines=len(names),
        unknown=sum(name not in there for name in names),
    )


def _parse_line(line: bytes) -> tuple[str, np.ndarray]:
    """Key and `[4]` sums of a line.

    Raises:
        ValueError: the line is invalid; the message is a phrase.
    """
    row = files.object_of(line)
    if row is None:
        raise ValueError("not a JSON object")
    for name in ("prompt", *SUMS):
        if name not in row:
            raise ValueError(f"there is no {name}")

    def shown(name: str) -> str:
        return f"{name}={json.dumps(row[name])[:50]}"

    key = row["prompt"]
    if not isinstance(key, str) or not re.fullmatch("[0-9a-f]{32}", key):
        raise ValueError(f"{shown('prompt')} must be 32 of the digits 0-9a-f")
    for name in SUMS:
        value = row[name]
        if type(value) not in (int, float) or not 0 <= value <= LARGEST:
            raise ValueError(f"{shown(name)} must be a number from 0 to {LARGEST}")
    if row["solved"] > row["draws"]:
        raise ValueError(f"{shown('solved')} must be at most {shown('draws')}")
    return key, np.array([row[name] for name in SUMS], np.float64)


def with_memory(state: TrainState, memory: PromptMemory) -> TrainState:
    """The state with its memory replaced, by the same one for all seeds.

    Args:
        state: training state; its memory is `[..., num_prompts]`.
        memory: `[num_prompts]` replacement.
    """

    def leaf(new: Any, old: jax.Array) -> jax.Array:
        return jax.device_put(np.broadcast_to(new, old.shape), old.sharding)

    def given(to: Any) -> Any:
        return dataclasses.replace(to, memory=jax.tree.map(leaf, memory, to.memory))

    own = state.behaviour and given(state.behaviour)
    return dataclasses.replace(given(state), behaviour=own)
