"""From a checkpoint and a file of problems to a better checkpoint, by command line."""

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import real
from outputs import refusal
from run_files import assert_same_run, rows
from test_folder import lines
from test_train import BUILT, compiled  # noqa: F401, as a fixture

from curax import train
from curax.commands import demo
from curax.config import load, override
from curax.models import export, pretrained, prompt_form
from curax.runs import checkpoint, folder, run
from curax.step import drivers

ROOT = Path(__file__).parents[1]
FEW = ["warm_start.steps=6", "steps=4", "evaluation.every=2", "evaluation.prompts=8"]
FEW += ["logging.checkpoint_every=2", "evaluation.samples=2", "sampling.prompts=4"]
LORA = ["model.lora_rank=4", "model.lora_alpha=8.0", "warm_start=none"]
long = pytest.mark.long  # by tests of the run of sixty steps, and of pairs of runs


def few(*more, family="Qwen3"):
    """A small policy for a few steps."""
    path = real.checkpoint(f"{family}ForCausalLM", small=True)
    return [*FEW, f"model.path={path}", *more]


def call(workdir, *assignments, resume=False):
    words_ = ["--config", str(real.FILE), "--workdir", str(workdir), "--set"]
    words_ += [*real.named(), *assignments]
    return train.main(words_ + ["--resume"] * resume)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run to its end."""
    workdir = tmp_path_factory.mktemp("real") / "whole"
    assert call(workdir) == 0
    return workdir


def trained(workdir):
    """The parameters at the end of the whole run."""
    loop = run.make_loop(override(load(real.FILE), real.named()))
    saved = checkpoint.Checkpoints(workdir / folder.CHECKPOINTS, keep=2)
    found = saved.restore(60, loop.abstract)[0]
    saved.close()
    return jax.device_get(found.params)


def policy(path):
    model = pretrained.model(path=str(path), scan_layers=False, dtype="float32")
    return model, model.load(None)


def logits(path, tokens):
    """Of a checkpoint, all at once."""
    model, params = policy(path)
    n, length = tokens.shape
    at = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (n, length))
    features, _ = model.features(params, tokens, at, jnp.ones((n, length), bool))
    return np.asarray(jnp.einsum("nqd,vd->nqv", features, model.head(params)))


@long
def test_the_warm_start_solves_some_and_rl_raises_the_held_out_pass_rate(whole):
    told = rows(whole)
    rates = {r["step"]: r["eval/pass_rate"] for r in told if "eval/pass_rate" in r}
    assert 0.2 < rates[0] < 0.7
    assert rates[60] > 0.75
    assert rates[60] > rates[0] + 0.25
    for row in told[1:]:
        assert row["sampler/drift_nats"] < 1e-4
        assert not any(row[f"verify/{kind}"] for kind in drivers.KINDS)
    shown = lines(whole / folder.ROLLOUTS)
    assert all(r["prompt"].startswith("<|im_start|>user\n") for r in shown)
    assert any(r["text"].endswith("<|im_end|>") and r["outcome"] == 1.0 for r in shown)


@long
def test_the_report_and_the_memory_are_written(whole):
    assert "held-out" in (whole / "report.html").read_text().lower()
    assert len(lines(whole / folder.MEMORY)) > 100


@long
def test_a_run_killed_at_any_time_is_the_run_that_was_not(tmp_path):
    # First, so that the others find its programs compiled.
    assert call(tmp_path / "whole", *few()) == 0
    begin = [sys.executable, "-m", "curax.train", "--config", str(real.FILE)]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}

    def start(workdir, *more):
        command = [*begin, "--workdir", str(workdir), *more]
        command += ["--set", *real.named(), *few()]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=env, **pipes)

    for place in (folder.WARM, folder.METRICS):
        process = start(tmp_path / "killed", *["--resume"] * (place != folder.WARM))
        there = tmp_path / "killed" / place
        while process.poll() is None and not (
            there.exists() and there.read_bytes().count(b"\n") > 3
        ):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        out = process.communicate()[0]
        assert process.returncode == -signal.SIGKILL, out
    assert call(tmp_path / "killed", *few(), resume=True) == 0
    config = override(load(real.FILE), [*real.named(), *few()])
    assert_same_run(tmp_path / "killed", tmp_path / "whole", step=4, config=config)


@long
def test_a_draw_in_parts_is_the_same_draw(tmp_path):
    qwen2 = partial(few, family="Qwen2")
    assert call(tmp_path / "whole", *qwen2()) == 0
    assert call(tmp_path / "parts", *qwen2("sampling.chunks=4")) == 0
    got, want = (rows(tmp_path / name) for name in ("parts", "whole"))
    for mine, theirs in zip(got, want, strict=True):
        for name in ("rollout/tokens", "outcome/mean", "train/tokens"):
            assert mine.get(name) == theirs.get(name)
    texts = [
        [r["text"] for r in lines(tmp_path / name / folder.ROLLOUTS)]
        for name in ("parts", "whole")
    ]
    assert texts[0] == texts[1]


@long
def test_eight_devices_draw_and_learn_what_one_does(tmp_path):
    mesh = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]
    assert call(tmp_path / "one", *few(*LORA, "steps=2")) == 0
    assert call(tmp_path / "eight", *few(*LORA, *mesh, "steps=2")) == 0
    got, want = (rows(tmp_path / name) for name in ("eight", "one"))
    for mine, theirs in zip(got, want, strict=True):
        assert mine.get("rollout/tokens") == theirs.get("rollout/tokens")
        for name in ("loss/mean", "gradient/norm", "eval/pass_rate"):
            if name in theirs:
                np.testing.assert_allclose(mine[name], theirs[name], 1e-3, 1e-5)


@long
def test_adapters_alone_are_trained_and_saved_and_resume(tmp_path, whole, capsys):
    base = tmp_path / "base"
    export.export(real.checkpoint(), trained(whole), base)
    words_ = few(*LORA, "steps=4", f"model.path={base}")
    assert call(tmp_path / "whole", *words_) == 0
    config = override(load(real.FILE), [*real.named(), *words_])
    names = jax.tree_util.tree_flatten_with_path(run.make_loop(config).abstract.params)[
        0
    ]
    assert len(names) == 7 * 2
    assert all(path[-1].key.startswith("lora_") for path, _ in names)
    sizes = [
        sum(f.stat().st_size for f in (place / folder.CHECKPOINTS).rglob("*"))
        for place in (tmp_path / "whole", whole)
    ]
    assert sizes[0] < sizes[1] / 3
    # Half of it first, then the other half.
    half = [word for word in words_ if not word.startswith("steps=")]
    assert call(tmp_path / "half", *half, "steps=2") == 0
    assert call(tmp_path / "half", *half, "steps=4", resume=True) == 0
    assert rows(tmp_path / "half") == rows(tmp_path / "whole")
    # A base that is another one is not taken for the same.
    shutil.rmtree(base)
    shutil.copytree(real.checkpoint(), base)
    BUILT.clear()
    capsys.readouterr()
    assert call(tmp_path / "half", *half, "steps=6", resume=True) == 1
    said = capsys.readouterr().err
    assert "differ from those the run began with; bring back what model.path" in said


@pytest.mark.long
def test_supervised_training_alone_is_a_run_of_a_llama_and_goes_on_with_rl(tmp_path):
    from curax.commands import export as command

    llama = partial(few, family="Llama")
    assert call(tmp_path / "sft", *llama("steps=0")) == 0
    (row,) = rows(tmp_path / "sft")
    assert row["step"] == 0
    assert 0 <= row["eval/pass_rate"] <= 1
    assert len(lines(tmp_path / "sft" / folder.WARM)) == 6
    assert command.main([str(tmp_path / "sft"), str(tmp_path / "out")]) == 0
    source = real.checkpoint("LlamaForCausalLM", small=True)
    names = {file.name for file in source.iterdir()}
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert written == names | {prompt_form.FILE, "README.md"}
    before, after = policy(source)[1], policy(tmp_path / "out")[1]
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, after)
    assert min(jax.tree.leaves(moved)) > 0
    assert call(tmp_path / "sft", *llama("steps=2"), resume=True) == 0
    assert [r["step"] for r in rows(tmp_path / "sft")] == [0, 1, 2]


@long
def test_the_export_of_a_run_is_the_policy_of_its_checkpoint(tmp_path, whole):
    from curax.commands import export as command

    assert command.main([str(whole), str(tmp_path / "out")]) == 0
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 300, (2, 12)), jnp.int32)
    assert not np.allclose(
        logits(tmp_path / "out", tokens), logits(real.checkpoint(), tokens)
    )
    got = policy(tmp_path / "out")[1]
    jax.tree.map(np.testing.assert_array_equal, got, trained(whole))


BROKEN = """
from dataclasses import replace
from functools import partial
import real

def grader(prompt, completion, answer):
    return 1.0

def start():
    raise ValueError("the table is not there")

grader.start = start

def get_config():
    config = real.get_config()
    return replace(config, task=partial(config.task, grader=grader))
"""


def test_a_grader_that_cannot_start_is_told_before_anything_is_written(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    command = ["--config", str(tmp_path / "broken.py"), "--workdir"]
    command += [str(tmp_path / "run"), "--set", *real.named(small=True), *FEW]
    said = refusal(train.main, *command)
    assert "no process can start for grader 'grader'" in said
    assert "the table is not there" in said
    assert not (tmp_path / "run").exists()


@long
def test_other_questions_are_not_taken_for_those_the_run_began_with(tmp_path, capsys):
    files = tmp_path / "files"
    files.mkdir()
    records = list(demo.problems(count=60))
    demo.write_lines(files / "train.jsonl", records[:40])
    named = [f"task.train={files / 'train.jsonl'}", "warm_start=none"]
    assert call(tmp_path / "run", *few(*named, "steps=2")) == 0
    demo.write_lines(files / "train.jsonl", records[:41])
    capsys.readouterr()
    BUILT.clear()
    assert call(tmp_path / "run", *few(*named, "steps=4"), resume=True) == 2
    assert "that the run began with" in capsys.readouterr().err
