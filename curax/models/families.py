"""What a checkpoint's config.json says, as options of `transformer.model`, and back.

Both spellings are read: `rope_theta`, `rope_scaling` and `torch_dtype`, and the later
`rope_parameters` and `dtype`. A field that would change what the model computes, and
that the transformer cannot follow, is refused rather than ignored.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from curax.models.rotary import RopeScaling


class Family(NamedTuple):
    """What sets an architecture apart."""

    model_type: str
    qk_norm: bool
    qkv_bias: bool


FAMILIES = {
    "Qwen2ForCausalLM": Family("qwen2", qk_norm=False, qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, qkv_bias=False),
    "LlamaForCausalLM": Family("llama", qk_norm=False, qkv_bias=False),
}
SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
}
# Field: the values that change nothing. Absent is always one of them.
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
    """The options of `transformer.model` that a config.json stands for.

    Raises:
        ValueError: in a sentence, if the file is none, or says what is not supported.
    """
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{file} is not there; set model.path to the folder of a downloaded "
            "checkpoint."
        ) from None
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{file} cannot be read as JSON ({error}); fetch it again."
        ) from None
    fields = Fields(file, config if isinstance(config, dict) else {})
    family = fields.family()
    for field, inert in INERT.items():
        value = fields.config.get(field)
        unread = field == "attention_bias" and family.qkv_bias
        if value is not None and value not in inert and not unread:
            wanted = " or ".join(map(json.dumps, inert)) or "absent"
            raise fields.refusal(field, value, wanted)
    sizes = fields.sizes(family)
    fields.check_windows(family, sizes["layers"])
    return {
        **sizes,
        **fields.rope(),
        "norm_eps": fields.positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        "tied": bool(config.get("tie_word_embeddings")),
        "qk_norm": family.qk_norm,
        "qkv_bias": family.qkv_bias,
    }


def written(
    options: dict[str, Any], *, dtype: str, max_positions: int, style: int
) -> dict[str, Any]:
    """The config.json that `read` makes these options of.

    Args:
        options: of `transformer.model`, all that `read` gives.
        dtype: name of what the tensors are kept in, as `float32`.
        max_positions: tokens of the longest context.
        style: the spelling, of transformers 4 or 5.

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
    rope = {"rope_type": "llama3", **dataclasses.asdict(scaling)} if scaling else None
    theta = {"rope_theta": options["rope_theta"]}
    spelling = (
        {**theta, "rope_scaling": rope, "torch_dtype": dtype}
        if style == 4
        else {
            "rope_parameters": theta | (rope or {"rope_type": "default"}),
            "dtype": dtype,
        }
    )
    fixed: dict[str, Any] = {"attention_bias": False} if not family.qkv_bias else {}
    if family.model_type == "llama":
        fixed |= {"mlp_bias": False}
    else:
        fixed |= {"use_sliding_window": False, "sliding_window": None}
    return {
        "architectures": found,
        "model_type": family.model_type,
        "hidden_act": "silu",
        **{field: options[name] for name, field in SIZES.items()},
        "max_position_embeddings": max_positions,
        "rms_norm_eps": options["norm_eps"],
        "tie_word_embeddings": options["tied"],
        **spelling,
        **fixed,
    }


class Fields(NamedTuple):
    """What a config.json holds."""

    file: Path
    config: dict[str, Any]

    def refusal(self, field: str, value: Any, wanted: str) -> ValueError:
        """The sentence for a value that is not as wanted."""
        shown = json.dumps(value)
        shown = shown if len(shown) <= 200 else f"{shown[:200]} ..."
        return ValueError(
            f"{self.file}: {field} is {shown}, but must be {wanted}; take another "
            "checkpoint."
        )

    def family(self) -> Family:
        """That of its only architecture."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or names[0] not in FAMILIES:
            wanted = " or ".join(json.dumps([name]) for name in FAMILIES)
            raise self.refusal("architectures", names, wanted)
        return FAMILIES[names[0]]

    def positive(self, field: str, value: Any) -> float:
        """The value, if it is a positive number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refusal(field, value, "a positive number")
        return value

    def sizes(self, family: Family) -> dict[str, int]:
        """With what transformers takes where a size is absent."""
        get = self.config.get
        heads, width = get("num_attention_heads"), get("hidden_size")
        absent = {"num_key_value_heads": heads}
        if isinstance(heads, int) and isinstance(width, int) and heads > 0:
            absent["head_dim"] = 128 if family.qk_norm else width // heads
        found = {}
        for name, field in SIZES.items():
            size = absent.get(field) if get(field) is None else get(field)
            if type(size) is not int or size < 1:
                raise self.refusal(field, size, "a positive integer")
            found[name] = size
        return found

    def rope(self) -> dict[str, Any]:
        """Base and scaling of the rotary frequencies, however they are spelled."""
        config = self.config
        field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = config.get(field) or {}
        flat = isinstance(rope, dict) and not any(
            type(v) is dict for v in rope.values()
        )
        kind = rope.get("rope_type", rope.get("type", "default")) if flat else None
        if kind not in ("default", "llama3"):
            raise self.refusal(field, rope, "of rope_type 'default' or 'llama3'")
        if rope.get("partial_rotary_factor", 1) != 1:
            raise self.refusal(field, rope, "without a partial_rotary_factor")
        theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
        options: dict[str, Any] = {"rope_theta": self.positive("rope_theta", theta)}
        if kind == "default":
            return options | {"rope_scaling": None}
        # The original window may stand outside too, and counts if it does.
        window = "original_max_position_embeddings"
        own: dict[str, Any] = {name: rope.get(name) for name in SCALING}
        own[window] = config.get(window) or own[window]
        for name, value in own.items():
            self.positive(f"{field}.{name}", value)
        try:
            return options | {"rope_scaling": RopeScaling(**own)}
        except ValueError as error:
            raise ValueError(f"{self.file}: {error}") from None

    def check_windows(self, family: Family, layers: int) -> None:
        """No layer may look through a sliding window only; Llama's never do."""
        get = self.config.get
        if family.model_type == "llama":
            return
        kinds = get("layer_types") or ()
        if any(kind != "full_attention" for kind in kinds):
            raise self.refusal("layer_types", kinds, '"full_attention" throughout')
        slides = get("use_sliding_window") and get("sliding_window", 4096)
        if not kinds and slides and (get("max_window_layers") or 28) < layers:
            raise self.refusal("use_sliding_window", True, "false")
