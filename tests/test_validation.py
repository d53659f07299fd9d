"""What is said of held-out completions beside pass rates: forms, and the distance."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small
import tiny
from contracts import close
from outputs import message

from curax import allocate, loss
from curax.config import KL, ConfigError, Evaluation
from curax.runs import alarms
from curax.step import loops, states, validation
from curax.types import Prompts

SAMPLES = 4


def parts(classify=None, prompts=2, states=None) -> Any:
    config = replace(
        small.get_config(),
        evaluation=Evaluation(prompts=prompts, samples=SAMPLES, format=classify),
    )
    task = SimpleNamespace(
        decode=lambda tokens: " ".join(map(str, tokens)), states=states
    )
    return SimpleNamespace(config=config, task=task, train_rows=3, model=tiny.MODEL)


def rows(opening, **changed) -> Any:
    """Completions of five tokens, the last behind the end, with these openings."""
    opening = np.asarray(opening, np.int32)
    noise = np.random.default_rng(0).integers(1, 9, opening.shape, np.int32)
    tokens = np.stack([opening, opening, opening, opening + 1, noise], -1)
    made = {
        "tokens": tokens,
        "mask": np.ones(tokens.shape, bool),
        "exists": np.ones(opening.shape, bool),
    }
    made |= changed
    return SimpleNamespace(**made, turns=None, written=made["mask"])


# Two prompts of four: two forms of two each, and one form alone.
OPENING = [1, 1, 2, 2, 5, 5, 5, 5]
WANT = {
    "format/entropy_nats": 1.5 * np.log(2),
    "format/effective_number": 2**1.5,
    "format/top_fraction": 0.5,
    "format/within_prompt_nats": np.log(2) / 2,
}


def same(got, want):
    assert set(got) == set(want)
    for name in want:
        close(got[name], want[name], err_msg=name)


def test_forms_are_counted_by_prompt_and_in_all_from_the_first_four_tokens():
    same(validation.formats(parts(), rows(OPENING)), WANT)
    different = rows(np.arange(8))
    same(
        validation.formats(parts(), different),
        {
            "format/entropy_nats": np.log(8),
            "format/effective_number": 8.0,
            "format/top_fraction": 1 / 8,
            "format/within_prompt_nats": np.log(4),
        },
    )
    # The draw of held-out completions has the rows of a prompt side by side.
    asked = allocate.rows_to_draw(jnp.full(2, SAMPLES), rows=2 * SAMPLES)
    np.testing.assert_array_equal(asked.prompt, np.repeat([0, 1], SAMPLES))


def test_of_many_seeds_each_has_its_own_forms():
    asked = parts(states=lambda text: text[0] == "1")
    got = validation.formats(asked, rows([OPENING, np.arange(8)]))
    assert len(set(got["format/no_answer_fraction"])) == 2
    for i, opening in enumerate((OPENING, np.arange(8))):
        own = validation.formats(asked, rows(opening))
        same({name: value[i] for name, value in got.items()}, own)


def test_a_function_of_the_text_tells_forms_apart():
    """Integers of any size, equal where forms are; tokens behind the mask unseen."""
    seen = []

    def classify(text):
        seen.append(text)
        return 2**70 if text.startswith("5") else -int(text[0])

    some = rows(OPENING)
    some.mask[:, -1] = False
    same(validation.formats(parts(classify), some), WANT)
    assert seen[:3] == ["1 1 1 2", "1 1 1 2", "2 2 2 3"]
    all_alike = validation.formats(parts(lambda text: True), rows([OPENING, OPENING]))
    close(all_alike["format/effective_number"], [1.0, 1.0])
    close(all_alike["format/top_fraction"], [1.0, 1.0])


def test_what_does_not_exist_has_no_form_and_is_not_asked_about():
    exists = np.arange(8) % 4 != 3
    opening = np.where(exists, OPENING, 7)
    want = {
        "format/entropy_nats": np.log(6) - (2 * np.log(2) + 3 * np.log(3)) / 6,
        "format/top_fraction": 0.5,
    }
    for classify in (None, lambda text: int(text[0]) // int(text[0] != "7")):
        got = validation.formats(parts(classify), rows(opening, exists=exists))
        for name, value in want.items():
            close(got[name], value)


def test_completions_without_an_answer_are_counted_and_told():
    exists = np.arange(8) % 4 != 3
    own = parts(states=lambda text: text[0] == "7")
    got = validation.formats(own, rows(np.where(exists, 7, 6), exists=exists))
    close(got["format/no_answer_fraction"], 0.0)
    got = validation.formats(own, rows(np.arange(8), exists=np.arange(8) > 3))
    close(got["format/no_answer_fraction"], 0.75)
    told = alarms.silence({"step": 0, **got})
    assert told.startswith("75% of the held-out completions at step 0 state no answer")
    raised = alarms.Alarms(patience=3, drift_nats=1.0).check({"step": 5, **got})
    assert raised == {"silent": told.replace("step 0", "step 5")}
    assert not alarms.silence({"step": 0, "format/no_answer_fraction": 0.5})
    assert not alarms.silence({"step": 0})


def broken(text):
    raise KeyError(f"no answer\nin {text}")


def silent(text):
    raise ValueError


SENTENCES = {
    "evaluation.format raised KeyError ('no answer\\nin 1 1 1 2 3') on the completion "
    "'1 1 1 2 3'": (broken, 1),
    "evaluation.format raised ValueError (no message) on the completion '1 1 1 2 3'": (
        silent,
        1,
    ),
    "evaluation.format gave 1.0, which is no integer, for the completion '1 1 1 2 3'": (
        lambda text: 1.0,
        1,
    ),
    "evaluation.format gave None, which is no integer, for the completion "
    "'1000000000 1000000000 1000000000 1000000001 3'": (lambda text: None, 10**9),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_function_that_fails_is_told_with_its_completion(sentence):
    classify, opening = SENTENCES[sentence]
    some = rows([opening] * 8)
    some.tokens[..., -1] = 3
    call = validation.formats, parts(classify), some
    assert message(validation.FormatError, *call) == sentence


def test_of_a_long_completion_its_beginning_is_told():
    long = rows([1] * 8)
    made = parts(lambda text: "prose")
    made.task.decode = lambda tokens: "x" * 100
    with pytest.raises(validation.FormatError, match=r"'x{60}\.\.\.'$"):
        validation.formats(made, long)


# Distance

LENGTH = np.array([5, 1, 0, 3, 5, 2, 4, 5, 3, 1])
MASK = np.arange(tiny.T) < LENGTH[:, None]
CONTEXT = np.repeat(np.int32([0, 1, 2]), [3, 3, 4])
TEMPERATURE = small.get_config().sampling.temperature


def tokens():
    return np.random.default_rng(1).integers(0, tiny.V, MASK.shape, np.int32)


def naive(params, base) -> dict[str, float]:
    """By a plain forward over the whole of each row."""
    sequence = tiny.whole(tiny.CONTEXTS, tokens(), CONTEXT)
    each = []
    for some in (params, base):
        logits = np.asarray(tiny.full_logits(tiny.MODEL, some, *sequence), np.float64)
        logp = logits / TEMPERATURE
        logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
        each.append(np.take_along_axis(logp, tokens()[..., None], -1)[..., 0])
    r = (each[0] - each[1])[MASK]
    row = np.nonzero(MASK)[0]
    found = {}
    for name, k in (("k1", r), ("k2", r**2 / 2), ("k3", np.exp(-r) - 1 + r)):
        found[f"distance/{name}_token_nats"] = k.mean()
        sums = np.bincount(row, k, len(MASK))[LENGTH > 0]
        found[f"distance/{name}_completion_nats"] = sums.mean()
    return found


def test_the_distance_is_zero_at_the_start_and_else_that_of_a_plain_forward():
    """Of two seeds at once: one has not moved, the other has."""
    base = tiny.params()
    random = np.random.default_rng(2)
    moved = jax.tree.map(lambda x: x + 0.1 * random.normal(size=x.shape), base)
    moved = jax.tree.map(lambda x: x.astype(jnp.float32), moved)
    prompts = Prompts(
        tokens=tiny.CONTEXTS.tokens,
        mask=tiny.CONTEXTS.mask,
        id=np.arange(3, dtype=np.int32),
        target=None,
    )
    drawn: Any = SimpleNamespace(tokens=tokens(), mask=MASK, context=CONTEXT)
    own = parts()
    own.config = replace(own.config, evaluation=Evaluation(distance=True))

    @jax.jit
    @jax.vmap
    def measure(params, base):
        state: Any = SimpleNamespace(params=params, reference=base, frozen=None)
        return validation.measured(own, state, prompts, drawn)

    def both(*seeds):
        return jax.tree.map(lambda *x: jnp.stack(x), *seeds)

    got = measure(both(base, moved), both(base, base))
    errors = {name.replace("_nats", "_error_nats") for name in naive(base, base)}
    assert set(got) == set(naive(base, base)) | errors
    for name, value in got.items():
        assert value[0] == 0, name
    for name, value in naive(moved, base).items():
        close(got[name][1], value, rtol=1e-4)
    for name in errors:
        assert got[name][1] > 0


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({}, False),
        ({"evaluation": Evaluation(prompts=8, distance=True)}, True),
        ({"kl": KL(estimator=loss.k3, coefficient=0.1)}, True),
    ],
)
def test_the_policy_that_rl_starts_from_is_kept_where_it_is_needed(changed, kept):
    config = replace(small.get_config(), **changed)
    made: Any = SimpleNamespace(
        config=config,
        task=SimpleNamespace(num_prompts=4),
        tx=optax.sgd(0.1),
        methods=(),
    )
    params = {"w": jnp.arange(3.0)}
    warm = states.Warm(
        params=params,
        frozen=None,
        opt_state=None,
        step=jnp.int32(0),
        seed=jnp.uint32(0),
    )
    state = states.begin(made, warm)
    assert (state.reference is not None) == kept
    if kept:
        assert state.reference["w"] is not params["w"]  # which the next step is given
        close(state.reference["w"], params["w"])


@pytest.mark.long
def test_confidence_is_that_of_a_plain_forward():
    """Every completion by itself, in one piece, from the logits of all its tokens."""
    model, temperature = tiny.MODEL, 0.7
    params = model.init(jax.random.key(0))
    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(1, 6, (6, 5)), jnp.int32)
    length = np.array([5, 3, 4, 1, 5, 2])
    mask = jnp.arange(5)[None] < length[:, None]
    asked = jnp.asarray(random.integers(1, 6, (2, 3)), jnp.int32)
    prompts = Prompts(
        tokens=asked, mask=jnp.ones((2, 3), bool), id=jnp.arange(2), target=None
    )
    context = np.array([0, 0, 0, 1, 1, 1])
    said: Any = SimpleNamespace(
        tokens=tokens,
        mask=mask,
        context=jnp.asarray(context, jnp.int32),
        exists=jnp.ones(6, bool),
    )
    own = parts()
    own.config = replace(
        own.config,
        evaluation=replace(own.config.evaluation, confidence=2, window=2),
        sampling=replace(own.config.sampling, temperature=temperature),
    )

    @jax.jit
    def measure(params):
        state: Any = SimpleNamespace(params=params, frozen=None)
        return validation.measured(own, state, prompts, said)

    got = measure(params)
    want: dict[str, list[float]] = {name: [] for name in got}
    forward = jax.jit(model.features)
    for row, n in enumerate(length):
        whole = jnp.concatenate([asked[context[row]], tokens[row, :n]])[None]
        features, _ = forward(
            params, whole, jnp.arange(n + 3)[None], jnp.ones((1, n + 3), bool)
        )
        logits = np.asarray(features[0] @ model.head(params).T, np.float64)
        logits = logits[2 : n + 2] / temperature
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        sure = -np.sort(logp, -1)[:, -2:].mean(-1)
        groups = [sure[i : i + 2].mean() for i in range(n - 1)] or [sure.mean()]
        lowest = sorted(groups)[: max(1, int(np.ceil(len(groups) / 10)))]
        want["confidence/mean_nats"].append(sure.mean())
        want["confidence/lowest_nats"].append(min(groups))
        want["confidence/bottom_nats"].append(np.mean(lowest))
        want["confidence/tail_nats"].append(sure[-2:].mean())
    same(got, {name: np.mean(values) for name, values in want.items()})


def test_pass_at_k_is_the_mean_over_prompts_of_the_share_of_subsets():
    """Of four completions; one without a grade is in no pair, one of .7 is right."""
    held = parts()
    held.config = replace(held.config, evaluation=Evaluation(prompts=2, samples=4, k=2))
    drawn = SimpleNamespace(prompt=np.arange(8) // 4, member=np.arange(8) % 4)
    right = np.array([1, 0, 0, 0, 1, 0.7, np.nan, 0.5], np.float32)
    got = validation.pass_at_k(held, drawn, np.stack([right, np.full(8, np.nan)]))
    close(got["eval/pass_at_2"], [(1 / 2 + 1) / 2, np.nan])
    assert validation.pass_at_k(parts(), drawn, right) == {}


def test_the_rate_of_a_run_of_which_nothing_was_graded_is_unknown():
    """Without a warning of numpy; of a prompt without a grade there is no rate."""
    drawn = SimpleNamespace(prompt=np.arange(4) // 2, member=np.arange(4) % 2)
    outcome = np.array([[1, 0, np.nan, np.nan], [np.nan] * 4], np.float32)
    lanes: Any = SimpleNamespace(parts=parts(), magnitudes=None)
    one = SimpleNamespace(prompt=np.arange(2), member=np.zeros(2, int))
    lanes._examined = lambda *_: [(drawn, outcome), (one, outcome[:, 1:3])]
    state: Any = None
    close(loops.Lanes.pass_rates(lanes, state), [[0.5, np.nan], [0, np.nan]])


def test_more_of_k_than_are_drawn_is_refused():
    with pytest.raises(ConfigError, match=r"evaluation.k=9 .* to at most 8\.$"):
        replace(small.get_config(), evaluation=Evaluation(samples=8, k=9))
