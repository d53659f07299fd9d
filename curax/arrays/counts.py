"""Integer allocation: counts with a given sum, within bounds, from weights.

`proportional` rounds a water level, `greedy` is the integer optimum. Both bisect a
threshold in time linear in B and finish in integers, so the sum is exact.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from curax.arrays import checks
from curax.types import Counts, PerPrompt

_SMALLEST = 2.0**-96  # smallest positive weight relative to the largest; a floor
_FIRST = 2.0**100  # gain of a first completion per unit of weight, above any other
_LIMIT = 2**30  # largest sum; one and a half of it still fits into an int32
_LARGEST = 2.0**126  # largest weight; its inverse is a normal float32


def water_level(share: jax.Array, *, budget: int, least: int, most: int) -> jax.Array:
    """Real-valued counts in proportion to `share`, clipped to bounds.

        x_i = clip(c s_i, least, most),   c such that sum_i x_i = budget

    With s_i = sqrt(V_i) this minimises sum_i V_i / x_i. Once all positive shares are at
    `most`, the rest is spread evenly over the others. NaN and negative shares count as
    0; positive ones are clipped to [2^-96 of the largest, 2^126].

    Args:
        share: `[B]` float. Any scale; all 0 is uniform.
        budget: sum, clipped to [B least, B most]; static.
        least: lower bound of a count; static.
        most: upper bound of a count; static.

    Returns:
        `[B]` float32 with sum `budget`, up to rounding.

    Raises:
        AssertionError: while tracing, if `share` is not `[B]` float.
        ValueError: unless 0 <= least <= most.
    """
    budget, most = bounded(share, budget, least, most)
    unit = _unit(share)
    first = _first_tier(unit, budget, least, most)
    others = jnp.sum(unit == 0, dtype=jnp.float32)
    even = (budget - first).astype(jnp.float32) / jnp.maximum(others, 1.0)
    return _level(unit, first, least, most) + jnp.where(unit > 0, 0.0, even)


def proportional(share: jax.Array, *, budget: int, least: int, most: int) -> jax.Array:
    """Integer counts in proportion to `share`: water level and largest remainders.

    Each prompt gets the whole part of its `water_level`; the rest goes one each to the
    largest fractions, ties to the smaller count, then to the smaller index. A prompt of
    share 0 gets more than `least` only once all others are full. Rounding costs
    variance: (1, 1, 5) where `greedy` finds (1, 2, 4).

    Args:
        share: as `water_level`.
        budget: as `water_level`.
        least: as `water_level`.
        most: as `water_level`.

    Returns:
        `[B]` int32 in [least, most], sum `clip(budget, B least, B most)`.

    Raises:
        AssertionError: as `water_level`.
        ValueError: as `water_level`.
    """
    budget, most = bounded(share, budget, least, most)
    unit = _unit(share)
    first = _first_tier(unit, budget, least, most)
    counts = _rounded(_level(unit, first, least, most), unit, first, most)
    return counts + even(budget - first, most - counts)


def greedy(variance: jax.Array, *, budget: int, least: int, most: int) -> jax.Array:
    """Integer counts of least total variance within bounds.

        minimise sum_i v_i / n_i   subject to   sum_i n_i = budget

    The sum is separable and convex, so giving each completion to the largest gain
    v_i / (n_i (n_i + 1)) is optimal. All gains above a bisected threshold are given at
    once; ties go to the smaller count, then to the smaller index. A first completion
    has infinite gain, ordered by v_i: every positive v_i gets one while the budget
    lasts.

    Args:
        variance: `[B]` float, v_i, a weight squared; clipped as shares in
            `water_level`.
        budget: as `water_level`.
        least: as `water_level`.
        most: as `water_level`.

    Returns:
        `[B]` int32 in [least, most], sum `clip(budget, B least, B most)`.

    Raises:
        AssertionError: as `water_level`.
        ValueError: as `water_level`.

    References:
        Fox 1966, "Discrete Optimization Via Marginal Analysis", Management Science 13.
    """
    budget, most = bounded(variance, budget, least, most)
    unit = _unit(variance)
    first = _first_tier(unit, budget, least, most)
    bits = _smallest(
        lambda bits: jnp.sum(_above(_float(bits), unit, least, most)) <= first,
        jnp.int32(0),
        _int(4.0 * _FIRST),
    )
    counts = _above(_float(bits), unit, least, most)
    counts = _handed_out(counts, unit, lambda n: _gain(unit, n), first, most)
    return counts + even(budget - first, most - counts)


@checks.contract()
def within_tokens(
    variance: PerPrompt,
    tokens: PerPrompt,
    *,
    token_budget: float,
    budget: int,
    least: int,
    most: int,
) -> Counts:
    """Integer counts of low total variance under a budget of tokens.

        minimise sum_i v_i / n_i   subject to
        sum_i c_i n_i <= token_budget,   sum_i n_i <= budget

    A greedy heuristic for this knapsack problem: each completion goes to the largest
    gain per token, v_i / (c_i n_i (n_i + 1)), among those that still fit. Ties are
    broken as by `greedy`. Every prompt gets its `least` first, even where that exceeds
    the tokens.

    Args:
        variance: as `greedy`.
        tokens: `[B]` float, c_i, length of a completion of the prompt. NaN and
            infinity are never affordable, negative ones are free. Whole numbers below
            2^30, the budget too, are read exactly; others are rounded up to multiples
            of at most 2^-29 of the budget.
        token_budget: in the units of `tokens`, positive; static.
        budget: largest sum of counts, raised to B least; static.
        least: as `water_level`.
        most: as `water_level`.

    Returns:
        `[B]` int32 in [least, most], sum at most `budget`.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not float.
        ValueError: unless 0 <= least <= most and token_budget > 0.
    """
    budget, most = bounded(variance, budget, least, most)
    if not 0 < token_budget < math.inf:
        raise ValueError(f"token_budget={token_budget} is not positive; set it to 1.")
    # In units of a power of two, the budget is an integer in [2^29, 2^30).
    fraction, exponent = math.frexp(token_budget)
    afford, scale = int(fraction * _LIMIT), 2.0 ** (30 - exponent)
    tokens = jnp.where(jnp.isnan(tokens), jnp.inf, jnp.maximum(tokens, 0.0))
    cost = jnp.minimum(jnp.ceil(tokens * scale), float(_LIMIT))
    cost = cost.astype(jnp.int32)
    unit = _unit(variance / tokens)

    def candidates(counts: jax.Array) -> jax.Array:
        affordable = cost <= afford - _price(counts, cost)
        return affordable & (counts < most) & (jnp.sum(counts) < budget)

    def give(counts: jax.Array) -> jax.Array:
        """Give by gain until a completion does not fit; its prompt is closed then."""
        open_ = candidates(counts)

        def raised(bits: jax.Array) -> jax.Array:
            more = _above(_float(bits), unit, least, most)
            return jnp.where(open_, jnp.maximum(counts, more), counts)

        def fits(bits: jax.Array) -> jax.Array:
            more = raised(bits)
            return (_price(more, cost) <= afford) & (jnp.sum(more) <= budget)

        more = raised(_smallest(fits, jnp.int32(0), _int(4.0 * _FIRST)))
        left, rows = afford - _price(more, cost), budget - jnp.sum(more)
        receives = _leading(_gain(unit, more), more, open_ & (more < most), left, cost)
        receives = _leading(_gain(unit, more), more, receives, rows)
        return more + receives.astype(jnp.int32)

    counts = jnp.full(unit.shape, least, jnp.int32)
    return jax.lax.while_loop(lambda n: jnp.any(candidates(n)), give, counts)


# ----- helpers


@checks.contract()
def bounded(share: PerPrompt, budget: int, least: int, most: int) -> tuple[int, int]:
    """Budget clipped to [B least, B most], and `most` clipped to that budget."""
    if not 0 <= least <= most:
        raise ValueError(
            f"least={least} is not between 0 and most={most}; set it to {max(most, 0)}."
        )
    prompts = share.shape[0]
    budget = min(max(budget, prompts * least), prompts * most)
    most = min(most, budget)
    if prompts * most > _LIMIT:
        raise ValueError(
            f"most={most} for each of {prompts} prompts is more than can be counted; "
            f"set it to at most {_LIMIT // prompts}."
        )
    return budget, most


def _unit(share: jax.Array) -> jax.Array:
    """Shares divided by a power of two, so that the largest is in [1, 2).

    Dividing by a power of two is exact, so ties stay ties.
    """
    share = jnp.asarray(share, jnp.float32)
    share = jnp.where(share > 0, jnp.minimum(share, _LARGEST), 0.0)
    power = _float(_int(jnp.max(share)) & 0x7F800000)
    unit = jnp.maximum(share / jnp.where(power > 0, power, 1.0), _SMALLEST)
    return jnp.where(share > 0, unit, 0.0)


def squared(weight: jax.Array) -> jax.Array:
    """Squared weights up to a common factor; positive weights stay positive."""
    unit = _unit(weight)
    return jnp.where(unit > 0, jnp.square(jnp.maximum(unit, _SMALLEST**0.5)), 0.0)


def _int(values: jax.Array | float) -> jax.Array:
    """Bits of non-negative floats as int32, which preserves their order."""
    values = jnp.asarray(values, jnp.float32)
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    """Inverse of `_int`."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _smallest(
    holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array
) -> jax.Array:
    """Smallest integer in (low, high] where the monotone `holds`; assumed at `high`."""

    def halved(ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) // 2
        met = holds(middle)
        return jnp.where(met, low, middle), jnp.where(met, middle, high)

    def apart(ends: tuple[jax.Array, jax.Array]) -> jax.Array:
        return ends[1] - ends[0] > 1

    return jax.lax.while_loop(apart, halved, (low, high))[1]


def _first_tier(unit: jax.Array, budget: int, least: int, most: int) -> jax.Array:
    """Part of the budget for prompts of positive share, `[]` int32.

    min(budget, most for each positive share + least for each other)
    """
    some = jnp.sum(unit > 0, dtype=jnp.int32)
    return jnp.minimum(some * most + (unit.shape[0] - some) * least, budget)


def _level(
    unit: jax.Array,
    number: jax.Array,
    least: int,
    most: int | jax.Array,
    ceiling: float | jax.Array = 2.0**127,
) -> jax.Array:
    """clip(c unit, least, most) for the largest c whose sum is at most `number`.

    Whole parts are summed as integers, so their sum never exceeds `number`.
    """

    def level(bits: jax.Array) -> jax.Array:
        return jnp.clip(_float(bits) * unit, least, most)

    def too_high(bits: jax.Array) -> jax.Array:
        x = level(bits)
        whole = jnp.floor(x)
        left = number - jnp.sum(whole.astype(jnp.int32))
        return jnp.sum(x - whole) > left.astype(jnp.float32)

    bits = _smallest(too_high, jnp.int32(0), _int(ceiling)) - 1
    return level(jnp.maximum(bits, 0))


def _rounded(
    level: jax.Array, unit: jax.Array, number: jax.Array, most: int | jax.Array
) -> jax.Array:
    """Whole parts of a level, and up to the sum `number` one each by what is cut off.

    The rest goes to positive shares alone.
    """

    def fraction(counts: jax.Array) -> jax.Array:
        return jnp.maximum(level - counts.astype(jnp.float32), 0.0)

    whole = jnp.minimum(jnp.floor(level).astype(jnp.int32), most)
    return _handed_out(whole, unit, fraction, number, most)


def _gain(unit: jax.Array, counts: jax.Array) -> jax.Array:
    """Decrease of unit / n by one more completion; 2^100 unit at n = 0."""
    n = counts.astype(jnp.float32)
    return unit / jnp.where(n > 0, n * (n + 1.0), 1.0 / _FIRST)


def _above(threshold: jax.Array, unit: jax.Array, least: int, most: int) -> jax.Array:
    """Counts after giving every completion with a gain of at least `threshold`."""
    n = jnp.floor(0.5 + jnp.sqrt(0.25 + unit / threshold))
    n = jnp.clip(n, 1.0, max(most, 1))
    # The root is rounded; comparing gains corrects it and keeps ties equal.
    n = jnp.where(_gain(unit, n) >= threshold, n + 1.0, n)
    n = jnp.where(_gain(unit, n - 1.0) < threshold, n - 1.0, n)
    n = jnp.where(unit > 0, n, float(least))
    return jnp.clip(n.astype(jnp.int32), least, most)


def _handed_out(
    counts: jax.Array,
    unit: jax.Array,
    key: Callable[[jax.Array], jax.Array],
    number: jax.Array,
    most: int | jax.Array,
) -> jax.Array:
    """Counts raised to the sum `number`, one each by `key` among positive shares.

    It takes more than one round only where float32 rounded a whole completion away.
    """

    def room(counts: jax.Array) -> jax.Array:
        return (unit > 0) & (counts < most)

    def missing(counts: jax.Array) -> jax.Array:
        return (jnp.sum(counts) < number) & jnp.any(room(counts))

    def give(counts: jax.Array) -> jax.Array:
        left = number - jnp.sum(counts)
        receives = _leading(key(counts), counts, room(counts), left)
        return counts + receives.astype(jnp.int32)

    return jax.lax.while_loop(missing, give, counts)


def apportioned(weight: jax.Array, number: jax.Array) -> jax.Array:
    """`[B]` int32 with sum `number` in proportion to `weight`, by largest remainder."""
    unit = _unit(weight)
    ceiling = 1.01 * number.astype(jnp.float32) / jnp.maximum(jnp.sum(unit), 1.0)
    level = _level(unit, number, 0, number.astype(jnp.float32), ceiling)
    return _rounded(level, unit, number, number)


def even(number: jax.Array, room: jax.Array) -> jax.Array:
    """`[B]` int32 with sum `number`, as equal as `room` allows; ties by index."""
    top = jnp.max(room) + 1
    rounds = _smallest(
        lambda t: jnp.sum(jnp.minimum(room, t)) > number, jnp.int32(0), top
    )
    counts = jnp.minimum(room, rounds - 1)
    last = room >= rounds
    place = jnp.cumsum(last, dtype=jnp.int32)
    extra = last & (place <= number - jnp.sum(counts))
    return counts + extra.astype(jnp.int32)


def _price(counts: jax.Array, cost: jax.Array | None) -> jax.Array:
    """Sum of counts times cost; the largest int32 where it exceeds 1.5 * 2^30."""
    if cost is None:
        return jnp.sum(counts, dtype=jnp.int32)
    rough = jnp.sum(counts.astype(jnp.float32) * cost.astype(jnp.float32))
    exact = jnp.sum(counts.astype(jnp.int32) * cost)
    return jnp.where(rough > 1.5 * _LIMIT, jnp.iinfo(jnp.int32).max, exact)


def _leading(
    key: jax.Array,
    counts: jax.Array,
    among: jax.Array,
    number: jax.Array,
    cost: jax.Array | None = None,
) -> jax.Array:
    """`[B]` bool, the first of `among` whose total `cost` (None: 1) is within `number`.

    Ordered by key, largest first, then by count, smallest first, then by index. It
    bisects: sorting is slower and does not shard over devices.
    """
    bits = jnp.where(among, _int(key), 0)
    threshold = _smallest(
        lambda t: _price(among & (bits > t), cost) <= number,
        jnp.int32(-1),
        jnp.max(bits),
    )
    before, tied = among & (bits > threshold), among & (bits == threshold)
    number = number - _price(before, cost)
    last = _smallest(
        lambda n: _price(tied & (counts <= n), cost) > number,
        jnp.int32(-1),
        jnp.max(counts) + 1,
    )
    sooner, same = tied & (counts < last), tied & (counts == last)
    number = number - _price(sooner, cost)
    if cost is None:
        paid = jnp.cumsum(same, dtype=jnp.int32)
        return before | sooner | (same & (paid <= number))
    own = jnp.where(same, cost, 0)
    paid, rough = jnp.cumsum(own), jnp.cumsum(own.astype(jnp.float32))
    return before | sooner | (same & (paid <= number) & (rough <= 1.5 * _LIMIT))
