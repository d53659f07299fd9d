"""Sizes of the KV cache of a draw: bytes of a token, slots that fit, their columns."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from curax.settings.config_paths import ConfigError


def widths(context: int, steps: int, most: int = 3) -> tuple[int, ...]:
    """Columns of a slot's cache behind its context, as they grow; the last is T.

    A token reads all columns there are, so there are only as many as the longest
    completion so far has needed. Each width is a loop to be compiled: there is one of
    half the columns where these are at least 128, and where it reads at most three
    quarters of what the next one reads, so where P is at most the next one's columns.
    Below T = 256 there is one.

    Args:
        context: P.
        steps: T.
        most: widths.
    """
    half = steps // 2
    if most == 1 or half < 128 or context > steps:
        return (steps,)
    return (*widths(context, half, most - 1), steps)


def widened(cache: Any, width: int) -> Any:
    """Slots' own keys and values `[K, kv_heads, W, d]` with `width` columns."""

    def leaf(x):
        return jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2]), (0, 0)))

    return jax.tree.map(leaf, cache)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Slots of all devices, and the pages that those of one shard have in common."""

    slots: int  # K
    page: int = 0  # B, columns of a page and of a slot's block; 0: slots have rings
    pages: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Sizes of the cache of a draw, for any number of slots."""

    contexts: int  # C
    prompt: int  # P
    steps: int  # T, `max_tokens`
    shards: int  # D, over which slots lie

    def tokens(self, slots: int) -> tuple[int, int]:
        """Tokens in a shard's cache: (own ones of K slots, those of contexts).

        T ceil(K / D),  P C / gcd(C, D)
        """
        own = -(-slots // self.shards) * self.steps
        return own, self.contexts // math.gcd(self.contexts, self.shards) * self.prompt

    def slots(self, most: int, *, bound: float, token: float) -> int:
        """Number of slots whose cache fits beside that of the contexts.

            K = min(most, D floor((bound / token - P C / gcd(C, D)) / T))

        Args:
            most: slots that are wanted.
            bound: bytes of a device; 0: any.
            token: bytes of a token there.

        Raises:
            ConfigError: not even one slot of each shard fits.
        """
        if not bound or not token:
            return most
        one, shared = self.tokens(1)
        each = int((bound / token - shared) // one)
        if each < 1:
            least = 1.001 * token * (shared + one) / 2**30  # .4g may round it off
            raise ConfigError(
                f"sampling.cache_gib leaves {bound / 2**30:.4g} GiB for keys and "
                f"values, and a completion of {self.steps:,} tokens beside "
                f"{self.contexts} prompts of {self.prompt:,} takes {least:.4g}; set "
                "sampling.cache_gib higher, or sampling.max_tokens or "
                "sampling.prompts lower."
            )
        return min(most, each * self.shards)

    def room(self, most: int, *, bound: float, token: float, page: int) -> Room:
        """Slots that fit, with rings or, where there are more of them so, with pages.

        With pages of B columns there are as many as fit if completions have a quarter
        of the longest length on average, and the pages that are left room for:

            K = min(most, D floor(A / (T / 4 + 3 B / 2)))
            pages = floor(A / B) - K / D,  A = bound / token - P C / gcd(C, D)

        Args:
            most: slots that are wanted.
            bound: bytes of a device; 0: any.
            token: bytes of a token there.
            page: B; 0: there are no pages.

        Raises:
            ConfigError: not even one slot of each shard fits.
        """
        rings = self.slots(most, bound=bound, token=token)
        if not page or rings == most:
            return Room(slots=rings)
        free = bound / token - self.tokens(1)[1]
        each = int(free / (self.steps / 4 + 1.5 * page))
        slots = min(most, each * self.shards)
        pages = int(free // page) - -(-slots // self.shards)
        if slots <= rings or pages <= self.steps // page:
            return Room(slots=rings)
        return Room(slots=slots, page=page, pages=pages)
