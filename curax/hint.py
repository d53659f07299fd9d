"""What completions are conditioned on: the prompt, and a hint where it gets one.

A hint is part of a training prompt only. It stands in front of the last `tail` tokens
of the prompt, and a group is drawn with one hint or with none: outcomes are compared
with others of the same context and with no others. `p_0` is the pass rate without a
hint, `p_h` that with it, `u(p) = 1 - p^G - (1-p)^G` the chance that a group of G has
both right and wrong completions. Right is an outcome above 0.5.

The parts: contexts, triggers and what decides between groups, the controllers of
SAGE-light, sources of hints, and the credit of completions that are drawn with a hint
and trained without it.

References:
    SAGE, "self-hint aligned GRPO with privileged supervision", arXiv:2602.03143.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from curax.arrays import checks, masked
from curax.settings.config_types import Fraction
from curax.types import Bool, BoolG, Contexts, Float, FloatG, Hinting, Int, Prompts

_CAP_NATS = 20.0  # of the log of a weight: exp(20) is finite, and so are its sums


# ----- contexts


def none(prompts: Prompts) -> Contexts:
    """Every prompt is its own context, without a hint: context b is prompt b."""
    return Contexts(tokens=prompts.tokens, mask=prompts.mask)


def widened(prompts: Prompts, width: int) -> Contexts:
    """Every prompt without a hint, as wide as `joined` makes those that have one.

    Args:
        prompts: B prompts of width P.
        width: H, columns for hints, at least 0; static.

    Returns:
        Contexts of width P + H; token 0 where the mask is False.
    """
    leading = jnp.shape(prompts.tokens)[:-1]
    empty = jnp.zeros((*leading, width), bool)
    return joined(prompts, empty.astype(jnp.int32), empty)


def joined(prompts: Prompts, tokens: jax.Array, mask: jax.Array) -> Contexts:
    """Each prompt with its hint inside.

        head, hint, tail        where the tail is the last `prompts.tail` tokens

    Head and tail are the prompt's own tokens: but for the hint, a hinted context is
    the plain one. A prompt without a tail has its hint before all tokens, and one
    whose hint is empty is left as it is.

    Args:
        prompts: B prompts of width P.
        tokens: `[B, H]` int32, hints, as they stand in the context.
        mask: `[B, H]` bool, True on tokens of the hint; nowhere: there is none.

    Returns:
        Contexts of width P + H, left-padded; token 0 where the mask is False.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (int, bool).
    """
    chex.assert_equal_shape([tokens, mask])
    chex.assert_equal_shape_prefix([tokens, prompts.tokens], jnp.ndim(tokens) - 1)
    chex.assert_type([tokens, mask], [int, bool])
    own = jnp.asarray(prompts.mask)
    behind = jnp.sum(own, -1, keepdims=True) - jnp.cumsum(own, -1)  # real tokens
    tail = own.shape[-1] if prompts.tail is None else prompts.tail[..., None]
    inside = jnp.asarray(mask, jnp.int32) * 2
    around = jnp.asarray(own, jnp.int32) * jnp.where(behind < tail, 3, 1)
    part = jnp.concatenate([inside, around], -1)  # padding, head, hint, tail: 0 .. 3
    order = jnp.argsort(part, -1, stable=True)
    both = jnp.concatenate([jnp.asarray(tokens), jnp.asarray(prompts.tokens)], -1)
    real = jnp.take_along_axis(part, order, -1) > 0
    return Contexts(
        tokens=jnp.where(real, jnp.take_along_axis(both, order, -1), 0), mask=real
    )


# ----- triggers, and what decides between groups


@checks.contract()
def all_wrong(outcome: FloatG, exists: BoolG) -> Bool:
    """Groups in which nothing is right: those that a hint can help.

        collapsed = 1[n > 0 and no outcome > 0.5]

    Such a group has no gradient under credit centred on the group. The algorithm and
    the released code of SAGE collapse at these alone.

    Args:
        outcome: `[..., G]` float in [0, 1], the verifier's judgement, without shaping.
        exists: `[..., G]` bool, True where there is a completion with an outcome.

    Returns:
        `[...]` bool; False where nothing exists.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        arXiv:2602.03143, equation 13 and algorithm 1.
    """
    n, right = _counts(outcome, exists)
    return (n > 0) & (right == 0)


@checks.contract()
def no_signal(outcome: FloatG, exists: BoolG) -> Bool:
    """Groups in which nothing is right, and those in which all is.

        collapsed = 1[n > 0 and the outcomes are all on one side of 0.5]

    What the main text of SAGE says. A hint makes prompts easier: the second kind it
    takes further from a mixed group, so `all_wrong` is what to use.

    Args:
        outcome: as `all_wrong`.
        exists: as `all_wrong`.

    Returns:
        `[...]` bool; False where nothing exists.

    Raises:
        AssertionError: as `all_wrong`.

    References:
        arXiv:2602.03143, equation 4.
    """
    n, right = _counts(outcome, exists)
    return (n > 0) & ((right == 0) | (right == n))


def mixed_chance(pass_rate: jax.Array, *, size: int) -> jax.Array:
    """How likely a group has both right and wrong completions.

        u(p) = 1 - p^G - (1-p)^G

    Concave, symmetric about 1/2 and largest there; G p for small p. Computed from
    min(p, 1-p) without subtracting from 1, so that no digits are lost at either end.

    Args:
        pass_rate: `[...]` float in [0, 1].
        size: G, completions of a group, at least 1; static.

    Returns:
        `[...]` of the dtype of `pass_rate`, in [0, 1 - 2^(1-G)].

    References:
        arXiv:2602.03143, proposition 3.2.
    """
    rare = jnp.minimum(pass_rate, 1.0 - jnp.asarray(pass_rate))
    return jnp.maximum(-jnp.expm1(size * jnp.log1p(-rare)) - rare**size, 0.0)


@checks.contract()
def gate_chance(outcome: FloatG, exists: BoolG, *, size: int) -> Float:
    """`mixed_chance` at the share of right completions among those that exist.

    Args:
        outcome: as `all_wrong`.
        exists: as `all_wrong`.
        size: as `mixed_chance`.

    Returns:
        `[...]` float32 in [0, 1 - 2^(1-G)]; 0 where nothing exists. The same for a
        group and for that with right and wrong exchanged, to the last bit.

    Raises:
        AssertionError: as `all_wrong`.
    """
    n, right = _counts(outcome, exists)
    rare = jnp.minimum(right, n - right) / jnp.maximum(n, 1.0)
    return mixed_chance(rare, size=size)


@checks.contract()
def replaces(
    new_outcome: FloatG, new_exists: BoolG, old_outcome: FloatG, old_exists: BoolG
) -> Bool:
    """Whether the group drawn with the next hint takes the place of the one before.

        1[n_new > 0 and u(new share right) >= u(old share right)]

    A group is replaced as a whole, so it keeps a single context. Of groups all wrong
    the last one tried remains, as published. Only groups without any signal are asked
    again, so where credit is centred on the group, nothing is lost by that and no level
    is chosen for its luck: per prompt, with w the weight of the estimator,

        E[update] = w(p_0) grad p_0 + (1-p_0)^G {w(p_1) grad p_1 + (1-p_1)^G {...}}

    with grad p_l the gradient under hint l, held fixed. It takes a loss that is 0 on a
    dead group: no KL, no entropy bonus, statistics of the group alone, and token
    weights that do not depend on what the others drew.

    Args:
        new_outcome: `[..., G]` float, as `all_wrong`.
        new_exists: `[..., G]` bool.
        old_outcome: `[..., G]` float.
        old_exists: `[..., G]` bool.

    Returns:
        `[...]` bool.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        arXiv:2602.03143, algorithm 1.
    """
    size = jnp.shape(new_outcome)[-1]
    new = gate_chance(new_outcome, new_exists, size=size)
    return jnp.any(new_exists, -1) & (
        new >= gate_chance(old_outcome, old_exists, size=size)
    )


# ----- controllers of SAGE-light


@checks.contract()
def paper(
    level: Int, pass_rate: Float, *, levels: int, alpha: Fraction | jax.Array = 0.35
) -> Int:
    """One level more where the last visit went badly, never one less.

        level + 1[p < alpha],   at most L

    Args:
        level: `[...]` int32, the level of the last visit; 0 is without a hint.
        pass_rate: `[...]` float32 in [0, 1], measured under that level; NaN where it
            was not, and the level stays.
        levels: L, levels of hints.
        alpha: pass rate from which on the level stays.

    Returns:
        `[...]` int32 in [0, L], the level of the next visit.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (int, float).

    References:
        arXiv:2602.03143, equation 12. The released code is `hysteresis`.
    """
    step = (pass_rate < alpha).astype(jnp.int32)
    return jnp.clip(level + step, 0, levels)


@checks.contract()
def hysteresis(
    level: Int,
    pass_rate: Float,
    *,
    levels: int,
    low: Fraction = 0.1,
    high: Fraction = 0.35,
) -> Int:
    """One level more where the last visit went badly, one less where it went well.

        level + 1[p <= low] - 1[p > high],   between 0 and L

    The controller of the released code, whose script has these bounds and whose
    default has low = 0. It exchanges bounds given in the wrong order; here they are an
    error.

    Args:
        level: as `paper`.
        pass_rate: as `paper`.
        levels: as `paper`.
        low: largest pass rate at which the level rises; static.
        high: largest pass rate at which it does not fall; static.

    Returns:
        `[...]` int32 in [0, L], the level of the next visit.

    Raises:
        AssertionError: as `paper`.
        ValueError: if low > high.
    """
    if low > high:
        raise ValueError(
            f"low={low} is above high={high}, so a level would rise and fall at once; "
            f"set low to at most {high}."
        )
    step = (pass_rate <= low).astype(jnp.int32) - (pass_rate > high).astype(jnp.int32)
    return jnp.clip(level + step, 0, levels)


# ----- sources of hints


def reference_prefix(
    hinting: Hinting,
    prompts: Prompts,
    *,
    levels: int,
    shares: tuple[float, ...] | None = None,
    written: tuple[Any, Any] | None,
) -> tuple[Any, Any]:
    """The beginning of the reference solution, the more of it the higher the level.

        the first max(1, round(share_l S_b)) of its S_b tokens

    Halves are rounded to even. It needs no writing, and it is the one hint whose
    strength is known to grow with the level.

    Args:
        hinting: whose `solution` is read.
        prompts: B prompts.
        levels: L, levels of hints; static.
        shares: of the solution, by level, in (0, 1] and in ascending order; None:
            l / (L + 1) for level l = 1 .. L.
        written: not read.

    Returns:
        `[B, L, S]` int32 tokens, `[B, L, S]` bool mask; arrays of the kind that
        `hinting` makes. A prompt without a solution has no hints.

    Raises:
        ValueError: if the task has no solutions, or the shares are not as above.
    """
    if hinting.solution is None:
        raise ValueError(
            "hint.source=reference_prefix needs reference solutions, and this task has "
            "none; choose a task that has, or another source."
        )
    return heads(*hinting.solution(prompts), levels=levels, shares=shares)


def heads(
    tokens: Any, mask: Any, *, levels: int, shares: tuple[float, ...] | None = None
) -> tuple[Any, Any]:
    """The beginning of each row, the more of it the higher the level.

        the first max(1, round(share_l S_b)) of its S_b tokens

    Args:
        tokens: `[B, S]` int32, right-padded.
        mask: `[B, S]` bool.
        levels: as `reference_prefix`.
        shares: as `reference_prefix`.

    Returns:
        `[B, L, S]` int32 tokens, `[B, L, S]` bool mask, arrays of the kind given.

    Raises:
        ValueError: if the shares are not ascending numbers in (0, 1], one per level.
    """
    if shares is None:
        shares = tuple(level / (levels + 1) for level in range(1, levels + 1))
    if len(shares) != levels or not all(
        before < share <= 1.0
        for before, share in zip((0.0, *shares[:-1]), shares, strict=True)
    ):
        raise ValueError(
            f"shares={shares} must be {levels} numbers in (0, 1], ascending; give one "
            "per level of hint.levels."
        )
    xp: Any = tokens.__array_namespace__()
    length = mask.sum(-1).astype(xp.float32)[:, None]
    share = xp.asarray(shares, dtype=xp.float32)[None, :]
    count = xp.maximum(xp.round(share * length), 1.0)[..., None]  # [B, L, 1]
    place = xp.arange(tokens.shape[-1], dtype=xp.float32)[None, None, :]
    mask = mask[:, None, :] & (place < count)
    return xp.where(mask, tokens[:, None, :], 0), mask


def self_written(
    hinting: Hinting, prompts: Prompts, *, levels: int, written: tuple[Any, Any] | None
) -> tuple[Any, Any]:
    """The hints that the policy wrote itself, all levels in one writing.

    Args:
        hinting: whose `read` finds the hints in what was written.
        prompts: B prompts.
        levels: L, levels of hints; static.
        written: `[B, T]` int32 tokens and `[B, T]` bool mask of what the policy wrote
            when it was asked with `hinting.writing_contexts`.

    Returns:
        `[B, L, S]` int32 tokens, `[B, L, S]` bool mask; hints that cannot be read are
        missing.

    Raises:
        ValueError: if the task cannot read hints, nothing was written, or the levels
            are not L.

    References:
        arXiv:2602.03143; one writing for all levels as in the released code.
    """
    if hinting.parse is None or written is None:
        raise ValueError(
            "hint.source=self_written needs hint.writing and a task at which the "
            "policy can write hints; set hint.writing, or choose another source."
        )
    return _of_levels(hinting.parse(prompts, *written), levels)


def from_file(
    hinting: Hinting, prompts: Prompts, *, levels: int, written: tuple[Any, Any] | None
) -> tuple[Any, Any]:
    """Hints made once and kept in a file, by a teacher or by the policy of the start.

    Args:
        hinting: whose `from_file` is read.
        prompts: B prompts.
        levels: L, levels of hints; static.
        written: not read.

    Returns:
        `[B, L, S]` int32 tokens, `[B, L, S]` bool mask.

    Raises:
        ValueError: if the task has no such file, or its levels are not L.
    """
    if hinting.from_file is None:
        raise ValueError(
            "hint.source=from_file needs a file of hints, and this task has none; name "
            "it in the task, or choose another source."
        )
    return _of_levels(hinting.from_file(prompts), levels)


# ----- credit of completions drawn with a hint and trained without


@checks.contract()
def dropped(
    credit: FloatG, outcome: FloatG, exists: BoolG, log_ratio: FloatG, hinted: Bool
) -> FloatG:
    """The recipe's credit, as if the hint had never been there.

        A grad log pi(y | x),   y drawn from pi(. | x, h)

    It ascends E[(r - p_h) log pi(y | x)] with pi(. | x, h) held fixed, times the w(p_h)
    of the estimator: the log-likelihood of right completions under the hint, less that
    of wrong ones. That is neither p_0 nor p_h, and right completions that cannot be
    found without the hint are pushed up as much as others. Exact for that objective
    with credit centred on the group and 0/1 outcomes, one update per draw. The
    published ablation, which did worse than training with the hint.

    Args:
        credit: `[..., G]` float, the recipe's, with statistics of the group.
        outcome: `[..., G]` float in [0, 1]; right above 0.5.
        exists: `[..., G]` bool, True where there is a completion with an outcome.
        log_ratio: `[..., G]` float, nats, sum_t log pi(y_t | x) minus the behaviour's
            log-prob of the same tokens, which saw the hint.
        hinted: `[...]` bool, groups drawn with a hint; others are left as they are.

    Returns:
        `[..., G]` float32, credit for the completions at the prompt without its hint;
        0 where `exists` is False.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not those above.

    References:
        arXiv:2602.03143, figure 5, "off-policy".
    """
    return jnp.where(exists, jnp.asarray(credit, jnp.float32), 0.0)


@checks.contract(trains_prompt=True)
def sequence_weighted(
    credit: FloatG, outcome: FloatG, exists: BoolG, log_ratio: FloatG, hinted: Bool
) -> FloatG:
    """Each completion weighted by how much likelier it is without the hint.

        rho A,   rho = prod_t pi(y_t | x) / pi(y_t | x, h)

    Exact: E[rho r grad log pi(y | x)] over y of pi(. | x, h) is grad p_0, and a
    baseline of the other completions changes nothing. So the mean over a group is
    grad p_0 under `advantage.leave_one_out` and `advantage.raw`, and with 0/1 outcomes
    w(p_h) grad p_0 under any estimator of the group, with the w of its docstring. It
    takes completions drawn at temperature 1 from the whole vocabulary, no top-k or
    top-p, the ratio of whole sequences, one update per draw, and behaviour log-probs
    of what drew. Since E[rho r] = p_0 the gradient is as tiny as p_0 is.

    rho is not clipped. Its logarithm is capped at 20 nats, for float32 alone; a weight
    of exp(20) is past all use.

    Args:
        credit: as `dropped`.
        outcome: as `dropped`; not read.
        exists: as `dropped`.
        log_ratio: as `dropped`; infinite ones too give finite credit.
        hinted: as `dropped`.

    Returns:
        `[..., G]` float32 in the units of `credit`; 0 where `exists` is False.

    Raises:
        AssertionError: as `dropped`.
    """
    log_ratio = jnp.where(exists, jnp.asarray(log_ratio, jnp.float32), 0.0)
    rho = jnp.exp(jnp.minimum(log_ratio, _CAP_NATS))
    credit = jnp.where(exists, jnp.asarray(credit, jnp.float32), 0.0)
    return jnp.where(hinted[..., None], rho * credit, credit)


@checks.contract()
def self_normalised(
    credit: FloatG, outcome: FloatG, exists: BoolG, log_ratio: FloatG, hinted: Bool
) -> FloatG:
    """Right completions weighted by how likely they are without the hint, sum n.

        n rho_i r_i / sum_j rho_j r_j        over the n completions that exist

    so that the mean over a group is sum_i w_i grad log pi(y_i | x) with weights of sum
    1. It ascends grad log p_0 = E[grad log pi(y | x)] over right completions of the
    policy without the hint, not tiny where p_0 is. A ratio of two means, so consistent
    and biased: exact as n grows, under what `sequence_weighted` asks for; a group with
    one right completion imitates that one. Computed from logarithms, no cap is needed.

    Args:
        credit: as `dropped`; of hinted groups not read.
        outcome: as `dropped`.
        exists: as `dropped`.
        log_ratio: as `dropped`; -inf where the policy cannot say it without the hint.
        hinted: as `dropped`.

    Returns:
        `[..., G]` float32 in [0, n] where hinted, 0 in groups with nothing right; 0
        where `exists` is False.

    Raises:
        AssertionError: as `dropped`.
    """
    log_ratio = jnp.where(exists, jnp.asarray(log_ratio, jnp.float32), -jnp.inf)
    some = masked.right(outcome, exists) & (log_ratio > -jnp.inf)
    top = jnp.max(log_ratio, -1, keepdims=True, where=some, initial=-jnp.inf)
    rho = jnp.where(some, jnp.exp(jnp.where(some, log_ratio - top, 0.0)), 0.0)
    n = masked.total(exists, exists, keepdims=True)
    share = n * rho / jnp.maximum(jnp.sum(rho, -1, keepdims=True), 1.0)
    credit = jnp.where(exists, jnp.asarray(credit, jnp.float32), 0.0)
    return jnp.where(hinted[..., None], share, credit)


# ----- inside


def _counts(outcome: jax.Array, exists: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[...]` float32: completions that exist, and the right ones of them."""
    right = masked.right(outcome, exists)
    return masked.total(exists, exists), masked.total(right, exists)


def _of_levels(hints: tuple[Any, Any], levels: int) -> tuple[Any, Any]:
    found = hints[0].shape[1]
    if found != levels:
        raise ValueError(
            f"hint.levels={levels}, but this task gives hints of {found} levels; set "
            f"hint.levels={found}."
        )
    return hints
