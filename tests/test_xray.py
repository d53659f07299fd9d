"""What the command says of recipes, and what it leaves behind."""

import json
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from kinds import one_of_each_first
from outputs import refusal
from test_law import law_of, pods, recipes

from curax import advantage, correct, downsample, hint, objective, off_policy, xray
from curax.commands import demo
from curax.config import ConfigError, Hint, Sampling, Update, load, override
from curax.runs import xray_picture
from curax.settings import cli
from curax.tasks import chain
from curax.theory import (
    cases,
    population,
    predict,
    remarks,
    stated_objective,
    summary,
    table,
)
from curax.verify import graders

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
RECIPES = recipes()
EVEN = population.of_beta(1, 1)
PLAIN = replace(
    load(CONFIGS / "quickstart.py"),
    sampling=Sampling(prompts=2, group_size=4, max_tokens=8),
)
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def _few_batches(monkeypatch):
    monkeypatch.setattr(cases, "BATCHES", 16)


BATCHES = cases.BATCHES


@cache
def of(recipe, **stages):
    """What the command says of a recipe of configs/."""
    with mock.patch.object(cases, "BATCHES", BATCHES):
        return summary.summarise(
            replace(load(CONFIGS / f"{recipe}.py"), **stages), EVEN
        )


def columns(found):
    return {key: np.array(v, float) for key, v in found["by_pass_rate"].items()}


def at(found, p, name):
    column = columns(found)
    return column[name][np.flatnonzero(column["p"] == p)[0]]


# ----- every recipe


@pytest.mark.first(1)
@pytest.mark.parametrize("recipe", one_of_each_first(RECIPES))
def test_every_recipe_can_be_looked_at(recipe):
    found = of(recipe)
    page = json.loads(json.dumps(found, allow_nan=False))
    assert page == found
    by = columns(found)
    assert len({len(column) for column in by.values()}) == 1
    p = by["p"]
    assert (np.diff(p) > 0).all()
    assert np.isin(population.SHOWN, p).all()
    assert p[0] == 0.001
    assert np.isfinite(np.array(list(by.values()))).all()
    # Columns that follow from others.
    weight = by["right"] / p - by["wrong"] / (1 - p)
    if "hints" in found and found["hints"]["gradient"] == "prompt":
        weight = weight + np.sum(found["hints"]["by_level"]["weight"][1:], 0)
    close(weight, by["weight"], rtol=1e-4, atol=1e-4)
    close(by["objective"], stated_objective.integral(by["weight"], p))
    close(by["claimed_objective"], stated_objective.integral(by["claimed_weight"], p))
    ratio = stated_objective.distance(by["weight"], by["claimed_weight"], p)
    close(by["over_claimed"], ratio)
    assert ((by["signal"] >= 0) & (by["signal"] <= 1 + 1e-9)).all()
    most = load(CONFIGS / f"{recipe}.py").sampling.max_tokens
    close(by["tokens"], by["draws"] * most)
    assert ("hints" in found) == bool(load(CONFIGS / f"{recipe}.py").hint)
    assert found["exact"] == (not found["averaged"])
    assert found["exact"] <= (not by["half_interval"].any())
    close(np.sum(found["histogram"]), 1)
    close(found["mean"]["draws"], np.interp(EVEN.rates, p, by["draws"]).mean())
    # And shown.
    text = table.table(recipe, found)
    lines = text.splitlines()
    assert lines[0].startswith(f"{recipe}: claims {found['claim']}, follows ")
    assert [line[:4] for line in lines[4:13]] == [f"{p:.2f}" for p in population.SHOWN]
    for warning in found["warnings"]:
        assert f"Warning: {recipe} {warning}" in lines
        assert warning.endswith(".")
    for note in found["notes"]:
        assert f"Note: {note}" in lines


# ----- what the pages and the docstrings say of w(p)


@cache
def stated():
    """Recipe: the words on its w(p) in docs/recipes.md, and numbers by pass rate."""
    head, line, *rows = (
        (ROOT / "docs/recipes.md").read_text().partition("| recipe |")[2].splitlines()
    )
    rates = [float(cell) for cell in head.split("|")[2:-1]]
    assert rates == [0.01, 0.05, 0.1, 0.5, 0.9]
    assert set(line) == set("|-")
    found = {}
    for row in rows:
        if not row:
            return found
        link, _, words, *cells = (cell.strip() for cell in row.split("|")[1:-1])
        name = re.fullmatch(r"\[(\w+)\]\(\.\./configs/\1\.py\)", link)[1]
        found[name] = words, dict(zip(rates, cells, strict=True))


@pytest.mark.first(1)
@pytest.mark.parametrize("recipe", ["own_prefix", "sage_light"])
def test_visits_with_a_hint_are_in_the_row_of_their_recipe(recipe):
    words, _ = stated()[recipe]
    said = re.findall(r"\d\.\d\d", words.partition("with hinted ones")[2])
    weight = np.array(of(recipe)["hints"]["by_level"]["weight"], float)
    p = columns(of(recipe))["p"]
    there = np.searchsorted(p, [0.01, 0.05, 0.1, 0.5, 0.9])
    assert said == [f"{x:.2f}" for x in np.nansum(weight, 0)[there]]


def test_the_table_of_recipes_has_every_recipe():
    real = {
        path.stem
        for path in CONFIGS.glob("*.py")
        if "files on disk" in path.read_text()
    }
    # `text` names a recipe, as those for files on disk do.
    others = real | {"quickstart", "sft_gsm8k_qwen3_0p6b", "text"}
    assert set(stated()) == {path.stem for path in CONFIGS.glob("*.py")} - others
    for name in set(stated()) - set(RECIPES):  # those without a verifier
        words, numbers = stated()[name]
        assert words.startswith("none")
        assert not any(numbers.values())


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "recipe", one_of_each_first([r for r in RECIPES if r != "quickstart"])
)
def test_the_table_and_the_docstring_say_the_weight_that_is_predicted(recipe):
    """To the digits that are printed; a formula exactly."""
    words, numbers = stated()[recipe]
    by, formula = columns(of(recipe)), re.match(r"`(.*?)`", words)
    for p, cell in numbers.items():
        at = np.flatnonzero(by["p"] == p)[0]
        weight, half = by["weight"][at], by["half_interval"][at]
        digits = cell.replace(".", "").lstrip("0")
        assert len(digits) >= (2 if half > 1e-3 * weight else 3), cell
        unit = 10.0 ** -len(cell.partition(".")[2])
        assert abs(float(cell) - weight) <= 0.5001 * unit + half, (p, weight)
        if formula:
            names = {
                "p": p,
                "grpo": lambda n, p=p: stated_objective.grpo(n, np.array([p]))[0][0],
                "kept": lambda n, m, p=p: pods(n, m)(p),
            }
            close(eval(formula[1].replace("^", "**"), names), weight, rtol=1e-4)
    told = re.search(r"At p = (.+?) it is ((?:[\d.]+, )*[\d.]+\d)", law_of(recipe))
    if told:
        rates, said = ([float(x) for x in part.split(", ")] for part in told.groups())
        assert dict(zip(rates, said, strict=True)) == {
            p: float(cell) for p, cell in numbers.items()
        }
    assert told or formula or words.startswith(UNTOLD[recipe])


# p (1 - p) times w(p) where both kinds are plentiful, by what docstrings say of it.
IN_PROSE = {
    "ada_seq_balanced_published": {49.5: lambda p: ((1 - p) ** 2 + p**2) / 2},
    "pods_published": {50.5: lambda p: 1 / 2},
}


def test_a_limit_in_a_docstring_is_that_of_its_formula_or_of_the_prediction():
    """Of w(p) where both kinds are plentiful, at p = 0.01; and as p tends to 0."""
    for recipe in RECIPES:
        law = law_of(recipe)
        for shown in re.findall(r"at p = 0\.01 that is ([\d.]+\d)", law):
            weight = IN_PROSE[recipe][float(shown)](0.01) / (0.01 * 0.99)
            assert abs(float(shown) - weight) <= 0.05, recipe
        for shown in re.findall(r"([\d.]+) at p -> 0", law):
            tiny = np.array([1e-6])
            config = load(CONFIGS / f"{recipe}.py")
            (weight,) = predict.predict(config, tiny, EVEN.rates).weight
            assert abs(float(shown) - weight) <= 0.05, recipe


def test_the_weight_in_the_docstring_of_a_stage_is_that_of_its_recipe():
    says = " ".join((downsample.max_variance.__doc__ or "").split())
    weight, asked = re.findall(
        r"w = ([\d.]+) at p = \.01, where that asks for (\d+)", says
    )[0]
    by_formula = 1 / (2 * 0.01 * 0.99)
    assert abs(at(of("pods_published"), 0.01, "weight") - float(weight)) <= 0.05
    assert abs(by_formula - float(asked)) <= 1


def test_every_page_with_a_column_of_weights_is_one_that_is_compared():
    """Columns by five pass rates stand in docs/recipes.md and nowhere else."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/*/*.md")]
    assert len(pages) > 12
    with_columns = {
        page.relative_to(ROOT).as_posix()
        for page in pages
        if re.search(r"\| *0?\.01 *\| *0?\.05 *\|", page.read_text())
    }
    assert with_columns == {"docs/recipes.md"}


# Said in other words: one number for all prompts, and those of other contexts.
UNTOLD = {
    "reinforce_plus_plus": "1 / s",
    "own_prefix": "grpo(8) at visits",
    "sage_light": "grpo(8) at visits",
    "sage_exact": "1 to 4",
}


@pytest.mark.long
def test_neyman_lowers_the_variance_of_a_batch_and_not_that_of_every_draw():
    """As its docstring says; all lengths and norms alike."""

    def squares(recipe):
        """Of the coefficients of a batch, summed; draws; noise by pass rate."""
        by = columns(of(recipe))
        each = by["noise_against_grpo"] * stated_objective.grpo(8, by["p"])[1]
        each = each * by["weight"] ** 2 / by["draws"]
        means = [np.interp(EVEN.rates, by["p"], c).mean() for c in (each, by["draws"])]
        noise = [at(of(recipe), p, "noise_against_grpo") for p in (0.1, 0.5, 0.9)]
        return means[0] / at(of(recipe), 0.5, "weight") ** 2, means[1], np.array(noise)

    even, allocated = squares("dr_grpo"), squares("neyman")
    assert even[1] == pytest.approx(allocated[1], rel=0.02)
    assert allocated[0] * allocated[1] / (even[0] * even[1]) == pytest.approx(
        0.95, abs=0.01
    )
    assert (allocated[2] < even[2]).tolist() == [False, True, False]


def about_the_objective(found):
    return [text for text in found["warnings"] if "pools" not in text]


TOLD = {
    "ada_seq_balanced_published": ["0.05 prompts 1.7x less", "0.95 prompts 11.1x more"],
    "ada_seq_positive_published": ["0.05 prompts 2.3x less", "0.95 prompts 3.3x more"],
    "gvm_raft_published": ["0.05 prompts 39.", "x less"],
    "gvm_grpo_published": ["0.05 prompts 2", "0.95 prompts 1.8x more"],
}


@pytest.mark.first(1)
@pytest.mark.parametrize("recipe", TOLD)
def test_what_a_published_recipe_does_instead_is_told(recipe):
    told = " ".join(about_the_objective(of(recipe)))
    for part in TOLD[recipe]:
        assert part in told
    assert "than log p." in told


# Where hinted groups train p itself, a prompt counts by the groups drawn for it.
EXACT = [r for r in RECIPES if r.endswith("_exact") and r != "sage_exact"]


@pytest.mark.first(1)
@pytest.mark.parametrize("recipe", EXACT)
def test_of_exact_recipes_no_such_thing_is_told(recipe):
    stages = {}
    if recipe == "pods_exact":  # GRPO, whose objective it gives back
        stages["claim"] = objective.arcsine
    found = of(recipe, **stages)
    assert about_the_objective(found) == []
    assert found["nearest_factor"] < 1.3
    if recipe.startswith("ada_seq"):
        assert found["nearest"] == "log p of 32 draws"
        assert found["nearest_factor"] == pytest.approx(1, abs=1e-4)


@pytest.mark.long
def test_names_are_given_to_what_recipes_follow():
    for recipe, says in {
        "pods_exact": "follows GRPO of 32 draws",
        "grpo": "follows GRPO of 8 draws",
        "maxrl": "follows log p of 7 draws",
        "rloo": "follows p",
        "neyman": "follows p",
        "gvm_raft_exact": "follows log p, 4 terms",
        "ada_est_exact": "follows log p, 4 terms",
    }.items():
        assert table.verdict(of(recipe)) == says
    published = table.verdict(of("ada_seq_balanced_published"))
    assert published.startswith("follows none of the known, up to 1.7x off ")
    none = {"nearest_factor": None, "nearest": "p"}
    assert "not positive" in table.verdict(none)
    near = {"nearest_factor": 1.12, "nearest": "p"}
    assert table.verdict(near) == "follows p within 1.12x"


def test_what_draws_cannot_reach_is_a_note_and_no_warning():
    found = of("maxrl")
    assert found["warnings"] == []
    assert found["notes"][0] == (
        "Its draws reach log p only so far: it weights p=0.05 prompts 3.3x less than "
        "log p."
    )
    found = of("maxrl", advantage=advantage.standardised)  # 1.3x off what they reach
    assert found["warnings"][0] == "weights p=0.05 prompts 2.4x less than log p."


def test_the_numbers_of_a_recipe_are_those_predicted():
    found = of("ada_seq_balanced_published")
    config = load(CONFIGS / "ada_seq_balanced_published.py")
    want = predict.predict(config, np.array([0.05, 0.9]), EVEN.rates)
    for name in ("weight", "draws", "signal", "spread"):
        close([at(found, p, name) for p in (0.05, 0.9)], getattr(want, name))
    close(at(found, 0.1, "pass_rate_bias"), 0.0321, rtol=0, atol=6e-5)
    _, plain = stated_objective.grpo(found["grpo_group"], np.array([0.05, 0.9]))
    ratio = [at(found, p, "noise_against_grpo") for p in (0.05, 0.9)]
    close(ratio, want.noise / plain)
    assert found["grpo_group"] == round(found["mean"]["draws"])


def test_a_recipe_that_is_grpo_has_its_noise():
    found = of("grpo")
    close(columns(found)["noise_against_grpo"], 1)
    assert found["grpo_group"] == 8
    close(columns(found)["tokens"], 64)


def test_groups_that_are_replaced_are_drawn_and_wasted():
    found, plain = of("dapo"), of("cispo")
    p = EVEN.rates
    attempts, placed = predict.refills((1 - p**8 - (1 - p) ** 8).mean(), 16, 3)
    close(at(found, 0.5, "draws"), 8 * attempts)
    close(at(found, 0.5, "weight"), at(plain, 0.5, "weight"))
    group = found["grpo_group"]
    own, other = (stated_objective.grpo(n, np.array([0.5]))[1] for n in (8, group))
    want = own[0] / placed / other[0]
    close(at(found, 0.5, "noise_against_grpo"), want)
    notes = " ".join(found["notes"])
    assert f"Closed groups are replaced: {attempts:.2f} batches" in notes
    assert "how long they are" in notes


# ----- recipes of one's own


def test_a_claim_of_ones_own_is_what_is_compared():
    found = summary.summarise(replace(PLAIN, claim=lambda p: -1 / p), EVEN)
    assert found["warnings"] == [
        "weights p=0.05 prompts 100.0x less than lambda.",
        "weights p=0.95 prompts 3.6x more than lambda.",
    ]
    close(at(found, 0.5, "claimed_weight"), 4)


def is_shown(found):
    """It is written as JSON, as a table and as a picture."""
    json.dumps(found, allow_nan=False)
    table.table("mine", found)
    assert xray_picture.picture("mine", found)[:4] == b"\x89PNG"


def even(outcome, exists, history):
    return jnp.where(exists, 1.0, 0.0)


@pytest.mark.long
def test_an_objective_without_f_is_not_guessed():
    found = summary.summarise(replace(PLAIN, objective=even), EVEN)
    assert found["claim"] == "nothing"
    assert found["nearest"] == "p"
    (warning,) = found["warnings"]
    assert warning.startswith("states no objective; set claim ")
    assert set(found["by_pass_rate"]["claimed_weight"]) == {None}
    is_shown(found)


@pytest.mark.long
def test_what_is_pushed_the_wrong_way_is_told():
    def backwards(reward, exists):
        return -advantage.group_mean(reward, exists)

    found = summary.summarise(replace(PLAIN, advantage=backwards), EVEN)
    (warning,) = found["warnings"]
    assert warning == (
        "gives no weight to prompts of p=0.05 to 0.95, or pushes them down."
    )
    assert found["nearest_factor"] is None
    is_shown(found)


@pytest.mark.long
def test_a_recipe_that_trains_nothing_is_looked_at_all_the_same():
    def nothing(reward, exists):
        return jnp.zeros_like(reward)

    def none(difficulty, *, budget, most):
        return jnp.zeros(difficulty.draws.shape, jnp.int32)

    for stages in ({"advantage": nothing}, {"allocate": none}):
        found = summary.summarise(replace(PLAIN, **stages), EVEN)
        (warning,) = found["warnings"]
        assert warning.startswith("gives no weight to prompts of p=0.05 to 0.95")
        assert found["mean"]["signal"] == 0
        is_shown(found)


@pytest.mark.long
def test_the_published_factor_of_the_balanced_rule_is_told():
    """b = 9.5 of the reference, in pools so large that both are plentiful."""
    config = load(CONFIGS / "ada_seq_balanced_published.py")
    wide = override(
        replace(config, correct=correct.inverse_pass_rate),
        {"sampling.group_size": 512, "sampling.prompts": 2, "stop.round_size": 512},
    )
    found = summary.summarise(wide, EVEN)
    assert "weights p=0.95 prompts 9.5x more than log p." in found["warnings"]


def test_what_is_left_uncounted_is_noted():
    config = override(
        PLAIN,
        {
            "sampling.top_p": 0.9,
            "sampling.off_policy": off_policy.none,
            "entropy_bonus": 0.1,
        },
    )
    seen = predict.predict(config, np.array([0.5]), EVEN.rates)
    notes = " ".join(remarks.assumptions(config, seen))
    for part in ("top_p", "entropy bonus", "first of 2 updates", "moves by 2 w"):
        assert part in notes
    assert remarks.assumptions(replace(PLAIN, update=Update()), seen) == []
    whole = partial(off_policy.masked_ratio, per="sequence")
    root = partial(off_policy.ratio, per="geometric")
    normal = partial(
        off_policy.self_normalised, weigh=partial(off_policy.rejected, weigh=whole)
    )
    for rule, says in (
        (off_policy.none, "nothing corrects that: w multiplies the gradient of the "),
        (off_policy.icepop, "off_policy.icepop weighs one token at a time"),
        (whole, "off_policy.masked_ratio weighs whole completions, so p is the pass "),
        (root, "weighs whole completions by a mean over their tokens, which is their "),
        (normal, "self_normalised weighs whole completions, so p is the pass rate"),
        (
            normal,
            "self_normalised divides weights by their mean in an update: this is ",
        ),
        (normal, "off_policy.rejected drops what is outside its band, which is "),
    ):
        weighed = override(config, {"sampling.off_policy": rule})
        assert says in " ".join(remarks.assumptions(weighed, seen))

    replay = {"sampling.off_policy": None, "sampling.replay_support": True}
    notes = " ".join(remarks.assumptions(override(config, replay), seen))
    assert "the pass rate of what is drawn, what is cut off held fixed." in notes
    assert "nothing corrects that" not in notes

    over = override(
        config,
        {"sampling.off_policy": None, "update.behaviour_as_old": True},
    )
    notes = " ".join(remarks.assumptions(over, seen))
    assert "the ratio of loss.clipped_ratio is over what is drawn" in notes

    def halved(tokens):
        return jnp.where(tokens.mask, 0.5, 0.0)

    def loss(logp, logp_old, advantage, mask):
        return jnp.zeros_like(logp)

    strange = replace(PLAIN, modulate=halved, loss=loss)
    notes = " ".join(remarks.assumptions(strange, seen))
    assert "halved weighs tokens" in notes
    assert "loss is not the policy gradient" in notes


def test_terms_of_a_reward_beside_the_outcome_are_told():
    grader = partial(graders.weighted, terms={}, weights={}, outcome="right")
    task = partial(of_file, train="a.jsonl", grader=grader)
    seen = predict.predict(PLAIN, np.array([0.5]), EVEN.rates)
    (note,) = remarks.assumptions(replace(PLAIN, task=task, update=Update()), seen)
    assert note.startswith("The reward has several terms, by graders.weighted;")


def of_file(*, train, tokenizer=None, grader=None):
    raise AssertionError("the x-ray reads no file where the number is known")


NOT_KNOWN = "How many prompts the task has is not known, for its files are not there"
NONE_BACK = "No prompt comes back within the run, which takes"


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("prompts", "number", "steps", "says"),
    [
        (16, 7470, 200, f"{NONE_BACK} 3200 of 7470, so"),
        (16, 3200, 200, f"{NONE_BACK} 3200 of 3200, so"),
        (16, 3199, 200, ""),
        (16, None, 200, NOT_KNOWN),
    ],
)
def test_whether_prompts_of_files_come_back_follows_from_their_number(
    prompts, number, steps, says
):
    config = load(CONFIGS / "ada_est_exact.py")
    config = replace(config, task=partial(of_file, train="nowhere.jsonl"), steps=steps)
    assert (config.sampling.prompts, population.task_size(config)) == (prompts, None)
    seen = predict.predict(
        config, np.array([0.1, 0.9]), np.array([0.1, 0.9]), prompts=number
    )
    # A memory that holds nothing gives all prompts the same.
    assert (np.ptp(seen.draws) < 1e-9) == (NONE_BACK in says)
    notes = " ".join(remarks.assumptions(config, seen, number))
    assert says in notes
    assert (NOT_KNOWN in notes, NONE_BACK in notes) == (
        says == NOT_KNOWN,
        NONE_BACK in says,
    )
    # Of a task that counts its prompts in an option, nobody need be told twice.
    known = replace(config, task=partial(chain.task, num_prompts=3200))
    assert f"{NONE_BACK} 3200 of 3200" in " ".join(remarks.assumptions(known, seen))


def test_the_number_of_prompts_is_counted_in_files_that_are_there(tmp_path):
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "held_out")}
    for file in files.values():
        file.write_text("")
    task = partial(of_two, **{name: str(file) for name, file in files.items()})
    config = replace(PLAIN, task=task)
    assert population.task_size(config) == 3
    for name, file in files.items():
        file.unlink()
        assert population.missing_files(config) == [f"task.{name}"]
        assert population.task_size(config) is None
        file.write_text("")
    with pytest.raises(ConfigError, match=r"no such task: .*two\.$"):
        population.task_size(replace(config, task=partial(task, fails=True)))


def of_two(*, train, held_out, fails=False):
    if fails:
        raise ValueError("no such task: of two.")
    return replace(chain.task(depth=1), num_prompts=3)


def test_draws_too_few_to_learn_from_are_noted():
    config = load(CONFIGS / "ada_est_published.py")
    seen = predict.predict(config, np.array([0.5]), EVEN.rates)
    notes = " ".join(remarks.assumptions(config, seen))
    assert (
        "allocate.least=1 lets a prompt draw fewer than 2 completions, of which "
        "advantage.group_mean learns nothing; set allocate.least to 2."
    ) in notes
    learns_from_all = replace(config, advantage=advantage.raw)
    for enough in (
        override(config, {"allocate.least": 2}),
        override(learns_from_all, {"allocate.least": 0}),
    ):
        assert "lets a prompt draw" not in " ".join(remarks.assumptions(enough, seen))


# ----- hints

HINTED = replace(
    PLAIN,
    advantage=partial(advantage.standardised, eps=0.0),
    hint=Hint(source=hint.reference_prefix, levels=2, width=4, trigger=hint.all_wrong),
    task=partial(chain.task, num_prompts=2),
    steps=5,
)


def hinted(**options):
    config = replace(HINTED, hint=replace(HINTED.hint, **options))
    found = summary.summarise(config, EVEN, 0.5)
    page = json.loads(json.dumps(found, allow_nan=False))
    assert page == found
    of = {key: np.array(v, float) for key, v in found["hints"]["by_level"].items()}
    return config, found, of


@pytest.mark.long
def test_hints_are_told_level_by_level():
    config, found, of = hinted()
    by, said = columns(found), found["hints"]
    want = predict.predict(config, by["p"], EVEN.rates, lift=0.5)
    for name in ("drawn", "trains", "weight", "signal", "draws"):
        close(of[name], getattr(want.hints, name))
        assert of[name].shape == (3, len(by["p"]))
    close(of["pass_rate"], want.hints.p)
    both = predict.with_hints(config, want)
    for name in ("weight", "signal", "draws"):
        close(by[name], getattr(both, name))
    close(said["signal_without"], want.signal)
    assert (by["signal"] >= want.signal - 1e-12).all()
    assert (said["lift"], said["levels"], said["controller"]) == (0.5, 2, False)
    assert said["gradient"] == "hint"
    means = [np.interp(EVEN.rates, by["p"], row).mean() for row in of["drawn"]]
    close(said["mean"]["drawn"], means)
    # Noise is that of GRPO without hints, in groups of as many.
    assert found["grpo_group"] == 4
    close(by["noise_against_grpo"], 1)
    text = table.table("mine", found)
    at = text.splitlines().index(
        "With hints, each level of which is believed to add 0.5 to the log-odds of p "
        "(--lift)."
    )
    shown = text.splitlines()[at : at + 11]
    assert shown[1] == ("p      p1   p2  at 1  at 2   w0   w1   w2 draws signal plain")
    i = np.flatnonzero(by["p"] == 0.05)[0]
    row = [*of["pass_rate"][1:, i], *100 * of["drawn"][1:, i], *of["weight"][:, i]]
    row += [by["draws"][i], 100 * by["signal"][i], 100 * want.signal[i]]
    digits = [2, 2, 1, 1, 2, 2, 2, 1, 1, 1]
    rounded = [f"{x:.{n}f}" for x, n in zip(row, digits, strict=True)]
    assert shown[3].replace("%", "").split() == ["0.05", *rounded]
    assert max(map(len, shown)) <= 88
    assert "In the end" not in text
    notes = " ".join(found["notes"])
    assert "coefficients, w1 and on, are not in w" in notes
    assert "At most 50% of the prompts of a step are hinted" in notes
    plain = found | {"hints": said | {"signal_without": [0.0] * len(by["p"])}}
    assert xray_picture.picture("mine", found) != xray_picture.picture("mine", plain)


@pytest.mark.long
def test_what_hinted_groups_train_instead_is_told():
    config, found, of = hinted(credit=hint.sequence_weighted, most=1.0)
    close(columns(found)["weight"], of["weight"].sum(0))
    assert found["hints"]["gradient"] == "prompt"
    notes = " ".join(found["notes"])
    assert "hint.sequence_weighted makes hinted groups train p itself" in notes
    assert "At most" not in notes
    assert remarks.hint_assumptions(config, predict.predict(config, [0.5], [0.5])) == []
    config, found, of = hinted(credit=partial(hint.dropped))
    assert found["hints"]["gradient"] is None
    assert set(found["hints"]["by_level"]["weight"][1]) == {None}
    close(columns(found)["weight"], of["weight"][0])
    notes = " ".join(found["notes"])
    assert "No coefficient of a gradient of p describes what hint.dropped " in notes
    assert "  -  - " in table.table("mine", found)


@pytest.mark.long
def test_levels_that_visits_set_are_told_with_where_they_end():
    config, found, of = hinted(controller=hint.hysteresis)
    by = columns(found)
    close(of["drawn"].sum(0), 1)
    close(of["end"].sum(0), 1)
    close(by["draws"], 4)
    close(of["weight"][0], by["weight"])
    text = table.table("mine", found).splitlines()
    at = text.index(
        "In the end, if all may be hinted; w: the mean over levels of visits."
    )
    assert text[at + 1] == "p       at 0   at 1   at 2      w"
    i = np.flatnonzero(by["p"] == 0.1)[0]
    row = [f"{100 * x:.1f}" for x in of["end"][:, i]]
    mean = of["end_weight"][:, i].sum()
    assert text[at + 4].replace("%", "").split() == ["0.10", *row, f"{mean:.3f}"]
    assert "Levels are those of 5 visits of a run" in " ".join(found["notes"])
    once = replace(config, steps=1)
    seen = predict.predict(once, np.array([0.5]), EVEN.rates, lift=1.0)
    assert "No prompt comes back" in " ".join(remarks.hint_assumptions(once, seen))


def test_credit_that_hints_take_away_is_noted():
    config = replace(HINTED, advantage=advantage.signed)
    seen = predict.predict(config, np.array([0.1, 0.5]), EVEN.rates, lift=1.0)
    notes = " ".join(remarks.hint_assumptions(config, seen))
    off = 1 - seen.hints.weight[0, 0] / seen.weight[0]
    assert f"w of groups without a hint is up to {off:.0%} off" in notes


def test_a_lift_that_nobody_believes_is_refused():
    assert xray.checked_lift(HINTED, None) == xray.checked_lift(PLAIN, None) == 1.0
    assert xray.checked_lift(HINTED, -0.5) == -0.5
    for lift in (np.nan, np.inf, -21.0):
        with pytest.raises(ConfigError, match=r"must be within 20 nats of 0; write 1"):
            xray.checked_lift(HINTED, lift)


# ----- prompts


@pytest.mark.parametrize("ab", [(1, 1), (0.5, 0.5), (2, 5), (30, 3), (0.3, 0.6)])
def test_believed_prompts_have_the_moments_of_their_distribution(ab):
    a, b = ab
    rates = population.of_beta(a, b, 2000).rates
    mean = a / (a + b)
    close(rates.mean(), mean, rtol=2e-3)
    close(rates.var(), mean * (1 - mean) / (a + b + 1), rtol=5e-3)
    assert (np.diff(rates) >= 0).all()


def test_believed_prompts_may_be_nearly_all_solved_or_hopeless():
    rates = population.of_beta(0.01, 0.01).rates
    assert {0.001, 0.999} <= set(rates)
    assert ((rates > 0.001) & (rates < 0.999)).mean() < 0.1
    close((rates > 0.5).mean(), 0.5)
    close(population.of_beta(1, 1, 4).rates, [0.125, 0.375, 0.625, 0.875])


def row(draws, solved, tokens, **more):
    return {
        "prompt": "0" * 32,
        "draws": draws,
        "solved": solved,
        "tokens": tokens,
    } | more


def test_measured_prompts_are_those_of_the_file(tmp_path):
    rows = [row(8.0, 0, 24.0, square=3.0), row(0, 0, 0), row(6, 6.0, 60)]
    path = demo.write_lines(tmp_path / "memory.jsonl", rows)
    path.write_text("\n" + path.read_text() + "\n")
    got = population.of_memory(path)
    close(got.rates, [0.1, 7 / 8])
    close(got.draws, [8, 6])
    assert got.source == str(path)
    # All prompts are near: their lengths are one mean.
    close(population.means(got, got.tokens, np.array([0.1, 0.9])), 84 / 14)
    assert population.means(EVEN, EVEN.tokens, np.array([0.1])) is None


def test_prompts_of_a_memory_without_tokens_have_no_known_length(tmp_path):
    rows = [row(8, 8, 0, square=0), row(6, 2, 30, square=4)]
    got = population.of_memory(demo.write_lines(tmp_path / "memory.jsonl", rows))
    assert got.tokens is None
    assert got.square is None
    assert population.means(got, got.tokens, got.rates) is None


def test_lengths_are_those_of_prompts_alike():
    rates = np.linspace(0.01, 0.99, 400)
    draws = np.full(400, 4.0)
    prompts = population.Population("here", rates, draws, draws * (20 - 10 * rates))
    p = np.array([0.2, 0.5, 0.7])
    close(population.means(prompts, prompts.tokens, p), 20 - 10 * p, rtol=1e-3)


@pytest.mark.long
def test_measured_prompts_say_tokens_and_what_a_memory_holds(tmp_path):
    rows = [row(20, 4 * k, 100 - 10 * k) for k in range(6)]
    prompts = population.of_memory(demo.write_lines(tmp_path / "memory.jsonl", rows))
    config = override(
        load(CONFIGS / "neyman.py"), {"sampling.prompts": 2, "sampling.budget": 16}
    )
    found = summary.summarise(config, prompts)
    assert found["tokens_are"] == "as measured"
    close(columns(found)["tokens"], columns(found)["draws"] * 450 / 120)
    assert "20 remembered draws" in found["notes"][0]
    assert " <" not in table.table("mine", found)


# ----- the command line


def call(*argv):
    return xray.main([str(word) for word in argv])


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "mine.py"
    text = (CONFIGS / "rloo.py").read_text()
    path.write_text(text.replace("prompts=32", "prompts=2"))
    return path


def test_the_command_leaves_a_table_a_picture_and_json(recipe, tmp_path, capsys):
    out = tmp_path / "out" / "deep"
    argv = ["--config", recipe, "--out", out, "--set", "sampling.group_size=3"]
    assert call(*argv, "--beta", 2, 3) == 0
    said = capsys.readouterr().out
    page = json.loads((out / "xray.json").read_text())
    assert sorted(path.name for path in out.iterdir()) == ["xray.json", "xray.png"]
    assert page["recipe"] == "mine"
    assert page["set"] == ["sampling.group_size=3"]
    assert page["population"] == "Beta(2, 3)"
    close(at(page, 0.5, "draws"), 3)
    assert said.startswith("mine: claims p, follows p\nPrompts: Beta(2, 3). ")
    assert said.endswith(f"Written: {out}/xray.json, {out}/xray.png\n")
    assert max(map(len, said.split("\nf(p)")[0].splitlines())) <= 88
    png = (out / "xray.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert [int.from_bytes(png[i : i + 4]) for i in (16, 20)] == [1152, 792]
    # Once more: the same bytes, in place of the old ones.
    (out / "xray.png").write_bytes(b"")
    assert call(*argv, "--beta", 2, 3) == 0
    assert (out / "xray.png").read_bytes() == png


@pytest.mark.long
def test_nothing_is_written_that_nobody_asked_for(
    recipe, tmp_path, monkeypatch, capsys
):
    """And the name of an experiment is that of its folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "probe" / "config.py"
    path.parent.mkdir()
    recipe.rename(path)
    assert call("--config", path) == 0
    said = capsys.readouterr().out
    assert said.startswith("probe: claims p")
    assert said.endswith("Nothing is written; --out DIR does that.\n")
    assert [*tmp_path.rglob("*.*")] == [path]
    assert call("--config", path, "--out", "seen") == 0
    assert len([*Path("seen").iterdir()]) == 2


MEMORY = json.dumps(row(4, 2, 9)) + "\n"
WRONG = {
    "misspelt": (["--betta", "1", "1"], "--betta is no option; did you mean --beta?"),
    "needed": ([], None),
    "beta": (["--beta", "0", "1"], "--beta 0 1: both must be above 0, and below "),
    "nan": (["--beta", "nan", "1"], "--beta nan 1: both must be above 0"),
    "word": (["--beta", "a", "1"], "argument --beta: invalid float value: 'a'; "),
    "both": (["--beta", "1", "1", "--memory", "m.jsonl"], "not allowed with argument"),
    "lift": (["--lift", "1"], "--lift 1 is what hints do, and this recipe has none; "),
    "option": (["--set", "sampling.grup=3"], "has no option 'grup'"),
    "absent": (["--memory", "no.jsonl"], "--memory no.jsonl cannot be read (No such "),
    "folder": (["--memory", "."], "--memory . cannot be read (Is a directory); "),
    "broken": (["--memory", "broken.jsonl"], "--memory broken.jsonl:2: no JSON "),
    "number": (["--memory", "number.jsonl"], "--memory number.jsonl:3: no JSON object"),
    "many": (["--memory", "many.jsonl"], "--memory many.jsonl:1: no JSON object with "),
    "infinite": (["--memory", "infinite.jsonl"], "--memory infinite.jsonl:1: "),
    "empty": (["--memory", "empty.jsonl"], "--memory empty.jsonl: it has no prompt; "),
    "bytes": (["--memory", "bytes.jsonl"], "--memory bytes.jsonl cannot be read (no "),
    "out": (["--out", "mine.py"], "--out mine.py cannot be written to ("),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    case, recipe, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "broken": MEMORY + "{'draws': 4}\n" + MEMORY,
        "number": MEMORY + "\n" + MEMORY.replace("4", '"4"'),
        "many": MEMORY.replace("2", "5"),
        "infinite": MEMORY.replace("9", "Infinity"),
        "empty": "\n",
    }.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    before = sorted(tmp_path.rglob("*"))
    argv, says = WRONG[case]
    given = ["--config", "mine.py"] if says else []
    said = refusal(xray.main, *given, *argv)
    assert said.startswith("curax.xray: ")
    assert (says or "no recipe is named; name one, such as grpo.") in said
    assert said.endswith("?\n" if case == "misspelt" else ".\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_recipe_that_is_not_there_or_fails_is_one_sentence(recipe, tmp_path):
    said = refusal(xray.main, "--config", tmp_path / "min.py", "--out", tmp_path / "a")
    assert "did you mean mine.py?" in said
    refused = partial(refusal, xray.main, "--config", recipe, "--out", tmp_path / "b")
    text = recipe.read_text()
    recipe.write_text(
        text.replace("advantage.leave_one_out", "lambda r, e: r.reshape(7, 7)")
    )
    assert f"{recipe}:" in refused()
    recipe.write_text(
        text.replace("advantage.leave_one_out", "lambda r, e: __import__('nowhere')")
    )
    said = "curax.xray: the package nowhere is not installed; run pip install nowhere, "
    assert refused().startswith(said)
    recipe.write_text(
        text.replace("import advantage", "import allocate, correct, advantage")
        .replace("embedded(", "embedded(allocate=allocate.gvm, correct=correct.none,")
        .replace("group_size=4", "group_size=4, budget=6")
    )
    said = refused("--set", "allocate.unit=4")
    assert "unit=4 does not divide budget=6" in said
    assert list(tmp_path.iterdir()) == [recipe]


@pytest.mark.long
def test_what_cannot_be_written_leaves_what_was_there(recipe, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert call("--config", recipe, "--out", out) == 0
    before = {path: path.read_bytes() for path in out.iterdir()}

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "write_whole", full)
    assert call("--config", recipe, "--out", out) == 2
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_errors_are_not_for_bad_distributions_alone():
    with pytest.raises(ConfigError, match="both must be above 0"):
        population.of_beta(np.inf, 1.0)
