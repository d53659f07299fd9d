"""Checkpoints: read as transformers reads them, refused in a sentence, written back.

`tests/golden` holds tiny checkpoints with what transformers computes with them;
`tests/parity` made it, and compares more where transformers is installed.
"""

import json
import re
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contracts import close
from outputs import message
from safetensors.numpy import load_file, save_file

from curax.config import Mesh
from curax.models import attention, families, pretrained, tensors
from curax.models.export import export, export_adapter, write_new
from curax.models.rotary import RopeScaling
from curax.step import mesh as meshes

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("llama", "qwen2", "qwen3")
for_every_family = pytest.mark.parametrize("name", NAMES)
ADAPTED = {"lora_rank": 2, "lora_alpha": 6.0, "lora_modules": ("q", "up", "down")}


full = partial(pretrained.model, dtype="float32")


@cache
def policy(name, **options):
    return full(path=str(GOLDEN / name), **options)


@cache
def params(name, **options):
    return jax.device_get(policy(name, **options).load(None))


def adapted(name, **options):
    """The checkpoint with random adapters beside its matrices."""
    noise = tiny.random_params(policy(name, **options, **ADAPTED))

    def merged(noisy, own):
        return {
            key: merged(node, own.get(key, {})) if isinstance(node, dict) else node
            for key, node in noisy.items()
        } | {key: own[key] for key in own if not isinstance(own[key], dict)}

    return merged(noise, params(name, **options))


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def logits(policy, params, tokens, positions, seen):
    features, _ = jax.jit(policy.features)(params, tokens, positions, seen)
    return jnp.einsum("nsd,vd->nsv", features, policy.head(params))


def files(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def copy_of(name, tmp_path):
    return Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def edit(file, **changes):
    content = json.loads(file.read_text()) | changes
    gone = {key for key, value in changes.items() if value is GONE}
    kept = {key: value for key, value in content.items() if key not in gone}
    file.write_text(json.dumps(kept))


GONE = object()


# ----- reading


@pytest.mark.first(3)
@for_every_family
@pytest.mark.parametrize("scan_layers", [False, True])
def test_logits_are_those_of_transformers(name, scan_layers):
    want = load_file(GOLDEN / f"{name}.safetensors")
    tokens, positions = (want[key].astype(np.int32) for key in ("tokens", "positions"))
    assert not want["mask"].all()
    own = policy(name, scan_layers=scan_layers)
    got = logits(
        own, params(name, scan_layers=scan_layers), tokens, positions, want["mask"]
    )
    shown = want["mask"][..., None]
    assert np.abs(np.where(shown, want["logits"], 0)).max() > 3
    close(np.where(shown, got, 0), np.where(shown, want["logits"], 0), atol=2e-4)


@pytest.mark.first(2)
@for_every_family
@pytest.mark.parametrize("scan_layers", [False, True])
def test_what_is_read_has_the_names_shapes_and_precision_of_what_is_drawn(
    name, scan_layers
):
    own = policy(name, scan_layers=scan_layers, param_dtype=jnp.bfloat16)
    drawn = jax.eval_shape(own.init, jax.random.key(0))
    read = own.load(None)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), read)
    assert like == drawn
    # The files are in bfloat16 too, so nothing is lost.
    wide = params(name, scan_layers=scan_layers)
    equal(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), read), wide)


def test_an_adapted_model_reads_its_base_alone():
    own = policy("qwen3", scan_layers=False, **ADAPTED)
    equal(own.load(None), params("qwen3", scan_layers=False))
    assert own.trained
    assert own.trained(("layers", "0", "q", "lora_a"))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_every_device_reads_only_what_lies_on_it(scan_layers, monkeypatch):
    mesh = meshes.make(Mesh(fsdp=4, tensor=2))
    own = policy("llama", scan_layers=scan_layers, **ADAPTED)
    shapes = jax.eval_shape(own.init, jax.random.key(0))
    sharding = meshes.of_params(mesh, own.axes, shapes)
    cut, sizes = tensors.cut, {}

    def spy(tensor, name, index):
        part = cut(tensor, name, index)
        sizes.setdefault(name, []).append(part.size)
        return part

    monkeypatch.setattr(tensors, "cut", spy)
    got = own.load(sharding)
    for read in (sizes["lm_head.weight"], sizes["model.layers.1.mlp.up_proj.weight"]):
        assert read == [24 * 16 // 8] * 8
    jax.tree.map(
        lambda leaf, where: leaf.sharding == where or pytest.fail(str(leaf.sharding)),
        got,
        pretrained.base(sharding),
    )
    equal(jax.device_get(got), params("llama", scan_layers=scan_layers))


def test_a_tied_model_ignores_the_head_in_the_file(tmp_path):
    folder = copy_of("qwen2", tmp_path)
    inside = load_file(folder / "model.safetensors")
    head = np.ones_like(inside["model.embed_tokens.weight"])
    save_file(inside | {"lm_head.weight": head}, folder / "model.safetensors")
    equal(pretrained.model(path=str(folder)).load(None), params("qwen2"))


def test_buffers_that_follow_from_the_config_are_ignored(tmp_path):
    folder = copy_of("llama", tmp_path)
    inside = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    more = inside | {name: np.ones(4, np.float32)}
    save_file(more, folder / "model.safetensors")
    equal(pretrained.model(path=str(folder)).load(None), params("llama"))


def test_options_reach_the_transformer():
    seen = []

    def attend(*arrays, causal):
        seen.append(causal)
        return attention.plain(*arrays, causal=causal)

    low = policy("qwen2", dtype=jnp.bfloat16, remat=True, attend=attend)
    tokens = np.zeros((1, 3), np.int32)
    got, _ = low.features(params("qwen2"), tokens, tokens, np.ones((1, 3), bool))
    assert got.dtype == low.head(params("qwen2")).dtype == jnp.bfloat16
    assert seen


def test_the_vocabulary_is_that_of_the_checkpoint_which_may_be_larger():
    own = policy("qwen3", vocab_size=20)
    assert own.head(params("qwen3")).shape == (24, 16)
    sentence = (
        f"{GOLDEN}/qwen3/config.json: vocab_size is 24, less than the 25 of the task; "
        "give the task the tokenizer of this checkpoint."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        pretrained.model(path=str(GOLDEN / "qwen3"), vocab_size=25)


PEAK = """
import resource, sys
import jax, jax.numpy as jnp
from curax.models import pretrained

policy = pretrained.model(path=sys.argv[1], param_dtype=jnp.bfloat16)
jax.block_until_ready(jnp.ones(()))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
params = jax.block_until_ready(policy.load(None))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
print((after - before) * 1024, sum(sizes), max(sizes))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units")
def test_reading_takes_little_more_memory_than_the_parameters(tmp_path):
    folder = tmp_path / "large"
    shape = jax.eval_shape(
        tiny.model(
            vocab_size=256,
            width=512,
            layers=32,
            heads=8,
            head_dim=64,
            mlp_width=1700,
            scan_layers=True,
        ).init,
        jax.random.key(0),
    )
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shape)
    options = {"head_dim": 64, "rope_theta": 1e4, "norm_eps": 1e-6}
    write_new(folder, zeros, dtype=jnp.bfloat16, **options)
    checkpoints.cut(folder, 3)
    command = [sys.executable, "-c", PEAK, str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown, size, leaf = map(int, said.split())
    assert size > 200e6
    assert leaf < 0.3 * size
    assert grown < size + 1.2 * leaf + 20e6


# ----- what is refused


def refused(folder, tmp_path):
    """The sentence that building or reading a checkpoint fails with."""
    said = message(ValueError, lambda: pretrained.model(path=str(folder)).load(None))
    return said.replace(str(tmp_path), "HERE")


@pytest.mark.parametrize(
    ("name", "field", "value", "wanted"),
    [
        ("llama", "attention_bias", True, "false"),
        ("qwen3", "attention_bias", True, "false"),
        ("llama", "mlp_bias", True, "false"),
        ("llama", "hidden_act", "gelu", '"silu" or "swish"'),
        ("llama", "pretraining_tp", 2, "0 or 1"),
        ("qwen2", "attention_dropout", 0.1, "0"),
        ("qwen2", "partial_rotary_factor", 0.5, "1"),
        ("qwen2", "quantization_config", {"bits": 4}, "absent"),
        ("qwen2", "hidden_size", "16", "a positive integer"),
        ("qwen2", "num_hidden_layers", GONE, "a positive integer"),
        ("qwen2", "vocab_size", 0, "a positive integer"),
        ("qwen2", "rms_norm_eps", "1e-6", "a positive number"),
        ("qwen2", "rope_theta", True, "a positive number"),
        (
            "qwen2",
            "rope_scaling",
            {"type": "yarn", "factor": 4.0},
            "of rope_type 'default' or 'llama3'",
        ),
        (
            "qwen3",
            "rope_parameters",
            {"full_attention": {"rope_type": "default"}},
            "of rope_type 'default' or 'llama3'",
        ),
        (
            "qwen3",
            "rope_parameters",
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            "without a partial_rotary_factor",
        ),
        (
            "qwen3",
            "layer_types",
            ["full_attention", "sliding_attention"],
            '"full_attention" throughout',
        ),
        (
            "qwen3",
            "architectures",
            ["MistralForCausalLM"],
            '["Qwen2ForCausalLM"] or ["Qwen3ForCausalLM"] or ["LlamaForCausalLM"]',
        ),
    ],
)
def test_a_field_that_cannot_be_followed_is_named(name, field, value, wanted, tmp_path):
    folder = copy_of(name, tmp_path)
    edit(folder / "config.json", **{field: value})
    shown = json.dumps(None if value is GONE else value)
    assert refused(folder, tmp_path) == (
        f"HERE/{name}/config.json: {field} is {shown}, but must be {wanted}; take "
        "another checkpoint."
    )


def test_a_scaling_that_lacks_a_number_or_has_no_band_is_named(tmp_path):
    folder = copy_of("llama", tmp_path)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    edit(folder / "config.json", rope_parameters=rope | {"factor": None})
    assert refused(folder, tmp_path) == (
        "HERE/llama/config.json: rope_parameters.factor is null, but must be a "
        "positive number; take another checkpoint."
    )
    edit(folder / "config.json", rope_parameters=rope | {"low_freq_factor": 4.0})
    assert refused(folder, tmp_path) == (
        "HERE/llama/config.json: rope_scaling.high_freq_factor=4.0 must be above "
        "low_freq_factor=4.0; set it to 16.0."
    )


def test_a_sliding_window_is_refused_only_where_layers_use_it(tmp_path):
    folder = copy_of("qwen2", tmp_path)
    config = partial(edit, folder / "config.json", layer_types=GONE)
    config(use_sliding_window=False, sliding_window=8, max_window_layers=0)
    pretrained.model(path=str(folder))
    config(use_sliding_window=True, max_window_layers=2)
    pretrained.model(path=str(folder))
    config(max_window_layers=1)
    assert refused(folder, tmp_path) == (
        "HERE/qwen2/config.json: use_sliding_window is true, but must be false; take "
        "another checkpoint."
    )


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    assert refused(tmp_path / "none", tmp_path) == (
        "HERE/none/config.json is not there; set model.path to the folder of a "
        "downloaded checkpoint."
    )
    folder = copy_of("qwen3", tmp_path)
    (folder / tensors.INDEX).unlink()
    assert refused(folder, tmp_path) == (
        "HERE/qwen3 holds neither model.safetensors nor model.safetensors.index.json; "
        "give the folder of a checkpoint in safetensors."
    )
    (folder / "config.json").write_text("{")
    assert refused(folder, tmp_path).startswith(
        "HERE/qwen3/config.json cannot be read as JSON (Expecting"
    )


def test_a_missing_or_damaged_file_is_named(tmp_path):
    folder = copy_of("qwen3", tmp_path)
    file = "model-00002-of-00004.safetensors"
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[:-1])
    assert refused(folder, tmp_path).startswith(
        f"HERE/qwen3/{file} is no complete safetensors file ("
    )
    (folder / file).unlink()
    assert refused(folder, tmp_path) == (
        f"HERE/qwen3/{file} is not there, though {tensors.INDEX} names it; fetch the "
        "checkpoint again."
    )
    (folder / tensors.INDEX).write_text("{}")
    assert refused(folder, tmp_path) == (
        f"HERE/qwen3/{tensors.INDEX} has no readable weight_map ('weight_map'); fetch "
        "it again."
    )


def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path):
    folder = copy_of("qwen3", tmp_path)
    file = folder / tensors.INDEX
    places = json.loads(file.read_text())["weight_map"]
    other = "model-00004-of-00004.safetensors"
    edit(file, weight_map=places | {"model.embed_tokens.weight": other})
    assert refused(folder, tmp_path) == (
        f"HERE/qwen3/{other} lacks model.embed_tokens.weight, which {tensors.INDEX} "
        "places there; fetch both again."
    )


UP = "model.layers.1.mlp.up_proj.weight"
FIX = "config.json belongs to other files, so fetch all again"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {UP: None},
            f"HERE/llama/model.safetensors lacks {UP}, which the model has; {FIX}.",
        ),
        (
            {UP: np.zeros((16, 24), np.float32)},
            f"HERE/llama/model.safetensors: {UP} has shape [16, 24], but [24, 16] in "
            f"the model; {FIX}.",
        ),
        (
            {UP: np.zeros((24, 16), np.float64)},
            f"HERE/llama/model.safetensors: {UP} has dtype F64, but must have one of "
            "F32, F16, BF16; take another checkpoint.",
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)},
            "HERE/llama/model.safetensors holds model.layers.0.self_attn.q_proj.bias, "
            f"which the model has not; {FIX}.",
        ),
        (
            {"lm_head.weight": None},
            "HERE/llama/model.safetensors lacks lm_head.weight, which the model has; "
            f"{FIX}.",
        ),
    ],
)
def test_a_tensor_that_is_missing_misshapen_or_too_many_is_named(
    change, sentence, tmp_path
):
    file = copy_of("llama", tmp_path) / "model.safetensors"
    inside = load_file(file) | change
    save_file({name: x for name, x in inside.items() if x is not None}, file)
    assert refused(file.parent, tmp_path) == sentence


# ----- writing back


@for_every_family
@pytest.mark.parametrize("scan_layers", [False, True])
def test_what_was_not_trained_is_written_byte_by_byte(name, scan_layers, tmp_path):
    source = copy_of(name, tmp_path)
    (source / "tokenizer.json").write_text("{}")
    export(source, params(name, scan_layers=scan_layers), tmp_path / "out")
    assert files(tmp_path / "out") == files(source)


def test_what_was_trained_is_written_in_the_precision_of_its_source(tmp_path):
    trained = jax.tree.map(lambda leaf: leaf + 1 / 512, params("qwen3"))
    export(GOLDEN / "qwen3", trained, tmp_path / "new" / "out")
    got = pretrained.model(path=str(tmp_path / "new" / "out")).load(None)
    want = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(np.float32), trained)
    equal(got, want)
    assert [*files(GOLDEN / "qwen3")] == [*files(tmp_path / "new" / "out")]
    close(got["head"], trained["head"], rtol=2**-8)


def test_a_head_that_is_kept_beside_a_tied_embedding_follows_it(tmp_path):
    source = copy_of("qwen2", tmp_path)
    inside = load_file(source / "model.safetensors")
    both = dict.fromkeys(("lm_head.weight",), inside["model.embed_tokens.weight"])
    save_file(inside | both, source / "model.safetensors")
    export(source, jax.tree.map(lambda p: p * 2, params("qwen2")), tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    want = inside["model.embed_tokens.weight"] * 2
    np.testing.assert_array_equal(got["lm_head.weight"], want)
    np.testing.assert_array_equal(got["model.embed_tokens.weight"], want)


def test_weights_in_other_formats_are_left_behind(tmp_path):
    source = copy_of("llama", tmp_path)
    stale = (
        "pytorch_model.bin",
        "consolidated.safetensors",
        "a.gguf",
        ".gitattributes",
    )
    for name in stale:
        (source / name).write_text("stale")
    (source / "original").mkdir()
    (source / "original" / "consolidated.00.pth").write_text("stale")
    (source / "original" / "notes.md").write_text("kept")
    export(source, params("llama"), tmp_path / "out")
    got = {
        str(file.relative_to(tmp_path / "out")) for file in tmp_path.rglob("out/**/*")
    }
    assert got == {"config.json", "model.safetensors", "original", "original/notes.md"}


@pytest.mark.first(1)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_adapters_are_merged(scan_layers, tmp_path):
    own, theirs = adapted("qwen3", scan_layers=scan_layers), GOLDEN / "qwen3"
    wide = tmp_path / "wide"  # so that nothing is rounded away
    options = {"head_dim": 8, "rope_theta": 1e4, "norm_eps": 1e-6}
    write_new(wide, params("qwen3"), **options)
    export(wide, own, tmp_path / "out", lora_alpha=6.0)
    merged = full(path=str(tmp_path / "out"), scan_layers=scan_layers)
    want = load_file(GOLDEN / "qwen3.safetensors")
    at = [want[k].astype(np.int32) for k in ("tokens", "positions")] + [want["mask"]]
    with_adapters = policy("qwen3", scan_layers=scan_layers, **ADAPTED)
    got = logits(merged, merged.load(None), *at)
    apart = logits(with_adapters, own, *at)
    close(got, apart, rtol=1e-4, atol=2e-4)
    assert np.abs(got - want["logits"])[want["mask"]].max() > 0.1
    with pytest.raises(ValueError, match=r"^params hold adapters, but lora_alpha is "):
        export(theirs, own, tmp_path / "none")


@pytest.mark.parametrize("scan_layers", [False, True])
def test_adapters_alone_are_written_as_peft_names_them(scan_layers, tmp_path):
    own = adapted("qwen3", scan_layers=scan_layers)
    export_adapter(tmp_path / "out", own, base="Qwen/Tiny", lora_alpha=6.0)
    got = load_file(tmp_path / "out" / "adapter_model.safetensors")
    modules = ["self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"]
    assert set(got) == {
        f"base_model.model.model.layers.{i}.{module}.lora_{half}.weight"
        for i in range(2)
        for module in modules
        for half in "AB"
    }
    layers = own["layers"]
    down = (
        {key: leaf[1] for key, leaf in layers["down"].items()}
        if scan_layers
        else (layers["1"]["down"])
    )
    prefix = "base_model.model.model.layers.1.mlp.down_proj.lora_"
    np.testing.assert_array_equal(got[prefix + "A.weight"], down["lora_a"].T)
    np.testing.assert_array_equal(got[prefix + "B.weight"], down["lora_b"].T)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "up_proj", "down_proj"]
    assert (config["r"], config["lora_alpha"]) == (2, 6.0)
    assert config["base_model_name_or_path"] == "Qwen/Tiny"
    with pytest.raises(ValueError, match=r"^params hold no adapters; export them as "):
        export_adapter(tmp_path / "none", params("qwen3"), base="", lora_alpha=1.0)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    export(GOLDEN / "llama", params("llama"), tmp_path / "out")
    sentence = f"{tmp_path}/out exists; give the name of a new folder."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        export(GOLDEN / "llama", params("llama"), tmp_path / "out")
    broken = params("llama") | {"head": np.zeros((24, 16), str)}
    with pytest.raises(TypeError):
        export(GOLDEN / "llama", broken, tmp_path / "other")
    assert [*tmp_path.iterdir()] == [tmp_path / "out"]


def below(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def test_params_of_another_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has not; give the folder that it was"):
        export(GOLDEN / "qwen3", params("llama"), tmp_path / "out")
    assert not below(tmp_path)


# ----- new folders


@pytest.mark.parametrize("style", [4, 5])
@pytest.mark.parametrize("architecture", families.FAMILIES)
@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=4.0)])
def test_a_config_is_read_as_it_was_written(architecture, style, scaling, tmp_path):
    family = families.FAMILIES[architecture]
    options = {
        **dict(zip(families.SIZES, range(2, 9), strict=True)),
        "rope_theta": 5e5,
        "rope_scaling": scaling,
        "norm_eps": 1e-5,
        "tied": True,
        "qk_norm": family.qk_norm,
        "qkv_bias": family.qkv_bias,
    }
    content = families.written(options, dtype="bfloat16")
    content = checkpoints.as_transformers_4(content) if style == 4 else content
    assert content["architectures"] == [architecture]
    assert ("rope_theta" in content) == ("torch_dtype" in content) == (style == 4)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    assert families.read(file) == options


def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path):
    def read(name, **changes):
        folder = tmp_path / name
        shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
        edit(folder / "config.json", **changes)
        return families.read(folder / "config.json")

    absent = ("head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings")
    absent = dict.fromkeys((*absent, "rope_theta", "rope_parameters"), GONE)
    for name, head_dim in (("qwen2", 4), ("llama", 4), ("qwen3", 128)):
        got = read(name, **absent)
        assert (got["head_dim"], got["kv_heads"]) == (head_dim, 4)
        assert (got["norm_eps"], got["rope_theta"], got["tied"]) == (1e-6, 1e4, False)
        assert got["rope_scaling"] is None
    outside = read("llama", original_max_position_embeddings=32)["rope_scaling"]
    assert outside == RopeScaling(original_max_position_embeddings=32)


@pytest.mark.first(1)
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_without_a_source_becomes_a_checkpoint(shards, scan_layers, tmp_path):
    own = tiny.model(scan_layers=scan_layers)
    drawn = tiny.random_params(own)
    options = {"head_dim": 8, "rope_theta": 1e4, "norm_eps": 1e-6}
    write_new(tmp_path / "out", drawn, extra={"eos_token_id": 9}, **options)
    if shards > 1:
        checkpoints.cut(tmp_path / "out", shards)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["eos_token_id"] == 9
    assert len([*tmp_path.rglob("*.safetensors")]) == shards
    read = full(path=str(tmp_path / "out"), scan_layers=scan_layers)
    equal(read.load(None), drawn)
    tokens = np.arange(5, dtype=np.int32)[None]
    at = tokens, tokens, np.ones((1, 5), bool)
    equal(logits(read, drawn, *at), logits(own, drawn, *at))


def test_options_that_no_architecture_has_are_refused(tmp_path):
    both = tiny.random_params(tiny.model(qkv_bias=True))
    with pytest.raises(ValueError, match=r"^qk_norm=True with qkv_bias=True is no"):
        write_new(tmp_path / "a", both, head_dim=8, rope_theta=1e4, norm_eps=1e-6)
