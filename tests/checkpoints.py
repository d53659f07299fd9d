"""Checkpoints of random parameters, in forms in which other programs write them."""

import json

import jax
from safetensors.numpy import load_file, save_file

from curax.models import families, tensors, transformer
from curax.models.export import write_new


def write(
    destination,
    *,
    architecture="Qwen3ForCausalLM",
    noise=0.0,
    head_dim=16,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    rope_scaling=None,
    extra=None,
    style=5,
    shards=1,
    **options,
):
    """A checkpoint of random parameters.

    Args:
        destination: folder that does not exist yet.
        architecture: of `families.FAMILIES`.
        noise: standard deviation of what is added to each, scales of norms included.
        head_dim: as the model's, and so are the three options that follow.
        rope_theta: base of the rotary frequencies.
        norm_eps: of every RMSNorm.
        rope_scaling: of the rotary frequencies.
        extra: more fields of config.json.
        style: spelling of config.json, of transformers 4 or 5.
        shards: safetensors files.
        **options: of `transformer.model`.
    """
    family = families.FAMILIES[architecture]
    policy = transformer.model(
        head_dim=head_dim, qk_norm=family.qk_norm, qkv_bias=family.qkv_bias, **options
    )
    leaves, tree = jax.tree.flatten(policy.init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    pairs = zip(keys, leaves, strict=True)
    noisy = [leaf + noise * jax.random.normal(k, leaf.shape) for k, leaf in pairs]
    write_new(
        destination,
        jax.tree.unflatten(tree, noisy),
        head_dim=head_dim,
        rope_theta=rope_theta,
        norm_eps=norm_eps,
        rope_scaling=rope_scaling,
        extra=extra,
    )
    if style == 4:
        file = destination / "config.json"
        file.write_text(json.dumps(as_transformers_4(json.loads(file.read_text()))))
    if shards > 1:
        cut(destination, shards)


def as_transformers_4(content):
    """The same config.json in the spelling of transformers 4."""
    rope, rest = dict(content["rope_parameters"]), dict(content)
    old = {"rope_theta": rope.pop("rope_theta"), "torch_dtype": rest.pop("dtype")}
    old["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    del rest["rope_parameters"]
    return rest | old


def cut(folder, count):
    """Cut the tensors of a checkpoint into files of about one size, with an index."""
    whole = load_file(folder / tensors.SINGLE)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    total, done = sum(value.nbytes for value in whole.values()), 0
    places = {}
    for name, value in whole.items():
        places[name] = names[min(done * count // total, count - 1)]
        done += value.nbytes
    for file in names:
        inside = {name: whole[name] for name, place in places.items() if place == file}
        save_file(inside, folder / file, {"format": "pt"})
    content = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / tensors.INDEX).write_text(json.dumps(content))
    (folder / tensors.SINGLE).unlink()
