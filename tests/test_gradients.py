"""Variance of gradients: unbiased by enumeration, streamed as naive numpy has it."""

import inspect
import json
import re
from dataclasses import replace
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small
import tiny
from outputs import refusal

import curax
from curax import allocate, loss, off_policy, update, xray
from curax.arrays import supports
from curax.config import ConfigError, Update, load, override
from curax.step import draw, drivers, learn
from curax.theory import gradient_stats as stats
from curax.theory import gradients, law_residual, probe

close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
nearly = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)


def sums_of(outcome, scores, tokens=1.0):
    """`Sums` of completions `[..., n]` and scores `[..., n, P]`, naively."""
    square = (scores**2).sum(-1)
    total, right, twice = ((outcome[..., None] ** k * scores).sum(-2) for k in range(3))

    def dot(x, y):
        return (x * y).sum(-1)

    return stats.Sums(
        n=np.full(outcome.shape[:-1], float(outcome.shape[-1])),
        tokens=np.sum(tokens * np.ones_like(outcome), -1),
        r=outcome.sum(-1),
        rr=(outcome**2).sum(-1),
        square=square.sum(-1),
        r_square=(outcome * square).sum(-1),
        rr_square=(outcome**2 * square).sum(-1),
        total=dot(total, total),
        right=dot(right, right),
        cross=dot(total, right),
        cross_rr=dot(total, twice),
    )


def softmax(logits):
    """Probabilities and scores, by the logits, of a table with one row."""
    policy = np.exp(logits) / np.exp(logits).sum()
    return policy, np.eye(len(logits)) - policy


def test_estimates_are_unbiased_over_all_draws_of_a_tabular_policy():
    """Closed forms: grad p = pi (r - p), V = E[(r - p)^2 |s|^2] - |grad p|^2."""
    policy, scores = softmax(np.array([0.3, -0.5, 1.0]))
    reward = np.array([1.0, 0.0, 0.25])  # a grader may give part of it
    actions = np.array(list(product(range(3), repeat=6)))
    chance = policy[actions].prod(-1)
    got = stats.estimates(sums_of(reward[actions], scores[actions]))
    p, square = policy @ reward, (scores**2).sum(-1)
    grad_p = policy * (reward - p)
    want = {
        "p": p,
        "outcome": policy @ (reward - p) ** 2,
        "square": policy @ square,
        "proxy": policy @ square * (policy @ (reward - p) ** 2),
        "gradient": grad_p @ grad_p,
        "variance": policy @ ((reward - p) ** 2 * square) - grad_p @ grad_p,
    }
    for name, value in want.items():
        close(chance @ getattr(got, name), value)
    same = stats.estimates(sums_of(np.ones((1, 6)), scores[actions[:1]]))
    close([same.variance, same.gradient, same.proxy], 0)
    assert np.isnan(stats.estimates(sums_of(np.ones((1, 3)), scores[None])).variance)


def test_no_cosine_is_told_where_noise_leaves_no_gradient():
    each = [np.array([x, x]) for x in (0.5, 0.25, 2.0, 0.5, -0.1, 0.4, 0.2, 5.0)]
    estimates = stats.Estimates(*each)
    assert stats.explained(estimates) < 0
    assert np.isnan(stats.shared(estimates, 1.0))


@pytest.mark.parametrize("less", ["gradient", "common"])
def test_no_floor_is_told_where_noise_leaves_no_variance(less):
    each = [np.array([x, x]) for x in (0.5, 0.25, 2.0, 0.5, -0.1, 0.4, 0.2, 5.0)]
    each = stats.Estimates(*each)
    if less == "common":
        each = each._replace(gradient=np.array([0.01, 0.01]))
    found = stats.floors(each, each, each, 0.2 if less == "common" else 0.0, 8)
    assert np.isnan(list(found["prompts"].values())).all()
    close(found["counts"]["reached"], 1)


# ----- drawn from a policy


@cache
def parts():
    """The small run with the policy that is a table."""
    config = load(small.FILE)
    return curax.build(replace(config, model=partial(tiny.table), warm_start=None))


@cache
def driver():
    return drivers.Hosted()


def table_scores(embed, contexts, tokens, mask, kept=None):
    """`[n, V D]` gradients of log pi by the table, in closed form; `[n, T, V]` kept."""
    found = []
    every = np.ones((*tokens.shape, len(embed))) if kept is None else kept
    for said, real, inside in zip(tokens, mask, every, strict=True):
        grad, last = np.zeros_like(embed), contexts.tokens[-1]
        for token, chance in zip(said[real], inside[real], strict=True):
            chance = chance * np.exp(embed @ embed[last])
            error = np.eye(len(embed))[token] - chance / chance.sum()
            grad += np.outer(error, embed[last])
            grad[last] += error @ embed
            last = token
        found.append(grad.reshape(-1))
    return np.stack(found)


def test_sums_are_those_of_naive_scores_of_a_table(monkeypatch):
    """Streamed two at a time; halves and all; a missing outcome is not there."""
    state = curax.init(parts(), 1)
    monkeypatch.setattr(probe, "ENTRIES", 2 * state.params["embed"].size)
    ids, weight = np.array([5, 1, 40]), np.array([0.5, 1.0, 2.0])
    contexts, (tokens, mask, graded) = probe.drawn(parts(), state, ids, 8, driver())
    assert graded.shape == (3, 8)
    outcome = np.random.default_rng(0).integers(0, 3, (3, 8)).astype(np.float32) / 2
    outcome[0, 5] = np.nan
    given = contexts, (tokens, mask, outcome)
    monkeypatch.setattr(probe, "drawn", lambda *_: given)
    got = probe.probe(parts(), state, ids, 8, drive=driver(), weigh=lambda _: weight)
    embed, total = np.asarray(state.params["embed"], np.float64), 0.0
    for k in range(3):
        here = jax.tree.map(lambda x, k=k: x[k], contexts)
        scores = table_scores(embed, here, tokens[k], mask[k])
        own, labels = scores, outcome[k]
        for half, part in enumerate((slice(4), slice(4, 8), slice(8))):
            real = ~np.isnan(outcome[k, part])
            own, labels = scores[part][real], outcome[k, part][real]
            want = sums_of(labels, own, mask[k, part][real].sum(-1))
            for name, x, y in zip(stats.Sums._fields, got.sums, want, strict=True):
                nearly(x[half, k], y, err_msg=name)
        centred = labels - labels.mean()
        total = total + weight[k] / 3 * centred @ own / (len(own) - 1)
    nearly(np.asarray(got.gradient["embed"]).reshape(-1), total)
    # By bins of the share of right ones in the first half.
    share, bins = np.unique(np.nanmean(outcome[:, :4], -1), return_inverse=True)
    assert len(share) > 1
    edges = (0.0, *share[1:], 1.01)
    apart = probe.probe(
        *(parts(), state, ids, 8),
        drive=driver(),
        weigh=lambda _: weight,
        edges=edges,
    )
    np.testing.assert_array_equal(apart.bins, bins)
    nearly(np.asarray(apart.gradient["embed"]).reshape(-1), total)
    for number, own in enumerate(apart.by_bin):
        only = np.where(bins == number, weight, 0.0)
        alone = probe.probe(
            parts(), state, ids, 8, drive=driver(), weigh=lambda _, w=only: w
        )
        jax.tree.map(nearly, own, alone.gradient)


# ----- the law and a real step


@pytest.mark.long
def test_a_step_departs_from_the_law_by_what_is_added_to_it():
    """Of a table, credits are sum c s / M; a constant length and SGD only scale."""
    sgd = partial(optax.sgd, learning_rate=0.5)
    config = replace(parts().config, optimizer=sgd, update=Update(minibatches=1))
    run = replace(parts(), config=config, tx=update.transformation(sgd, 1.0))
    state = curax.init(run, 1)
    drawn = driver().call(drawn_with_luck, run, state)
    found = driver().call(law_residual.updates, run, state, drawn)
    each = [np.asarray(x["embed"], np.float64).reshape(-1) for x in found]
    *_, batch = driver().call(learn.prepared, run, state, drawn)
    embed, want = np.asarray(state.params["embed"], np.float64), 0.0
    tokens, mask, credit = map(np.asarray, (batch.tokens, batch.mask, batch.credit))
    assert (credit != 0).any()
    for m, c in enumerate(np.asarray(batch.context)):
        here = jax.tree.map(lambda x, c=c: np.asarray(x)[c], drawn.contexts)
        own = table_scores(embed, here, tokens[m][None], mask[m][None])[0]
        want = want + credit[m, 0] * own / len(tokens)
    nearly(each[0], want)
    length = 2  # of `aggregate.length` in small.py
    for value in each[1:5]:  # norm clipping does not reach this far
        nearly(value, want / length)
    nearly(each[5], want / length / 2)


@pytest.mark.long
def test_scores_of_replayed_draws_are_within_what_was_kept():
    sizes = {"sampling.top_p": 0.7, "sampling.replay_support": True}
    run = replace(parts(), config=override(parts().config, sizes))
    state, ids = curax.init(run, 1), np.array([5, 1, 40])
    contexts, rows = probe.drawn(run, state, ids, 8, driver())
    tokens, mask, outcome, noted = rows
    outcome[:] = np.random.default_rng(0).integers(0, 2, outcome.shape)
    embed = np.asarray(state.params["embed"], np.float64)
    kept = np.asarray(supports.among(jnp.asarray(noted), 0, len(embed)))
    assert 0.3 < kept[mask].mean() < 0.8
    start = optax.tree.zeros_like(state.params)
    for k in range(3):
        here = jax.tree.map(lambda x, k=k: x[k : k + 1], contexts)
        own = [part[k] for part in rows]
        got, _ = driver().call(
            probe.add_scores, run, state, start, np.float32(7), here, *own
        )
        alone = jax.tree.map(lambda x: np.asarray(x[0]), here)
        scores = table_scores(embed, alone, tokens[k], mask[k], kept[k])
        centred = outcome[k] - outcome[k].mean()
        nearly(np.asarray(got["embed"]).reshape(-1), centred @ scores)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"update.behaviour_as_old": True},
        {"sampling.top_p": 0.9, "update.behaviour_as_old": True},
        {"sampling.top_p": 0.9, "sampling.off_policy": off_policy.truncated_ratio},
        {"sampling.top_p": 0.9, "sampling.off_policy": off_policy.self_normalised},
    ],
    ids=["bypass", "truncated bypass", "weights", "normalised"],
)
def test_what_corrects_a_draw_departs_from_the_law_with_the_loss(changes):
    """Rows before have plain ratios to the policy at the start of the step."""
    config = override(
        replace(parts().config, update=Update(minibatches=2)),
        changes | {"loss": partial(loss.clipped_ratio, low=1.0, high=np.inf)},
    )
    run = replace(parts(), config=config)
    state = curax.init(run, 1)
    drawn = driver().call(drawn_with_luck, run, state)
    plain = override(
        config,
        {"update.behaviour_as_old": False, "sampling.off_policy": off_policy.none},
    )
    want, found = (
        driver().call(law_residual.updates, replace(run, config=one), state, drawn)
        for one in (plain, config)
    )
    for one, other in zip(found[:3], want[:3], strict=True):
        np.testing.assert_array_equal(one["embed"], other["embed"])
    off = np.abs(np.asarray(found[3]["embed"]) - want[3]["embed"]).max()
    assert (off > 1e-4) == ("sampling.top_p" in changes), off


def drawn_with_luck(run, state):
    """A batch whose outcomes are whether the first token is odd."""
    drawn = draw.attempt(drivers.Traced(), run, state, None)
    outcome = (drawn.rollouts.tokens[:, 0] % 2).astype("float32")
    return replace(drawn, outcome=outcome)


def test_cosines_and_scales_are_those_of_expected_updates():
    """Of updates that are nearly all noise, by products of different draws."""
    rng, repeats, law = np.random.default_rng(0), 4000, np.array([1.0, 0, 0])
    scale = np.array([1.0, 0.5, 0.5, 0.5, 0.1, 2.0])
    turned = np.array([[1, 0, 0]] * 3 + [[0.6, 0.8, 0]] * 3)
    noise = rng.normal(size=(repeats, 1, 3)) * 2  # shared by all, as in a real step
    each = scale[:, None] * (turned + noise)
    gram = np.einsum("rif,rjf->ij", each, each)
    total = each.sum(0)
    along = total @ law / repeats
    found = law_residual.rows(total @ total.T, gram, along, 1.0, repeats)
    assert [row["stage"] for row in found] == list(law_residual.STAGES)
    assert [found[0][k] for k in ("cosine", "scale", "single_cosine")] == [1, 1, 1]
    mean = noise.mean((0, 1))
    close([row["scale"] for row in found[1:]], scale * (turned[:, 0] + mean[0]))
    got = [row["cosine"] for row in found[1:]]
    np.testing.assert_allclose(got, turned[:, 0], atol=0.1)
    close([found[i]["scale_before"] for i in (2, 3, 5, 6)], [0.5, 1, 0.2, 20])
    close([found[i]["cosine_before"] for i in (2, 3, 5, 6)], 1)
    assert all(row["single_cosine"] < 0.5 for row in found[1:])


# ----- what follows


def population(rng, count=40, n=16, width=30):
    """Sums and mean gradient of prompts whose scores lie along the outcome by .2 of
    their square and whose gradients have the cosine .3, drawn."""
    p = rng.uniform(0.1, 0.9, count)
    common, own = rng.normal(size=width), rng.normal(size=(count, width))
    way = np.sqrt(0.3) * common + np.sqrt(0.7) * own
    way /= np.sqrt(width)
    r = (rng.random((count, n)) < p[:, None]).astype(float)
    unit = (r - p[:, None]) / np.sqrt(p * (1 - p))[:, None]
    noise = rng.normal(size=(count, n, width)) / np.sqrt(width)
    scores = np.sqrt(0.2) * unit[..., None] * way[:, None] + np.sqrt(0.8) * noise
    gradient = np.einsum("kn,knw->kw", r - r.mean(-1, keepdims=True), scores) / (n - 1)
    return p, r, scores, gradient


def test_how_far_right_completions_vary_is_found_again():
    """Scores of right ones about their mean have a fourth of the variance, or none."""
    rng = np.random.default_rng(0)
    p = rng.uniform(0.2, 0.8, 60)[:, None]
    r = (rng.random((60, 16)) < p).astype(float)
    noise = rng.normal(size=(60, 16, 30))
    mean = rng.normal(size=(60, 1, 30)) * (r - p)[..., None]
    for part in (1.0, 0.5, 0.0):
        scores = mean + noise * np.where(r, part, 1.0)[..., None]
        found = stats.varied(sums_of(r, scores))
        np.testing.assert_allclose(found, part**2, atol=0.03)
    assert stats.varied(sums_of(r / 2, scores)) == 1.0  # neither right nor wrong
    assert stats.varied(sums_of(np.zeros((60, 16)), scores)) == 1.0


def test_both_beliefs_are_found_again():
    found = []
    for seed in range(20):
        _, r, scores, gradient = population(np.random.default_rng(seed))
        each = stats.estimates(sums_of(r, scores))
        total = float((gradient.sum(0) ** 2).sum())
        close(each.own, (gradient**2).sum(-1))
        found.append((stats.explained(each), stats.shared(each, total)))
    mean, error = np.mean(found, 0), np.std(found, 0) / np.sqrt(len(found))
    assert (error < 0.03).all()
    assert (np.abs(mean - [0.2, 0.3]) < 3 * error + 0.01).all()


def test_predictors_correlate_with_variances_or_are_constant():
    p = np.array([0.1, 0.2, 0.4, 0.3])
    same = stats.Estimates(*(p for _ in stats.Estimates._fields))
    other = same._replace(variance=p**3, square=np.ones(4), length=-p)
    found = stats.correlations(other, same)
    close(found["variance"]["spearman"], 1)
    close(found["variance"]["pearson"], np.corrcoef(p, p**3)[0, 1])
    close([*found["length"].values()], -1)
    assert found["square"] == {"pearson": 0.0, "spearman": 0.0}
    level = stats.correlations(other, same._replace(variance=np.ones(4)))
    assert {x for row in level.values() for x in row.values()} == {0.0}


@pytest.mark.long
def test_perfect_knowledge_leaves_what_neyman_says():
    """With V known, the oracle is the closed form up to whole numbers and bounds."""
    rng = np.random.default_rng(0)
    _, r, scores, _ = population(rng, count=60)
    each = stats.estimates(sums_of(r, scores))
    v = rng.uniform(0.5, 4.0, 60)
    each = each._replace(variance=v, gradient=rng.uniform(0, 0.2, 60))
    found = stats.floors(each, each, each, 0.02, 8)
    close(found["counts"]["least"], np.mean(np.sqrt(v)) ** 2 / np.mean(v))
    close(found["counts"]["least"], found["counts"]["reached"])
    step = each.gradient + v / 8
    best = np.mean(np.sqrt(step)) ** 2 - 0.02
    close(found["prompts"]["least"], best / (np.mean(step) - 0.02))
    both = np.mean(np.sqrt(each.gradient + v)) ** 2 - 0.02
    close(found["both"]["least"], both / 8 / (np.mean(step) - 0.02))
    rows = stats.allocations(each, np.full(60, 16.0), each, 8)
    close([rows["uniform"][name] for name in ("measured", "labels", "tokens")], 1)
    close(rows["uniform"]["log_measured"], 1)
    least = min(row["norms"] for row in rows.values())
    assert rows["neyman"]["norms"] <= least + 1e-9  # the optimum of what it believes
    assert found["counts"]["least"] <= rows["oracle"]["measured"] < 1
    same = stats.correlations(each, each)["variance"]
    close(list(same.values()), 1)


def test_every_allocator_is_judged():
    known = {
        name
        for name, rule in inspect.getmembers(allocate, inspect.isfunction)
        if {"budget", "most"} <= set(inspect.signature(rule).parameters)
        and not name.startswith("_")
    }
    assert set(stats.allocators(64, 32, 64.0)) == known


# ----- as a command


LUCKY = """
from dataclasses import replace
from functools import partial

import small
import tiny
from curax.config import load

def task():
    def verify(target, tokens, mask):
        return (tokens[:, 0] % 2).astype("float32")

    return replace(small.task(), verify=verify)

def get_config():
    model = partial(tiny.table)
    return replace(load(small.FILE), task=task, model=model, warm_start=None)
"""


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    """Of a recipe before its first step."""
    recipe = tmp_path / "lucky.py"
    recipe.write_text(LUCKY)
    options = ["--gradients", str(recipe), "--probe", "6", "8", "--set", "seed=2"]
    options += ["--law", "3"]
    assert xray.main([*options, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    found = json.loads((tmp_path / "gradients.json").read_text())
    assert len(found["prompts"]) == found["probed"] == 6
    assert f"--explained {found['explained']:.3g}" in text
    assert f"--varied {found['varied']:.3g}" in text
    assert len(found["law"]["rows"]) == 7
    assert re.search(r"^optimizer +", text, re.M)
    for row in ("neyman_within_tokens", "oracle", "choice of prompts"):
        assert row in text


def test_prompts_without_any_gradient_are_told():
    """And none is divided by."""
    one = sums_of(np.ones((2, 8)), np.ones((2, 8, 3)))
    three = stats.Sums(*(np.stack([x, x, x]) for x in one))
    ids = np.arange(2)
    with pytest.raises(ConfigError, match="0 of 2 prompts have right and wrong"):
        gradients.statistics(ids, three, ids, np.zeros((2, 2)), 8)


def test_cosines_are_means_over_pairs_of_prompts():
    """Of noiseless gradients, by bins; of one with a single prompt nothing is said."""
    rng = np.random.default_rng(0)
    grad, bins = rng.normal(size=(9, 5)) + 1, np.array([0, 0, 0, 1, 1, 2, 3, 3, 3])
    grad[6:] = 0
    norm = (grad**2).sum(-1)
    blank = stats.Estimates(*[norm] * len(stats.Estimates._fields))
    sums = np.stack([grad[bins == b].sum(0) for b in range(4)])
    got = stats.cosines(blank, bins, sums @ sums.T)
    for b, c in product(range(4), repeat=2):
        here, there = (np.flatnonzero(bins == x) for x in (b, c))
        pairs = [grad[i] @ grad[j] for i, j in product(here, there) if i != j]
        known = {b, c} <= {0, 1}
        root = (norm[here].mean() * norm[there].mean()) ** 0.5
        close(got[b, c], np.mean(pairs) / root if known else 0.0, atol=1e-12)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--probe", "4", "8"], "--probe is for --gradients; add that"),
        (["--gradients", "grpo", "--probe", "4", "7"], "--probe 4 7: at least 2"),
        (["grpo", "--gradients", "grpo"], "--gradients grpo names what is measured"),
        (["--gradients", "grpo", "--beta", "1", "2"], "and --beta is not for it"),
        (["--gradients", "grpo", "--step", "3"], "grpo is no run folder"),
        (["--gradients", "grpo", "--law", "1"], "--law 1: noise is told apart by 2"),
        (["--gradients", "dapo", "--law", "8"], "set sampling.attempts to 1"),
        (["--gradients", "sage", "--law", "8"], "set hint to None"),
        (["--gradients", "dro"], "reflection rewards by the log-prob"),
    ],
)
def test_bad_options_get_a_sentence(options, said, tmp_path):
    assert said in refusal(xray.main, *options, "--out", tmp_path / "new")
    assert not list(tmp_path.iterdir())
