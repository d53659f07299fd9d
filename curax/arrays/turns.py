"""Turns of completions: an environment called by the sampler, for many rows at a time.

    a turn ends -> its tokens -> observe -> observation into the row, in one block

Only the columns of an observation and what is asked for are known here; reading them is
the sampler's loop.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from curax.arrays.sharding import shard_rows
from curax.types import Environment, Observation, Prompts, Rollouts, Turns

ARGUMENTS = {  # of the functions of an environment
    "reset": "key, target",
    "observe": "state, tokens, length",
    "measure": "state",
}
RESET = 2**31 - 1  # folded into the key of a row, whose tokens take 0 to T - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episodes:
    """An environment with the targets of the prompts that are drawn.

    Attributes:
        environment: of the task.
        target: tree of `[B, ...]`.
        pad: token behind the end of a turn.
    """

    environment: Environment
    target: Any
    pad: int

    @classmethod
    def of(cls, environment: Environment, prompts: Prompts, pad: int) -> "Episodes":
        """The environment of a task for these prompts."""
        return cls(environment=environment, target=prompts.target, pad=pad)

    def begin(self, key: jax.Array, prompt: jax.Array) -> "Episode":
        """Episodes before the first turn.

        Args:
            key: `[N]` random keys, of the rows.
            prompt: `[N]` int32 in [0, B).
        """
        own = jax.vmap(partial(jax.random.fold_in, data=RESET))(key)
        target = jax.tree.map(lambda leaf: jnp.asarray(leaf)[prompt], self.target)
        state = jax.vmap(_of("reset", self.environment.reset))(own, target)
        state = jax.tree.map(lambda leaf: shard_rows(jnp.asarray(leaf)), state)
        return Episode(turn=jnp.zeros(prompt.shape, jnp.int32), state=state)

    def found(self, episode: "Episode") -> dict[str, jax.Array]:
        """`[N]` float32 by name, what the environment measures of the last states.

        Raises:
            ValueError: while tracing, if what is measured is not one number a
                completion, by name.
        """
        if not self.environment.measure:
            return {}
        measure = _of("measure", self.environment.measure)

        def named(state: Any) -> dict[str, jax.Array]:
            found = measure(state)
            if not isinstance(found, Mapping):
                raise ValueError(
                    f"task.environment.measure gives a {type(found).__name__}; let it "
                    "give numbers by name."
                )
            return {name: _array("measure", name, x) for name, x in found.items()}

        found = jax.vmap(named)(episode.state)
        for name, values in found.items():
            if values.shape != episode.turn.shape:
                raise ValueError(
                    f"task.environment.measure gives {_said(values)} as {name!r}, and "
                    "must give [] of each; mend that function."
                )
        return {name: jnp.asarray(x, jnp.float32) for name, x in found.items()}


@flax.struct.dataclass(kw_only=True)
class Episode:
    """The environment's side of every row."""

    turn: jax.Array  # [N] int32, column at which the turn of the row begins
    state: Any  # [N, ...], as of `Environment.reset`


def nothing(rows: int, steps: int) -> Turns:
    """No turn of `rows` completions of `steps` tokens."""
    return Turns(
        observed=jnp.zeros((rows, steps), bool),
        reward=jnp.zeros((rows, steps), jnp.float32),
        count=jnp.zeros(rows, jnp.int32),
        found={},
    )


def answered(
    episodes: Episodes,
    out: Rollouts,
    episode: Episode,
    row: jax.Array,
    count: jax.Array,
    ended: jax.Array,
    some: jax.Array,
) -> tuple[Rollouts, Episode, jax.Array]:
    """Completions and episodes after the environment has answered turns that ended.

    Args:
        episodes: the environment.
        out: `[N, T]` completions, with the last tokens of the turns.
        episode: `[N]`.
        row: `[K]` int32 in [0, N), the row of each slot.
        count: `[K]` int32, tokens of it.
        ended: `[K]` bool, slots whose row has just ended a turn; others stay.
        some: `[]` bool, whether any has, here or in another sampler beside this one.

    Returns:
        Completions, with observations behind their turns; episodes; `[K]` bool, slots
        whose completion ends with the turn.

    Raises:
        ValueError: while tracing, if the environment gives other shapes or dtypes than
            it must.
    """
    assert out.turns is not None
    rows, steps = out.tokens.shape
    begin, place = episode.turn[row], jnp.arange(steps, dtype=jnp.int32)[None]
    length = count - begin
    before = jax.tree.map(lambda leaf: leaf[row], episode.state)

    def ask() -> tuple[Any, Observation]:
        own = out.tokens[row[:, None], begin[:, None] + place]
        own = jnp.where(place < length[:, None], own, episodes.pad)
        return observed(episodes.environment.observe, before, own, length)

    like = jax.eval_shape(ask)
    blank = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), like)
    state, seen = jax.lax.cond(some, ask, blank)
    out, more = noted(out, row, count, ended, seen)
    at = jnp.where(ended, row, rows)  # out: dropped

    def put(values: jax.Array, new: jax.Array) -> jax.Array:
        return values.at[at].set(new, mode="drop")

    episode = Episode(
        turn=put(episode.turn, count + more),
        state=jax.tree.map(put, episode.state, state),
    )
    return out, episode, ended & seen.done


def noted(
    out: Rollouts, row: jax.Array, count: jax.Array, ended: jax.Array, seen: Observation
) -> tuple[Rollouts, jax.Array]:
    """Completions with observations behind turns that ended.

    Args:
        out: `[N, T]` completions.
        row: `[K]` int32 in [0, N).
        count: `[K]` int32, tokens of it.
        ended: `[K]` bool, rows with a turn that has ended.
        seen: `[K]`, answers to these turns.

    Returns:
        Completions, and `[K]` int32, tokens that are to be read of each.
    """
    assert out.turns is not None
    rows, steps = out.tokens.shape
    more = to_read(seen)
    own = jnp.arange(seen.tokens.shape[-1], dtype=jnp.int32)[None]
    at = jnp.where(ended, row, rows)  # out: dropped
    block = at[:, None], jnp.where(own < more[:, None], count[:, None] + own, steps)

    def put(values: jax.Array, where: Any, new: Any) -> jax.Array:
        return values.at[where].set(new, mode="drop")

    turns = dataclasses.replace(
        out.turns,
        observed=put(out.turns.observed, block, True),
        reward=put(out.turns.reward, (at, count - 1), seen.reward),
        count=out.turns.count.at[at].add(1, mode="drop"),
    )
    out = dataclasses.replace(
        out,
        tokens=put(out.tokens, block, seen.tokens),
        finished=put(out.finished, at, seen.done),
        turns=turns,
    )
    return out, more


def to_read(seen: Observation) -> jax.Array:
    """`[...]` int32, tokens that the policy reads of observations."""
    return jnp.where(seen.done, 0, jnp.clip(seen.length, 0, seen.tokens.shape[-1]))


def in_front(tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[..., T]` tokens that the mask marks, one behind the other, and their mask."""
    order = jnp.argsort(~mask, axis=-1, stable=True)
    own, given = (jnp.take_along_axis(x, order, -1) for x in (tokens, mask))
    return own, given


def observed(
    observe: Callable[..., Any], state: Any, tokens: jax.Array, length: jax.Array
) -> tuple[Any, Observation]:
    """The next states and observations of turns, `[K]` of each.

    Raises:
        ValueError: while tracing, if they are not of the shapes and dtypes of
            `Environment.observe`.
    """
    given = _of("observe", observe)

    def pair(*turn: Any) -> tuple[Any, Observation]:
        both = given(*turn)
        if not isinstance(both, tuple) or len(both) != 2:
            what = f"{len(both)} values" if isinstance(both, tuple) else repr(both)
            raise ValueError(
                f"task.environment.observe gives {what}; let it give a state and a "
                "types.Observation."
            )
        after, seen = both
        if not isinstance(seen, Observation):
            raise ValueError(
                f"task.environment.observe gives a {type(seen).__name__} beside the "
                "state; let it give a types.Observation."
            )
        names = [x.name for x in dataclasses.fields(seen)]
        each = {name: getattr(seen, name) for name in names}
        made = {n: _array("observe", n, x) for n, x in each.items() if x is not None}
        return after, dataclasses.replace(seen, **made)

    after, seen = jax.vmap(pair)(state, tokens, length)
    was, now = (jax.tree.structure(tree) for tree in (state, after))
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=False)
    for old, new in () if was != now else pairs:
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"task.environment.observe gives {_said(new)} where reset gave "
                f"{_said(old)}; a state keeps its shapes and dtypes."
            )
    if was != now:
        raise ValueError(
            f"task.environment.observe gives a state {now} where reset gave {was}; a "
            "state keeps its fields."
        )
    if seen.length is None and jnp.ndim(seen.tokens) == 2:
        width = jnp.full(seen.tokens.shape[:1], seen.tokens.shape[1], jnp.int32)
        seen = dataclasses.replace(seen, length=width)
    must = {
        "tokens": (1, jnp.int32),
        "length": (0, jnp.int32),
        "done": (0, jnp.bool_),
        "reward": (0, jnp.float32),
    }
    for name, (axes, dtype) in must.items():
        value = getattr(seen, name)
        if value.ndim != axes + 1 or value.dtype != dtype:
            raise ValueError(
                f"task.environment.observe gives {_said(value)} as {name}, and must "
                f"give {jnp.dtype(dtype).name} {'[W]' if axes else '[]'}; mend that "
                "function."
            )
    return after, seen


def _of(name: str, function: Any) -> Callable[..., Any]:
    """A function of an environment.

    Raises:
        ValueError: it is none, or takes other arguments.
    """
    asked = ARGUMENTS[name]
    if not callable(function):
        raise ValueError(
            f"task.environment.{name} is {function!r}; let it be a function of "
            f"({asked})."
        )
    try:
        inspect.signature(function).bind(*asked.split(", "))
    except TypeError as error:
        raise ValueError(
            f"task.environment.{name} is called with ({asked}): {error}; mend that "
            "function."
        ) from error
    except ValueError:  # nothing is known of its arguments
        pass
    return function


def _array(function: str, name: str, value: Any) -> jax.Array:
    """What a function of an environment gives by a name, as an array."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"task.environment.{function} gives {value!r} as {name}, which is no "
            "array; mend that function."
        ) from error


def _said(value: jax.Array) -> str:
    """Dtype and shape of a value of one episode, as a sentence names them."""
    return f"{value.dtype} {list(value.shape[1:])}"
