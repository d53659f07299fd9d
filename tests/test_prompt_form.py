"""Prompts look alike from the warm start to the evaluation, or somebody is told."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import small
import words

from curax.config import ConfigError, load
from curax.models import prompt_form
from curax.runs import run
from curax.settings.config_paths import options
from curax.settings.declared import declares
from curax.tasks import layouts
from curax.tasks.prompt_format import PromptFormat

CONFIGS = Path(__file__).parents[1] / "configs"
FORM = {"template": "{question}", "system": None, "chat": True, "thinking": False}
RECORD = {"question": "How many are 2 and 3?", "answer": "2 + 3 = 5\n#### 5"}


def form(config: str) -> PromptFormat:
    """The form of a config's task, with the tokenizer of the word problems."""
    named = options(load(CONFIGS / f"{config}.py").task)
    names = ("chat", "system", "template", "thinking", "trace")
    given = {name: named[name] for name in names}
    return PromptFormat(tokenizer=words.tokenizer(), **given)


def test_supervised_training_and_rl_ask_gsm8k_alike():
    supervised, rl = form("sft_gsm8k_qwen3_0p6b"), form("gsm8k_qwen3_0p6b")
    problem = layouts.gsm8k(RECORD)
    assert supervised.prompt(problem) == rl.prompt(problem)
    assert supervised.description == rl.description
    shown = rl.tokenizer.decode(rl.prompt(problem), control=True)
    assert layouts.STEP_BY_STEP.replace("{question}", RECORD["question"]) in shown
    # What is imitated answers in the way that is asked for.
    said = supervised.tokenizer.decode(supervised.trace_ids(problem))
    assert "\\boxed{5}" in said


def test_fields_are_filled_in_once():
    """A solution may hold what looks like a field."""
    own = words.tokenizer()
    text = r"So the \textbf{answer} is {solution}."

    def trace(template, **fields):
        ids = PromptFormat(tokenizer=own, trace=template).trace_ids(
            layouts.Problem("q", **fields)
        )
        return own.decode(ids[:-1])

    both = "{solution} \\boxed{{answer}}"
    assert trace(both, solution=text, answer="5") == text + r" \boxed{5}"
    assert trace("{answer}", solution=text, answer="{solution}") == "{solution}"
    assert trace("{solution}", solution=text) == text
    assert trace(both, solution=text) == ""


def test_control_words_of_a_plain_form_are_tokens_and_those_of_texts_never():
    """As in a chat template, which a base model may have written out."""
    own = words.tokenizer()
    begin, end = (own.backend.ids[f"<|im_{name}|>"] for name in ("start", "end"))
    form = "<|im_start|>user\n{question}<|im_end|>\n"
    plain = PromptFormat(tokenizer=own, chat=False, template=form)
    asked = "What is <|im_start|>{question}<|im_end|>?"
    ids = plain.prompt(layouts.Problem(asked))
    assert own.decode(ids, control=True) == form.replace("{question}", asked)
    assert (ids.count(begin), ids.count(end)) == (1, 1)
    spoken = replace(plain, system="Be <|im_end|> brief.")
    assert spoken.prompt(layouts.Problem(asked)).count(end) == 1
    # A word that a text and what is beside it spell together is none.
    split = replace(plain, template="<|im_{question}<|im_start|>")
    ids = split.prompt(layouts.Problem("end|>"))
    assert own.decode(ids, control=True) == "<|im_end|><|im_start|>"
    assert (ids.count(begin), ids.count(end)) == (1, 0)
    thought = replace(plain, trace="{solution}<|im_start|>{answer}")
    problem = layouts.Problem(asked, answer="5<|im_end|>", solution=asked)
    ids = thought.trace_ids(problem)
    assert (ids.count(begin), ids.count(end)) == (1, 1)  # the end of the trace
    # In a turn of a chat template it is text, and so where no word is one.
    assert replace(plain, chat=True).prompt(problem).count(begin) == 2
    for simple in ("Q: {question}\nA:", "{question}"):
        ids = replace(plain, template=simple).prompt(problem)
        assert ids == own.prompt(simple.replace("{question}", asked))


def test_what_is_written_is_read(tmp_path):
    assert prompt_form.read(tmp_path) is None
    prompt_form.write(tmp_path, FORM | {"of": "no interest"})
    assert prompt_form.read(tmp_path) == FORM


JUNK = ["", "{", "5", "null", "[]", "{}", '{"prompt": 5}', '{"prompt": {}}']
JUNK += ["[" * 100_000, "\0", " " * (prompt_form.LARGEST + 1)]


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: junk[:12])
def test_what_cannot_be_read_says_nothing(tmp_path, junk):
    (tmp_path / prompt_form.FILE).write_text(junk)
    assert prompt_form.read(tmp_path) is None
    assert prompt_form.mismatch(tmp_path, FORM) is None


def test_a_pipe_is_no_file_to_wait_for(tmp_path):
    os.mkfifo(tmp_path / prompt_form.FILE)
    assert prompt_form.read(tmp_path) is None


def test_a_departure_names_what_differs_and_nothing_else(tmp_path):
    prompt_form.write(tmp_path, FORM)
    assert prompt_form.mismatch(tmp_path, FORM) is None
    assert prompt_form.mismatch(tmp_path, None) is None
    assert prompt_form.mismatch(None, FORM) is None
    other = FORM | {"template": "Q: {question}", "thinking": None}
    assert prompt_form.mismatch(tmp_path, other) == (
        f"prompts have template='Q: {{question}}', thinking=None, and {tmp_path} was "
        "trained on prompts with template='{question}', thinking=False, as its "
        "curax.json says: it knows how to answer those; set task to the same."
    )


def test_without_turns_nobody_is_told_to_think():
    plain = PromptFormat(tokenizer=words.tokenizer(), chat=False, thinking=True)
    assert plain.description == FORM | {"chat": False, "thinking": None}
    assert json.loads(json.dumps(plain.description)) == plain.description


@declares(checkpoint="path")
def begun(*, path):
    return path


def test_a_run_warns_before_it_begins(tmp_path, monkeypatch, capsys):
    """The run is stopped where it would make its folder."""
    prompt_form.write(tmp_path, FORM | {"template": "Q: {question}"})
    model = partial(begun, path=str(tmp_path))
    config = replace(small.get_config(), model=model)
    task = SimpleNamespace(start=None, prompt_form=FORM)
    loop = SimpleNamespace(parts=SimpleNamespace(task=task, engine=None))

    def stop(_):
        raise ConfigError("so far")

    monkeypatch.setattr(run, "make_loop", lambda _: loop)
    monkeypatch.setattr(run, "load_memory", stop)
    with pytest.raises(ConfigError, match="so far"):
        run.train(config, tmp_path / "run", resume=False, command="")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Warning: prompts have template='{question}', and ")
