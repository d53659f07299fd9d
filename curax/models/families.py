"""A checkpoint's config.json as options of `transformer.model`, and back.

Both spellings are read: `rope_theta`, `rope_scaling` and `torch_dtype`, and the later
`rope_parameters` and `dtype`. A field that would change the model's output in a way
that the transformer does not implement is refused.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from curax.models.rotary import RopeScaling
from curax.settings import files


class Family(NamedTuple):
    """The options in which an architecture differs."""

    model_type: str
    qk_norm: bool
    qkv_bias: bool


FAMILIES = {
    "Qwen2ForCausalLM": Family("qwen2", qk_norm=False, qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, qkv_bias=False),
    "LlamaForCausalLM": Family("llama", qk_norm=False, qkv_bias=False),
}
# By option its field, and the largest accepted size: ten times the largest published.
SIZES = {
    "vocab_size": ("vocab_size", 2**24),
    "width": ("hidden_size", 2**20),
    "layers": ("num_hidden_layers", 2**10),
    "heads": ("num_attention_heads", 2**14),
    "kv_heads": ("num_key_value_heads", 2**14),
    "head_dim": ("head_dim", 2**14),
    "mlp_width": ("intermediate_size", 2**22),
}
# Accepted ranges: float32 can compute with these numbers.
EPS, THETA, FACTOR = (1e-20, 0.1), (1.0, 1e15), (1e-6, 1e6)
WINDOW = 2**31 - 1
MAX_POSITIONS = 32768  # of a new checkpoint, tokens of the longest context
# Field: the values without effect. Absence always is one of them.
INERT: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (0, 1),
    "quantization_config": (),
}
SCALING = [field.name for field in dataclasses.fields(RopeScaling)]


def read(file: Path) -> dict[str, Any]:
    """The options of `transformer.model` in a config.json.

    Raises:
        ValueError: in a sentence, if the file cannot be read or is not supported.
    """
    try:
        config = files.json_of(files.read(file))
        if not isinstance(config, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        raise ValueError(
            f"{file} is not there; set model.path to the folder of a downloaded "
            "checkpoint."
        ) from None
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{file} cannot be read as JSON ({reason}); fetch it again."
        ) from None
    fields = Fields(file, config)
    family = fields.family()
    for field, inert in INERT.items():
        value = config.get(field)
        unread = field == "attention_bias" and family.qkv_bias
        if value is not None and not _among(value, inert) and not unread:
            wanted = " or ".join(map(json.dumps, inert)) or "absent"
            raise fields.refusal(field, value, wanted)
    sizes = fields.sizes(family)
    fields.check_windows(family, sizes["layers"])
    return {
        **sizes,
        **fields.rope(),
        "norm_eps": fields.number(
            "rms_norm_eps", config.get("rms_norm_eps", 1e-6), *EPS
        ),
        "tied": fields.true_or_false("tie_word_embeddings"),
        "qk_norm": family.qk_norm,
        "qkv_bias": family.qkv_bias,
    }


def written(options: dict[str, Any], *, dtype: str) -> dict[str, Any]:
    """The content of the config.json of a model; `read` returns its options.

    Args:
        options: of `transformer.model`, all that `read` returns.
        dtype: of the tensors, as `float32`.

    Raises:
        ValueError: if no architecture has these options.
    """
    trait = (options["qk_norm"], options["qkv_bias"])
    found = [name for name, f in FAMILIES.items() if (f.qk_norm, f.qkv_bias) == trait]
    if not found:
        raise ValueError(
            "qk_norm=True with qkv_bias=True is no architecture of "
            f"{', '.join(FAMILIES)}; export a model that has one of the two."
        )
    family, scaling = FAMILIES[found[0]], options["rope_scaling"]
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling:
        rope = {"rope_type": "llama3", **dataclasses.asdict(scaling)}
    fixed: dict[str, Any] = {"attention_bias": False} if not family.qkv_bias else {}
    if family.model_type == "llama":
        fixed |= {"mlp_bias": False}
    else:
        fixed |= {"use_sliding_window": False, "sliding_window": None}
    return {
        "architectures": found,
        "model_type": family.model_type,
        "hidden_act": "silu",
        **{field: options[name] for name, (field, _) in SIZES.items()},
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": options["norm_eps"],
        "tie_word_embeddings": options["tied"],
        "rope_parameters": {"rope_theta": options["rope_theta"], **rope},
        "dtype": dtype,
        **fixed,
    }


class Fields(NamedTuple):
    """The fields of a config.json, with methods that check their values."""

    file: Path
    config: dict[str, Any]

    def refusal(self, field: str, value: Any, wanted: str) -> ValueError:
        """The error of a field whose value is not as wanted."""
        return ValueError(
            f"{self.file}: {field} is {files.shown(value)}, but must be {wanted}; take "
            "another checkpoint."
        )

    def family(self) -> Family:
        """The family of the only architecture, checked against `model_type`."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or names not in [[name] for name in FAMILIES]:
            wanted = " or ".join(json.dumps([name]) for name in FAMILIES)
            raise self.refusal("architectures", names, wanted)
        family = FAMILIES[names[0]]
        own = self.config.get("model_type", family.model_type)
        if own != family.model_type:
            wanted = f"{json.dumps(family.model_type)}, that of {names[0]}"
            raise self.refusal("model_type", own, wanted)
        return family

    def number(self, field: str, value: Any, low: float, high: float) -> float:
        """The value, if it is a number in these bounds."""
        # An integer may be too large for a float, so none is made before the bounds.
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refusal(field, value, "a positive number")
        if not low <= value <= high:
            raise self.refusal(field, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def integer(self, field: str, value: Any, most: int) -> int:
        """The value, if it is a positive integer of at most `most`."""
        if type(value) is not int or value < 1:
            raise self.refusal(field, value, "a positive integer")
        if value > most:
            raise self.refusal(field, value, f"a positive integer of at most {most}")
        return value

    def true_or_false(self, field: str) -> bool:
        """The value of a field; absent is false."""
        value = self.config.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(field, value, "true or false")
        return bool(value)

    def sizes(self, family: Family) -> dict[str, int]:
        """The sizes, with the defaults of transformers where one is absent."""
        get = self.config.get
        heads, width = get("num_attention_heads"), get("hidden_size")
        absent = {"num_key_value_heads": heads}
        if type(heads) is int and type(width) is int and heads > 0:
            absent["head_dim"] = 128 if family.qk_norm else width // heads
        found = {}
        for name, (field, most) in SIZES.items():
            size = absent.get(field) if get(field) is None else get(field)
            found[name] = self.integer(field, size, most)
        return found

    def rope(self) -> dict[str, Any]:
        """`rope_theta` and `rope_scaling`, of either spelling."""
        config = self.config
        empty = config.get("rope_scaling") in (None, {})
        field = "rope_parameters" if empty else "rope_scaling"
        rope = config.get(field)
        rope = {} if rope is None else rope
        flat = isinstance(rope, dict) and not any(
            type(v) is dict for v in rope.values()
        )
        kind = rope.get("rope_type", rope.get("type", "default")) if flat else None
        if kind not in ("default", "llama3"):
            raise self.refusal(field, rope, "of rope_type 'default' or 'llama3'")
        if not _among(rope.get("partial_rotary_factor", 1), (1,)):
            raise self.refusal(field, rope, "without a partial_rotary_factor")
        theta = (rope.get("rope_theta"), config.get("rope_theta"), 10_000.0)
        theta = next(one for one in theta if one is not None)
        options: dict[str, Any] = {
            "rope_theta": self.number("rope_theta", theta, *THETA)
        }
        if kind == "default":
            return options | {"rope_scaling": None}
        # The original window may stand outside, and takes precedence there.
        window = "original_max_position_embeddings"
        own: dict[str, Any] = {
            name: self.number(f"{field}.{name}", rope.get(name), *FACTOR)
            for name in SCALING
            if name != window
        }
        size = rope.get(window) if config.get(window) is None else config[window]
        own[window] = self.integer(f"{field}.{window}", size, WINDOW)
        try:
            return options | {"rope_scaling": RopeScaling(**own)}
        except ValueError as error:
            raise ValueError(f"{self.file}: {error}") from None

    def check_windows(self, family: Family, layers: int) -> None:
        """Refuse sliding-window attention, which Llama never has."""
        get = self.config.get
        if family.model_type == "llama":
            return
        kinds = get("layer_types")
        if kinds is not None and not isinstance(kinds, list):
            raise self.refusal("layer_types", kinds, "a list")
        if kinds is not None and kinds != ["full_attention"] * len(kinds):
            raise self.refusal("layer_types", kinds, '"full_attention" throughout')
        if kinds is not None and len(kinds) != layers:
            raise self.refusal("layer_types", kinds, f"of {layers} layers")
        if kinds is not None or not self.true_or_false("use_sliding_window"):
            return
        first = get("max_window_layers")
        first = 28 if first is None else first
        if type(first) is not int:
            raise self.refusal("max_window_layers", first, "an integer")
        if get("sliding_window", 4096) is not None and first < layers:
            raise self.refusal("use_sliding_window", True, "false")


def check_heads(file: Path, options: dict[str, Any]) -> None:
    """Refuse query heads that do not share key heads evenly, and an odd head size."""
    heads, kv_heads, head_dim = (options[k] for k in ("heads", "kv_heads", "head_dim"))
    if heads % kv_heads:
        raise ValueError(
            f"{file}: num_attention_heads is {heads}, no multiple of "
            f"num_key_value_heads, {kv_heads}; take another checkpoint."
        )
    if head_dim % 2:
        raise ValueError(
            f"{file}: head_dim is {head_dim}, but must be even, for rotary halves; "
            "take another checkpoint."
        )


def _among(value: Any, wanted: Any) -> bool:
    """Whether a value is one of those wanted, where true is not 1."""
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool)
        for one in wanted
    )
