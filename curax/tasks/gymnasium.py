"""Environments of Gymnasium whose actions a policy writes as text.

    curax train gsm8k_qwen3_0p6b --workdir runs/lake --set task=worlds.task
    task.environment=gymnasium.environment task.environment.name=FrozenLake-v1
    model.path=DIR

Needs the package gymnasium. An episode is the environment itself, which goes from
worker to worker by pickle.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from curax.settings.config_types import Count
from curax.settings.declared import declares
from curax.tasks.environments import outcome_between
from curax.types import Environment, Observation

COLOURS = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)


class Game(NamedTuple):
    """An episode between two turns."""

    env: Any  # gymnasium.Env
    words: str  # what it shows
    turns: int = 0
    illegal: int = 0  # of these turns those that named no action
    total: float = 0.0  # sum of rewards


@declares(package="gymnasium", measures=("illegal", "turns"))
def environment(
    *,
    name: str,
    options: dict[str, Any] | None = None,
    actions: tuple[str, ...] = (),
    turns: Count = 32,
    lowest: float = 0.0,
    highest: float = 1.0,
    rules: str = "",
) -> Environment:
    """The environment of a name that Gymnasium knows, as text.

    An episode begins as the seed of its prompt says, and goes on by the key of its
    completion. Its outcome is (sum of rewards - lowest) / (highest - lowest), cut to
    [0, 1], of what there was when it ended or its row was cut off. The environment must
    have actions `Discrete`, and must be one that pickle can send.

    Args:
        name: as of `gymnasium.make`, such as `FrozenLake-v1`.
        options: of `gymnasium.make`, by name.
        actions: words for the actions in their order; none: they are written as
            numbers. The last that a turn names is taken; a turn without one is answered
            by the actions there are.
        turns: after which an episode ends.
        lowest: sum of rewards whose outcome is 0.
        highest: sum of rewards whose outcome is 1.
        rules: said before what is first observed.

    Raises:
        ValueError: in a sentence, for an option.
    """
    import gymnasium

    outcome = outcome_between(lowest, highest)
    given = dict(options or {})
    one = gymnasium.make(name, **given)
    if "ansi" in one.metadata.get("render_modes", ()):
        given = {"render_mode": "ansi"} | given
    make, space = partial(gymnasium.make, name, **given), one.action_space
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ValueError(
            f"task.environment.name={name!r} has actions {space}, and a turn names one "
            "of a few; name another environment."
        )
    anew = gymnasium.utils.EzPickle.__getstate__
    if getattr(type(one.unwrapped), "__getstate__", None) is anew:
        raise ValueError(
            f"task.environment.name={name!r} is pickled by EzPickle, which keeps "
            "nothing of an episode, and it goes from worker to worker by pickle; name "
            "another environment."
        )
    first = int(space.start)
    words = actions or tuple(map(str, range(first, first + int(space.n))))
    if len(words) != space.n:
        raise ValueError(
            f"task.environment.actions are {len(words)} words, and {name} has "
            f"{space.n} actions; give each one."
        )
    legal = {word.lower(): first + i for i, word in enumerate(words)}
    if len(legal) < len(words) or not all(map(str.strip, legal)):
        raise ValueError(
            f"task.environment.actions={words} must differ by more than capital "
            "letters, and none may be blank; give each action a word of its own."
        )

    def reset(key: int, seed: Any) -> Game:
        env = make()
        seen, _ = env.reset(seed=int(seed))
        env.unwrapped.np_random = np.random.default_rng(key)
        return Game(env, shown(env, seen))

    def observe(game: Game, turn: str) -> tuple[Game, Observation]:
        action = named(turn, legal)
        gain, over = 0.0, game.turns + 1 >= turns
        if action is None:
            words = f"Write one of: {', '.join(legal)}."
            game = game._replace(illegal=game.illegal + 1)
        else:
            seen, gain, ended, cut, _ = game.env.step(action)
            words, over = shown(game.env, seen), over or ended or cut
            game = game._replace(words=words)
        before = outcome(game.total) if game.turns else 0.0
        game = game._replace(turns=game.turns + 1, total=game.total + float(gain))
        reward = outcome(game.total) - before
        return game, Observation(tokens=words, done=bool(over), reward=reward)

    return Environment(
        reset=reset,
        observe=observe,
        measure=lambda game: {"illegal": game.illegal, "turns": game.turns},
        opening=lambda game: f"{rules}\n{game.words}".strip(),
    )


def shown(env: Any, seen: Any) -> str:
    """What an environment draws, colours as brackets; else the observation itself."""
    drawn = env.render() if env.render_mode == "ansi" else None
    if not isinstance(drawn, str):
        return str(seen)
    return COLOURS.sub(r"[\1]", drawn).strip("\n")


def named(turn: str, legal: Mapping[str, int]) -> int | None:
    """The action that a turn names last; None: it names none."""
    longest = sorted(map(re.escape, legal), key=len, reverse=True)
    found = re.findall(rf"(?<!\w)({'|'.join(longest)})(?!\w)", turn.lower())
    return legal[found[-1]] if found else None
