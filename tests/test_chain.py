"""Chains: the two sides, naive arithmetic, the teacher, hints, the verifier."""

import dataclasses
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curax.step import sft
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


@pytest.mark.long
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


# ----- hints

HINTED = chain.task(hints=True, hinted_traces=0.3, asked_traces=0.2)
HINTING = HINTED.hinting
wrap, leaks, read = map(jax.jit, (HINTING.wrap, HINTING.leaks, HINTING.parse))
BLOCK = DEPTH + 1


def lengths():
    return np.sum(np.asarray(some().target) < chain.MODULUS, -1)


@cache
def shown():
    """Contexts of traces, the traces under them, and those without any hint."""
    key = jax.random.key(5)
    contexts = jax.jit(HINTED.trace_contexts)(key, some())
    with_hints = jax.jit(HINTED.traces)(key, some())
    return jax.device_get((contexts, with_hints, jax.jit(TASK.traces)(key, some())))


def blocks():
    """Sign of each context's block, 0 without one, and how many values it gives."""
    contexts = shown()[0]
    block, there = contexts.tokens[:, :BLOCK], contexts.mask[:, :BLOCK]
    sign = np.where(there[:, 0], block[:, 0], 0)
    return sign, np.sum(there & (block < chain.MODULUS), -1)


@pytest.mark.long
def test_hints_written_beforehand_are_as_right_as_who_wrote_them_and_stay_so():
    with_file = partial(chain.task, hints=True)
    by = {chance: with_file(hint_errors=(chance,) * 3) for chance in (0.0, 1.0)}
    assert HINTING.from_file is None
    filed = {chance: jax.jit(made.hinting.from_file) for chance, made in by.items()}
    tokens, mask = jax.device_get(filed[0.0](some()))
    want = jax.device_get(read(some(), *HINTING.solution(some())))
    np.testing.assert_array_equal(mask, want[1])
    np.testing.assert_array_equal(tokens[mask], want[0][mask])
    wrong, there = jax.device_get(filed[1.0](some()))
    np.testing.assert_array_equal(there, mask)
    assert (wrong[..., 0] != tokens[..., 0])[mask[..., 0]].all()
    # By the prompt's own id, wherever it stands in a batch.
    half = jax.jit(with_file(hint_errors=(0.5,) * 3).hinting.from_file)
    back = jax.tree.map(lambda leaf: leaf[::-1], some())
    one, other = half(some())[0], half(back)[0]
    np.testing.assert_array_equal(one, other[::-1])


def test_a_task_has_no_hints_unless_it_is_asked_for_them():
    assert TASK.hinting is None
    assert TASK.trace_contexts is None
    assert TASK.vocab_size == 23
    assert HINTED.vocab_size == len(chain.NAMES) == 25


def test_the_solution_is_the_target_without_its_end():
    tokens, mask = map(np.asarray, chain.solution(some()))
    np.testing.assert_array_equal(mask.sum(-1), lengths())
    for said, counts, target in zip(tokens, mask, some().target, strict=True):
        n = counts.sum()
        assert counts[:n].all()
        assert (said[n:] == chain.PAD).all()
        np.testing.assert_array_equal([*said[:n], chain.END], target[: n + 1])


@pytest.mark.parametrize("width", [2, DEPTH, DEPTH + 2])
def test_a_block_is_a_sign_values_and_blanks(width):
    tokens, mask = row([10, 1], width)
    block, there = wrap(tokens[:, None], mask[:, None])
    want = [chain.HINT, 10, 1, *[chain.BLANK] * (DEPTH - 2)]
    np.testing.assert_array_equal(block, [[want]])
    assert there.all()
    assert not wrap(tokens[:, None], ~mask[:, None] & mask[:, None])[1].any()


@given(st.integers(0, 3999), st.lists(st.integers(0, 15), max_size=7), st.booleans())
def test_a_hint_leaks_iff_it_says_the_last_value_at_its_place(n, said, copies):
    one = jax.tree.map(lambda leaf: leaf[n : n + 1], some())
    solution = one.target[0][: lengths()[n]].tolist()
    said = (solution + said)[: len(said)] if copies else said
    tokens, mask = row(said, 7)
    tokens = np.where(mask, tokens, solution[-1])  # what is masked says nothing
    got = leaks(one, tokens[:, None], mask[:, None])
    last = len(solution) - 1
    assert got.shape == (1, 1)
    assert bool(got[0, 0]) == (len(said) > last and said[last] == solution[-1])


@given(st.lists(st.integers(0, 24), max_size=8))
def test_levels_are_shares_of_the_values_written_first(said):
    tokens, mask = row(said, 8)
    got, counts = map(np.asarray, read(None, tokens, mask))
    stop = [i for i, token in enumerate(said) if token >= chain.MODULUS]
    values = said[: stop[0]] if stop else said
    assert got.shape == counts.shape == (1, 3, 8)
    for level in (1, 2, 3):
        want = values[: round(level / 4 * len(values))]
        assert got[0, level - 1][counts[0, level - 1]].tolist() == want
        assert counts[0, level - 1][: len(want)].all()


def test_read_asks_for_any_number_of_levels():
    tokens, mask = row([1, 2, 3, 4, 5, 6], 6)
    got = chain.read(some(), tokens, mask, levels=2)[1]
    np.testing.assert_array_equal(np.sum(got, -1), [[2, 4]])


def test_who_is_asked_for_a_hint_sees_the_solution_as_a_block():
    asked = jax.device_get(HINTING.writing_contexts(some()))
    assert asked.mask.all()
    np.testing.assert_array_equal(asked.tokens[:, BLOCK:], some().tokens)
    for block, target, n in zip(asked.tokens, some().target, lengths(), strict=True):
        want = [chain.ASK, *target[:n], *[chain.BLANK] * (DEPTH - n)]
        np.testing.assert_array_equal(block[:BLOCK], want)


@pytest.mark.long
def test_traces_are_shown_with_hints_as_often_as_said():
    contexts, (sign, given) = shown()[0], blocks()
    np.testing.assert_array_equal(contexts.tokens[:, BLOCK:], some().tokens)
    np.testing.assert_array_equal(contexts.mask[:, BLOCK:], some().mask)
    for token, share in ((chain.HINT, 0.3), (chain.ASK, 0.2), (0, 0.5)):
        slack = 4 * np.sqrt(share * (1 - share) / len(sign))
        assert abs(np.mean(sign == token) - share) < slack
    # A block is whole or not there, and what it gives is the solution's head.
    there = contexts.mask[:, :BLOCK]
    np.testing.assert_array_equal(there, (sign != 0)[:, None] & np.ones_like(there))
    values = np.where(np.arange(DEPTH) < given[:, None], some().target[:, :-1], -1)
    blank = np.where(values < 0, chain.BLANK, values)
    hinted = sign != 0
    np.testing.assert_array_equal(contexts.tokens[:, 1:BLOCK][hinted], blank[hinted])
    assert (given[sign == chain.ASK] == lengths()[sign == chain.ASK]).all()
    whole = sign == chain.HINT
    assert (given[whole] >= 1).all()
    for n in range(1, DEPTH + 1):
        drawn = given[whole & (lengths() == n)]
        slack = 4 * np.sqrt(1 / n / len(drawn))
        for k in range(1, n + 1):
            assert abs(np.mean(drawn == k) - 1 / n) < slack


def test_the_teacher_follows_a_hint_and_goes_on_with_the_errors_it_would_have_made():
    (tokens, mask), (plain, _) = shown()[1:]
    right, (sign, given) = some().target, blocks()
    np.testing.assert_array_equal(mask, tokens != chain.PAD)
    np.testing.assert_array_equal(tokens[sign == 0], plain[sign == 0])
    np.testing.assert_array_equal(tokens[sign == chain.ASK], right[sign == chain.ASK])
    erred = 0
    for i in np.flatnonzero(sign == chain.HINT)[:400]:
        value, pairs = parsed(chain.decode(some().tokens[i]))
        before = [value, *plain[i]]
        value = [value, *right[i]][given[i]]
        np.testing.assert_array_equal(tokens[i][: given[i]], right[i][: given[i]])
        for at in range(given[i], len(pairs)):
            operation, operand = pairs[at]
            clean = APPLY[operation](before[at], operand)
            off = (plain[i][at] - clean) % 16
            value = (APPLY[operation](value, operand) + off) % 16
            assert tokens[i][at] == value
            erred += off
    assert erred > 50


@pytest.mark.parametrize("given", [False, True])
def test_the_warm_start_imitates_traces_in_the_contexts_they_were_written_in(given):
    def shown(key, prompts):
        return "shown", key, prompts.id

    made = dataclasses.replace(
        TASK,
        prompts=lambda ids: jax.tree.map(lambda leaf: leaf[ids], some()),
        trace_contexts=shown if given else None,
        traces=lambda key, prompts: (key, prompts.id),
    )
    parts, ids = SimpleNamespace(task=made), np.arange(3)
    contexts, *written = sft.next_traces(parts, jnp.uint32(3), jnp.int32(4), ids)
    if given:
        assert contexts[0] == "shown"
        assert contexts[1] == written[0]
        np.testing.assert_array_equal(contexts[2], written[1])
    else:
        np.testing.assert_array_equal(contexts.tokens, some().tokens[:3])
        np.testing.assert_array_equal(contexts.mask, some().mask[:3])


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


def test_a_hint_reads_as_in_the_documentation():
    plus, minus, reverse = words("+ - rsub")
    blanks = [chain.BLANK] * 3
    prompt = [7, plus, minus, reverse, *blanks, 3, 9, 2, *blanks, chain.GO]
    tokens, mask = row([10, 1], 2)
    block = wrap(tokens, mask)[0][0]
    text = "hint: 10 1 | 7 + 3 - 9 rsub 2 ="
    assert chain.decode([*block, *prompt]) == text
    assert chain.decode([chain.ASK, *block[1:], *prompt]) == text.replace("hint", "ask")


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
    names = [name for name in chain.NAMES if name]
    assert len(set(names)) == len(names) == 23
    assert len(chain.NAMES) == HINTED.vocab_size
