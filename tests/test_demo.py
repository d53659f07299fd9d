"""curax demo: what it writes is whole, the same each time, and what training reads."""

import re
import shlex
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from outputs import refusal
from test_folder import lines

from curax.commands import demo
from curax.config import load
from curax.models import pretrained
from curax.settings.config_paths import option
from curax.settings.packages import install
from curax.step.build import build

NAMES = ("test.jsonl", "train.jsonl", "shop.jsonl", "words.py", "model")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a demo."""
    out = tmp_path_factory.mktemp("demo") / "new" / "demo"
    assert demo.main([str(out)]) == 0
    return out


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_demo_is_written_whole_and_the_same_each_time(made, tmp_path, capsys):
    assert demo.main([str(tmp_path / "other")]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"train {tmp_path}/other/words\.py$", out, re.MULTILINE)
    assert contents(made) == contents(tmp_path / "other")
    assert {path.name for path in made.iterdir()} == {*NAMES}
    assert [*made.parent.iterdir()] == [made]


def test_its_config_trains_its_model_on_its_problems_from_any_folder(
    made, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = load(made / "words.py")
    assert config.warm_start
    path = made / "model"
    assert option(config.model, "path") == str(path)
    task = config.task(tokenizer=str(path))
    assert (task.num_prompts, task.num_held_out) == (demo.TRAIN, demo.HELD_OUT)
    assert task.vocab_size <= len(pretrained.model(path=str(path)).load(None)["embed"])


CONFIGS = Path(__file__).parents[1] / "configs"
KINDS = ["rloo", "sage", "dro", "text"]  # one update, hints, references, packed rows
RECIPES = sorted({path.stem for path in CONFIGS.glob("*.py")} - {*KINDS})


@pytest.mark.first(len(KINDS))
@pytest.mark.parametrize("recipe", KINDS + RECIPES)
def test_its_config_takes_any_recipe_by_its_name(made, recipe):
    text = (made / "words.py").read_text()
    path = made / f"{recipe}.py"
    path.write_text(text.replace('RECIPE = "dr_grpo"', f'RECIPE = "{recipe}"'))
    try:
        found, of = load(path), load(recipe)
    finally:
        path.unlink()
    assert found.update.minibatches == of.update.minibatches
    assert found.sampling.group_size == of.sampling.group_size
    task = found.task(tokenizer=str(made / "model"))
    assert (task.hinting is not None) == bool(of.hint)
    assert (task.reference is not None) == bool(of.reflection)
    if recipe != "sage_teacher":  # it asks for a file of hints
        assert build(found).config == found


def test_the_command_to_go_on_is_one_for_a_shell(tmp_path, capsys):
    out = tmp_path / "my demo (1)"
    assert demo.main([str(out)]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(said)[-1] == str(out / "words.py")


def test_no_question_is_held_out_and_trained_and_half_the_solutions_are_wrong(made):
    train, test = (lines(made / f"{name}.jsonl") for name in ("train", "test"))
    questions = [record["question"] for record in (*train, *test)]
    assert len({*questions}) == len(questions) == demo.TRAIN + demo.HELD_OUT
    wrong = [r["solution"].split("#### ")[1] != r["answer"] for r in train]
    assert 0.45 < sum(wrong) / len(wrong) < 0.55


def test_what_cannot_be_written_is_told_in_a_sentence_and_leaves_nothing(
    made, tmp_path, monkeypatch
):
    said, before = partial(refusal, demo.main), contents(made)
    assert said(made) == f"curax.demo: {made} exists already; name a new folder.\n"
    assert contents(made) == before
    below = made / "words.py" / "demo"
    assert said(below).startswith(f"curax.demo: {below} cannot be written (")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    find = {"tokenizers": None}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: find.get(name, find_spec(name))
    )
    assert said(tmp_path / "demo") == (
        "curax.demo: the package tokenizers is not installed; run "
        f"{install('tokenizers')}.\n"
    )
    assert not any(tmp_path.iterdir())
