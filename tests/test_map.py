"""The map: its regimes load, all recipes have as many trials, its own functions."""

import json
import math
import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from curax import stop
from curax.compare import experiment as experiments
from curax.compare import programs
from curax.config import ConfigError, override
from curax.step.build import build
from curax.tasks import chain
from curax.theory import advice, predict
from curax.types import Difficulty
from experiments import in_small
from experiments.factorial import never, single
from experiments.factorial import run as factorial
from experiments.factorial import show as effects
from experiments.factorial import show_hints as of_hints
from experiments.factorial import show_longer as of_longer
from experiments.lag import late
from experiments.lag import show as lag
from experiments.map import ablations, calibration, parts, regimes, run, show
from experiments.map import course as map_course
from experiments.text import show as in_text
from experiments.text_starts import show as of_starts
from experiments.turns import show as turns


@pytest.mark.first(2)
@pytest.mark.parametrize("regime", regimes.REGIMES)
def test_the_recipes_of_a_regime_load_and_have_fifteen_trials_each(regime):
    about, keys = regimes.REGIMES[regime], set()
    assert about.recipes[:2] == regimes.BASELINES
    for name in about.recipes:
        chunks = about.chunks(name)
        assert [len(chunk) for chunk in chunks] == [5, 5, 5]
        assert len({setting for chunk in chunks for setting in chunk}) == 15
        for chunk in chunks[:: len(chunks) - 1]:
            tuned = regimes.experiment(regime, {name: chunk[0]}, "tune")
            (arm,) = experiments.arms(tuned)
            assert arm.config.seeds == 4
            keys.add(experiments.warm_key(tuned, arm))
    assert len(keys) == 1  # one warm start
    name, *_ = about.recipes
    claim = regimes.experiment(regime, {name: about.chunks(name)[0][0]})
    assert claim.seeds >= 16
    assert not set(regimes.TUNING) & set(regimes.CLAIMING)


def test_a_regime_is_an_experiment_once_it_is_tuned(tmp_path, monkeypatch):
    monkeypatch.setattr(regimes, "RESULTS", tmp_path)
    path = run.Path(regimes.__file__).parent / "sparse.py"
    with pytest.raises(ConfigError, match="nothing is tuned in sparse yet"):
        experiments.load_experiment(path)
    before = run.left("sparse")
    for number, rate in enumerate((0.2, 0.4, 0.3)):
        piece = run.Piece("sparse", "tune", "rloo", number)
        rates = [[0.0] * 20, [rate + 0.01 * (i // 4 == 3) for i in range(20)]]
        drawn = [[0] * 20, [regimes.TOKENS["tune"]] * 20]
        settings = regimes.REGIMES["sparse"].chunks("rloo")[number]
        own = {"settings": settings, "rate": rates, "drawn": drawn, "trained": drawn}
        run.write(piece.path, json.dumps(own).encode())
    assert len(run.left("sparse")) == len(before) - 3
    found = run.choose("sparse")
    assert list(found) == ["rloo"]
    assert tuple(found["rloo"]["setting"]) == ("", 16.0, 1e-3)
    assert len(found["rloo"]["trials"]) == 15
    (arm,) = experiments.arms(experiments.load_experiment(path))
    assert experiments.setting_of(arm.config, "allocate.size") == 16
    assert experiments.setting_of(arm.config, regimes.RATE) == 1e-3


@pytest.mark.long
def test_the_settings_of_a_piece_are_lanes_of_one_program():
    chunk = regimes.REGIMES["sparse"].chunks("rloo")[0]
    small = {"warm_start": None, "seeds": 2, "logging.every": 1}
    found = []
    for setting in chunk:
        arm = regimes.arm("sparse", "rloo", setting, "tune")
        config = replace(override(arm.config, small), model=partial(tiny.table))
        found.append(arm._replace(config=config))
    lanes = programs.lanes(
        programs.Sweep(tuple(found), ("allocate.size", regimes.RATE))
    )
    assert (
        lanes.magnitudes["allocate.size"].tolist()
        == np.repeat(regimes.SIZES, 2).tolist()
    )
    assert set(programs.COUNTED.values()) <= set(lanes.metrics)


def test_equal_groups_and_enough_right_are_what_they_say():
    known = Difficulty(**{n: jnp.ones(8) for n in Difficulty.__dataclass_fields__})
    counts = jax.jit(partial(parts.equal_groups, known, budget=16, most=8))
    for size, want in ((2.0, [2] * 8), (4.0, [4] * 4 + [0] * 4), (8.0, [8] * 2)):
        got = counts(size=size).tolist()
        assert got == want + [0] * (8 - len(want))
    random = np.random.default_rng(0)
    outcome = jnp.asarray(random.integers(0, 2, (50, 6)), jnp.float32)
    exists = jnp.asarray(random.integers(0, 2, (50, 6)), bool)
    for right in (1, 2, 3):
        own = parts.enough_right(outcome, exists, right=jnp.float32(right))
        want = stop.positives(outcome, exists, right=right)
        np.testing.assert_array_equal(own, want)


def test_rounds_of_a_traced_size_end_where_those_of_the_rule_do():
    """`parts.right_in_rounds`, seen every two draws, is `stop.positives` in rounds."""
    outcome = jnp.asarray(np.random.default_rng(0).random((200, 32)) < 0.1, jnp.float32)
    for size in (2, 4, 8):
        ends = [np.full(200, 32), np.full(200, 32)]
        for drawn in range(30, 0, -2):
            exists = jnp.broadcast_to(jnp.arange(32) < drawn, outcome.shape)
            own = parts.right_in_rounds(outcome, exists, size=jnp.float32(size))
            want = stop.positives(outcome, exists) & (drawn % size == 0)
            for end, met in zip(ends, (own, want), strict=True):
                end[np.asarray(met)] = drawn
        np.testing.assert_array_equal(*ends)


@pytest.mark.long
def test_a_value_in_any_of_its_ways_is_right_and_all_are_taught():
    task = parts.task(ways=4, errors=(0.0, 0.0, 0.0))
    made = task.prompts(jnp.arange(64, dtype=jnp.int32))
    tokens, mask = task.traces(jax.random.key(0), made)
    assert float(task.verify(made.target, tokens, mask).min()) == 1
    values = np.asarray(tokens < chain.MODULUS)
    moved = (np.asarray(tokens) - np.asarray(made.target))[values] % chain.MODULUS
    assert sorted(set(moved.tolist())) == [0, 4, 8, 12]
    off = jnp.where(tokens < chain.MODULUS, (tokens + 1) % chain.MODULUS, tokens)
    assert float(task.verify(made.target, off, mask).max()) == 0


@pytest.mark.first(1)
@pytest.mark.parametrize("arm", factorial.ARMS)
def test_arms_of_the_factorial_weigh_a_prompt_alike_whatever_trains(arm):
    """The credit is the only difference where it is named, by w(p) at each n."""
    p = np.array([0.05, 0.5])
    twin = arm.replace("centred", "right")
    for n in map(int, factorial.SIZES):
        weights = [
            predict.predict(factorial.plain(x, n), p, p).weight for x in (arm, twin)
        ]
        near = 0.1 if "drawn-one" in arm else 1e-5
        np.testing.assert_allclose(*weights, rtol=near)
    made = factorial.lane("sparse", arm, regimes.Setting("", 4.0, 1e-3), "claim")
    assert made.config.seeds == 16
    assert experiments.setting_of(made.config, factorial.knob(arm)) == 4


@pytest.mark.first(1)
@pytest.mark.parametrize("arm", single.ARMS)
def test_arms_of_one_draw_of_each_prompt_differ_in_their_baseline(arm):
    rate = {regimes.RATE: 1e-3}
    made = factorial.made("sparse", arm, single.changes(arm) | rate, "claim").config
    assert (made.sampling.prompts, made.sampling.group_size) == (regimes.ROWS, 1)
    assert (made.seed, made.seeds) == (4, 16)
    p = np.array([0.05, 0.5, 0.9])
    seen = predict.predict(single.plain(arm), p, p)
    assert seen.draws.tolist() == [1, 1, 1]
    assert (seen.of_right == 1).all() == ("right" in arm)


def test_claims_of_dense_regimes_have_seeds_that_the_map_has_not_used():
    for regime in factorial.DENSE:
        assert factorial.seeded(regime, "tune") == regimes.TUNING
        seeds = factorial.seeded(regime, "claim")
        assert len(seeds) == 16
        assert not set(seeds) & {*regimes.TUNING, *regimes.CLAIMING}
        assert [piece.number for piece in run.warm_pieces(regime, seeds)] == [3, 4]


@pytest.mark.long
def test_a_verifier_errs_in_training_alone_and_hard_prompts_have_their_share():
    task = parts.task(hard=0.2, accepted=0.05, num_prompts=2000)
    ids = jnp.arange(2000, dtype=jnp.int32)
    for made, passed in ((task.prompts(ids), 0.05), (task.held_out(ids), 0.0)):
        hard = np.asarray((made.tokens == parts.RSUB).any(-1))
        np.testing.assert_array_equal(hard, np.asarray(ids) % 5 == 0)
        wrong = jnp.full((2000, 4), chain.END, jnp.int32)
        mask = jnp.ones((2000, 4), bool)
        share = float(task.verify(made.target, wrong, mask).mean())
        assert abs(share - passed) < 3 * math.sqrt(0.05 * 0.95 / 2000)
        assert (share == 0) == (passed == 0)
        right = made.target[:, :-1]
        good = task.verify(made.target, right, right != chain.PAD)
        assert float(good.min()) == 1


def test_a_curve_is_where_the_baseline_ended_from_its_last_rise_on():
    x = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    y = np.array([[0.0, 0.6, 0.2, 0.6, 0.8], [0.0, 0.1, 0.2, 0.3, 0.4]])
    found = show.reached(show.Curve(x, y), 4.0, np.array([0.5, 0.5]))
    np.testing.assert_allclose(found, [2.75, math.inf])
    base = show.Curve(np.tile(x[:, None], 20), np.tile(x[:, None] / 4, 20))
    ours = show.Curve(base.spent, np.minimum(base.rate * 2, 1.0))
    found = show.ratio(ours, base, 4.0)
    np.testing.assert_allclose(found, (0.5, 0.5, 0.5, 1.0), rtol=1e-6)
    assert show.ratio_text(show.ratio(base, ours, 4.0)) == "1.00 [1.00, 1.00]"
    slow = show.Curve(base.spent, base.rate / 2)
    assert show.ratio_text(show.ratio(slow, base, 4.0)) == "above 1"
    with pytest.raises(AssertionError, match="stopped before"):
        show.rates_at(slow, 5.0)


def test_runs_go_on_until_all_have_spent_the_whole_cost():
    class Lanes:
        seeds = np.arange(2)

        def begin(self, warm):
            return warm

        def pass_rates(self, state):
            return np.array([0.25, 0.5]), np.array([0.5, 0.75])

        def advance(self, state, times):
            each = {"rollout/tokens": [3, 3], "train/tokens": [1, 2]}
            each["update/count"] = [1, 1]
            return state, [{k: np.array(v) for k, v in each.items()}], []

    limits = {"whole": 40.0, "steps": 99}
    found = run.history(Lanes(), 0, 1, "x", cost=(1.0, 10.0), **limits)
    assert found["steps"] == [0, 1, 2, 3, 4]  # 13 a step, of the lane that spends less
    assert found["trained"][-1] == [4, 8]
    assert found["rate"][-1] == [0.25, 0.5]
    assert found["greedy"][-1] == [0.5, 0.75]
    assert run.history(Lanes(), 0, 1, "x", whole=40.0, steps=2)["steps"] == [0, 1, 2]


@pytest.mark.long
def test_the_page_has_the_tables_that_the_results_give(judged):
    page = (run.Path(regimes.__file__).parent / "README.md").read_text()
    tables = show.table(list(judged.values())), *show.controls()
    assert all(table in page for table in tables)
    rows, regime = {}, ""
    for line in tables[0].splitlines()[2:]:
        first, recipe, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        regime = first or regime
        rows[regime, recipe] = line
    said = page.partition("| gain | cost |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(said) > 8
    for line in said:
        about, recipe, *figures = (x.strip() for x in line.strip("|").split("|"))
        regime = next(iter(re.findall(r"\(\*(\w+)\*\)", about)), regime)
        own = rows[regime, recipe.split("`")[1]]
        assert [x for x in figures if f" {x} " not in own.replace("*", "")] == [], line
    assert show.predicted() in page
    assert show.ends() in page
    for regime in regimes.SINGLE:
        whole = regimes.REGIMES[regime].whole("claim") / max(
            regimes.REGIMES[regime].cost
        )
        for name, curve in show.curves(regime).items():
            assert curve.spent[-1].min() >= whole, (regime, name)


def test_the_page_of_lags_has_the_tables_that_the_results_give():
    text = page("experiments/lag/README.md", whole=True)
    read = [
        json.loads((lag.HERE / f"{n}.json").read_text()) for n in ("results", "late")
    ]
    tables = lag.table(read[0]), *(late.table(read[1], rate) for rate in late.RATES)
    assert all(table in text for table in tables)


@pytest.mark.long
def test_the_page_of_the_factorial_has_the_tables_that_the_results_give():
    text, tables = page("experiments/factorial/README.md", whole=True), effects.tables()
    assert [table for table in tables if table not in text] == []
    drawn = page("docs/choose_a_recipe.md").partition("### Drawing until one")[2]
    drawn = drawn.partition("## ")[0]
    said = re.findall(r"[+-]?\.\d{3} ± \.\d{3}", text + drawn)
    others = of_longer.tables()  # named where the page has figures of them
    assert [gap for gap in said if gap not in "".join([*tables, *others])] == []
    assert f"All {len(effects.effects())}, at both" in text
    whole = (effects.HERE / "README.md").read_text()
    assert effects.renewed(whole, tables) == whole


@pytest.mark.long
@pytest.mark.parametrize("of", [of_hints, of_longer])
def test_the_pages_beside_the_factorial_have_the_tables_that_the_results_give(of):
    text, tables = of.PAGE.read_text("utf-8"), of.tables()
    said = re.findall(r"[+-]?\.\d{3} ± \.\d{3}", " ".join(text.split()))
    assert [gap for gap in said if gap not in "".join(tables)] == []
    assert f"all {len(of.effects())}" in text
    assert effects.renewed(text, tables) == text


@pytest.mark.long
@pytest.mark.parametrize("folder", in_text.PAGES)
def test_pages_of_text_have_the_tables_that_the_results_give(folder):
    text = page(f"experiments/{folder}/README.md", whole=True)
    tables = in_text.tables(folder)
    said = re.findall(r"[+-]?\.\d{3} ± \.\d{3}", " ".join(text.split()))
    others = [page("experiments/factorial/README.md", whole=True)]
    others += of_text()
    assert [gap for gap in said if gap not in "".join([*tables, *others])] == []
    assert f"all {len(in_text.differences(folder))} gaps and effects" in " ".join(
        text.split()
    )
    assert in_small.renewed(text, tables, in_text.BEGIN) == text


@cache
def of_text():
    """Tables of all pages on text."""
    every = [table for folder in in_text.PAGES for table in in_text.tables(folder)]
    return [*every, *of_starts.tables()]


@pytest.mark.long
def test_the_page_of_six_starts_has_the_tables_that_the_results_give():
    text = page("experiments/text_starts/README.md", whole=True)
    said = re.findall(r"[+-]?\.\d{3} ± \.\d{3}", " ".join(text.split()))
    assert [gap for gap in said if gap not in "".join(of_text())] == []
    assert in_small.renewed(text, of_starts.tables(), of_starts.BEGIN) == text


@pytest.mark.parametrize("first", [0.3, 1.0])
def test_no_start_chooses_its_own_rate(monkeypatch, first):
    """A rate far ahead from one start counts for the others alone."""
    means = 0.1 * np.eye(3) + [[0.0], [0.3], [0.0]]
    means[0, 0] = first
    values = np.stack([means, means[::-1]])[..., None]  # [arms, rates, starts, R]
    monkeypatch.setattr(of_starts, "seen", lambda *_, **__: values)
    others = [[1, 0, 0], [1, 2, 2]] if first == 1 else [[1] * 3] * 2
    assert of_starts.taken("mixed").tolist() == others


def test_effects_are_differences_of_means_over_the_other_choices():
    rng = np.random.default_rng(0)
    found = {arm: rng.random(16) for arm in factorial.ARMS}
    cube = np.array(list(found.values())).reshape(2, 2, 2, 16)
    main = cube[:, 1].mean((0, 1)) - cube[:, 0].mean((0, 1))
    np.testing.assert_allclose(effects.effect(found, (1,)), main)
    both = (cube[1] - cube[0]).mean(1)
    np.testing.assert_allclose(effects.effect(found, (0, 1)), both[1] - both[0])


def test_the_page_of_turns_has_the_tables_that_the_results_give():
    found = turns.every()
    assert [own[0].regime for own in found] == list(regimes.TURNS)
    for table in turns.tables(found):
        assert table in page("experiments/turns/README.md", whole=True)
    for regime in regimes.TURNS:
        for name, curve in show.curves(regime).items():
            assert curve.spent[-1].min() >= show.budget(regime), (regime, name)


def test_sentences_about_turns_say_what_the_results_give():
    text = page("experiments/turns/README.md")
    own = {(r, one, two): turns.differences(r, one, two) for r, one, two in turns.ASKED}
    claim, first, _, updates, early = range(3, 8)
    said = {
        ("calculator", show.DRAWN, "rloo"): (claim, "one is right by {}"),
        ("calculator", "sage", "rloo"): (updates, "({} at 20)"),
        ("calculator", "sage", "grpo"): (claim, "level with GRPO ({})"),
        ("calculator", "dapo", "rloo"): (updates, "({} at 20 updates each)"),
        ("calculator", "dapo", "grpo"): (claim, "no gap is shown ({})"),
        ("mastermind", "raft", "grpo"): (claim, "above the baseline, by {}"),
        ("mastermind", "right_only", "grpo"): (claim, "`right_only`, {}, is so"),
    }
    for pair, (which, words) in said.items():
        assert words.format(own[pair][which]) in text, pair
    ahead = own["mastermind", "right_only", "grpo"][first].split()[0]
    assert f"its first ten seeds have {ahead}" in text
    late = own["calculator", show.DRAWN, "rloo"]
    assert f"{late[early].split()[0]} at 9.6 thousand tokens" in text


@pytest.fixture(scope="module")
def judged():
    return {regime: show.judged(regime) for regime in regimes.SINGLE}


def page(name, *, whole=False):
    text = (run.Path(regimes.__file__).parents[2] / name).read_text()
    return text if whole else " ".join(text.split())


def ends(values, sign=""):
    return " to ".join(show.number(x, sign) for x in (min(values), max(values)))


@pytest.mark.long
def test_sentences_about_the_map_say_what_the_results_give(judged):
    """What README, the map and other pages say of right completions and of drawing."""
    readme, map_page = page("README.md"), page("experiments/map/README.md")
    verified = ["sparse", "noisy", "dense_fresh", "dense_returning"]
    verified += ["bimodal", "hints"]
    own = {r: {one.recipe: one for one in judged[r]} for r in verified}
    right = [own[regime]["right_only"] for regime in verified]
    drawn = [own[regime][show.DRAWN] for regime in verified[:-1]]
    assert show.DRAWN not in own["hints"]
    assert all(one.gap[1] > 0 for one in (*right, *drawn))
    assert sum(own[regime]["raft"].gap[1] > 0 for regime in verified) == 5
    begun = [show.curves(regime)["rloo"].rate[0] for regime in verified]
    new = [
        not any(np.corrcoef(one, other)[0, 1] > 0.9 for other in begun[:i])
        for i, one in enumerate(begun)
    ]
    assert sum(new) == 4
    moved = show.curves("dense_fresh")["right_only"].rate[0] - begun[2]
    assert f"up to {show.number(abs(moved).max())} from those of the" in map_page
    assert f"older arms, {show.number(moved.mean())} above them in the mean" in map_page
    gaps = ends([one.gap[0] for one in right])
    means = ends([one.mean_gap[0] for one in right])
    costs = " to ".join(
        f"{pick(one.ratio[0] for one in right):.2f}"[1:] for pick in (min, max)
    )
    said = (
        f"four warm starts, by {gaps} (interquartile means; means: {means}), at {costs}"
    )
    assert said in readme
    assert ends([one.gap[0] for one in right], "+") + " (by means" in map_page
    assert ends([one.mean_gap[0] for one in right], "+") + "), at" in map_page
    gaps = ends([one.gap[0] for one in drawn])
    said = f"above the better of RLOO and GRPO in five regimes, by {gaps} (by interq"
    assert said in page("experiments/reinforce_ada/README.md")
    means = ends([one.mean_gap[0] for one in drawn], "+")
    assert f"(by means {means}, where that of noisy is not shown" in map_page
    unsure = [one.regime for one in drawn if one.mean_gap[0] < one.mean_gap[1]]
    assert unsure == ["noisy"]
    less = {row[0]: row[2] for r in verified for row in show.against(r)}  # right_only
    for regime, text in less.items():
        assert text in map_page.partition("## Regimes")[0], regime
    asked = [one for one in judged["no_verifier"] if one.recipe == "rloo"]
    least = show.curves("no_verifier")["rloo"].rate[0].mean()
    gained = show.number(asked[0].mean - least, digits=2)
    for name in ("experiments/map/README.md", "experiments/dro/README.md"):
        assert f"gained {gained}" in page(name) or f"gains {gained}" in page(name)
    assert f"gains {gained}" in regimes.REGIMES["no_verifier"].says


@pytest.mark.long
def test_what_to_use_is_told_by_figures_of_the_pages(judged):
    tables = [*effects.tables(), *of_hints.tables(), *of_longer.tables()]
    tables.append(show.table(list(judged.values())))
    tables += of_text()
    tables.append(page("experiments/references/README.md"))
    tables.append(page("experiments/references_control/README.md"))
    readme = page("README.md").partition("## When it pays")[2].partition("## ")[0]
    choose = page("docs/choose_a_recipe.md").partition("| begin with |")[2]
    figure = r"[+-]?\.\d+ (?:± \.\d+|\[[+-]?\.\d+, [+-]?\.\d+\])"
    said = re.findall(figure, readme + choose.partition("```")[0])
    assert len(said) > 30
    assert [one for one in said if one not in "\n".join(tables)] == []


def test_the_advice_says_how_its_order_fared_and_by_how_much_it_errs():
    found = [show.order(regime, "predicted")[1] for regime in regimes.SINGLE]
    rows = calibration.every()
    of_steps = [own[0] for own in found if own]
    of_ends = [calibration.rank(own) for own in calibration.by_regime(rows)]
    steps, run_ends = (
        " to ".join(show.number(x(values), "+", 2) for x in (min, max))
        for values in (of_steps, of_ends)
    )
    assert f"steps had rank correlations of {steps}, that of ends of" in advice.UNSHOWN
    assert f"of ends of {run_ends}." in advice.UNSHOWN
    told = advice.WORST, advice.WORST_DRAWN
    assert list(told) == [math.ceil(100 * x) / 100 for x in calibration.worst(rows)]


@pytest.mark.long
def test_the_picture_of_calibration_has_all_that_was_judged():
    rows = calibration.every()
    text = page("experiments/map/README.md", whole=True)
    assert calibration.table(rows) in text
    assert never.table() in text
    assert f"]({calibration.PICTURE.name})" in text
    assert calibration.PICTURE.read_bytes()[:4] == b"\x89PNG"
    told = [[one.told[1], one.rates.mean()] for one in rows]
    ends, gaps = calibration.draw(rows).axes
    for axes, points in ((ends, told), (gaps, [list(one.gap) for one in rows])):
        shown = [line.get_xydata() for line in axes.lines if line.get_marker() == "o"]
        shown = np.concatenate(shown)
        np.testing.assert_allclose(sorted(shown.tolist()), sorted(points))


def test_a_course_is_set_by_where_its_baseline_ends():
    rates = np.array([0.0, 0.1, 0.5, 1.0])
    close = np.testing.assert_allclose
    close(map_course.moved_to(rates, 0.6).mean(), 0.6, atol=1e-9)
    ends = np.array([[0.2, 0.3, 0.5], [0.2, 0.2, 0.3]])
    found = {"base": np.stack([ends / 4, ends / 2, ends], 1)}
    found["other"] = found["base"] * 2
    got = map_course.calibrated(found, "base", 0.4)
    close(got["base"][:, -1], [0.4, 0.25])
    close(got["other"], 2 * got["base"])


def test_the_page_of_ablations_has_the_figures_that_the_results_give():
    text = page("experiments/map/ablations.md").partition("## What was found")[2]
    figure = r"[+-]?\.\d{3} \[[+-]?\.\d{3}, [+-]?\.\d{3}\]"
    wanted = [row for name in ablations.ABLATIONS for row in ablations.arm_rows(name)]
    wanted = [row[2] for row in wanted]
    gaps = [row for name in ablations.ABLATIONS for row in ablations.rows(name)]
    wanted += [row[-1] for row in gaps]
    wanted = [re.sub(r"[+-](?=0?\.000)", "", own.replace("0.", ".")) for own in wanted]
    assert re.findall(figure, text) == wanted


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ablations.ABLATIONS)
def test_arms_of_an_ablation_load_and_differences_name_them(name):
    own = ablations.ABLATIONS[name]
    made = experiments.arms(ablations.experiment(name, 1e-3))
    assert [arm.recipe for arm in made] == list(own.arms)
    for arm in made:
        assert arm.config.seeds >= 16
        build(replace(arm.config, seeds=1))
    assert not set(ablations.SEEDS) & set(regimes.TUNING)
    for signed in own.pairs.values():
        terms = signed.split()
        assert {term[1:] for term in terms} <= set(own.arms)
        assert sum({"+": 1, "-": -1}[term[0]] for term in terms) == 0


def test_an_ablation_is_shown_once_it_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(ablations, "RESULTS", tmp_path)
    name = "reference_filter"
    assert ablations.left(name)[0] == (name, "rate")
    tried = [[0.0] * 12, [0.1] * 4 + [0.3] * 4 + [0.2] * 4]
    own = {"rates": [1e-4, 3e-4, 1e-3], "seeds": [0, 1, 2, 3], "steps": [0, 20]}
    own |= {"rate": tried, "drawn": [[0] * 12, [10**6] * 12]}
    run.write(ablations.path(name, "rate"), json.dumps(own).encode())
    for arm, rate in (("none", 0.3), ("in_step", 0.4), ("look", 0.3)):
        assert ablations.rows(name) == []
        noise = np.random.default_rng(0).normal(0, 0.01, 16)
        rates = [[0.0] * 16, (rate + noise * (arm == "look")).tolist()]
        one = own | {"seeds": list(ablations.SEEDS), "rate": rates}
        one |= {"drawn": [[0] * 16, [10**6] * 16]}
        run.write(ablations.path(name, arm), json.dumps(one).encode())
    assert ablations.left(name) == []
    assert ablations.rate_of(name) == 3e-4
    found = {row[1]: row[-1] for row in ablations.rows(name)}
    assert found["filter in the step"] == "+0.100 [+0.100, +0.100]"
    low, high = ablations.difference("+look -none", ablations.ends(name)).interval()
    assert low < 0 < high
