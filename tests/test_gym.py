"""Tasks of reasoning-gym: their problems as prompts, their scores as outcomes."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import words
from words import asked, tokenizer

from curax import config as cf
from curax import train
from curax.settings import config_paths
from curax.settings.config_paths import options, unbound
from curax.step import build
from curax.tasks import gym

ROOT = Path(__file__).parents[1]
TOKENIZER = str(words.folder() / "tokenizer")


def task(**options):
    default = {
        "dataset": "chain_sum",
        "options": {"max_terms": 3, "max_digits": 1},
        "tokenizer": TOKENIZER,
        "size": 60,
        "num_held_out": 30,
        "workers": 1,
        "deadline": 30.0,
    }
    return gym.task(**default | options)


def test_problems_are_the_same_for_a_seed_and_on_one_side_alone():
    made, again, other = task(), task(), task(seed=7)
    left = asked(made.prompts(np.arange(made.num_prompts)))
    held = asked(made.held_out(np.arange(made.num_held_out)))
    assert left == asked(again.prompts(np.arange(again.num_prompts)))
    assert left != asked(other.prompts(np.arange(other.num_prompts)))
    assert not {*left} & {*held}
    assert len({*left}) == made.num_prompts
    assert "<answer></answer>" in left[0]
    assert made.fingerprint == again.fingerprint != other.fingerprint
    assert made.traces is None


def test_an_outcome_is_what_the_verifier_of_the_task_says():
    made = task()
    prompts = made.prompts(np.int32([0, 1]))
    # "... State the final answer to the following arithmetic problem: 1 + 2 = ?"
    sums = [
        eval(question.split("problem: ")[1].split("=")[0])
        for question in asked(prompts)
    ]
    said = [f"I add. <answer>{total}</answer>" for total in sums]
    wrong = [f"<answer>{total + 1}</answer>" for total in sums]
    completions = [tokenizer().encode(words_) for words_ in [*said, *wrong]]
    got = made.verify_all([*prompts.target] * 2, completions)
    assert got[:2] == [1.0, 1.0]
    assert all(outcome < 0.5 for outcome in got[2:])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"dataset": "chain_sums"},
            r"task\.dataset='chain_sums' is none .* chain_sum or",
        ),
        ({"dataset": "composite"}, r"task\.dataset='composite' is none of the"),
        ({"options": {"max_terms": 0}}, r"task\.options of chain_sum: max_terms must"),
        ({"options": {"max_digits": "x"}}, r"task\.options of chain_sum: "),
        ({"options": {"max_term": 3}}, r"options\.max_term=3: .* mean 'max_terms'\?"),
        (
            {"options": {"seed": 3}},
            r"task\.options\.seed=3: .* it has allow_negation, ",
        ),
        ({"max_prompt_tokens": 3}, "none is left"),
    ],
)
def test_a_wrong_option_is_told_in_a_sentence(options, said):
    with pytest.raises(ValueError, match=said) as caught:
        task(**options)
    assert str(caught.value)[-1] in ".?"


def test_held_out_problems_take_none_from_those_that_train():
    """They were those of the next seed, which are the same but for the first."""
    made = task(options={"max_terms": 6, "max_digits": 4}, size=10, num_held_out=30)
    assert (made.num_prompts, made.num_held_out) == (10, 30)


def test_what_is_all_held_out_leaves_nothing_to_train_on():
    few = {"max_terms": 2, "max_digits": 1}
    with pytest.raises(ValueError, match=r"^all \d+ problems to train on are among"):
        task(options=few, size=3, num_held_out=2000)


def test_the_command_of_the_page_trains_on_a_data_set(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "bring_your_model.md").read_text()
    _, _, command = page.partition("## Problems of reasoning-gym")[2].partition(
        "curax.train"
    )
    line = command.partition("\n\n")[0].replace("\\\n", " ")
    args = train.parser().parse_args(shlex.split(line))
    config = cf.override(cf.load(args.config), args.assignments)
    given = {"options": {"max_terms": 4}, "thinking": False, "dataset": "chain_sum"}
    assert {name: options(config.task)[name] for name in given} == given
    made = cf.override(config, {"task.tokenizer": TOKENIZER, "task.size": 60}).task()
    assert made.num_prompts > 50


def test_a_data_set_and_its_options_are_named_on_the_command_line():
    """Of a recipe on files, with a function in place of its task, by its short name."""
    recipe = cf.load("gsm8k_qwen3_0p6b")
    given = ["task=gym.task", "task.dataset=chain_sum", "task.options.max_terms=3"]
    config = cf.override(recipe, [*given, "task.options.max_digits=1"])
    assert unbound(config.task) is gym.task
    assert options(config.task)["options"] == {"max_terms": 3, "max_digits": 1}
    again = cf.rebuild(config_paths.describe(config), cf.Config)
    assert config_paths.describe(again) == config_paths.describe(config)
    with pytest.raises(
        cf.ConfigError, match=r"^task\.dataset is not set, but .* needs"
    ):
        build.task_of(cf.override(recipe, given[:1]))
    with pytest.raises(cf.ConfigError, match=r"max_terms=x: expected an integer"):
        cf.override(config, ["task.options.max_terms=x"])
    with pytest.raises(cf.ConfigError, match="expected values by name or none"):
        cf.override(recipe, [*given[:2], "task.options=3"])
