"""Policies that were saved: by a run, or as a folder of a Hugging Face checkpoint."""

import contextlib
import dataclasses
import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from curax.arrays import frozen
from curax.config import (
    Config,
    ConfigError,
    load,
    module_of,
    option,
    override,
    recalled,
)
from curax.config import Mesh as Sizes
from curax.models import pretrained
from curax.runs import checkpoint, folder, run
from curax.settings import files
from curax.settings.config_paths import OF_FILE
from curax.step import loops
from curax.step import mesh as meshes
from curax.types import Model, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A model with its parameters.

    Attributes:
        model: of all parameters, the frozen ones too.
        params: all of them.
        mesh: on which they lie; None: one device.
        config: of the run; None: a checkpoint of Hugging Face.
        task: of the run, or None.
        step: of the run, or None.
    """

    model: Model
    params: Any
    mesh: Mesh | None
    config: Config | None = None
    task: Task | None = None
    step: int | None = None


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run; checkpoints have another config.json."""
    try:
        found = json.loads(files.read(path / folder.CONFIG))
    except (OSError, ValueError, RecursionError):
        return (path / folder.CHECKPOINTS).is_dir()
    return isinstance(found, dict) and "task" in found and "sampling" in found


# ----- of a run


def config_of(
    path: Path,
    *,
    file: str | None = None,
    changes: Mapping[str, Any] = {},
) -> Config:
    """The config of a run.

    Args:
        path: the run folder.
        file: config file, where functions of the run are defined in that.
        changes: values by name, as of `override`.

    Raises:
        ConfigError: there is no run, or something that it names is not to be found.
    """
    if not is_run(path):
        raise ConfigError(f"{path} holds no run; name a folder that a run has written.")
    if file is not None:
        load(file)  # what it defines is found by its name from now on
    try:
        config = recalled(path / folder.CONFIG)
    except ConfigError as error:
        cause = getattr(error.__cause__, "__cause__", None)
        missing = getattr(cause, "name", None) or ""
        if not missing.startswith(OF_FILE):
            raise
        if file is None:
            raise ConfigError(
                f"{path / folder.CONFIG} names functions that its config file "
                "defines; name that file with --config."
            ) from error
        sys.modules[missing] = sys.modules[module_of(file)]  # it has been renamed
        config = recalled(path / folder.CONFIG)
    return override(config, changes) if changes else config


def of_run(path: Path, config: Config, *, step: str = "latest") -> Policy:
    """What a run has learnt.

    Args:
        path: the run folder; nothing in it is changed, so the run may be going on.
        config: of `config_of`.
        step: `latest`, `best` or a number.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged.
    """
    if config.seeds > 1:
        raise ConfigError(
            f"{path} holds {config.seeds} policies side by side, of as many seeds; "
            "train with seeds=1."
        )
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax warns of reading
    saved = Saved(path / folder.CHECKPOINTS)
    number = saved.number(step)
    loop = run.make_loop(config, rehearse=False)
    with loop.context():
        try:
            state, totals = saved.restore(
                number, loops.saved(loop.abstract), loops.saved(loop.sharding)
            )
        except checkpoint.DamagedError as error:
            raise ConfigError(
                f"{path / folder.CHECKPOINTS / str(number)} cannot be read ({error}); "
                f"name another --step, there are {saved.told()}."
            ) from error
        state = loop.whole(state)
        rest = state.frozen
        mark = None if rest is None else int(checkpoint.fingerprint(rest))
    if totals.get(run.FROZEN) != mark:
        raise ConfigError(
            "the parameters that are not trained differ from those the run began with; "
            f"bring back what model.path={option(config.model, 'path')} was."
        )
    return Policy(
        model=loop.parts.model,
        params=frozen.join(state.params, rest),
        mesh=loop.mesh,
        config=config,
        task=loop.parts.task,
        step=number,
    )


class Saved(checkpoint.Checkpoints):
    """The checkpoints of a run that may be going on: they are read, nothing else."""

    def __init__(self, path: Path):
        """Look what there is.

        Raises:
            ConfigError: there is none.
        """
        self._folder = path.absolute()
        if checkpoint.latest(path) is None:
            raise ConfigError(
                f"{path} holds no checkpoint; name the folder of a run that has one."
            )
        options = ocp.CheckpointManagerOptions(
            best_fn=lambda metrics: metrics["score"], read_only=True
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def told(self) -> str:
        """The steps, in words."""
        return ", ".join(map(str, sorted(self._manager.all_steps())))

    def number(self, step: str) -> int:
        """The step that is called so.

        Raises:
            ConfigError: there is none.
        """
        steps = {str(number): number for number in self._manager.all_steps()}
        steps |= {"latest": self.latest(), "best": self.best()}
        found = steps.get(step)
        if found is None:
            raise ConfigError(
                f"--step {step}: {self._folder} has no such checkpoint; name one of "
                f"{self.told()}."
            )
        return found


# ----- of a checkpoint


def of_checkpoint(
    path: Path, *, vocab_size: int, sizes: Sizes, dtype: str | None = None
) -> Policy:
    """The policy in a folder of Hugging Face.

    Args:
        path: the folder.
        vocab_size: of its tokenizer.
        sizes: of the mesh.
        dtype: of parameters and activations; None: float32 on a CPU, elsewhere
            bfloat16.

    Raises:
        ConfigError: it is not one that can be read, or does not fit the mesh.
    """
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    kind, mesh = getattr(jnp, dtype), meshes.make(sizes)
    with in_a_sentence():
        model = pretrained.model(
            path=str(path),
            vocab_size=vocab_size,
            scan_layers=False,  # decoding would cut the layers apart at every token
            dtype=kind,
            param_dtype=kind,
        )
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        where = meshes.of_params(mesh, model.axes, shapes) if mesh else None
        assert model.load
        return Policy(model=model, params=model.load(where), mesh=mesh)


@contextlib.contextmanager
def in_a_sentence() -> Iterator[None]:
    """What is raised as a sentence about some input is a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if run.OWN in frame.filename]
        if not (own and (own[-1].line or "").startswith("raise")):
            raise
        raise ConfigError(str(error)) from error
