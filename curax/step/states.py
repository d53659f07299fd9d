"""States of a run: how they begin, their shapes, and where their arrays lie.

A checkpoint is read with these alone; what makes steps is in `loops`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from curax import memory as memories
from curax import update
from curax.arrays import frozen
from curax.arrays.keys import stage_key
from curax.arrays.sharding import SEEDS, platform
from curax.config import override
from curax.step import ahead
from curax.step import mesh as meshes
from curax.step.build import build
from curax.step.compiling import Program
from curax.step.drivers import Traced
from curax.step.types import Components
from curax.types import TrainState, Weights


@flax.struct.dataclass(kw_only=True)
class Warm(Weights):
    """State of the warm start."""

    opt_state: Any
    step: jax.Array  # [] int32
    seed: jax.Array  # [] uint32


def initial(parts: Components, seed: jax.Array, loaded: Any = None) -> Warm:
    """State before any training: random parameters, overridden by those in `loaded`."""
    params = parts.model.init(stage_key(seed, jnp.int32(0), "init"))
    params, rest = frozen.split(parts.model, frozen.join(params, loaded))
    warm = parts.config.warm_start
    tx = warm and update.transformation(warm.optimizer, warm.clip_norm)
    return Warm(
        params=params,
        frozen=rest,
        opt_state=tx.init(params) if tx else None,
        step=jnp.int32(0),
        seed=seed,
    )


def begin(parts: Components, warm: Warm) -> TrainState:
    """The state before the first RL step, from a finished warm start."""
    state = TrainState(
        params=warm.params,
        frozen=warm.frozen,
        opt_state=parts.tx.init(warm.params),
        # A copy: parameters are donated to the next step, the reference stays.
        reference=jax.tree.map(jnp.copy, warm.params) if refers(parts) else None,
        memory=memories.forget(parts.task.num_prompts),
        position=jnp.int32(0),
        step=jnp.int32(0),
        seed=warm.seed,
    )
    methods = {
        method.name: method.init(Traced(), parts, state, None)
        for method in parts.methods
        if method.init
    }
    state = dataclasses.replace(state, methods=methods)
    if not parts.config.sampling.ahead:
        return state
    # A copy: one of the two is donated before the other.
    own = jax.tree.map(jnp.copy, ahead.behaviour(state))
    return dataclasses.replace(state, behaviour=own)


def sharding_of(parts: Components, mesh: Any, state: Any) -> Any:
    """The sharding of a state, warm or of RL; None without a mesh."""
    if mesh is None:
        return None
    axes, rest = frozen.split(parts.model, parts.model.axes)
    return meshes.of_state(mesh, axes, state, rest)


def refers(parts: Components) -> bool:
    """Whether a run keeps its initial policy: for a KL, a distance, or hints."""
    config = parts.config
    writes = config.hint and config.hint.writing and config.hint.writing.frozen
    return bool(config.kl or writes) or config.evaluation.distance


class States:
    """States of a run, or of L runs side by side, whose arrays have a leading axis.

    Attributes:
        parts: components of the run.
        mesh: mesh that the run is spread over; None: one device.
        split: that mesh, and the one that draws a step ahead; None: it is the same.
        many: whether there is a leading axis, of R seeds or of L lanes.
        seeds: `[]` or `[L]` uint32.
        magnitudes: by dotted name, `[L]` float32, in which lanes differ; else empty.
        abstract_warm: shapes of a state of the warm start.
        abstract: shapes of a state of RL.
        warm_sharding: sharding of the former; None without a mesh.
        sharding: sharding of the latter; None without a mesh.
    """

    def __init__(
        self,
        parts: Components,
        settings: Mapping[str, Sequence[float]] | None = None,
    ):
        """Set up mesh, seeds and shapes; nothing is compiled yet.

        Args:
            parts: components of the run.
            settings: by dotted name, a value for each of S settings. There are L = S R
                lanes, the R seeds of a setting next to each other. None: a run that is
                one of R seeds, without a leading axis where R = 1.
        """
        self.parts, cfg = parts, parts.config
        cut = cfg.mesh.draw_share is not None
        self.split = meshes.split(cfg.mesh) if cut else None
        self.mesh = self.split.train if self.split else meshes.make(cfg.mesh)
        # Committed, as a restored state is: so a resumed run is the same program.
        place = None if self.mesh else jax.devices()[0]
        self.many = cfg.seeds > 1 or settings is not None
        each = {
            name: np.repeat(np.array(values, np.float32), cfg.seeds)
            for name, values in (settings or {}).items()
        }
        seeds = np.uint32(cfg.seed) + np.arange(cfg.seeds, dtype=np.uint32)
        seeds = np.resize(seeds, max([cfg.seeds, *map(len, each.values())]))
        self.seeds = jax.device_put(seeds if self.many else seeds[0], place)
        self.magnitudes = jax.device_put(each, place)
        with self.context():
            start = self._each(initial), self._each(begin)
            warm = jax.eval_shape(start[0], self.seeds, self.magnitudes)
            state = jax.eval_shape(start[1], warm, self.magnitudes)
            self.warm_sharding = sharding_of(parts, self.mesh, warm)
            self.sharding = began = sharding_of(parts, self.mesh, state)
            if self.split:
                apart = meshes.shardings_moved(began.behaviour, self.split.draw)
                self.sharding = dataclasses.replace(began, behaviour=apart)
        self.abstract_warm, self.abstract = warm, state
        self._initial = Program(
            self._each(initial, None),
            self.warm_sharding,
            out_shardings=self.warm_sharding,
            donate_argnums=() if self.many else 2,
        )
        self._begin = Program(self._each(begin), began, out_shardings=began)

    def context(self):
        """Context that sets the mesh; all programs are traced and run inside it."""
        return self._uses(self.mesh)

    def drawing(self):
        """As `context`, of the mesh that draws ahead."""
        return self._uses(self.split.draw if self.split else self.mesh)

    def _uses(self, mesh: Any):
        return meshes.use(mesh, cut_sampler=self.parts.config.mesh.cut_sampler)

    @property
    def platform(self) -> str:
        """Platform of the devices that the run takes, as `cpu`."""
        with self.context():
            return platform()

    def loaded(self) -> Any:
        """Parameters of a checkpoint, laid out as the run's; None: there are none."""
        model, where = self.parts.model, None
        if model.load and self.mesh:
            like = jax.eval_shape(model.init, jax.random.key(0))
            where = meshes.of_params(self.mesh, model.axes, like)
        return model.load(where) if model.load else None

    def initial(self) -> Warm:
        """State before any training, with the parameters of a checkpoint if any."""
        return self._initial(self.seeds, self.magnitudes, self.loaded())

    def begin(self, warm: Warm) -> TrainState:
        """The state before the first RL step."""
        state = self._begin(warm, self.magnitudes)
        return jax.device_put(state, self.sharding) if self.split else state

    def whole(self, state: Any) -> Any:
        """A state of a checkpoint with its frozen parameters, which that leaves out."""
        if self.parts.model.trained is None:
            return state
        return dataclasses.replace(state, frozen=self.initial().frozen)

    def _each(self, function: Callable, *rest: Any) -> Callable:
        """`(state, magnitudes, ...)` of each run, by `function(parts, state, ...)`.

        Args:
            function: of the components of a run; its state or seed; and any others.
            rest: axes of these others, as of `jax.vmap`.
        """

        def one(state, magnitudes, *more):
            return function(self._parts(magnitudes), state, *more)

        one.__name__ = getattr(function, "func", function).__name__
        axes = (0, 0, *rest)
        return jax.vmap(one, axes, axis_name=SEEDS) if self.many else one

    def _parts(self, magnitudes: Mapping[str, jax.Array]) -> Components:
        """The components of a run, those of its lane where there are magnitudes."""
        if not magnitudes:
            return self.parts
        return build(override(self.parts.config, magnitudes), self.parts.task)
