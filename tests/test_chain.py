"""Chains: the two sides, targets by naive arithmetic, the teacher, the verifier."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curax.tasks import chain

DEPTH = 6
TASK = chain.task()
training, held_out = jax.jit(TASK.prompts), jax.jit(TASK.held_out)
APPLY = {
    "+": lambda value, operand: (value + operand) % 16,
    "-": lambda value, operand: (value - operand) % 16,
    "rsub": lambda value, operand: (operand - value) % 16,
}
WIDTH = 2 * DEPTH + 2
ERRORS = TASK.traces.keywords["errors"]


SIDES = {training: TASK.num_prompts, held_out: TASK.num_held_out}


@cache
def every(side):
    return jax.device_get(side(jnp.arange(SIDES[side], dtype=jnp.int32)))


@cache
def some():
    """Some training prompts, for what is slow in Python."""
    return jax.tree.map(lambda leaf: leaf[:4000], every(training))


def parsed(text):
    """First value and `(operation, operand)` pairs of "7 + 3 - 9 ="."""
    first, *rest, go = text.split()
    assert go == "="
    return int(first), list(zip(rest[::2], map(int, rest[1::2]), strict=True))


def words(text):
    return [chain.NAMES.index(word) for word in text.split()]


def questions(prompts):
    return set(map(bytes, np.asarray(prompts.tokens, np.uint8)))


# ----- prompts


def test_no_question_is_on_both_sides():
    train, held = (questions(every(side)) for side in SIDES)
    assert not train & held
    # Only short questions repeat: there are few of them.
    assert len(train) > 0.75 * TASK.num_prompts
    assert len(held) > 0.75 * TASK.num_held_out


def test_the_two_sides_share_out_all_questions_of_depth_one():
    get = jax.jit(partial(chain.prompts, depth=1), static_argnames="held_out")
    ids = jnp.arange(8000, dtype=jnp.int32)
    train, held = (questions(get(ids, held_out=side)) for side in (False, True))
    assert not train & held
    # 16 values, 3 operations, 8 operands; two of 16 values are held out.
    assert len(held) == 2 * 3 * 8
    assert len(train) == 14 * 3 * 8


def test_every_length_operation_operand_and_value_occurs_about_equally_often():
    values, lengths, operations, operands = [], [], [], []
    for tokens in some().tokens:
        value, pairs = parsed(chain.decode(tokens))
        values.append(value)
        lengths.append(len(pairs))
        operations += [name for name, _ in pairs]
        operands += [operand for _, operand in pairs]
    for drawn, possible in [
        (values, range(16)),
        (lengths, range(1, DEPTH + 1)),
        (operations, chain.OPERATIONS),
        (operands, range(2, 10)),
    ]:
        share = 1 / len(possible)
        slack = 4 * np.sqrt(share * (1 - share) / len(drawn))
        assert set(drawn) == set(possible)
        for one in possible:
            assert abs(drawn.count(one) / len(drawn) - share) < slack


@pytest.mark.parametrize("side", SIDES)
def test_a_prompt_is_a_pure_function_of_its_id(side):
    np.testing.assert_array_equal(every(side).id, np.arange(SIDES[side]))
    assert every(side).mask.all()
    assert every(side).tokens.shape == (SIDES[side], WIDTH)
    ids = np.random.default_rng(0).integers(0, SIDES[side], SIDES[side])
    want = jax.tree.map(lambda leaf: leaf[ids], every(side))
    got = side(ids.astype(np.int32))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_targets_are_naive_arithmetic_on_the_text_of_the_prompt():
    for tokens, target in zip(some().tokens[:1000], some().target[:1000], strict=True):
        value, pairs = parsed(chain.decode(tokens))
        want = []
        for operation, operand in pairs:
            value = APPLY[operation](value, operand)
            want.append(str(value))
        assert chain.decode(target) == " ".join([*want, "end"])


# ----- the teacher


traces = jax.jit(chain.traces)


def traced(*errors):
    got = traces(jax.random.key(0), some(), errors=np.float32(errors))
    return jax.device_get(got)


@cache
def taught():
    """`(operation, by how much it is off)` of every step of many traces."""
    prompts, (tokens, mask) = some(), traced(*ERRORS)
    steps = []
    for prompt, said, counts in zip(prompts.tokens, tokens, mask, strict=True):
        value, pairs = parsed(chain.decode(prompt))
        *wrote, end = said[counts]
        assert end == chain.END
        assert (said[~counts] == chain.PAD).all()
        # The chain goes on from what was written, right or wrong.
        for (operation, operand), result in zip(pairs, wrote, strict=True):
            off = (result - APPLY[operation](value, operand)) % 16
            steps.append((operation, off))
            value = result
    return steps


def test_the_teacher_is_off_by_one_as_often_as_said_and_goes_on_from_there():
    assert ERRORS == (0.05, 0.40, 0.85)
    assert {off for _, off in taught()} == {0, 1}
    chances = zip(chain.OPERATIONS, ERRORS, strict=True)
    for operation, chance in chances:
        offs = [off for name, off in taught() if name == operation]
        slack = 4 * np.sqrt(chance * (1 - chance) / len(offs))
        assert len(offs) > 3000
        assert abs(np.mean(offs) - chance) < slack


def test_a_teacher_without_errors_writes_the_targets():
    tokens, mask = traced(0, 0, 0)
    np.testing.assert_array_equal(tokens, some().target)
    np.testing.assert_array_equal(mask, some().target != chain.PAD)


# ----- the verifier

verify = jax.jit(chain.verify)
TARGET = "10 1 1 end"


def row(said, width):
    """A completion as the sampler leaves it: `[1, width]` tokens, mask."""
    tokens = np.full((1, width), chain.PAD, np.int32)
    tokens[0, : len(said)] = said
    return tokens, np.arange(width)[None] < len(said)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("10 1 1 end", True),
        ("10 1 1", False),  # cut off
        ("10 1 end", False),  # too short
        ("10 1 1 1 end", False),  # too long
        ("10 1 1 1 1 1", False),
        ("10 2 1 end", False),  # only the last value is right
        ("10 1 2 end", False),
        ("end", False),
        ("= 10 1 1 end", False),
    ],
)
def test_a_completion_is_right_only_as_a_whole(text, right):
    target = row(words(TARGET), DEPTH + 1)[0]
    for width in (6, DEPTH + 1, DEPTH + 4):
        tokens, mask = row(words(text), width)
        assert bool(verify(target, tokens, mask)[0]) == right
    # What stands behind the end is masked, and does not matter.
    junk = np.where(mask, tokens, np.int32(3))
    assert bool(verify(target, junk, mask)[0]) == right
    assert chain.verify_one(target[0], np.array(words(text))) == right


spoilt = st.one_of(
    st.just([]),
    st.lists(st.integers(0, 22).filter(lambda t: t != chain.END), max_size=8),
)


@given(st.integers(0, 3999), st.integers(0, DEPTH), spoilt, st.booleans())
def test_both_verifiers_agree(n, kept, then, ends):
    target = some().target[n]
    said = [*target[: np.argmax(target == chain.END)][:kept].tolist(), *then]
    said = (said + [chain.END] * ends)[:12]
    tokens, mask = row(said, 12)
    got = verify(target[None], tokens, mask)
    assert got.shape == (1,)
    assert got.dtype == jnp.float32
    assert float(got[0]) == chain.verify_one(target, tokens[0][mask[0]])


def test_the_host_task_differs_by_its_verifier_alone():
    host = chain.task(on_device=False)
    assert not host.on_device
    assert host.verify is chain.verify_one
    assert TASK.verify is chain.verify
    assert (host.pad, host.end, host.vocab_size) == (chain.PAD, (chain.END,), 23)


# ----- text


def test_text_reads_as_in_the_documentation():
    plus, minus, reverse = words("+ - rsub")
    blanks = [chain.BLANK] * 3
    prompt = [7, plus, minus, reverse, *blanks, 3, 9, 2, *blanks, chain.GO]
    assert chain.decode(prompt) == "7 + 3 - 9 rsub 2 ="
    tokens = np.int32([prompt])[0]
    target = chain.run(jnp.asarray(tokens), jnp.zeros(DEPTH, bool))
    assert chain.decode(target) == TARGET


@given(st.lists(st.sampled_from([*range(19), chain.END, chain.GO]), max_size=9))
def test_the_text_of_a_completion_is_its_tokens_in_order(tokens):
    tokens = [*tokens, chain.END]
    assert words(chain.decode(np.array(tokens))) == tokens


def test_prompts_come_back_from_their_text():
    for tokens in some().tokens[:200]:
        value, pairs = parsed(chain.decode(tokens))
        blanks = [chain.BLANK] * (DEPTH - len(pairs))
        names, operands = zip(*pairs, strict=True)
        operators = [chain.NAMES.index(name) for name in names]
        got = [value, *operators, *blanks, *operands, *blanks, chain.GO]
        np.testing.assert_array_equal(got, tokens)


def test_names_are_unique_but_for_what_vanishes():
    shown = [name for name in chain.NAMES if name]
    assert len(set(shown)) == len(shown) == 21
    assert len(chain.NAMES) == TASK.vocab_size
