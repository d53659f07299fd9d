"""Writing of checkpoint folders: like the source, adapters alone, or a new model.

A folder gets its name when it is complete.
"""

import contextlib
import fnmatch
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax import hub
from curax.models import families, prompt_form, tensors
from curax.models.modules import MATRICES
from curax.models.rotary import RopeScaling
from curax.settings import lock

CARD = "README.md"
# Not copied: weights, which would be untrained, and caches.
SKIP = ("*.safetensors", "*.bin", "*.pth", "*.pt", "*.gguf", "*.h5", "*.msgpack", ".*")


def export(
    source: str | Path,
    params: Any,
    destination: str | Path,
    *,
    lora_alpha: float | None = None,
    form: Mapping[str, Any] | None = None,
    card: str | None = None,
) -> None:
    """Write trained parameters in the format of the checkpoint they came from.

    Files, tensor names, order, precision and metadata are those of the source, as are
    config, tokenizer and all other files of its folder. Untrained parameters give
    files that are equal byte by byte, unless they are held in less than the source's
    precision, as beside adapters. One tensor is in memory at a time.

    Args:
        source: folder of the checkpoint that was loaded.
        params: nested dict of arrays on this host. Adapters are merged:
            W + (alpha / r) A B in float32.
        destination: folder that does not exist yet.
        lora_alpha: as the model's; needed where there are adapters.
        form: of the prompts trained on, `Task.prompt_form`, written beside; None: what
            the source says of it stays.
        card: README.md, in place of that of the source; None: that stays.

    Raises:
        ValueError: in a sentence, if the destination exists, the source is not that of
            the params, or adapters have no `lora_alpha`.
    """
    source = Path(os.path.expanduser(source))
    found, wanted = tensors.held(source), tensors.entries(params)
    tensors.check(source, found, wanted, "give the folder that it was loaded from")
    scale = _scale(params, lora_alpha)

    def value(name):
        of = tensors.EMBED if name == tensors.HEAD and name not in wanted else name
        if of in wanted:
            return _value(params, wanted[of], scale)
        return tensors.cut(found[name], name, (slice(None),) * len(found[name].shape))

    copies = others(source)
    with _folder(destination) as folder:
        for file in sorted({tensor.file for tensor in found.values()}):
            tensors.write_like(folder / file.name, file, value)
        for file in copies:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / file, folder / file)
        _describe(folder, form, card)


def export_adapter(
    destination: str | Path,
    params: Any,
    *,
    base: str,
    revision: str | None = None,
    lora_alpha: float,
    form: Mapping[str, Any] | None = None,
    card: str | None = None,
) -> None:
    """Write the adapters alone, as the `peft` library does.

    Args:
        destination: folder that does not exist yet.
        params: nested dict of arrays on this host.
        base: name or folder of the checkpoint that the adapters belong to.
        revision: commit of it, where it is a name on the hub.
        lora_alpha: as the model's.
        form: as `export`.
        card: README.md; None: none is written.

    Raises:
        ValueError: in a sentence, if the destination exists or there are no adapters.
    """
    halves: dict[str, np.ndarray] = {}
    adapted = set()
    for name, part in tensors.entries(params).items():
        own = _node(params, part.path[:-1])
        if part.path[-1] != "kernel" or "lora_a" not in own:
            continue
        adapted.add(part.path[-2])
        for half in ("A", "B"):
            matrix = _layer(own[f"lora_{half.lower()}"], part.layer).T
            module = name.removesuffix(".weight")
            halves[f"base_model.model.{module}.lora_{half}.weight"] = matrix
    if not halves:
        raise ValueError(
            "params hold no adapters; export them as a whole, or train with "
            "model.lora_rank above 0."
        )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **({"revision": revision} if revision else {}),
        "r": next(m.shape[0] for name, m in halves.items() if "lora_A" in name),
        "lora_alpha": lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": [f"{name}_proj" for name in MATRICES if name in adapted],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with _folder(destination) as folder:
        full = {name: half.astype(np.float32) for name, half in halves.items()}
        tensors.write_new(folder / "adapter_model.safetensors", full)
        _write_json(folder / "adapter_config.json", config)
        _describe(folder, form, card)


def write_new(
    destination: str | Path,
    params: Any,
    *,
    head_dim: int,
    rope_theta: float,
    norm_eps: float,
    rope_scaling: RopeScaling | None = None,
    lora_alpha: float | None = None,
    dtype: Any = jnp.float32,
    extra: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
    form: Mapping[str, Any] | None = None,
    card: str | None = None,
) -> None:
    """Write a checkpoint of a model that was not loaded from one.

    The architecture and all other sizes follow from the parameters.

    Args:
        destination: folder that does not exist yet.
        params: nested dict of arrays on this host; adapters are merged.
        head_dim: as the model's, and so are the three options that follow.
        rope_theta: base of the rotary frequencies.
        norm_eps: of every RMSNorm.
        rope_scaling: of the rotary frequencies.
        lora_alpha: as the model's; needed where there are adapters.
        dtype: what the tensors are kept in.
        extra: more fields of config.json, as `eos_token_id`.
        tokenizer: folder of a checkpoint whose tokenizer goes with the model.
        form: as `export`.
        card: README.md; None: none is written.

    Raises:
        ValueError: in a sentence, if the destination exists or no architecture has
            these parameters.
    """
    wanted, scale = tensors.entries(params), _scale(params, lora_alpha)
    first = "model.layers.0."
    heads, kv_heads = (
        wanted[f"{first}self_attn.{name}_proj.weight"].shape[0] // head_dim
        for name in "qk"
    )
    vocab_size, width = wanted[tensors.EMBED].shape
    options = {
        "vocab_size": vocab_size,
        "width": width,
        "layers": sum(name.endswith(".input_layernorm.weight") for name in wanted),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_width": wanted[f"{first}mlp.up_proj.weight"].shape[0],
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "norm_eps": norm_eps,
        "tied": tensors.HEAD not in wanted,
        "qk_norm": f"{first}self_attn.q_norm.weight" in wanted,
        "qkv_bias": f"{first}self_attn.q_proj.bias" in wanted,
    }
    kind = jnp.dtype(dtype)
    config = families.written(options, dtype=kind.name)
    copies: list[Path] = []
    if tokenizer is not None:
        held = others(tokenizer, hub.TOKENIZER)
        copies = [tokenizer / file for file in held if len(file.parts) == 1]
    with _folder(destination) as folder:
        values = {
            name: _value(params, part, scale).astype(kind)
            for name, part in wanted.items()
        }
        tensors.write_new(folder / tensors.SINGLE, values)
        _write_json(folder / "config.json", config | dict(extra or {}))
        for file in copies:
            shutil.copy(file, folder)
        _describe(folder, form, card)


# ----- parameters as tensors


def _value(params: Any, entry: tensors.Entry, scale: float) -> np.ndarray:
    """The value of a tensor in a file, adapters merged, before its cast."""
    own = _node(params, entry.path[:-1])
    value = _layer(own[entry.path[-1]], entry.layer)
    if entry.turned and "lora_a" in own:
        a, b = (_layer(own[name], entry.layer) for name in ("lora_a", "lora_b"))
        value = value.astype(np.float32) + np.float32(scale) * (a @ b)
    return value.T if entry.turned else value


def _layer(leaf: Any, layer: int | None) -> np.ndarray:
    return np.asarray(leaf if layer is None else leaf[layer])


def _node(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _scale(params: Any, alpha: float | None) -> float:
    """The scale of adapters, alpha / r; 0 without adapters."""
    found = jax.tree_util.tree_leaves_with_path(params)
    ranks = [leaf.shape[-1] for path, leaf in found if path[-1].key == "lora_a"]
    if ranks and alpha is None:
        raise ValueError(
            "params hold adapters, but lora_alpha is not given; give that of the model."
        )
    return alpha / ranks[0] if ranks and alpha is not None else 0.0


# ----- folders


def others(source: Path, only: Sequence[str] = ("*",)) -> list[Path]:
    """Files of a checkpoint to copy, relative to its folder: all but weights.

    Links to folders are left behind. Those to files are followed inside the folder,
    and to the blobs of a cache, whose snapshots are folders of links.

    Args:
        source: the folder.
        only: patterns; files whose names have none of them are left behind.

    Raises:
        ValueError: there is a link to somewhere else, which would be given away with
            the copy, or what is no file.
    """
    inside = (source.resolve(), source.resolve().parent.parent / "blobs")
    skipped = shutil.ignore_patterns(*SKIP)
    copies = []
    for folder, folders, names in os.walk(source):
        folders[:] = sorted({*folders} - skipped(folder, folders))
        for name in sorted({*names} - skipped(folder, names)):
            if not any(fnmatch.fnmatch(name, pattern) for pattern in only):
                continue
            file = Path(folder, name)
            if not any(file.resolve().is_relative_to(place) for place in inside):
                raise ValueError(
                    f"{file} is a link that leads out of the checkpoint, and would be "
                    "copied; put what it leads to in its place, or remove it."
                )
            if not file.is_file():
                raise ValueError(
                    f"{file} is no file that could be copied; remove it, or fetch it "
                    "again."
                )
            copies.append(file.relative_to(source))
    return copies


@contextlib.contextmanager
def _folder(destination: str | Path) -> Iterator[Path]:
    """A hidden folder, renamed to the destination at the end, removed on errors.

    What a killed process left there is removed by the next that writes the destination.
    """
    final = Path(os.path.expanduser(destination)).absolute()
    short = os.fsdecode(os.fsencode(final.name)[:240])  # names have 255 bytes
    hidden = final.with_name(f".{short}.partial")
    with lock.hold(hidden, f"{final}:"):
        folder = hidden / "whole"
        try:
            if final.exists():
                raise ValueError(f"{final} exists; give the name of a new folder.")
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
            folder.mkdir()
            yield folder
            folder.rename(final)
        finally:  # the lock's file last: then another process may begin
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(hidden, ignore_errors=True)


def _describe(folder: Path, form: Mapping[str, Any] | None, card: str | None) -> None:
    """Write the prompt form and the model card, where they are given."""
    if form is not None:
        prompt_form.write(folder, form)
    if card is not None:
        (folder / CARD).write_bytes(card.encode("utf-8", "replace"))


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
