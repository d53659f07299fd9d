"""Policies read from Hugging Face checkpoint folders: config.json and safetensors.

Parameters are read leaf by leaf, and of each leaf every device reads its own shard.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax import hub
from curax.models import attention, families, tensors, transformer
from curax.models.modules import MATRICES, is_adapter
from curax.settings.config_types import CheckpointPath, Count, Natural, Positive
from curax.settings.declared import declares
from curax.types import Model

FIX = "config.json belongs to other files, so fetch all again"


def check_weights(path: str) -> None:
    """Refuse a checkpoint without weights, before a model of its sizes is built.

    Raises:
        ValueError: in a sentence, if the files are missing or damaged.
    """
    folder = hub.checkpoint(path)
    families.read(folder / "config.json")  # it tells more where the folder is another
    tensors.held(folder)


@declares(
    checkpoint="path",
    computes_in="dtype",
    recomputes="remat",
    check_weights=check_weights,
)
def model(
    *,
    path: CheckpointPath,
    vocab_size: Count | None = None,
    scan_layers: bool = True,
    remat: bool | str = "none",
    dtype: Any = "bfloat16",
    param_dtype: Any = "float32",
    attend: Callable[..., jax.Array] = attention.by_platform,
    lora_rank: Natural = 0,
    lora_alpha: Positive = 16.0,
    lora_modules: tuple[str, ...] = MATRICES,
) -> Model:
    """The policy of a checkpoint of Qwen2, Qwen2.5, Qwen3 or Llama 3.

    Args:
        path: folder with config.json and safetensors files, or a name on the hub:
            `owner/name` or `owner/name@revision`.
        vocab_size: of the task, at most that of the checkpoint, which the model keeps:
            its embedding often has more rows than its tokenizer has tokens.
        scan_layers: as `transformer.model`, and so are the options that follow.
        remat: what is recomputed of a layer: none, dots or everything.
        dtype: of activations and matrix products; float32 is quicker on a CPU.
        param_dtype: of the parameters that are trained, whatever the files have: in
            bfloat16 steps of a small learning rate would be rounded away.
        attend: an implementation of `curax.models.attention`.
        lora_rank: of the adapters, which are not read from the folder.
        lora_alpha: the adapters' scale is `lora_alpha / lora_rank`.
        lora_modules: matrices of each layer that have an adapter.

    Returns:
        The model, with `load`.

    Raises:
        ValueError: in a sentence, if the folder holds no checkpoint, one that is not
            supported, or one with a smaller vocabulary.
    """
    folder = hub.checkpoint(path)
    options = families.read(folder / "config.json")
    families.check_heads(folder / "config.json", options)
    # A resumed run does not need the files: they are read by `load` alone.
    found = tensors.held(folder) if tensors.is_in(folder) else None
    if found is not None:
        # Of stacked layers one is traced; to build all of wrong sizes takes a minute.
        stacked = transformer.model(**options, scan_layers=True)
        shapes = jax.eval_shape(stacked.init, jax.random.key(0))
        tensors.check(folder, found, tensors.entries(shapes), FIX)
    if vocab_size is not None and vocab_size > options["vocab_size"]:
        raise ValueError(
            f"{folder / 'config.json'}: vocab_size is {options['vocab_size']}, less "
            f"than the {vocab_size} of the task; give the task the tokenizer of this "
            "checkpoint."
        )
    policy = transformer.model(
        **options,
        scan_layers=scan_layers,
        remat=remat,
        dtype=dtype,
        param_dtype=param_dtype,
        attend=attend,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_modules=lora_modules,
    )
    shapes = base(jax.eval_shape(policy.init, jax.random.key(0)))
    return dataclasses.replace(
        policy, load=lambda sharding: read(folder, shapes, sharding)
    )


def base(tree: Any) -> Any:
    """A tree of parameters without the adapters."""
    return {
        key: base(node) if isinstance(node, dict) else node
        for key, node in tree.items()
        if not is_adapter((key,))
    }


def read(folder: Path, shapes: Any, sharding: Any) -> Any:
    """The parameters in a checkpoint folder.

    Args:
        folder: of a checkpoint.
        shapes: tree of the shapes and dtypes to read.
        sharding: tree of shardings like the parameters; None: one device.

    Raises:
        ValueError: in a sentence, if a tensor is missing, unexpected or misshapen.
    """
    found, wanted = tensors.held(folder), tensors.entries(shapes)
    tensors.check(folder, found, wanted, FIX)
    names: dict[tuple[str, ...], list[str]] = {}
    for name, part in wanted.items():
        names.setdefault(part.path, []).append(name)

    def tensor(name, index, dtype):
        turn = wanted[name].turned
        part = tensors.cut(found[name], name, index[::-1] if turn else index)
        return (part.T if turn else part).astype(dtype, copy=False)

    def leaf(keys, shape, place=None):
        own = names[tuple(key.key for key in keys)]

        def part(index):
            if wanted[own[0]].layer is None:
                return tensor(own[0], index, shape.dtype)
            layers, *rest = index
            sizes = [
                len(range(*one.indices(size)))
                for one, size in zip(index, shape.shape, strict=True)
            ]
            out = np.empty(sizes, shape.dtype)
            for i, name in enumerate(own[layers]):
                out[i] = tensor(name, tuple(rest), shape.dtype)
            return out

        if place is None:
            return jnp.asarray(part((slice(None),) * len(shape.shape)))
        return jax.make_array_from_callback(shape.shape, place, part)

    trees = (shapes,) if sharding is None else (shapes, base(sharding))
    return jax.tree_util.tree_map_with_path(leaf, *trees)
