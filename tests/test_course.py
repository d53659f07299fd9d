"""What is predicted of a run, against closed forms and its definition in loops."""

from functools import cache, partial

import numpy as np
import pytest
from test_law import loaded

from curax.theory import course, predict, progress
from curax.theory.progress import Scores, Update

close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9)
P = np.array([0.02, 0.2, 0.5, 0.8])
AXES = np.array([[0.5, 0.4, 0.3, 0.1], [0.0, 0.1, -0.2, 0.3]])
GRID = np.linspace(0.001, 0.999, 5)


@cache
def foreseen():
    return predict.predict(loaded("ada_seq_positive_accepted"), P, P, often=0)


def known(noise=1.0):
    scores = progress.believed(P, 0.3, varied=0.5)
    scores = Scores(scores.gradient, noise * scores.right, noise * scores.wrong)
    return course.of_scores(P, scores, AXES)


def exact(cost=1.0, prompts=1.0):
    """A recipe of weight 1 whose updates have no noise."""
    one, none = np.ones_like(GRID), np.zeros_like(GRID)
    update = Update(one, none, none, none)
    return course.Recipe(GRID, update, cost * one, prompts)


def recipe(prompts=3.0):
    return course.of_prediction(foreseen(), foreseen().draws, prompts)


def run(recipe, rates, gradients, scale, **options):
    return course.course(recipe, rates, gradients, np.array(scale), **options)


def test_one_prompt_moves_as_the_equation_says():
    """One prompt and its exact gradient, h = sigma p (1 - p), by steps of one length.

    Each has the length s, so dp / dt = s h and the log-odds rise by s sigma a step; at
    the best length eta = s, and the log-odds rise by s sigma^2 p (1 - p).
    """
    gradients = course.of_beliefs(0.3, 1.0, 1.0)
    sigma, start = gradients.slope[0] ** 0.5, 0.2
    of = partial(run, exact(), np.array([start]), gradients, [0.01, 0.03])
    got = of(budget=100.0, step="length")
    odds = course.log_odds(np.array(start)) + sigma * np.array([0.01, 0.03]) * 100
    close(got.rates[:, 0], 1 / (1 + np.exp(-odds)))
    close(got.steps[-1], 100)
    times = np.array([0.01, 0.03]) * 100 * sigma**2
    got = of(budget=100.0, step="best", points=4000)
    # The solution of dz / dt = p (1 - p) is 2 z + 2 sinh z = t + that at the start.
    z = course.log_odds(got.rates[:, 0])
    first = course.log_odds(np.array(start))
    close(2 * (z + np.sinh(z)), 2 * (first + np.sinh(first)) + times, rtol=3e-3)


@pytest.mark.parametrize("step", course.STEPS)
def test_nothing_moves_without_signal(step):
    silent = exact()._replace(update=Update(*np.zeros((4, len(GRID)))))
    got = run(silent, P, known(), [1.0], budget=9.0, step=step)
    close(got.rates, P[None])
    got = run(exact(), P, known(), [0.0], budget=9.0, step=step)
    close(got.mean, P.mean())


@pytest.mark.parametrize("total", [np.inf, 4.0])
@pytest.mark.parametrize("step", course.STEPS)
def test_the_first_step_makes_the_progress_that_is_predicted(step, total):
    gradients = known()
    scores, axes = gradients.at(P)
    want = progress.progress(foreseen(), P, scores, axes=axes, prompts=3, total=total)
    tiny = 1e-6
    cost = 3 * foreseen().mean(P, foreseen().draws)
    options = {"budget": cost, "points": 1, "step": step, "total": total}
    got = run(recipe(), P, gradients, [tiny], **options)
    eta = tiny / want.square
    eta *= want.toward if step == "best" else want.square**0.5
    close(got.rates.mean() - P.mean(), eta * want.toward, rtol=1e-3, atol=0)


def test_order_of_prompts_does_not_matter_and_the_dead_stay_dead():
    rates = np.array([0.0, 0.3, 1.0, 0.05])
    of = partial(run, recipe(), gradients=known(), scale=[0.05, 0.2], budget=2e3)
    got, turned = of(rates), of(rates[[2, 0, 3, 1]])
    close(turned.rates, got.rates[:, [2, 0, 3, 1]])
    close(turned.mean, got.mean)
    assert (got.rates[:, [0, 2]] == [0, 1]).all()
    assert (got.rates[:, [1, 3]] > rates[[1, 3]]).all()


def test_what_was_never_right_is_lifted_by_what_it_shares_and_else_stays():
    """In log-odds at the start by eta sigma a . E[a w h], which is linear in rho."""
    rates, scale = np.array([0.001, 0.3, 0.6]), 1e-6
    lifts = []
    for rho in (0.0, 0.01, 0.02):
        gradients = course.of_beliefs(0.3, 1.0, rho)
        options = {"budget": 24.0, "points": 1, "step": "length"}
        got = run(recipe(), rates, gradients, [scale], **options)
        lifts.append(np.diff(course.log_odds(np.array([rates[0], got.rates[0, 0]])))[0])
        made, (h2, *_), mean = got.steps[-1, 0], gradients.at(rates)[0], np.mean
        moments = [
            np.interp(course.log_odds(rates), course.log_odds(P), y)
            for y in progress.update_of(foreseen())
        ]
        update = Update(*moments)
        pairs = rho * mean(update.weight * h2**0.5) ** 2
        square = mean(update.square(gradients.at(rates)[0])) / 3 + 2 / 3 * pairs
        eta = scale / square**0.5
        want = made * eta * gradients.slope[0] ** 0.5 * rho
        close(lifts[-1], want * mean(update.weight * h2**0.5), rtol=1e-3, atol=1e-12)
    assert lifts[0] == 0 < lifts[1] < lifts[2]


def test_half_a_budget_is_half_of_the_course():
    of = partial(run, recipe(), P, known(), [0.02, 0.1], step="length")
    whole, half = of(budget=800.0, points=40), of(budget=400.0, points=20)
    for name in ("spent", "mean", "steps"):
        close(getattr(half, name), getattr(whole, name)[:21])


def test_a_step_costs_what_the_recipe_draws_at_these_pass_rates():
    hard, easy = (
        run(recipe(), np.full(3, p), known(), [0.0], budget=960.0).steps[-1, 0]
        for p in (0.02, 0.8)
    )
    draws = foreseen().draws
    close([hard, easy], 960 / 3 / draws[[0, 3]])
    assert easy > hard


@pytest.mark.parametrize("step", course.STEPS)
def test_a_course_is_its_definition(step):
    """A loop over prompts, pairs of prompts and lanes; `total` prompts of two kinds."""
    gradients, total, scales, points = known(), 8.0, (0.01, 0.05), 6
    got = run(
        *(recipe(), P, gradients, scales),
        **{"budget": 300.0, "total": total, "step": step, "points": points},
    )
    seen = progress.update_of(foreseen())
    for lane, scale in enumerate(scales):
        p, q = P.copy(), P.copy()
        for _ in range(points):
            w, spread, credit, share, cost = (
                np.interp(course.log_odds(p), course.log_odds(P), y)
                for y in (*seen, foreseen().draws)
            )
            (h2, right, wrong), a = gradients.at(p)
            h = h2**0.5
            moves, alone, pairs = np.zeros(4), 0.0, 0.0
            for i in range(4):
                for j in range(4):
                    moves[i] += h[i] * (a[:, i] @ a[:, j]) * w[j] * h[j] / 4
                    pairs += w[i] * h[i] * (a[:, i] @ a[:, j]) * w[j] * h[j] / 16
                own = a[:, i] @ a[:, i]
                moves[i] += (1 - own) * w[i] * h2[i] / total
                pairs -= own * w[i] ** 2 * h2[i] / 4 / total
                noise = share[i] * right[i] + (1 - share[i]) * wrong[i]
                alone += (h2[i] * (w[i] ** 2 + spread[i]) + noise * credit[i]) / 4
            pairs /= 1 - 1 / total
            square = alone / 3 + (1 - 1 / 3) * pairs
            eta = scale * (moves.mean() / square if step == "best" else square**-0.5)
            eta *= 300 / points / (3 * cost.mean())
            (fresh, _, _), b = gradients.at(q)
            unseen = [
                sum(b[:, i] @ a[:, j] * w[j] * h[j] / 4 for j in range(4))
                for i in range(4)
            ]
            q = moved(q, eta * fresh**0.5 * np.array(unseen))
            p = moved(p, eta * moves)
        close(got.rates[lane], p)
        close(got.mean[-1, lane], q.mean())


def moved(p, by):
    return 1 / (1 + np.exp(-course.log_odds(p) - by / (p * (1 - p))))


def test_the_time_scale_that_reaches_a_level_is_the_first_one():
    ends = np.array([0.2, 0.3, 0.5, 0.4, 0.6])
    assert course.reaching(ends, 0.1) == 0
    close(course.reaching(ends, 0.45), 1.75)
    assert course.reaching(ends, 0.7) == 4


def test_what_is_known_at_some_pass_rates_is_carried_to_others():
    gradients = known()
    scores, axes = gradients.at(P)
    close(scores.gradient, progress.believed(P, 0.3, varied=0.5).gradient)
    close(axes, AXES)
    far, _ = gradients.at(np.array([0.001, 0.999]))
    ends = scores.gradient[[0, -1]] / (P * (1 - P))[[0, -1]] ** 2
    close(far.gradient / (0.001 * 0.999) ** 2, ends)
    close(far.wrong, scores.wrong[[0, -1]])
    less = gradients.believed(100.0, 0.1)
    close(less.slope, gradients.slope / 10)
    assert (np.linalg.norm(less.axes, axis=0) <= 1 + 1e-12).all()
