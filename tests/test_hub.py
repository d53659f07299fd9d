"""Names on the hub: what is downloaded, at which commit, and what is said if not."""

import json
import sys

import hub_server
import pytest
import real
import words
from huggingface_hub import constants
from outputs import refusal

from curax import hub, train
from curax.config import load, override
from curax.models import pretrained
from curax.runs import folder, policies
from curax.settings.packages import install
from curax.step import build
from curax.tasks import sources, text

SECRET = "hf_secret"
A, B = hub_server.COMMITS.values()
CODE = {"modeling_policy.py": b"raise SystemExit", "pytorch_model.bin": b"0"}
ONE_FOLDER = {"original/consolidated.safetensors": b"0"}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub with a checkpoint and two sets of problems, and an empty cache of it."""
    checkpoint = real.checkpoint(small=True)
    policy = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    problems = {
        f"main/{name}-00000-of-00001.jsonl": (
            words.folder() / f"{name}.jsonl"
        ).read_bytes()
        for name in ("train", "test")
    }
    repositories = {
        ("model", "some/policy"): policy | CODE | ONE_FOLDER,
        ("dataset", "some/problems"): problems | {"load.py": b"raise SystemExit"},
    }
    with hub_server.serving(repositories) as (served, address):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", SECRET)
        yield served


@pytest.fixture
def offline(monkeypatch):
    """A switch: from its call on, nothing is asked of the hub."""
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def files(path):
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def test_a_name_on_the_hub_is_no_local_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "policy").mkdir(parents=True)
    for path in (
        "some/policy",
        "/some/other",
        "other",
        "a/b/c",
        "../b",
        "./b",
        "a/b:c",
    ):
        assert hub.parsed(path, "model") is None, path
        assert hub.pinned(path, "model") == path
    for path in ("data/train.jsonl", "data/*.parquet", "a/b/c.parquet"):
        assert hub.parsed(path, "dataset") is None, path
    assert hub.parsed("a/b.1@v1", "model") == ("a/b.1", "v1", "")
    name = hub.parsed("a/b@refs/pr/1:main/train-*.parquet", "dataset")
    assert name == ("a/b", "refs/pr/1", "main/train-*.parquet")


def test_the_home_folder_stands_in_front_of_a_path_of_a_config(monkeypatch):
    folder = real.checkpoint(small=True)
    monkeypatch.setenv("HOME", str(folder.parent))
    path = f"~/{folder.name}"
    assert hub.checkpoint(path) == folder
    assert text.load(path).size == text.load(str(folder)).size
    assert hub.data(f"{path}/*.jsonl", "train") == folder / "*.jsonl"
    assert str(hub.data("~nosuch/a.jsonl", "train")) == "~nosuch/a.jsonl"


def test_only_what_is_read_is_downloaded_at_one_commit(server):
    name = hub.pinned("some/policy", "model")
    assert name == f"some/policy@{A}"
    server.commits["main"] = B  # what was pinned stays
    spoken = text.load(name)
    assert files(spoken.path) == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    policy = pretrained.model(path=name)
    assert files(spoken.path) == files(real.checkpoint(small=True))
    assert policy.load(None)["embed"].shape[0] >= spoken.size
    asked = len(server.asked)
    assert hub.checkpoint(name) == spoken.path
    assert len(server.asked) == asked  # nothing, for all is in the cache
    assert hub.pinned("some/policy", "model", name) == name
    assert hub.pinned("some/policy@main", "model", name) == f"some/policy@{B}"
    for path in ("some/problems:main", "some/problems:main/train-*"):
        records = sources.open_records(path)
        assert len(records) == 1000
    assert not {path for _, path, _ in server.asked if "test-" in path}
    assert not {path for _, path, _ in server.asked if path.endswith((".py", ".bin"))}
    assert not {path for _, path, _ in server.asked if "original" in path}


def test_a_download_that_broke_off_goes_on_where_it_did(server, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", hub_server.CUT // 2)
    server.broken.add("model.safetensors")
    path = hub.checkpoint("some/policy")
    whole = (real.checkpoint(small=True) / "model.safetensors").read_bytes()
    assert (path / "model.safetensors").read_bytes() == whole
    ranges = [r for _, path, r in server.asked if path.endswith("safetensors") and r]
    assert ranges == [f"bytes={hub_server.CUT}-"]


def test_each_failure_is_one_sentence_without_the_token(server, offline, monkeypatch):
    server.gated.add("some/gated")
    server.repositories["model", "some/gated"] = {}
    here = "does not exist here, and"
    has = "main/test-00000-of-00001.jsonl, main/train-00000-of-00001.jsonl"
    want = {
        "some/nothing": f"some/nothing {here} the hub has no model some/nothing that ",
        "some/policy@v9": "some/policy on the hub has no revision v9; name a branch, ",
        "some/gated": "some/gated on the hub is gated; accept its terms on its page ",
    }

    def error(call, *args):
        with pytest.raises(hub.HubError) as caught:
            call(*args)
        return caught.value

    said = {name: error(hub.checkpoint, name) for name in want}
    for name in ("some/problems", "some/problems:main/dev.jsonl"):
        want[name] = f"{name}: there is no "
        said[name] = error(hub.data, name, "train")
        assert has in str(said[name])
    assert hub.parsed("some/problems:/main/", "dataset") == (
        "some/problems",
        None,
        "main",
    )
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    want["x/y"] = f"x/y {here} the hub cannot be reached (ConnectError); try again "
    said["x/y"] = error(hub.pinned, "x/y", "model")
    offline()
    want["a/b"] = f"a/b {here} the hub's cache has not all of it while HF_HUB_OFFLINE "
    said["a/b"] = error(hub.pinned, "a/b", "model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    want["c/d"] = (
        f"c/d {here} for a name on the hub the package huggingface-hub is not "
        f"installed; run {install('hub')}."
    )
    said["c/d"] = error(hub.pinned, "c/d", "model")
    for name, sentence in want.items():
        text = str(said[name])
        assert text.startswith(sentence), name
        assert text.endswith(".")
        assert "\n" not in text
        assert SECRET not in text
        assert said[name].__cause__ is None or name == "c/d"
    assert f"Bearer {SECRET}" in server.tokens


def test_a_run_by_name_is_pinned_and_goes_on_offline(tmp_path, server, offline):
    workdir = tmp_path / "run"
    named = ["model.path=some/policy", "warm_start=none"]
    named += [f"task.{side}=some/problems:main" for side in ("train", "held_out")]
    config = override(load(real.FILE), named)
    begun = folder.pinned(workdir, config, resume=False)
    folder.make(workdir, begun)
    written = json.loads((workdir / folder.CONFIG).read_text())
    assert written["model"]["path"] == f"some/policy@{A}"
    assert written["task"]["train"] == f"some/problems@{A}:main"
    build.build(begun)  # downloads

    server.commits["main"] = B
    offline()
    asked = len(server.asked)
    resumed = folder.pinned(workdir, config, resume=True)
    folder.check(workdir, resumed, resume=True)
    assert build.build(resumed).task.num_prompts == 1000
    assert policies.run_config(workdir).model.keywords["path"] == f"some/policy@{A}"
    assert len(server.asked) == asked

    argv = ["--config", real.FILE, "--workdir", tmp_path / "other"]
    said = refusal(train.main, *argv, "--set", "model.path=some/other")
    assert said.startswith(
        "curax.train: model.path: some/other does not exist here, and the hub's cache"
    )
    assert SECRET not in said
    held = [file for file in workdir.rglob("*") if file.is_file()]
    assert not [file for file in held if SECRET.encode() in file.read_bytes()]
    assert not list((tmp_path / "other").glob("*"))
