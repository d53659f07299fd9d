"""The embedded environments: rules in Python, and pass rates that are known exactly."""

import itertools
from collections.abc import Callable
from functools import cache, lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import close
from hypothesis import given
from hypothesis import strategies as st

from curax.config import ConfigError
from curax.tasks import calculator, episodes, mastermind, nim

IDS = jnp.arange(2048, dtype=jnp.int32)
TASKS = {
    "calculator": calculator.task(depth=3),
    "mastermind": mastermind.task(),
    "nim": nim.task(),
}
for_every_task = pytest.mark.parametrize("name", TASKS)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (partial(mastermind.task, colours=1), "make 1 codes"),
        (partial(mastermind.task, pegs=9), "make 1953125 codes"),
        (partial(nim.task, largest=5), "set task.largest to at least 12"),
        (partial(nim.task, smallest=1, largest=3), "set task.largest to at least 4"),
    ],
)
def test_a_game_of_nothing_is_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


@lru_cache
def prompts(name, held_out=False):
    task = TASKS[name]
    return jax.device_get(jax.jit(task.held_out if held_out else task.prompts)(IDS))


@lru_cache
def played(name, **options):
    """Completions of the teacher, whose options may be others."""
    task = TASKS[name]
    how = dict(task.traces.keywords)
    how["teacher"] = partial(how["teacher"], **options)
    play = jax.jit(
        lambda key, asked: episodes.played(
            how["environment"],
            how["teacher"],
            key,
            asked,
            turns=how["turns"],
            max_tokens=how["max_tokens"],
            pad=how["pad"],
        )
    )
    return jax.device_get(play(jax.random.key(5), prompts(name)))


def agrees(rate, chance):
    """A mean of 0/1 outcomes, each right with its own chance: within 4 deviations."""
    chance = np.asarray(chance)
    off = abs(rate - chance.mean())
    assert off < 4 * np.sqrt((chance * (1 - chance)).sum()) / len(chance) + 1e-6


# ----- all of them


@pytest.mark.first(1)
@for_every_task
def test_no_question_is_on_both_sides(name):
    train, held = (
        {tuple(row) for row in prompts(name, side).tokens.tolist()}
        for side in (False, True)
    )
    assert train
    assert held
    assert not train & held


@pytest.mark.first(1)
@for_every_task
def test_traces_are_turns_of_the_teacher_with_what_was_said_between(name):
    task, made = TASKS[name], played(name)
    assert made.tokens.shape == made.mask.shape
    there = made.tokens != task.pad
    assert (made.mask <= there).all()
    assert (there & ~made.mask).any()
    assert (np.diff(there.astype(int)) <= 0).all()  # no gaps
    ends = np.isin(made.tokens, task.end) & made.mask
    assert (ends.sum(-1) >= 1).all()
    # An observation is behind the end of a turn, and nothing is behind the last.
    begins = (there & ~made.mask)[:, 1:] & made.mask[:, :-1]
    assert ends[:, :-1][begins].all()
    last = there.sum(-1) - 1
    over = np.take_along_axis(ends, last[:, None], 1)[:, 0]
    assert over.mean() > 0.99
    tokens, mask = jax.jit(task.traces)(jax.random.key(5), prompts(name))
    np.testing.assert_array_equal(tokens, made.tokens)
    np.testing.assert_array_equal(mask, made.mask)


@for_every_task
def test_texts_are_readable(name):
    task, made = TASKS[name], played(name)
    for n in range(20):
        asked = task.decode(prompts(name).tokens[n])
        said = task.decode(made.tokens[n])
        assert asked.endswith("=")
        assert "end" in said.split()


def answered(environment, state, turn, width):
    """State and observation after one turn, a list of tokens."""
    tokens = np.zeros(width, np.int32)
    tokens[: len(turn)] = turn
    return environment(state, tokens, np.int32(len(turn)))


# ----- calculator

compute = jax.jit(partial(calculator.observe, tool=True))
OPS = {97: lambda a, b: a + b, 98: lambda a, b: a - b, 99: lambda a, b: a * b}
tokens = st.integers(0, len(calculator.NAMES) - 1)


def chain_state(n):
    target = jax.tree.map(lambda leaf: leaf[n], prompts("calculator").target)
    return calculator.reset(jax.random.key(0), target)


def test_the_answer_of_a_chain_is_what_python_computes():
    asked = prompts("calculator").target
    for n in range(200):
        value = int(asked["value"][n])
        for op, operand in zip(asked["ops"][n], asked["operands"][n], strict=True):
            if op != calculator.BLANK:
                value = OPS[int(op)](value, int(operand)) % calculator.MODULUS
        assert value == asked["answer"][n]
        text = calculator.decode(prompts("calculator").tokens[n])
        assert text.split()[0] == str(asked["value"][n])


@given(st.lists(tokens, min_size=0, max_size=4))
def test_a_calculator_answers_questions_and_nothing_else(said):
    turn = [*said, calculator.END]
    state, seen = jax.device_get(answered(compute, chain_state(3), turn, 6))
    is_op = len(said) == 3 and said[1] in OPS and max(said[0], said[2]) < 97
    answers = len(said) == 2 and said[0] == calculator.IS and said[1] < 97
    want = OPS[said[1]](said[0], said[2]) % 97 if is_op else calculator.ERROR
    assert seen.tokens.tolist() == [want]
    assert (seen.length, seen.done) == (1, answers)
    right = answers and said[1] == prompts("calculator").target["answer"][3]
    assert seen.reward == right
    assert state["asked"] == is_op
    assert state["refused"] == (not is_op and not answers)


@pytest.mark.long
def test_the_pass_rate_of_the_impatient_is_known_and_the_patient_never_fail():
    length = prompts("calculator").target["length"]
    for asks in (0.7, 0.3):
        known = asks**length + (1 - asks**length) / calculator.MODULUS
        agrees(played("calculator", asks=asks).outcome.mean(), known)
    assert (played("calculator", asks=1.0).outcome == 1).all()


def test_without_the_tool_nothing_is_answered():
    bare = partial(calculator.observe, tool=False)
    turn = [3, 97, 4, calculator.END]
    _, seen = answered(bare, chain_state(0), turn, 6)
    assert seen.tokens.tolist() == [calculator.ERROR]


# ----- mastermind

GAME = mastermind.Words(2, 5)


def said_of(guess, code):
    """What is said of a guess, in plain words."""
    place = sum(a == b for a, b in zip(guess, code, strict=True))
    common = sum(min(guess.count(c), code.count(c)) for c in set(guess))
    return place, common - place


def test_answers_are_those_of_the_game():
    codes = [tuple(code) for code in GAME.codes.tolist()]
    for i, j in itertools.product(range(25), range(25)):
        assert divmod(int(GAME.answers[i, j]), 3) == said_of(codes[i], codes[j])


def test_the_code_agrees_with_the_prompt_and_guesses_with_what_is_known():
    made, asked = played("mastermind", careful=1.0), prompts("mastermind")
    codes = [tuple(code) for code in GAME.codes.tolist()]
    for n in range(100):
        pairs = [asked.tokens[n, :2]]
        for t in (0, 3, 6):
            if made.mask[n, t]:
                guess = codes[made.tokens[n, t]]
                for other, answer in pairs:
                    said = said_of(codes[other], guess)
                    assert said == divmod(int(answer) - GAME.first, 3)
                pairs.append(made.tokens[n, [t, min(t + 2, 8)]])


@cache
def bruteforce(words, left, guesses):
    """Codes found by the best tree of guesses, tried one by one."""
    if not guesses or not left:
        return 0
    codes = [tuple(code) for code in words.codes.tolist()]
    found = []
    for guess in codes:
        parts = {}
        for code in left:
            parts.setdefault(said_of(guess, codes[code]), []).append(code)
        right = parts.pop((words.pegs, 0), [])
        rest = (bruteforce(words, tuple(p), guesses - 1) for p in parts.values())
        found.append(len(right) + sum(rest))
    return max(found)


def best(words, fits: np.ndarray, guesses: int) -> float:
    """Chance that the best policy finds the code, one of those that are left.

        W(S, 0) = 0,   W(S, k) = max_g sum_a W(S_{g, a}, k - 1) + [g in S]
        chance = W(S, k) / |S|

    with S_{g, a} the codes for which guess g has answer a, g itself left out. It counts
    the codes that are found for sure by guesses that depend on answers alone; chance
    in the guesses helps nobody.

    Args:
        words: codes and answers.
        fits: `[K]` bool, S.
        guesses: k.
    """

    @cache
    def found(codes: tuple[int, ...], k: int) -> int:
        if k == 0 or not codes:
            return 0
        if k == 1 or len(codes) == 1:
            return 1
        most = 0
        for guess in range(words.first):
            classes: dict[int, list[int]] = {}
            for code in codes:
                if code != guess:
                    classes.setdefault(int(words.answers[guess, code]), []).append(code)
            whole = sum(found(tuple(part), k - 1) for part in classes.values())
            most = max(most, whole + (guess in codes))
            if most == len(codes):
                break
        return most

    left = tuple(np.flatnonzero(fits).tolist())
    return found(left, guesses) / len(left)


@pytest.mark.parametrize(("pegs", "colours"), [(2, 3), (3, 2)])
def test_the_best_chance_is_that_of_a_search_of_all_trees(pegs, colours):
    words = mastermind.Words(pegs, colours)
    every = np.ones(len(words.codes), bool)
    for guesses in (1, 2, 3):
        want = bruteforce(words, tuple(range(len(every))), guesses) / len(every)
        close(best(words, every, guesses), want)


def test_no_policy_is_better_than_the_best_and_the_recipe_says_how_good_it_is():
    _, fits = mastermind.questions(GAME, held_out=True)
    chances = [best(GAME, one, 3) for one in fits]
    assert f"{np.mean(chances):.3f}" == "0.979"
    careful = played("mastermind", careful=1.0).outcome.mean()
    careless = played("mastermind", careful=0.0).outcome.mean()
    assert careless < 0.4 < 0.8 < careful < 0.98


# ----- nim


def values(
    most: int, largest: int, pick: Callable[[list[float]], float] = max
) -> np.ndarray:
    """`[largest + 1]` float64, chance to win of who is to move, by the pile.

        V(n) = pick_{a <= min(m, n)} ( 1 if a = n, else
               mean_{b <= min(m, n - a)} (0 if b = n - a, else V(n - a - b)) )

    Args:
        most: m.
        largest: pile.
        pick: of the chances of the turns; max for the best policy, a mean for one that
            plays at random.
    """
    value = np.zeros(largest + 1)
    for n in range(1, largest + 1):
        chances = []
        for left in range(n - 1, max(n - most, 0) - 1, -1):
            its = [
                0.0 if b == left else value[left - b]
                for b in range(1, min(most, left) + 1)
            ]
            chances.append(float(np.mean(its)) if left else 1.0)
        value[n] = pick(chances)
    return value


def test_values_of_piles_are_those_of_play():
    asked = prompts("nim").target
    table = {m: values(m, 24, np.mean) for m in nim.MOST}
    known = [table[m][pile] for m, pile in asked.tolist()]
    agrees(played("nim").outcome.mean(), known)


def test_whoever_leaves_a_multiple_wins_and_the_best_are_above_all():
    for m in nim.MOST:
        best, luck = values(m, 24), values(m, 24, np.mean)
        assert (best >= luck).all()
        safe = np.arange(25) % (m + 1) == 0
        close(best[~safe], 1.0)
        assert (best[safe] < 1).all()
    held = nim.questions(12, 24, held_out=True)
    rate = np.mean([values(m, 24)[pile] for m, pile in held])
    assert f"{rate:.3f}" == "0.993"
    luck = np.mean([values(m, 24, np.mean)[pile] for m, pile in held])
    assert f"{luck:.3f}" == "0.499"


@given(st.integers(2, 4), st.integers(1, 9), st.integers(0, 12), st.booleans())
def test_a_turn_takes_what_may_be_taken(most, pile, take, short):
    target = jnp.array([most, pile], jnp.int32)
    play = jax.jit(partial(nim.observe, nim.Words(12)))
    state = nim.reset(jax.random.key(take), target)
    turn = [take] if short else [take, 13]
    after, seen = jax.device_get(answered(play, state, turn, 4))
    allowed = not short and 1 <= take <= min(most, pile)
    if not allowed:
        assert (seen.done, seen.reward) == (True, 0)
    elif take == pile:
        assert (seen.done, seen.reward) == (True, 1)
    else:
        left = pile - take
        assert max(left - most, 0) <= seen.tokens[0] < left
        assert seen.tokens[0] == after["pile"]
        assert seen.done == (seen.tokens[0] == 0)
        assert seen.reward == 0


# ----- hints

GIVEN = {
    "calculator": calculator.task(depth=3, asks=1.0, hints=True),
    "mastermind": mastermind.task(careful=0.0, hints=True),
}
HINTS = {"calculator": (calculator.HINT, calculator.BLANK)}
WORDS = mastermind.Words(2, 5)
HINTS["mastermind"] = WORDS.hint, WORDS.blank
for_hinted_tasks = pytest.mark.parametrize("name", GIVEN)


@lru_cache
def shown(name):
    """Contexts of traces, the traces, and solutions with their masks."""
    task, asked, key = GIVEN[name], prompts(name), jax.random.key(7)

    def all_of(key, asked):
        contexts = task.trace_contexts(key, asked)
        return contexts, task.traces(key, asked), task.hinting.solution(asked)

    return jax.device_get(jax.jit(all_of)(key, asked))


@for_hinted_tasks
def test_without_hints_a_task_has_none_and_no_token_for_them(name):
    assert TASKS[name].hinting is None
    assert TASKS[name].trace_contexts is None
    sign, _ = HINTS[name]
    assert TASKS[name].vocab_size <= sign < GIVEN[name].vocab_size


@pytest.mark.first(1)
@for_hinted_tasks
def test_a_quarter_of_the_traces_follow_the_beginning_of_a_solution(name):
    contexts, _, (right, counts) = shown(name)
    width = right.shape[1] + 1
    np.testing.assert_array_equal(contexts.tokens[:, width:], prompts(name).tokens)
    block, mask = contexts.tokens[:, :width], contexts.mask[:, :width]
    there = mask.any(-1)
    assert (mask == there[:, None]).all()
    agrees(there.mean(), np.full(len(there), 0.25))
    sign, blank = HINTS[name]
    assert (block[there, 0] == sign).all()
    number = (block[:, 1:] != blank).sum(-1)
    for own, count, row, whole in zip(
        block[there, 1:], number[there], right[there], counts[there], strict=True
    ):
        assert 1 <= count <= whole.sum()
        np.testing.assert_array_equal(own[:count], row[:count])
    most = counts[there].sum(-1)
    agrees((number[there] == most).mean(), 1 / most)  # uniform on 1 .. all


def test_behind_a_hint_a_chain_is_finished_by_asking_for_what_is_left():
    contexts, (tokens, mask), (right, counts) = shown("calculator")
    given = (contexts.tokens[:, 1:4] != calculator.BLANK).sum(-1)
    given = np.where(contexts.mask[:, 0], given, 0)
    length = counts.sum(-1)
    assert ((tokens == calculator.END).sum(-1) == length - given + 1).all()
    last = np.take_along_axis(right, length[:, None] - 1, 1)[:, 0]
    for row, own, value in zip(tokens, mask, last, strict=True):
        said = row[own].tolist()
        assert said[-3:] == [calculator.IS, value, calculator.END]


def test_behind_a_hint_all_guesses_agree_with_what_is_known():
    contexts, (tokens, _), _ = shown("mastermind")
    there = contexts.mask[:, 0]
    fits = np.take_along_axis(prompts("mastermind").target, tokens[:, :1], 1)[:, 0]
    assert fits[there].all()
    chance = prompts("mastermind").target.mean(-1)[~there]  # any code, of all
    agrees(fits[~there].mean(), chance)


def test_the_last_value_of_a_chain_gives_it_away_and_codes_that_are_left_do_not():
    for name, gives_away in (("calculator", True), ("mastermind", False)):
        hinting, asked = GIVEN[name].hinting, prompts(name)
        right, counts = shown(name)[2]
        but_last = np.cumsum(counts, -1) < counts.sum(-1, keepdims=True)
        every = np.stack([counts, but_last & counts], 1)
        leaks = hinting.leaks(asked, np.repeat(right[:, None], 2, 1), every)
        assert (leaks[:, 0] == gives_away).all()
        assert not leaks[:, 1].any()
