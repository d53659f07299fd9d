"""Chains with an answer in words: traces and references word by word, the verifier."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curax.tasks import chain, rationale

DEPTH, WORDS, FOLLOW = 3, 5, 0.7
TASK = rationale.task(depth=DEPTH, words=WORDS, follow=FOLLOW)
B = 2000


@cache
def some():
    """Training prompts with what is written for them: traces, then references."""
    prompts = jax.jit(TASK.prompts)(jnp.arange(B, dtype=jnp.int32))
    written = jax.jit(TASK.traces)(jax.random.key(0), prompts)
    return jax.device_get((prompts, written, jax.jit(TASK.reference)(prompts)))


def said(text):
    return [rationale.NAMES.index(word) for word in text.split()]


def parted(answer):
    """Styles of the words of an answer, and its value; the layout is checked."""
    *spoken, end = answer
    value = spoken.pop(3)  # of five words three stand before it
    assert end == chain.END
    assert len(spoken) == WORDS
    styles = [token - rationale.WORD for token in spoken]
    assert all(0 <= style < 4 for style in styles)
    return styles, value


def is_about(share, count, among):
    slack = 4 * np.sqrt(share * (1 - share) / among)
    return abs(count / among - share) < slack


def test_prompts_are_those_of_chains_and_the_target_is_the_last_value():
    for held_out, get in ((False, TASK.prompts), (True, TASK.held_out)):
        ids = jnp.arange(200, dtype=jnp.int32)
        of_chain = partial(chain.prompts, depth=DEPTH, held_out=held_out)
        got, want = jax.device_get(jax.jit(lambda i: (get(i), of_chain(i)))(ids))  # noqa: B023
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_array_equal(got.id, want.id)
        values = [row[row < chain.MODULUS][-1] for row in want.target]
        np.testing.assert_array_equal(got.target, values)


@pytest.mark.long
def test_a_trace_thinks_as_the_teacher_of_chains_and_answers_what_it_ended_with():
    prompts, (tokens, mask), _ = some()
    k_errors = jax.random.split(jax.random.key(0), 3)[0]
    errors = TASK.traces.keywords["errors"]
    values, _ = jax.jit(partial(chain.traces, errors=errors))(k_errors, prompts)
    styles, follows, others = [], 0, []
    assert tokens.shape == (B, DEPTH + WORDS + 4)
    for row, counts, thought in zip(tokens, mask, np.asarray(values), strict=True):
        n = int(np.argmax(thought == chain.END))
        length = 1 + n + 1 + WORDS + 2
        assert (counts == (np.arange(len(counts)) < length)).all()
        assert (row[length:] == chain.PAD).all()
        style = row[0] - rationale.STYLE
        assert row[1 : n + 1].tolist() == thought[:n].tolist()
        assert row[n + 1] == rationale.THEN
        spoken, value = parted(row[n + 2 : length])
        assert value == thought[n - 1]
        styles.append(int(style))
        follows += sum(word == style for word in spoken)
        others += [int((word - style) % 4) for word in spoken if word != style]
    assert is_about(FOLLOW, follows, B * WORDS)
    assert all(is_about(1 / 4, styles.count(style), B) for style in range(4))
    assert all(is_about(1 / 3, others.count(shift), len(others)) for shift in (1, 2, 3))
    wrong = np.mean([r[r < 16][-1] for r in tokens] != prompts.target)
    assert 0.2 < wrong < 0.8  # the teacher's errors are in it


def test_a_reference_has_the_right_value_in_a_style_of_its_own():
    prompts, (tokens, _), (answers, mask) = some()
    assert answers.shape == (B, WORDS + 2)
    assert mask.all()
    styles, agree = [], 0
    for answer, target, trace in zip(answers, prompts.target, tokens, strict=True):
        spoken, value = parted(answer)
        assert value == target
        common = max(range(4), key=spoken.count)
        styles.append(common)
        agree += common == trace[0] - rationale.STYLE
    assert all(abs(styles.count(style) / B - 1 / 4) < 0.06 for style in range(4))
    # The trace's style says nothing of it, and most words have a style in common.
    assert is_about(1 / 4, agree, B)
    same = np.mean([max(map(parted(a)[0].count, range(4))) for a in answers]) / WORDS
    assert FOLLOW < same < 0.85


def test_a_reference_is_a_pure_function_of_the_prompt():
    prompts, _, (answers, _) = some()
    turned = jax.tree.map(lambda leaf: leaf[::-1].copy(), prompts)
    got, _ = jax.jit(TASK.reference)(turned)
    np.testing.assert_array_equal(got, answers[::-1])


# ----- the verifier

verify = jax.jit(TASK.verify)


def judged(tokens, target, width=12):
    row = np.full((1, width), 7, np.int32)  # what stands behind the end is junk
    row[0, : len(tokens)] = tokens
    got = verify(np.int32([target]), row, np.arange(width)[None] < len(tokens))
    assert got.dtype == jnp.float32
    return float(got[0])


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("kindly 10 1 1 then well so 1 well end", True),
        ("kindly 10 1 1 then 1 well", True),  # neither words nor the end count
        ("then 1 end", True),
        ("kindly 10 1 2 then well 1 end", True),  # nor does the thought
        ("kindly 10 1 1 then well 2 end", False),
        ("kindly 10 1 1 then well 1 so 2 end", False),  # says two things
        ("kindly 10 1 1 then well so end", False),
        ("kindly 10 1 1 well 1 end", False),  # never answers
        ("", False),
    ],
)
def test_an_answer_is_right_iff_it_states_the_right_value_alone(text, right):
    assert judged(said(text), 1) == right


@given(st.lists(st.sampled_from([1, 2, rationale.THEN, 27, 28]), max_size=7))
def test_the_verifier_is_its_definition(tokens):
    begun = rationale.THEN in tokens
    answer = tokens[tokens.index(rationale.THEN) :] if begun else []
    stated = {token for token in answer if token < chain.MODULUS}
    assert judged(tokens, 1) == (stated == {1})


def test_the_reference_itself_is_right():
    prompts, (tokens, mask), (answers, there) = some()
    then = np.full((B, 1), rationale.THEN, np.int32)
    got = verify(
        prompts.target,
        np.concatenate([then, answers], -1),
        np.concatenate([then > 0, there], -1),
    )
    assert np.asarray(got).all()
    last = [row[row < chain.MODULUS][-1] for row in tokens]
    np.testing.assert_array_equal(
        verify(prompts.target, tokens, mask), np.float32(last == prompts.target)
    )


# ----- text


def test_the_task_says_where_a_thought_ends():
    assert TASK.delimiter == (rationale.THEN,)
    assert TASK.vocab_size == len(rationale.NAMES) == 32
    assert TASK.end == (chain.END,)
    names = [name for name in rationale.NAMES if name]
    assert len(set(names)) == len(names) == 30


def test_text_reads_as_in_the_documentation():
    plus, minus, reverse = said("+ - rsub")
    prompt = [7, plus, minus, reverse, 3, 9, 2, chain.GO]
    assert TASK.decode(np.array(prompt)) == "7 + 3 - 9 rsub 2 ="
    text = "kindly 10 1 1 then well so well 1 well well end"
    assert TASK.decode([*said(text), chain.PAD]) == text
    assert parted(said(text)[5:])[1] == 1
    assert TASK.decode([]) == ""
