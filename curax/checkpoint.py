"""Everything a run needs to go on, in one orbax checkpoint per saved step."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of a run folder: the train state, and totals of the host."""

    def __init__(self, folder: Path, *, keep: int):
        """Open the folder; `keep` is the number of checkpoints kept, the latest."""
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=True,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=False,
            ),
        )

    def latest(self) -> int | None:
        """The last step saved, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, totals: dict[str, Any]) -> None:
        """Save and wait until it is on disk. A step that is there already stays."""
        if step == self.latest():
            return
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
            totals=ocp.args.JsonSave(totals),  # pyright: ignore[reportCallIssue]
        )
        if not self._manager.save(step, args=items, force=True):
            raise OSError(f"the checkpoint of step {step} was not saved")

    def restore(
        self, step: int, like: Any, sharding: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """State and totals of a step, wherever it was saved.

        Args:
            step: its number.
            like: tree of shapes and dtypes.
            sharding: tree of shardings like it; None: everything on the first device.
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
        loaded = self._manager.restore(step, args=items)
        return loaded["state"], loaded["totals"]

    def close(self) -> None:
        """Wait for what is being written."""
        self._manager.close()


def latest(folder: Path) -> int | None:
    """The last step saved in a folder, None if there is none; touches nothing."""
    there = ocp.utils.checkpoint_steps(folder.absolute()) if folder.is_dir() else []
    return max(there, default=None)
