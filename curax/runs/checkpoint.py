"""Everything a run needs to go on, in one orbax checkpoint per saved step.

A checkpoint is written in the background, under another name until it is whole. Beside
the state lies a fingerprint of it, so that what was damaged on the disk is found out.
"""

import copy
import errno
import gc
import json
import math
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

ASIDE = ".unreadable"  # behind the name of a checkpoint that was set aside


class NotSavedError(OSError):
    """A checkpoint could not be written. Its text names the folder, and says why."""


class DamagedError(ValueError):
    """What was read is not what was saved."""


class Found(NamedTuple):
    """The newest checkpoint that can be read, and what had to be passed over."""

    step: int
    state: Any
    totals: dict[str, Any]
    passed_over: dict[Path, str]  # where a damaged one lies now; what is wrong with it


class Checkpoints:
    """The checkpoints of a run: a state, totals of the host, and how good it is."""

    def __init__(self, folder: Path, *, keep: int):
        """Open the folder; the `keep` latest checkpoints are kept, and the best.

        Raises:
            NotSavedError: it cannot be made.
        """
        self._folder, self._failed = folder.absolute(), False
        if not isinstance(sys.unraisablehook, _Hook):
            sys.unraisablehook = _Hook(sys.unraisablehook)
        policies = ocp.checkpoint_managers
        options = ocp.CheckpointManagerOptions(
            best_fn=_score,
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(keep),
                    policies.BestN(
                        get_metric_fn=_score,
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    ),
                ]
            ),
            create=True,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        self._manager: ocp.CheckpointManager = self._write(
            ocp.CheckpointManager, self._folder, options=options
        )
        self._stat = self._folder.stat()

    def latest(self) -> int | None:
        """The last step saved, None if there is none."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step saved with the highest score, of equals the last; None: no score."""
        return self._manager.best_step()

    def save(
        self,
        step: int,
        state: Any,
        totals: dict[str, Any],
        *,
        score: float | None = None,
    ) -> None:
        """Begin to save. State and totals may change as soon as this returns.

        A step that is there already stays. At most one checkpoint is on its way: this
        waits for the one before.

        Args:
            step: its number.
            state: tree of arrays.
            totals: what can be written as JSON.
            score: how good the state is, to keep the best; None or NaN: not known.

        Raises:
            NotSavedError: this checkpoint, or the one before, could not be written.
        """
        if step == self.latest():
            return
        if not self._is_there():  # orbax would make a new one
            self._failed = True
            raise NotSavedError(f"{self._folder} was removed or renamed")
        totals = copy.deepcopy(totals)
        mark = _mark(state, totals)
        if jax.default_backend() == "cpu":
            # There the writer would look at the very memory that is donated.
            state = jax.tree.map(jnp.copy, state)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
            totals=ocp.args.JsonSave(  # pyright: ignore[reportCallIssue]
                {"totals": totals, "mark": mark}
            ),
        )
        known = score is not None and math.isfinite(score)
        metrics = {"score": score} if known else None
        if not self._write(
            self._manager.save, step, args=items, metrics=metrics, force=True
        ):
            raise NotSavedError(f"{self._folder / str(step)} was refused by orbax")

    def restore(
        self, step: int, like: Any, sharding: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """State and totals of a step, wherever it was saved.

        Args:
            step: its number.
            like: tree of shapes and dtypes.
            sharding: tree of shardings like it; None: everything on the first device.

        Raises:
            DamagedError: they cannot be read, or are not what was saved.
        """
        if sharding is None:
            first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            sharding = jax.tree.map(lambda _: first, like)
        like = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            like,
            sharding,
        )
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(like),  # pyright: ignore[reportCallIssue]
            totals=ocp.args.JsonRestore(),  # pyright: ignore[reportCallIssue]
        )

        def read():
            loaded = self._manager.restore(step, args=items)
            state, beside = loaded["state"], loaded["totals"]
            if _mark(state, beside["totals"]) != beside["mark"]:
                raise DamagedError("contents differ from what was saved")
            return state, beside["totals"]

        found, reason = _quietly(read)
        if found is None:
            raise DamagedError(reason)
        return found

    def newest(self, like: Any, sharding: Any = None) -> Found | None:
        """The latest checkpoint that can be read; None where none was saved.

        Later ones are renamed, so that they count no longer and nothing is lost.

        Args:
            like: as `restore`.
            sharding: as `restore`.

        Raises:
            DamagedError: there are some, and none can be read. None is renamed.
        """
        damaged: dict[int, DamagedError] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                state, totals = self.restore(step, like, sharding)
            except DamagedError as error:
                damaged[step] = error
                continue
            aside = {self._set_aside(n): str(error) for n, error in damaged.items()}
            return Found(step, state, totals, aside)
        for step, error in damaged.items():
            raise DamagedError(f"{self._folder / str(step)} ({error})") from error
        return None

    def _set_aside(self, step: int) -> Path:
        there = self._folder / str(step)
        aside = there.with_name(there.name + ASIDE)
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(there, aside)
        self._manager.reload()
        return aside

    def wait(self) -> None:
        """Wait until all is on disk.

        Raises:
            NotSavedError: it could not be written.
        """
        self._write(self._manager.wait_until_finished)

    def close(self) -> None:
        """Wait until all is on disk, and free what belongs to it.

        Raises:
            NotSavedError: it could not be written, and nobody was told yet.
        """
        told = self._failed
        try:
            self._write(self._manager.close)
        except NotSavedError:
            if not told:
                raise

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._folder.stat(), self._stat)
        except OSError:
            return False

    def clear(self) -> None:
        """Remove all checkpoints."""
        for step in self._manager.all_steps():
            shutil.rmtree(self._folder / str(step))
        self._manager.reload()

    def _write(self, function: Callable, *args: Any, **named: Any) -> Any:
        result, reason = _quietly(function, *args, **named)
        if reason:
            self._failed = True
            raise NotSavedError(f"{self._folder} cannot be written ({reason})")
        return result


def latest(folder: Path) -> int | None:
    """The last step saved in a folder, None if there is none; touches nothing."""
    there = ocp.utils.checkpoint_steps(folder.absolute()) if folder.is_dir() else []
    return max(there, default=None)


@jax.jit
def fingerprint(tree: Any) -> jax.Array:
    """`[]` uint32 that changes with any bit of the tree, however it is sharded.

    The sum modulo 2^32 of all words of all leaves, each mixed with its place.
    Arithmetic on integers is exact, so no order of summation changes it.
    """
    total = jnp.uint32(0)
    for number, leaf in enumerate(jax.tree.leaves(tree), 1):
        place = jnp.full(leaf.shape, number, jnp.uint32)
        for axis in range(leaf.ndim):
            here = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
            place = _mix(place) + here
        total = total + jnp.sum(_mix(_bits(leaf) ^ _mix(place)), dtype=jnp.uint32)
    return total


def _mix(x: jax.Array) -> jax.Array:
    """A one-to-one function of 32 bits in which every bit matters for every other."""
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * jnp.uint32(multiplier)
    return x ^ (x >> 16)


def _bits(leaf: jax.Array) -> jax.Array:
    """Each element as a word of 32 bits."""
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint32)
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    return jax.lax.bitcast_convert_type(leaf, width).astype(jnp.uint32)


def _mark(state: Any, totals: dict[str, Any]) -> int:
    """One number for state and totals."""
    text = json.dumps(totals, sort_keys=True)
    return zlib.crc32(text.encode(), int(fingerprint(state)))


def _quietly(function: Callable, *args: Any, **named: Any) -> tuple[Any, str]:
    """What the function returns and "", or None and why it failed, in a few words."""
    try:
        return function(*args, **named), ""
    except Exception as error:
        reason = _reason(error)
    # Orbax leaves tasks behind, which would complain when they are collected.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    gc.collect()
    sys.unraisablehook = hook
    return None, reason


class _Hook:
    """An unraisable hook that leaves out what failed reads and writes have to say.

    Their threads find the loop that they were to return to closed, at any later time.
    """

    def __init__(self, before: Callable):
        self._before = before

    def __call__(self, said: Any) -> None:
        if str(said.exc_value) != "Event loop is closed":
            self._before(said)


def _score(metrics: dict[str, float]) -> float:
    return metrics["score"]


def _reason(error: Exception) -> str:
    """What the system said, which the libraries wrap in words of their own."""
    if isinstance(error, DamagedError):
        return str(error)
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EIO):
        if os.strerror(number) in text:
            return os.strerror(number)
    return type(error).__name__
