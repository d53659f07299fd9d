"""Checkpoint folders of strangers: each answered in one sentence, and soon.

One folder that is as it should be, and what may be wrong with it: a name, a change of
the folder, and words that the sentence must hold.
"""

import json
import os
import resource
import shutil
import time
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import real
import tiny
from kinds import one_of_each_first
from outputs import message
from safetensors.numpy import load_file, save_file

from curax import train
from curax.models import families, pretrained, tensors
from curax.models.export import export, write_new
from curax.settings import files
from curax.tasks import byte_pairs, child, text

GOLDEN = Path(__file__).parent / "golden"
SECONDS = 5.0  # in which a folder is answered, of processor time
CONFIG, TOKENIZER, WORDS = "config.json", "tokenizer.json", "tokenizer_config.json"
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
EMBED = tensors.EMBED
TURN = [{"role": "user", "content": "the end"}]
VOCAB = 300
MAP = "must name a .safetensors file beside it"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder as it should be: a model in two files, a tokenizer, a chat template."""
    folder = tmp_path_factory.mktemp("good") / "model"
    model = tiny.model(vocab_size=VOCAB)
    options = {"head_dim": 8, "rope_theta": 1e4, "norm_eps": 1e-6}
    write_new(folder, tiny.random_params(model), **options)
    checkpoints.cut(folder, 2)
    byte_pairs.tokenizer(folder, ["the end of the end"] * 9, vocab_size=VOCAB)
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


def use(folder):
    """All that is done with a checkpoint before anything is trained."""
    tokenizer = text.load(folder)
    if tokenizer.template is not None:
        tokenizer.chat(TURN)
    pretrained.check_weights(str(folder))
    return pretrained.model(path=str(folder), vocab_size=tokenizer.size).load(None)


# ----- changes of a folder


def change(act):
    """A maker of changes: it takes what `act` takes, but for the folder."""
    return lambda *args, **named: lambda folder: act(folder, *args, **named)


@change
def sets(folder, file, **changes):
    content = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps(content))


def config(**changes):
    return sets(CONFIG, **changes)


def rope(**changes):
    return config(rope_parameters={"rope_type": "default", "rope_theta": 1e4} | changes)


def llama3(**changes):
    own = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    window = {"original_max_position_embeddings": 64}
    return rope(rope_type="llama3", **(own | window | changes))


@change
def says(folder, file, content):
    data = content if isinstance(content, bytes) else content.encode()
    (folder / file).write_bytes(data)


def field(name, text):
    """The config with a field of this text, which Python would not write."""
    return says(CONFIG, f'{{"architectures": ["Qwen3ForCausalLM"], "{name}": {text}}}')


@change
def is_pipe(folder, file):
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)


@change
def is_folder(folder, file):
    (folder / file).unlink(missing_ok=True)
    (folder / file).mkdir()


@change
def is_link(folder, file, to):
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to(to)


@change
def is_sparse(folder, file, size):
    """Many bytes that take no room."""
    with open(folder / file, "wb") as opened:
        opened.truncate(size)


@change
def places(folder, **changes):
    index = json.loads((folder / tensors.INDEX).read_text())
    index["weight_map"] |= changes
    (folder / tensors.INDEX).write_text(json.dumps(index))


def place(file):
    return places(**{EMBED: file})


@change
def head(folder, change_of):
    """The first file with another header."""
    file = folder / FIRST
    begin, entries = tensors.header(file)
    entries.pop("__metadata__", None)
    said = change_of(entries)
    said = said if isinstance(said, str) else json.dumps(said)
    rest = file.read_bytes()[len(begin) :]
    data = said.encode()
    file.write_bytes(len(data).to_bytes(8, "little") + data + rest)


def entry(**changes):
    """Fields of a tensor in the header of the first file."""
    return head(lambda entries: entries | {EMBED: entries[EMBED] | changes})


def offsets(shift):
    def of(entries):
        start, stop = entries[EMBED]["data_offsets"]
        entries[EMBED]["data_offsets"] = [start + shift, stop + shift]
        return entries

    return of


@change
def cut(folder, file, count):
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[:count])


@change
def tensor(folder, name, value):
    inside = load_file(folder / FIRST)
    assert name in inside
    save_file(inside | {name: value}, folder / FIRST)


def both(folder):
    """A tensor in two files."""
    inside = load_file(folder / SECOND)
    save_file(inside | {EMBED: np.ones((VOCAB, 16), np.float32)}, folder / SECOND)


def outside(folder):
    """A file of tensors that is not in the folder."""
    (folder / FIRST).rename(folder.parent / FIRST)
    place(f"../{FIRST}")(folder)


def no_weights(folder):
    """A config of many layers and nothing else."""
    for file in (FIRST, SECOND, tensors.INDEX):
        (folder / file).unlink()
    config(num_hidden_layers=1024)(folder)


def gap(folder):
    """Tensors of the first and of the last of many layers."""
    config(num_hidden_layers=1024)(folder)
    for file in (FIRST, SECOND):
        inside = load_file(folder / file)
        inside = {n.replace("layers.1.", "layers.1023."): x for n, x in inside.items()}
        save_file(inside, folder / file)
    index = (folder / tensors.INDEX).read_text()
    says(tensors.INDEX, index.replace("layers.1.", "layers.1023."))(folder)


def chat(template):
    return sets(WORDS, chat_template=template)


@change
def grows(folder, text, times, *, part="normalizer"):
    """A tokenizer that makes a thousand of each such text, and of each of these."""
    own = json.loads((folder / TOKENIZER).read_text())[part]
    rule = {"type": "Replace", "pattern": {"String": text}, "content": text * 1000}
    every = [own] * bool(own) + [rule] * times
    steps = {"type": "Sequence", f"{part}s": every}
    sets(TOKENIZER, **{part: steps})(folder)


@change
def pieces(folder, *, later=None, **changes):
    """A sentencepiece model with a config of added tokens."""
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    for piece, kind in (("<unk>", 2), ("a", 1), ("b", 1)):
        model.pieces.add(piece=piece, score=0.0, type=kind)
    (folder / TOKENIZER).unlink()
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    (folder / WORDS).write_text(json.dumps(changes))
    if later is not None:
        (folder / "added_tokens.json").write_text(json.dumps(later))


DEEP = "[" * 100_000 + "]" * 100_000
LESS_DEEP = "[" * 400 + "]" * 400
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)
POSITIVE = "must be a positive integer"
MEMORY = "more than 512 MiB"
MANY = f"fails with MemoryError: {MEMORY}"
DAMAGED = "is no complete safetensors file"

FOLDERS = {
    # config.json: sizes
    "layers without end": (config(num_hidden_layers=10**9), "at most 1024"),
    "as many layers as allowed": (config(num_hidden_layers=1024), "lacks model.layers"),
    "many layers and no weights": (no_weights, "holds neither model.safetensors nor"),
    "many layers with a gap": (gap, "lacks model.layers.1."),
    "layers below 0": (config(num_hidden_layers=-1), POSITIVE),
    "layers as a number": (config(num_hidden_layers=2.0), POSITIVE),
    "layers as true": (config(num_hidden_layers=True), POSITIVE),
    "layers as a list": (config(num_hidden_layers=[2]), POSITIVE),
    "a width without end": (config(hidden_size=10**12), "hidden_size is 1000000000000"),
    "a width of another model": (config(hidden_size=32), "has shape [300, 16]"),
    "a large width": (config(hidden_size=2**20), "has shape [300, 16], but [300, 1048"),
    "no width": (config(hidden_size=None), "hidden_size is null"),
    "a large vocabulary": (config(vocab_size=2**24), "has shape [300, 16]"),
    "a vocabulary without end": (config(vocab_size=10**30), "at most 16777216"),
    "a small vocabulary": (config(vocab_size=8), "has shape [300, 16], but [8, 16]"),
    "heads without end": (config(num_attention_heads=10**9), "at most 16384"),
    "heads of another model": (
        config(num_attention_heads=4),
        "o_proj.weight has shape [16, 16], but [16, 32]",
    ),
    "heads that are not shared out": (
        config(num_key_value_heads=3),
        "no multiple of num_key_value_heads, 3",
    ),
    "heads as an object": (config(num_attention_heads={}), POSITIVE),
    "an odd head": (config(head_dim=7), "must be even"),
    "a head without end": (config(head_dim=10**9), "at most 16384"),
    "layers behind a gate without end": (config(intermediate_size=10**15), "at most 4"),
    "of another model": (
        config(intermediate_size=2**22),
        "[16, 24], but [16, 4194304]",
    ),
    # config.json: numbers
    "eps NaN": (field("rms_norm_eps", "NaN"), "it holds NaN"),
    "eps infinite": (field("rms_norm_eps", "-Infinity"), "it holds -Infinity"),
    "eps too large for a number": (config(rms_norm_eps=1e300), "from 1e-20 to 0.1"),
    "eps read as infinite": (
        lambda folder: says(
            CONFIG, (folder / CONFIG).read_text().replace("1e-06", "1e999")
        )(folder),
        "rms_norm_eps is Infinity, but must be a number from 1e-20 to 0.1",
    ),
    "eps 0": (config(rms_norm_eps=0), "must be a positive number"),
    "eps too small": (config(rms_norm_eps=1e-50), "from 1e-20 to 0.1"),
    "eps as text": (config(rms_norm_eps="1e-6"), "must be a positive number"),
    "eps null": (config(rms_norm_eps=None), "rms_norm_eps is null"),
    "theta of 400 digits": (rope(rope_theta=10**400), "rope_theta is 1000"),
    "theta of 5000 digits": (field("rope_theta", "1" + "0" * 5000), "4300 digits"),
    "theta infinite": (rope(rope_theta=1e308), "from 1 to 1e+15"),
    "theta below 1": (rope(rope_theta=1e-9), "from 1 to 1e+15"),
    "theta 0": (rope(rope_theta=0), "must be a positive number"),
    "theta in a list": (rope(rope_theta=[1e4]), "must be a positive number"),
    "rope a list": (config(rope_parameters=[1]), "rope_parameters is [1]"),
    "rope a text": (config(rope_scaling="llama3"), 'rope_scaling is "llama3"'),
    "rope false": (config(rope_scaling=False), "rope_scaling is false"),
    "rope of a type in a list": (rope(rope_type=["default"]), "of rope_type"),
    "rope in part": (rope(partial_rotary_factor=True), "without a partial"),
    "a factor without end": (llama3(factor=1e300), "from 1e-06 to 1e+06"),
    "a window that is no integer": (
        llama3(original_max_position_embeddings=0.5),
        "rope_parameters.original_max_position_embeddings is 0.5",
    ),
    "a window as a list": (
        llama3(original_max_position_embeddings=[8192]),
        "rope_parameters.original_max_position_embeddings is [8192]",
    ),
    # config.json: the rest
    "tied as text": (config(tie_word_embeddings="false"), 'is "false", but must be tr'),
    "tied as 1": (config(tie_word_embeddings=1), "must be true or false"),
    "architectures nested": (config(architectures=[["Qwen3ForCausalLM"]]), "architect"),
    "architectures an object": (config(architectures={}), "architectures is {}"),
    "architectures a text": (config(architectures="Qwen3ForCausalLM"), "architectures"),
    "another model type": (config(model_type="mistral"), 'must be "qwen3"'),
    "a model type in a list": (config(model_type=["qwen3"]), 'must be "qwen3"'),
    "layer types a number": (config(layer_types=5), "layer_types is 5"),
    "layer types an object": (config(layer_types={"a": 1}), "must be a list"),
    "layer types nested": (config(layer_types=[[], []]), "full_attention"),
    "layer types of other layers": (config(layer_types=["full_attention"]), "2 layers"),
    "a window as text": (config(use_sliding_window="no"), "must be true or false"),
    "a window from a text on": (
        config(use_sliding_window=True, sliding_window=4, max_window_layers="0"),
        'max_window_layers is "0"',
    ),
    "an activation in a list": (config(hidden_act=["silu"]), "hidden_act is"),
    "a bias as text": (config(attention_bias="false"), "attention_bias is"),
    "dropout false": (config(attention_dropout=False), "attention_dropout is false"),
    "a long value": (config(hidden_act="x" * 10**6), "xxx ..., but must be"),
    # config.json: the file
    "deep JSON": (field("a", DEEP), "nested"),
    "less deep JSON": (field("a", LESS_DEEP), "nested more than 64"),
    "a list for a config": (says(CONFIG, "[]"), "it holds no object"),
    "an empty config": (says(CONFIG, ""), "cannot be read"),
    "a config of bytes": (says(CONFIG, b'{"a": "\xff"}'), "can't decode byte 0xff"),
    "a field twice": (field("architectures", "[]"), 'names "architectures" twice'),
    "a config of 1 GiB": (is_sparse(CONFIG, 2**30), "more than the 16777216 bytes"),
    "a pipe for a config": (is_pipe(CONFIG), "a named pipe"),
    "a folder for a config": (is_folder(CONFIG), "a folder, not a file"),
    "a config without end": (is_link(CONFIG, "/dev/zero"), "a device, not a file"),
    "a link to itself": (is_link("generation_config.json", "."), "a folder"),
    # the index
    "places a list": (sets(tensors.INDEX, weight_map=[1]), "weight_map is [1]"),
    "places null": (sets(tensors.INDEX, weight_map=None), "weight_map is null"),
    "places in numbers": (place(1), f"in 1, but {MAP}"),
    "places in lists": (place([FIRST]), MAP),
    "an index that is a list": (says(tensors.INDEX, "[]"), "no readable weight_map"),
    "a deep index": (says(tensors.INDEX, '{"weight_map":' * 99_999), "nested"),
    "a pipe for an index": (is_pipe(tensors.INDEX), "a named pipe"),
    "a file above": (outside, MAP),
    "a file at the root": (place("/etc/passwd"), MAP),
    "a tensor at the root": (place("/tmp/a.safetensors"), MAP),
    "a file in a folder": (place("a/../b.safetensors"), MAP),
    "a file of Windows": (place("..\\b.safetensors"), MAP),
    "a file without a name": (place(""), MAP),
    "a file with a line in its name": (place("a\nb.safetensors"), MAP),
    "a file of another kind": (place("config.json"), MAP),
    "a shard that is not there": (place("a.safetensors"), "is not there"),
    "a link to nothing": (is_link(FIRST, "nothing"), "is not there"),
    "a tensor placed twice": (
        says(tensors.INDEX, f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}'),
        'names "a" twice',
    ),
    "a tensor in two files": (both, f"holds {EMBED}, which {tensors.INDEX} places in"),
    "a tensor with a line in its name": (
        places(**{"a\nb": FIRST}),
        f'weight_map places "a\\nb" in "{FIRST}"',
    ),
    # files of tensors
    "a tensor that moves the cursor": (
        head(lambda e: {"\x1b[2J" * (n == EMBED) or n: v for n, v in e.items()}),
        r'names a tensor "\u001b[2J"',
    ),
    "a pipe for tensors": (is_pipe(FIRST), "a named pipe"),
    "a pipe for all tensors": (is_pipe(tensors.SINGLE), "a named pipe"),
    "a folder for tensors": (is_folder(FIRST), "a folder, not a file"),
    "tensors of a device": (is_link(FIRST, "/dev/zero"), "a device, not a file"),
    "an empty file": (says(FIRST, ""), "its header is longer than the file"),
    "a short file": (says(FIRST, "abc"), "its header is longer than the file"),
    "a file cut in its header": (cut(FIRST, 100), "its header is longer than the file"),
    "a file cut by a byte": (cut(FIRST, -1), DAMAGED),
    "a header longer than all": (says(FIRST, b"\xff" * 64), "longer than the file"),
    "a header of 1 GiB": (
        lambda folder: (
            is_sparse(FIRST, 2**31)(folder),
            os.pwrite(
                number := os.open(folder / FIRST, os.O_WRONLY),
                (2**30).to_bytes(8, "little"),
                0,
            ),
            os.close(number),
        ),
        "its header has 1073741824 bytes",
    ),
    "a header that is no JSON": (head(lambda _: "{"), "no complete safetensors file"),
    "a header that is a list": (head(lambda _: "[]"), "its header is no object"),
    "a deep header": (head(lambda _: DEEP), "nested"),
    "a tensor twice": (
        head(lambda e: json.dumps(e)[:-1] + f', "{EMBED}": {json.dumps(e[EMBED])}}}'),
        "twice",
    ),
    "tensors over each other": (head(offsets(-4)), DAMAGED),
    "tensors behind the end": (head(offsets(2**40)), DAMAGED),
    "a tensor of no dtype": (entry(dtype="F31"), DAMAGED),
    "a tensor of integers": (
        tensor(EMBED, np.ones((VOCAB, 16), np.int32)),
        "has dtype I32",
    ),
    "a shape below 0": (entry(shape=[-VOCAB, -16]), DAMAGED),
    "a shape without end": (entry(shape=[2**63, 2**63]), DAMAGED),
    "a shape of another file": (
        tensor(EMBED, np.ones((16, VOCAB), np.float32)),
        "has shape [16, 300]",
    ),
    # files of the tokenizer
    "a pipe for a tokenizer": (is_pipe(TOKENIZER), "a named pipe"),
    "a folder for a tokenizer": (is_folder(TOKENIZER), "a folder, not a file"),
    "a tokenizer of 1 GiB": (is_sparse(TOKENIZER, 2**30), "more than the 268435456"),
    "a deep tokenizer": (says(TOKENIZER, '{"a":' + DEEP + "}"), "cannot be read"),
    "a tokenizer that is a list": (says(TOKENIZER, "[]"), "cannot be read"),
    "a tokenizer with a far id": (
        sets(
            TOKENIZER,
            added_tokens=[],
            model={"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []},
        ),
        "has the id 4294967295, but all must be below 16777216",
    ),
    "a tokenizer without its unknown word": (
        sets(
            TOKENIZER,
            added_tokens=[],
            model={
                "type": "WordPiece",
                "vocab": {"a": 0},
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 9,
            },
        ),
        "tokenizer.json cannot be read: Exception",
    ),
    "a letter that grows": (grows("e", 4), MANY),
    "an accent that grows": (grows("é", 4), MANY),
    "a word that grows": (grows("strange", 4), MANY),
    "a letter that grows when it is decoded": (
        grows("e", 4, part="decoder"),
        MANY,
    ),
    "a letter that grows a little": (
        grows("e", 1),
        "makes a text of 64001 characters of one of 65",
    ),
    "a text that is put before all": (
        sets(TOKENIZER, normalizer={"type": "Prepend", "prepend": "e" * 10**6}),
        "makes a text of 1000065 characters",
    ),
    "a pipe for a model of pieces": (
        lambda folder: (
            (folder / TOKENIZER).unlink(),
            is_pipe("tokenizer.model")(folder),
        ),
        "a named pipe",
    ),
    "a pipe for its config": (is_pipe(WORDS), "a named pipe"),
    "an end in a list": (sets(WORDS, eos_token=["a"]), "eos_token=['a'] is no text"),
    "a deep config of it": (says(WORDS, '{"a":' * 99_999), "nested"),
    "added tokens in a list": (
        pieces(added_tokens_decoder=[1]),
        "added_tokens_decoder=[1] must hold objects",
    ),
    "an added token without text": (
        pieces(added_tokens_decoder={"5": {"special": True}}),
        "must hold objects with a text as content",
    ),
    "an added token that is special as text": (
        pieces(added_tokens_decoder={"5": {"content": "<x>", "special": "false"}}),
        "true or false as special",
    ),
    "a first token as text": (
        pieces(bos_token="a", add_bos_token="false"),
        "add_bos_token='false' must be true or false",
    ),
    "an added token of no number": (
        pieces(added_tokens_decoder={"x": {"content": "<x>"}}),
        "by their ids",
    ),
    "an added token of a list": (pieces(later={"<x>": [7]}), "'<x>' has [7] for an id"),
    "an added token below 0": (pieces(later={"<x>": -7}), "'<x>' has -7 for an id"),
    "special tokens in a number": (
        pieces(additional_special_tokens=7),
        "additional_special_tokens=7 must be a list of texts",
    ),
    "a far added token": (pieces(later={"<x>": 10**12}), "has the id 1000000000000"),
    "ends in a number": (config(eos_token_id=1e9), "eos_token_id=1000000000.0 must"),
    "ends that are far": (
        says("generation_config.json", '{"eos_token_id": [1000000000000]}'),
        "which are below",
    ),
    "ends of a deep list": (
        says("generation_config.json", '{"eos_token_id": ' + DEEP + "}"),
        "nested",
    ),
    # chat templates
    "a template in numbers": (chat([1, 2]), "chat_template must be a text"),
    "a template in lists": (
        chat([{"name": ["default"], "template": "x"}]),
        "chat_template must be a text",
    ),
    "a pipe for a template": (is_pipe("chat_template.jinja"), "a named pipe"),
    "a template of 1 GiB": (is_sparse("chat_template.jinja", 2**30), "more than the"),
    "loops": (chat(LOOPS), "s of processor time"),
    "a power": (chat("{% set x = 9 ** 99999999 %}"), "s of processor time"),
    "much code": (chat("{{ 1 }}" * 10**6), "s of processor time"),
    "a long text": (chat("{{ 'a' * 2000000000 }}"), MEMORY),
    "a long list": (chat("{{ ([0] * 2000000000) | length }}"), MEMORY),
    "a text that doubles": (chat(DOUBLING), "more than"),
    "a wide number": (chat("{{ '%2000000000d' % 1 }}"), MEMORY),
    "a wide format": (chat("{{ '{:>2000000000}'.format(1) }}"), MEMORY),
    "a wide filter": (chat("{{ '%2000000000d' | format(1) }}"), MEMORY),
    "a wide middle": (chat("{{ 'a' | center(2000000000) }}"), MEMORY),
    "a wide left": (chat("{{ 'a'.ljust(2000000000) }}"), MEMORY),
    "a wide indent": (chat("{{ messages | tojson(indent=2000000000) }}"), MEMORY),
    "replacements": (chat("{{ ('a' * 99999) | replace('a', 'b' * 99999) }}"), MEMORY),
    "much output": (
        chat("{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}"),
        "more than 1048576 characters",
    ),
    "a macro in itself": (
        chat("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
        "RecursionError",
    ),
    "deep brackets": (chat("{{ " + "(" * 99_999 + ")" * 99_999), "RecursionError"),
    "a complaint that moves the cursor": (
        chat("{{ raise_exception('\x1b[2J') }}"),
        "TemplateError: ?[2J",
    ),
    "a long complaint": (chat("{{ raise_exception('x ' * 999999) }}"), "Template"),
}


# Every other one; what takes all time or memory stays beside commands.
STAY = {"a letter that grows a little", "a word that grows", "much code"}
LONG = {"a letter that grows", "an accent that grows", "loops", "a power"}
LONG |= {*[*FOLDERS][1::2]} - STAY


@pytest.mark.parametrize("name", one_of_each_first(FOLDERS, FOLDERS.keys() - LONG))
def test_a_folder_that_is_not_as_it_should_be_is_answered(name, folder, tmp_path):
    change, words = FOLDERS[name]
    change(folder)
    began = time.process_time()
    said = message(ValueError, use, folder)
    took = time.process_time() - began
    assert words in said
    assert str(tmp_path) in said
    assert said.isprintable()
    assert said.endswith(".")
    assert len(said) < 1500
    assert took < SECONDS


def test_the_folder_that_they_are_made_of_is_as_it_should_be(folder):
    assert use(folder)["embed"].shape == (VOCAB, 16)
    assert len(FOLDERS) > 60


def refusals(use):
    """What is said, if anything; no other error passes."""
    try:
        use()
    except ValueError as error:
        return [str(error)]
    return []


NASTY = [None, True, False, 0, -1, 1.5, 1e300, 10**400, "", "false", "\n", [], [[]]]
NASTY += [[1], ["a"], {}, {"a": {}}, [None], "\ud800", "x" * 999]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_no_value_of_any_field_is_more_than_a_sentence(name, tmp_path):
    golden = json.loads((GOLDEN / name / CONFIG).read_text())
    rope = golden.get("rope_parameters") or {"rope_type": "default"}
    more = [*families.INERT, *(field for field, _ in families.SIZES.values())]
    more += ["sliding_window", "layer_types", "use_sliding_window"]
    more += ["max_window_layers", "rope_scaling", "rope_theta"]
    ropes = dict.fromkeys([*rope, *families.SCALING, "type", "partial_rotary_factor"])
    changed = [golden | {field: x} for field in {*golden, *more} for x in NASTY]
    changed += [
        golden | {"rope_parameters": rope | {field: x}}
        for field in ropes
        for x in NASTY
    ]
    sliding = {"use_sliding_window": True, "layer_types": None}
    changed += [golden | sliding | {"max_window_layers": x} for x in NASTY]
    file, said = tmp_path / CONFIG, []
    for content in changed:
        file.write_text(json.dumps(content))
        said += refusals(lambda: families.check_heads(file, families.read(file)))
    assert len(said) > len(changed) / 3
    assert all(one.startswith(f"{file}") and one.endswith(".") for one in said)
    assert not any("\n" in one for one in said)


@pytest.mark.parametrize(
    "file", [WORDS, "special_tokens_map.json", "generation_config.json"]
)
def test_no_value_of_a_tokenizer_is_more_than_a_sentence(file, folder):
    fields = ["bos_token", "eos_token", "pad_token", "unk_token", "eos_token_id"]
    fields += ["chat_template", "added_tokens_decoder", "additional_special_tokens"]
    fields += ["add_bos_token"]
    pieces()(folder)
    said = []
    for content in [{field: value} for field in fields for value in NASTY] + NASTY:
        (folder / file).write_text(json.dumps(content))
        said += refusals(lambda: text.load(folder))
    assert len(said) > len(NASTY) / 2
    assert all(one.startswith(f"{folder}") and one.endswith(".") for one in said)
    assert not any("\n" in one for one in said)


def test_links_of_a_cache_are_followed(good, tmp_path):
    """A cache has files by their digests, and folders of links to them."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(good.iterdir())):
        shutil.copy(file, blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    params = use(snapshot)
    export(snapshot, params, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        file.name for file in good.iterdir()
    }
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())


def test_only_what_belongs_to_a_checkpoint_is_copied_with_it(folder, tmp_path):
    params, out = use(folder), tmp_path / "out"
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("a")
    (folder / "notes" / "self").symlink_to("..")
    (folder / "b.txt").symlink_to("notes/a.txt")
    export(folder, params, out)
    got = {str(file.relative_to(out)) for file in out.rglob("*")}
    want = {*(file.name for file in folder.iterdir()), "notes/a.txt"}
    assert got == want
    secret = tmp_path / "secret"
    secret.write_text("secret")
    is_link("README.md", secret)(folder)
    with pytest.raises(ValueError, match=r"README\.md is a link that leads out of the"):
        export(folder, params, tmp_path / "other")
    is_pipe("README.md")(folder)
    with pytest.raises(ValueError, match=r"README\.md is no file that could be copied"):
        export(folder, params, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_weights_beyond_the_memory_are_named(folder):
    file = folder / FIRST
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    whole = 2**36
    header["more"] = {"dtype": "U8", "shape": [whole], "data_offsets": [0, 0]}
    end = max(one["data_offsets"][1] for one in header.values() if "dtype" in one)
    header["more"]["data_offsets"] = [end, end + whole]
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end + whole)
    most = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**35
    resource.setrlimit(resource.RLIMIT_AS, (limit, most[1]))
    try:
        with pytest.raises(MemoryError, match=f"/{FIRST} has 64 GiB$"):
            tensors.held(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, most)


@pytest.mark.parametrize(
    "name",
    ["layers without end", "many layers and no weights", "loops", "a file above"],
)
def test_a_command_says_so_and_writes_nothing(name, folder, tmp_path, capsys):
    change, words = FOLDERS[name]
    change(folder)
    problems = tmp_path / "problems.jsonl"
    problems.write_text(
        "".join(f'{{"question": "the {i}", "answer": "1"}}\n' for i in range(4))
    )
    there = {file: file.lstat().st_mtime_ns for file in tmp_path.rglob("*")}
    command = ["--config", str(real.FILE), "--workdir", str(tmp_path / "run"), "--set"]
    command += [f"model.path={folder}", f"task.train={problems}", "task.held_out=none"]
    command += ["task.max_trace_tokens=0", "warm_start=none", "evaluation.prompts=1"]
    assert train.main(command) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert {file: file.lstat().st_mtime_ns for file in tmp_path.rglob("*")} == there


def test_a_child_process_that_was_killed_is_replaced():
    own = child.Child()
    assert own.ask("render", "{{ a }}", {"a": 1}) == {"text": "1"}
    own._process.kill()  # pyright: ignore[reportOptionalMemberAccess]
    assert own.ask("render", "{{ a }}", {"a": 2}) == {"text": "2"}
    assert own.end() is not None
    assert own.end() is None


def test_a_template_cannot_change_what_the_next_one_sees():
    for _ in range(2):
        counts = child.ask("render", "{% set x = (x or 0) + 1 %}{{ x }}", {})
        assert counts == {"text": "1"}
    changes = child.ask("render", "{{ messages.append(1) }}", {"messages": []})
    assert changes["error"].startswith("SecurityError")


def test_an_option_that_json_cannot_hold_is_named(good):
    with pytest.raises(ValueError, match=r"^options: Object of type set is not JSON"):
        text.load(good).chat(TURN, options={"tools": {1}})


@pytest.mark.parametrize("value", [{}, {"a": [{}, {"b": [1, "[" * 99]}]}])
def test_what_json_holds_is_read(value):
    assert files.json_of(json.dumps(value).encode()) == value
