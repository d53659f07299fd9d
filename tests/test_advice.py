"""What is predicted of a step, against steps that are drawn; and the ranking by it."""

import json
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from outputs import refusal
from test_law import assigned, loaded

from curax import allocate, xray
from curax.config import ConfigError
from curax.theory import (
    advice,
    advice_options,
    cases,
    moments,
    population,
    predict,
    progress,
    sizes,
)
from curax.theory.sizes import Size

CONFIGS = Path(__file__).parent.parent / "configs"
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
P = np.array([0.2, 0.5, 0.8])  # all prompts there are
# Vectors a of the pass rates P: a cosine of .3 for all, and others for each.
AXES = np.full((1, 3), 0.3**0.5), np.array([[0.7, 0.5, 0.1], [0.2, -0.3, 0.6]])
VISITS = 3
# Recipe, in a size that a table of outcomes can hold.
SMALL = {
    "rloo": Size(draws=4, most=4, kept=4, pilots=0, attempts=1),
    "grpo": Size(draws=4, most=4, kept=4, pilots=0, attempts=1),
    "dapo": Size(draws=4, most=4, kept=4, pilots=0, attempts=2),
    "pods_exact": Size(draws=8, most=8, kept=4, pilots=0, attempts=1),
    "ada_est_exact": Size(draws=5, most=6, kept=6, pilots=0, attempts=1),
    "gvm_raft_exact": Size(draws=4, most=6, kept=6, pilots=4, attempts=1),
}


RIGHT = {1: np.array([1.0, 0.0]), 2: np.array([0.5, 0.5])}  # chances of right actions


def gradients(right):
    """`[3, 4]` gradients of p by the logits of two right and two wrong actions."""
    each = np.concatenate([RIGHT[right], [-0.5, -0.5]])
    return (P * (1 - P))[:, None] * each


def scores(right):
    """Of a softmax over these, of which one right one or both are ever drawn."""
    square = (gradients(right) ** 2).sum(-1)
    return progress.Scores(square, np.full(3, (right - 1) / 2), np.full(3, 0.5))


@cache
def small(recipe):
    return sizes.resized(loaded(recipe), SMALL[recipe], 2)


@cache
def foreseen(recipe):
    config = small(recipe)
    with mock.patch.object(cases, "BATCHES", 128):
        return predict.predict(config, P, P, often=VISITS)


def steps_of(config, prompt, number, rng, ways):
    """Direction of each step, by prompt `[S, B, 4]`, as drawn; and what is open."""
    group = config.sampling.group_size
    known = None
    count = np.full(prompt.shape, group)
    if config.pilot or sizes.size_of(config).draws < group:
        draws, trials = number
        share = rng.binomial(trials, P[prompt]) / trials
        count, known = cases.allocator(config, draws)(share)
    right = rng.random((*prompt.shape, group)) < P[prompt][..., None]
    exists = np.arange(group) < count[..., None]
    second = rng.random(right.shape) < np.where(right, RIGHT[ways][1], 0.5)
    action = 2 * ~right + second
    policy = np.stack([P, 1 - P], -1)[..., None] * [RIGHT[ways], [0.5, 0.5]]
    policy = policy.reshape(3, 4)
    score = np.eye(4)[action] - policy[prompt][:, :, None]
    labels = (right & exists).astype(np.float32)
    history = 0.5 if known is None else known
    _, credit = assigned(config, labels, exists, exists, history)
    credit = credit / prompt.shape[1] / moments.rows_per_prompt(config)
    return np.einsum("sbg,sbga->sba", credit, score), exists.any(-1) & (
        ~dead(labels, exists) if config.sampling.attempts > 1 else True
    )


def dead(labels, exists):
    solved = labels.sum(-1)
    return (solved == 0) | (solved == exists.sum(-1))


def prompts_of(total, count, rng):
    """`[S, 2]` prompts of each step: distinct ones of three, or of very many."""
    if total == np.inf:
        return rng.integers(0, 3, (count, 2))
    return rng.permuted(np.tile(np.arange(3), (count, 1)), axis=1)[:, :2]


@cache
def draws_of(recipe, total, ways, count=60_000):
    """`[S, 2]` prompts of steps, and `[S, 2, 4]` their directions, as drawn."""
    config, rng = small(recipe), np.random.default_rng(0)
    held = predict.memory_draws(config, None, VISITS)
    prompt = prompts_of(total, count, rng)
    own, open_ = steps_of(config, prompt, held, rng, ways)
    for _ in range(config.sampling.attempts - 1):  # open groups of another batch
        again = prompts_of(total, count, rng)
        more, fits = steps_of(config, again, held, rng, ways)
        use = np.concatenate([open_, fits], 1)
        first = np.argsort(~use, 1, kind="stable")[:, :2]
        took = np.concatenate([prompt, again], 1)
        own = np.take_along_axis(np.concatenate([own, more], 1), first[..., None], 1)
        prompt = np.take_along_axis(took, first, 1)
    return prompt, own


def drawn(recipe, total, ways, axes):
    """grad J . E g and E|g|^2 of steps of two prompts, by drawing them.

    Logits are those that all share, a of them each, and a prompt's own times
    sqrt(1 - |a|^2): so gradients of two prompts have the cosine a . a'.
    """
    prompt, own = draws_of(recipe, total, ways)
    gradient, rest = gradients(ways), 1 - (axes**2).sum(0)
    shared = np.einsum("sba,ksb->ska", own, axes[:, prompt])
    whole = np.einsum("xa,kx->ka", gradient, axes) / 3
    toward = np.einsum("ka,ka->", shared.mean(0), whole)
    alone = own * np.sqrt(rest)[prompt][..., None]
    if total == 3:
        alone = np.einsum("sba,sbk->ska", alone, np.eye(3)[prompt])
        mine = np.sqrt(rest)[:, None] * gradient / 3
        toward += np.einsum("ka,ka->", alone.mean(0), mine)
    square = (shared**2).sum((1, 2)) + (alone**2).sum((1, 2))
    return toward, square.mean(), square.std() / len(square) ** 0.5


@pytest.mark.first(2)
@pytest.mark.parametrize("ways", RIGHT)
@pytest.mark.parametrize("recipe", SMALL)
def test_a_step_moves_as_far_and_as_straight_as_predicted(recipe, ways):
    """Of distinct prompts with gradients that are partly shared, by drawing steps."""
    config = small(recipe)
    total = np.inf if config.sampling.attempts > 1 else 3
    for axes in AXES:
        got = progress.progress(
            foreseen(recipe),
            P,
            scores(ways),
            axes=axes,
            prompts=2,
            attempts=config.sampling.attempts,
            total=total,
        )
        toward, square, error = drawn(recipe, total, ways, axes)
        close(got.toward, toward, rtol=0.01)
        # A shared budget ties the prompts of a batch together, most of all two.
        tied = 0.02 * square if foreseen(recipe).how else 0.0
        close(got.square, square, rtol=0, atol=3 * error + tied)


# ----- what follows from it

SEVERAL = population.Population("here", np.array([0.05, 0.3, 0.5, 0.9]))
KNOWN = advice.Known(population=SEVERAL, prompts=4000, visits=0)
of = partial(Size, pilots=0, attempts=1)


@cache
def row(recipe, size, **known):
    return advice.predicted(loaded(recipe), size, replace(KNOWN, **known))


def test_more_draws_of_a_prompt_need_fewer_prompts_for_the_same_noise():
    few, more = (row("rloo", of(draws=n, most=n, kept=n)) for n in (2, 4))
    assert more["noise_prompts"] < few["noise_prompts"]
    # By the formula, as leave-one-out has w = 1 and sum of c^2 = p (1 - p) / (n - 1).
    spread = SEVERAL.rates * (1 - SEVERAL.rates)
    close(few["limit"], 1, rtol=1e-3)
    common = KNOWN.shared * (spread**0.5).mean() ** 2
    for n, found in ((2, few), (4, more)):
        # Of the variance of n labels over p (1 - p), which C+ / p - C- / (1 - p) is.
        labels = (1 / spread - 3 - (n - 3) / (n - 1)) / n
        own = (spread * (1 + labels)).mean()
        own += (1 / KNOWN.explained - 1) * (spread / (n - 1)).mean()
        close(found["noise_prompts"], own / common - 1, rtol=0.02)


@pytest.mark.long
def test_down_sampling_gains_as_training_costs_more_than_drawing():
    even = "grpo", of(draws=8, most=8, kept=8)
    kept = "pods_exact", of(draws=8, most=8, kept=4)
    ratios = []
    for b in (0.1, 1.0, 10.0):
        both = [row(*one, cost=(1.0, b))["progress"] for one in (kept, even)]
        ratios.append(both[0] / both[1])
    assert ratios[0] < 1 < ratios[2]
    assert ratios == sorted(ratios)


def test_a_memory_that_decides_nothing_is_not_said_to_be_empty():
    least = of(draws=4, most=16, kept=16)  # neyman gives each prompt 4 at least
    found = row("neyman", least, visits=12)
    told = "all prompts draw alike: what is remembered decides nothing"
    assert found["remark"] == told
    empty = "no prompt comes back: nothing is remembered"
    assert row("neyman", least)["remark"] == empty


@pytest.mark.long
def test_a_memory_of_prompts_that_never_come_back_changes_nothing():
    size = of(draws=4, most=8, kept=8)
    never = row("greso", size)
    config = replace(loaded("greso"), allocate=allocate.uniform)
    uniform = advice.predicted(config, size, KNOWN)
    assert never["remark"] == "no prompt comes back: nothing is remembered"
    for key in ("progress", "noise_prompts", "draws", "trained"):
        close(never[key], uniform[key])
    often = row("greso", size, visits=12)
    assert "remembers" in often["remark"]
    assert abs(often["progress"] / never["progress"] - 1) > 0.01
    # What steps and prompts say, where no visits are told.
    assert row("greso", size, visits=None)["visits"] == 1
    assert row("greso", size, visits=None, steps=100)["visits"] == 0


def test_a_step_has_a_prompt_at_least_and_none_twice():
    size = of(draws=4, most=4, kept=4)
    assert row("rloo", size, budget=1) == (
        "a step of this cost has 0.25 prompts, of 4000."
    )
    assert row("rloo", size, prompts=4) == "a step of this cost has 32 prompts, of 4."
    only = advice.Candidates({"rloo": loaded("rloo")}, {}, [])
    said = r"^rloo, with which all are .* \(a step .* prompts, of 4\); change --budget "
    with pytest.raises(ConfigError, match=said):
        advice.rank(only, replace(KNOWN, prompts=4))


def test_scores_as_measured_are_those_near_a_pass_rate():
    square = np.full(40, 8.0)
    square[20:] *= 3
    prompts = population.Population(
        "here", np.linspace(0.1, 0.9, 40), np.full(40, 4.0), square, square
    )
    close(population.means(prompts, prompts.square, np.array([0.1, 0.9])), [2.0, 6.0])
    found = progress.believed(P, 0.1, 2.0)
    close(found.gradient, 0.2 * P * (1 - P))
    close(found.right, 1.8)
    close(found.wrong, 1.8)
    for varied in (0.0, 0.5, 3.0):
        found = progress.believed(P, 0.1, 2.0, varied)
        close(found.right, varied * found.wrong)
        close(P * found.right + (1 - P) * found.wrong, 1.8)


@pytest.fixture
def three(monkeypatch):
    """Of configs/, these alone: a baseline, one that remembers, three left out."""
    names = ("rloo", "greso", "sage", "dro", "quickstart")
    found = {name: CONFIGS / f"{name}.py" for name in names}
    monkeypatch.setattr(advice, "recipes", lambda: found)


@pytest.fixture
def found(three, tmp_path, capsys):
    """What is written and said of a recipe of the user's own beside three others."""
    own = tmp_path / "mine.py"
    text = (CONFIGS / "rloo.py").read_text()
    own.write_text(text.replace("group_size=4", "group_size=3"))
    out = tmp_path / "out" / "advice.json"

    def run(*recipe):
        argv = ["--advise", *recipe, "--beta", 2, 3, "--visits", 0, "--out", out.parent]
        assert xray.main([str(word) for word in [*argv, "--prompts", 500]]) == 0
        said = capsys.readouterr()
        assert said.out.splitlines()[-1] == f"Written: {out}"
        assert said.err.endswith("sizes predicted\n")
        return json.loads(out.read_text()), said.out

    return lambda *recipe: run(*(own if name == "mine" else name for name in recipe))


def test_the_command_compares_recipes_and_writes_what_it_says(found):
    page, said = found("mine")
    gains = [round(row["gain"], 9) for row in page["rows"]]
    assert gains == sorted(gains, reverse=True)
    base = next(row for row in page["rows"] if row["baseline"])
    assert (base["recipe"], base["gain"], base["told"]) == ("mine", 1, "the baseline")
    assert {row["recipe"] for row in page["rows"]} == {
        *("mine", "rloo", "greso", "quickstart"),
    }
    assert [row["n"] for row in page["rows"] if row["recipe"] == "greso"] == [8]
    ends = {}
    for row in page["rows"]:
        ends.setdefault(row["recipe"], row)
    assert base["beside_low"] == base["beside_high"] == 0
    for row in ends.values():
        wide = 0 if row is base else row["error"]
        assert row["beside_low"] + wide <= row["beside"] <= row["beside_high"] - wide
        assert 0.4 < row["end"] < 1
        low, high = row["beside_low"], row["beside_high"]
        told = "above" if low > 0 else "below" if high < 0 else "not told apart"
        assert row["told"] == told or row is base
    lines = said.splitlines()
    assert lines[0] == "Prompts: Beta(2, 3); 500 to train on, 0 visits to each."
    assert max(map(len, lines[: lines.index("", 12)])) <= 88
    told = " ".join(said.split())
    assert page["caveat"] in told
    assert "no prompt comes back: nothing is remembered" in told
    assert "Note: No prompt comes back, so that a memory holds nothing " in told
    assert "Left out: sage: hints from reference solutions, and there are" in told
    skipped = advice.candidates({}, references=True).skipped
    assert any("noise is not predicted" in text for text in skipped)


def test_the_first_screen_says_what_is_told_apart_and_what_was_measured(found):
    page, said = found()
    base = next(row for row in page["rows"] if row["baseline"])
    assert base["recipe"] == advice.BASELINE == "rloo"
    first = " ".join(said.splitlines()[:12])
    assert "Where a run of 200 steps is predicted to end, held out, beside rloo" in said
    for told in ("above", "below", "not told apart"):
        assert f"  {told}: " in first
    assert f"nearest to these pass rates: {page['measured']} (docs/choose" in first
    assert page["measured"] == advice.MEASURED[0.45]  # of a mean of .4
    # Names in a group stand by the alphabet: no order is said.
    table = said[said.index("not told apart:\n") :].partition("\n\n")[0]
    names = [line.split()[-1] for line in table.splitlines() if ".." in line]
    assert len(names) > 1
    assert names == sorted(names)


def test_gaps_are_widened_by_the_worst_error_that_was_judged():
    size = of(draws=4, most=4, kept=4)
    assert row("rloo", size)["error"] == advice.BY_DEFAULT > advice.WORST
    one = of(draws=1, most=1, kept=1)
    assert row("right_only", one)["error"] == advice.WORST_DRAWN  # was never judged
    config = loaded("ada_seq_positive_accepted")
    drawn = row("ada_seq_positive_accepted", sizes.size_of(config))
    assert drawn["error"] == advice.WORST_DRAWN
    rows = [{"recipe": "rloo"} | row("rloo", size), {"recipe": "drawn"} | drawn]
    ends = [np.full((9, len(advice.SCALES)), end) for end in (0.5, 0.5 + 0.28)]
    for more, told in ((0.0, "not told apart"), (0.02, "above"), (-0.6, "below")):
        found = [dict(each) for each in rows]
        with mock.patch.object(
            advice, "_ends", side_effect=[ends[0], ends[0], ends[1] + more]
        ):
            advice.follow(found, found[0], KNOWN)
        assert [each["told"] for each in found] == ["the baseline", told]


def test_a_recipe_that_cannot_be_followed_gives_way_to_rloo_as_the_baseline():
    among = advice.Candidates({}, {"mine": ["rloo"]}, [], ("dapo", "rloo"))
    rows = [{"recipe": "dapo", "moments": None}, {"recipe": "mine", "moments": 1}]
    assert advice._baseline(among, rows) is rows[1]
    assert advice._baseline(among, rows[:1]) is None


def test_what_was_measured_of_right_ones_alone_stands_in_the_guide():
    guide = (CONFIGS.parent / "docs" / "choose_a_recipe.md").read_text()
    rows = guide.partition("| begin with |")[2].splitlines()[2:6]
    assert list(advice.MEASURED) == sorted(advice.MEASURED)
    assert max(advice.MEASURED) == 1
    for text, line in zip(advice.MEASURED.values(), rows, strict=True):
        where, figure = text.partition(": ")[0], re.findall(r"[+-]\.\d+ ± \.\d+", text)
        assert all(one in line for one in figure)
        assert line.removeprefix("| ")[:4] in where


def test_pass_rates_of_an_evaluation_have_less_spread_than_its_shares(tmp_path):
    rng = np.random.default_rng(0)
    rates = rng.beta(2, 3, 400)
    path = tmp_path / "held_out.jsonl"
    lines = [
        {"problem": i, "greedy": j == 4, "outcome": float(rng.random() < rate)}
        for i, rate in enumerate(rates)
        for j in range(5)
    ]
    lines[0]["outcome"] = None
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    got = population.of_evaluation(path)
    close(got.rates.mean(), rates.mean(), rtol=0.05)
    close(got.rates.var(), rates.var(), rtol=0.25)
    assert got.draws is None


def test_beliefs_are_those_of_a_file_but_for_what_is_said(tmp_path):
    path = tmp_path / "gradients.json"
    path.write_text(json.dumps({"shared": -0.01, "explained": 0.4, "prompts": []}))
    of = partial(advice_options.beliefs, path)
    found = {"shared": 0.0, "explained": 0.4, "varied": 1.0}
    assert of() == found  # cut to what may be
    args = xray.parser().parse_args(
        ["--advise", "--prompts", "9", "--measured", str(path), "--shared", "0.5"]
    )
    asked = []
    with (
        mock.patch.object(advice, "rank", lambda _, known, __: asked.append(known)),
        mock.patch.object(advice, "candidates"),
        mock.patch.object(advice_options.json, "dumps", side_effect=InterruptedError),
        pytest.raises(InterruptedError),
    ):
        advice_options.advise(args, SEVERAL, None)
    assert (asked[0].shared, asked[0].explained) == (0.5, 0.4)
    assert asked[0].by_rate is None
    for text in ("{", '{"shared": 0.1}', '{"shared": NaN, "explained": 1}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="name a gradients"):
            of()


def test_scores_are_those_of_their_pass_rate_where_a_file_has_them(tmp_path):
    """One right completion each, and |grad p|^2 = 9 p^2 (1 - p)."""
    p = np.array([0.02, 0.1, 0.5, 0.9])
    gradient, square = 9 * p**2 * (1 - p), 40 - 20 * p
    table = [
        {
            "pass_rate": rate,
            "square": g2,
            "norms": g2 * rate * (1 - rate),
            "explained": grad / (g2 * rate * (1 - rate)),
            "prompts": count,
        }
        for rate, g2, grad, count in zip(p, square, gradient, (1, 2, 3, 4), strict=True)
    ]
    lost = table[0] | {"pass_rate": 0.0, "norms": 0.0}
    path = tmp_path / "gradients.json"
    a = np.array([[0.5, 0.4, 0.3, 0.1], [0.0, 0.1, -0.2, 0.3]])
    cosines = np.pad(a.T @ a, (1, 0), constant_values=7.0)
    found = {"shared": 0.9, "explained": 0.4, "varied": 0.0}
    rows = {"by_pass_rate": [lost, *table], "cosines": cosines.tolist()}
    path.write_text(json.dumps(found | rows))
    got = advice_options.beliefs(path)
    assert set(got) == {"shared", "explained", "varied", "by_rate"}
    explained, squares, axes = got["by_rate"].at(p)
    close(squares, square)
    close(axes.T @ axes, a.T @ a)
    scores = progress.believed(p, explained, squares, 0.0)
    close(scores.gradient, gradient)
    assert (scores.right == 0).all()
    close((1 - p) * scores.wrong, (1 - explained) * square)
    between, *_ = got["by_rate"].at(np.array([0.001, 0.3, 0.99]))
    close(between[[0, 2]], explained[[0, 3]])
    assert explained[1] < between[1] < explained[2]
    assert "by_rate" not in advice_options.beliefs(path, rates=False)
    # What it changes: rare right answers of short scores are less noise.
    size = of(draws=8, most=8, kept=8)
    ratios = []
    for known in ({"varied": 0.0}, got):
        told = replace(KNOWN, **known)
        both = [advice.predicted(loaded(n), size, told) for n in ("maxrl", "rloo")]
        ratios.append(both[0]["progress"] / both[1]["progress"])
    assert ratios[1] > ratios[0]


@pytest.mark.parametrize(
    "broken",
    [
        {"shared": None},
        {"explained": "much"},
        {"cosines": "none"},
        {"cosines": [[0.1]]},
        {"cosines": [[float("nan")] * 2] * 2},
        {"by_pass_rate": [{}]},
    ],
)
def test_a_file_that_lacks_numbers_is_told(broken, tmp_path):
    row = {"pass_rate": 0.2, "norms": 1.0, "square": 2.0, "explained": 0.3}
    rows = [row | {"prompts": 3}, row | {"prompts": 4, "pass_rate": 0.5}]
    found = {"shared": 0.1, "explained": 0.3, "cosines": [[0.1, 0.1], [0.1, 0.1]]}
    path = tmp_path / "gradients.json"
    path.write_text(json.dumps(found | {"by_pass_rate": rows}))
    assert "by_rate" in advice_options.beliefs(path)
    path.write_text(json.dumps(found | {"by_pass_rate": rows} | broken))
    with pytest.raises(ConfigError, match=r"cannot be read \(numbers are missing\); "):
        advice_options.beliefs(path)


def test_a_file_without_a_gradient_above_its_noise_says_so(tmp_path):
    path = tmp_path / "gradients.json"
    path.write_text(json.dumps({"shared": None, "explained": -0.02, "varied": 1.0}))
    with pytest.raises(ConfigError, match=r"is -0\.02; measure more prompts, or more "):
        advice_options.beliefs(path)


SAMPLE = '{"problem": 0, "greedy": false, "outcome": 1.0}\n'
WRONG = {
    "alone": (["--prompts", "9"], "--prompts is for --advise; add that, or leave "),
    "unknown": (["--advise"], "--advise must know how many prompts there are "),
    "none": (["--advise", "--prompts", "0"], "--prompts 0 must be from 1 to 1e+09; "),
    "often": (["--advise", "--visits", "-1"], "--visits -1 must be from 0 to 1e+06"),
    "share": (["--advise", "--shared", "nan"], "--shared nan must be from 0 to 1; "),
    "file": (["--measured", "no.json"], "--measured is for --advise; add that, or "),
    "free": (["--advise", "--cost", "0", "0"], "--cost 0 0: neither may be below 0, "),
    "paid": (["--advise", "--cost", "2", "-1"], "--cost 2 -1: neither may be below"),
    "most": (["--advise", "--shared", "1.5"], "--shared 1.5 must be from 0 to 1; "),
    "lift": (["--advise", "--lift", "1"], "--lift is not for --advise; leave it out."),
    "set": (["--advise", "--set", "a=1"], "--set a=1 changes a recipe; name one."),
    "out": (
        ["--advise", "--prompts", "9", "--out", "broken.jsonl"],
        "--out broken.jsonl cannot be written to (",
    ),
    "absent": (["--evaluation", "no.jsonl"], "--evaluation no.jsonl cannot be read ("),
    "broken": (["--evaluation", "broken.jsonl"], "--evaluation broken.jsonl:2: no "),
    "empty": (["--evaluation", "empty.jsonl"], "--evaluation empty.jsonl: it has no "),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_sentence(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jsonl").write_text(SAMPLE + SAMPLE.replace("1.0", "2"))
    (tmp_path / "empty.jsonl").write_text(SAMPLE.replace("1.0", "null"))
    before = sorted(tmp_path.rglob("*"))
    argv, says = WRONG[case]
    if "--evaluation" in argv:
        argv = [*argv, "--advise", "--prompts", "9"]
    assert refusal(xray.main, *argv).startswith(f"curax.xray: {says}")
    assert sorted(tmp_path.rglob("*")) == before
