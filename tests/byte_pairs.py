"""Small byte-pair tokenizers in checkpoint folders, trained on the spot."""

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


def train(
    path: str | Path, texts: Iterable[str], *, vocab_size: int, chat: bool = True
) -> text.Tokenizer:
    """A byte-pair tokenizer trained on texts, written to a directory.

    Pairs are of bytes, so every text is decoded exactly. The same texts give the same
    files.

    Args:
        path: the directory, created if it does not exist.
        texts: the training texts.
        vocab_size: number of ids, control tokens included, at least 259; fewer result
            where the texts repeat too little.
        chat: whether to write a chat template, of `<|im_start|>` turns that end in
            `<|im_end|>`; otherwise `<|endoftext|>` ends a completion.

    Returns:
        The tokenizer; `<|endoftext|>` is its pad.

    Raises:
        ValueError: `vocab_size` is too small, or the directory cannot be written.
    """
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers, trainers

    path, least = Path(path), 256 + len((PAD, START, END))
    if vocab_size < least:
        raise ValueError(
            f"vocab_size={vocab_size} cannot hold all bytes and the control tokens; "
            f"set it to at least {least}."
        )
    core = Core(models.BPE())
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
    written = {"tokenizer.json": core.to_str(pretty=True)}
    written["tokenizer_config.json"] = json.dumps(config, indent=1) + "\n"
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name, content in written.items():
            (path / name).write_text(content, "utf-8")
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror}; name another directory."
        ) from error
    return text.load(path)
