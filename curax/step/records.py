"""What a step is made of: its components, its methods, and what travels between them.

A step draws and grades completions as `Request`s ask for them, collects them as
`StepRollouts`, and learns from these. A `Method` takes part where it has a function.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import optax

from curax.arrays import grids
from curax.arrays.metrics import Tally
from curax.config import Config
from curax.types import (
    Contexts,
    Difficulty,
    Model,
    PromptMemory,
    Prompts,
    Rollouts,
    Task,
)

# ----- what does not change during a run


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Components:
    """A config with its functions called: what every step needs, all of it static."""

    config: Config
    task: Task
    model: Model
    tx: optax.GradientTransformation
    rows: int  # N, completions drawn at most, pilots apart
    train_rows: int  # M, completions trained per step
    methods: tuple["Method", ...] = ()  # in the order they take part


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Method:
    """A method with a state or with draws of its own: where it takes part in a step.

    All functions are pure but for what they ask of the driver, and all are optional.
    Their first argument is the driver where it draws, then the components and the
    train state at the start of the step; a method's own state is
    `state.methods[name]`, and what it found in a step `drawn.found[name]`.

    Attributes:
        name: of its entries in both mappings.
        needs: `(config, task) -> sentences`, what the method lacks in a task.
        init: `(parts, params) -> state`, before the first step; None: it has no state.
        before_step: `(drive, parts, state) -> state`, before prompts are taken.
        prompt_ids: `(parts, state) -> [B] int32`, the prompts of the step, in place of
            those whose turn it is.
        before_draw: `(drive, parts, state, request) -> request`, what is known of the
            prompts, or how they are asked, before they are drawn.
        after_draw: `(drive, parts, state, drawn) -> drawn`, draws more.
        grade: `(drive, parts, state, request, rollouts) -> (outcome, found)`, in place
            of the verifier of the task.
        reward: `(parts, found, seen) -> [B, G]`, in place of outcomes and shaping.
        credit: `(parts, state, drawn, seen, credit, rows) -> (drawn, credit)`.
        batch: `(parts, state, drawn, seen, credit, rows, batch) -> batch`.
        after_update: `(parts, state, params, drawn, seen) -> state`, its own.
        metrics: `(parts, state, drawn, seen) -> Tally`, added to those of the step.
        shown: `(drawn, seen) -> tree of [B, ...]`, to be read by a person.
    """

    name: str
    needs: Callable[[Config, Task], Iterator[str]] | None = None
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
    """How a step is driven: `curax.step.drivers` has three."""

    def call(self, function: Callable, parts: Components, *args: Any) -> Any:
        """A pure function of the components and of arrays."""

    def call_task(self, function: Callable, parts: Components, *args: Any) -> Any:
        """The same of a function that calls those of the task, which may read files."""

    def repeat(self, wants: Callable, body: Callable, start: Any) -> Any:
        """`x = body(x)` from `start` on, while `wants(x)`, a `[]` bool."""

    def draw_and_grade(
        self, parts: Components, state: Any, request: "Request"
    ) -> "Graded":
        """Completions as they are asked for, with their outcomes."""
        ...

    def timed(self, stage: str) -> Any:
        """A context manager: what runs inside is time of this stage."""

    def finish(self, function: Callable, parts: Components, *args: Any) -> Any:
        """`call` for the last time in a step: the train state is not needed again."""


# ----- what is asked for, and what comes back


@flax.struct.dataclass(kw_only=True)
class Request:
    """Completions to be drawn: of which prompts, how many, in which contexts."""

    prompts: Prompts  # B of them
    contexts: Contexts  # theirs, with a hint where there is one
    level: jax.Array  # [B] int32, of the hint; 0: none
    wanted: jax.Array  # [B] bool, False: nothing is drawn of this prompt
    known: Difficulty  # [B], of the prompts before these completions
    counts: jax.Array | None  # [B] int32, completions of each; None: not allocated yet
    memory: (
        PromptMemory  # before these completions, with those that explored the prompts
    )
    key: jax.Array  # all noise of the draw derives from it
    explored: Tally | None = None  # of what was drawn to find this out, if anything was
    visited: bool = flax.struct.field(pytree_node=False, default=False)  # the memory
    # holds completions of this visit already
    rows: int = flax.struct.field(pytree_node=False)  # completions at most
    whole: bool = flax.struct.field(pytree_node=False, default=False)  # drawn at once:
    # no stopping rule, no chunks


@flax.struct.dataclass(kw_only=True)
class Graded:
    """What a request gave."""

    rollouts: Rollouts  # [N]
    outcome: jax.Array  # [N] float32 in [0, 1], NaN where missing
    found: dict[str, Any]  # by method, what else the grading gave


@flax.struct.dataclass(kw_only=True)
class StepRollouts:
    """Prompts with graded completions. What the gate closed may have been replaced."""

    prompts: Prompts
    contexts: Contexts
    rollouts: Rollouts
    outcome: jax.Array  # [N] float32, NaN where missing
    known: Difficulty  # [B], of the prompts before they were drawn
    level: jax.Array  # [B] int32, of the hint they were drawn with; 0: none
    memory: PromptMemory  # after all prompts that were tried
    attempts: jax.Array  # [] int32, batches of prompts tried
    tally: Tally  # of all prompts that were tried
    found: dict[str, Any]  # by method, what it found in this step


# ----- what stages compute on


@flax.struct.dataclass(kw_only=True)
class Groups:
    """What stages compute on, `[B, G]`."""

    row: jax.Array  # int32, the row of each completion; N where there is none
    exists: jax.Array  # bool, drawn and graded: a missing outcome is absent
    outcome: jax.Array  # float32 in [0, 1], 0 where it does not exist
    finished: jax.Array  # bool, ended by itself
    length: jax.Array  # int32 tokens
    score_sq_norm: jax.Array  # float32, squared norm of the score in the logits


def grid_of(config: Config) -> tuple[int, int]:
    """(B, G)."""
    return config.sampling.prompts, config.sampling.group_size


def groups(shape: tuple[int, int], rollouts: Rollouts, outcome: jax.Array) -> Groups:
    """Rows `[N]` and their outcomes as grids of this shape."""
    row = grids.index(rollouts, shape)
    outcome = grids.grid(outcome, row, fill=jnp.nan)
    exists = ~jnp.isnan(outcome)
    length = jnp.sum(rollouts.mask, -1, dtype=jnp.int32)
    return Groups(
        row=row,
        exists=exists,
        outcome=jnp.where(exists, outcome, 0.0),
        finished=grids.grid(rollouts.finished, row, fill=False),
        length=grids.grid(length, row, fill=0),
        score_sq_norm=grids.grid(jnp.sum(rollouts.score_sq_norm, -1), row, fill=0.0),
    )


@flax.struct.dataclass(kw_only=True)
class Credit:
    """What becomes of each completion, `[B, G]`."""

    keep: jax.Array  # bool, trains
    credit: jax.Array  # float32, multiplies the completion's gradient; 0 if not kept
    factor: jax.Array  # float32, of it what the advantage was multiplied by


@flax.struct.dataclass(kw_only=True)
class TrainRows:
    """Which M completions train, and where they stand."""

    place: jax.Array  # [M] int32 in [0, B G), in the flat grid
    row: jax.Array  # [M] int32 in [0, N), among those drawn
    used: jax.Array  # [M] bool, False on rows left over


@flax.struct.dataclass(kw_only=True)
class Shown:
    """A few prompts with all their completions, to be read by a person."""

    prompts: Prompts  # [K, ...]
    tokens: jax.Array  # [K, G, T] int32
    mask: jax.Array  # [K, G, T] bool
    outcome: jax.Array  # [K, G] float32, NaN where missing
    reward: jax.Array  # [K, G] float32
    credit: jax.Array  # [K, G] float32
    keep: jax.Array  # [K, G] bool
    exists: jax.Array  # [K, G] bool, drawn
    level: jax.Array  # [K] int32, of the hint
    contexts: Contexts  # [K, ...], with it
    reference: tuple[jax.Array, ...] | None  # [K, Y] tokens, mask, weights in R3
