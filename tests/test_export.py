"""Runs written as checkpoints: the policy is the same, and nothing is half written."""

import json
import re
import shutil
import sys
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
import real
import saved
import small
import tiny
from outputs import printed, refusal, snapshot

from curax.arrays import frozen
from curax.commands import export
from curax.config import Mesh, override
from curax.evaluate import __main__ as evaluate
from curax.library import predict
from curax.models import pretrained, prompt_form, tensors
from curax.runs import card, folder, policies
from curax.settings import lock
from curax.step import build, loops, states
from curax.tasks import text

OWN = ("--config", str(small.FILE))
# Of the prompts that the run with adapters trains on.
FORM = {"template": "Q: {question}", "system": None, "chat": True, "thinking": None}
TOKENS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)
main = partial(printed, export.main)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run folder of each kind."""
    place = tmp_path_factory.mktemp("runs")
    makes = {"lora": saved.lora, "own": saved.own}
    return {name: saved.write(place / name, make) for name, make in makes.items()}


def test_to_load_a_policy_builds_no_loop(runs, monkeypatch):
    monkeypatch.undo()  # of the states that are there already
    monkeypatch.setattr(loops.Loop, "__init__", lambda *_: pytest.fail("a loop"))
    config = policies.run_config(runs["own"])
    policy = policies.load_run(runs["own"], config, step="best")
    assert policy.step == 2
    want = saved.state(saved.own, 2).params
    jax.tree.map(np.testing.assert_array_equal, policy.params, want)


@pytest.fixture(autouse=True)
def once(monkeypatch):
    saved.patched(monkeypatch)


def said(model, params):
    """The logits of a policy for a few tokens."""
    places = np.broadcast_to(np.arange(6, dtype=np.int32), (2, 6))
    return np.asarray(tiny.full_logits(model, params, TOKENS, places))


def of_run(make, step):
    """The logits of what a run is after a step."""
    now, model = saved.state(make, step), saved.built(make).parts.model
    return said(model, frozen.join(now.params, now.frozen))


def of_folder(path):
    model = pretrained.model(path=str(path), dtype="float32")
    return said(model, model.load(None))


@pytest.mark.long
@pytest.mark.parametrize(("words", "step"), [((), 5), (("--step", "best"), 2)])
def test_adapters_are_merged_into_a_checkpoint_like_the_first(
    tmp_path, runs, words, step
):
    done = main(runs["lora"], tmp_path / "new", *words)
    assert done == (0, f"Written: {tmp_path / 'new'}, of step {step}\n", "")
    got, source = of_folder(tmp_path / "new"), real.checkpoint(small=True)
    np.testing.assert_allclose(got, of_run(saved.lora, step), atol=2e-5)
    assert np.abs(got - of_folder(source)).max() > 0.01
    written = {file.name for file in (tmp_path / "new").iterdir()}
    own = {prompt_form.FILE, "README.md"}
    assert written == {file.name for file in source.iterdir()} | own
    assert prompt_form.read(tmp_path / "new") == FORM


def test_step_zero_is_the_checkpoint_that_the_run_began_from(tmp_path, runs):
    assert main(runs["lora"], tmp_path / "new", "--step", "0")[0] == 0
    source = real.checkpoint(small=True)
    for file in source.iterdir():
        assert (tmp_path / "new" / file.name).read_bytes() == file.read_bytes()


def test_adapters_alone_are_written_as_peft_has_them(tmp_path, runs):
    assert main(runs["lora"], tmp_path / "new", "--adapter")[0] == 0
    assert "library_name: peft" in (tmp_path / "new/README.md").read_text()
    assert prompt_form.read(tmp_path / "new") == FORM
    config = json.loads((tmp_path / "new/adapter_config.json").read_text())
    assert (config["r"], config["peft_type"]) == (2, "LORA")
    assert config["base_model_name_or_path"] == str(real.checkpoint(small=True))
    held = tensors._inside(tmp_path / "new/adapter_model.safetensors")
    ours = jax.tree.leaves(saved.state(saved.lora, 5).params)
    assert sum(np.prod(one.shape) for one in held.values()) == sum(
        leaf.size for leaf in ours
    )
    without = "holds adapters without the checkpoint that they belong to; name the "
    assert without in refusal(evaluate.main, "--model", tmp_path / "new")
    with pytest.raises(ValueError, match=without):
        pretrained.model(path=str(tmp_path / "new"))
    file = tmp_path / "new/tokenizer.json"  # which may lie beside them, and be named
    shutil.copy(real.checkpoint(small=True) / file.name, file)
    assert text.load(file.parent).size


def test_a_folder_may_be_called_by_bytes_that_are_no_text(tmp_path, runs):
    new = tmp_path / "new\udcff"
    assert main(runs["lora"], new, "--adapter")[0] == 0
    assert "# new?\n" in (new / "README.md").read_text("utf-8")


@pytest.mark.long
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_model_of_ones_own_becomes_a_checkpoint_of_its_architecture(
    tmp_path, runs, dtype
):
    words = () if dtype is None else ("--dtype", dtype)
    assert main(runs["own"], tmp_path / "new", *OWN, *words)[0] == 0
    config = json.loads((tmp_path / "new/config.json").read_text())
    task = saved.built(saved.own).parts.task
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["eos_token_id"] == list(task.end)
    assert config["dtype"] == (dtype or "float32")
    got, want = of_folder(tmp_path / "new"), of_run(saved.own, 5)
    np.testing.assert_allclose(got, want, atol=0.1 if dtype else 1e-6)


def test_a_tokenizer_that_the_task_reads_goes_with_the_model(
    tmp_path, runs, monkeypatch
):
    loop = saved.built(saved.own)
    config, read = saved.own(), real.checkpoint(small=True)
    now = saved.state(saved.own, 5)
    policy = policies.Policy(
        model=loop.parts.model,
        params=now.params,
        mesh=None,
        config=config,
        task=replace(loop.parts.task, tokenizer=read),
        step=5,
    )
    monkeypatch.setattr(policies, "run_config", lambda *_, **__: config)
    monkeypatch.setattr(policies, "load_run", lambda *_, **__: policy)
    assert main(runs["own"], tmp_path / "new")[0] == 0
    spoken = text.load(tmp_path / "new")
    source = text.load(read)
    assert spoken.encode("3 apples") == source.encode("3 apples")
    assert spoken.template == source.template


def test_the_card_tells_origin_figures_recipe_and_objective(tmp_path):
    named = {
        "model.path": f"some/policy@{'a' * 40}",
        "task.train": "some/problems:main",
    }
    config = override(saved.lora(), named)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "eval/pass_rate": 0.25}\n{"step": 2, "eval/pass_rate": 0.5}\n'
        '{"step": 4, "eval/pass_rate": 0.75}\n'
    )
    told = {"name": "better", "step": 3, "prompts": 90, "adapter": False}
    page = card.text(config, tmp_path, **told)
    _, header, body = page.split("---\n", 2)
    assert "base_model:\n- some/policy\ndatasets:\n- some/problems\n" in header
    assert f"Began from `some/policy` at commit `{'a' * 40}`." in body
    assert "0.250 at step 0, 0.500 at step 2, 7 prompts |" in body
    assert "| loss | `loss.clipped_ratio(" in body
    row = re.search(r"\| w\(p\) \| (.*) \|", body)
    assert row
    p = np.array(card.RATES)
    want = predict(config, p).weight
    np.testing.assert_allclose([float(x) for x in row[1].split(" | ")], want, rtol=5e-3)
    bare = card.text(saved.lora(), tmp_path / "none", **told)
    assert str(real.checkpoint(small=True)) not in bare  # of this machine alone


def test_what_fails_leaves_nothing_behind(tmp_path, runs, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensors, "write_like", full)
    monkeypatch.setattr(tensors, "write_new", full)
    before = snapshot(tmp_path)
    for run in ("lora", "own"):
        new = tmp_path / run
        words = OWN if run == "own" else ()
        assert main(runs[run], new, *words) == (
            1,
            "",
            f"curax.export: {new} cannot be written (No space left on device); mend "
            "that and try again, nothing is left there.\n",
        )
    assert snapshot(tmp_path) == before


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(
    tmp_path, runs
):
    hidden = tmp_path / ".new.partial"
    for run, *words in (("lora",), ("lora", "--adapter"), ("own", *OWN)):
        (hidden / "whole").mkdir(parents=True)
        for file in (hidden / lock.FILE, hidden / "whole" / "model.safetensors"):
            file.write_bytes(b"left")
        with lock.hold(hidden, ""):
            before = snapshot(tmp_path)
            said = refusal(export.main, runs[run], tmp_path / "new", *words)
            assert f"{tmp_path / 'new'}: {hidden} is being written by process " in said
            assert snapshot(tmp_path) == before
        assert main(runs[run], tmp_path / "new", *words)[0] == 0
        assert [file.name for file in tmp_path.iterdir()] == ["new"]
        assert not (tmp_path / "new" / lock.FILE).exists()
        shutil.rmtree(tmp_path / "new")


def test_a_name_that_begins_with_no_user_is_a_name(tmp_path, runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(runs["own"], "~no-user", *OWN)[0] == 0
    assert (tmp_path / "~no-user" / "config.json").is_file()


def test_reading_a_run_that_goes_on_changes_nothing_in_it(tmp_path, runs):
    busy = shutil.copytree(runs["lora"], tmp_path / "busy")
    saving = busy / folder.CHECKPOINTS / "9.orbax-checkpoint-tmp"
    saving.mkdir()
    before = snapshot(busy)
    assert main(busy, tmp_path / "new")[0] == 0
    assert snapshot(busy) == before


def test_a_run_of_more_devices_than_are_here_is_read_on_those(
    tmp_path, runs, monkeypatch
):
    large = shutil.copytree(runs["lora"], tmp_path / "large")
    file = large / folder.CONFIG
    config = json.loads(file.read_text())

    def mesh(sizes, changes=()):
        file.write_text(json.dumps(config | {"mesh": config["mesh"] | sizes}))
        return policies.run_config(large, changes=changes).mesh

    count = jax.device_count()
    assert mesh({"data": 2 * count}) == Mesh(fsdp=count)
    with monkeypatch.context() as three:
        three.setattr(jax, "device_count", lambda: 3)
        assert mesh({"data": 4}) == mesh({"data": -1, "tensor": 2}) == Mesh(fsdp=2)
    for changes in ({"mesh.data": -1}, ["mesh.data=-1"]):
        assert mesh({"data": 2 * count}, changes) == Mesh(data=-1)
    assert mesh({"fsdp": count}) == Mesh(fsdp=count)


# What is typed, and the sentence that is printed; the names in braces are paths.
USAGE = "; python -m curax export --help lists what there is."
BAD = {
    "{lora}": f"the following arguments are required: DIR{USAGE}",
    "{lora} {new} --foo": f"unrecognized arguments: --foo{USAGE}",
    "{new} {newer}": "{new} holds no run; name a folder that a run has written.",
    "{checkpoint} {new}": "{checkpoint} holds no run; name a folder that a run has "
    "written.",
    "{lora} {file}": "{file} exists already; name a new folder.",
    "{lora} {lora}": "{lora} exists already; name a new folder.",
    "{empty} {new}": "{empty}/checkpoints holds no checkpoint; name the folder of a "
    "run that has one.",
    "{lora} {new} --step 3": "--step 3: {lora}/checkpoints has no such checkpoint; "
    "set --step to one of 0, 2, 5.",
    "{lora} {new} --step last": "--step last: {lora}/checkpoints has no such "
    "checkpoint; set --step to one of 0, 2, 5.",
    "{own} {new}": "{own}/config.json names functions that its config file defines; "
    "name that file with --config.",
    "{own} {new} --config {small} --adapter": "--adapter: {own} trained all "
    "parameters, model.lora_rank=0; leave --adapter out.",
    "{lora} {new} --dtype float32": "--dtype float32: {lora} is written as "
    "{checkpoint} is, which it began from; leave it out.",
    "{seeds} {new} --config {small}": "{seeds} holds 2 policies side by side, of as "
    "many seeds; train with seeds=1.",
}


@pytest.mark.parametrize("typed", BAD)
def test_bad_input_gets_one_sentence_and_nothing_is_written(tmp_path, runs, typed):
    paths = {name: tmp_path / name for name in ("new", "newer", "file", "empty")}
    paths |= runs | {"small": small.FILE, "checkpoint": real.checkpoint(small=True)}
    paths["seeds"] = tmp_path / "seeds"
    paths["file"].write_text("")
    folder.make(paths["empty"], saved.lora())
    folder.make(paths["seeds"], override(saved.own(), ["seeds=2"]))
    sys.modules.pop("config_small", None)
    before = snapshot(tmp_path), snapshot(runs["lora"])
    got = main(*typed.format(**paths).split())
    assert got == (2, "", f"curax.export: {BAD[typed].format(**paths)}\n")
    assert (snapshot(tmp_path), snapshot(runs["lora"])) == before


@pytest.mark.parametrize("size", [247, 255])
def test_a_folder_may_have_the_longest_name_that_there_is(tmp_path, runs, size):
    new = tmp_path / ("a" * size)
    assert main(runs["own"], new, *OWN)[0] == 0
    assert [*tmp_path.iterdir()] == [new]


def test_a_torn_line_of_a_run_is_told_without_options_of_training(
    tmp_path, runs, monkeypatch
):
    monkeypatch.undo()
    run, torn = shutil.copytree(runs["lora"], tmp_path / "run"), tmp_path / "torn.jsonl"
    whole = saved.words.folder() / "test.jsonl"
    torn.write_bytes(whole.read_bytes()[:-20])
    file = run / folder.CONFIG
    file.write_text(file.read_text().replace(str(whole), str(torn)))
    line = len(whole.read_text().splitlines())
    for command in (
        [export.main, run, tmp_path / "new"],
        [evaluate.main, "--model", run],
    ):
        said = refusal(*command)
        assert f"{torn}:{line}: not a JSON object" in said
        assert said.endswith("; mend or delete this line.\n")


def test_a_link_that_leads_nowhere_exists_already(tmp_path, runs):
    (link := tmp_path / "link").symlink_to(tmp_path / "nowhere")
    said = f"curax.export: {link} exists already; name a new folder.\n"
    assert main(runs["lora"], link) == (2, "", said)
    assert link.is_symlink()
    assert not link.exists()


def test_a_damaged_checkpoint_is_told_and_the_others_are_named(tmp_path, runs):
    shutil.copytree(runs["lora"], tmp_path / "run")
    there = tmp_path / "run" / folder.CHECKPOINTS / "5"
    for file in there.rglob("d/*"):  # what of one file counts, its writer decides
        file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    cannot = rf"curax\.export: {there} cannot be read \([\w ]+\); "
    said = refusal(export.main, tmp_path / "run", tmp_path / "new")
    assert re.fullmatch(cannot + r"set --step to one of 0, 2\.\n", said)
    assert not (tmp_path / "new").exists()
    assert main(tmp_path / "run", tmp_path / "new", "--step", "2")[0] == 0
    for other in "02":
        shutil.rmtree(there.parent / other)
    said = refusal(export.main, tmp_path / "run", tmp_path / "other")
    assert re.fullmatch(cannot + r"there is no other\.\n", said)


def test_a_run_whose_model_has_other_shapes_by_now_is_refused(
    tmp_path, runs, monkeypatch
):
    wider = states.States(build.build(override(saved.own(), ["model.mlp_width=24"])))
    monkeypatch.setattr(policies, "states_of", lambda *_: wider)
    there = runs["own"] / folder.CHECKPOINTS / "5"
    assert refusal(export.main, runs["own"], tmp_path / "new", *OWN) == (
        f"curax.export: params.layers.0.down.kernel is float32[16, 16] in {there} and "
        "float32[24, 16] now; bring back the model or method that the run began with, "
        "or name another run folder.\n"
    )


def test_a_checkpoint_that_the_run_removes_meanwhile_is_not_damaged(
    tmp_path, runs, monkeypatch
):
    there, new = tmp_path / "run" / folder.CHECKPOINTS, tmp_path / "new"
    shutil.copytree(runs["own"], tmp_path / "run")
    states_of = policies.states_of

    def removes(*args):
        (there / "5").rename(tmp_path / "5")
        return states_of(*args)

    monkeypatch.setattr(policies, "states_of", removes)
    told = f"curax.export: --step 5: {there} has no such checkpoint; "
    told += "set --step to one of 0, 2."
    assert main(tmp_path / "run", new, "--step", "5") == (2, "", f"{told}\n")
    (tmp_path / "5").rename(there / "5")
    assert main(tmp_path / "run", new) == (0, f"Written: {new}, of step 2\n", "")


@pytest.mark.long
def test_another_base_than_the_run_had_is_refused(tmp_path):
    changed = saved.write(tmp_path / "run", saved.lora, off=1)
    source = real.checkpoint(small=True)
    assert main(changed, tmp_path / "new") == (
        2,
        "",
        "curax.export: the parameters that are not trained differ from those the run "
        f"began with; bring back what model.path={source} was.\n",
    )
    assert not (tmp_path / "new").exists()
