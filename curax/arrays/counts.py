"""From weights to whole numbers with a given sum, within bounds.

`proportional` rounds a water level, `greedy` is the integer optimum. Both find a
threshold by bisection, in time linear in B, and count in integers at the end: the sum
is exact whatever float32 rounds.
"""

import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from curax.arrays import checks

_SMALLEST = 2.0**-96  # positive weights below this, of the largest, are all alike
_FIRST = 2.0**100  # what a first completion gains, times its weight: above any other
_LIMIT = 2**30  # sums up to this, and half as large again, fit into an int32
_LARGEST = 2.0**126  # of a weight: 1 over it is still a normal float32


def water_level(share: jax.Array, *, budget: int, least: int, most: int) -> jax.Array:
    """Real counts in proportion to `share`, as far as the bounds allow.

        x_i = clip(c s_i, least, most),   c such that sum_i x_i = budget

    With s_i = sqrt(V_i) this minimises sum_i V_i / x_i. What is left when all positive
    shares are full goes evenly to the others. NaN and negative shares count as 0, those
    above 2^126 as that; positive ones below 2^-96 of the largest are all alike.

    Args:
        share: `[B]` float. Any scale; all 0 is uniform.
        budget: sum, clipped to [B least, B most]; static.
        least: smallest value; static.
        most: largest value; static.

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
    """Counts in proportion to `share`: the water level, rounded by largest remainder.

    Each prompt gets the whole part of its `water_level`; what is missing goes to the
    largest fractions, of equal ones to the smaller count, then to the smaller index. A
    prompt of share 0 gets more than `least` only once all others are full. Rounding
    costs variance: (1, 1, 5) where `greedy` finds (1, 2, 4).

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
    level = _level(unit, first, least, most)

    def fraction(counts: jax.Array) -> jax.Array:
        return jnp.maximum(level - counts.astype(jnp.float32), 0.0)

    return _completed(_whole(level, most), unit, fraction, first, budget, most)


def greedy(variance: jax.Array, *, budget: int, least: int, most: int) -> jax.Array:
    """The counts of least total variance, among all that the bounds allow.

        minimise sum_i v_i / n_i   subject to   sum_i n_i = budget

    The sum is separable and convex, so giving each completion to the largest gain
    v_i / (n_i (n_i + 1)) is optimal. All gains above a threshold are given at once, and
    the threshold is bisected; of gains that equal it the smaller count comes first,
    then the smaller index. A first completion gains infinitely much, more for the
    larger v_i; no positive v_i is left without while the budget reaches them all.

    Args:
        variance: `[B]` float, v_i, a weight squared. Read as `water_level` reads
            shares.
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
    return _completed(counts, unit, lambda n: _gain(unit, n), first, budget, most)


def within_tokens(
    variance: jax.Array,
    tokens: jax.Array,
    *,
    token_budget: float,
    budget: int,
    least: int,
    most: int,
) -> jax.Array:
    """Counts of little variance whose completions fit into a budget of tokens.

        sum_i c_i n_i <= token_budget,   sum_i n_i <= budget

    Each completion goes to the largest gain per token, v_i / (c_i n_i (n_i + 1)), among
    those that still fit, until none does; a heuristic for what is a knapsack problem.
    The order among equals is that of `greedy`. Every prompt gets its `least` first,
    even where that exceeds the tokens.

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
    variance, tokens = checks.arrays(variance=(variance, float), tokens=(tokens, float))
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
        """As many as fit until one does not; that one is no candidate any more."""
        open_ = candidates(counts)

        def raised(bits: jax.Array) -> jax.Array:
            more = _above(_float(bits), unit, least, most)
            return jnp.where(open_, jnp.maximum(counts, more), counts)

        def fits(bits: jax.Array) -> jax.Array:
            more = raised(bits)
            return (_price(more, cost) <= afford) & (jnp.sum(more) <= budget)

        more = raised(_smallest(fits, jnp.int32(0), _int(4.0 * _FIRST)))
        left, rows = afford - _price(more, cost), budget - jnp.sum(more)
        chosen = _leading(_gain(unit, more), more, open_ & (more < most), left, cost)
        chosen = _leading(_gain(unit, more), more, chosen, rows)
        return more + chosen.astype(jnp.int32)

    counts = jnp.full(unit.shape, least, jnp.int32)
    return jax.lax.while_loop(lambda n: jnp.any(candidates(n)), give, counts)


# ----- inside


def bounded(share: jax.Array, budget: int, least: int, most: int) -> tuple[int, int]:
    """The budget clipped to the bounds, and the most that it allows anyone."""
    (share,) = checks.arrays(share=(share, float))
    chex.assert_rank(share, 1)
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
    """Shares over a power of two: the largest in [1, 2), none too small.

    A power of two leaves all digits, so that ties stay ties.
    """
    share = jnp.asarray(share, jnp.float32)
    share = jnp.where(share > 0, jnp.minimum(share, _LARGEST), 0.0)
    power = _float(_int(jnp.max(share)) & 0x7F800000)
    unit = jnp.maximum(share / jnp.where(power > 0, power, 1.0), _SMALLEST)
    return jnp.where(share > 0, unit, 0.0)


def squared(weight: jax.Array) -> jax.Array:
    """Weights squared, up to a common factor; those that are positive stay so."""
    unit = _unit(weight)
    return jnp.where(unit > 0, jnp.square(jnp.maximum(unit, _SMALLEST**0.5)), 0.0)


def _int(values: jax.Array | float) -> jax.Array:
    """Non-negative floats as integers in the same order."""
    values = jnp.asarray(values, jnp.float32)
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _smallest(
    holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array
) -> jax.Array:
    """Smallest integer in (low, high] at which `holds`, taken to hold at `high`."""

    def halved(ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) // 2
        met = holds(middle)
        return jnp.where(met, low, middle), jnp.where(met, middle, high)

    def apart(ends: tuple[jax.Array, jax.Array]) -> jax.Array:
        return ends[1] - ends[0] > 1

    return jax.lax.while_loop(apart, halved, (low, high))[1]


def _first_tier(unit: jax.Array, budget: int, least: int, most: int) -> jax.Array:
    """The budget until all prompts of positive share are full, `[]` int32."""
    some = jnp.sum(unit > 0, dtype=jnp.int32)
    return jnp.minimum(some * most + (unit.shape[0] - some) * least, budget)


def _level(
    unit: jax.Array,
    number: jax.Array,
    least: int,
    most: int | jax.Array,
    ceiling: float | jax.Array = 2.0**127,
) -> jax.Array:
    """clip(c unit, least, most) with the largest c whose sum is at most `number`.

    Whole parts are summed as integers and fractions apart: the sum of the whole parts
    never exceeds `number`, and c is as good as its last bit.
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


def _whole(level: jax.Array, most: int | jax.Array) -> jax.Array:
    return jnp.minimum(jnp.floor(level).astype(jnp.int32), most)


def _gain(unit: jax.Array, counts: jax.Array) -> jax.Array:
    """What one more completion takes off unit / n; the first one nearly infinite."""
    n = counts.astype(jnp.float32)
    return unit / jnp.where(n > 0, n * (n + 1.0), 1.0 / _FIRST)


def _above(threshold: jax.Array, unit: jax.Array, least: int, most: int) -> jax.Array:
    """Counts once every gain of at least `threshold` is given."""
    n = jnp.floor(0.5 + jnp.sqrt(0.25 + unit / threshold))
    n = jnp.clip(n, 1.0, max(most, 1))
    # The root is right to rounding. The gains decide, so that equal ones stay equal.
    n = jnp.where(_gain(unit, n) >= threshold, n + 1.0, n)
    n = jnp.where(_gain(unit, n - 1.0) < threshold, n - 1.0, n)
    n = jnp.where(unit > 0, n, float(least))
    return jnp.clip(n.astype(jnp.int32), least, most)


def _completed(
    counts: jax.Array,
    unit: jax.Array,
    key: Callable[[jax.Array], jax.Array],
    first: jax.Array,
    budget: int,
    most: int,
) -> jax.Array:
    """The missing: by `key` to positive shares up to `first`, then to the others."""
    counts = _handed_out(counts, unit, key, first, most)
    return counts + even(budget - first, most - counts)


def _handed_out(
    counts: jax.Array,
    unit: jax.Array,
    key: Callable[[jax.Array], jax.Array],
    number: jax.Array,
    most: int | jax.Array,
) -> jax.Array:
    """Counts raised to the sum `number`, one each to those of positive share by `key`.

    One round is enough unless float32 has rounded a whole completion away.
    """

    def room(counts: jax.Array) -> jax.Array:
        return (unit > 0) & (counts < most)

    def missing(counts: jax.Array) -> jax.Array:
        return (jnp.sum(counts) < number) & jnp.any(room(counts))

    def give(counts: jax.Array) -> jax.Array:
        left = number - jnp.sum(counts)
        chosen = _leading(key(counts), counts, room(counts), left)
        return counts + chosen.astype(jnp.int32)

    return jax.lax.while_loop(missing, give, counts)


def apportioned(weight: jax.Array, number: jax.Array) -> jax.Array:
    """`number` in proportion to `weight`, by largest remainder, without bounds."""
    unit = _unit(weight)
    ceiling = 1.01 * number.astype(jnp.float32) / jnp.maximum(jnp.sum(unit), 1.0)
    level = _level(unit, number, 0, number.astype(jnp.float32), ceiling)

    def fraction(counts: jax.Array) -> jax.Array:
        return jnp.maximum(level - counts.astype(jnp.float32), 0.0)

    return _handed_out(_whole(level, number), unit, fraction, number, number)


def even(number: jax.Array, room: jax.Array) -> jax.Array:
    """`number` handed out one each, round after round, to those with room left."""
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
    """Sum of counts times cost; above 1.5 * 2^30, where int32 ends, the largest."""
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
    """The first of `among`, as far as `number` pays for each one's `cost` (None: 1).

    By key, the largest first, then by count, the smallest first, then by index. Found
    by bisection and not by sorting, which is slower and does not split over devices.
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
