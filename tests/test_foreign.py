"""A configuration of TRL becomes the recipe that computes what TRL does."""

import json
import re
from dataclasses import is_dataclass
from math import comb
from pathlib import Path

import numpy as np
import pytest
from outputs import message, refusal

from curax import aggregate, gate, loss, off_policy, xray
from curax.commands import foreign
from curax.config import ConfigError
from curax.settings.config_paths import option
from curax.theory import population, summary

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "from_trl.md").read_text()


def weights(config):
    found = summary.summarise(config, population.of_beta(1, 1))["by_pass_rate"]
    return (np.array(found[key], float) for key in ("p", "weight"))


def test_the_defaults_of_trl_weigh_prompts_as_its_formula_does():
    """Groups of 8, standard deviations with ddof 1 and 1e-4 added to them."""
    p, weight = weights(foreign.of_trl({}).config())
    want = np.zeros_like(p)
    for k in range(9):
        q = k / 8
        chance = comb(8, k) * p**k * (1 - p) ** (8 - k)
        want += chance * q * (1 - q) / (np.sqrt(8 / 7 * q * (1 - q)) + 1e-4)
    np.testing.assert_allclose(weight, want / (p * (1 - p)), rtol=1e-6)


def test_dr_grpo_of_trl_weighs_all_prompts_alike():
    given = {"loss_type": "dr_grpo", "scale_rewards": "none", "num_generations": 4}
    _, weight = weights(foreign.of_trl(given).config())
    np.testing.assert_allclose(weight, 3 / 4, rtol=1e-6)


CONVERTED = [
    ({}, {"sampling.group_size": 8, "sampling.prompts": 1, "kl": None}),
    ({}, {"advantage.eps": 1e-4, "advantage.bessel": True, "update.epochs": 1}),
    ({}, {"loss.low": 0.2, "loss.high": 0.2, "loss.dual": None}),
    ({"epsilon_high": 0.28, "delta": 4}, {"loss.high": 0.28, "loss.dual": 4.0}),
    ({"epsilon_high": 0.28, "delta": 1.28}, {"loss.high": 0.28, "loss.dual": 1.28}),
    ({"generation_batch_size": 64}, {"sampling.prompts": 8, "update.minibatches": 8}),
    (
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
        {"sampling.prompts": 4, "update.minibatches": 2},
    ),
    (
        {"steps_per_generation": 1, "gradient_accumulation_steps": 4},
        {"sampling.prompts": 4, "update.minibatches": 1},
    ),
    (
        {"max_steps": 100, "num_iterations": 2, "steps_per_generation": 2},
        {"steps": 25, "update.epochs": 2, "update.minibatches": 2},
    ),
    ({"learning_rate": "2e-6"}, {"optimizer.learning_rate": 2e-6}),
    ({"max_grad_norm": 0}, {"update.clip_norm": float("inf")}),
    ({"loss_type": "cispo", "epsilon_high": 5}, {"loss.low": 1.0, "loss.high": 4.0}),
    ({"loss_type": "dr_grpo", "max_completion_length": 7}, {"aggregate.length": 7}),
    ({"top_p": 0.9}, {"sampling.top_p": 0.9, "sampling.off_policy": off_policy.none}),
    ({"beta": 0.04}, {"kl.coefficient": 0.04, "kl.estimator": loss.k2}),
    ({"beta": 0.04, "use_bias_correction_kl": False}, {"kl.estimator": loss.k3}),
    ({"mask_truncated_completions": True}, {"gate": gate.overlong}),
    ({"loss_type": "grpo"}, {"aggregate": aggregate.sequence_mean}),
    ({"top_entropy_quantile": 0.2}, {"modulate.share": 0.2}),
    ({"entropy_coef": 0.01}, {"entropy_bonus": 0.01}),
    ({"reward_weights": [1.0]}, {"advantage.eps": 1e-4}),
]


@pytest.mark.parametrize(
    ("given", "want"), CONVERTED, ids=[str(given) for given, _ in CONVERTED]
)
def test_an_option_becomes_the_field_with_its_meaning(given, want):
    config = foreign.of_trl(given).config()
    for name, value in want.items():
        got = config
        for key in name.split("."):
            got = getattr(got, key) if is_dataclass(got) else option(got, key)
        assert got == value, name


@pytest.mark.parametrize("delta", [1.28, 4.0])
def test_delta_clips_ratios_as_trl_does(delta):
    """Inside the minimum of PPO, whatever the sign of the advantage."""
    token_loss = foreign.of_trl({"epsilon_high": 0.28, "delta": delta}).config().loss
    ratio = np.array([[0.1, 0.9, 1.1, 1.27, 1.5, 3, 9]] * 2, np.float32)
    credit = np.array([[1], [-1]], np.float32) * np.ones_like(ratio)
    clipped = np.clip(ratio, 0.8, 1.28) * credit
    want = -np.minimum(np.minimum(ratio, delta) * credit, clipped)
    got = token_loss(np.log(ratio), np.zeros_like(ratio), credit, ratio > 0)
    np.testing.assert_allclose(got, want, rtol=1e-6)


REMARKS = [
    *(({"loss_type": kind, "epsilon_high": 5}, None) for kind in ("dapo", "cispo")),
    ({"steps_per_generation": 16, "gradient_accumulation_steps": 8}, "by 0.5 times"),
    ({"steps_per_generation": 2, "gradient_accumulation_steps": 8}, "by 4 times"),
    ({"steps_per_generation": 16, "loss_type": "dr_grpo"}, None),
    ({"entropy_coef": 0.01}, None),
    ({"entropy_coef": 0.01, "gradient_accumulation_steps": 2}, "over a micro-batch"),
]


@pytest.mark.parametrize(("given", "said"), REMARKS, ids=str)
def test_denominators_of_trl_that_differ_are_said(given, said):
    """TRL 1.16.0 scales the tokens of a generation batch to one accumulation."""
    *remarks, processes = foreign.of_trl(given).remarks
    assert processes.startswith("one process is assumed")
    assert [said in remark for remark in remarks] == ([True] if said else [])


REFUSED = [
    *({"loss_type": name} for name in ("bnpo", "luspo", "sapo", "vespo", "ppo")),
    *({name: 0.5} for name in ("min_p", "repetition_penalty")),
    *({name: True} for name in ("sync_ref_model", "use_adaptive_entropy")),
    {"scale_rewards": "batch"},
    {"scale_rewards": "row"},
    {"generation_kwargs": {"min_p": 0.1}},
    {"off_policy_mask_threshold": 0.1},
    *({"reward_weights": it} for it in ([0.5, 0.5], [0.5], 1.0, "x", {}, [], [None])),
    {"multi_objective_aggregation": "normalize_then_sum"},
    {"loss_type": "cispo"},
    {"loss_type": "grpo", "entropy_coef": 0.01},
    {"entropy_coef": 0.01, "top_entropy_quantile": 0.2},
    {"importance_sampling_level": "sequence", "delta": 4.0},
    {"delta": 1.27, "epsilon_high": 0.28},
    *({"delta": it} for it in (-1, 0, 1.1)),
    {"importance_sampling_level": "sequence", "beta": 0.1},
    {"importance_sampling_level": "row"},
    {"generation_batch_size": 12},
    {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
    {"generation_batch_size": 8, "steps_per_generation": 1},
    {"num_generations": 1},
    {"num_generations": "many"},
    {"beta": True},
    *({"learning_rate": it} for it in (float("nan"), "1e400", 10**400)),
    *({"num_generations": it} for it in (float("inf"), 10**400, 1e300)),
    *({name: -0.1} for name in ("epsilon", "epsilon_high", "top_entropy_quantile")),
    {"mask_truncated_completions": "yes"},
    {"mask_truncated_completions": True, "loss_type": "grpo"},
    {"num_generatoins": 8},
]


# Options at their defaults that do not go with what is given.
IN_THEIR_PLACE = ("epsilon_high", "use_bias_correction_kl")


@pytest.mark.parametrize("given", REFUSED, ids=lambda given: str(given)[:60])
def test_what_cannot_be_converted_is_a_sentence_with_what_to_write(given):
    said = message(ConfigError, foreign.of_trl, given)
    assert re.search(r"\w+=\S+ .*(; (write|leave)|did you mean).*[.?]$", said), said
    assert any(name in said for name in [*given, *IN_THEIR_PLACE])


def test_the_page_has_every_option_that_decides_something():
    _, _, text = PAGE.partition("| TRL | default | here |")
    cells = [row.split("|")[1] for row in text.partition("\n\n")[0].splitlines()[2:]]
    names = set(re.findall(r"`(\w+)", " ".join(cells)))
    assert names - {"luspo", "sapo", "vespo"} == set(foreign.DEFAULTS)


def test_the_command_reads_names_alone(tmp_path, monkeypatch, capsys):
    """YAML and JSON; what is not read is listed, and `--set` changes the rest."""
    monkeypatch.chdir(tmp_path)
    options = {"num_generations": 4, "use_vllm": True, "scale_rewards": False}
    Path("run.json").write_text(json.dumps(options))
    argv = ["--trl", "run.json", "--set", "sampling.prompts=3", "--out", "seen"]
    assert xray.main(argv) == 0
    said = capsys.readouterr().out
    assert "run: claims p, follows p" in said
    assert "Not read, without a counterpart: use_vllm." in said
    page = json.loads(Path("seen/xray.json").read_text())
    assert page["config"] == "run.json"


@pytest.mark.parametrize(
    ("text", "argv", "said"),
    [
        ("- a\n- b\n", [], "run.yaml holds list"),
        ("a: [1\n", [], "run.yaml is no YAML"),
        ("!!python/object:os.system x\n", [], "run.yaml is no YAML"),
        (None, [], "run.yaml cannot be read"),
        ("beta: 0\n", ["grpo"], "--trl run.yaml and grpo are two recipes"),
        ("loss_type: sapo\n", [], "run.yaml: loss_type=sapo has a soft clip"),
        ("temperature: 0\n", [], "temperature=0"),
    ],
)
def test_bad_files_are_one_sentence(text, argv, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("run.yaml").write_text(text)
    assert said in refusal(xray.main, "--trl", "run.yaml", *argv)
    assert not [path for path in Path().iterdir() if path.name != "run.yaml"]
