"""Every folder of a paper: its config has the published settings, and takes a step.

The step has every stage, KL and optimizer of the config, but the model and
the task of `test_configs`, and few and small arrays.
"""

import itertools
import re
import tomllib
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_configs
import test_reflected
import tiny

from curax import advantage, hint
from curax.compare import analysis, runner, statistics
from curax.compare import experiment as experiments
from curax.config import load, override, transferred
from curax.evaluate.benchmarks import BENCHMARKS
from curax.settings.config_paths import describe, option
from curax.settings.recipes import recipes
from curax.step import drivers, states
from curax.step.build import build
from curax.step.step import step
from curax.step.types import Selection
from curax.tasks import rationale, word_problems
from experiments import in_small
from experiments.references_control import experiment as references_control
from experiments.references_control import greedy as in_draws_and_greedily
from experiments.references_control import own_answer
from experiments.text import show as in_text
from experiments.text_hints import experiment as text_hints
from experiments.text_starts import show as of_starts

ROOT = Path(__file__).parent.parent
CONTROLS = ROOT / "experiments/references_control/README.md"
HINTS = ROOT / "experiments/text_hints/README.md"
PAPERS = sorted(path.parent.name for path in ROOT.glob("experiments/*/paper.toml"))
for_every_paper = pytest.mark.parametrize("paper", PAPERS)


def folder(paper):
    return ROOT / "experiments" / paper


@cache
def published(paper):
    return tomllib.loads((folder(paper) / "paper.toml").read_text())


def at(config, field):
    """The value at a dotted name; of a function its name, of a path its parts."""
    tree = describe(config)
    for key in field.split("."):
        tree = tree[int(key) if isinstance(tree, list) else key]
    return tree["function"].rpartition(".")[2] if isinstance(tree, dict) else tree


def test_every_paper_has_its_folder():
    first = ["dapo", "dro", "dynamo", "gvm", "maxrl", "pods"]
    assert PAPERS == [*first, "raft", "reinforce_ada", "sage"]  # noqa: SIM300


@for_every_paper
def test_a_config_has_the_published_settings(paper):
    config = load(folder(paper) / "config.py")
    found = published(paper)
    for name, said in found["settings"].items():
        assert set(said) <= {"value", "source", "where", "field", "here"}, name
        assert said["source"] in ("paper", "code"), name
        assert ("field" in said) != bool(said.get("here")), name
        if field := said.get("field"):
            got, want = at(config, field), said["value"]
            if isinstance(got, str) and "/" in got:
                assert want in got.split("/"), name
            else:
                assert got == want, name
                assert type(got) is type(want), name
        if said.get("here") == "kl is None":
            assert config.kl is None
    protocol = found.get("evaluation", {})
    assert set(protocol.get("sets", ())) <= set(BENCHMARKS)
    assert protocol.get("n", config.evaluation.samples) == config.evaluation.samples
    assert found["arxiv"] in (folder(paper) / "config.py").read_text()


@for_every_paper
def test_a_page_says_what_is_claimed_and_how_to_run_it(paper):
    text = (folder(paper) / "README.md").read_text()
    assert text.startswith("# ")
    for heading in ("Claim", "Settings", "In small"):
        assert f"\n## {heading}\n" in text
    assert f"python -m curax.train --config experiments/{paper}/config.py" in text
    assert f"python -m curax.compare experiments/{paper}" in text
    assert published(paper)["arxiv"] in text
    for name in published(paper).get("evaluation", {}).get("sets", ()):
        assert f"`{name}`" in text, name
    row = rf"^\|.*{published(paper)['arxiv']}.*experiments/{paper}/README.md"
    assert re.search(row, (ROOT / "docs/papers.md").read_text(), re.M)


def test_pages_have_the_tables_of_what_was_compared():
    every = dict(in_small.pages())
    assert {folder(paper) / "README.md" for paper in PAPERS} <= set(every)
    for page, found in every.items():
        text = page.read_text()
        assert in_small.renewed(text, in_small.tables(found)) == text
        assert "**Not run.**" not in page.read_text()
        said = experiments.load_experiment(page.parent)
        assert list(found["recipes"]) == list(said.recipes)
        for name, tuned in found.get("tuned", {}).items():
            tried = [list(trial["settings"].values()) for trial in tuned["trials"]]
            want = itertools.product(*said.tune.values())
            assert tried == list(map(list, want)), (page, name)
            assert not analysis.ends_taken(tuned), (page, name)


def test_the_page_of_controls_says_what_their_results_give():
    text = CONTROLS.read_text()
    found = dict(in_small.pages())[CONTROLS]
    ends = {
        name: np.array(own["tokens"]["values"][""])
        for name, own in found["recipes"].items()
    }
    gains = {k: x - found["histories"][k]["rate"][0] for k, x in ends.items()}
    arms = dict.fromkeys(name.rpartition("-")[0].rpartition("-")[0] for name in ends)
    rows = {f"`{name}`": [name] for name in arms}
    less = {f"`aggregate` less {row}": ["aggregate", *rows[row]] for row in [*rows][1:]}
    for row, (name, *base) in (rows | less).items():
        cells = []
        for rate in references_control.RATES:
            if f"{[name, *base][-1]}-{rate}" not in ends:
                cells.append("")
                continue
            own = gains[f"{name}-{rate}"]
            if base:
                own = ends[f"{name}-{rate}"] - ends[f"{base[0]}-{rate}"]
            cells.append(of_starts.apart(own))
        assert f"| {row} | {' | '.join(cells)} |" in text


def test_the_page_of_controls_says_what_greedy_answers_gain():
    text, made = CONTROLS.read_text(), in_draws_and_greedily.get_experiment()
    found = runner.finished(CONTROLS.parent / "results_greedy")
    assert set(found) == set(made.recipes)
    for name, own in found.items():
        gains = (
            in_text.value(made, own, rate) - own[rate][0] for rate in analysis.RATES
        )
        assert f"| `{name}` | {' | '.join(map(of_starts.apart, gains))} |" in text


def test_the_page_of_hints_says_what_their_results_give():
    """Gaps of the same seed, at 64 thousand tokens and at 22 updates, then greedily."""
    text, made = HINTS.read_text(), text_hints.get_experiment()
    found = dict(in_small.pages())[HINTS]["histories"]
    places = [("drawn", made.tokens, "rate"), ("updates", 22, "rate")]
    places.append(("updates", 22, "greedy"))
    row = r"^\| \*(\w+)\* \|.*?\| \*(\w+)\*.*? \| ([+-]\..*) \|$"
    rows = re.findall(row, text, re.M)
    assert len(rows) == 8
    for name, base, cells in rows:
        want = []
        for axis, place, what in places:
            pairs = (
                [np.array(found[arm][x], float) for x in (axis, what)]
                for arm in (name, base)
            )
            mine, theirs = (statistics.at(*pair, place) for pair in pairs)
            want.append(of_starts.apart(mine - theirs))
        assert cells.split(" | ") == want, (name, base)


def test_hints_of_others_are_those_of_the_prompt_before():
    task = word_problems.task(size=60, hints=True, least_steps=3)
    prompts = task.prompts(np.arange(20))
    assert task.hinting
    own = hint.from_file(task.hinting, prompts, levels=3, written=None)
    others = text_hints.of_others(task.hinting, prompts, levels=3, written=None)
    for mine, theirs in zip(own, others, strict=True):
        np.testing.assert_array_equal(np.roll(mine, 1, axis=0), theirs)
        assert not np.array_equal(mine, theirs)


def shown(task, prompts):
    rows = zip(*task.reference(prompts), strict=True)
    return [task.decode(row[mask]) for row, mask in rows]


def test_references_are_of_others_and_rewards_are_of_others():
    own = word_problems.task(sentences=True, size=60)
    other = references_control.of_others(size=60)
    ids = np.arange(50)
    assert own.reference
    assert other.reference
    behind = own.reference(own.prompts(ids + references_control.BEHIND))
    wrong = references_control.wrong_number(size=60)
    assert wrong.reference
    for mine, theirs in zip(
        shown(own, own.prompts(ids)), shown(wrong, own.prompts(ids)), strict=True
    ):
        numbers = re.findall(r"\d+", mine + theirs)
        assert len({*numbers}) == 2
        assert re.sub(r"\d+", "", mine) == re.sub(r"\d+", "", theirs)
    jax.tree.map(
        np.testing.assert_array_equal, other.reference(other.prompts(ids)), behind
    )
    reward, exists = jnp.array([[1.0, 0.0, 0.0, 3.0]]), jnp.ones((1, 4), bool)
    want = advantage.standardised(reward, exists)[:, [3, 0, 1, 2]]
    got = references_control.permuted(reward, exists)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_shuffled_rewards_say_nothing_of_their_completions():
    rng = np.random.default_rng(0)
    exists = jnp.asarray(rng.random((20_000, 5)) > 0.3)
    reward = jnp.where(exists, rng.normal(size=exists.shape), 0.0)
    own = advantage.standardised(reward, exists)
    got = jax.jit(references_control.shuffled)(reward, exists)
    close = partial(np.testing.assert_allclose, atol=1e-5)
    close(np.sort(got, -1), np.sort(own, -1))  # the same ones, in each group
    close(got[~exists], 0)
    push = np.asarray((got * own).sum(-1))
    assert abs(push.mean()) < 4 * push.std() / len(push) ** 0.5
    assert (own**2).sum(-1).mean() > 3


def test_own_answers_pay_for_their_thoughts_alone():
    """Rewards are as written naively; nothing but the thought has credit."""
    rng = np.random.default_rng(0)
    n, width, delimiter = 80, 4, (7, 8)
    length = rng.integers(0, width + 1, n)
    tokens = rng.choice([6, 7, 8], (n, width), p=(0.2, 0.4, 0.4))
    tokens[:70, :2] = delimiter  # short thoughts, and answers that others have too
    rows = SimpleNamespace(
        tokens=jnp.asarray(tokens),
        mask=jnp.asarray(np.arange(width) < length[:, None]),
        logp_policy=jnp.log(rng.random((n, width), np.float32)),
        exists=jnp.asarray(rng.random(n) < 0.8),
        prompt=jnp.asarray(rng.integers(0, 2, n)),
    )
    ends = [
        test_reflected.thought_of(*pair, delimiter)
        for pair in zip(tokens, np.asarray(rows.mask), strict=True)
    ]
    said = [
        (int(rows.prompt[i]), tokens[i, end : length[i]].tolist())
        if end and end < length[i] and rows.exists[i]
        else None
        for i, end in enumerate(ends)
    ]
    parts = SimpleNamespace(task=SimpleNamespace(delimiter=delimiter))
    found = own_answer.certain(parts, rows), own_answer.agreed(parts, rows)
    for i, own in enumerate(said):
        assert found[0][2][i] == found[1][2][i] == (ends[i] or 0)
        if own is None:
            assert np.isnan([outcome[i] for outcome, *_ in found]).all()
            continue
        mean = rows.logp_policy[i, ends[i] : length[i]].mean()
        group = [x for j, x in enumerate(said) if j != i and x and x[0] == own[0]]
        share = group.count(own) / max(1, len(group))
        rewards = [reward[i] for _, reward, _ in found]
        np.testing.assert_allclose(rewards, [mean, share], rtol=1e-5)
        outcomes = [outcome[i] for outcome, *_ in found]
        np.testing.assert_allclose(outcomes, [np.exp(mean), share], rtol=1e-5)
    assert sum(x is None for x in said) > 5
    assert len({*map(str, found[1][0].tolist())}) > 4
    thought = found[0][2]
    trains = Selection(
        drawn=SimpleNamespace(rollouts=rows, found={own_answer.NAME: thought}),
        given=None,
        **{"row": jnp.arange(n), "place": jnp.arange(n), "used": jnp.ones(n, bool)},
        of_tokens=jnp.full((n, width), 2.0),
    )
    got = own_answer.credit(drivers.Traced(), parts, None, trains).of_tokens
    inside = np.arange(width) < np.asarray(thought)[:, None]
    np.testing.assert_array_equal(got, np.where(inside, 2.0, 0.0))


def test_own_answers_are_a_method_of_a_step():
    config = shrunk(load("dro"))
    agreed = partial(own_answer.method, score=own_answer.agreed)
    for method in (own_answer.method, agreed):
        config = replace(config, reflection=None, methods=(method,))
        parts = build(config)
        state = states.begin(parts, tiny.warm(parts.model))
        _, (row, _) = jax.eval_shape(partial(step, drivers.Traced(), parts), state)
        assert {"loss/mean", "gradient/norm"} <= set(row)
    with pytest.raises(ValueError, match="own_answer needs a delimiter"):
        build(test_configs.shrunk(replace(load("rloo"), methods=config.methods)))


@pytest.mark.first(3)
@for_every_paper
def test_the_arms_of_a_miniature_can_be_run(paper):
    experiment = experiments.load_experiment(folder(paper))
    found = experiments.arms(experiment)
    assert {arm.recipe for arm in found} == set(experiment.recipes)
    assert len({experiments.warm_key(experiment, arm) for arm in found}) == 1
    assert len({arm.config.update.minibatches for arm in found}) == 1


# ----- a step


def shrunk(config):
    """The config, few and small arrays, in the model and the task of a test."""
    update = {"update.minibatches": min(config.update.minibatches, 2)}
    update |= {"update.tokens_per_micro_batch": 0, "update.token_chunk": 0}
    config = override(config, update | {"update.length_buckets": 1})
    if config.reflection:
        recipe = load(ROOT / "configs" / "dro_published.py")
        config = transferred(
            config, max_tokens=12, task=rationale.task, model=recipe.model
        )
        sizes = {
            name: value
            for name, value in test_reflected.SMALL.items()
            if not name.endswith("keep.level") and not name.startswith("optimizer")
        }
        return override(config, sizes | {"evaluation.k": 0})
    config = transferred(config, max_tokens=8)
    if config.hint:
        config = override(config, {"hint.width": 7})
    return test_configs.shrunk(config)


def program(config):
    """What a program is compiled of: names of functions, and which fields are set."""
    fields = ("pilot", "stop", "allocate", "objective", "gate", "downsample", "correct")
    fields += ("advantage", "modulate", "hint", "reflection", "loss", "aggregate")
    fields += ("shape_reward", "kl")

    def shape(tree):
        if isinstance(tree, dict):
            return tuple((key, shape(part)) for key, part in sorted(tree.items()))
        return tree if isinstance(tree, str) else tree is None

    return (
        *(shape(describe(getattr(config, field))) for field in fields),
        config.entropy_bonus > 0,
        config.sampling.attempts > 1,
        config.pool_statistics,
    )


@cache
def programs():
    """Those that `test_configs` runs."""
    return {program(load(path)) for path in recipes().values()}


@pytest.mark.first(1)
@for_every_paper
def test_a_config_takes_a_step(paper):
    """Traced in any case; run where no recipe of configs/ is the same program."""
    config = load(folder(paper) / "config.py")
    new = program(config) not in programs()
    parts = build(shrunk(config))
    if config.reflection:
        warm = tiny.warm(parts.model)
    else:
        warm = states.initial(parts, jnp.uint32(0))
    state = states.begin(parts, warm)
    one = partial(step, drivers.Traced(), parts)
    if not new:
        row = jax.eval_shape(one, state)[1][0]
        assert {"loss/mean", "gradient/norm"} <= set(row)
        return
    after, (row, _) = jax.jit(one)(state)
    assert np.isfinite(row["loss/mean"])
    assert ("kl/ref_nats" in row) == (config.kl is not None)
    assert row["update/nonfinite"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.params))


def test_reinforce_rej_is_the_other_line_of_raft():
    file = folder("raft") / "config.py"
    both = [
        test_configs.with_recipe(file, name)
        for name in ("raft_plus_plus", "reinforce_rej")
    ]
    for config in both:
        assert config.kl.coefficient == config.entropy_bonus == 1e-3
        assert option(config.loss, "dual") == 3.0
    assert [at(config, "advantage") for config in both] == ["raw", "signed"]
