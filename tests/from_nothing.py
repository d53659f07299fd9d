"""Random checkpoints and small tokenizers, written on the spot."""

import json
from pathlib import Path

import jax

from curax.models import families, transformer
from curax.models.export import write_new
from curax.tasks import text

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TURNS = """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
WRITTEN = ("rope_scaling", "max_positions", "dtype", "shards", "style", "extra")


def checkpoint(
    destination,
    *,
    vocab_size,
    architecture="Qwen3ForCausalLM",
    seed=0,
    noise=0.0,
    head_dim=16,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    **options,
):
    """Write a checkpoint of random parameters, all of them moved by `noise`.

    Options are those of `transformer.model` and of `write_new`.
    """
    family = families.FAMILIES[architecture]
    written = {name: options.pop(name) for name in WRITTEN if name in options}
    policy = transformer.model(
        vocab_size=vocab_size,
        head_dim=head_dim,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        scan_layers=True,  # drawn the same, and quicker to compile
        **options,
    )

    @jax.jit
    def drawn(key):
        params = policy.init(key)
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
        pairs = zip(keys, leaves, strict=True)
        noisy = [leaf + noise * jax.random.normal(k, leaf.shape) for k, leaf in pairs]
        return jax.tree.unflatten(tree, noisy)

    write_new(
        destination,
        drawn(jax.random.key(seed)),
        head_dim=head_dim,
        rope_theta=rope_theta,
        norm_eps=norm_eps,
        **written,
    )


def tokenizer(path, texts, *, vocab_size, chat=True):
    """Write byte pairs over bytes, learnt from texts, and load them.

    Of at least 259 ids. With `chat`, turns end in `<|im_end|>`; otherwise
    `<|endoftext|>` ends a completion. The same texts give the same files.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": END if chat else PAD,
        "pad_token": PAD,
        "chat_template": TURNS if chat else None,
    }
    Path(path).mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(core.to_str(pretty=True), "utf-8")
    said = json.dumps(config, indent=1) + "\n"
    (path / "tokenizer_config.json").write_text(said, "utf-8")
    return text.load(path)
