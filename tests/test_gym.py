"""Tasks of reasoning-gym: their problems as prompts, their scores as outcomes."""

import numpy as np
import pytest
import words

from curax.tasks import gym, text


def task(**options):
    default = {
        "dataset": "chain_sum",
        "options": (("max_terms", 3), ("max_digits", 1)),
        "tokenizer": str(words.folder() / "tokenizer"),
        "size": 60,
        "num_held_out": 30,
        "workers": 1,
        "deadline": 30.0,
    }
    return gym.task(**default | options)


def asked(made, prompts):
    spoken = text.load(words.folder() / "tokenizer")
    rows = zip(prompts.tokens, prompts.mask, strict=True)
    return [spoken.decode(tokens[mask], control=True) for tokens, mask in rows]


def test_problems_are_the_same_for_a_seed_and_on_one_side_alone():
    made, again, other = task(), task(), task(seed=7)
    left = asked(made, made.prompts(np.arange(made.num_prompts)))
    held = asked(made, made.held_out(np.arange(made.num_held_out)))
    assert left == asked(again, again.prompts(np.arange(again.num_prompts)))
    assert left != asked(other, other.prompts(np.arange(other.num_prompts)))
    assert not {*left} & {*held}
    assert len({*left}) == made.num_prompts
    assert "<answer></answer>" in left[0]
    assert made.fingerprint == again.fingerprint != other.fingerprint
    assert made.traces is None


def test_an_outcome_is_what_the_verifier_of_the_task_says():
    made = task()
    prompts = made.prompts(np.int32([0, 1]))
    spoken = text.load(words.folder() / "tokenizer")
    # "... State the final answer to the following arithmetic problem: 1 + 2 = ?"
    sums = [
        eval(question.split("problem: ")[1].split("=")[0])
        for question in asked(made, prompts)
    ]
    said = [f"I add. <answer>{total}</answer>" for total in sums]
    wrong = [f"<answer>{total + 1}</answer>" for total in sums]
    completions = [spoken.encode(words_) for words_ in [*said, *wrong]]
    got = made.verify_all([*prompts.target] * 2, completions)
    assert got[:2] == [1.0, 1.0]
    assert all(outcome < 0.5 for outcome in got[2:])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dataset": "chain_sums"}, "'chain_sum' for example"),
        ({"options": (("max_terms", 0),)}, r"task\.options of chain_sum"),
        ({"options": (("terms", 3),)}, "terms"),
        ({"max_prompt_tokens": 3}, "none is left"),
    ],
)
def test_a_wrong_option_is_told_in_a_sentence(options, said):
    with pytest.raises(ValueError, match=said) as caught:
        task(**options)
    assert str(caught.value).endswith(".")
