"""What a recipe optimises: computed from its own stage functions, before any training.

A completion is right or wrong, and coefficients depend on that alone. Then the expected
update of a prompt is w(p) grad p, and its objective is f with f' = w
(`learn.compute_credit` says how credit becomes w). What a prompt may come to is a
state: n completions drawn, k of them right, the first right one in place j. The chance
of every state follows from dynamic programming over the rounds of the stopping rule,
and what becomes of it from the functions that train. What a pilot or the memory may
say of the prompt is summed up in the same way.

Averaged over random draws is only what no table of one prompt's labels can hold: the
rest of its batch, and a down-sampling that keeps a random number of right ones. Then
`Prediction.how` names it, and `Prediction.half` is the 95% interval.

Taken for granted: outcomes are 0 or 1 and none is missing; completions end by
themselves, and are as short as can be where the reward is shaped; to an allocator their
norms are all alike, and so are their lengths; the memory has seen every prompt as often
as the run comes to it, at the pass rate it has now.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curax import memory as memories
from curax.config import Config, kept_of, option, rows_of
from curax.settings.declared import declared
from curax.step import learn, stages
from curax.theory import hint_levels, outcome_states
from curax.types import Difficulty, Memory

BATCHES = 256  # of prompts drawn at random, where anything depends on that
ATOMS = 256  # pass rates that a memory of many draws is taken to tell apart
SAMPLES = 64  # labels by which it is found out what credit depends on
WORK = 2**25  # credits computed, about, where the number of batches is free
CHUNK = 2**21  # pairs of completions at a time: some corrections compare all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What becomes of prompts, by their pass rate: `[R]` float64 down to `spread`.

    The trace of the covariance of a prompt's update is

        |grad p|^2 w^2 spread + E[sum of squared coefficients] V ,

    where V is the trace of the score's covariance among right, or wrong, completions,
    taken to be the same for both. Scores of long completions have many directions, of
    which grad p is one: V is then much the larger, and `noise` is what counts.
    """

    p: np.ndarray
    weight: np.ndarray  # w(p)
    half: np.ndarray  # half of its 95% interval, 0 where it is exact
    right: np.ndarray  # E[C+], credit of right completions over rows per prompt
    wrong: np.ndarray  # E[C-]
    signal: np.ndarray  # chance that any completion of the prompt has credit
    draws: np.ndarray  # expected completions, pilots included
    rate: np.ndarray  # E[share of right ones among those drawn, if any were]
    noise: np.ndarray  # draws times E[sum of squared coefficients] / w^2, pilots too
    spread: np.ndarray  # Var(C+ / p - C- / (1 - p)) / w^2
    most: np.ndarray  # [R, G + 1] chance that it may draw so many, and no more
    attempts: float  # expected batches of prompts drawn per step, to replace closed
    placed: float  # share of the open groups in them that finds a place
    lengths: bool  # credit depends on how completions end, or on how long they are
    known: float  # draws behind what was known of a prompt; 0 where nothing reads it
    how: tuple[str, ...]  # what was averaged over random draws; empty: exact
    hints: hint_levels.Levels | None = None  # the rest is as if there were none


def predict(
    config: Config,
    p: np.ndarray,
    population: np.ndarray,
    *,
    remembered: float | None = None,
    lift: float | None = None,
    prompts: int | None = None,
) -> Prediction:
    """What becomes of a prompt with pass rate p, among prompts of a population.

    Groups that a gate closes count as drawn, not as what replaces them: that multiplies
    w of all prompts by one factor, `attempts * placed`.

    Args:
        config: the recipe.
        p: `[R]` pass rates in (0, 1).
        population: `[K]` pass rates, all equally likely; what an allocator compares
            with, statistics that span the batch see, and closed groups follow from.
        remembered: draws that the memory holds of a prompt; None: as many as it can.
        lift: nats that each level of a hint adds to the log-odds of p; None: hints are
            not looked at.
        prompts: of the task, as of `visits`.
    """
    p = np.asarray(p, np.float64)
    population = np.asarray(population, np.float64)
    sizes, rates, under, every = config.sampling, p, None, population
    if len(every) > ATOMS:
        share = (np.arange(ATOMS) + 0.5) / ATOMS
        every = np.quantile(population, share, method="inverted_cdf")
    if sizes.rounds > 1:
        rates = np.concatenate([p, every])
    if config.hint and lift is not None:
        under = hint_levels.lifted(np.concatenate([p, every]), lift, config.hint.levels)
    credits = _Credits(config)
    reads = _reads(config, credits)
    often = visits(config, prompts)
    held = _held(config, remembered, often)
    cases = _cases(config, reads, rates, population, held)
    parts = _expected(config, credits, reads, cases, rates, under, often)
    each = parts[:, 0]  # [S, R, moments]
    attempts, placed = 1.0, 1.0
    if sizes.rounds > 1:
        open_ = float(each[:, len(p) :, _OPEN].mean())
        attempts, placed = refills(open_, sizes.prompts, sizes.rounds)
    each = each[:, : len(p)]

    weights = each[..., 0] / p - each[..., 1] / (1 - p)
    weight, moments = weights.mean(0), each.mean(0).T
    right, wrong, signal, drawn, some, share, square, _, _, *second = moments
    draws = drawn + (config.pilot.draws if config.pilot else 0)
    terms = np.array([1 / p**2, -2 / (p * (1 - p)), 1 / (1 - p) ** 2])
    half = np.zeros_like(p)
    if cases.how:
        half = 1.96 * weights.std(0, ddof=1) / np.sqrt(len(weights))
    with np.errstate(divide="ignore", invalid="ignore"):
        return Prediction(
            p=p,
            weight=weight,
            half=half,
            right=right,
            wrong=wrong,
            signal=signal,
            draws=draws,
            rate=share / some,
            noise=draws * square / weight**2,
            spread=np.maximum((terms * second).sum(0) / weight**2 - 1, 0),
            most=cases.most(sizes.group_size)[: len(p)],
            attempts=attempts,
            placed=placed,
            lengths=reads.lengths,
            known=cases.known,
            how=cases.how,
            hints=None
            if under is None
            else _levels(config, under, parts[:, 1:], exact=not cases.how),
        )


def with_hints(config: Config, seen: Prediction) -> Prediction:
    """What is seen, but with hints: the weight of grad p, signal and draws.

    Credit is that of groups without a hint. Noise, spread and the pass rate of what is
    drawn stay as if there were no hints.
    """
    hints = seen.hints
    if hints is None or config.hint is None:
        return seen
    mine = slice(None if hint_levels.credited(config.hint) == 0 else 1)
    return dataclasses.replace(
        seen,
        weight=hints.weight[mine].sum(0),
        half=hints.half[mine].sum(0),
        right=hints.right,
        wrong=hints.wrong,
        signal=hints.signal.sum(0),
        draws=hints.draws.sum(0) + (config.pilot.draws if config.pilot else 0),
    )


def _levels(
    config: Config, under: np.ndarray, parts: np.ndarray, *, exact: bool
) -> hint_levels.Levels:
    """From `[S, 2 (L + 1), R, moments]` of groups: those that train, and others."""
    assert config.hint
    p = under[:, : parts.shape[2]]
    trains, others = (
        dict(zip(_MOMENTS, np.moveaxis(part, -1, 0), strict=True))
        for part in np.split(parts, 2, 1)
    )  # each [S, L + 1, R]
    weight, other = (
        part["right"] / p - part["wrong"] / (1 - p) for part in (trains, others)
    )
    if hint_levels.credited(config.hint) is None:
        weight[:, 1:], other[:, 1:] = np.nan, np.nan
    half = np.zeros_like(p)
    if not exact:
        half = 1.96 * weight.std(0, ddof=1) / np.sqrt(len(weight))
    by_visit = config.hint.controller is not None
    drawn = trains if by_visit else others
    return hint_levels.Levels(
        p=p,
        drawn=drawn["all"].mean(0),
        trains=trains["all"].mean(0),
        weight=weight.mean(0),
        half=half,
        right=trains["right"].mean(0)[0],
        wrong=trains["wrong"].mean(0)[0],
        signal=trains["signal"].mean(0),
        draws=drawn["draws"].mean(0),
        end=others["all"].mean(0) if by_visit else None,
        end_weight=other.mean(0) if by_visit else None,
    )


def rows_per_prompt(config: Config) -> float:
    """R: what the sum over the rows of a prompt is divided by."""
    sizes = config.sampling
    kept = kept_of(config)
    return min(rows_of(config), sizes.prompts * kept) / sizes.prompts


def sums_tokens(config: Config) -> bool:
    """Whether a token weighs the same whatever else is in the batch."""
    whole = np.ones((4, 8), bool)
    short = whole.copy()
    short[0, 4:], short[1] = False, False
    weights = [
        np.asarray(stages.token_weights(config, mask)) for mask in (whole, short)
    ]
    return np.allclose(weights[0][short], weights[1][short])


def is_policy_gradient(config: Config) -> bool:
    """Whether the loss of a token, at ratio 1, has minus the credit as its slope."""
    logp = -np.arange(1, 13, dtype=np.float32).reshape(4, 3) / 8
    mask = np.ones((4, 3), bool)
    credit = np.array([[1.5], [0.5], [-0.5], [-1.5]], np.float32) * mask

    @jax.jit
    def slope(now: jax.Array) -> jax.Array:
        def total(now: jax.Array) -> jax.Array:
            return jnp.sum(stages.token_losses(config, now, logp, credit, mask))

        return jax.grad(total)(now)

    return np.allclose(slope(logp), -credit, atol=1e-3)


def refills(chance: float, prompts: int, rounds: int) -> tuple[float, float]:
    """How many batches are drawn for one, and what becomes of their open groups.

    Every batch has a binomial number of them; batches are drawn until their sum fills
    one, at most `rounds`.

    Args:
        chance: that the gate leaves a group open.
        prompts: B, places.
        rounds: batches drawn at most.

    Returns:
        Expected batches, and the share of all their open groups that finds a place.
    """
    new = outcome_states.binomial(prompts, np.array([chance]))[:, 0]
    filled, attempts = np.eye(prompts + 1)[0], 0.0
    for _ in range(rounds):
        attempts += filled[:-1].sum()
        done = np.convolve(filled[:-1], new)
        done[prompts] = done[prompts:].sum() + filled[-1]
        filled = done[: prompts + 1]
    opened = prompts * chance * attempts  # Wald
    used = filled @ np.arange(prompts + 1)
    return float(attempts), float(used / opened) if opened else 1.0


# ----- credit, by the functions that train


class _Credits:
    """What the first prompt of each of many batches gets; compiled once per size."""

    def __init__(self, config: Config):
        self._config = config
        self._compiled = jax.jit(jax.vmap(self._one))

    def _one(self, seed, outcome, exists, history, finished, length):
        config, key = self._config, jax.random.key(seed)
        reward = stages.shaped(config, outcome, length)
        arrays = outcome, reward, exists, finished, history
        given = learn.compute_credit(config, key, *arrays)
        open_ = stages.gated(config, outcome, exists, finished)
        return given.credit[0], given.keep[0], jnp.any(open_[0])

    def __call__(self, seed, outcome, exists, history, *, least=1, ends=True, length=1):
        """Credits, what is kept, and whether the gate is open.

        Args:
            seed: `[N]`, of the keys for down-sampling.
            outcome: `[N, B, G]`.
            exists: `[N, B, G]` bool.
            history: `[N, B]`.
            least: prompts that a batch is filled up to, by ones without completions.
            ends: whether completions end by themselves; as `exists`, or for all.
            length: their tokens; as `exists`, or for all.

        Returns:
            `[N, G]` float64, `[N, G]` bool, `[N]` bool.
        """
        lacking = max(least - outcome.shape[1], 0)
        fill = (0, 0), (0, lacking), (0, 0)
        outcome, exists = np.pad(outcome, fill), np.pad(exists, fill)
        history = np.pad(history, fill[:2])
        _, prompts, group = outcome.shape
        size = int(np.clip(CHUNK // (prompts * group * group), 1, 1024))
        credit, keep, open_ = _in_chunks(
            self._compiled,
            size,
            seed.astype(np.uint32),
            outcome.astype(np.float32),
            exists,
            history.astype(np.float32),
            exists & ends,
            np.where(exists, length, 0).astype(np.int32),
        )
        return credit.astype(np.float64), keep, open_


_MOMENTS = (
    *("right", "wrong", "signal", "draws", "some", "share", "square", "open", "all"),
    *("right_right", "right_wrong", "wrong_wrong"),
)
_OPEN = _MOMENTS.index("open")


def _moments(credit, open_, outcome, exists, per_prompt: float) -> np.ndarray:
    """`[N, moments]` of what happened to one prompt."""
    plus = (credit * outcome).sum(-1) / per_prompt
    minus = (credit * (1 - outcome)).sum(-1) / per_prompt
    n = exists.sum(-1)
    parts = (
        *(plus, minus, (credit != 0).any(-1)),
        *(n, n > 0, (outcome * exists).sum(-1) / np.maximum(n, 1)),
        *((credit**2).sum(-1) / per_prompt**2, open_, np.ones_like(plus)),
        *(plus**2, plus * minus, minus**2),
    )
    return np.stack([np.asarray(part, np.float64) for part in parts], -1)


class _Reads(NamedTuple):
    """What the credit of a prompt depends on besides how many of its n are right."""

    history: bool  # the pass rate that was known before
    batch: bool  # the other prompts
    blind: bool  # how many right ones are kept, by a lot that sees no labels
    key: bool  # the same, by any other lot
    first: bool  # the place of the first right one
    order: bool  # the places of others
    lengths: bool  # how completions end, or how long they are


def _reads(config: Config, credits: _Credits) -> _Reads:
    """Found out by changing one thing at a time under random labels of two prompts."""
    random, group = np.random.default_rng(0), config.sampling.group_size
    shape = (SAMPLES, 2, group)
    number = random.integers(1, group + 1, shape[:2])
    number[: SAMPLES // 2] = group
    place = np.arange(group)
    exists = place < number[..., None]
    outcome = (random.random(shape) < random.random((SAMPLES, 2, 1))) & exists
    history = np.full(shape[:2], 0.5)
    same, seeds = np.zeros(SAMPLES), np.arange(SAMPLES)
    labels, drawn = outcome[:, 0], exists[:, 0]

    def sums(seed=same, outcome=outcome, exists=exists, history=history, **ends):
        credit, _, open_ = credits(seed, outcome, exists, history, **ends)
        return _moments(credit, open_, outcome[:, 0], exists[:, 0], 1.0)

    plain = sums()

    def differs(**changed: Any) -> bool:
        scale = 1e-4 * (np.abs(plain).max(0) + 1e-6)
        return bool((np.abs(sums(**changed) - plain) > scale).any())

    def differ(moved: np.ndarray) -> bool:
        """Whether the first prompt is another with its labels in these places."""
        at = np.where(drawn, moved, place)
        labels = np.take_along_axis(outcome[:, 0], at, -1)
        return differs(outcome=np.stack([labels, outcome[:, 1]], 1))

    def sorted_by(value: np.ndarray) -> np.ndarray:
        return np.argsort(np.where(drawn, value, group + 1), -1, stable=True)

    lots = random.random((SAMPLES, group))
    key, blind = differs(seed=seeds), False
    if key:
        # Of whole groups the same set is kept whatever is right in them, and order
        # matters neither inside nor outside of it.
        whole = np.arange(SAMPLES) < SAMPLES // 2
        keep = credits(same, outcome, exists, history)[1][whole]
        keep = keep[keep.any(-1)]
        if len(keep) > 1 and (keep == keep[0]).all():
            moved = place.copy()
            for part in np.flatnonzero(keep[0]), np.flatnonzero(~keep[0]):
                moved[part] = random.permutation(part)
            blind = not differ(np.where(whole[:, None], moved, place))
    lottery = key and not blind
    before = np.cumsum(labels, -1) - labels == 0  # up to the first right one
    others = random.permuted(np.arange(SAMPLES))
    rest = {
        "outcome": np.stack([labels, outcome[others, 1]], 1),
        "exists": np.stack([drawn, exists[others, 1]], 1),
        "history": np.stack([history[:, 0], random.random(SAMPLES)], 1),
    }
    own = np.stack([random.random(SAMPLES), history[:, 1]], 1)
    some = random.integers(1, config.sampling.max_tokens + 1, shape)
    return _Reads(
        history=differs(history=own),
        batch=differs(**rest),
        blind=blind,
        key=lottery,
        # Where lots decide, order cannot be told from them.
        first=lottery or (not key and differ(sorted_by(lots))),
        order=not key and differ(sorted_by(np.where(before, place - group, lots))),
        lengths=differs(ends=random.random(shape) < 0.5) or differs(length=some),
    )


# ----- what was known of a prompt, and the rest of its batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cases:
    """T different ones; each of A things known, in each of S batches, is one of them.

    In a case all is settled but how many completions of the prompt are right.
    """

    count: np.ndarray  # [T] completions that the prompt may draw
    number: np.ndarray  # [T, B] that each prompt of the batch draws, ours the first
    history: np.ndarray  # [T, B]
    batch: np.ndarray  # [T] in [0, S)
    labels: np.ndarray  # [S, B, G] bool, of the others
    place: np.ndarray  # [A, S] in [0, T)
    chance: np.ndarray  # [R, A] of what is known
    known: float  # draws behind that; 0 where nothing reads it
    how: tuple[str, ...]  # why the batches are random ones; empty: these are all

    def most(self, group: int) -> np.ndarray:
        """`[R, G + 1]` chances of each number that the prompt may draw."""
        each = self.count[self.place][..., None] == np.arange(group + 1)
        return self.chance @ each.mean(1)


def _cases(
    config: Config,
    reads: _Reads,
    p: np.ndarray,
    population: np.ndarray,
    held: tuple[float, int],
) -> _Cases:
    sizes = config.sampling
    prompts, group = sizes.prompts, sizes.group_size
    random = np.random.default_rng(0)
    draws, trials = held
    shares, chance = _tellings(trials, p)
    allocated = _allocator(config, draws)
    # Pass rates of all kinds, so that whatever the counts may depend on shows.
    counts, _ = allocated(random.integers(0, 11, (SAMPLES, prompts)) / 10)
    shared = bool(np.ptp(counts, axis=0).any())

    how = [
        text
        for applies, text in (
            (shared, "the rest of a batch, which shares its budget"),
            (
                reads.batch and prompts > 1,
                "the rest of a batch, which statistics span",
            ),
            (reads.key, "which completions down-sampling keeps"),
            (reads.order, "the order of draws, as if nothing had stopped them"),
        )
        if applies
    ]
    if not (shared or reads.history):
        shares, chance = shares[:1], np.ones((len(p), 1))
    batches = prompts if np.ptp(counts[0]) else 1
    if how:
        rows = group * len(shares) * (group if reads.first else 1)
        rows *= group * (prompts if reads.batch else 1)
        most = min(WORK // rows, WORK // (4 * len(shares) * prompts))
        batches = int(np.clip(most, 16, BATCHES))

    # What is known of every batch, for all that may be known of the prompt in it.
    rates = random.choice(population, (batches, prompts))
    known = random.binomial(trials, rates) / trials
    known = np.repeat(known[None], len(shares), 0)
    own = np.arange(batches) * prompts // batches
    known[:, np.arange(batches), own] = shares[:, None]
    first = (own[:, None] + np.arange(prompts)) % prompts  # ours, then the others
    counts, history = (
        np.take_along_axis(part.reshape(known.shape), first[None], -1)
        for part in allocated(known.reshape(-1, prompts))
    )
    rates = np.take_along_axis(rates, first, -1)
    labels, number = np.zeros((batches, 1, group), bool), counts
    if reads.batch:
        labels = random.random((*rates.shape, group)) < rates[..., None]
        if config.stop:
            number = np.minimum(counts, _stopped(config, labels))

    telling, batch = np.indices(counts.shape[:2])
    apart: list[Any] = [counts[..., 0]]
    if reads.history:
        apart.append(history[..., 0])
    if reads.batch or reads.key or reads.order:
        apart.append(batch)
    if reads.batch:
        apart.append(telling)
    _, at, place = np.unique(
        np.stack(apart, -1).reshape(-1, len(apart)),
        axis=0,
        return_index=True,
        return_inverse=True,
    )
    width = prompts if reads.batch else 1
    return _Cases(
        count=counts[..., 0].reshape(-1)[at],
        number=number.reshape(-1, prompts)[at, :width],
        history=history.reshape(-1, prompts)[at, :width],
        batch=batch.reshape(-1)[at],
        labels=labels,
        place=place.reshape(counts.shape[:2]),
        chance=chance,
        known=draws if shared or reads.history else 0.0,
        how=tuple(how),
    )


def remembers(config: Config) -> bool:
    """Whether the memory has a say in how many completions a prompt gets."""
    return not (config.pilot or declared(config.allocate, "equal_groups", False))


def num_prompts(config: Config) -> int | None:
    """Prompts of the task, where its options say how many; those in files do not."""
    prompts = option(config.task, "num_prompts")
    return prompts if isinstance(prompts, int) else None


def visits(config: Config, prompts: int | None = None) -> int:
    """How often a run comes back to each prompt; 0: it ends within the first epoch.

    Args:
        config: the recipe.
        prompts: of the task; None: what its options say. Where these do not say it,
            every prompt is taken to come back in every step.
    """
    prompts = num_prompts(config) if prompts is None else prompts
    drawn = config.steps * config.sampling.prompts
    if prompts is None:
        return config.steps
    return 0 if drawn <= prompts else min(config.steps, drawn // prompts)


def _held(config: Config, remembered: float | None, often: int) -> tuple[float, int]:
    """Draws behind what is known of a prompt, and how many would be as precise.

    A memory holds D = n sum_i lambda^i draws after visits of n. Their share of right
    ones has the variance of n (sum_i lambda^i)^2 / sum_i lambda^2i. Before any visit it
    holds nothing.
    """
    if config.pilot:
        return float(config.pilot.draws), config.pilot.draws
    visit = rows_of(config) / config.sampling.prompts
    discount = float(memories.discount(config.memory.half_life))
    kept = discount ** np.arange(often)
    draws, squares = visit * kept.sum(), (kept**2).sum()
    precision = kept.sum() / squares if draws else 1.0
    draws = draws if remembered is None else remembered
    return draws, max(round(min(draws * precision, _MOST_TRIALS)), 1)


_MOST_TRIALS = 2**16  # a pass rate is then known to 0.002


def _tellings(trials: int, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of right ones that may be known of a prompt `[A]`, their chances `[R, A]`.

    Of more trials than ATOMS, each share counts as its two neighbours, in proportion:
    nothing is then known better than 30 000 draws would tell it.
    """
    if trials <= ATOMS:
        return np.arange(trials + 1) / trials, outcome_states.binomial(trials, p).T
    shares = np.sin(np.linspace(0, np.pi / 2, ATOMS + 1)) ** 2
    k = np.arange(trials + 1)
    factorial = np.concatenate([[0.0], np.cumsum(np.log(k[1:]))])
    ways = factorial[-1] - factorial - factorial[::-1]
    left = np.clip(np.searchsorted(shares, k / trials, "right") - 1, 0, ATOMS - 1)
    right_part = (k / trials - shares[left]) / (shares[left + 1] - shares[left])
    chance = np.zeros((len(p), ATOMS + 1))
    for row, rate in zip(chance, p, strict=True):
        each = np.exp(ways + k * np.log(rate) + (trials - k) * np.log1p(-rate))
        row[:-1] += np.bincount(left, each * (1 - right_part), ATOMS)
        row[1:] += np.bincount(left, each * right_part, ATOMS)
    return shares, chance


def _allocator(
    config: Config, draws: float
) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """From shares of right ones `[N, B]` to counts and to the history, `[N, B]`."""
    sizes = config.sampling

    def known(solved: jax.Array) -> Difficulty:
        each = jnp.full_like(solved, draws)
        if config.pilot:
            found = (solved > 0) | (not config.pilot.accepted)
            return Difficulty(
                draws=each,
                solved=solved,
                pass_rate=solved / draws,
                norm=jnp.where(found, 1.0, 0.0),
                tokens=jnp.full_like(solved, sizes.max_tokens),
            )
        memory = Memory(
            draws=each, solved=solved, square=each, tokens=each * sizes.max_tokens
        )
        ids = jnp.arange(sizes.prompts, dtype=jnp.int32)
        return memories.difficulty(memory, ids, prior=config.memory.prior)

    def one(solved: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen = known(solved)
        budget, most = rows_of(config), sizes.group_size
        counts = stages.counts(config, seen, budget=budget, most=most)
        return counts, seen.pass_rate

    compiled = jax.jit(jax.vmap(one))
    size = int(np.clip(2**18 // sizes.prompts, 1, 2048))
    return lambda share: _in_chunks(compiled, size, np.float32(share * draws))


def _stopped(config: Config, labels: np.ndarray) -> np.ndarray:
    """`[..., B]` completions drawn when the rule stops each prompt of these labels."""
    assert config.stop
    size, most = config.stop.round_size, labels.shape[-1]
    number = np.full(labels.shape[:-1], most)
    place = np.arange(most)
    for n in reversed(range(size, most, size)):
        exists = np.broadcast_to(place < n, labels.shape)
        met = stages.met(config, (labels & exists).astype(np.float32), exists)
        number = np.where(np.asarray(met), n, number)
    return number


def _expected(
    config: Config,
    credits: _Credits,
    reads: _Reads,
    cases: _Cases,
    p: np.ndarray,
    under: np.ndarray | None,
    often: int,
) -> np.ndarray:
    """`[S, K, R, moments]` in each of the batches; K as in `_groups`."""
    random = np.random.default_rng(1)
    # A blind lot is as good as any other: labels lie at random under it.
    seeds = np.arange(len(cases.labels)) * (not reads.blind)

    def told(part: np.ndarray, own: np.ndarray, drawn: np.ndarray):
        """What becomes of labels `[S, G]` of the prompt in some cases, row by row."""
        batch = np.repeat(cases.batch[part], len(own))
        outcome = cases.labels[batch].astype(np.float32)
        exists = (
            np.arange(own.shape[1])
            < np.repeat(cases.number[part], len(own), axis=0)[..., None]
        )
        outcome[:, 0], exists[:, 0] = (
            np.tile(own, (len(part), 1)),
            np.tile(drawn, (len(part), 1)),
        )
        if reads.order:
            lots = np.where(exists[:, 0], random.random(exists[:, 0].shape), 2)
            at = np.argsort(lots, -1)
            outcome[:, 0] = np.take_along_axis(outcome[:, 0], at, -1)
        outcome *= exists
        history = np.repeat(cases.history[part], len(own), axis=0)
        # Where others do not matter, two are a size that is compiled already.
        least = 1 if reads.batch else 2
        result = credits(seeds[batch], outcome, exists, history, least=least)
        return result, outcome[:, 0], exists[:, 0]

    many = 0 if under is None else len(under)
    given = np.zeros((len(cases.count), 1 + 2 * many, len(p), len(_MOMENTS)))
    for count in np.unique(cases.count):
        which, chance = _groups(config, p, under, int(count), reads.first, often)
        own, drawn = outcome_states.shown(which, config.sampling.group_size)
        at = np.flatnonzero(cases.count == count)
        if reads.blind:
            (_, keep, _), _, _ = told(at[:1], own, drawn)
            own, drawn, share, of = _dealt(which, keep, drawn)
            chance = chance[..., of] * share
        size = max(_OUTCOMES // (len(own) * cases.labels[0].size), 1)
        for part in np.split(at, range(size, len(at), size)):
            (credit, keep, open_), labels, exists = told(part, own, drawn)
            rest = open_, labels, exists, rows_per_prompt(config)
            given[part] = _averaged(chance, _moments(credit, *rest))
            if many and config.hint and config.hint.credit:
                # Only whether it is 0 is read of this, and no ratio decides that.
                credit = config.hint.credit(
                    credit.astype(np.float32),
                    labels,
                    keep,
                    np.zeros_like(labels),
                    np.ones(len(labels), bool),
                )
                value = _moments(np.asarray(credit, np.float64), *rest)
                hinted = np.arange(1 + 2 * many)[2:]
                hinted = hinted[hinted != 1 + many]
                part = part[:, None]
                given[part, hinted] = _averaged(chance[hinted], value)
    return np.stack(
        [np.einsum("ra,akrm->krm", cases.chance, given[row]) for row in cases.place.T]
    )


def _averaged(chance: np.ndarray, value: np.ndarray) -> np.ndarray:
    """`[T, K, R, moments]`: values `[T S, moments]` by chances `[K, R, S]`."""
    value = value.reshape(-1, chance.shape[-1], len(_MOMENTS))
    return np.einsum("krs,tsm->tkrm", chance, value)


def _groups(
    config: Config,
    p: np.ndarray,
    under: np.ndarray | None,
    most: int,
    first: bool,
    often: int,
) -> tuple[np.ndarray, np.ndarray]:
    """What a group may come to `[S, 3]`, and how likely that is `[K, R, S]`.

    Of the K the first is without hints. With pass rates under each level, of prompts
    and of a population, as many follow as there are levels, for groups that train, and
    once more, for all groups, or those in the end (`levels`).
    """
    sizes, stop, how = config.sampling, config.stop, config.hint
    met = partial(stages.met, config)
    rule = {"size": stop.round_size, "met": met} if stop else {}
    rates = p[None] if under is None else under
    which, chance = outcome_states.states(
        rates.reshape(-1), most=most, first=first, **rule
    )
    chance = chance.reshape(*rates.shape, -1)
    parts = [chance[:1]]
    if under is not None and how:
        size, own = (sizes.prompts, sizes.group_size), len(p)
        of_run = {"visits": often} if how.controller else {}
        found = hint_levels.visited if how.controller else hint_levels.searched
        parts += found(how, which, chance, size=size, own=own, **of_run)
    return which, np.concatenate(parts)[:, : len(p)]


def _dealt(
    which: np.ndarray, keep: np.ndarray, drawn: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """States told apart by how many of the right ones are kept, a hypergeometric share.

    Args:
        which: `[S, 3]` states.
        keep: `[S, G]` bool, what a lot keeps; of a pool that is closed nothing.
        drawn: `[S, G]` bool.

    Returns:
        `[U, G]` outcomes and existence; `[U]` the share and the place of their state.
    """
    kept = {n: keep[which[:, 0] == n].any(0) for n in np.unique(which[:, 0])}
    rows, shares, of = [], [], []
    for i, (n, k, _) in enumerate(which.tolist()):
        inside = np.flatnonzero(kept[n])
        outside = np.flatnonzero(drawn[i] & ~kept[n])
        m = len(inside)
        for here in range(max(k - len(outside), 0), min(k, m) + 1):
            row = np.zeros(drawn.shape[1], np.float32)
            row[inside[:here]], row[outside[: k - here]] = 1, 1
            rows.append(row)
            ways = math.comb(m, here) * math.comb(n - m, k - here)
            shares.append(ways / math.comb(n, k))
            of.append(i)
    return np.stack(rows), drawn[of], np.array(shares), np.array(of)


_OUTCOMES = 2**22  # held at a time


def _in_chunks(function: Callable[..., Any], size: int, *arrays: Any) -> Any:
    """Outputs for `[N, ...]` arrays, of a function compiled for `size` rows alone."""
    total, found = len(arrays[0]), []
    for start in range(0, total, size):
        at = np.minimum(np.arange(start, start + size), total - 1)
        made = function(*(array[at] for array in arrays))
        found.append([np.asarray(part)[: total - start] for part in made])
    return tuple(map(np.concatenate, zip(*found, strict=True)))
