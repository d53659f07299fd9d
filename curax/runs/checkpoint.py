"""Checkpoints of a run by orbax: what they hold, how it is written and restored.

A checkpoint has the state without its frozen parameters, which come from elsewhere,
and beside it, as JSON, a `Beside`. It is written in the background, under a temporary
name until it is complete. Its checksum finds what was damaged on the disk.
"""

import contextlib
import copy
import dataclasses
import errno
import json
import logging
import math
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from curax.arrays.sharding import placed, platform
from curax.processes import peers
from curax.settings.cli import still_there
from curax.settings.config_paths import ConfigError, changes
from curax.settings.errors import WorkError

_ORBAX = Path(ocp.__file__).parent
_score = itemgetter("score")  # of the metrics of a checkpoint
UNREADABLE = ".unreadable"  # suffix of a damaged checkpoint that was renamed


class NotSavedError(WorkError, OSError):
    """A checkpoint could not be written; the message names the folder and says why."""


class DamagedError(ValueError):
    """A checkpoint cannot be read, or its checksum differs."""


class OtherBaseError(ValueError):
    """The frozen parameters are not those that a checkpoint was saved with."""


class Beside(NamedTuple):
    """JSON values beside the state of a checkpoint."""

    step: int
    about: Any  # what tells the run from others
    totals: Any  # of the host
    frozen: int | None  # fingerprint of the frozen parameters; None: there are none
    mark: int  # checksum of state, totals and that fingerprint


class Restored(NamedTuple):
    """The newest readable checkpoint, and newer damaged ones that were skipped."""

    step: int
    state: Any
    totals: dict[str, Any]
    skipped: dict[Path, str]  # new path of each damaged checkpoint, and the reason


class Checkpoints:
    """The checkpoints of a run: state, host totals and an optional score per step."""

    def __init__(self, folder: Path, *, keep: int | None, about: Any = None):
        """Open a folder; the `keep` latest checkpoints and the best one are kept.

        Args:
            folder: made if it is missing.
            keep: number of the latest checkpoints that are kept; None: the folder is
                only read, also while a run is writing there.
            about: JSON values that tell this run from others; a checkpoint saved with
                other ones is not read. None: any is.

        Raises:
            NotSavedError: the folder cannot be made.
            ConfigError: it is only read, and has no checkpoint.
        """
        self._folder, self._failed, self._about = folder.absolute(), False, about
        self._frozen: int | None = None  # fingerprint, once known
        silence_orbax()
        if keep is None and latest(folder) is None:
            raise ConfigError(
                f"{folder} holds no checkpoint; name the folder of a run that has one."
            )
        options = ocp.CheckpointManagerOptions(best_fn=_score, read_only=True)
        if keep is not None:
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
                # Else its threads wait minutes for a folder that cannot be made.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
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

    def named(self, step: str, *, again: bool = False) -> int:
        """The saved step that is called `latest`, `best` or by its digits.

        Args:
            step: name.
            again: look at the folder again, in which a run may be writing.

        Raises:
            ConfigError: there is no such checkpoint.
        """
        if again:
            self._manager.reload()
        steps = {str(number): number for number in self._manager.all_steps()}
        number = (steps | {"latest": self.latest(), "best": self.best()}).get(step)
        if number is None:
            raise ConfigError(
                f"--step {step}: {self._folder} has no such checkpoint; "
                f"{self.others()}."
            )
        return number

    def others(self, number: int | None = None) -> str:
        """What to name in place of a saved step that is of no use, as text."""
        steps = sorted({*self._manager.all_steps()} - {number})
        listed = ", ".join(map(str, steps))
        return f"set --step to one of {listed}" if steps else "there is no other"

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
            state: tree of arrays; what is under a field `frozen` is not saved.
            totals: JSON values of the host.
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
        if self._frozen is None:
            self._frozen = _frozen_mark(state)
        state = _trained(state)
        mark = _checksum(state, totals, self._frozen)
        if len(marks := set(peers.gather(mark))) > 1:
            self._failed = True
            raise NotSavedError(
                f"the states of the processes differ at step {step} (fingerprints "
                f"{', '.join(map(str, sorted(marks)))})"
            )
        if platform() == "cpu":
            # On a CPU the writer reads the buffers themselves, which may be donated.
            state = jax.tree.map(_copied, state)
        beside = Beside(step, self._about, totals, self._frozen, mark)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
            totals=ocp.args.JsonSave(  # pyright: ignore[reportCallIssue]
                beside._asdict()
            ),
        )
        known = score is not None and math.isfinite(score)
        metrics = {"score": score} if known else None
        if not self._write(
            self._manager.save, step, args=items, metrics=metrics, force=True
        ):
            raise NotSavedError(f"{self._folder / str(step)} was refused by orbax")

    def restore(
        self,
        step: int,
        like: Any,
        sharding: Any = None,
        whole: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """State and totals of a saved step, on any devices.

        Args:
            step: number of the step.
            like: tree of shapes and dtypes.
            sharding: tree of shardings like it; None: everything on the first device.
            whole: adds the frozen parameters to a state; None: they stay away.

        Raises:
            DamagedError: the checkpoint cannot be read, or its checksum differs.
            OtherBaseError: its frozen parameters were others.
        """
        like, sharding = _trained(like), _trained(sharding)
        like = placed(like, sharding)
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(like),  # pyright: ignore[reportCallIssue]
            totals=ocp.args.JsonRestore(),  # pyright: ignore[reportCallIssue]
        )

        def read():
            loaded, reason = _attempt(self._manager.restore, step, args=items)
            # Each process reads its own shards, and all or none go on.
            if reason := next(filter(None, peers.gather(reason)), None):
                raise DamagedError(reason)
            state, beside = loaded["state"], Beside(**loaded["totals"])
            theirs = beside.about if self._about is not None else None
            for name, was, now in changes(theirs, self._about):
                raise DamagedError(
                    f"it is of another run, with {name}={was!r} in place of {now!r}"
                )
            if beside.step != step:
                raise DamagedError(f"it was saved as step {beside.step}")
            if _checksum(state, beside.totals, beside.frozen) != beside.mark:
                raise DamagedError("contents differ from what was saved")
            return state, beside

        found, reason = _attempt(read)
        if found is None:
            raise DamagedError(reason)
        state, beside = found
        if whole:
            state = whole(state)
            self._frozen = _frozen_mark(state)
            if self._frozen != beside.frozen:
                raise OtherBaseError(
                    "the parameters that are not trained differ from those the run "
                    "began with"
                )
        return state, beside.totals

    def newest(
        self,
        like: Any,
        sharding: Any = None,
        whole: Callable[[Any], Any] | None = None,
    ) -> Restored | None:
        """Restore the newest readable checkpoint; None where none was saved.

        Newer checkpoints that are damaged are renamed and kept.

        Args:
            like: as `restore`.
            sharding: as `restore`.
            whole: as `restore`.

        Raises:
            DamagedError: no checkpoint can be read; none is renamed.
            OtherBaseError: as `restore`.
            NotSavedError: one that is damaged cannot be renamed.
        """
        damaged: dict[int, DamagedError] = {}
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in peers.broadcast(steps):
            try:
                state, totals = self.restore(step, like, sharding, whole)
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


def silence_orbax() -> None:
    """Drop what orbax logs and leaves behind; curax reports failures in a sentence."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


def latest(folder: Path) -> int | None:
    """The last step saved in a folder, None without one; the folder is only read."""
    return max(saved_steps(folder), default=None)


def saved_steps(folder: Path) -> list[int]:
    """The steps saved in a folder, which is only read."""
    there = folder.absolute()
    return ocp.utils.checkpoint_steps(there) if there.is_dir() else []


def check_shapes(folder: Path, like: Any) -> None:
    """Check that a state is of the shapes of a checkpoint; the folder is only read.

    Args:
        folder: of checkpoints; those of which no shape can be read are passed over.
        like: tree of shapes and dtypes.

    Raises:
        ConfigError: all have others; the message names an array of the newest.
    """
    silence_orbax()
    now, others = _shapes(_trained(like)), list[str]()
    for step in sorted(saved_steps(folder), reverse=True):
        there = folder.absolute() / str(step)
        before, _ = _attempt(_saved_shapes, there)
        if before == now:
            return
        if before:
            every = now | before
            name = next(n for n in every if now.get(n) != before.get(n))
            old, new = before.get(name, "missing"), now.get(name, "missing")
            others.append(f"{name} is {old} in {there} and {new} now")
    if others:
        raise ConfigError(
            f"{others[0]}; bring back the model or method that the run began with, or "
            "name another run folder."
        )


def _saved_shapes(there: Path) -> dict[str, str]:
    reader = ocp.StandardCheckpointHandler()
    return _shapes(
        reader.metadata(there / "state")  # pyright: ignore[reportArgumentType]
    )


def _shapes(tree: Any) -> dict[str, str]:
    """Dtypes and shapes of the arrays of a tree, as text by dotted name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (
            f"{leaf.dtype}{list(leaf.shape)}"
        )
        for path, leaf in leaves
    }


def fingerprint(tree: Any, *, by_value: bool = False) -> int:
    """Hash of a tree of arrays, the same for any sharding, on one mesh or on several.

        sum over all leaves and words of mix(word ^ mix(leaf, indices))  mod 2^32

    Integer sums are exact, so the order of summation does not matter. By value numbers
    are alike in float32 and in half precision.
    """
    parts = []
    for number, leaf in enumerate(jax.tree.leaves(tree), 1):
        with _on_its_mesh(leaf):
            parts.append(_hash(np.uint32(number), leaf, by_value=by_value))
    return sum(map(int, parts)) % 2**32


# A program for each shape: one for all leaves would take seconds to compile.
@partial(jax.jit, static_argnames="by_value")
def _hash(number: jax.Array, leaf: jax.Array, *, by_value: bool) -> jax.Array:
    """`[]` uint32, the part of a leaf in the fingerprint."""
    if by_value and jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = leaf.astype(jnp.float32)
    place = jnp.full(leaf.shape, number, jnp.uint32)
    for axis in range(leaf.ndim):
        here = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        place = _mix(place) + here
    return jnp.sum(_mix(_bits(leaf) ^ _mix(place)), dtype=jnp.uint32)


def _on_its_mesh(leaf: Any) -> Any:
    """Context in which an array is computed with: that of its mesh, if it has one."""
    mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _copied(leaf: Any) -> jax.Array:
    with _on_its_mesh(leaf):
        return jnp.copy(leaf)


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


def _trained(state: Any) -> Any:
    """A state, or what is like it, without frozen parameters."""
    if getattr(state, "frozen", None) is None:
        return state
    return dataclasses.replace(state, frozen=None)


def _frozen_mark(state: Any) -> int | None:
    """Fingerprint of the frozen parameters of a state; None without any."""
    rest = getattr(state, "frozen", None)
    return None if rest is None else fingerprint(rest, by_value=True)


def _checksum(state: Any, totals: Any, rest: int | None) -> int:
    """One integer hash of a state, of totals and of a fingerprint."""
    text = json.dumps([totals, rest], sort_keys=True)
    return zlib.crc32(text.encode(), fingerprint(state))


def _attempt(function: Callable, *args: Any, **named: Any) -> tuple[Any, str]:
    """(result, "") of a call, or (None, reason) where it raised."""
    try:
        return function(*args, **named), ""
    except Exception as error:
        return None, system_reason(error)


class _UnraisableHook:
    """An unraisable hook that drops what failed orbax reads and writes leave behind.

    At any later time their threads raise "Event loop is closed", and their coroutines,
    which nobody awaits any more, raise when they are collected.
    """

    def __init__(self, before: Callable):
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        of_orbax = code and Path(code.co_filename).is_relative_to(_ORBAX)
        if not of_orbax and str(unraisable.exc_value) != "Event loop is closed":
            self._before(unraisable)


def system_reason(error: Exception) -> str:
    """The operating system's message in a library's error, else the error's type."""
    if isinstance(error, DamagedError):
        return str(error)
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EIO):
        if os.strerror(number) in text:
            return os.strerror(number)
    return type(error).__name__
