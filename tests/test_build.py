"""Components built from a config: which methods go together, what functions declare."""

import re
from dataclasses import replace
from functools import partial

import pytest
import small

from curax import objective, stop
from curax.config import Pilot, Stop
from curax.settings.declared import declares
from curax.step.build import build, task_of
from curax.step.types import Method
from curax.theory import stated_objective

PLAIN = small.get_config()


def like(own):
    """Another function that does the same."""
    return lambda *args, **options: own(*args, **options)


def having(*methods):
    """The config with methods of one's own."""
    return replace(PLAIN, methods=tuple(partial(made, of=one) for one in methods))


def made(*, of):
    """The method of a config, or what is none."""
    return of


def nothing(*args):
    """A hook that is never called here."""
    raise AssertionError(args)


JUDGE = Method(name="judge", grade=nothing)
CHOOSER = Method(name="chooser", choose=nothing)
SIZES = PLAIN.sampling
UNTIL = Stop(rule=partial(stop.balanced, right=1, wrong=1), round_size=1)
WRONG = {
    "2 methods are called judge, ": having(JUDGE, Method(name="judge")),
    "judge and other both have grade, ": having(
        JUDGE, Method(name="other", grade=nothing)
    ),
    "chooser and other both have choose, ": having(
        CHOOSER, Method(name="other", choose=nothing)
    ),
    "methods.1=test_build.made gives a str; name a function that ": having(
        JUDGE, "judge"
    ),
    "sampling.attempts=2 needs outcomes of parts of a draw, and judge ": replace(
        having(JUDGE), sampling=replace(SIZES, attempts=2)
    ),
    "stop needs outcomes of parts of a draw, and judge ": replace(
        having(JUDGE), stop=UNTIL
    ),
    "sampling.attempts=2 asks for the next prompts of the data, and chooser ": replace(
        having(CHOOSER), sampling=replace(SIZES, attempts=2)
    ),
}


@pytest.mark.parametrize("begins", WRONG)
def test_methods_that_cannot_go_together_are_refused_in_a_sentence(begins):
    with pytest.raises(ValueError, match=f"^{re.escape(begins)}.*[.]$"):
        build(WRONG[begins])


def test_methods_that_can_go_together_are_built():
    judged = build(having(JUDGE, CHOOSER))
    assert judged.methods == (JUDGE, CHOOSER)
    own = replace(having(CHOOSER), pilot=Pilot(draws=1))
    assert [method.name for method in build(own).methods] == ["pilots", "chooser"]
    assert build(PLAIN).methods == ()


@declares(checkpoint="begin")
def own_model(*, vocab_size, begin):
    """A model that begins from a checkpoint."""
    raise AssertionError((vocab_size, begin))


@declares(tokenizer="words")
def own_task(*, words=None):
    """A task with a tokenizer, in place of a `Task`."""
    return words


@declares(objective="gain")
def own_weight(outcome, exists, history, *, gain):
    """The weight of an objective stage, by another name of its f."""
    return objective.prompt_weight(outcome, exists, history, f=gain)


def test_what_a_function_declares_is_read_whatever_its_options_are_called():
    config = replace(
        PLAIN,
        model=partial(own_model, begin="there"),
        task=own_task,
        objective=partial(own_weight, gain=objective.log),
    )
    assert task_of(config) == "there"
    assert task_of(replace(config, task=partial(own_task, words="own"))) == "own"
    assert stated_objective.claimed(config).slope([0.25]) == pytest.approx([4.0])
    undeclared = replace(config, objective=partial(like(own_weight), f=objective.log))
    assert stated_objective.claimed(undeclared).slope is None
