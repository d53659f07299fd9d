"""Loading of policies: from a run folder, or from a Hugging Face checkpoint."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from curax.arrays import frozen
from curax.config import Config, ConfigError, load, override, recalled
from curax.config import Mesh as Sizes
from curax.models import pretrained
from curax.processes import peers
from curax.runs import checkpoint, folder, reading
from curax.settings import errors, files
from curax.settings.config_paths import OF_FILE, describe
from curax.settings.recipes import module_of
from curax.settings.sizes import checkpoint_of
from curax.step import build, loops
from curax.step import mesh as meshes
from curax.step.states import States
from curax.types import Model, Task, TrainState


def nonfinite(params: Any) -> list[str]:
    """Names of the parameters that have values which are not finite."""
    finite = jax.jit(lambda leaf: jnp.all(jnp.isfinite(leaf)))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in leaves
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not finite(leaf)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A model with its parameters.

    Attributes:
        model: model over all parameters, frozen ones included.
        params: all parameters.
        mesh: mesh that they are placed on; None: one device.
        config: config of the run; None for a Hugging Face checkpoint.
        task: task of the run, or None.
        step: step of the checkpoint of the run, or None.
    """

    model: Model
    params: Any
    mesh: Mesh | None
    config: Config | None = None
    task: Task | None = None
    step: int | None = None

    def context(self) -> contextlib.AbstractContextManager[None]:
        """Context that sets the mesh, in which the policy is traced and run."""
        cut = self.config is not None and self.config.mesh.cut_sampler
        return meshes.use(self.mesh, cut_sampler=cut)


def is_run(path: Path) -> bool:
    """Whether a folder is a run folder; a Hugging Face config.json has other keys."""
    if value := files.known(path / folder.CONFIG):
        return "task" in value and "sampling" in value
    return (path / folder.CHECKPOINTS).is_dir()


# ----- from a run


def run_config(
    path: Path,
    *,
    file: str | None = None,
    changes: Mapping[str, Any] | Sequence[str] = (),
) -> Config:
    """The config of a run folder.

    A mesh that cannot lie on the devices that are here, and that nothing changes,
    becomes one of as many of them as are a power of two, along fsdp.

    Args:
        path: run folder.
        file: config file, needed where it defines functions of the run itself.
        changes: as of `override`.

    Raises:
        ConfigError: no run folder, or a function of the config is not found.
    """
    if not is_run(path):
        raise ConfigError(f"{path} holds no run; name a folder that a run has written.")
    if file is not None:
        load(file)  # its module can be imported by name from now on
    try:
        config = recalled(path / folder.CONFIG)
    except ConfigError as error:
        cause: BaseException | None = error
        while cause and not isinstance(cause, ModuleNotFoundError):
            cause = cause.__cause__
        missing = (cause and cause.name) or ""
        if not missing.startswith(OF_FILE):
            raise
        if file is None:
            raise ConfigError(
                f"{path / folder.CONFIG} names functions that its config file "
                "defines; name that file with --config."
            ) from error
        sys.modules[missing] = sys.modules[module_of(file)]  # the file was renamed
        config = recalled(path / folder.CONFIG)
    if not any(change.startswith("mesh.") for change in changes):
        config = _fitting(config)
    return override(config, changes) if changes else config


def _fitting(config: Config) -> Config:
    """The config with a mesh that fits the devices that are here."""
    sizes, here = config.mesh, jax.device_count()
    try:
        shape = meshes.shape_on(sizes, here)
        if sizes.draw_share is not None:
            meshes.divided(sizes, shape)
    except ConfigError:
        mine = Sizes(fsdp=2 ** (here.bit_length() - 1), cut_sampler=sizes.cut_sampler)
        return dataclasses.replace(config, mesh=mine)
    return config


def load_run(path: Path, config: Config, *, step: str = "latest") -> Policy:
    """The policy of a run at a checkpoint.

    Args:
        path: run folder; it is only read, so the run may still be training.
        config: config of the run, from `run_config`.
        step: `latest`, `best` or a number.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged.
    """
    states, state = load_state(path, config, step=step)
    return Policy(
        model=states.parts.model,
        params=frozen.join(state.params, state.frozen),
        mesh=states.mesh,
        config=config,
        task=states.parts.task,
        step=int(state.step),
    )


def load_state(
    path: Path, config: Config, *, step: str = "latest"
) -> tuple[States, TrainState]:
    """The states of a run, and its whole train state at a checkpoint; as `load_run`.

    Its files may have other questions by now, which `folder.check_questions` tells.
    """
    if config.seeds > 1:
        raise ConfigError(
            f"{path} holds {config.seeds} policies side by side, of as many seeds; "
            "train with seeds=1."
        )
    about = folder.kept(reading.read_json(path / folder.CONFIG))
    saved = checkpoint.Checkpoints(path / folder.CHECKPOINTS, keep=None, about=about)
    number = saved.named(step)
    build.check_weights(config, resumed=True)
    # The difficulty memory is as long as the files were.
    with only_read():
        states = states_of(config, reading.read_json(path / folder.QUESTIONS))
    folder.check_shapes(path, states)
    try:
        with states.context():
            like = states.abstract, states.sharding, states.whole
            while True:
                try:
                    return states, saved.restore(number, *like)[0]
                except checkpoint.DamagedError as error:
                    before, number = number, saved.named(step, again=True)
                    if number != before:  # which the run has removed meanwhile
                        continue
                    there = path / folder.CHECKPOINTS / str(number)
                    raise ConfigError(
                        f"{there} cannot be read ({error}); {saved.others(number)}."
                    ) from error
    except checkpoint.OtherBaseError as error:
        raise ConfigError(
            f"{error}; bring back what model.path={checkpoint_of(config)} was."
        ) from error


@contextlib.contextmanager
def only_read() -> Iterator[None]:
    """Context of a run that is only read: a sentence names no option of training.

    Raises:
        ConfigError: one without it.
    """
    try:
        yield
    except ConfigError as error:
        said = str(error).replace(", or --set task.on_error=skip", "")
        said = said.replace(
            "see what is broken with --set task.on_error=raise", "mend them"
        )
        raise ConfigError(said) from error


def states_of(config: Config, began: Mapping[str, Any]) -> States:
    """The states of a run.

    Args:
        config: of the run.
        began: what `folder.write_questions` wrote as it began.

    Raises:
        ConfigError: a function of the config failed; the message names its line.
    """
    with errors.config_errors(config):
        parts = build.build(config)
    if parts.task.fingerprint and (prompts := began.get("prompts")):
        task = dataclasses.replace(parts.task, num_prompts=prompts)
        parts = dataclasses.replace(parts, task=task)
    return States(parts)


def is_readable(config: Config, workdir: Path) -> bool:
    """Whether the last checkpoint of a complete run, which is only read, can be read.

    True where its shapes cannot be known any more.
    """
    states = None
    with contextlib.suppress(ConfigError):  # as where files of the task are gone
        began = reading.read_json(workdir / folder.QUESTIONS)
        states = states_of(config, began)
    if not all(peers.gather(states is not None)) or states is None:
        return True
    about = folder.kept(describe(config))
    saved = checkpoint.Checkpoints(workdir / folder.CHECKPOINTS, keep=None, about=about)
    with states.context(), contextlib.closing(saved):
        try:
            saved.restore(config.steps, states.abstract, states.sharding)
        except checkpoint.DamagedError:
            return False
    return True


def warm_state(loop: loops.Loop) -> TrainState:
    """The state before the first RL step, after the whole warm start of one seed.

    Raises:
        ConfigError: the config has several seeds.
    """
    config = loop.parts.config
    if config.seeds > 1:
        raise ConfigError(f"seeds={config.seeds} are as many policies; set seeds to 1.")
    with loop.context():
        return loop.begin(loop.warmed())


# ----- from a Hugging Face checkpoint


def load_checkpoint(
    path: Path, *, vocab_size: int, sizes: Sizes, dtype: str | None = None
) -> Policy:
    """The policy of a Hugging Face checkpoint.

    Args:
        path: folder of the checkpoint.
        vocab_size: size of its tokenizer's vocabulary.
        sizes: devices along each mesh axis.
        dtype: of parameters and activations; None: float32 on a CPU, else bfloat16.

    Raises:
        ConfigError: the checkpoint cannot be read, or does not fit the mesh.
    """
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    kind, mesh = getattr(jnp, dtype), meshes.make(sizes)
    with errors.config_errors():
        pretrained.check_weights(str(path))
        model = pretrained.model(
            path=str(path),
            vocab_size=vocab_size,
            scan_layers=False,  # scanned layers would be unstacked at every token
            dtype=kind,
            param_dtype=kind,
        )
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        where = meshes.of_params(mesh, model.axes, shapes) if mesh else None
        assert model.load
        return Policy(model=model, params=model.load(where), mesh=mesh)
