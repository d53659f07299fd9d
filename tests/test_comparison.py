"""Statistics of a comparison, and that it says no more than its intervals carry."""

import html
import json
import math
import os
from functools import cache, partial

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from test_report import Page

from curax.compare import analysis, figures, page, statistics
from curax.compare.analysis import Entry, History, Question
from curax.runs import drawing, templates
from curax.settings import files

close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
draw = np.random.default_rng


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 13])
def test_the_interquartile_mean_leaves_out_both_outer_quarters(n):
    values = draw(n).normal(size=(3, n))
    close(statistics.iqm(values), scipy.stats.trim_mean(values, 0.25, axis=-1))
    values[1, 0] = np.nan
    assert np.isnan(statistics.iqm(values)).tolist() == [False, True, False]


def test_an_interval_of_few_values_is_the_t_interval():
    """Of three values none is trimmed: the bootstrap error is known in closed form."""
    values = draw(0).normal(size=(40, 3))
    found = statistics.center([values])
    assert found.freedom == 2
    close(found.value, values.mean(-1))
    want = values.std(-1, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(found.error, want, rtol=0.06)
    low, high = found.interval(0.9)
    half = scipy.stats.t.ppf(0.95, 2) * found.error
    close((low, high), (values.mean(-1) - half, values.mean(-1) + half))
    # The interval at 1 - p ends at 0.
    for one, p in enumerate(found.p_value()):
        ends = [end[one] for end in found.interval(1 - p)]
        assert min(map(abs, ends)) < 1e-9


def test_strata_are_resampled_apart():
    """Strata that differ do not widen the interval; those taken together would."""
    easy, hard = draw(1).normal(0.9, 0.01, 3), draw(2).normal(0.1, 0.01, 3)
    apart = statistics.center([easy, hard])
    together = statistics.center([np.append(easy, hard)])
    assert apart.freedom == 4
    assert apart.error < 0.3 * together.error
    close(apart.value, together.value)


def test_a_gap_is_of_the_same_seed_where_both_share_it():
    x, y = draw(3).normal(size=(2, 8))
    y = x - 0.1 - 0.01 * y
    paired = statistics.gap([x], [y], paired=True)
    apart = statistics.gap([x], [y], paired=False)
    close(paired.value, statistics.iqm(x - y))
    close(apart.value, statistics.iqm(x) - statistics.iqm(y))
    assert paired.error < 0.1 * apart.error
    assert (paired.freedom, apart.freedom) == (7, 7)


@pytest.mark.parametrize("seeds", [2, 3, 4, 5])
def test_few_values_that_are_the_same_by_chance_claim_nothing(seeds):
    """Rates are multiples of one over the prompts; of two often both differ alike."""
    x, y = draw(seeds).binomial(64, 0.95, (2, 2000, seeds)) / 64
    found = statistics.gap([x], [y], paired=True)
    alike = np.ptp(x - y, -1) == 0
    assert np.isnan(found.error[alike]).all()
    assert np.isfinite(found.error[~alike]).all()
    least = 0.05 / 18  # six recipes on three axes, by Holm
    assert (found.p_value() <= least).mean() <= 3 * least
    same = statistics.gap([np.full(8, 0.5)], [np.full(8, 0.25)], paired=True)
    assert same.p_value() == 0


def test_one_value_has_no_interval_and_nothing_is_claimed_of_it():
    found = statistics.center([np.array([0.4])])
    assert (found.value, found.p_value()) == (0.4, 1)
    assert np.isnan(found.interval()).all()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_levels_leave_out_0_where_holm_rejects(p):
    want, rest = [False] * len(p), len(p)
    for i in sorted(range(len(p)), key=lambda i: p[i]):  # by its definition
        if p[i] > 0.05 / rest:
            break
        want[i], rest = True, rest - 1
    levels = statistics.holm(p, 0.05)
    # An interval at a level leaves out 0 where p <= 1 - level.
    assert [own <= 1 - level + 1e-15 for own, level in zip(p, levels, strict=True)] == (
        want
    )


def test_the_probability_of_improvement_counts_pairs():
    x, y = np.array([1.0, 2, 3, 4]), np.array([1.0, 0, 5, 4])
    assert statistics.improvement([x], [y], paired=True)[0] == 2 / 4
    pairs = [(a > b) + 0.5 * (a == b) for a in x for b in y]
    assert statistics.improvement([x], [y], paired=False)[0] == np.mean(pairs)
    for paired in (True, False):
        share, low, high = statistics.improvement([x + 9], [y], paired=paired)
        close((share, low, high), (1, 0.025 ** (1 / 4), 1))


@pytest.mark.parametrize("paired", [True, False])
def test_who_is_better_is_unknown_where_a_rate_is(paired):
    x, y = np.array([0.1, 0.2, np.nan, 0.4]), np.array([0.1, 0.2, 0.3, 0.4])
    for sides in (([x], [y]), ([y], [x])):
        assert np.isnan(statistics.improvement(*sides, paired=paired)).all()


def test_a_run_is_on_the_line_between_its_evaluations_and_nowhere_else():
    spent = np.array([[0.0, 0.0], [10, 20], [20, 30]])
    rate = np.array([[0.0, 0.2], [0.4, 0.4], [0.6, 0.1]])
    found = statistics.at(spent, rate, np.array([0, 5, 20, 25]))
    close(found, [[0, 0.2], [0.2, 0.25], [0.6, 0.4], [np.nan, 0.25]])
    fine = np.linspace(0, 20, 200_001)
    mean = statistics.at(spent, rate, fine).mean(0)
    np.testing.assert_allclose(statistics.average(spent, rate, 20), mean, atol=1e-5)
    assert np.isnan(statistics.average(spent, rate, 25)).tolist() == [True, False]
    seen = statistics.waits(spent, rate, 0.4)
    assert seen.time.tolist() == [10, 20]
    seen = statistics.waits(spent, rate, 0.5)
    assert (seen.time.tolist(), seen.reached.tolist()) == ([20, 30], [True, False])


def test_the_way_to_a_place_at_which_a_run_stands_still_is_that_of_its_curve():
    spent = np.array([[0.0], [4], [4], [4]])  # the last updates were skipped
    rate = np.array([[0.0], [0.5], [0.25], [1.0]])
    close(statistics.average(spent, rate, 4.0), [0.25])
    close(
        statistics.average(np.append(spent, [[8]], 0), rate[[0, 1, 2, 3, 0]], 4), 0.25
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=9))
def test_runs_that_end_before_are_censored(runs):
    """Kaplan and Meier's product over times, runs that end at one wait until it."""
    time, reached = np.array(runs, float).T
    found = statistics.survival(statistics.Waits(time, reached == 1))
    share = 1.0
    for at, got in zip(found.time, found.share, strict=True):
        share *= 1 - np.sum((time == at) & (reached == 1)) / np.sum(time >= at)
        close(got, share)
    assert np.all(found.low <= found.share + 1e-9)
    assert np.all(found.share <= found.high + 1e-9)
    median, low, high = found.median()
    assert low <= median <= high
    assert (median == math.inf) == (found.share[-1] > 0.5)


# ----- whole comparisons


def history(rng, shift=0.0, seeds=8, points=7):
    """A run as noisy as those of the embedded task."""
    x = np.linspace(0, 1, points)[:, None]
    own = rng.exponential(0.05, seeds)
    rate = 0.2 + 0.5 * np.sqrt(x) + (own + shift) * x
    rate = rate + rng.normal(0, 0.02, (points, seeds))
    drawn = np.cumsum(rng.normal(9_000, 300, (points, seeds)), 0) - 9_000
    drawn[0] = 0
    updates = np.tile(10.0 * np.arange(points)[:, None], seeds)
    rate = np.clip(rate, 0, 1)
    return History(rate, np.sqrt(rate), drawn, 0.8 * drawn, updates)


def entries(rng, shifts, *, shared=True, conditions=("",)):
    return [
        Entry(
            f"r{i}",
            "",
            None,
            {name: history(rng, shift) for name in conditions},
            dict.fromkeys(conditions, "warm" if shared else f"warm {i}"),
        )
        for i, shift in enumerate(shifts)
    ]


QUESTION = Question("r0", (1.0, 3.0), {"tokens": 50_000.0}, None)
FEW = 200  # resamples are enough for a standard error


@pytest.mark.long
@pytest.mark.parametrize(("recipes", "shared"), [(2, True), (2, False), (4, True)])
def test_equal_recipes_are_hardly_ever_called_unequal(monkeypatch, recipes, shared):
    """A hundred pages; one with any claim on any axis is a false claim."""
    monkeypatch.setattr(statistics, "RESAMPLES", FEW)
    rng, pages = draw(recipes + shared), 100
    false = sum(
        bool(claimed(entries(rng, [0.0] * recipes, shared=shared)))
        for _ in range(pages)
    )
    assert false <= scipy.stats.binom.ppf(0.99, pages, 0.05)


def claimed(found):
    """Claims of the gaps alone, which are all that words come from."""
    plain = {entry.recipe: entry for entry in found}
    places = {a: analysis._places(found, a, QUESTION) for a in analysis.AXES}
    gaps = analysis._gaps(plain, places, QUESTION)
    return analysis.claims({"baseline": "r0", "gaps": files.json_value(gaps)})


def test_a_recipe_that_is_better_is_called_so_on_every_axis():
    found = analysis.analyse(entries(draw(0), [0.0, 0.2, -0.2]), QUESTION)
    sides = [" ".join(claim.split()[:4]) for claim in analysis.claims(found)]
    assert sorted(sides) == ["r1 is above r0"] * 3 + ["r2 is below r0"] * 3


ends = st.one_of(st.none(), st.floats(-1, 1))


@given(st.tuples(ends, ends, ends), st.tuples(ends, ends, ends))
def test_words_follow_the_interval_of_draws_alone(triple, greedy):
    gap = dict(zip(("middle", "low", "high"), triple, strict=True))
    gap["greedy"] = list(greedy)
    gap["middle"] = gap["middle"] or 0.0
    low, high = gap["low"], gap["high"]
    said = analysis.sentence("new", "old", "tokens", gap)
    known = low is not None and high is not None
    assert ("above" in said) == (known and low > 0)
    assert ("below" in said) == (known and not low > 0 and high < 0)
    assert ("greedily" in said) == (known and None not in greedy)


@pytest.mark.parametrize(
    ("shifts", "seeds", "says"),
    [
        ([0.0, 0.0], 8, "No difference that the intervals show."),
        (
            [0.0, 0.4],
            1,
            "No interval of any gap, so nothing is said of differences.",
        ),
        ([0.0], 8, "One recipe, and nothing to compare it with."),
    ],
)
def test_without_claims_it_is_said_why_there_are_none(shifts, seeds, says):
    found = [
        entry._replace(
            histories={
                name: History(*(x[:, :seeds] for x in own))
                for name, own in entry.histories.items()
            }
        )
        for entry in entries(draw(5), shifts)
    ]
    seen = analysis.analyse(found, QUESTION)
    assert analysis.claims(seen) == []
    assert analysis.without_claims(seen) == says


@pytest.mark.parametrize("shared", [True, False])
def test_beside_each_gap_is_that_of_greedy_completions(shared):
    """The same statistic of the other rates, by itself; a claim says both."""
    found = entries(draw(7), [0.0, 0.2], shared=shared)
    seen = analysis.analyse(found, QUESTION)
    swapped = [
        entry._replace(
            histories={n: h._replace(rate=h.greedy) for n, h in entry.histories.items()}
        )
        for entry in found
    ]
    want = analysis.analyse(swapped, QUESTION)
    for axis in analysis.AXES:
        own, other = seen["gaps"][axis]["r1"], want["gaps"][axis]["r1"]
        close(own["greedy"], [other["middle"], *other["alone_95"]])
        rates = seen["recipes"]["r1"][axis], want["recipes"]["r1"][axis]
        close(rates[0]["greedy"], rates[1]["rate"])
    middle, low, high = seen["gaps"]["tokens"]["r1"]["greedy"]
    (said,) = (claim for claim in analysis.claims(seen) if "tokens" in claim)
    assert f"; greedily {middle:+.3f} [{low:+.3f}, {high:+.3f}] by itself." in said


def test_recipes_are_compared_where_all_runs_have_come():
    rng = draw(4)
    found = entries(rng, [0.0, 0.0])
    short = History(*(part[:4] for part in found[1].histories[""]))
    found[1] = found[1]._replace(histories={"": short})
    seen = analysis.analyse(found, QUESTION)
    assert seen["places"]["updates"] == {"": 30.0}
    assert seen["places"]["tokens"][""] == short.drawn[-1].min() < 50_000
    cost = short.drawn + 3 * short.trained
    close(seen["places"]["cost"][""], cost[-1].min())
    values = seen["recipes"]["r0"]["updates"]["values"][""]
    close(values, found[0].histories[""].rate[3])
    # Where draws are free, cost is counted in tokens trained.
    free = QUESTION._replace(prices=(0.0, 2.0))
    place = analysis.analyse(found, free)["places"]["cost"][""]
    close(place, short.trained[-1].min())


def test_of_histories_without_greedy_completions_the_page_says_nothing(tmp_path):
    lists = {name: [[0.5] * 8] * 2 for name in ("rate", "drawn", "trained", "updates")}
    old = analysis.history_of(lists)
    assert np.isnan(old.greedy).all()
    found = [e._replace(histories={"": old}) for e in entries(draw(8), [0.0, 0.0])]
    results = analysis.analyse(found, QUESTION)
    assert results["gaps"]["tokens"]["r1"]["greedy"] == [None] * 3
    assert analysis.claims(results) == []
    arms = {"arms": [{"name": "r0"}], "histories": {"r0": lists}}
    of = shown()._replace(found=shown().found | results | arms, entries=found)
    said = Page(page.write(tmp_path, of).read_text()).text
    assert "r00.500-000" in "".join(said.split())


@cache
def shown():
    """A budget not reached, conditions, a swept setting, one recipe by itself."""
    rng, both = draw(5), ("easy", "hard")
    found = entries(rng, [0.0, 0.2], conditions=both)
    found += [e._replace(recipe="<b>") for e in entries(rng, [0.1], conditions=both)]
    found[2] = found[2]._replace(pairs={"easy": "x", "hard": "y"})
    found = [e._replace(own={"lr": 0.1, "how": "a"}) for e in found]
    for base in list(found):
        for setting, value in (("lr", 0.01), ("lr", 1.0), ("how", "b")):
            own = {name: history(rng) for name in both}
            found.append(base._replace(setting=setting, value=value, histories=own))
    question = QUESTION._replace(threshold=0.6, budgets={"updates": 90.0})
    results = analysis.analyse(found, question)
    arms = [{"name": "r0 @ easy"}]
    about = {"name": "<x>", "measured": None, "seeds": 8, "device": "cpu"}
    about |= {"jax": "1", "curax": "1", "arms": arms}
    path = {key: [[0.5] * 8] for key in ("rate", "drawn", "trained", "updates")}
    results |= about | {"histories": {"r0 @ easy": path}}
    return figures.Shown(results, found, question)


def test_the_page_shows_all_axes_and_no_markup_of_others(tmp_path):
    path = page.write(tmp_path, shown())
    read = Page(path.read_text())
    for name in (p.name for p in figures.PICTURES):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for text in (
        "generated tokens",
        "optimizer updates",
        "equal cost",
        " drawn tokens (easy), ",
        "<b> is above r0",
    ):
        assert text in read.text
    assert "of all seeds against all" in read.text
    assert read.text.count("for not every run came to 90 within its steps") == 1
    for claim in analysis.claims(shown().found):
        assert claim in read.text
    assert not [a for a in read.all("script") + read.all("link") if a]
    assert json.loads(json.dumps(shown().found, allow_nan=False))


def test_where_draws_are_free_the_page_counts_cost_in_trained_tokens(tmp_path):
    question = shown().question._replace(prices=(0.0, 2.0))
    results = shown().found | analysis.analyse(shown().entries, question)
    free = figures.Shown(results, shown().entries, question)
    text = Page(page.write(tmp_path, free).read_text()).text
    assert " trained tokens (easy), " in text
    assert "cost, in trained tokens" in text  # of the table of times
    assert "drawn tokens" not in text
    pictures = {p.name: p for p in figures.PICTURES}
    for name in ("curve_cost", "waits", "gaps", "rates"):
        axes = pictures[name].draw(free, drawing.LIGHT).axes
        said = [
            x for one in axes for x in (one.get_xlabel(), one.get_title(loc="left"))
        ]
        assert "cost, in trained tokens" in said


def test_a_threshold_is_not_rounded_to_whole_percent(tmp_path):
    """99.5% read as 100%, which no run has to reach."""
    question = shown().question._replace(threshold=0.995)
    results = shown().found | analysis.analyse(shown().entries, question)
    strict = figures.Shown(results, shown().entries, question)
    assert (
        "Until 99.5% are solved" in Page(page.write(tmp_path, strict).read_text()).text
    )
    (waits,) = (p for p in figures.PICTURES if p.name == "waits")
    assert waits.draw(strict, drawing.LIGHT).axes[0].get_ylabel() == "runs at 99.5%"


def test_curves_fill_the_height_of_their_picture():
    """From 0% to 100% recipes of nearly the same rate would be one line."""
    made = curves(shown())
    ends = np.array([one.dataLim.intervaly for one in made.axes])
    low, high = ends.min(), ends.max()
    assert high - low < 0.8
    for one in made.axes:
        close(one.get_ylim(), (low, high), atol=0.1 * (high - low))


def curves(of):
    (picture,) = (p for p in figures.PICTURES if p.name == "curve_tokens")
    return picture.draw(of, drawing.LIGHT)


@pytest.mark.parametrize("scales", [(1.0, 0.1), (0.1, 1.0)])
def test_conditions_far_apart_are_all_within_their_panels(scales):
    both = dict(zip(("easy", "hard"), scales, strict=True))
    moved = [
        entry._replace(
            histories={
                name: entry.histories[name]._replace(
                    rate=scale * entry.histories[name].rate
                )
                for name, scale in both.items()
            }
        )
        for entry in shown().entries
    ]
    for one in curves(shown()._replace(entries=moved)).axes:
        low, high = one.get_ylim()
        assert one.dataLim.y0 > low - 0.02
        assert one.dataLim.y1 < high + 0.02


def test_without_matplotlib_the_page_says_that_it_has_no_pictures(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(templates, "is_installed", lambda name: name != "matplotlib")
    monkeypatch.setattr(drawing, "png", None)
    text = page.write(tmp_path, shown()).read_text()
    assert templates.NO_PICTURES in html.unescape(text)
    assert "<figure" not in text
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.long
def test_a_knob_is_shown_where_all_of_its_arms_have_come():
    points = shown().found["sensitivity"]["lr"]["r1"]
    assert [point["value"] for point in points] == [0.01, 0.1, 1.0]
    assert [point["own"] for point in points] == [False, True, False]
    assert all(None not in point["cost"] for point in points)
