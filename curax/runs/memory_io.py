"""The difficulty memory as a file, so that one run can begin with what another learnt.

    {"prompt": "4f1c...", "draws": 14.2, "solved": 9.0, "square": 20.1, "tokens": 51.0}

One line per prompt that was ever drawn. Prompts go by a digest of their tokens, not by
their ids: a file serves any seed, and any task that asks some of the same questions.
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
from curax.runs.folder import NotWrittenError
from curax.settings.cli import write_whole
from curax.types import Memory, Task, TrainState

SUMS = ("draws", "solved", "square", "tokens")  # fields of Memory, in a line's order
CHUNK = 4096  # prompts that are made at a time
LARGEST = 1e30  # beyond any sum of a run; float32 holds many of them added up


class Recalled(NamedTuple):
    """A memory that was read, and how much of the file it is."""

    memory: Memory  # [num_prompts] numpy
    lines: int  # in the file
    unknown: int  # of these, left out: their prompts are none of the task's


def keys(task: Task) -> list[str]:
    """What each training prompt is called in a file, by id.

        key = blake2b(tokens under the mask, as little-endian int32), 16 bytes in hex

    Padding does not matter. Two ids that ask the same have one key.
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
        # The last chunk is filled up, so that one program makes all.
        made = tokens_and_mask(np.minimum(ids, np.int32(task.num_prompts - 1)))
        tokens, mask = jax.device_get(made)
        for row, counts in zip(tokens.astype("<i4"), mask, strict=True):
            digest = hashlib.blake2b(row[counts].tobytes(), digest_size=16)
            result.append(digest.hexdigest())
    return result[: task.num_prompts]


def write(path: Path, task: Task, memory: Memory) -> None:
    """Write a whole file, or leave the one that is there as it is.

    The sums of ids that ask the same, and of seeds, are added: one memory that had seen
    all of their completions would hold them, but for what it would have discounted.
    What ids or seeds had themselves been given of a file counts once for each. Prompts
    with sums that are not finite are left out.

    Args:
        path: of the file.
        task: whose ids the memory goes by.
        memory: `[..., num_prompts]`; axes in front are of seeds.

    Raises:
        NotWrittenError: no room, or no leave.
    """
    sums = np.stack(
        [
            np.asarray(getattr(memory, name), np.float64)
            .reshape(-1, task.num_prompts)
            .sum(0)
            for name in SUMS
        ],
        axis=-1,
    )
    known = (sums[:, 0] > 0) & np.isfinite(sums).all(-1)
    added: dict[str, np.ndarray] = {}
    for key, row, counts in zip(keys(task), sums, known, strict=True):
        if counts:
            added[key] = added.get(key, 0.0) + row
    lines = []
    for key, row in added.items():
        values = dict(zip(SUMS, row.tolist(), strict=True))
        # Both are rounded, so the smaller may come out as the larger by a hair.
        values["solved"] = min(values["solved"], values["draws"])
        lines.append(json.dumps({"prompt": key, **values}) + "\n")
    try:
        write_whole(path, "".join(lines).encode())
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise NotWrittenError(f"{path} cannot be written ({why})") from error


def read(path: Path, task: Task) -> Recalled:
    """The memory in a file, for the prompts of a task.

    Ids that ask the same all get the sums of their key. Lines of the same key add up,
    so files can be joined end to end. Prompts without a line have sums of zero.

    Args:
        path: of the file.
        task: whose ids the memory shall go by.

    Returns:
        The memory, float32, and the count of lines that are of no prompt of the task.

    Raises:
        ConfigError: in a sentence with file, line, value and fix, if there is no such
            file, or a line is not what `write` writes.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"memory.load={path} cannot be read: {error.strerror}; name the "
            "memory.jsonl of a run, or set memory.load to none."
        ) from error
    added: dict[str, np.ndarray] = {}
    names = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            name, sums = _parsed(line)
        except ValueError as error:
            raise ConfigError(
                f"memory.load={path}:{number}: {error}; mend or delete this line."
            ) from None
        names.append(name)
        added[name] = added.get(name, 0.0) + sums
    wanted = keys(task)
    nothing = np.zeros(len(SUMS))
    table = np.array([added.get(key, nothing) for key in wanted], np.float32)
    there = set(wanted)
    return Recalled(
        memory=Memory(**dict(zip(SUMS, table.T, strict=True))),
        lines=len(names),
        unknown=sum(name not in there for name in names),
    )


def _parsed(line: bytes) -> tuple[str, np.ndarray]:
    """Key and sums of a line; a ValueError says in words what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
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


def begun(state: TrainState, memory: Memory) -> TrainState:
    """The state with this memory in place of its own, the same for all seeds.

    Args:
        state: its memory is `[..., num_prompts]`.
        memory: `[num_prompts]`.
    """

    def leaf(new: Any, old: jax.Array) -> jax.Array:
        return jax.device_put(np.broadcast_to(new, old.shape), old.sharding)

    given = jax.tree.map(leaf, memory, state.memory)
    return dataclasses.replace(state, memory=given)
