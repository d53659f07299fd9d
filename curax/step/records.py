"""Records of a step: components, methods, drivers, and the data between its parts.

A driver draws and grades completions as a `Request` asks for them, and gives `Graded`
ones: those of a step, of its pilots, of held-out prompts or of an evaluation. A step
asks with a `StepRequest`, collects `StepRollouts`, and learns from these. A `Method`
takes part where it has a function.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import optax

from curax import rollout
from curax.arrays import grids
from curax.arrays.metrics import Tally
from curax.config import Config
from curax.settings.conflicts import Table
from curax.types import (
    Contexts,
    Difficulty,
    Model,
    Plan,
    PromptMemory,
    Prompts,
    Rollouts,
    Task,
    Weights,
)

# ----- what does not change during a run


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What draws and what grades: a model and a task; static."""

    task: Task
    model: Model
    methods: tuple["Method", ...] = ()  # in the order they take part


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Components(Subject):
    """A config with its task, model and methods built; static during a run."""

    config: Config
    tx: optax.GradientTransformation
    rows: int  # N, completions drawn at most, pilots apart
    train_rows: int  # M, completions trained per step


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Method:
    """A method with a state or with draws of its own: functions called during a step.

    All functions are optional, and pure except for calls of the driver. The first
    argument of those that draw is the driver. Then come the components and the train
    state at the start of the step, but `conflicts` is asked before there are any,
    `init` and `reward` take no state, and `shown` takes neither. A method's own state is
    `state.methods[name]`, its results of the grading `drawn.found[name]`.

    Attributes:
        name: key of the method in both mappings.
        conflicts: `(config, task) -> Table`, rows of what may not be beside the method
            and the sentence about it.
        init: `(parts, params) -> state`, before the first step; None: it has no state.
        before_step: `(drive, parts, state) -> state`, before prompts are taken.
        prompt_ids: `(parts, state) -> [B] int32`, the prompts of the step, in place of
            the next ones of the data.
        before_draw: `(drive, parts, state, request) -> request`, changes difficulty or
            contexts of the prompts before they are drawn.
        after_draw: `(drive, parts, state, drawn) -> drawn`, draws more.
        grade: `(drive, parts, state, request, rollouts) -> (outcome, found)`, in place
            of the verifier of the task.
        reward: `(parts, found, seen) -> [B, G]`, in place of outcomes and shaping.
        credit: `(parts, state, drawn, seen, credit, rows) -> (drawn, credit)`.
        batch: `(parts, state, drawn, seen, credit, rows, batch) -> batch`.
        after_update: `(parts, state, params, drawn, seen) -> state`, its own.
        metrics: `(parts, state, drawn, seen) -> Tally`, added to those of the step.
        shown: `(found, seen) -> tree of [B, ...]`, logged with the completions.
    """

    name: str
    conflicts: Callable[[Config, Task], Table] | None = None
    init: Callable[..., Any] | None = None
    before_step: Callable[..., Any] | None = None
    prompt_ids: Callable[..., jax.Array] | None = None
    before_draw: Callable[..., "Request"] | None = None
    after_draw: Callable[..., "StepRollouts"] | None = None
    grade: Callable[..., tuple[jax.Array, Any]] | None = None
    reward: Callable[..., jax.Array] | None = None
    credit: Callable[..., tuple["StepRollouts", "Credit"]] | None = None
    batch: Callable[..., Any] | None = None
    after_update: Callable[..., Any] | None = None
    metrics: Callable[..., Tally] | None = None
    shown: Callable[..., Any] | None = None


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
    plan: Plan | None  # [N] rows to draw; None: not planned yet
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


@flax.struct.dataclass(kw_only=True)
class Graded:
    """Completions of a request and their outcomes."""

    rollouts: Rollouts  # [N]
    outcome: jax.Array  # [N] float32 in [0, 1], NaN where missing
    found: dict[str, Any]  # other results of the grading, by method
    shape: tuple[int, int] = flax.struct.field(pytree_node=False)  # (B, G)

    @classmethod
    def of(
        cls, request: Request, rollouts: Rollouts, outcome: Any, **found: Any
    ) -> "Graded":
        """Completions of a request with their outcomes."""
        shape = request.prompts.tokens.shape[-2], request.group
        return Graded(rollouts=rollouts, outcome=outcome, found=found, shape=shape)

    @property
    def groups(self) -> "Groups":
        """The completions as grids `[B, G]`."""
        return groups(self.shape, self.rollouts, self.outcome)


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


# ----- outcomes and credit on the grid


@flax.struct.dataclass(kw_only=True)
class Groups:
    """Outcomes, lengths and existence of completions, `[B, G]`: the input of stages."""

    row: jax.Array  # int32, the row of each completion; N where there is none
    exists: jax.Array  # bool, drawn and graded: a missing outcome is absent
    outcome: jax.Array  # float32 in [0, 1], 0 where it does not exist
    finished: jax.Array  # bool, ended by itself
    length: jax.Array  # int32 tokens
    score_sq_norm: jax.Array  # float32, squared norm of the score in the logits
    reward: jax.Array | None = None  # float32, of a grader with terms, as the outcome


def grid_of(config: Config) -> tuple[int, int]:
    """Shape (B, G) of the grid of completions."""
    return config.sampling.prompts, config.sampling.group_size


def groups(shape: tuple[int, int], rollouts: Rollouts, outcome: jax.Array) -> Groups:
    """Rows `[N]` and their outcomes as grids `[B, G]`."""
    row = grids.index(rollouts, shape)
    outcome = grids.grid(outcome, row, fill=jnp.nan)
    exists = ~jnp.isnan(outcome)
    length = jnp.sum(rollouts.mask, -1, dtype=jnp.int32)
    reward = rollouts.reward
    if reward is not None:
        reward = jnp.where(exists, grids.grid(reward, row, fill=0.0), 0.0)
    return Groups(
        row=row,
        exists=exists,
        outcome=jnp.where(exists, outcome, 0.0),
        finished=grids.grid(rollouts.finished, row, fill=False),
        length=grids.grid(length, row, fill=0),
        score_sq_norm=grids.grid(jnp.sum(rollouts.score_sq_norm, -1), row, fill=0.0),
        reward=reward,
    )


@flax.struct.dataclass(kw_only=True)
class Credit:
    """Selection and credit of each completion, `[B, G]`."""

    keep: jax.Array  # bool, trains
    credit: jax.Array  # float32, multiplies the completion's gradient; 0 if not kept
    factor: jax.Array  # float32, credit over advantage: correction times weight


@flax.struct.dataclass(kw_only=True)
class TrainRows:
    """The M rows that train: their places in the grid and among the rows drawn."""

    place: jax.Array  # [M] int32 in [0, B G), in the flat grid
    row: jax.Array  # [M] int32 in [0, N), among those drawn
    used: jax.Array  # [M] bool, False on rows left over


@flax.struct.dataclass(kw_only=True)
class Shown:
    """A few prompts with all their completions, logged for a person to read."""

    prompts: Prompts  # [K, ...]
    tokens: jax.Array  # [K, G, T] int32
    mask: jax.Array  # [K, G, T] bool
    outcome: jax.Array  # [K, G] float32, NaN where missing
    reward: jax.Array  # [K, G] float32
    credit: jax.Array  # [K, G] float32
    keep: jax.Array  # [K, G] bool
    exists: jax.Array  # [K, G] bool, drawn
    level: jax.Array  # [K] int32, level of the hint
    contexts: Contexts  # [K, ...], with the hint
    reference: tuple[jax.Array, ...] | None  # [K, Y] tokens, mask, weights in R3
