"""Tokenizers of byte pairs, learnt from texts, in the files of Hugging Face."""

import json
from collections.abc import Iterable
from pathlib import Path

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


def tokenizer(
    path: Path,
    texts: Iterable[str],
    *,
    vocab_size: int,
    chat: bool = True,
    digits: bool = False,
) -> text.Tokenizer:
    """Write byte pairs over bytes, learnt from texts, and load them.

    The same texts give the same files.

    Args:
        path: folder that gets tokenizer.json and tokenizer_config.json.
        texts: to learn from.
        vocab_size: ids at most; bytes and control tokens take 259.
        chat: with a chat template, whose turns end in `<|im_end|>`; otherwise
            `<|endoftext|>` ends a completion.
        digits: whether each digit is a token by itself.

    Raises:
        ImportError: `tokenizers` is not installed.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alone = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    core.pre_tokenizer = pre_tokenizers.Sequence([*alone, pieces]) if alone else pieces
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
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(core.to_str(pretty=True), "utf-8")
    said = json.dumps(config, indent=1) + "\n"
    (path / "tokenizer_config.json").write_text(said, "utf-8")
    return text.load(path)
