"""How many completions each prompt gets, from what is known of it before.

Every allocator is `(difficulty, *, budget, most) -> counts`, integers in [least, most]
whose sum is the budget, clipped to what the bounds allow. `budget` and `most` are given
by the pipeline; other options belong to the recipe, `least` among them.

Counts come from earlier visits only, so they bias nothing. What they change depends on
the divisor. Divided by a constant, a prompt counts by its n_i: the update follows
sum_i n_i grad p_i, and an allocation proportional to w(p) trains the objective with
f' = w, whatever variance it was meant to reduce. Divided by its own n_i
(`correct.per_prompt`), every prompt counts the same, and allocation changes only the
variance sum_i V_i / n_i. That is least for n_i proportional to the standard deviation
sqrt(V_i); proportional to V_i it is no smaller than that of a uniform allocation.

Two rules of `counts` turn weights into counts: `proportional` rounds a water level,
`greedy` is the integer optimum.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from curax.arrays import checks
from curax.arrays import counts as whole
from curax.settings.config_types import Fraction, Magnitude, Natural, Positive
from curax.types import Counts, Difficulty, DrawRows


@checks.contract(equal_groups=True)
def uniform(difficulty: Difficulty, *, budget: int, most: int) -> Counts:
    """The same number for every prompt; what does not divide goes to the first ones.

    Args:
        difficulty: what is known of the B prompts; only their number is read.
        budget: completions of the whole step; static.
        most: largest number that one prompt may get; static.

    Returns:
        `[B]` int32 with sum `min(budget, B most)`.
    """
    prompts = difficulty.draws.shape[0]
    budget = min(budget, prompts * most)
    extra = jnp.arange(prompts, dtype=jnp.int32) < budget % prompts
    return budget // prompts + extra.astype(jnp.int32)


# ----- by pass rate


@checks.contract(floor="least")
def inverse_pass_rate(
    difficulty: Difficulty, *, budget: int, most: int, least: int = 1
) -> Counts:
    """Hard prompts by 1/p: Reinforce-Ada's estimation-based variant, as released.

        n_i = least + (budget - B least) (1 / p_i) / sum_l (1 / p_l)

    rounded by largest remainder. The release has no upper bound; what does not fit
    under `most` goes to the others in proportion. Under a constant divisor this trains
    a mixture of p and log p. The paper reports that hard prompts come to fill the batch
    and that its reward falls. `inverse_root` is the hybrid.

    Args:
        difficulty: of the B prompts; the pass rate is read. p = 0 counts as infinite.
        budget: completions of the whole step; static.
        most: largest number that one prompt may get; static.
        least: number that every prompt gets first; static.

    Returns:
        `[B]` int32 in [least, most], sum `clip(budget, B least, B most)`.

    Raises:
        ValueError: unless 0 <= least <= most.

    References:
        Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
        Reinforce-Style LLM Training", arXiv:2510.04996, estimation-based variant. The
        paper's text describes the hybrid, its code this.
    """
    share = 1.0 / difficulty.pass_rate
    budget, most = whole.bounded(share, budget, least, most)
    rest = budget - share.shape[0] * least
    return least + whole.proportional(share, budget=rest, least=0, most=most - least)


@checks.contract(floor="least")
def inverse_root(
    difficulty: Difficulty, *, budget: int, most: int, least: int = 2
) -> Counts:
    """Hard prompts by 1/sqrt(p): the hybrid form of Reinforce-Ada's estimation.

        n_i = clip(c / sqrt(p_i), least, most)

    rounded by largest remainder. Under a constant divisor this trains 2 sqrt(p), as far
    as the bounds leave it free; a residual weight 1/sqrt(p) on top makes it log p.

    Args:
        difficulty: as `inverse_pass_rate`.
        budget: as `inverse_pass_rate`.
        most: as `inverse_pass_rate`.
        least: smallest number that one prompt may get; static.

    Returns:
        As `inverse_pass_rate`.

    Raises:
        ValueError: as `inverse_pass_rate`.

    References:
        Xiong et al. 2025, Reinforce-Ada, arXiv:2510.04996, hybrid weighting. The paper
        gives no bounds.
    """
    share = jax.lax.rsqrt(difficulty.pass_rate)
    return whole.proportional(share, budget=budget, least=least, most=most)


def gvm_weight(
    pass_rate: jax.Array,
    norm: jax.Array,
    *,
    alpha: Magnitude | jax.Array,
    beta: Magnitude | jax.Array,
) -> jax.Array:
    """What GVM's counts are proportional to.

        w = G / sqrt(p + alpha p^(1 - beta)),   0 where p = 0 or G = 0

    It peaks at p = (alpha (beta - 1))^(1/beta) and falls to 0 below.

    Args:
        pass_rate: `[...]` float in [0, 1], p.
        norm: `[...]` float, G.
        alpha: strength of the regulariser, at least 0; 0 leaves G / sqrt(p).
        beta: its exponent, at least 2.

    Returns:
        `[...]` float32 in the units of `norm`.
    """
    p = jnp.where(pass_rate > 0, pass_rate, 1.0)
    weight = norm / jnp.sqrt(p + alpha * jnp.power(p, 1.0 - beta))
    return jnp.where((pass_rate > 0) & (norm > 0), weight, 0.0)


@checks.contract(floor="least")
def gvm(
    difficulty: Difficulty,
    *,
    budget: int,
    most: int,
    least: int = 0,
    alpha: Magnitude | jax.Array = 1e-3,
    beta: Magnitude | jax.Array = 2.0,
    unit: int = 1,
    exact: bool = False,
) -> Counts:
    """The allocation that minimises the gradient variance of log p, regularised.

        minimise sum_i w_i^2 / n_i,   so n_i = N w_i / sum_l w_l,   w as in `gvm_weight`

    A prompt never solved has weight 0. The release rounds by largest remainder and has
    no bounds, here least = 0 and most = budget; `exact` takes the integer optimum. Its
    accepted completions all weigh the same, so at known p it trains 2 G sqrt(p), and by
    few pilots, which find nothing on hard prompts, an f' = E[n] that rises with p and
    then falls: not the log p whose variance is minimal. Weights 1/(n_i p_i), or 1/n_i
    with a log objective, would train that.

    Args:
        difficulty: of the B prompts; pass rate and norm are read. The norm is the root
            mean square of the bound; the release takes the mean norm.
        budget: completions of the whole step, a multiple of `unit`; static.
        most: largest number that one prompt may get, rounded down to a multiple of
            `unit`; static.
        least: smallest number that one prompt may get, a multiple of `unit`; static.
        alpha: as `gvm_weight`.
        beta: as `gvm_weight`.
        unit: counts are multiples of this: 4 are GVM-GRPO's groups of 4; static.
        exact: `greedy` instead of `proportional`; static.

    Returns:
        As `inverse_pass_rate`, of multiples of `unit`.

    Raises:
        ValueError: unless 0 <= least <= most and `unit` divides budget and least.

    References:
        Yao et al. 2025, "Optimizing Chain-of-Thought Reasoners via Gradient Variance
        Minimization in Rejection Sampling and RL" (GVM), arXiv:2505.02391, Prop. 1.
    """
    if unit < 1 or budget % unit or least % unit:
        raise ValueError(
            f"unit={unit} does not divide budget={budget} and least={least}; set unit "
            "to a common divisor, such as 1."
        )
    weight = gvm_weight(difficulty.pass_rate, difficulty.norm, alpha=alpha, beta=beta)
    bounds = {"budget": budget // unit, "least": least // unit, "most": most // unit}
    return unit * _rounded(weight, exact=exact, **bounds)


@checks.contract(floor="least")
def log_baseline(
    difficulty: Difficulty,
    *,
    budget: int,
    most: int,
    least: int = 0,
    exact: bool = False,
) -> Counts:
    """The allocation that minimises the variance of log p under a baseline.

        n_i = N w_i / sum_l w_l,   w = G sqrt((1 - p) / p)

    With a baseline p the variance of a completion is G^2 p (1 - p), and the log
    objective divides by p. A prompt always solved has weight 0; as p -> 0 the weight
    is unbounded. Without a baseline w is G / sqrt(p): `gvm` with alpha = 0.

    Args:
        difficulty: of the B prompts; pass rate and norm are read.
        budget: as `inverse_pass_rate`.
        most: as `inverse_pass_rate`.
        least: smallest number that one prompt may get; static.
        exact: `greedy` instead of `proportional`; static.

    Returns:
        As `inverse_pass_rate`.

    Raises:
        ValueError: as `inverse_pass_rate`.

    References:
        Xiong et al. 2025, Reinforce-Ada, arXiv:2510.04996, appendix B.
    """
    p = difficulty.pass_rate
    weight = difficulty.norm * jnp.sqrt((1.0 - p) / p)
    return _rounded(weight, budget=budget, least=least, most=most, exact=exact)


# ----- by variance


def smoothed_variance(draws: jax.Array, solved: jax.Array) -> jax.Array:
    """Variance of an outcome, its rate smoothed: p (1 - p), p = (k + 1/2) / (n + 1).

    Never 0: a prompt all right or all wrong so far may have been so by luck. With
    nothing drawn it is 1/4.

    Args:
        draws: `[...]` float, n; may be discounted.
        solved: `[...]` float, k.

    Returns:
        `[...]` float in (0, 1/4].
    """
    p = (solved + 0.5) / (draws + 1.0)
    return p * (1.0 - p)


def unbiased_variance(draws: jax.Array, solved: jax.Array) -> jax.Array:
    """Variance of an outcome, unbiased: k (n - k) / (n (n - 1)), 1/4 below two draws.

    0 for a prompt all right or all wrong so far, which starves it. Arguments as
    `smoothed_variance`.

    Returns:
        `[...]` float in [0, 1/2].
    """
    some = draws >= 2
    n = jnp.where(some, draws, 2.0)
    variance = jnp.clip(solved * (n - solved) / (n * (n - 1.0)), 0.0, 0.5)
    return jnp.where(some, variance, 0.25)


@checks.contract(floor="least")
def bernoulli(
    difficulty: Difficulty,
    *,
    budget: int,
    most: int,
    least: int = 2,
    estimate: Callable[[jax.Array, jax.Array], jax.Array] = smoothed_variance,
    power: Magnitude | jax.Array = 0.5,
) -> Counts:
    """Counts in proportion to the standard deviation of the outcome.

        n_i proportional to b_i^power,   b = p (1 - p)

    Right where completions differ in outcome alone. Where lengths and entropies differ,
    b is a poor stand-in for the gradient's variance (`neyman`), and with standardised
    advantages, whose variance has no factor b, this does worse than `uniform`. DynaMO's
    text puts the variance in the place of the standard deviation: power = 1 and
    `unbiased_variance`. That leaves the total variance of a uniform allocation as it
    was. Under a constant divisor the counts train f' = b^power.

    Args:
        difficulty: of the B prompts; draws and solved are read.
        budget: as `inverse_pass_rate`.
        most: as `inverse_pass_rate`.
        least: smallest number that one prompt may get; static.
        estimate: `(draws, solved) -> b`.
        power: 1/2 takes the standard deviation, 1 the variance.

    Returns:
        As `inverse_pass_rate`.

    Raises:
        ValueError: as `inverse_pass_rate`.

    References:
        DynaMO 2026, arXiv:2602.19208, its theory of allocation.
    """
    share = jnp.power(estimate(difficulty.draws, difficulty.solved), power)
    return whole.proportional(share, budget=budget, least=least, most=most)


@checks.contract(floor="least")
def neyman(
    difficulty: Difficulty,
    *,
    budget: int,
    most: int,
    least: int = 2,
    estimate: Callable[[jax.Array, jax.Array], jax.Array] = smoothed_variance,
    standardised: bool = False,
    per_token: bool = False,
) -> Counts:
    """The integer counts of least gradient variance, given outcomes and score norms.

        minimise sum_i V_i / n_i,   V = b G^2

    with b the variance of the outcome and G the score norm. This presumes that every
    prompt counts the same (`correct.per_prompt`); under a constant divisor the counts
    train f' = sqrt(V), and the variance may grow.

    Args:
        difficulty: of the B prompts; draws, solved and norm are read, tokens where
            `per_token`.
        budget: as `inverse_pass_rate`.
        most: as `inverse_pass_rate`.
        least: smallest number that one prompt may get; static.
        estimate: `(draws, solved) -> b`.
        standardised: V = G^2, for advantages divided by the group's standard
            deviation: what that leaves of V. Static.
        per_token: n_i proportional to sqrt(V_i / c_i), c the mean length, which is
            the least variance per token generated; a rounded water level. Static.

    Returns:
        As `inverse_pass_rate`.

    Raises:
        ValueError: as `inverse_pass_rate`.

    References:
        Neyman 1934, "On the Two Different Aspects of the Representative Method",
        Journal of the Royal Statistical Society 97. DynaMO 2026, arXiv:2602.19208,
        has n_i proportional to the standard deviation but measures no norms.
    """
    deviation = _deviation(difficulty, estimate, standardised)
    if per_token:
        deviation = deviation * jax.lax.rsqrt(difficulty.tokens)
    bounds = {"budget": budget, "least": least, "most": most}
    return _rounded(deviation, exact=not per_token, **bounds)


@checks.contract(floor="least")
def neyman_within_tokens(
    difficulty: Difficulty,
    *,
    budget: int,
    most: int,
    token_budget: Positive,
    least: int = 2,
    estimate: Callable[[jax.Array, jax.Array], jax.Array] = smoothed_variance,
    standardised: bool = False,
) -> Counts:
    """As `neyman`, but what is shared out is tokens; see `within_tokens`.

    Args:
        difficulty: as `neyman`; tokens are read.
        budget: largest number of completions of the whole step; static.
        most: as `neyman`.
        token_budget: expected tokens of the whole step, in the units of
            `difficulty.tokens`; static.
        least: as `neyman`.
        estimate: as `neyman`.
        standardised: as `neyman`.

    Returns:
        `[B]` int32 in [least, most]. The sum is at most `budget`, and may be less.

    Raises:
        ValueError: unless 0 <= least <= most and token_budget > 0.
    """
    deviation = _deviation(difficulty, estimate, standardised)
    return whole.within_tokens(
        whole.squared(deviation),
        difficulty.tokens,
        token_budget=token_budget,
        budget=budget,
        least=least,
        most=most,
    )


@checks.contract(floor="least")
def dynamo(
    difficulty: Difficulty,
    *,
    budget: int,
    most: int,
    least: int = 8,
    initial_budget: Natural = 4,
    known: Magnitude | jax.Array = 4.0,
    mastered: Fraction | jax.Array = 0.85,
    lowest: Fraction | jax.Array = 0.01,
) -> Counts:
    """DynaMO's allocator, as released: a floor, and a share linear in the variance.

        n_i = least + (N - B least) P_i / sum_l P_l,
        P = max(k (n - k) / (n (n - 1)) + 1e-6 (1 - k/n), lowest)

    P is `lowest` from k/n = `mastered` on, and nothing below `known` draws. Shares are
    rounded by largest remainder, cut at `most`, and what was cut is shared again among
    the others. Before, prompts with fewer draws than max(least, initial_budget) get
    what they lack of that. Prompts without any priority get their turn, one each and
    round again, when all others are full.

    The release lets exploration break the bounds: cut short it may leave a prompt below
    the floor, and its last step may go above the cap. Here `least` comes first,
    exploration shares what that leaves, and the bounds always hold; wherever the
    release keeps them too, both agree. It counts without discount from the beginning of
    the training and reads its counts once per epoch; this reads whatever memory it is
    given, every step, thresholds included, so to be as released the memory's discount
    must be 1. The repeated rounding treats equal priorities up to several completions
    apart, first ones first. Under a constant divisor the counts train
    f' = const + p (1 - p).

    Args:
        difficulty: of the B prompts; draws and solved are read.
        budget: as `inverse_pass_rate`; 16 per prompt in the release.
        most: as `inverse_pass_rate`; 24 in the release.
        least: smallest number that one prompt may get; static.
        initial_budget: draws that count as explored, raised to `least`; static.
        known: draws from which on a prompt has a priority.
        mastered: share solved from which on it has the lowest.
        lowest: priority that no known prompt falls below.

    Returns:
        As `inverse_pass_rate`.

    Raises:
        ValueError: as `inverse_pass_rate`.

    References:
        DynaMO 2026, arXiv:2602.19208, and its code.
    """
    draws, solved = difficulty.draws, difficulty.solved
    budget, most = whole.bounded(draws, budget, least, most)
    rate = solved / jnp.maximum(draws, 1e-6)
    variance = unbiased_variance(draws, solved)
    priority = jnp.maximum(variance + 1e-6 * (1.0 - rate), lowest)
    priority = jnp.where(rate >= mastered, lowest, priority)
    priority = jnp.where(draws >= known, priority, 0.0)

    start = max(least, initial_budget)
    lacking = jnp.where(draws < start, jnp.ceil(start - draws), 0.0)
    wanted = jnp.clip(lacking, least, most).astype(jnp.int32) - least
    rest = jnp.int32(budget - draws.shape[0] * least)
    cut = jnp.minimum(whole.apportioned(wanted.astype(jnp.float32), rest), wanted)
    counts = least + jnp.where(jnp.sum(wanted) > rest, cut, wanted)

    def weight(counts: jax.Array) -> jax.Array:
        return jnp.where((counts < most) & (priority > 1e-8), priority, 0.0)

    def share(counts: jax.Array) -> jax.Array:
        more = whole.apportioned(weight(counts), budget - jnp.sum(counts))
        return counts + jnp.minimum(more, most - counts)

    def shares(counts: jax.Array) -> jax.Array:
        return (jnp.sum(counts) < budget) & jnp.any(weight(counts) > 0)

    counts = jax.lax.while_loop(shares, share, counts)
    return counts + whole.even(budget - jnp.sum(counts), most - counts)


# ----- by what is left to learn


@checks.contract(floor="least")
def skip_dead(
    difficulty: Difficulty,
    *,
    budget: int,
    most: int,
    least: int = 1,
    draws: Magnitude | jax.Array = 8.0,
    margin: Magnitude | jax.Array = 0.05,
) -> Counts:
    """Prompts always, or never, solved so far get `least`; the others share evenly.

        dead: n >= draws and min(k, n - k) <= margin n

    A group of equal outcomes trains nothing. `least` > 0 keeps asking, so that a prompt
    can come back; GRESO skips by chance, the surer the longer a prompt has been dead.
    If all are dead the allocation is uniform. Under a constant divisor the dead count
    less, which is what they would have done anyway.

    Args:
        difficulty: of the B prompts; draws and solved are read.
        budget: as `inverse_pass_rate`.
        most: as `inverse_pass_rate`.
        least: completions of a dead prompt, and the fewest of any; static.
        draws: remembered draws before a prompt can be dead; a discounted memory of n
            draws a visit holds at most n / (1 - discount).
        margin: share of outcomes unlike the others that still counts as none.

    Returns:
        As `inverse_pass_rate`.

    Raises:
        ValueError: as `inverse_pass_rate`.

    References:
        Zheng et al. 2025, "Act Only When It Pays: Efficient Reinforcement Learning for
        LLM Reasoning via Selective Rollouts" (GRESO), arXiv:2506.02177.
    """
    n, k = difficulty.draws, difficulty.solved
    dead = (n >= draws) & (jnp.minimum(k, n - k) <= margin * n)
    alive = 1.0 - dead.astype(jnp.float32)
    return whole.proportional(alive, budget=budget, least=least, most=most)


# ----- from counts to rows


def rows_to_draw(counts: jax.Array, *, rows: int) -> DrawRows:
    """The rows that give prompt b its `counts[b]` completions, each in its own prompt.

    Args:
        counts: `[B]` int32, sum at most `rows`.
        rows: N, the static number of rows of a step.

    Returns:
        Rows in prompt order; those beyond the sum of `counts` do not exist.
    """
    end = jnp.cumsum(counts)
    row = jnp.arange(rows, dtype=counts.dtype)
    prompt = jnp.searchsorted(end, row, side="right").astype(jnp.int32)
    exists = row < end[-1]
    prompt = jnp.where(exists, prompt, 0)
    member = jnp.where(exists, row - (end - counts)[prompt], 0)
    return DrawRows(prompt=prompt, member=member, context=prompt, exists=exists)


# ----- inside


def _rounded(
    weight: jax.Array, *, budget: int, least: int, most: int, exact: bool
) -> jax.Array:
    """Counts that minimise sum w^2 / n, or those in proportion to w."""
    bounds = {"budget": budget, "least": least, "most": most}
    if exact:
        return whole.greedy(whole.squared(weight), **bounds)
    return whole.proportional(weight, **bounds)


def _deviation(
    difficulty: Difficulty,
    estimate: Callable[[jax.Array, jax.Array], jax.Array],
    standardised: bool,
) -> jax.Array:
    """Standard deviation of a completion's gradient, up to a common factor."""
    if standardised:
        return difficulty.norm
    variance = estimate(difficulty.draws, difficulty.solved)
    return difficulty.norm * jnp.sqrt(variance)
