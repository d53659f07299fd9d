"""Run folders as training leaves them, without any: for what reads them."""

import contextlib
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
import real
import small
import words

from curax import off_policy
from curax.config import Config, load, override
from curax.runs import checkpoint, folder, policies, run
from curax.settings.config_paths import describe, option
from curax.step import loops
from curax.verify import graders

BUILD = run.make_loop
STEPS = {0: 0.5, 2: 0.9, 5: 0.1}  # those saved, and their scores


def lora() -> Config:
    """Adapters on a checkpoint, and problems in files."""
    config = real.get_config()
    task = partial(config.task, grader=graders.numbers, template="Q: {question}")
    drawn = replace(config.sampling, top_k=50, off_policy=off_policy.none)
    config = replace(config, task=task, warm_start=None, sampling=drawn)
    return override(
        config,
        [
            f"model.path={real.checkpoint(small=True)}",
            f"task.train={words.folder() / 'test.jsonl'}",
            "task.held_out=none",
            "task.num_held_out=7",
            "model.lora_rank=2",
            "sampling.max_tokens=5",
            "evaluation.prompts=7",
        ],
    )


def own() -> Config:
    """A small transformer that came from no checkpoint, and its task."""
    return load(small.FILE)


@cache
def built(make) -> loops.Loop:
    """The loop of a config; its programs are not traced, for none is a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops.Loop, "rehearse", lambda self: None)
        return BUILD(make())


def patched(monkeypatch):
    """Who restores one of the configs gets states whose programs are there already."""

    def states_of(config, _):
        return built(lora if option(config.model, "path") else own)

    monkeypatch.setattr(policies, "states_of", states_of)


@cache
def state(make, step):
    """What a run of this config is said to be after a step."""
    loop = built(make)
    begun = loop.begin(loop.initial())
    if step == 0:
        return begun
    key = jax.random.key(step)

    def noisy(path, leaf):
        noise = jax.random.normal(key, leaf.shape, leaf.dtype)
        return leaf + jnp.float32(0.1) * noise

    params = jax.tree_util.tree_map_with_path(noisy, begun.params)
    return replace(begun, params=params, step=jnp.int32(step))


def write(workdir, make, *, off=0):
    """A run folder with checkpoints of a few steps; the base has changed if `off`."""
    folder.make(workdir, make())
    folder.write_questions(workdir, built(make).parts.task)
    about = folder.kept(describe(make()))
    there = checkpoint.Checkpoints(workdir / folder.CHECKPOINTS, keep=9, about=about)
    with contextlib.closing(there):
        for step, score in STEPS.items():
            now = state(make, step)
            base = jax.tree.map(
                lambda leaf: leaf + jnp.asarray(off, leaf.dtype), now.frozen
            )
            there.save(step, replace(now, frozen=base), {}, score=score)
    return workdir
