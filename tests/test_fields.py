"""No field of a config is dead: changing any one changes something that can be seen.

What can be seen is the programs of a run, as far as their results depend on them; which
loop runs them, from which seeds, on which devices; the order of what the host does; and
whether the config is refused. What must change nothing but speed or memory (slots,
micro-batches, the mesh, ...) changes a program here, and `test_loops` shows that the
results stay.
"""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small
import tiny
from flax.core.spmd import get_logical_axis_rules
from jax.interpreters import partial_eval
from kinds import one_of_each_first

from curax import (
    advantage,
    aggregate,
    allocate,
    correct,
    downsample,
    engine,
    gate,
    hint,
    loss,
    modulate,
    objective,
    off_policy,
    reflect,
    reward,
    score,
    stop,
)
from curax.config import (
    KL,
    Config,
    ConfigError,
    Hint,
    Pilot,
    Queries,
    Reflection,
    Stop,
    Writing,
    load,
    override,
)
from curax.models import transformer
from curax.models.rotary import RopeScaling
from curax.runs import run
from curax.settings.config_paths import describe, flat
from curax.step import draw, drivers, learn, loops, states, validation
from curax.step.methods import queries, references
from curax.step.step import step
from curax.step.types import Method, Ungraded
from curax.tasks import chain, rationale
from curax.theory import stated_objective

CONFIG = replace(
    small.get_config(),
    # Small, and with as many options as one config can have.
    task=load(small.QUICKSTART).task,
    objective=partial(objective.prompt_weight, f=partial(objective.power, alpha=0.5)),
    gate=partial(gate.pass_rate_band, low=0.1, high=0.9),
    downsample=partial(downsample.max_variance, m=2),
    correct=correct.horvitz_thompson,
    advantage=partial(advantage.standardised, eps=1e-4),
    modulate=partial(modulate.forking_tokens, share=0.5),
    shape_reward=partial(reward.soft_overlong, max_tokens=2, margin=1),
    kl=KL(estimator=loss.k3, coefficient=0.1),
    entropy_bonus=0.01,
)
SMALL = {"task.depth": 1, "task.num_prompts": 64, "task.num_held_out": 32}
CONFIG = override(CONFIG, SMALL | {"model.lora_rank": 1, "model.lora_modules": ("q",)})
# For fields that are not of the model: a third of the time to trace.
PLAIN = replace(CONFIG, model=tiny.table)


def another_task():
    return replace(chain.task(depth=1), pad=chain.GO)


def another_model(*, vocab_size):
    return transformer.model(vocab_size=vocab_size, width=16, layers=1, tied=True)


def attend_to_all_alike(q, k, v, seen, *, causal):
    return 0.0 * q + jnp.mean(v, (1, 2), keepdims=True)


def half(difficulty, *, budget, most):
    return allocate.uniform(difficulty, budget=budget // 2, most=most)


def outcome_itself(outcome, exists, history):
    return jnp.where(exists, outcome, 0.0)


def nowhere(params):
    return jax.tree.map(lambda _: False, params)


def of_one_form(text):
    return 0


def counting():
    return Method(name="count", init=lambda *_: jnp.int32(0))


sgd = partial(optax.sgd, learning_rate=0.1)

# Each field: another value, and where it must be seen. "only" says: and nowhere else.
FIELDS: dict[str, tuple[Any, str]] = {
    "task": (another_task, "draw"),
    "task.depth": (2, "draw"),
    "task.num_prompts": (65, "draw"),
    "task.num_held_out": (7, "refused: to at most 7"),  # than evaluation.prompts
    "task.errors.0": (0.5, "warm"),
    "task.errors.1": (0.5, "warm"),
    "task.errors.2": (0.5, "warm"),
    "task.on_device": (False, "loop"),
    "task.hints": (True, "draw"),
    "task.levels": (2, "step refuses with writing"),
    "task.hinted_traces": (0.5, "warm with hints"),
    "task.asked_traces": (0.5, "warm with hints"),
    "task.hint_errors": ((0.0, 0.5, 1.0), "step with filed"),
    "model": (another_model, "draw"),
    "model.width": (8, "draw"),
    "model.layers": (2, "draw"),
    "model.heads": (4, "draw"),
    "model.kv_heads": (2, "draw"),
    "model.head_dim": (4, "draw"),
    "model.mlp_width": (8, "draw"),
    "model.rope_theta": (100.0, "draw"),
    "model.rope_scaling": (RopeScaling(factor=2.0), "draw"),
    "model.norm_eps": (1e-3, "draw"),
    "model.qk_norm": (False, "draw"),
    "model.qkv_bias": (True, "draw"),
    "model.tied": (True, "draw"),
    "model.embedding_std": (0.1, "initial"),
    "model.scan_layers": (True, "draw"),
    "model.remat": (True, "draw"),
    "model.dtype": ("bfloat16", "draw"),
    "model.param_dtype": ("bfloat16", "draw"),
    "model.attend": (attend_to_all_alike, "draw"),
    "model.lora_rank": (2, "draw"),
    "model.lora_alpha": (8.0, "draw"),
    "model.lora_modules.0": ("k", "draw"),
    "sampling.group_size": (8, "draw"),
    "sampling.prompts": (8, "draw"),
    "sampling.max_tokens": (3, "draw"),
    "sampling.temperature": (0.5, "draw"),
    "sampling.top_k": (2, "draw with truncation"),
    "sampling.top_p": (0.5, "draw with truncation"),
    "sampling.off_policy": (off_policy.icepop, "step with truncation"),
    "sampling.replay_support": (True, "draw with truncation"),
    "sampling.slots": (3, "draw"),
    "sampling.cache_gib": (2e-6, "draw with keys"),
    "sampling.attempts": (2, "step"),
    "sampling.ahead": (1, "step with truncation"),
    "sampling.engine": (
        partial(engine.vllm, url="http://127.0.0.1:9"),
        "loop with weights",
    ),
    "sampling.chunks": (2, "refused: sampling.chunks to 1"),  # verified on the device
    "sampling.budget": (12, "draw"),
    "pilot": (Pilot(draws=1), "step"),
    "stop": (Stop(rule=stop.positives, round_size=2), "draw"),
    "hint": (
        Hint(source=hint.reference_prefix, trigger=hint.all_wrong),
        "refused: a task that can give hints",
    ),
    "reflection": (
        Reflection(weights=reflect.mean),
        "refused: nothing of shape_reward",
    ),
    "allocate": (half, "draw"),
    "claim": (objective.log, "claim"),
    "objective": (outcome_itself, "credit"),
    "objective.f": (objective.log, "credit"),
    "objective.f.alpha": (2.0, "credit"),
    "objective.prior.0": (1.0, "credit"),
    "objective.prior.1": (1.0, "credit"),
    "objective.low": (0.1, "credit"),
    "objective.high": (0.9, "credit"),
    "methods": ((counting,), "step"),
    "gate": (gate.none, "credit"),
    "gate.low": (0.2, "credit"),
    "gate.high": (0.8, "credit"),
    "downsample": (partial(downsample.random, m=2), "credit"),
    "downsample.m": (4, "credit"),
    "correct": (correct.none, "credit"),
    "pool_statistics": (False, "credit"),
    "advantage": (advantage.raw, "credit"),
    "advantage.eps": (0.1, "credit"),
    "advantage.bessel": (True, "credit"),
    "advantage.floor": (0.35, "credit"),
    "modulate": (modulate.none, "step"),
    "modulate.share": (0.2, "step"),
    "loss": (loss.gspo, "step"),
    "loss.low": (0.1, "step"),
    "loss.high": (0.1, "step"),
    "loss.dual": (3.0, "step"),
    "aggregate": (aggregate.token_mean, "step"),
    "aggregate.length": (4.0, "step"),
    "shape_reward": (None, "step"),
    "shape_reward.max_tokens": (4, "step"),
    "shape_reward.margin": (2, "step"),
    "kl.estimator": (loss.k1, "step"),
    "kl.coefficient": (0.2, "step"),
    "entropy_bonus": (0.1, "step"),
    "optimizer": (sgd, "step"),
    "optimizer.learning_rate": (0.1, "step"),
    "optimizer.b1": (0.5, "step"),
    "optimizer.b2": (0.5, "step"),
    "optimizer.eps": (0.1, "step"),
    "optimizer.eps_root": (0.1, "step"),
    "optimizer.mu_dtype": (jnp.bfloat16, "step"),
    "optimizer.nesterov": (True, "step"),
    "update.epochs": (2, "step"),
    "update.minibatches": (1, "step"),
    "update.micro_batches": (2, "step only"),
    "update.clip_norm": (0.1, "step"),
    "update.behaviour_as_old": (True, "step"),
    "update.length_buckets": (2, "step"),
    "update.tokens_per_micro_batch": (8, "step"),
    "update.token_chunk": (5, "step"),
    "update.patience": (1, "host only"),
    "warm_start.steps": (7, "host only"),
    "warm_start.rows": (8, "warm"),
    "warm_start.micro_batches": (2, "warm"),
    "warm_start.optimizer": (sgd, "warm"),
    "warm_start.optimizer.learning_rate": (0.1, "warm"),
    "warm_start.optimizer.learning_rate.peak": (0.1, "warm"),
    "warm_start.optimizer.learning_rate.warmup": (2, "warm"),
    "warm_start.optimizer.learning_rate.steps": (9, "warm"),
    "warm_start.optimizer.learning_rate.end": (0.1, "warm"),
    "warm_start.optimizer.b1": (0.5, "warm"),
    "warm_start.optimizer.b2": (0.5, "warm"),
    "warm_start.optimizer.eps": (0.1, "warm"),
    "warm_start.optimizer.eps_root": (0.1, "warm"),
    "warm_start.optimizer.mu_dtype": (jnp.bfloat16, "warm"),
    "warm_start.optimizer.weight_decay": (0.1, "warm"),
    "warm_start.optimizer.mask": (nowhere, "warm"),
    "warm_start.optimizer.nesterov": (True, "warm"),
    "warm_start.clip_norm": (0.1, "warm"),
    "evaluation.every": (2, "host only"),
    "evaluation.prompts": (4, "evaluation"),
    "evaluation.samples": (2, "evaluation"),
    "evaluation.k": (2, "measured only"),
    "evaluation.distance": (True, "measured only"),
    "evaluation.confidence": (3, "measured only"),
    "evaluation.window": (1, "measured with confidence"),
    "evaluation.format": (of_one_form, "measured only"),
    "memory.half_life": (1.0, "step"),
    "memory.prior.0": (2.0, "step"),
    "memory.prior.1": (2.0, "step"),
    "memory.load": ("memory.jsonl", "host only"),
    "mesh.data": (2, "loop only"),
    "mesh.fsdp": (2, "loop only"),
    "mesh.tensor": (2, "loop only"),
    "mesh.cut_sampler": (True, "loop with mesh"),
    "mesh.draw_share": (0.5, "loop with split"),
    "logging.every": (3, "host only"),
    "logging.rollout_prompts": (1, "step only"),
    "logging.checkpoint_every": (3, "host only"),
    "logging.keep": (1, "host only"),
    "logging.drift_nats": (1.0, "host only"),
    "logging.dashboards.0": ("wandb", "host only"),
    "steps": (8, "host only"),
    "seed": (1, "loop only"),
    "seeds": (2, "loop only"),
    "staged": (True, "loop only"),
}


# What a config can have only without something of the above, and its own fields.
ALTERNATIVES: dict[str, dict[str, Any]] = {
    "stop": {"stop": Stop(rule=partial(stop.balanced, right=1, wrong=1), round_size=2)},
    "hint": {
        "task": partial(
            chain.task, depth=2, num_prompts=64, num_held_out=32, hints=True
        ),
        "hint": Hint(
            source=hint.reference_prefix,
            width=3,
            writing=Writing(max_tokens=3),
            trigger=hint.all_wrong,
        ),
    },
    "pilot": {
        "pilot": Pilot(draws=2, norm=score.logits),
        "allocate": partial(allocate.gvm, least=1),
    },
    "reflection": {
        "task": partial(rationale.task, depth=1, words=1, num_held_out=32),
        "shape_reward": None,
        "reflection": Reflection(
            weights=reflect.denoised,
            scorer_every=2,
            length=reflect.length_term,
            queries=Queries(every=2, draws=2, keep=reflect.null_test),
        ),
    },
}
# What some fields need to be of any use.
WITH: dict[str, Any] = {
    "confidence": {"evaluation.confidence": 3},
    "hints": {"task.hints": True},
    "filed": {
        "task.hints": True,
        "task.hint_errors": (0.5, 0.5, 0.5),
        "hint": Hint(source=hint.from_file, width=7, trigger=hint.all_wrong),
    },
    "keys": {"model": CONFIG.model},
    "mesh": {"mesh.fsdp": 2},
    "split": {
        "mesh.data": 2,
        "sampling.ahead": 1,
        "sampling.off_policy": off_policy.truncated_ratio,
    },
    "weights": {"sampling.off_policy": off_policy.truncated_ratio},
    "truncation": {
        "sampling.top_p": 0.9,
        "sampling.off_policy": off_policy.truncated_ratio,
    },
    "writing": ALTERNATIVES["hint"] | {"hint.source": hint.self_written},
}
MORE_FIELDS = {
    "hint.source": (hint.self_written, "step"),
    "hint.source.shares": ((0.2, 0.4, 0.6), "step"),
    "hint.levels": (2, "step"),
    "hint.width": (4, "draw"),
    "hint.writing.max_tokens": (4, "step"),
    "hint.writing.temperature": (0.5, "step"),
    "hint.writing.tries": (1, "step"),
    "hint.writing.frozen": (True, "step"),
    "hint.trigger": (hint.no_signal, "step"),
    "hint.controller": (hint.paper, "step"),
    "hint.most": (0.25, "step"),
    "hint.credit": (hint.dropped, "step"),
    "stop.rule": (stop.never, "draw"),
    "stop.rule.right": (2, "draw"),
    "stop.rule.wrong": (2, "draw"),
    "stop.rule.threshold": (0.7, "draw"),
    "stop.round_size": (1, "draw"),
    "pilot.draws": (1, "step"),
    "pilot.every": (2, "step"),
    "pilot.norm": (score.last_layer, "step"),
    "pilot.root_mean_square": (False, "step"),
    "reflection.weights": (reflect.variance, "references"),
    "reflection.weights.floor": (1.0, "references"),
    "reflection.clip_nats": (5.0, "references"),
    "reflection.leave_one_out": (True, "references"),
    "reflection.baseline": (reflect.blank_thought, "references"),
    "reflection.scorer_every": (3, "step"),
    "reflection.answers": (True, "step"),
    "reflection.length": (None, "references"),
    "reflection.length.slope": (0.25, "references"),
    "reflection.length.least": (-2.0, "references"),
    "reflection.length_weight": (0.5, "references"),
    "reflection.rubric": (reflect.drop, "references"),
    "reflection.direct": (0.1, "step"),
    "reflection.keep": (reflect.null_test, "references"),
    "reflection.queries.every": (3, "queries"),
    "reflection.queries.candidates": (3, "queries"),
    "reflection.queries.draws": (3, "queries"),
    "reflection.queries.keep": (reflect.ema, "queries"),
    "reflection.queries.keep.level": (0.1, "queries"),
    "reflection.queries.keep.hardest": (2.0, "queries"),
    "reflection.queries.carried": (0.3, "queries"),
}


def by_place(fields):
    """Fields as parameters: the first that is seen in a place, then the long rest."""
    places = {where: name for name, (_, where) in reversed(fields.items())}
    return pytest.mark.parametrize("name", one_of_each_first(fields, places.values()))


def program(function, *args) -> str:
    """What its results depend on, and nothing else: its jaxpr without dead code."""
    closed = jax.make_jaxpr(function)(*args)
    wanted = [True] * len(closed.jaxpr.outvars)
    alive, _ = partial_eval.dce_jaxpr(closed.jaxpr, wanted)
    return f"{alive} {[np.asarray(const).tolist() for const in closed.consts]}"


class Diary:
    """A loop and a run folder that only write down what they are told."""

    platform = "cpu"
    reason = None

    def __init__(self, config: Config):
        self.told: list[tuple] = []
        self.parts = SimpleNamespace(
            config=config, task=SimpleNamespace(summary=""), engine=None
        )
        self.seeds = np.uint32(0)
        self.abstract = self.abstract_warm = self.sharding = self.warm_sharding = None

    def context(self, *_):
        return contextlib.nullcontext()

    compiling = context

    def initial(self):
        return SimpleNamespace(frozen=None)

    def warm(self, state, times):
        self.told.append(("warm", times))
        return state, np.zeros(times)

    warm_up: Any = loops.Loop.warm_up

    def whole(self, state):
        return state

    def begin(self, state):
        return SimpleNamespace(memory=None, frozen=None)

    def evaluate(self, state):
        self.told.append(("evaluate",))
        return np.zeros(1), np.zeros(1), {}

    def advance(self, state, times):
        self.told.append(("advance", times))
        names = ("outcome/mean", "group/dead_fraction", "loss/mean", "gradient/norm")
        drift = {"update/count": 1.0, "sampler/drift_nats": 0.01}
        rows = [dict.fromkeys(names, 0.0) | drift for _ in range(times)]
        rows[0]["update/nonfinite"] = 1.0
        return state, rows, []

    def checkpoints(self, folder, *, keep, about):
        self.told.append(("keep", keep))
        return SimpleNamespace(
            newest=lambda *_: None,
            save=lambda step, *_, **__: self.told.append(("save", step)),
            wait=lambda: None,
            close=lambda: None,
        )

    def say(self, _, text):
        # How long it took and takes is no word about the config.
        timeless = re.sub(r"  [\d,]+ tokens/s|  left [\d:]+", "", text)
        self.told.append(("say", timeless))

    def read(self, path, task):
        self.told.append(("read", path))
        return SimpleNamespace(memory=None, unknown=0)

    def with_memory(self, state, memory):
        return state

    def write(self, path, task, memory):
        self.told.append(("write", path.name))


class Seen:
    """What can be seen of a config, computed when it is looked at."""

    def __init__(self, config: Config):
        self.config = config
        self.loop = run.make_loop(config)
        self.parts = self.loop.parts
        self.seed = jax.ShapeDtypeStruct((), jnp.uint32)

    @cached_property
    def start(self):
        return jax.eval_shape(partial(states.initial, self.parts), self.seed)

    @cached_property
    def state(self):
        return jax.eval_shape(partial(states.begin, self.parts), self.start)

    @cached_property
    def programs(self) -> dict[str, Callable[[], str]]:
        return {
            "initial": lambda: program(partial(states.initial, self.parts), self.seed),
            "warm": lambda: program(partial(loops.warm_step, self.parts), self.start),
            "draw": self.draw,
            "credit": self.credit,
            "claim": lambda: stated_objective.claimed(self.config)[0],
            "step": lambda: program(
                partial(step, drivers.Traced(), self.parts), self.state
            ),
            "evaluation": self.evaluation,
            "measured": self.measured,
            "references": self.references,
            "queries": lambda: program(
                lambda state: queries.choose(drivers.Traced(), self.parts, state, None),
                self.state,
            ),
        }

    def draw(self):
        return program(self.drawn, self.state)

    def drawn(self, state):
        request = draw.next_request(drivers.Traced(), self.parts, state)
        return request, draw.draw(self.parts, state, request)

    def references(self):
        request, rollouts = jax.eval_shape(self.drawn, self.state)

        def grade(state, request, rollouts):
            drawn = Ungraded(request=request, rollouts=rollouts)
            return references.grade(drivers.Traced(), self.parts, state, drawn)

        return program(grade, self.state, request, rollouts)

    def credit(self):
        sizes = self.config.sampling
        grid = (sizes.prompts, sizes.group_size)
        number = jax.ShapeDtypeStruct(grid, jnp.float32)
        flag = jax.ShapeDtypeStruct(grid, bool)
        key = jax.eval_shape(jax.random.key, 0)
        rate = jax.ShapeDtypeStruct(grid[:1], jnp.float32)
        credit = partial(learn.compute_credit, self.config)
        return program(credit, key, number, number, flag, flag, rate)

    def evaluation(self):
        def draw(state):
            drive = drivers.Traced()
            asked, _ = validation.requests(drive, self.parts, state.seed)
            return asked.prompts, drive.draw(self.parts, state, asked)

        return program(draw, self.state)

    def measured(self):
        """What an evaluation says beside pass rates, of completions all different."""
        kind = np.arange(6, dtype=np.int32)
        every = np.ones((6, 1), bool)
        rows = SimpleNamespace(
            tokens=kind[:, None],
            mask=every,
            written=every,
            exists=every[:, 0],
            turns=None,
        )
        rows.prompt = rows.member = np.zeros(1, np.int32)
        names = ("entropy", "effective", "top", "within")

        def spread(kind, exists):
            return SimpleNamespace(**dict.fromkeys(names, np.unique(kind).size))

        with pytest.MonkeyPatch.context() as patch:
            drive = self.loop._drive
            request = SimpleNamespace(prompts=None)
            patch.setattr(validation, "requests", lambda *_: [request] * 2)
            begun = drivers.Begun(rows, drivers.finished(None))  # pyright: ignore[reportArgumentType]
            patch.setattr(drive, "begin", lambda *_: begun)
            patch.setattr(drive, "call", lambda *_: {"asked": str(asked)})
            unknown = reward.Verdicts(np.full(1, np.nan), {})
            patch.setattr(drive, "verdicts", lambda _: [unknown])
            patch.setattr(validation, "pass_rates", lambda *_: None)
            patch.setattr(validation, "_spread", spread)
            shape = asked = replace(self.config.evaluation, prompts=2)
            parts = replace(self.parts, config=replace(self.config, evaluation=shape))
            patch.setattr(self.loop, "parts", parts)
            return str(self.loop.evaluate(SimpleNamespace(seed=None))[2])  # pyright: ignore[reportArgumentType]

    def look(self, where: str) -> Any:
        if where == "loop":
            loop = self.loop
            shape = loop.mesh and dict(loop.mesh.shape)
            with loop.context():
                rules = get_logical_axis_rules()
            return type(loop), loop.seeds.tolist(), shape, rules
        if where == "host":
            return self.host()
        return self.programs[where]()

    def host(self):
        diary = Diary(self.config)
        with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
            patch.setattr(run.checkpoint, "Checkpoints", diary.checkpoints)
            patch.setattr(run, "memory_io", diary)
            patch.setattr(run.cache, "lines", lambda _: [])  # it has no model
            patch.setattr(run.Progress, "say", lambda *words: diary.say(*words))
            try:
                recalled = run.load_memory(diary.parts)  # pyright: ignore[reportArgumentType]
                run.Run(diary, Path(folder), recalled).run()  # pyright: ignore[reportArgumentType]
            except run.RunError as error:
                diary.told.append(("stopped", str(error).replace(folder, "")))
            diary.told.append(("files", sorted(os.listdir(folder))))
        return diary.told


EVERYWHERE = (
    *("loop", "host", "initial", "warm", "draw", "credit", "claim", "step"),
    *("evaluation", "measured"),
)


@cache
def original(where: str | None = None, group: str | None = None) -> Any:
    if where:
        return original(group=group).look(where)
    if group == "model":
        return Seen(CONFIG)
    return Seen(replace(PLAIN, **ALTERNATIVES.get(group or "", {})))


@pytest.fixture(autouse=True)
def untraced(monkeypatch):
    """Each program is traced here, when it is looked at."""
    monkeypatch.setattr(loops.Loop, "rehearse", lambda self: None)


def test_every_field_is_in_the_table():
    assert set(FIELDS) == set(flat(describe(CONFIG)))
    for group in ALTERNATIVES:
        inside = {name for name in MORE_FIELDS if name.startswith(f"{group}.")}
        fields = flat(describe(original(group=group).config))
        assert inside == {name for name in fields if name.startswith(f"{group}.")}


@pytest.mark.long
@by_place(MORE_FIELDS)
def test_a_field_of_an_alternative_changes_what_it_is_for(name):
    (value, where), group = MORE_FIELDS[name], name.partition(".")[0]
    seen = Seen(override(original(group=group).config, {name: value}))
    assert seen.look(where) != original(where, group)


@pytest.mark.long
def test_the_same_config_is_the_same_everywhere():
    for config, group in ((CONFIG, "model"), (PLAIN, None)):
        again = Seen(override(config, []))
        for where in EVERYWHERE:
            assert again.look(where) == original(where, group)


@pytest.mark.first(4)
@by_place(FIELDS)
def test_a_field_changes_what_it_is_for(name):
    value, where = FIELDS[name]
    group = "model" if name.partition(".")[0] == "model" else None
    config = original(group=group).config
    refused, _, why = where.partition(": ")
    refused, _, other = refused.partition(" with ")
    if refused == "refused":
        helped = override(config, WITH[other] if other else {})
        with pytest.raises(ConfigError, match=why):
            Seen(override(helped, {name: value}))
        return
    where, _, only = where.partition(" ")
    refuses, found, other = only.rpartition("with ")
    if found:
        helped = override(config, WITH[other])
        before, seen = Seen(helped).look(where), Seen(override(helped, {name: value}))
        if refuses:
            with pytest.raises(ValueError, match="levels"):
                seen.look(where)
        else:
            assert seen.look(where) != before
        return
    seen = Seen(override(config, {name: value}))
    assert seen.look(where) != original(where, group)
    if only:
        for other in set(EVERYWHERE) - {where}:
            assert seen.look(other) == original(other, group), other
