"""Regimes of the map: tasks, recipes, what is tuned of them, and how long they run.

Everything that decides a figure stands here, and stood here before it was measured.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from curax import gate, hint, reflect, stop
from curax.compare.experiment import Arm, Experiment, arms
from curax.config import ConfigError, override
from curax.tasks import calculator, rationale
from experiments.map import parts

RESULTS = Path(__file__).parent / "results"
RATES = (1e-4, 3e-4, 1e-3)  # learning rates, beside five values of a knob
HIGH = (3e-4, 1e-3, 3e-3)  # where little is right, and gradients are small
FINE = (5e-5, 1e-4, 3e-4, 1e-3, 3e-3)  # beside three variants
SIZES = (2.0, 4.0, 8.0, 16.0, 32.0)  # n, completions of a prompt
ROWS = 64  # completions of a step, where their number is fixed
TUNING, CLAIMING = tuple(range(4)), tuple(range(4, 24))  # seeds
FRESH = tuple(range(24, 40))  # that the map has not used
# Drawn by every run at least, at 1 : 0; `long` at the setting of the claim.
TOKENS = {"tune": 16_000, "claim": 40_000, "long": 160_000}
STEPS = {"tune": 600, "claim": 1500, "long": 2400}  # at most
RATE = "optimizer.learning_rate"
DEPTH = 3
WORDS = 4  # of a reference answer

COMMON = {
    "model.width": 64,
    "model.layers": 1,
    "warm_start.rows": 64,
    "warm_start.optimizer.learning_rate.peak": 1e-2,
    "sampling.max_tokens": DEPTH + 1,
    "evaluation.prompts": 128,
    "evaluation.samples": 4,
    "update.minibatches": 1,
}
FIXED = {"sampling.prompts": 32, "sampling.group_size": 32, "sampling.budget": ROWS}
EQUAL = {**FIXED, "allocate": parts.equal_groups}
# By the memory: 8 prompts share what uniform recipes draw.
SHARED = {"sampling.prompts": 8, "sampling.group_size": 32, "sampling.budget": ROWS}
LENGTH = {"aggregate.length": DEPTH + 1}
# Of DRO: every prompt in turn, and all tokens of a reference count the same.
UNIFORM = {**EQUAL, "reflection.queries": None, "reflection.weights": reflect.mean}
HALF_LIVES = (1.6, 3.3, 6.6, 13.0, 26.0)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe with 15 settings: a knob of five values, or three variants of its own.

    Attributes:
        config: file of configs/.
        changes: what is changed of it.
        knob: a magnitude that is tuned beside the learning rate; "": there is none.
        values: five values of it.
        variants: name -> further changes, each a program of its own.
        every: steps between two evaluations.
        share: tokens trained per token drawn, at most; sets how long it runs.
    """

    config: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    knob: str = ""
    values: tuple[float, ...] = ()
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    every: int = 20
    share: float = 1.0

    def chunks(self, rates: Sequence[float] = RATES) -> Iterator[list["Setting"]]:
        """Settings that run side by side, five each; rates are those of a regime."""
        for variant in self.variants:
            if self.knob:
                for rate in rates:
                    yield [Setting(variant, value, rate) for value in self.values]
            else:
                yield [Setting(variant, None, rate) for rate in FINE]

    def changed(self, setting: "Setting") -> dict[str, Any]:
        """All changes of the recipe at a setting."""
        tuned = {self.knob: setting.value} if self.knob else {}
        tuned[RATE] = setting.rate
        return {**self.changes, **self.variants[setting.variant], **tuned}

    @property
    def magnitudes(self) -> tuple[str, ...]:
        """Names of what differs between the lanes of a program."""
        return (self.knob, RATE) if self.knob else (RATE,)


class Setting(NamedTuple):
    """One trial of a recipe."""

    variant: str
    value: float | None  # of the knob
    rate: float


SIZED = {"knob": "allocate.size", "values": SIZES}
REMEMBERED = {"knob": "memory.half_life", "values": HALF_LIVES}
RECIPES = {
    "rloo": Recipe(config="rloo", changes=EQUAL | LENGTH, **SIZED),
    "grpo": Recipe(config="grpo", changes=EQUAL, **SIZED),
    "maxrl": Recipe(config="maxrl", changes=EQUAL | LENGTH, **SIZED),
    "rloo_live": Recipe(
        config="rloo",
        changes=EQUAL | LENGTH | {"gate": gate.zero_variance},
        share=0.3,
        **SIZED,
    ),
    "guarded": Recipe(config="guarded", changes=EQUAL | LENGTH, **SIZED),
    # Right completions alone, of a fixed n: the controls of drawing until one is right.
    "raft": Recipe(config="raft_plus_plus", changes=EQUAL, share=0.5, **SIZED),
    "right_only": Recipe(
        config="right_only", changes=EQUAL | LENGTH, share=0.5, **SIZED
    ),
    "ada_seq_positive_accepted": Recipe(
        config="ada_seq_positive_accepted",
        changes={
            "sampling.prompts": 8,
            "stop.rule": parts.enough_right,
            **LENGTH,
        },
        knob="stop.rule.right",
        values=(1.0, 2.0, 3.0, 4.0, 6.0),
        every=10,
        share=0.5,
    ),
    "ada_seq_balanced_exact": Recipe(
        config="ada_seq_balanced_exact",
        changes={"sampling.prompts": 8, **LENGTH},
        variants={
            str(n): {"stop.rule": partial(stop.balanced, right=n, wrong=n)}
            for n in (1, 2, 3)
        },
        every=10,
        share=0.5,
    ),
    "greso": Recipe(
        config="greso",
        changes={**SHARED, **LENGTH},
        knob="allocate.margin",
        values=(0.0, 0.02, 0.05, 0.1, 0.2),
    ),
    "neyman": Recipe(config="neyman", changes=SHARED | LENGTH, **REMEMBERED),
    "dynamo_allocation_exact": Recipe(
        config="dynamo_allocation_exact",
        changes=SHARED | LENGTH | {"allocate.least": 4, "correct.rows": 8},
        **REMEMBERED,
    ),
    "ada_est_exact": Recipe(
        config="ada_est_exact", changes=SHARED | LENGTH, **REMEMBERED
    ),
    **{
        name: Recipe(
            config=name,
            changes=LENGTH if name == "pods_exact" else {},
            variants={
                f"{m}of32": {"downsample.m": m, "sampling.prompts": prompts}
                for m, prompts in ((2, 8), (4, 4), (8, 4))
            },
            every=10,
            share=0.25,
        )
        for name in ("pods_exact", "pods_published")
    },
    # Groups that are all right or all wrong are drawn again, twice at most.
    "dapo": Recipe(
        config="dapo",
        changes={"gate": gate.zero_variance, "shape_reward": None},
        variants={
            f"n{n}": {"sampling.prompts": ROWS // n, "sampling.group_size": n}
            for n in (4, 8, 16)
        },
    ),
    "sage": Recipe(config="sage", changes=EQUAL | LENGTH | {"hint.width": 4}, **SIZED),
    "sage_light": Recipe(
        config="sage_light", changes=EQUAL | LENGTH | {"hint.width": 4}, **SIZED
    ),
    "ada_seq_sage": Recipe(
        config="ada_seq_sage",
        changes={
            "sampling.prompts": 8,
            "stop.rule": parts.enough_right,
            "hint.width": 4,
            "hint.source": hint.reference_prefix,
            **LENGTH,
        },
        knob="stop.rule.right",
        values=(1.0, 2.0, 3.0, 4.0, 6.0),
        every=10,
    ),
    # References behind thoughts that the policy draws are imitated; thoughts get no
    # credit.
    "supervised": Recipe(
        config="dro",
        changes=UNIFORM | {"reflection.direct": 1.0, "advantage": parts.no_credit},
        **SIZED,
    ),
    "aggregate": Recipe(config="dro", changes=UNIFORM, **SIZED),
    "r3": Recipe(config="dro", changes=EQUAL | {"reflection.queries": None}, **SIZED),
    "dro_in_step": Recipe(config="dro_in_step", changes=EQUAL, **SIZED),
    # A look draws as much as is trained on: n / 2 of twice the prompts, 64 / n.
    "dro": Recipe(
        config="dro",
        variants={
            f"n{n}": {
                "sampling.prompts": ROWS // n,
                "sampling.group_size": n,
                "reflection.queries.draws": n // 2,
            }
            for n in (8, 16, 32)
        },
    ),
}
BASELINES = ("rloo", "grpo")
RIGHT = ("raft", "right_only")


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A task, the recipes that have a use in it, and what a token costs.

    Attributes:
        says: one line about it.
        task: options of `parts.task`.
        recipes: names; the baselines come first.
        cost: of a token drawn and of one trained.
        rates: learning rates that are tried beside a knob.
        warm_steps: of the supervised warm start.
        make: the task.
        changes: of all its recipes, beside those of all regimes.
        long: recipes that also run four times as far.
        baselines: what gaps and costs are beside: the best of them, as tuned.
        times: as many tokens as in other regimes, for completions as much longer.
        instead: values of fields, in place of those that a recipe sets.
        every: steps between two evaluations, at most.
    """

    says: str
    task: Mapping[str, Any]
    recipes: tuple[str, ...]
    cost: tuple[float, float] = (1.0, 0.0)
    rates: tuple[float, float, float] = RATES
    warm_steps: int = 400
    make: Callable[..., Any] = parts.task
    changes: Mapping[str, Any] = field(default_factory=dict)
    long: tuple[str, ...] = ()
    baselines: tuple[str, ...] = BASELINES
    times: float = 1.0
    instead: Mapping[str, Any] = field(default_factory=dict)
    every: int = 20

    def chunks(self, recipe: str) -> list[list[Setting]]:
        """Settings of a recipe that are tried, five side by side."""
        return list(RECIPES[recipe].chunks(self.rates))

    def tokens(self, recipe: Recipe, stage: str) -> int:
        """Tokens that every run of a recipe draws at least, for one cost of all."""
        drawn, trained = self.cost
        return round(self.whole(stage) / (drawn + recipe.share * trained))

    def whole(self, stage: str) -> float:
        """Cost that every run spends at least."""
        return TOKENS[stage] * self.times * sum(self.cost)


DENSE, SPARSE = (0.05, 0.40, 0.85), (0.90, 0.97, 0.995)
MEMORY = ("greso", "neyman", "dynamo_allocation_exact", "ada_est_exact")
LONG = ("rloo", *RIGHT, "ada_seq_positive_accepted", "maxrl")
SINGLE = {  # the regimes of the map, whose completions have one turn
    "sparse": Regime(
        says="next to nothing is solved, no prompt returns",
        task={"errors": SPARSE},
        recipes=(
            *BASELINES,
            *RIGHT,
            *("ada_seq_positive_accepted", "maxrl", "ada_seq_balanced_exact"),
        ),
        rates=HIGH,
        long=LONG,
    ),
    "bimodal": Regime(
        says="four of five prompts are solved, one is hard; they return",
        task={"errors": (0.0, 0.0, 0.95), "hard": 0.2, "num_prompts": 256},
        warm_steps=800,
        recipes=(
            *BASELINES,
            *RIGHT,
            "greso",
            "ada_seq_positive_accepted",
            "maxrl",
            *MEMORY[1:],
        ),
    ),
    "dense_returning": Regime(
        says="prompts of all pass rates, which return",
        task={"errors": DENSE, "num_prompts": 256},
        recipes=(*BASELINES, *RIGHT, *MEMORY, "maxrl", "ada_seq_positive_accepted"),
    ),
    "noisy": Regime(
        says="as sparse, and the verifier passes 3 % of what is wrong",
        task={"errors": SPARSE, "accepted": 0.03},
        recipes=(*BASELINES, *RIGHT, "guarded", "maxrl", "ada_seq_positive_accepted"),
        rates=HIGH,
    ),
    "updates_dear": Regime(
        says="prompts of all pass rates, fresh; a trained token costs ten drawn ones",
        task={"errors": DENSE},
        recipes=(*BASELINES, *RIGHT, "rloo_live", "pods_exact", "pods_published"),
        cost=(1.0, 10.0),
    ),
    "dense_fresh": Regime(
        says="prompts of all pass rates, none of which returns",
        task={"errors": DENSE},
        recipes=(
            *BASELINES,
            *RIGHT,
            *("maxrl", "ada_seq_positive_accepted", "ada_seq_balanced_exact"),
        ),
        long=LONG,
    ),
    "rollouts_dear": Regime(
        says="prompts of all pass rates, fresh; a drawn token costs ten trained ones",
        task={"errors": DENSE},
        recipes=(
            *BASELINES,
            *RIGHT,
            *("rloo_live", "maxrl", "ada_seq_positive_accepted", "pods_exact"),
        ),
        cost=(10.0, 1.0),
    ),
    "hints": Regime(
        says="as good as nothing is solved without a hint",
        task={"errors": (0.8, 0.9, 0.95), "hints": True, "whole": True},
        recipes=(*BASELINES, *RIGHT, "sage", "sage_light", "ada_seq_sage"),
        rates=HIGH,
    ),
    # RLOO and GRPO ask the verifier, as a ceiling; the others have references alone.
    "no_verifier": Regime(
        says="references alone; a verifier, which only rloo and grpo ask, gains .23",
        make=rationale.task,
        task={"depth": DEPTH, "words": WORDS, "errors": DENSE},
        changes={"sampling.max_tokens": DEPTH + WORDS + 4},
        # Fewer leave the policy without the operations, which RL does not teach.
        warm_steps=1200,
        recipes=(*BASELINES, "supervised", "aggregate", "r3", "dro_in_step", "dro"),
        baselines=("supervised", "aggregate"),
        rates=HIGH,
        times=3.5,
    ),
}
PLAYED = (*BASELINES, "dapo", "right_only", "ada_seq_positive_accepted", "sage", "raft")
TURNS = {  # those of experiments/turns
    "calculator": Regime(
        says="chains of up to six operations, and a calculator that is asked",
        make=calculator.task,
        task={"hints": True},
        changes={"sampling.max_tokens": 33, "evaluation.samples": 2},
        instead={"aggregate.length": 33, "hint.width": 7},
        recipes=PLAYED,
        times=0.6,
        every=10,
    ),
    "mastermind": Regime(
        says="a hidden code, and three guesses that are answered",
        make=parts.guessing,
        task={"hints": True},
        changes={
            "model.layers": 2,
            "sampling.max_tokens": 9,
            # All questions that are trained on.
            "evaluation.prompts": parts.QUESTIONS,
            "evaluation.samples": 8,
        },
        instead={"aggregate.length": 9, "hint.width": 16},
        recipes=PLAYED,
        rates=HIGH,
        times=1.25,
        warm_steps=300,
    ),
}
OTHERS = {  # of experiments/factorial, which the map has nothing of
    "bimodal_ways": replace(
        SINGLE["bimodal"],
        says="as bimodal, and each value may be written in four ways",
        task={**SINGLE["bimodal"].task, "ways": 4},
        warm_steps=2000,
        times=0.5,
        recipes=BASELINES,
    ),
    "sparse_wide": replace(
        SINGLE["sparse"],
        says="as sparse, by a model of twice the width and a warm start of its own",
        changes={"model.width": 128},
        recipes=BASELINES,
        long=(),
    ),
}
MAPPED = SINGLE | TURNS
REGIMES = MAPPED | OTHERS


def experiment(
    regime: str, chosen: Mapping[str, Setting], stage: str = "claim"
) -> Experiment:
    """The experiment of some recipes of a regime at chosen settings.

    Args:
        regime: name of a regime.
        chosen: recipe -> its setting.
        stage: `tune`, `claim` or `long`, which decides seeds and tokens.
    """
    about = REGIMES[regime]
    seeds = TUNING if stage == "tune" else CLAIMING
    task = {f"task.{name}": value for name, value in about.task.items()}
    warm = ("warm_start.steps", "warm_start.optimizer.learning_rate.steps")
    warm = dict.fromkeys(warm, about.warm_steps)
    return Experiment(
        recipes={
            name: (RECIPES[name].config, _changed(about, RECIPES[name], setting))
            for name, setting in chosen.items()
        },
        common={
            "task": about.make,
            **COMMON,
            **warm,
            **about.changes,
            **task,
            "seed": seeds[0],
        },
        warm_start={"task.num_prompts": 1 << 14},
        seeds=len(seeds),
        tokens=max(about.tokens(RECIPES[name], stage) for name in chosen),
        steps=STEPS[stage],
        every=max(min(RECIPES[name].every, about.every) for name in chosen),
        cost=about.cost,
    )


def _changed(about: Regime, recipe: Recipe, setting: Setting) -> dict[str, Any]:
    """Changes of a recipe, some of them as the regime has them."""
    found = recipe.changed(setting)
    return found | {
        name: about.instead[name] for name in about.instead if name in found
    }


def arm(regime: str, recipe: str, setting: Setting, stage: str) -> Arm:
    """A recipe at one setting, with the seeds of a stage."""
    (found,) = arms(experiment(regime, {recipe: setting}, stage))
    return found._replace(config=override(found.config, {"evaluation.every": 10}))


def claimed(regime: str) -> Experiment:
    """The experiment of a regime: all recipes that are tuned, at their best settings.

    Raises:
        ConfigError: none is.
    """
    path = RESULTS / regime / "tuned.json"
    if not path.exists():
        raise ConfigError(
            f"{path} is not there, for nothing is tuned in {regime} yet; run python -m "
            "experiments.map.run --next first."
        )
    found = json.loads(path.read_text())
    return experiment(
        regime, {name: Setting(*own["setting"]) for name, own in found.items()}
    )
