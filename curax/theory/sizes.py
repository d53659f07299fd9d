"""Sizes of a recipe: how many completions and prompts, and what follows from them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from curax.config import Config, override
from curax.settings.declared import declared
from curax.settings.sizes import declaring, kept_of, rows_of


class Size(NamedTuple):
    """Sizes of a step, per prompt."""

    draws: int  # n, mean completions that may be drawn, pilots apart
    most: int  # G, the most that one prompt may draw
    kept: int  # m, the most of it that trains
    pilots: int
    attempts: int  # batches drawn at most to fill one


def size_of(config: Config) -> Size:
    """The sizes of a recipe as it stands; n is rounded down."""
    sizes = config.sampling
    return Size(
        draws=max(rows_of(config) // sizes.prompts, 1),
        most=sizes.group_size,
        kept=min(kept_of(config), sizes.group_size),
        pilots=config.pilot.draws if config.pilot else 0,
        attempts=sizes.attempts,
    )


def resized(config: Config, size: Size, prompts: int) -> Config:
    """The recipe with other sizes and one update per step.

    Args:
        config: the recipe.
        size: sizes per prompt.
        prompts: B.

    Raises:
        ConfigError: the recipe does not take these sizes.
    """
    equal = size.draws == size.most
    values: dict[str, Any] = {
        "sampling.prompts": prompts,
        "sampling.group_size": size.most,
        "sampling.budget": (
            0 if equal and not size.pilots else (size.draws + size.pilots) * prompts
        ),
        "sampling.attempts": size.attempts,
        "sampling.chunks": 1,
        "update.minibatches": 1,
        "update.micro_batches": 1,
    }
    if size.pilots:
        values["pilot.draws"] = size.pilots
    if own := declared(config.downsample, "keeps", None):
        values[f"downsample.{own}"] = size.kept
    wanted = {"rows_per_prompt": min(size.draws, size.kept), "most_draws": size.most}
    for what, value in wanted.items():
        for name, _, own in declaring(config.correct, what, "correct"):
            values[f"{name}.{own}"] = value
    return override(config, values)


def grid(config: Config) -> Iterator[Size]:
    """The sizes of a recipe, then others, each of which changes one of them.

    Half and twice the draws, with the most that a prompt may draw; where some are
    selected, half the draws and twice what is kept; where there are pilots, twice the
    draws and half the pilots; twice the attempts. The recipe may refuse some.
    """
    own = size_of(config)

    def scaled(by: float) -> Size:
        draws, most, kept = (int(count * by) for count in own[:3])
        return own._replace(draws=draws, most=most, kept=kept)

    if own.kept < own.most:
        others = [scaled(0.5)._replace(kept=own.kept), own._replace(kept=own.kept * 2)]
    elif own.pilots:
        others = [scaled(2), own._replace(pilots=own.pilots // 2)]
    else:
        others = [scaled(0.5), scaled(2)]
    if own.attempts > 1:
        others.append(own._replace(attempts=own.attempts * 2))
    yield own
    yield from (size for size in others if min(size[:3]) > 0)
