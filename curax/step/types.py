"""Records of a step: components, methods, drivers, and the data between its parts.

A driver draws and grades completions as a `Request` asks for them, and gives `Graded`
ones: those of a step, of its pilots, of held-out prompts or of an evaluation. A step
asks with a `StepRequest`, collects `StepRollouts`, and learns from these. A `Method`
takes part where it has a hook; the last part says when, and with what.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import optax

from curax import rollout
from curax.arrays import grids
from curax.arrays.metrics import Tally
from curax.config import Config
from curax.handover import Engine
from curax.settings.conflicts import Table
from curax.types import (
    Behaviour,
    Contexts,
    Difficulty,
    DrawRows,
    Imitated,
    Model,
    PromptMemory,
    Prompts,
    Rollouts,
    Task,
    TrainState,
    Weights,
)

# ----- what does not change during a run


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What draws and what grades: a model and a task; static."""

    task: Task
    model: Model
    methods: tuple["Method", ...] = ()  # in the order of `build.methods_of`


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Components(Subject):
    """A config with its task, model and methods built; static during a run."""

    config: Config
    tx: optax.GradientTransformation
    rows: int  # N, completions drawn at most, pilots apart
    train_rows: int  # M, completions trained per step
    engine: Engine | None = None  # draws what a step asks for; None: curax's sampler

    @property
    def needs_host(self) -> bool:
        """Whether the host verifies the task, reads its prompts, or asks an engine."""
        task = self.task
        return not task.on_device or task.in_files or self.engine is not None


class Driver(Protocol):
    """How a step is executed; `curax.step.drivers` has three."""

    def call(self, function: Callable, parts: Components, *args: Any) -> Any:
        """Call a pure function of the components and of arrays."""

    def call_task(self, function: Callable, parts: Components, *args: Any) -> Any:
        """As `call`, for functions that call the task's, which may read files."""

    def repeat(self, wants: Callable, body: Callable, start: Any) -> Any:
        """Apply `x = body(x)` from `start` on, while `wants(x)`, a `[]` bool."""

    def draw(self, parts: Subject, state: Weights, request: "Request") -> Rollouts:
        """Completions of a request, by the policy with the parameters of a state."""
        ...

    def draw_and_grade(
        self, parts: Subject, state: Weights, request: "Request"
    ) -> "Graded":
        """Completions of a request, with their outcomes."""
        ...

    def beside(self, own: Behaviour) -> Behaviour:
        """The same, on the devices that draw."""
        ...

    def ahead(
        self, function: Callable, parts: Components, state: TrainState, then: Behaviour
    ) -> Any:
        """The state, and what `function` makes by its behaviour.

        By `then`, that of the next step, the same may be begun.
        """

    def call_timed(
        self, stage: Any, function: Callable, parts: Components, *args: Any
    ) -> Any:
        """As `call`; the time is that of a stage: rollout, verify or update."""

    def finish(self, function: Callable, parts: Components, *args: Any) -> Any:
        """As `call`, for the last call of a step: the train state may be donated."""


# ----- requests and their completions


@flax.struct.dataclass(kw_only=True)
class Request:
    """A request for completions: of which prompts, in which contexts, which rows."""

    prompts: Prompts  # B of them
    contexts: Contexts  # of the prompts, with hints where there are any
    rows: DrawRows | None  # [N] to draw; None: not allocated yet
    key: jax.Array  # random key of the draw; [B]: one for each prompt
    prefix: rollout.Prefix | None = None  # of the contexts, where it is known
    group: int = flax.struct.field(pytree_node=False)  # G, completions of a prompt
    how: rollout.Settings = flax.struct.field(pytree_node=False)
    stops: bool = flax.struct.field(pytree_node=False, default=False)  # the stopping
    # rule of the config is tested meanwhile
    chunks: int = flax.struct.field(pytree_node=False, default=1)  # parts of the draw,
    # of which the host verifies one while the device draws the next
    terms: bool = flax.struct.field(pytree_node=False, default=False)  # rewards are
    # wanted: all terms of the grader, not the outcome alone


@flax.struct.dataclass(kw_only=True)
class StepRequest(Request):
    """A request of a step, with what is known of its prompts."""

    level: jax.Array  # [B] int32, level of the hint; 0: none
    known: Difficulty  # [B], estimated before these completions
    memory: PromptMemory  # before these completions, pilots included
    counts: jax.Array | None = None  # [B] int32, completions that the allocator gives
    explored: Tally | None = None  # metrics of pilots and of hint writing
    visited: bool = flax.struct.field(pytree_node=False, default=False)  # the memory
    # holds completions of this visit already


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ungraded:
    """A request and its completions, before these are graded."""

    request: Request
    rollouts: Rollouts  # [N]


@flax.struct.dataclass(kw_only=True)
class Graded:
    """Completions of a request and their outcomes."""

    rollouts: Rollouts  # [N]
    outcome: jax.Array  # [N] float32 in [0, 1], NaN where missing
    reference: tuple[jax.Array, ...] | None = None  # [B, Y] tokens, mask, weights that
    # are logged with the completions; None: outcomes go by none
    found: dict[str, Any] = flax.struct.field(default_factory=dict)  # what else the
    # grading found, by method
    shape: tuple[int, int] = flax.struct.field(pytree_node=False)  # (B, G)

    @classmethod
    def of(
        cls, request: Request, rollouts: Rollouts, outcome: Any, **more: Any
    ) -> "Graded":
        """Completions of a request with their outcomes, and more fields if any."""
        shape = request.prompts.tokens.shape[-2], request.group
        return Graded(rollouts=rollouts, outcome=outcome, shape=shape, **more)

    @property
    def groups(self) -> "Groups":
        """The completions as grids `[B, G]`."""
        rollouts, row = self.rollouts, grids.index(self.rollouts, self.shape)
        outcome = grids.grid(self.outcome, row, fill=jnp.nan)
        exists = ~jnp.isnan(outcome)
        length = jnp.sum(rollouts.mask, -1, dtype=jnp.int32)
        reward, square = rollouts.reward, jnp.sum(rollouts.score_sq_norm, -1)
        if reward is not None:
            reward = jnp.where(exists, grids.grid(reward, row, fill=0.0), 0.0)
        return Groups(
            row=row,
            exists=exists,
            outcome=jnp.where(exists, outcome, 0.0),
            finished=grids.grid(rollouts.finished, row, fill=False),
            length=grids.grid(length, row, fill=0),
            score_sq_norm=grids.grid(square, row, fill=0.0),
            reward=reward,
        )


@flax.struct.dataclass(kw_only=True)
class StepRollouts(Graded):
    """Graded completions of a step; closed groups may have been replaced."""

    prompts: Prompts
    contexts: Contexts
    known: Difficulty  # [B], estimated before the draw
    level: jax.Array  # [B] int32, level of the hint in the context; 0: none
    memory: PromptMemory  # after all attempts
    attempts: jax.Array  # [] int32, batches of prompts drawn
    tally: Tally  # metrics of all attempts
    version: jax.Array | None = None  # [N] int32, steps that had made the parameters
    # that drew each; None: all that were made


# ----- outcomes and credit on the grid


@flax.struct.dataclass(kw_only=True)
class Groups:
    """Outcomes, lengths and existence of completions, `[B, G]`: the input of stages."""

    row: jax.Array  # int32, the row of each completion; N where there is none
    exists: jax.Array  # bool, drawn and graded: a missing outcome is absent
    outcome: jax.Array  # float32 in [0, 1], 0 where it does not exist
    finished: jax.Array  # bool, ended by itself
    length: jax.Array  # int32 tokens that the policy chose
    score_sq_norm: jax.Array  # float32, squared norm of the score in the logits
    reward: jax.Array | None = None  # float32, 0 where it does not exist; None: outcome


def grid_of(config: Config) -> tuple[int, int]:
    """Shape (B, G) of the grid of completions."""
    return config.sampling.prompts, config.sampling.group_size


@flax.struct.dataclass(kw_only=True)
class Credit:
    """Selection and credit of each completion, `[B, G]`."""

    keep: jax.Array  # bool, trains
    credit: jax.Array  # float32, multiplies the completion's gradient; 0 if not kept
    factor: jax.Array  # float32, credit over advantage: correction times weight


@flax.struct.dataclass(kw_only=True)
class Selection:
    """What a step trains on, before it is a batch: M rows of those that were drawn."""

    drawn: StepRollouts  # in the contexts in which they train
    given: Credit
    place: jax.Array  # [M] int32 in [0, B G), of each row in the flat grid
    row: jax.Array  # [M] int32 in [0, N), among those drawn
    used: jax.Array  # [M] bool, False on rows left over
    of_tokens: jax.Array | None = None  # [M, T] float32, credit of each token; None:
    # that of its completion
    imitated: Imitated | None = None  # completions to imitate besides

    @property
    def mask(self) -> jax.Array:
        """`[M, T]` bool, tokens of the rows that train."""
        return self.drawn.rollouts.mask[self.row] & self.used[:, None]

    @property
    def support(self) -> jax.Array | None:
        """`[M, T, S]`, kept sets of the tokens of these rows; None: not noted."""
        noted = self.drawn.rollouts.support
        return None if noted is None else noted[self.row]

    @property
    def credit(self) -> jax.Array:
        """`[M, T]` float32, credit of each token."""
        if self.of_tokens is not None:
            return self.of_tokens
        flat = self.given.credit.reshape(-1)
        each = jnp.where(self.used, flat[self.place], 0.0)
        return jnp.broadcast_to(each[:, None], self.mask.shape)


@flax.struct.dataclass(kw_only=True)
class Shown:
    """A few prompts with all their completions, logged for a person to read."""

    prompts: Prompts  # [K, ...]
    tokens: jax.Array  # [K, G, T] int32
    mask: jax.Array  # [K, G, T] bool, tokens of the completion, whoever wrote them
    outcome: jax.Array  # [K, G] float32, NaN where missing
    reward: jax.Array  # [K, G] float32
    credit: jax.Array  # [K, G] float32
    keep: jax.Array  # [K, G] bool
    exists: jax.Array  # [K, G] bool, drawn
    version: jax.Array  # [K, G] int32, steps that had made the parameters that drew it
    level: jax.Array  # [K] int32, level of the hint
    contexts: Contexts  # [K, ...], with the hint
    reference: tuple[jax.Array, ...] | None  # [K, Y] tokens, mask, weights in R3
    observed: jax.Array | None = None  # [K, G, T] bool, of these tokens those of an
    # environment; None: there is none


# ----- methods

X = TypeVar("X")
Y = TypeVar("Y")
# What every function of a method takes: the driver, the components, the train state at
# the start of the step, and what the step has at that moment, X; it gives Y.
Hook = Callable[[Driver, Components, TrainState, X], Y]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Method:
    """A method with a state or with draws of its own: hooks called during a step.

        hook(drive, parts, state, what) -> result

    All are optional, and pure except for calls of the driver, through which those of
    `choose`, `before_draw`, `grade` and `after_draw` call whatever computes; the others
    are part of one program. A method's own state is `state.methods[name]`, what its
    `grade` found is `drawn.found[name]`, outcomes on the grid are `drawn.groups`.

    Attributes:
        name: key of the method in both mappings.
        conflicts: no hook but `(config, task) -> Table`, asked before a run: rows of
            what may not be beside the method, and the sentence about it.
        init: its state before the first step; `state` has none of a method yet.
            Without it the method has no state.
        choose: ids of the prompts of the step, in place of the next ones of the data,
            and the train state that remembers the choice. `before_draw` cannot: it is
            called for each attempt of a step, and no state comes back from it.
        before_draw: the request with other difficulty or contexts of its prompts.
        grade: outcomes in place of the task's verifier, and rewards if they differ.
            What comes after the draw cannot: the verifier would have been asked.
        after_draw: completions of the step, more of which were drawn.
        credit: what trains with other credit, of completions or of tokens, in other
            contexts, or with more to imitate.
        after_update: its own state; `state` is the one after the update, with the
            methods' states before it.
        metrics: added to those of the step.
    """

    name: str
    conflicts: Callable[[Config, Task], Table] | None = None
    init: Hook[None, Any] | None = None
    choose: Hook[None, tuple[TrainState, jax.Array]] | None = None
    before_draw: Hook[StepRequest, StepRequest] | None = None
    grade: Hook[Ungraded, Graded] | None = None
    after_draw: Hook[StepRollouts, StepRollouts] | None = None
    credit: Hook[Selection, Selection] | None = None
    after_update: Hook[StepRollouts, Any] | None = None
    metrics: Hook[StepRollouts, Tally] | None = None
