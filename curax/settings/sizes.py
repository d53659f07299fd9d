"""What follows from the fields of a config: numbers of a step, properties of stages.

Only the standard library is imported.
"""

from collections.abc import Iterator
from typing import Any

from curax.settings.config_paths import Place, option
from curax.settings.config_types import Function
from curax.settings.declared import declared
from curax.settings.groups import Fields


def declaring(tree: Any, what: str, name: str = "") -> Iterator[tuple[str, Place, Any]]:
    """Yield (dotted name, node, property) of the functions that declare a property."""
    for full, place in Place(tree).walk(name):
        own = declared(place.value, what, None) if callable(place.value) else None
        if own is not None:
            yield full, place, own


def least_group(function: Function, name: str) -> tuple[int, str]:
    """Smallest group with a gradient under a stage, and the function that needs it."""
    least, called = 1, ""
    for _, place, needs in declaring(function, "least_group", name):
        needs = option(place.value, needs) if isinstance(needs, str) else needs
        if isinstance(needs, int) and needs > least:
            least, called = needs, place.owner(name)
    return least, called


def largest_group(config: Fields) -> int:
    """Largest number of completions that a prompt can get."""
    sizes = config.sampling
    if declared(config.allocate, "equal_groups", False) and not config.stop:
        return min(sizes.group_size, -(-rows_of(config) // sizes.prompts))
    return min(sizes.group_size, rows_of(config))


def declared_option(function: Function, name: str, default: Any = None) -> Any:
    """The option of a function that it declares under this name; else `default`."""
    own = declared(function, name, None)
    return default if own is None else option(function, own, default)


def checkpoint_of(config: Fields) -> Any:
    """Folder or name on the hub that the model begins from; None: random numbers."""
    return declared_option(config.model, "checkpoint")


def kept_of(config: Fields) -> Any:
    """m, the largest number of completions of a prompt that train."""
    return declared_option(config.downsample, "keeps", config.sampling.group_size)


def corrects_sampling(config: Fields) -> bool:
    """Whether tokens are weighed by the policy over what they were drawn from."""
    rule = config.sampling.off_policy
    return rule is not None and not declared(rule, "constant", False)


def ratio_per(rule: Function) -> str:
    """What the ratios are of that an off-policy rule weighs with: token, ..."""
    inner = declared_option(rule, "weighs")
    return ratio_per(inner) if inner else declared_option(rule, "per", "token")


def needs_old_first(config: Fields) -> bool:
    """Whether log-probs of the old policy are needed before any pass of an update."""
    if updates_of(config) > 1:
        return not config.update.behaviour_as_old
    return is_of_batch(config.sampling.off_policy)


def is_of_batch(rule: Function | None) -> bool:
    """Whether weights of a rule, or of one that it weighs with, are of all rows."""
    return any(own for *_, own in declaring(rule, "of_batch"))


def causes(config: Fields) -> tuple[str, ...]:
    """Why completions are drawn from other than the policy, as metrics name it.

    Empty where a config says that they are not. What is no truncation is the lag of a
    draw that is ahead; without one, or with an outside engine, it is the engine, for
    sampler and trainer compute differently.
    """
    cut, sizes, how = is_cut_off(config), config.sampling, config.update
    if not (cut or sizes.ahead or sizes.off_policy is not None or how.behaviour_as_old):
        return ()
    found = {"truncation": cut, "lag": sizes.ahead}
    found["engine"] = sizes.engine is not None or not sizes.ahead
    return tuple(why for why, is_so in found.items() if is_so)


def truncates(config: Fields) -> bool:
    """Whether top_k or top_p truncates the policy's distribution."""
    sizes = config.sampling
    whole = type(sizes.top_k) is int and sizes.top_k == 0
    return not (whole and type(sizes.top_p) in (int, float) and sizes.top_p >= 1)


def is_cut_off(config: Fields) -> bool:
    """Whether top_k or top_p cuts off what the policy that trains can say."""
    return truncates(config) and not config.sampling.replay_support


def updates_of(config: Fields) -> int:
    """Optimizer updates per step."""
    return config.update.epochs * config.update.minibatches


def cache_bytes(config: Fields) -> float:
    """Bytes of a device that the cache of one seed's draw may take; 0: any."""
    return config.sampling.cache_gib * 2**30 / config.seeds


def rows_of(config: Fields) -> int:
    """N, completions drawn per step without pilots."""
    sizes, pilot = config.sampling, config.pilot
    budget = sizes.budget or sizes.prompts * sizes.group_size
    return budget - (pilot.draws * sizes.prompts if pilot else 0)
