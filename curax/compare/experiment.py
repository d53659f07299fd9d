"""Experiments: which recipes run, under which settings, and how long.

An experiment is a Python file with `get_experiment()`. Each recipe runs as it is, and
once more for every value of every swept setting, the others as they are. Where settings
are tuned, each first takes the best of the same trials. Nothing here imports JAX.
"""

import ast
import difflib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from curax.config import Config, ConfigError, load, override
from curax.settings.config_paths import Place, describe, full_name, wrong_values
from curax.settings.config_types import Count, Magnitude, Natural, Share
from curax.settings.errors import out_of_reach, refusals
from curax.settings.files import cut
from curax.settings.groups import AXES
from curax.settings.recipes import made_by

FILE = "experiment.py"  # the experiment of a folder
# Fields that an experiment decides itself, and what decides them; 0 where nothing does.
DECIDED = {
    "seeds": "seeds",
    "steps": "steps",
    "evaluation.every": "every",
    "logging.every": "every",
    "logging.rollout_prompts": "nothing: a comparison logs no completions",
}
LONGEST = 200  # bytes of a name: a file has 255, and digest and ends beside it
# What two arms share where their warm starts are the same.
WARM_FIELDS = ("task", "model", "warm_start", "seed", "seeds", "update")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment: recipes, conditions, sweeps, seeds and budgets of a comparison.

    Raises:
        ConfigError: on construction; the message names the first wrong field and a fix.
    """

    recipes: Mapping[str, Any]  # name -> recipe, or (recipe, changes): a name of
    # configs/, a file, or a Config; and values by dotted name
    common: Mapping[str, Any] = field(default_factory=dict)  # changes of all recipes
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # setting ->
    # values, each tried alone
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # setting ->
    # values; each recipe takes the best of all combinations, by seeds of their own
    tuning_seeds: Count = 4  # runs of a combination, with the seeds behind `seeds`
    conditions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name ->
    # changes, such as easy and hard prompts; each recipe runs under all of them
    warm_start: Mapping[str, Any] = field(default_factory=dict)  # changes for the warm
    # start alone
    seeds: Count = 8  # runs of an arm, with seeds seed, seed + 1, ...
    tokens: Natural = 0  # that every run draws at least; 0: no such budget
    updates: Natural = 0  # of the optimizer that every run makes at least; 0: the same
    steps: Count  # at most, whatever the budgets say
    every: Count = 10  # steps between two evaluations
    baseline: str | None = None  # recipe that others are compared with; None: the first
    threshold: Share | None = None  # held-out pass rate to wait for
    cost: tuple[Magnitude, Magnitude] | None = None  # of a token drawn and of one
    # trained; None: measured
    watched: tuple[str, ...] = ()  # metrics kept beside the pass rates

    def __post_init__(self) -> None:
        wrong = (self._of_wrong_kind(), wrong_values(Place(self)), self._conflicts())
        for first in itertools.chain.from_iterable(wrong):  # later ones need earlier
            raise ConfigError(first)

    def _of_wrong_kind(self) -> Iterator[str]:
        """Yield sentences about fields and changes that are no dict with names."""
        names = "recipes", "common", "sweep", "tune", "conditions", "warm_start"
        for name in names:
            yield from _no_dict(name, getattr(self, name))
        for name, changes in self.conditions.items():
            yield from _no_dict(f"conditions[{name!r}]", changes)
        for name, recipe in self.recipes.items():
            where = f"recipes[{name!r}]"
            if isinstance(recipe, tuple) and len(recipe) == 2:
                yield from _no_dict(f"the second of {where}", recipe[1])
            elif not (recipe and isinstance(recipe, str | os.PathLike | Config)):
                yield (
                    f"{where}={cut(repr(recipe))} is no recipe; write 'grpo', or "
                    "('grpo', {'loss.high': 0.3}), for example."
                )

    def _conflicts(self) -> Iterator[str]:
        """Sentences about fields that are valid one by one and impossible together."""
        if not self.recipes:
            yield "recipes is empty; name one at least, such as {'grpo': 'grpo'}."
        for kind, names in (("recipes", self.recipes), ("conditions", self.conditions)):
            for name in names:
                fits = len(os.fsencode(str(name))) <= LONGEST
                if not (fits and re.fullmatch(r"[A-Za-z0-9][\w.+-]*", str(name))):
                    yield (
                        f"{kind} names {name!r}, which cannot be part of a file's name;"
                        f" use letters, digits and _ . + -, at most {LONGEST} bytes."
                    )
        if self.baseline is not None and self.baseline not in self.recipes:
            near = difflib.get_close_matches(self.baseline, self.recipes, 1, cutoff=0)
            yield (
                f"baseline={self.baseline!r} is none of the recipes; set it to "
                f"{' or '.join(map(repr, near))}."
            )
        if not (self.tokens or self.updates):
            yield "neither tokens nor updates is set; set tokens=100_000, for example."
        for name in self.sweep.keys() & self.tune.keys():
            yield f"{name} is swept and tuned; leave it out of sweep or of tune."
        if "seed" in self.tune:
            yield "tune sets seed, and trials have seeds of their own; leave it out."
        if self.cost and not sum(self.cost) > 0:
            yield "cost=(0, 0) makes everything free; set it to (1, 1), for example."
        if self.cost and not within_reach(self.cost):
            yield f"cost={self.cost} has no end; set it to (1, 1), for example."
        for where, changes in self._changes():
            for name in DECIDED.keys() & changes.keys():
                yield (
                    f"{where} sets {name}, which is decided by {DECIDED[name]}; leave "
                    "it out."
                )

    def _changes(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield (field, changes by dotted name) of every field that changes configs."""
        yield from (("common", self.common), ("sweep", self.sweep))
        yield "tune", self.tune
        yield "warm_start", self.warm_start
        yield from ((f"conditions[{n!r}]", c) for n, c in self.conditions.items())
        for name, recipe in self.recipes.items():
            if isinstance(recipe, tuple):
                yield f"recipes[{name!r}]", recipe[1]

    @property
    def budgets(self) -> dict[str, float]:
        """What every run gets at least, by axis; the first is what tuning goes by."""
        both = {"tokens": self.tokens, "updates": self.updates}
        return {axis: most for axis, most in both.items() if most}

    @property
    def against(self) -> str:
        """Name of the recipe that others are compared with."""
        return self.baseline or next(iter(self.recipes))


def within_reach(cost: tuple[float, float]) -> bool:
    """Whether each cost is 0, or one whose ratio to another is far from infinite."""
    return all(one == 0 or 1e-30 <= one <= 1e30 for one in cost)


def _no_dict(where: str, value: Any) -> Iterator[str]:
    """Yield a sentence where a value is no dict whose keys are texts."""
    if not isinstance(value, Mapping):
        yield f"{where}={cut(repr(value))} is no dict; write {{name: value}}."
    else:
        for key in value:
            if not isinstance(key, str):
                yield f"{where} names {key!r}, which is no text; write {str(key)!r}."


class Arm(NamedTuple):
    """A recipe at one setting under one condition; it runs once per seed."""

    recipe: str
    condition: str  # "" where an experiment has none
    config: Config
    changed: tuple[tuple[str, Any], ...] = ()  # (setting, value), swept or tried
    trial: bool = False  # of tuning

    @property
    def swept(self) -> tuple[str, Any]:
        """Swept setting and its value; ("", None): the recipe as it is."""
        return self.changed[0] if self.changed else ("", None)

    @property
    def settings(self) -> dict[str, Any]:
        """Changed settings as JSON values, by `in_json`."""
        return {name: in_json(value) for name, value in self.changed}

    @property
    def label(self) -> str:
        """Recipe and changed values, as `grpo loss.high=0.3`."""
        changed = [f"{name}={by_name(value)}" for name, value in self.changed]
        return " ".join([self.recipe, *changed])

    @property
    def name(self) -> str:
        """The label with the condition, as `grpo @ hard`: no other arm has it."""
        found = f"{self.label} @ {self.condition}" if self.condition else self.label
        return f"{found} (trial)" if self.trial else found


def by_name(value: Any) -> Any:
    """A value in which functions are texts, the same in every process."""
    if isinstance(value, list | tuple):
        return type(value)(map(by_name, value))
    if not callable(value):
        return value
    bound = getattr(value, "keywords", {})
    options = ", ".join(f"{name}={by_name(x)}" for name, x in bound.items())
    return f"{full_name(value)}({options})" if bound else full_name(value)


def in_json(value: Any) -> str | int | float:
    """A value of a setting; what is neither number nor text, as text."""
    named = by_name(value)
    return named if isinstance(named, str | int | float) else str(named)


def load_experiment(path: Path) -> Experiment:
    """The experiment that a file, or the experiment.py of a folder, returns.

    Raises:
        ConfigError: there is no such file, it fails, or names an arm twice.
    """
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        there = [*path.parent.glob("*.py"), *path.parent.glob(f"*/{FILE}")]
        files = sorted(str(p.parent if p.name == FILE else p) for p in there)
        near = " or ".join(difflib.get_close_matches(str(path), files, 3, cutoff=0.3))
        fix = f"did you mean {near}?" if near else "name a file with get_experiment()."
        raise ConfigError(f"{path}: there is no such file; {fix}")
    experiment = made_by(path, "get_experiment", Experiment)
    # Python keeps the last of two entries of one name, and says nothing.
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Dict):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            for key in keys:
                if keys.count(key) > 1:
                    raise ConfigError(
                        f"{path}:{node.lineno}: {key!r} stands twice in one dict, and "
                        "the first would be lost; rename one of them."
                    )
    return experiment


def arms(experiment: Experiment) -> list[Arm]:
    """All arms: each recipe under each condition, unchanged and at each swept value.

    Raises:
        ConfigError: a recipe, setting or value is wrong; conditions differ in what is
            swept or tuned; two arms are the same; or an arm cannot run side by side.
    """
    found: list[Arm] = []
    for name, recipe in experiment.recipes.items():
        bases = [
            Arm(name, condition, _base(experiment, name, recipe, changes))
            for condition, changes in (experiment.conditions or {"": {}}).items()
        ]
        for setting in (*experiment.sweep, *experiment.tune):
            own = {repr(by_name(setting_of(base.config, setting))) for base in bases}
            if len(own) > 1:
                raise ConfigError(
                    f"{setting} is swept or tuned, and conditions of {name} differ in "
                    f"it ({' or '.join(sorted(own))}); leave it out of conditions, or "
                    "of sweep and tune."
                )
        for base in bases:
            found.append(base)
            for setting, values in experiment.sweep.items():
                found += _swept(base, setting, values)
    for arm in (*found, *trials(experiment, found)):
        for wrong in _unfit(arm):
            raise ConfigError(f"{arm.name}: {wrong}")
    return found


def _base(
    experiment: Experiment, name: str, recipe: Any, changes: Mapping[str, Any]
) -> Config:
    """Config of a recipe with the experiment's changes, without its sweep."""
    recipe, own = recipe if isinstance(recipe, tuple) else (recipe, {})
    decided = {name: getattr(experiment, by, 0) for name, by in DECIDED.items()}
    try:
        config = recipe if isinstance(recipe, Config) else load(recipe)
        both = {**experiment.common, **own, **changes}
        return override(config, both | decided)  # groups before fields of them
    except (ConfigError, TypeError, OSError) as error:
        why = out_of_reach(error) or error
        raise ConfigError(f"recipe {name}: {why}") from error


def _swept(arm: Arm, setting: str, values: Any) -> Iterator[Arm]:
    """Yield an arm per value of a swept setting, but for the recipe's own value.

    Raises:
        ConfigError: no such setting, a wrong value, or a value that is there twice.
    """
    for value in _values("sweep", setting, values):
        found = _changed(arm, ((setting, value),))
        if describe(found.config) != describe(arm.config):
            yield found


def _values(kind: str, setting: str, values: Any) -> Sequence[Any]:
    """The values of a swept or tuned setting.

    Raises:
        ConfigError: they are no list, or one is there twice.
    """
    if not isinstance(values, list | tuple) or not values:
        raise ConfigError(
            f"{kind}[{setting!r}]={values!r} is no list of values; write (1, 2), for "
            "example."
        )
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ConfigError(
                f"{kind}[{setting!r}] has {value} twice, and so two arms of one name; "
                "leave one out."
            )
    return values


def _changed(arm: Arm, changed: tuple[tuple[str, Any], ...]) -> Arm:
    """An arm with further settings changed."""
    with refusals(of=f"recipe {arm.recipe}"):
        config = override(arm.config, dict(changed))
    return arm._replace(config=config, changed=(*arm.changed, *changed))


def trials(experiment: Experiment, arms: Sequence[Arm]) -> list[Arm]:
    """Arms of tuning: each recipe under each condition, at every combination.

    Raises:
        ConfigError: no such setting, a wrong value, or a value that is there twice.
    """
    if not experiment.tune:
        return []
    every = [
        [(name, value) for value in _values("tune", name, values)]
        for name, values in experiment.tune.items()
    ]
    found = []
    for arm in arms:
        if not arm.changed:
            own = {"seed": arm.config.seed + experiment.seeds}
            own["seeds"] = experiment.tuning_seeds
            base = arm._replace(config=override(arm.config, own), trial=True)
            found += [_changed(base, changed) for changed in itertools.product(*every)]
    return found


def settled(arms: Sequence[Arm], taken: Sequence[Arm]) -> list[Arm]:
    """Arms at what tuning took: a trial for each recipe under each condition."""
    best = {(trial.recipe, trial.condition): trial.changed for trial in taken}
    return [
        arm._replace(config=override(arm.config, dict(best[arm.recipe, arm.condition])))
        for arm in arms
    ]


def setting_of(config: Config, name: str) -> Any:
    """Value of a setting by its dotted name; None where there is none."""
    return next((p.value for at, p in Place(config).walk() if at == name), None)


def _unfit(arm: Arm) -> Iterator[str]:
    """Yield sentences on why a config cannot run side by side in one program."""
    if arm.config.staged:
        yield "staged=True runs one seed at a time; set staged to False."
    if (path := arm.config.memory.load) is not None:
        yield (
            f"memory.load={path} is read by curax.train alone; set memory.load to None."
        )
    sizes = arm.config.mesh
    for axis in AXES:
        if getattr(sizes, axis) != 1:
            yield (
                f"mesh.{axis}={getattr(sizes, axis)}, and a comparison runs on one "
                f"device; set mesh.{axis} to 1."
            )


def warm_config(experiment: Experiment, arm: Arm) -> Config:
    """Config of the warm start of an arm."""
    with refusals(of="warm_start"):
        return override(arm.config, experiment.warm_start)


def warm_key(experiment: Experiment, arm: Arm) -> str:
    """Digest of an arm's warm start: equal for equal warm starts alone."""
    fields = describe(warm_config(experiment, arm))
    sizes = ("tokens_per_micro_batch", "token_chunk", "length_buckets")
    fields["update"] = {name: fields["update"][name] for name in sizes}
    return digest({name: fields[name] for name in WARM_FIELDS})


def digest(value: Any) -> str:
    """Hash of JSON values as twelve hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def budget(experiment: Experiment) -> dict[str, Any]:
    """Fields of an experiment that set lengths and evaluations of its runs, as JSON."""
    names = ("seeds", "tokens", "updates", "steps", "every")
    found = {name: getattr(experiment, name) for name in names}
    if experiment.tune:
        found["tuning_seeds"] = experiment.tuning_seeds
        found["tune"] = {
            name: repr(by_name(values)) for name, values in experiment.tune.items()
        }
    return found | {
        "watched": list(experiment.watched),
        "warm_start": {
            name: repr(by_name(x)) for name, x in experiment.warm_start.items()
        },
    }
