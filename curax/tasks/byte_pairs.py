"""Tokenizers of byte pairs, learnt from texts, in the files of Hugging Face."""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from curax.tasks import text
from curax.tasks.tokenizer_backends import SPACE

LONGEST = 2**20  # bytes of a text that SentencePiece learns from
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
    return _written(path, core, chat=chat)


def pieces(path: Path, texts: Iterable[str], *, vocab_size: int) -> text.Tokenizer:
    """Write SentencePiece's byte pairs, learnt from texts, and load them.

    Pieces of all characters that texts have, a space among them, and bytes for others;
    each digit is a token, and nothing is normalised. The same texts give the same
    files.

    Args:
        path: folder that gets tokenizer.model, the tokenizer.json made from it, which
            gives the same ids, and tokenizer_config.json with a chat template.
        texts: to learn from, of `LONGEST` bytes at most; longer ones are passed over.
        vocab_size: ids at most; bytes, control tokens and the unknown take 260.

    Raises:
        ImportError: `tokenizers` is not installed.
    """
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
    from tokenizers import Tokenizer, decoders, models, normalizers

    SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=(model := io.BytesIO()),
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        byte_fallback=True,
        max_sentence_length=LONGEST,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        control_symbols=[PAD, START, END],
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        num_threads=1,  # the same files each time
        minloglevel=2,
    )
    learnt = SentencePieceProcessor(model_proto=model.getvalue())
    ids = {learnt.id_to_piece(i): i for i in range(len(learnt))}
    merges = [
        (piece[:cut], piece[cut:])
        for piece, i in ids.items()
        if not learnt.is_control(i) and not learnt.is_unknown(i)
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    unknown = learnt.id_to_piece(0)
    core = Tokenizer(
        models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    core.normalizer = normalizers.Replace(" ", SPACE)
    core.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.add_special_tokens([unknown, PAD, START, END])
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.model").write_bytes(model.getvalue())
    return _written(path, core)


def _written(path: Path, core: Any, *, chat: bool = True) -> text.Tokenizer:
    """A tokenizer of `tokenizers`, written with its config and loaded."""
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
