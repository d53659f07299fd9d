"""Turns that are answered on the host: a turn of each row, then all answers.

    begun -> turn -> answers, on the host -> answered -> turn -> ... while any goes on

A turn is drawn behind prompt and row so far, which are read again by one pass: in
between nothing is kept of a row but its tokens, so no slot waits for an environment.
Keys are those of the tokens, as in one draw, so an environment that is a function of
JAX gives the same completions either way.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from curax import rollout
from curax.arrays import keys, slots, turns
from curax.arrays.sharding import shard_rows
from curax.processes import peers
from curax.reward import NONE, Verdicts, check_count
from curax.settings import errors
from curax.settings.config_types import is_below, present
from curax.step import draw, room
from curax.step.types import Request, Subject
from curax.types import (
    Answer,
    Contexts,
    DrawRows,
    HostEnvironment,
    Observation,
    Prompts,
    Rollouts,
    Task,
    Turn,
    Weights,
)


@flax.struct.dataclass(kw_only=True)
class Played:
    """Completions in the middle of their episodes."""

    rollouts: Rollouts  # [N, T], with turns
    count: jax.Array  # [N] int32, tokens so far, whoever wrote them
    begun: jax.Array  # [N] int32, column at which the last turn begins
    live: jax.Array  # [N] bool, the last turn is to be answered; at first, to be drawn


@flax.struct.dataclass(kw_only=True)
class Given:
    """Answers of a round, of rows that were live."""

    seen: Observation  # [N, T] tokens, [N] of the others
    found: dict[str, Any]  # [N] float32, what was measured


class Episodes:
    """States of the environment, by row, and why completions are missing."""

    def __init__(self, task: Task, prompts: Prompts, key: jax.Array):
        """Before the first turn; `key [N, 2]` uint32, of the rows."""
        assert isinstance(task.environment, HostEnvironment)
        self.environment, self._vocabulary = task.environment, task.vocab_size
        self._of = prompts.target, key
        self._state: dict[int, Any] = {}
        self.reasons: dict[int, str] = {}

    def answers(self, played: Played) -> Given:
        """Answers to the turns of live rows.

        Several processes ask for some each, of the same rows at every turn, whose
        states they have, and share what they are told.

        Raises:
            ConfigError: answers are more or fewer than turns.
        """
        (target, key), played = peers.fetch((self._of, played))
        tokens, prompt = played.rollouts.tokens, played.rollouts.prompt
        own = _own(np.flatnonzero(played.live))
        asked = [
            Turn(
                state=self._state.get(n),
                key=_whole(key[n]),
                target=jax.tree.map(lambda leaf, n=n: leaf[prompt[n]], target),
                tokens=tokens[n, played.begun[n] : played.count[n]].tolist(),
            )
            for n in own.tolist()
        ]
        said = [*(self.environment.answer(asked) or ())] if asked else []
        what = ("answers", "turns", "a text that says why")
        check_count("task.environment", said, asked, what)
        pairs = zip(own.tolist(), said, strict=True)
        shared = {n: self._noted(n, one) for n, one in pairs}
        given = blank(tokens.shape, self.environment.measures)
        for part in peers.gather(shared):
            for n, one in part.items():
                _put(given, n, one)
        return given

    def close(self) -> None:
        """Tell the environment which episodes have ended without its word."""
        left, self._state = [*self._state.values()], {}
        if left and self.environment.closed:
            self.environment.closed(left)

    def _noted(self, row: int, said: Any) -> Answer | str:
        """The same without its state, which is kept while the episode goes on.

        A reason, where it is no answer.
        """
        self._state.pop(row, None)
        try:
            if isinstance(said, Answer) and not said.done:
                self._state[row] = said.state
            said = read(said, self._vocabulary, self.environment.measures)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            said = f"error: {type(error).__name__}: {errors.text(error)}"
        if isinstance(said, str):
            self.reasons[row] = said
        return said


def read(said: Any, vocabulary: int, measures: tuple[str, ...]) -> Answer | str:
    """What was said to a turn, as plain numbers and without its state.

    A reason, where it is no answer of this vocabulary and these measures.

    Raises:
        TypeError, ValueError, AttributeError, OverflowError: a field is another thing.
    """
    if isinstance(said, str):
        return said
    if not isinstance(said, Answer):
        return f"error: {type(said).__name__} in place of an answer"
    for name in said.found:
        if name not in measures:
            declared = ", ".join(measures) or "nothing"
            return f"error: measures {name}, and declares {declared}"
    for token in said.tokens:
        if not is_below(token, vocabulary):
            return f"error: token {token!s:.40} is none of {vocabulary}"
    return Answer(
        state=None,
        tokens=[*map(int, said.tokens)],
        done=bool(said.done),
        reward=math.nan if said.reward is None else float(said.reward),
        found={name: float(value) for name, value in said.found.items()},
    )


def hosted(parts: Subject) -> HostEnvironment | None:
    """The environment that is asked from the host; None: there is none."""
    found = parts.task.environment
    return found if isinstance(found, HostEnvironment) else None


def begun(parts: Subject, request: Request) -> tuple[Played, jax.Array]:
    """Completions before their first turn; `[N, 2]` uint32, keys of their episodes."""
    asked, how = present(request.rows), request.how
    kept = room.kept_set(parts.model, how)
    rows = slots.unwritten(asked, how.max_tokens, how.pad, kept)
    none = turns.nothing(*rows.tokens.shape)
    zero = jnp.zeros(rows.exists.shape, jnp.int32)
    missing = jnp.full(zero.shape, jnp.nan, jnp.float32)
    found = dict.fromkeys(present(hosted(parts)).measures, missing)
    rows = dataclasses.replace(rows, turns=dataclasses.replace(none, found=found))
    played = Played(rollouts=rows, count=zero, begun=zero, live=asked.exists)
    each = keys.row_keys(request.key, asked.prompt, asked.member)
    each = jax.vmap(partial(jax.random.fold_in, data=turns.RESET))(each)
    return jax.tree.map(shard_rows, played), jax.random.key_data(each)


def turn(parts: Subject, state: Weights, request: Request, played: Played) -> Played:
    """Completions with one turn more of those that are live.

    Those whose turn has ended are live, to be answered; others are cut off.
    """
    rows, asked, count = played.rollouts, present(request.rows), played.count
    number, steps = rows.tokens.shape
    each = jnp.arange(number, dtype=jnp.int32)
    drawn = rollout.sample(
        draw.policy(parts, state),
        state.params,
        so_far(request.contexts, asked, rows, count),
        dataclasses.replace(asked, context=each, exists=played.live),
        request.key,
        dataclasses.replace(request.how, stopping=None),
        begun=count,
    )
    place = count[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
    at = each[:, None], jnp.where(drawn.mask, place, steps)  # out: dropped

    def behind(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[at].set(new, mode="drop")

    written = ("tokens", "mask", "logp_behaviour", "logp_policy", "entropy")
    names = *written, "score_sq_norm", *(["support"] if request.how.support else [])
    new = {n: behind(getattr(rows, n), getattr(drawn, n)) for n in names}
    rows = dataclasses.replace(rows, **new)
    return Played(
        rollouts=jax.tree.map(shard_rows, rows),
        count=count + jnp.sum(drawn.mask, -1, dtype=jnp.int32),
        begun=count,
        live=played.live & drawn.finished,
    )


def so_far(
    contexts: Contexts, asked: DrawRows, rows: Rollouts, count: jax.Array
) -> Contexts:
    """`[N, P + T]` contexts and the rows behind them, ending in the last column."""
    prompt = jax.tree.map(lambda leaf: leaf[asked.context], contexts)
    steps = rows.tokens.shape[1]
    here = jnp.arange(steps, dtype=jnp.int32)[None] < count[:, None]
    tokens = jnp.concatenate([prompt.tokens, rows.tokens], -1)
    mask = jnp.concatenate([prompt.mask, here], -1)
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    at = column - (steps - count)[:, None]
    mask = jnp.take_along_axis(mask, jnp.maximum(at, 0), -1) & (at >= 0)
    tokens = jnp.take_along_axis(tokens, jnp.maximum(at, 0), -1)
    return dataclasses.replace(prompt, tokens=tokens, mask=mask)


def answered(parts: Subject, played: Played, given: Given) -> Played:
    """Completions with answers to the turns of live rows behind them."""
    rows, live = played.rollouts, played.live
    number, steps = rows.tokens.shape
    each = jnp.arange(number, dtype=jnp.int32)
    rows, more = turns.noted(rows, each, played.count, live, given.seen)
    old = present(rows.turns)
    found = {n: jnp.where(live, x, old.found[n]) for n, x in given.found.items()}
    rows = dataclasses.replace(rows, turns=dataclasses.replace(old, found=found))
    count = jnp.minimum(played.count + jnp.where(live, more, 0), steps)
    goes_on = live & ~given.seen.done & (count < steps)
    return dataclasses.replace(played, rollouts=rows, count=count, live=goes_on)


def goes_on(parts: Subject, played: Played) -> jax.Array:
    """`[]` bool: whether any row has another turn."""
    return jnp.any(played.live)


def verdicts(episodes: Episodes, rollouts: Rollouts) -> Verdicts:
    """Sums of rewards as outcomes of a host verifier, with reasons of this process."""
    turns_, exists = peers.fetch((rollouts.turns, rollouts.exists))
    outcome = np.where(exists, turns_.outcome, np.nan)
    lost = _own(np.flatnonzero(exists & np.isnan(outcome)))
    return Verdicts(outcome, {n: episodes.reasons.get(n, NONE) for n in lost.tolist()})


def blank(shape: tuple[int, ...], measures: tuple[str, ...]) -> Given:
    """No answer: the completion ends, and its outcome is missing."""
    rows = shape[0]
    seen = Observation(
        tokens=np.zeros(shape, np.int32),
        length=np.zeros(rows, np.int32),
        done=np.ones(rows, bool),
        reward=np.full(rows, np.nan, np.float32),
    )
    missing = {name: np.full(rows, np.nan, np.float32) for name in measures}
    return Given(seen=seen, found=missing)


def _put(given: Given, row: int, said: Any) -> None:
    """Note what was said to the turn of a row."""
    if isinstance(said, str):
        return
    seen, words = given.seen, said.tokens[: given.seen.tokens.shape[1]]
    seen.tokens[row, : len(words)] = words
    seen.length[row], seen.done[row] = len(words), said.done
    seen.reward[row] = said.reward
    for name, value in said.found.items():
        given.found[name][row] = value


def _own(rows: np.ndarray) -> np.ndarray:
    """Those of some rows whose episodes are this process's, the same in each round."""
    return rows[rows % peers.count() == jax.process_index()]


def _whole(key: np.ndarray) -> int:
    """The two halves of a key as one integer."""
    high, low = map(int, key)
    return (high << 32) | low
