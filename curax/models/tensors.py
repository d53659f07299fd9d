"""Tensors of checkpoint folders in safetensors: names, checks, reading and writing.

The name of a tensor follows from the path of its parameter. A matrix is `[out, in]` in
the file and `[in, out]` in the model; embedding and head are `[V, D]` in both.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curax.models.modules import MATRICES, is_adapter
from curax.settings import files

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F32": jnp.dtype(jnp.float32),
    "F16": jnp.dtype(jnp.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
}
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
BUFFER = "rotary_emb.inv_freq"  # older checkpoints hold it; it follows from the config
NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
LEAVES = {"kernel": "weight", "bias": "bias", "scale": "weight"}


class Entry(NamedTuple):
    """The place of a tensor among the parameters."""

    path: tuple[str, ...]
    layer: int | None  # of a stacked parameter
    shape: tuple[int, ...]  # in the file

    @property
    def turned(self) -> bool:
        """Whether the tensor is a layer's matrix, which the file holds transposed."""
        return self.path[-1] == "kernel"


class Held(NamedTuple):
    """The place of a tensor on disk."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def module_name(module: str) -> str:
    """The name in the files of a module of a layer."""
    inside = "self_attn" if module in MATRICES[:4] else "mlp"
    return NORMS.get(module) or f"{inside}.{module}_proj"


def entries(params: Any) -> dict[str, Entry]:
    """Every tensor of a tree of parameters or shapes, by its name; no adapters."""
    found = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = tuple(key.key for key in keys)
        if is_adapter(path):
            continue
        stacked = path[0] == "layers" and len(path) == 3
        shape = tuple(leaf.shape[1:] if stacked else leaf.shape)
        shape = shape[::-1] if path[-1] == "kernel" else shape
        layers = range(leaf.shape[0]) if stacked else [None]
        for layer in layers:
            found[_name(path, layer)] = Entry(path, layer, shape)
    return found


def _name(path: tuple[str, ...], layer: int | None) -> str:
    if path[0] != "layers":
        outer = {"embed": EMBED, "head": HEAD, "norm": "model.norm.weight"}
        return outer[path[0]]
    number = path[1] if layer is None else layer
    return f"model.layers.{number}.{module_name(path[-2])}.{LEAVES[path[-1]]}"


# ----- what a folder holds


def is_in(folder: Path) -> bool:
    """Whether a folder holds a safetensors file or an index of such files."""
    return any((folder / name).exists() for name in (SINGLE, INDEX))


def held(folder: Path) -> dict[str, Held]:
    """Every tensor of a checkpoint folder, by name.

    Raises:
        ValueError: in a sentence, if files are missing or damaged.
    """
    if (folder / SINGLE).exists():
        return _inside(folder / SINGLE)
    index = folder / INDEX
    if not index.exists():
        raise ValueError(
            f"{folder} holds neither {SINGLE} nor {INDEX}; give the folder of a "
            "checkpoint in safetensors."
        )
    places = _places(index)
    inside = {name: _inside(folder / name) for name in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in inside[file]:
            raise ValueError(
                f"{folder / file} lacks {name}, which {INDEX} places there; fetch "
                "both again."
            )
    for file, tensors in inside.items():
        for name in tensors:
            own = places.setdefault(name, file)  # what the index does not place
            if own != file:
                raise ValueError(
                    f"{folder / file} holds {name}, which {INDEX} places in {own}, or "
                    "which stands there too; fetch all again."
                )
    return {name: tensor for found in inside.values() for name, tensor in found.items()}


def _places(index: Path) -> dict[str, str]:
    """The file of each tensor in an index; all files lie beside it."""
    try:
        places = files.json_of(files.read(index))["weight_map"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(
            f"{index} has no readable weight_map ({error}); fetch it again."
        ) from None
    if not isinstance(places, dict):
        raise ValueError(
            f"{index}: weight_map is {files.shown(places)}, but must be an object of "
            "tensors and their files; fetch it again."
        )
    for name, file in places.items():
        plain = isinstance(file, str) and file.endswith(".safetensors")
        plain = plain and not {"/", "\\"} & {*file}
        if not plain or not (file + name).isprintable():
            raise ValueError(
                f"{index}: weight_map places {files.shown(name)} in "
                f"{files.shown(file)}, but must name a .safetensors file beside it; "
                "fetch it again."
            )
    return places


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file, opened; an error of too little memory names it."""
    from safetensors import safe_open

    try:
        with safe_open(file, "np") as opened:
            yield opened
    except MemoryError:
        size = file.stat().st_size / 2**30
        raise MemoryError(f"{file} has {size:.3g} GiB") from None


def _inside(file: Path) -> dict[str, Held]:
    from safetensors import SafetensorError

    try:
        names = header(file)[1]  # within bounds, and of a regular file
        if strange := [name for name in names if not name.isprintable()]:
            raise ValueError(f"it names a tensor {files.shown(strange[0])}")
        with _opened(file) as opened:
            return {
                name: Held(file, one.get_dtype(), tuple(one.get_shape()))
                for name in opened.keys()  # noqa: SIM118 (it is no dict)
                for one in (opened.get_slice(name),)
            }
    except FileNotFoundError:
        raise ValueError(
            f"{file} is not there, though {INDEX} names it; fetch the checkpoint again."
        ) from None
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(
            f"{file} is no complete safetensors file ({error}); fetch it again."
        ) from None


def check(
    folder: Path, found: Mapping[str, Held], wanted: Mapping[str, Entry], fix: str
) -> None:
    """Refuse a folder whose tensors are not those of the model, in a sentence."""
    source = SINGLE if (folder / SINGLE).exists() else INDEX
    for name, part in wanted.items():
        if name not in found:
            raise ValueError(
                f"{folder / source} lacks {name}, which the model has; {fix}."
            )
        tensor = found[name]
        if tensor.shape != part.shape:
            raise ValueError(
                f"{tensor.file}: {name} has shape {list(tensor.shape)}, but "
                f"{list(part.shape)} in the model; {fix}."
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{tensor.file}: {name} has dtype {tensor.dtype}, but must have one of "
                f"{', '.join(DTYPES)}; take another checkpoint."
            )
    for name in found.keys() - wanted.keys():
        if not (name == HEAD or name.endswith(BUFFER)):
            raise ValueError(
                f"{found[name].file} holds {name}, which the model has not; {fix}."
            )


def cut(tensor: Held, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """A slice of a tensor, without reading the rest."""
    with _opened(tensor.file) as opened:
        return opened.get_slice(name)[index]


# ----- writing


def header(file: Path) -> tuple[bytes, dict[str, Any]]:
    """Header of a safetensors file, as bytes and as parsed JSON.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, or has no such beginning.
    """
    with files.opened(file) as (opened, whole):
        size = opened.read(8) or b""  # None where it would wait
        count = int.from_bytes(size, "little")
        if len(size) < 8 or count > whole - 8:
            raise ValueError("its header is longer than the file")
        if count > files.MAX_BYTES:
            raise ValueError(
                f"its header has {count} bytes, more than {files.MAX_BYTES}"
            )
        text = opened.read(count)
    found = files.json_of(text)
    if not isinstance(found, dict):
        raise ValueError("its header is no object")
    return size + text, found


def write_like(file: Path, source: Path, value: Callable[[str], np.ndarray]) -> None:
    """Write tensors with the header of another file: its order, dtypes and metadata.

    safetensors writes in an order of its own, and from memory alone: a file of 512 MiB
    takes as much, where this takes the largest tensor.

    Args:
        file: to write.
        source: whose header is copied, byte by byte.
        value: of each tensor, by name.
    """
    begin, entries = header(source)
    entries.pop("__metadata__", None)
    with file.open("wb") as opened:
        opened.write(begin)
        for name, entry in sorted(
            entries.items(), key=lambda pair: pair[1]["data_offsets"]
        ):
            array = value(name)
            array = array.astype(DTYPES.get(entry["dtype"], array.dtype), copy=False)
            opened.write(np.ascontiguousarray(array).view(np.uint8).data)


def write_new(file: Path, values: Mapping[str, np.ndarray]) -> None:
    """Write tensors to a new file, in the order of safetensors.

    Raises:
        OSError: it cannot be written; `save_file` of safetensors raises its own error.
    """
    from safetensors.numpy import save

    whole = {name: np.ascontiguousarray(value) for name, value in values.items()}
    file.write_bytes(save(whole, metadata={"format": "pt"}))
