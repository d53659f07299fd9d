"""The same logits, continuations and adapters as transformers and peft: `make parity`.

Needs torch, transformers and peft; the tests that run by default read the results of
`make_golden.py` instead.
"""

import json
from functools import cache, partial
from pathlib import Path

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from curax import rollout
from curax.evaluate import __main__ as evaluate
from curax.models import pretrained, rotary
from curax.models.export import export, export_adapter
from curax.tasks import word_problems
from curax.types import Contexts, DrawRows

V, LENGTH, LONGER = 61, 24, 24
SCALING = rotary.RopeScaling(factor=8.0, original_max_position_embeddings=16)
SIZES = {"width": 48, "layers": 3, "heads": 6, "kv_heads": 2, "mlp_width": 80}
CHECKPOINTS = {
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen2-tied": {"architecture": "Qwen2ForCausalLM", "tied": True, "style": 4},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "rope_theta": 1e6},
    "qwen3-tied": {"architecture": "Qwen3ForCausalLM", "tied": True, "shards": 3},
    "llama": {"architecture": "LlamaForCausalLM"},
    "llama-tied-longer": {
        "architecture": "LlamaForCausalLM",
        "tied": True,
        "rope_scaling": SCALING,
    },
    "llama-longer-old": {
        "architecture": "LlamaForCausalLM",
        "rope_scaling": SCALING,
        "style": 4,
        "shards": 2,
    },
}
for_every_checkpoint = pytest.mark.parametrize("name", CHECKPOINTS)
close = partial(np.testing.assert_allclose, rtol=0, atol=2e-4)
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, V, (3, LENGTH)).astype(np.int32)
PADS = np.array([[0], [5], [LENGTH - 1]])
LEFT = np.arange(LENGTH) >= PADS
RIGHT = LEFT[:, ::-1].copy()
full = partial(pretrained.model, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a checkpoint is; made when it is first asked for."""
    parent = tmp_path_factory.mktemp("checkpoints")

    @cache
    def path(name):
        options = {"norm_eps": 1e-5, "noise": 0.1, "head_dim": 8} | CHECKPOINTS[name]
        # No token ends a completion: continuations are compared to their last.
        extra = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        checkpoints.write(parent / name, vocab_size=V, extra=extra, **SIZES, **options)
        return parent / name

    return path


def theirs(path):
    model, said = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    return model.eval()


def their_logits(model, mask):
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(TOKENS, dtype=torch.long),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            position_ids=torch.tensor(positions(mask), dtype=torch.long),
        ).logits.numpy()


def positions(mask):
    return np.maximum(mask.cumsum(-1) - 1, 0).astype(np.int32)


def our_logits(policy, params, mask):
    features, _ = jax.jit(policy.features)(params, TOKENS, positions(mask), mask)
    return np.asarray(jnp.einsum("nsd,vd->nsv", features, policy.head(params)))


def alike(got, want, mask):
    close(got[mask], want[mask])
    assert np.abs(want[mask]).max() > 1


@for_every_checkpoint
@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_logits_are_theirs(name, mask, scan_layers, folder):
    policy = full(path=str(folder(name)), scan_layers=scan_layers)
    got = our_logits(policy, policy.load(None), mask)
    alike(got, their_logits(theirs(folder(name)), mask), mask)


@for_every_checkpoint
def test_greedy_continuations_are_theirs(name, folder):
    """Cached decoding, past the original window where frequencies are rescaled."""
    policy = full(path=str(folder(name)), vocab_size=V)
    count = jnp.arange(len(TOKENS), dtype=jnp.int32)
    rows = rollout.sample(
        policy,
        policy.load(None),
        Contexts(tokens=jnp.asarray(TOKENS), mask=jnp.asarray(LEFT)),
        DrawRows(prompt=count, member=count * 0, context=count, exists=count >= 0),
        jax.random.key(0),
        rollout.Settings(max_tokens=LONGER, end=(V,), pad=0, temperature=0),
    )
    model = theirs(folder(name))
    said = model.generate(
        torch.tensor(TOKENS, dtype=torch.long),
        attention_mask=torch.tensor(LEFT, dtype=torch.long),
        max_new_tokens=LONGER,
        do_sample=False,
    )
    np.testing.assert_array_equal(rows.tokens, said[:, LENGTH:].numpy())


@for_every_checkpoint
def test_what_they_save_is_read_and_written_back_byte_by_byte(name, folder, tmp_path):
    model, options = theirs(folder(name)), {"max_shard_size": "40kB"}
    model.to(torch.bfloat16).save_pretrained(tmp_path / "theirs", **options)
    policy = full(path=str(tmp_path / "theirs"))
    export(tmp_path / "theirs", policy.load(None), tmp_path / "ours")
    for file in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes()
    assert len([*(tmp_path / "ours").glob("*.safetensors")]) > 1


@for_every_checkpoint
def test_what_was_trained_is_what_they_load(name, folder, tmp_path):
    policy = full(path=str(folder(name)))
    noise = np.random.default_rng(1)
    trained = jax.tree.map(
        lambda p: p + jnp.asarray(0.1 * noise.normal(size=p.shape), p.dtype),
        policy.load(None),
    )
    export(folder(name), trained, tmp_path / "out")
    want = our_logits(policy, trained, LEFT)
    alike(their_logits(theirs(tmp_path / "out"), LEFT), want, LEFT)
    assert np.abs(want - our_logits(policy, policy.load(None), LEFT)).max() > 0.1


def with_adapters(path):
    """A policy with adapters that do something, and its parameters."""
    options = {"lora_rank": 4, "lora_alpha": 6.0, "lora_modules": ("q", "v", "o", "up")}
    policy = full(path=str(path), **options)
    noise, read = np.random.default_rng(2), policy.load(None)

    def leaf(path, drawn):
        if path[-1].key == "lora_b":
            return jnp.asarray(0.3 * noise.normal(size=drawn.shape), drawn.dtype)
        own = read
        for key in path:
            own = own.get(key.key, {})
        return drawn if path[-1].key == "lora_a" else own

    drawn = policy.init(jax.random.key(0))
    return policy, jax.tree_util.tree_map_with_path(leaf, drawn)


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "llama-tied-longer"])
def test_adapters_are_what_peft_loads(name, folder, tmp_path):
    policy, params = with_adapters(folder(name))
    want = our_logits(policy, params, LEFT)
    export_adapter(tmp_path / "adapter", params, base=str(folder(name)), lora_alpha=6.0)
    base = theirs(folder(name))
    plain = their_logits(base, LEFT)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    alike(their_logits(adapted, LEFT), want, LEFT)
    assert np.abs(plain - want)[LEFT].max() > 0.1
    export(folder(name), params, tmp_path / "merged", lora_alpha=6.0)
    alike(their_logits(theirs(tmp_path / "merged"), LEFT), want, LEFT)


def test_adapters_begin_as_those_of_peft(folder):
    """Drawn from the same distribution; the draws themselves differ."""
    policy, params = with_adapters(folder("qwen3"))
    modules = ["q_proj", "v_proj", "o_proj", "up_proj"]
    config = LoraConfig(r=4, lora_alpha=6.0, target_modules=modules)
    model = get_peft_model(theirs(folder("qwen3")), config)
    found = dict(model.named_parameters())
    for ours, name in (("q", "self_attn.q_proj"), ("up", "mlp.up_proj")):
        prefix = f"base_model.model.model.layers.0.{name}."
        peft = found[f"{prefix}lora_A.default.weight"].detach().numpy()
        own = np.asarray(params["layers"][ours]["lora_a"])
        assert own.shape[1:] == peft.T.shape
        bound = own.shape[1] ** -0.5
        for draws in (own, peft):
            assert 0.95 * bound < np.abs(draws).max() <= bound
            np.testing.assert_allclose(np.std(draws), bound / 3**0.5, rtol=0.1)
        assert not found[f"{prefix}lora_B.default.weight"].any()
    assert policy.trained


@pytest.mark.parametrize("pieces", [False, True])
def test_the_tokenizer_of_word_problems_is_theirs(pieces):
    """Texts, their ids and the chat template; so is that of an export, a copy of it."""
    ours = word_problems.own_tokenizer(pieces=pieces)
    theirs = AutoTokenizer.from_pretrained(ours.path)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (*ours.end, ours.pad)
    for record in word_problems.records(30, unseen="forms"):
        said = f"{record['question']}\n{record['taught']}"
        ids = ours.encode(said)
        assert theirs.encode(said) == ids
        assert theirs.decode(ids) == said
        turns = [{"role": "user", "content": record["question"]}]
        asked = theirs.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=False
        )
        assert asked == ours.chat(turns)


def test_a_run_on_text_answers_as_they_do(tmp_path):
    """Greedily and to the letter, from question to answer, by what was exported."""
    run = Path(__file__).parents[2] / "experiments" / "text_solved" / "start"
    data, out = tmp_path / "problems.jsonl", tmp_path / "out"
    data.write_text("\n".join(map(json.dumps, word_problems.records(24))))
    asked = ["--model", str(run), "--data", str(data), "--max-tokens", "40"]
    asked += ["--grader", "curax.verify.graders:numbers", "--n", "1", "--greedy"]
    assert evaluate.main([*asked, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in (out / data.name).read_text().splitlines()]
    model, tokenizer = theirs(run), AutoTokenizer.from_pretrained(run)
    greedy = [row for row in rows if row["greedy"]]
    assert len({row["text"] for row in greedy}) > 20
    for row in greedy:
        turns = [{"role": "user", "content": row["question"]}]
        ids = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        said = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        told = tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)
        assert told.strip() == row["text"].strip()
