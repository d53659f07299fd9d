"""Checkpoints of a run by orbax: state, host totals and a checksum per saved step.

A checkpoint is written in the background, under a temporary name until it is complete.
The checksum of the state finds checkpoints that were damaged on the disk.
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

from curax.arrays.sharding import platform
from curax.processes import peers
from curax.settings.cli import still_there
from curax.settings.config_paths import changes
from curax.settings.errors import WorkError

UNREADABLE = ".unreadable"  # suffix of a damaged checkpoint that was renamed


class NotSavedError(WorkError, OSError):
    """A checkpoint could not be written; the message names the folder and says why."""


class DamagedError(ValueError):
    """A checkpoint cannot be read, or its checksum differs."""


class Restored(NamedTuple):
    """The newest readable checkpoint, and newer damaged ones that were skipped."""

    step: int
    state: Any
    totals: dict[str, Any]
    skipped: dict[Path, str]  # new path of each damaged checkpoint, and the reason


class Checkpoints:
    """The checkpoints of a run: state, host totals and an optional score per step."""

    def __init__(self, folder: Path, *, keep: int, about: Any = None):
        """Open a folder; the `keep` latest checkpoints and the best one are kept.

        Args:
            folder: made if it is missing.
            keep: number of the latest checkpoints that are kept.
            about: JSON values that tell this run from others; a checkpoint saved with
                other ones is not read. None: any is.

        Raises:
            NotSavedError: the folder cannot be made.
        """
        self._folder, self._failed, self._about = folder.absolute(), False, about
        if not isinstance(sys.unraisablehook, _UnraisableHook):
            sys.unraisablehook = _UnraisableHook(sys.unraisablehook)
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
        """The last saved step; None without a checkpoint."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The saved step with the highest score, the last of equals; None: no score."""
        return self._manager.best_step()

    def save(
        self,
        step: int,
        state: Any,
        totals: dict[str, Any],
        *,
        score: float | None = None,
    ) -> None:
        """Start saving a checkpoint in the background.

        State and totals are copied before this returns. It waits for the previous
        checkpoint, and does nothing for a step that is saved already.

        Args:
            step: number of the step.
            state: tree of arrays.
            totals: JSON values.
            score: higher is better, to keep the best; None or NaN: unknown.

        Raises:
            NotSavedError: this checkpoint, or the one before, could not be written.
        """
        if step == self.latest():
            return
        if not still_there(self._folder, self._stat):  # orbax would make a new folder
            self._failed = True
            raise NotSavedError(f"{self._folder} was removed or renamed")
        totals = copy.deepcopy(totals)
        mark = _checksum(state, totals)
        if len(marks := set(peers.gather(mark))) > 1:
            self._failed = True
            raise NotSavedError(
                f"the states of the processes differ at step {step} (fingerprints "
                f"{', '.join(map(str, sorted(marks)))})"
            )
        if platform() == "cpu":
            # On a CPU the writer reads the buffers themselves, which may be donated.
            state = jax.tree.map(jnp.copy, state)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
            totals=ocp.args.JsonSave(  # pyright: ignore[reportCallIssue]
                {"totals": totals, "mark": mark, "step": step, "about": self._about}
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
        """State and totals of a saved step, on any devices.

        Args:
            step: number of the step.
            like: tree of shapes and dtypes.
            sharding: tree of shardings like it; None: everything on the first device.

        Raises:
            DamagedError: the checkpoint cannot be read, or its checksum differs.
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
            loaded, reason = _attempt(self._manager.restore, step, args=items)
            # Each process reads its own shards, and all or none go on.
            if reason := next(filter(None, peers.gather(reason)), None):
                raise DamagedError(reason)
            state, beside = loaded["state"], loaded["totals"]
            theirs = beside["about"] if self._about is not None else None
            for name, was, now in changes(theirs, self._about):
                raise DamagedError(
                    f"it is of another run, with {name}={was!r} in place of {now!r}"
                )
            if beside["step"] != step:
                raise DamagedError(f"it was saved as step {beside['step']}")
            if _checksum(state, beside["totals"]) != beside["mark"]:
                raise DamagedError("contents differ from what was saved")
            return state, beside["totals"]

        found, reason = _attempt(read)
        if found is None:
            raise DamagedError(reason)
        return found

    def newest(self, like: Any, sharding: Any = None) -> Restored | None:
        """Restore the newest readable checkpoint; None where none was saved.

        Newer checkpoints that are damaged are renamed and kept.

        Args:
            like: as `restore`.
            sharding: as `restore`.

        Raises:
            DamagedError: no checkpoint can be read; none is renamed.
            NotSavedError: one that is damaged cannot be renamed.
        """
        damaged: dict[int, DamagedError] = {}
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in peers.broadcast(steps):
            try:
                state, totals = self.restore(step, like, sharding)
            except DamagedError as error:
                damaged[step] = error
                continue
            aside = {
                self._rename_unreadable(n): str(error) for n, error in damaged.items()
            }
            return Restored(step, state, totals, aside)
        for step, error in damaged.items():
            raise DamagedError(f"{self._folder / str(step)} ({error})") from error
        return None

    def _rename_unreadable(self, step: int) -> Path:
        there = self._folder / str(step)
        aside = there.with_name(there.name + UNREADABLE)

        def rename() -> None:
            try:
                if aside.is_dir() and not aside.is_symlink():
                    shutil.rmtree(aside)
                aside.unlink(missing_ok=True)
                os.replace(there, aside)
            except OSError as error:
                raise NotSavedError(
                    f"{there} cannot be renamed to {aside} ({error.strerror})"
                ) from error

        peers.on_first(rename)
        self._manager.reload()
        return aside

    def wait(self) -> None:
        """Wait until the checkpoint being written is on disk.

        Raises:
            NotSavedError: it could not be written.
        """
        self._write(self._manager.wait_until_finished)

    def close(self) -> None:
        """Wait for the checkpoint being written, then free threads and buffers.

        Raises:
            NotSavedError: it could not be written, and no call has raised so yet.
        """
        raised = self._failed
        try:
            self._write(self._manager.close)
        except NotSavedError:
            if not raised:
                raise

    def clear(self) -> None:
        """Remove all checkpoints."""
        if peers.is_first():
            for step in self._manager.all_steps():
                shutil.rmtree(self._folder / str(step))
        peers.barrier()
        self._manager.reload()

    def _write(self, function: Callable, *args: Any, **named: Any) -> Any:
        result, reason = _attempt(function, *args, **named)
        if reason:
            self._failed = True
            raise NotSavedError(f"{self._folder} cannot be written ({reason})")
        return result


def latest(folder: Path) -> int | None:
    """The last step saved in a folder, None without one; the folder is only read."""
    there = ocp.utils.checkpoint_steps(folder.absolute()) if folder.is_dir() else []
    return max(there, default=None)


@jax.jit
def fingerprint(tree: Any) -> jax.Array:
    """`[]` uint32 hash of a tree of arrays, the same for any sharding.

        sum over all leaves and words of mix(word ^ mix(leaf, indices))  mod 2^32

    Integer sums are exact, so the order of summation does not matter.
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
    """A bijection of uint32 in which every input bit affects every output bit."""
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * jnp.uint32(multiplier)
    return x ^ (x >> 16)


def _bits(leaf: jax.Array) -> jax.Array:
    """The bits of each element as uint32."""
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint32)
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    return jax.lax.bitcast_convert_type(leaf, width).astype(jnp.uint32)


def _checksum(state: Any, totals: dict[str, Any]) -> int:
    """One integer hash of state and totals."""
    text = json.dumps(totals, sort_keys=True)
    return zlib.crc32(text.encode(), int(fingerprint(state)))


def _attempt(function: Callable, *args: Any, **named: Any) -> tuple[Any, str]:
    """(result, "") of a call, or (None, reason) where it raised."""
    try:
        return function(*args, **named), ""
    except Exception as error:
        reason = system_reason(error)
        if isinstance(error, DamagedError):  # of our own: nothing is left behind
            return None, reason
    # Tasks that orbax leaves behind would print warnings when they are collected.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    gc.collect()
    sys.unraisablehook = hook
    return None, reason


class _UnraisableHook:
    """An unraisable hook that drops "Event loop is closed".

    Threads of failed orbax reads and writes raise it at any later time.
    """

    def __init__(self, before: Callable):
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._before(unraisable)


def _score(metrics: dict[str, float]) -> float:
    return metrics["score"]


def system_reason(error: Exception) -> str:
    """The operating system's message in a library's error, else the error's type."""
    if isinstance(error, DamagedError):
        return str(error)
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EIO):
        if os.strerror(number) in text:
            return os.strerror(number)
    return type(error).__name__
