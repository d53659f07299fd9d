"""Word problems: what they say is what they ask, and a run on them from nothing."""

import itertools
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_folder import lines

from curax import hint, rollout, train
from curax.commands import demo, export
from curax.evaluate import __main__ as evaluate
from curax.models import pretrained
from curax.runs import policies
from curax.settings.config_types import present
from curax.tasks import byte_pairs, text
from curax.tasks import tokenizer_backends as backends
from curax.tasks import word_problems as wp
from curax.types import Contexts, DrawRows
from curax.verify import graders

seeds = st.integers(0, 2**32)
steps = st.integers(1, wp.MOST_STEPS)
unseen = st.sampled_from([None, "forms", "numbers"])
SMALL = """
    model.width=32 model.layers=1 model.heads=2 model.kv_heads=1 model.head_dim=16
    model.mlp_width=32 task.size=64 task.num_held_out=16 task.workers=1
    warm_start.steps=2 warm_start.rows=8 sampling.prompts=2 sampling.group_size=4
    evaluation.every=2 evaluation.prompts=4 evaluation.samples=2 evaluation.k=2
    logging.checkpoint_every=2 steps=2
"""
FILES = {"train": "train", "held_out": "test"}
ON_FILES = """
    task.layout=layouts.detect task.template={question} task.grader=graders.numbers
    task.workers=1 task.max_prompt_tokens=96 model.dtype=float32 sampling.max_tokens=4
    sampling.prompts=2 sampling.group_size=4 aggregate.length=4 steps=1
    evaluation.prompts=4 evaluation.samples=1
"""


def read(question):
    """The answer as a reader finds it, by the words of each sentence alone."""
    *said, asked = re.split(r"(?<=[.?]) ", question)
    (thing,) = re.findall(r"How many (\w+)", asked)
    now = 0
    for sentence in said:
        numbers = [*map(int, re.findall(r"\d+", sentence))]
        first = sentence.split()[0]
        if re.search("years old|minutes|pages", sentence):
            continue
        if re.search(r"equally", sentence):
            now //= numbers[0]
        elif len(numbers) == 2:
            now = numbers[0] * numbers[1]
        elif re.search(r"has \d+ ", sentence):
            now = numbers[0] if thing in sentence else now
        elif re.search(" has a box | there are |There are ", sentence):
            now = numbers[0]
        elif re.search(" loses | sells | of them ", sentence):
            now -= numbers[0]
        elif " gives " in sentence:
            now += -numbers[0] if first in ("She", "He") else numbers[0]
        else:
            assert re.search(" buys | finds ", sentence), sentence
            now += numbers[0]
    return now


@given(seeds, steps, unseen)
def test_the_answer_is_what_a_reader_of_the_text_finds(seed, count, kind):
    made = wp.problem(seed, steps=count, unseen=kind)
    assert made.answer() == read(made.question())


@given(seeds, steps, unseen)
def test_every_order_of_the_steps_is_a_right_solution(seed, count, kind):
    made = wp.problem(seed, steps=count, unseen=kind)
    orders = [*made.orders()]
    assert orders[0] == made.steps
    for order in orders:
        said = wp.solution(made.first, order)
        *lines, last = said.split("\n")
        assert last == f"#### {made.answer()}"
        assert len(lines) == count
        for line in lines:
            left, right = line.replace("/", "//").split(" = ")
            assert eval(left) == int(right) >= 0
        assert graders.numbers("", said, str(made.answer())) == 1


@given(seeds, steps, unseen)
def test_an_answer_in_words_is_graded_as_its_number(seed, count, kind):
    made = wp.problem(seed, steps=count, unseen=kind)
    plain, spoken = (
        wp.taught(made, seed, sentences=sentences) for sentences in (False, True)
    )
    *lines, last = plain.split("\n")
    assert spoken.split("\n")[:-1] == lines
    assert spoken.split("\n")[-1] == f"So {made.sentence(int(last[5:]))}"
    for number in (made.answer(), made.answer() + 1):
        said = f"3 + 4 = 7\nSo {made.sentence(number)}"
        right = graders.numbers("", said, str(made.answer()))
        assert right == (number == made.answer())


@given(seeds, steps, unseen)
def test_hints_name_the_first_steps_and_none_of_their_results(seed, count, kind):
    made = wp.problem(seed, steps=count, unseen=kind)
    hints = made.hints()
    signs = {word: sign for sign, word in wp.ADVICE.items()}
    for level, words in enumerate(hints, 1):
        first, *said = words.removesuffix(".").split(". ")
        named = [one.rsplit(" ", 1) for one in said]
        steps = [(signs[verb], int(number)) for verb, number in named]
        assert first == f"Begin with {made.first}"
        assert steps == [(s.sign, s.number) for s in made.steps[: len(steps)]]
        assert len(steps) == made.named(level) >= 1
    assert all(b.startswith(a) for a, b in itertools.pairwise(hints))
    assert made.named(len(hints)) == count


@given(seeds, steps, st.integers(0, wp.LEVELS))
def test_the_teacher_takes_no_step_wrongly_that_a_hint_names(seed, count, level):
    made = wp.problem(seed, steps=count)
    *lines, _ = wp.taught(made, seed, level=level).split("\n")
    named = made.named(level)
    assert (named == 0) == (level == 0)
    assert len(lines) >= named
    for line, step in zip(lines[:named], made.steps, strict=False):
        left, sign, right, *_ = line.split(" ")
        assert sign == step.sign
        assert str(step.number) == (left if sign == "*" else right)
    if named == count:
        assert len(lines) == count


def test_some_problems_have_solutions_of_several_kinds():
    made = [wp.problem(seed, steps=3) for seed in range(100)]
    assert sum(len([*one.orders()]) > 1 for one in made) > 50


@given(seeds, steps, unseen)
def test_what_is_held_out_is_never_in_a_training_problem(seed, count, kind):
    made = wp.problem(seed, steps=count, unseen=kind)
    numbers = map(int, re.findall(r"\d+", made.question()))
    assert any(map(wp.is_unseen, numbers)) == (kind == "numbers")
    own = [step.form for step in [*made.steps, *filter(None, [made.aside])]]
    forms = [made.begins, *own, made.asks]
    assert {form.held_out for form in forms} == {kind == "forms"}


@given(seeds, steps)
def test_a_problem_and_its_solution_are_functions_of_their_seeds(seed, count):
    made = wp.problem(seed, steps=count)
    assert made == wp.problem(seed, steps=count)
    assert wp.taught(made, seed) == wp.taught(made, seed)


def test_seeds_and_options_make_other_problems():
    rows = [*wp.records(200)]
    assert rows == [*wp.records(200)]
    assert len({row["question"] for row in rows}) > 195
    assert {row["level"] for row in rows} == {"1", "2", "3"}
    assert rows[10:20] == [*wp.records(10, seed=10)]
    plain = wp.records(100, distractors=0.0)
    shown = [len(re.findall(r"\d+", r["question"])) - int(r["level"]) for r in plain]
    assert {*shown} == {1}
    always = wp.records(100, distractors=1.0, least_steps=2, most_steps=2)
    assert all(len(re.findall(r"\d+", r["question"])) == 4 for r in always)


@cache
def rates(count):
    """How often the teacher is right, 48 times for each of 250 problems."""
    found = []
    for seed in range(250):
        made = wp.problem(seed, steps=count)
        right = f"#### {made.answer()}"
        told = [wp.taught(made, 1000 * seed + i) for i in range(48)]
        found.append(np.mean([one.endswith(right) for one in told]))
    return np.array(found)


@pytest.mark.long
def test_the_teacher_is_right_the_less_often_the_more_steps_there_are():
    means = [rates(count).mean() for count in (1, 2, 3)]
    assert means[0] > means[1] + 0.1 > means[2] + 0.15
    assert 0.25 < np.mean(means) < 0.4


def test_pass_rates_of_the_teacher_spread():
    every = np.concatenate([rates(count) for count in (1, 2, 3)])
    assert every.std() > 0.2
    assert 0.02 < np.mean(every == 0) < 0.2
    assert np.mean(1 - (1 - every) ** 16) > 0.7


@pytest.mark.parametrize("form", [*wp.GAIN, *wp.LOSS], ids=lambda form: form.text)
def test_the_teacher_reads_a_sentence_wrongly_as_often_as_it_says(form):
    """Of one step without a digit carried: then it slips, or takes the other sign."""
    sign = "+" if form in wp.GAIN else "-"
    step = wp.Step(sign, 3, form)
    made = wp.WordProblem(
        begins=wp.START[0],
        first=15,
        steps=(step,),
        aside=None,
        place=0,
        asks=wp.IN_ALL[0],
        words={},
    )
    told = [wp.taught(made, i) for i in range(2000)]
    wrong = np.mean([not one.startswith(f"15 {sign} 3") for one in told])
    assert abs(wrong - form.misread) < 0.04
    same = [one for one in told if one.startswith(f"15 {sign} 3")]
    slips = np.mean([not one.endswith(f"#### {made.answer()}") for one in same])
    rate = wp.CARRY_SLIP if wp.carries(15, step) else wp.SLIP
    assert abs(slips - rate) < 6 * np.sqrt(rate / max(len(same), 1))


@pytest.mark.parametrize("pieces", [False, True])
def test_the_tokenizer_is_the_same_each_time_and_keeps_texts(pieces, tmp_path):
    own = wp.own_tokenizer(pieces=pieces)
    again = text.load(own.path)
    assert again.size == own.size <= wp.VOCABULARY
    learnt = [f"{r['question']}\n{r['taught']}" for r in wp.records(50)]
    make = byte_pairs.pieces if pieces else partial(byte_pairs.tokenizer, digits=True)
    for name in ("one", "other"):
        make(tmp_path / name, learnt, vocab_size=320)
    files = [
        [(file.name, file.read_bytes()) for file in sorted((tmp_path / name).iterdir())]
        for name in ("one", "other")
    ]
    assert files[0] == files[1]
    for record in wp.records(50, seed=10**6, unseen="forms"):
        said = f"{record['question']}\n{record['taught']}"
        ids = own.encode(said)
        assert own.decode(ids) == said
        digits = [i for i in ids if any(map(str.isdigit, own.decode([i])))]
        assert len(digits) == sum(map(str.isdigit, said))


@cache
def both():
    """The tokenizer.model of word problems, and the tokenizer.json made from it."""
    folder = wp.own_tokenizer(pieces=True).path
    config = backends.json_of(folder / "tokenizer_config.json")
    own = backends.SentencePieceBackend(folder / "tokenizer.model", config)
    return own, backends.TokenizersBackend(folder / "tokenizer.json")


@given(st.text([*"#=▁ \n\tabHow1234é漢😀<|_>"]), seeds, unseen)
def test_both_files_of_sentencepiece_give_the_same_ids(other, seed, unseen):
    own, made = both()
    assert made.ids == own.ids
    assert made.control == own.control
    (record,) = wp.records(1, seed=seed, unseen=unseen)
    for said in (other, record["question"], f"{record['taught']}<|im_end|>\n"):
        ids = own.encode(said)
        assert made.encode(said) == ids
        assert made.decode(ids) == own.decode(ids) == said.replace("▁", " ")


@pytest.fixture(scope="module")
def task():
    return wp.task(size=300, num_held_out=50, workers=1)


def test_a_task_grades_as_files_do_and_imitates_the_teacher(task):
    """No question is on both sides; the teacher's solutions are mostly wrong."""
    assert task.num_held_out == 50
    assert 290 < task.num_prompts <= 300
    ids = np.arange(task.num_prompts, dtype=np.int32)
    prompts = task.prompts(ids)
    tokens, mask = present(task.traces)(None, prompts)
    rows = [row[kept] for row, kept in zip(tokens, mask, strict=True)]
    assert all(row[-1] in task.end for row in rows if len(row))
    outcomes = present(task.verify_all)([*prompts.target], rows)
    assert 0.2 < np.mean(outcomes) < 0.5
    shown = {task.decode(row) for row in np.where(prompts.mask, prompts.tokens, 0)}
    held = task.held_out(np.arange(50, dtype=np.int32))
    assert not shown & {task.decode(r) for r in np.where(held.mask, held.tokens, 0)}


def test_references_are_answers_in_words_behind_the_end_of_a_thought():
    task = wp.task(size=60, num_held_out=10, workers=1, sentences=True)
    prompts = task.prompts(np.arange(20, dtype=np.int32))
    tokens, mask = present(task.reference)(prompts)
    said = [task.decode(row[kept]) for row, kept in zip(tokens, mask, strict=True)]
    verify = present(task.verify_all)
    rows = [row[kept] for row, kept in zip(tokens, mask, strict=True)]
    assert {*verify([*prompts.target], rows)} == {1.0}
    traces, there = present(task.traces)(None, prompts)
    ends = task.delimiter
    for answer, row, kept in zip(said, traces, there, strict=True):
        assert re.fullmatch(r" (there are|[A-Z]\w+ has) \d+ \w+( in each)?\..*", answer)
        own = row[kept].tolist()
        at = [i for i in range(len(own)) if tuple(own[i : i + len(ends)]) == ends]
        assert len(at) == 1
        thought, behind = own[: at[0]], own[at[0] + len(ends) :]
        assert "=" in task.decode(thought)
        assert re.sub(r"\d+", "", task.decode(behind)) == re.sub(r"\d+", "", answer)


def test_traces_follow_the_hints_that_the_teacher_has_read():
    """In contexts as RL makes them of the hints of the records; others have none."""
    one = {"size": 60, "num_held_out": 10, "workers": 1, "hints": True}
    task = wp.task(**one, hinted_traces=0.5)
    assert wp.task(**one).trace_contexts is None
    prompts = task.prompts(np.arange(task.num_prompts, dtype=np.int32))
    found = present(task.trace_contexts)(None, prompts)
    written = present(present(task.hinting).from_file)(prompts)
    by_level = [
        hint.joined(prompts, *present(task.hinting).wrap(*(x[:, i] for x in written)))
        for i in range(wp.LEVELS)
    ]
    plain = hint.widened(prompts, found.mask.shape[-1] - prompts.mask.shape[-1])
    kinds = [plain, *by_level]
    same = np.array([np.all(np.asarray(x.tokens) == found.tokens, -1) for x in kinds])
    for which, kind in zip(same, kinds, strict=True):
        np.testing.assert_array_equal(np.asarray(kind.mask)[which], found.mask[which])
    assert same.any(0).all()
    assert 0.3 < same[0].mean() < 0.7
    records = wp.records(60, hinted=0.5)
    read = {record["question"]: record.get("read") for record in records}
    for row, kept, bare in zip(found.tokens, found.mask, same[0], strict=True):
        said = task.decode(row[kept])
        (question,) = [question for question in read if question in said]
        assert bare == (read[question] is None)
        assert bare or f"{question}\n\nHint:\n{read[question]}<|im_end|>" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hints": True, "sentences": True}, "set one of them to False"),
        ({"hinted_traces": 0.5}, "=0.5 needs task.hints=True; set that too"),
        ({"most_steps": 4}, "task.most_steps=4 must be at least task.least_steps=1 "),
        ({"least_steps": 3, "most_steps": 2}, "most_steps=2 must be at least .*=3 and"),
        ({"pieces": True, "tokenizer": "there"}, "pieces=True .* there has its own"),
        ({"unseen": "words"}, "unseen='words' must be one of problems, forms, numbers"),
    ],
)
def test_a_wrong_option_is_told_in_a_sentence(options, said):
    with pytest.raises(ValueError, match=said):
        wp.task(**options)


def test_all_problems_may_have_the_most_steps():
    rows = wp.records(20, least_steps=wp.MOST_STEPS)
    assert {row["level"] for row in rows} == {str(wp.MOST_STEPS)}
    wp.task(size=64, num_held_out=8, least_steps=wp.MOST_STEPS)


def greedy(model, params, task):
    """The likeliest tokens for some held-out prompts."""
    prompts, count = task.held_out(np.arange(4)), jnp.arange(4, dtype=jnp.int32)
    how = rollout.Settings(max_tokens=8, end=task.end, pad=task.pad, temperature=0)
    contexts = Contexts(
        tokens=jnp.asarray(prompts.tokens), mask=jnp.asarray(prompts.mask)
    )
    asked = DrawRows(prompt=count, member=count * 0, context=count, exists=count >= 0)
    draw = jax.jit(partial(rollout.sample, model, how=how))
    return np.asarray(draw(params, contexts, asked, jax.random.key(0)).tokens)


@pytest.fixture(scope="module", params=[False, True], ids=["bytes", "pieces"])
def trained(tmp_path_factory, request):
    """The run folder of the recipe, tiny, with its tokenizer, and its export."""
    place = tmp_path_factory.mktemp("text")
    run, out = place / "run", place / "out"
    words = ["text", "--workdir", str(run), "--set", *SMALL.split()]
    words.append(f"task.pieces={request.param}")
    assert train.main(words) == 0
    assert export.main([str(run), str(out)]) == 0
    return run, out, wp.own_tokenizer(pieces=request.param)


@pytest.mark.long
def test_the_recipe_trains_and_its_export_says_the_same(trained):
    run, out, taught = trained
    policy = policies.load_run(run, policies.run_config(run))
    own = present(policy.task)
    with policy.context():
        want = greedy(policy.model, policy.params, own)
    read = pretrained.model(path=str(out), dtype="float32")
    got = greedy(read, present(read.load)(None), own)
    np.testing.assert_array_equal(got, want)
    spoken = text.load(out)
    said = "Ann has 12 coins."
    assert spoken.encode(said) == taught.encode(said)
    assert spoken.template == taught.template
    held = {file.name for file in taught.path.iterdir() if file.is_file()}
    assert held <= {file.name for file in out.iterdir()}
    assert (run / "report.html").exists()


@pytest.mark.long
def test_a_run_and_its_export_are_evaluated_and_trained_on_files(trained, tmp_path):
    run, out, _ = trained
    assert demo.main([str(tmp_path / "files"), "--text"]) == 0
    file = str(tmp_path / "files" / "numbers.jsonl")
    words = ["--n", "2", "--k", "1", "--limit", "4", "--max-tokens", "4"]
    for name, more in {
        str(run): [],
        str(out): ["--data", file, "--grader", "curax.verify.graders:numbers"],
    }.items():
        place = tmp_path / f"evaluated{len(more)}"
        told = ["--model", name, *words, *more, "--out", str(place)]
        assert evaluate.main(told) == 0
        assert (place / "results.json").exists()
    files = [f"task.{k}={tmp_path}/files/{v}.jsonl" for k, v in FILES.items()]
    told = [*ON_FILES.split(), *files, f"model.path={out}"]
    place = ["--workdir", str(tmp_path / "run")]
    assert train.main(["gsm8k_qwen3_0p6b", *place, "--set", *told]) == 0


def test_files_of_word_problems_hold_what_training_never_has(tmp_path):
    assert demo.main([str(tmp_path / "files"), "--text"]) == 0
    asked = {
        name: {row["question"] for row in lines(tmp_path / "files" / f"{name}.jsonl")}
        for name in demo.TEXT
    }
    assert sum(map(len, asked.values())) == len(set().union(*asked.values()))

    def numbers(name):
        return {int(n) for q in asked[name] for n in re.findall(r"\d+", q)}

    assert not any(map(wp.is_unseen, numbers("train") | numbers("forms")))
    assert any(map(wp.is_unseen, numbers("numbers")))
    new = {n for n in wp.START + wp.IN_ALL if n.held_out}
    shapes = [
        re.sub(
            r"{\w+}", r"\\w+", re.escape(f.text).replace("\\{", "{").replace("\\}", "}")
        )
        for f in new
    ]
    assert not any(re.search(shape, q) for shape in shapes for q in asked["train"])
    assert any(re.search(shape, q) for shape in shapes for q in asked["forms"])
