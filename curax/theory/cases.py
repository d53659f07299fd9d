"""Cases of a prompt: its known pass rate, its count, and the rest of its batch.

A pilot or the memory reports one of A shares of right completions of a prompt; an
allocator turns those of a batch into counts. Batches are drawn at random where counts
or credit depend on other prompts, else they are enumerated.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax import memory as memories
from curax.config import Config
from curax.settings.config_types import present
from curax.settings.sizes import rows_of
from curax.step import stages
from curax.theory import outcome_states
from curax.theory.credits import SAMPLES, Reads, in_chunks
from curax.types import Difficulty, PromptMemory

BATCHES = 256  # random batches, where counts or credit depend on other prompts
ATOMS = 256  # distinct pass rates that a memory of many draws can report
WORK = 2**25  # approximate number of credits, where the number of batches is free


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cases:
    """T distinct cases of a prompt: its count, its known pass rate, and its batch.

    Within a case only the number of right completions of the prompt is random.
    """

    count: np.ndarray  # [T] completions that the prompt may draw
    number: np.ndarray  # [T, B] that each prompt of the batch draws, this one first
    history: np.ndarray  # [T, B] known pass rates
    batch: np.ndarray  # [T] in [0, S), batch of the case
    labels: np.ndarray  # [S, B, G] bool, outcomes of the other prompts
    place: np.ndarray  # [A, S] in [0, T), case of each share in each batch
    chance: np.ndarray  # [R, A] probability of each share
    known: float  # draws behind the known share; 0 where nothing reads it
    how: tuple[str, ...]  # why batches are random; empty: they are enumerated

    def most(self, group: int) -> np.ndarray:
        """`[R, G + 1]` probability of each number of completions of the prompt."""
        each = self.count[self.place][..., None] == np.arange(group + 1)
        return self.chance @ each.mean(1)


def cases_of(
    config: Config,
    reads: Reads,
    p: np.ndarray,
    population: np.ndarray,
    held: tuple[float, int],
) -> Cases:
    """The distinct cases of prompts with these pass rates, and their probabilities.

    Args:
        config: the recipe.
        reads: dependences of its credit.
        p: `[R]` pass rates.
        population: `[K]` pass rates of the other prompts, all equally likely.
        held: draws and trials, of `visits.memory_draws`.
    """
    sizes = config.sampling
    prompts = sizes.prompts
    random = np.random.default_rng(0)
    draws, trials = held
    shares, chance = known_shares(trials, p)
    allocated = allocator(config, draws)
    # Random pass rates show whether counts depend on them.
    counts, _ = allocated(random.integers(0, 11, (SAMPLES, prompts)) / 10)
    shared = bool(np.ptp(counts, axis=0).any())
    how = _reasons(reads, shared, prompts)
    if not (shared or reads.history):
        shares, chance = shares[:1], np.ones((len(p), 1))
    batches = prompts if np.ptp(counts[0]) else 1
    if how:
        batches = _random_batches(config, reads, len(shares))

    # Known shares of every batch, for every share that the prompt itself may have.
    rates = random.choice(population, (batches, prompts))
    known = random.binomial(trials, rates) / trials
    known = np.repeat(known[None], len(shares), 0)
    own = np.arange(batches) * prompts // batches
    known[:, np.arange(batches), own] = shares[:, None]
    first = (own[:, None] + np.arange(prompts)) % prompts  # the prompt, then the others
    counts, history = (
        np.take_along_axis(part.reshape(known.shape), first[None], -1)
        for part in allocated(known.reshape(-1, prompts))
    )
    rates = np.take_along_axis(rates, first, -1)
    labels, number = np.zeros((batches, 1, sizes.group_size), bool), counts
    if reads.batch:
        labels = random.random((*rates.shape, sizes.group_size)) < rates[..., None]
        if config.stop:
            number = np.minimum(counts, stopping_draws(config, labels))
    at, place = _distinct(reads, counts[..., 0], history[..., 0])
    width = prompts if reads.batch else 1
    return Cases(
        count=counts[..., 0].reshape(-1)[at],
        number=number.reshape(-1, prompts)[at, :width],
        history=history.reshape(-1, prompts)[at, :width],
        batch=np.indices(counts.shape[:2])[1].reshape(-1)[at],
        labels=labels,
        place=place,
        chance=chance,
        known=draws if shared or reads.history else 0.0,
        how=how,
    )


def _reasons(reads: Reads, shared: bool, prompts: int) -> tuple[str, ...]:
    """Reasons why batches are drawn at random; empty if they need not be.

    Args:
        reads: dependences of credit.
        shared: whether a prompt's count depends on other prompts.
        prompts: B.
    """
    spans = reads.batch and prompts > 1
    reasons = (
        (shared, "the rest of a batch, which shares its budget"),
        (spans, "the rest of a batch, which statistics span"),
        (reads.key, "which completions down-sampling keeps"),
        (reads.order, "the order of draws, as if nothing had stopped them"),
    )
    return tuple(text for applies, text in reasons if applies)


def _random_batches(config: Config, reads: Reads, shares: int) -> int:
    """S, the number of random batches for which about WORK credits are computed."""
    prompts, group = config.sampling.prompts, config.sampling.group_size
    rows = group * shares * (group if reads.first else 1)
    rows *= group * (prompts if reads.batch else 1)
    most = min(WORK // rows, WORK // (4 * shares * prompts))
    return int(np.clip(most, 16, BATCHES))


def _distinct(
    reads: Reads, counts: np.ndarray, history: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`[T]` flat index of each distinct case, and `[A, S]` the case of each entry.

    Args:
        reads: dependences of credit.
        counts: `[A, S]` completions that the prompt may draw.
        history: `[A, S]` its known pass rate.
    """
    share, batch = np.indices(counts.shape)
    apart: list[Any] = [counts]
    if reads.history:
        apart.append(history)
    if reads.batch or reads.key or reads.order:
        apart.append(batch)
    if reads.batch:
        apart.append(share)
    _, at, place = np.unique(
        np.stack(apart, -1).reshape(-1, len(apart)),
        axis=0,
        return_index=True,
        return_inverse=True,
    )
    return at, place.reshape(counts.shape)


def known_shares(trials: int, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of right completions in earlier trials `[A]`, with their `[R, A]` chances.

        P(k / trials),   k ~ Binomial(trials, p)

    Of more trials than ATOMS, each share is split between its two neighbours on a grid,
    in proportion: no pass rate is then known better than by 30 000 draws.
    """
    if trials <= ATOMS:
        return np.arange(trials + 1) / trials, outcome_states.binomial(trials, p).T
    shares = np.sin(np.linspace(0, np.pi / 2, ATOMS + 1)) ** 2
    k = np.arange(trials + 1)
    left = np.clip(np.searchsorted(shares, k / trials, "right") - 1, 0, ATOMS - 1)
    right_part = (k / trials - shares[left]) / (shares[left + 1] - shares[left])
    chance = np.zeros((len(p), ATOMS + 1))
    for row, each in zip(chance, outcome_states.binomial(trials, p).T, strict=True):
        row[:-1] += np.bincount(left, each * (1 - right_part), ATOMS)
        row[1:] += np.bincount(left, each * right_part, ATOMS)
    return shares, chance


def allocator(
    config: Config, draws: float
) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Function from shares of right completions to counts and known pass rates.

    All three are `[N, B]`.
    """
    sizes = config.sampling

    def known(solved: jax.Array) -> Difficulty:
        each = jnp.full_like(solved, draws)
        if config.pilot:
            return Difficulty(
                draws=each,
                solved=solved,
                pass_rate=solved / draws,
                norm=jnp.where(solved > 0, 1.0, 0.0),
                tokens=jnp.full_like(solved, sizes.max_tokens),
            )
        memory = PromptMemory(
            draws=each, solved=solved, square=each, tokens=each * sizes.max_tokens
        )
        ids = jnp.arange(sizes.prompts, dtype=jnp.int32)
        return memories.difficulty(memory, ids, prior=config.memory.prior)

    def one(solved: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen = known(solved)
        bounds = {"budget": rows_of(config), "most": sizes.group_size}
        counts = stages.called(config, "allocate", seen, **bounds)
        return counts, seen.pass_rate

    compiled = jax.jit(jax.vmap(one))
    size = int(np.clip(2**18 // sizes.prompts, 1, 2048))
    return lambda share: in_chunks(compiled, size, np.float32(share * draws))


def stopping_draws(config: Config, labels: np.ndarray) -> np.ndarray:
    """`[..., B]` completions drawn until the stopping rule is met.

    Args:
        config: the recipe, with a rule.
        labels: `[..., B, G]` bool, in the order of draws.
    """
    size, most = present(config.stop).round_size, labels.shape[-1]
    number = np.full(labels.shape[:-1], most)
    place = np.arange(most)
    for n in reversed(range(size, most, size)):
        exists = np.broadcast_to(place < n, labels.shape)
        outcome = (labels & exists).astype(np.float32)
        met = stages.called(config, "stop.rule", outcome, exists)
        number = np.where(np.asarray(met), n, number)
    return number
