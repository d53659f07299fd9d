"""Tiny checkpoints and what transformers computes with them: tests/golden.

    .venv-parity/bin/python tests/parity/make_golden.py

Weights are bfloat16, as published ones are; logits are computed in float32. Rows are
padded on the left, and longer than the original window where frequencies are rescaled.
"""

import json
import shutil
from pathlib import Path

import safetensors.torch
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FOLDER = Path(__file__).parent.parent / "golden"
SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
}


def make(name, shards):
    """The folder of one model."""
    kind, config = MODELS[name]
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    model = kind(config).eval()
    with torch.no_grad():
        for key, leaf in model.named_parameters():
            centre = float("norm" in key)
            leaf.copy_((centre + 0.3 * torch.randn(leaf.shape)).bfloat16())
        tokens = torch.randint(0, SIZES["vocab_size"], (2, 40))
        mask = torch.arange(40) >= torch.tensor([[0], [5]])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(
            input_ids=tokens, attention_mask=mask.long(), position_ids=positions
        ).logits
    model.bfloat16().save_pretrained(folder, max_shard_size=4000 if shards else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    expected = {"tokens": tokens, "mask": mask, "positions": positions}
    expected["logits"] = logits.contiguous()
    # Beside the checkpoint's folder: it is no part of it.
    safetensors.torch.save_file(expected, FOLDER / f"{name}.safetensors")


def in_the_old_spelling(folder):
    """Respell a config.json as transformers 4 wrote it."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    file.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in MODELS:
        make(name, shards=name == "qwen3")
    in_the_old_spelling(FOLDER / "qwen2")
