"""Training on a taskset of verifiers, by verifiers itself: `make verifiers-test`.

VERIFIERS_PYTHON is the Python of an environment that has verifiers. A few steps of a
tiny model, which writes a few tokens of any kind and ends its turn, on `guessing.py`,
an environment of up to three turns. What its traces report is what was trained on.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from curax.commands import demo
from curax.config import Evaluation, load, override
from curax.step import drivers, loops
from curax.step.build import build
from curax.tasks import verifiers

HERE = Path(__file__).parent
STEPS = 4
THOUGHTS = """\
{%- set thought = "<think>\\n\\n</think>\\n\\n" -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == "assistant" and loop.last %}{{ thought }}{% endif -%}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}{{ thought }}{% endif -%}
{%- endif -%}"""
SIZES = {
    "sampling.prompts": 8,
    "sampling.group_size": 4,
    "sampling.max_tokens": 104,
    "aggregate.length": 104,
    "steps": STEPS,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """That of the demo, whose model has random weights."""
    made = tmp_path_factory.mktemp("verifiers") / "demo"
    demo.write(made)
    return made


def task(*, tokenizer: str, **options):
    """The taskset, with a few tokens of any kind and an end to imitate."""
    how = {"tokenizer": tokenizer, "num_held_out": 2} | options
    made = verifiers.task(taskset="guessing", **how)

    def traces(key, prompts):
        draws = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        shape = len(prompts.tokens), 6
        tokens = draws.integers(3, made.vocab_size, shape, np.int32)
        sizes = draws.integers(2, 7, (shape[0], 1))
        place = np.arange(6)[None]
        tokens = np.where(place == sizes - 1, np.int32(made.end[-1]), tokens)
        return tokens, place < sizes

    return replace(made, traces=traces)


@pytest.fixture
def config(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("GUESSES", str(tmp_path / "guesses.jsonl"))
    verifiers.asked.cache_clear()
    made = replace(
        load(folder / "words.py"),
        evaluation=Evaluation(every=STEPS, prompts=2, samples=2),
    )
    return replace(
        override(made, SIZES), task=partial(task, tokenizer=str(folder / "model"))
    )


def trained(config, monkeypatch):
    """Rows of a run, and all completions that it drew."""
    drawn, verdicts = [], drivers.Hosted._verdicts

    def noted(drive, episodes, rollouts):
        drawn.append((jax.device_get(episodes._of[0]), jax.device_get(rollouts)))
        return verdicts(drive, episodes, rollouts)

    monkeypatch.setattr(drivers.Hosted, "_verdicts", noted)
    parts = build(config)
    loop = loops.Staged(parts)
    with loop.context():
        loop.rehearse()
        *_, (warm, _, _) = loop.warm_up(loop.initial())
        drawn.clear()
        state = loop.begin(warm)
        begun = time.perf_counter()
        _, rows, _ = loop.advance(state, STEPS)
        took = time.perf_counter() - begun
    print(f"{STEPS} steps in {took:.1f} s")
    for name in ("outcome/mean", "turns/count", "turns/observed_tokens"):
        print(name, [round(float(row[name]), 3) for row in rows])
    for name in ("rollout", "verify", "update"):
        print(f"time/{name}_s", [round(row[f"time/{name}_s"], 2) for row in rows])
    return parts, rows, drawn


@pytest.fixture
def thinking(folder, tmp_path):
    """The demo's model with a template that shows thoughts, of the last turn alone."""
    there = tmp_path / "thinking"
    shutil.copytree(folder / "model", there)
    file = there / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"chat_template": THOUGHTS}))
    return str(there)


@pytest.mark.parametrize("thinks", [False, True])
def test_the_tokens_of_traces_are_those_that_are_trained(
    config, thinking, monkeypatch, thinks
):
    if thinks:
        how = {"tokenizer": thinking, "rendering": {"enable_thinking": False}}
        config = replace(config, task=partial(task, **how))
    parts, rows, drawn = trained(config, monkeypatch)
    shown = parts.task.decode(parts.task.environment.answer.__self__.rows[0])
    assert ("<think>" in shown) is thinks
    for row in rows:
        assert all(row[f"verify/{kind}"] == 0 for kind in (*drivers.KINDS, "other"))
        assert row["turns/count"] > 1
        assert row["turns/observed_tokens"] > 0
    asked = parts.task.environment.answer.__self__.rows
    made, cut, wanted = [], 0, []
    for target, rollouts in drawn:
        for n in np.flatnonzero(rollouts.exists):
            own, written = rollouts.mask[n], rollouts.written[n]
            last = int(np.flatnonzero(written)[-1])
            ends = own[last] and rollouts.tokens[n, last] in parts.task.end
            if not ends or not rollouts.finished[n]:
                cut += 1
                continue
            before = asked[target[rollouts.prompt[n]]]
            tokens = before + rollouts.tokens[n, written].tolist()
            made.append((tokens, [False] * len(before) + own[written].tolist()))
    with open(os.environ["GUESSES"]) as file:
        wanted = [json.loads(line) for line in file]
    told = [(one["tokens"], one["drawn"]) for one in wanted]
    print(f"{len(told)} traces of {len(made)} completions, and {cut} that were cut off")
    assert sum(rollouts.exists.sum() for _, rollouts in drawn) == len(made) + cut
    assert len(made) > 30
    assert sorted(told) == sorted(made)


def test_what_is_encoded_again_is_missing_and_not_wrong(config, monkeypatch):
    """By the renderer that makes tokens of all of the text at each turn."""
    again = partial(config.task, renderer="default")
    config = override(replace(config, task=again), {"update.patience": 100})
    _, rows, _ = trained(config, monkeypatch)
    drawn = sum(row["rollout/drawn"] for row in rows)
    lost = sum(row["verify/error"] for row in rows)
    print(f"{lost:.0f} of {drawn:.0f} completions are missing")
    assert 0 < lost < drawn


def test_a_command_trains_and_leaves_nothing_running(folder, tmp_path):
    """As of the page, by a process that is killed when it has trained for two steps."""
    settings = {
        "task": "verifiers.task",
        "task.taskset": "guessing",
        "task.num_held_out": 2,
        "task.tokenizer": folder / "model",
        "warm_start": "none",
        "evaluation.prompts": 2,
        "logging.checkpoint_every": 1,
    }
    given = [f"{name}={value}" for name, value in (settings | SIZES).items()]
    command = [sys.executable, "-m", "curax.train", str(folder / "words.py")]
    begun = {"PYTHONPATH": str(HERE), "GUESSES": str(tmp_path / "guesses.jsonl")}
    ran = subprocess.Popen(
        [*command, "--workdir", str(tmp_path / "run"), "--set", *given, "steps=1000"],
        env=os.environ | begun,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    rows = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 300
    while not rows.exists() or rows.read_text().count("outcome/mean") < 2:
        assert ran.poll() is None, ran.communicate()[0][-3000:]
        assert time.monotonic() < end
        time.sleep(0.5)
    others = beside(ran.pid)
    assert len(others) == 1
    ran.kill()
    ran.communicate()
    while any(map(os.path.exists, others)):
        assert time.monotonic() < end
        time.sleep(0.2)


def beside(parent):
    """Folders of processes of the other side that a process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            of = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if (
                int(of) == parent
                and b"verifiers_side" in (folder / "cmdline").read_bytes()
            ):
                found.append(folder)
    return found
