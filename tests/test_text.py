"""Text as tokens: only the template makes control tokens, and all text comes back."""

import io
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curax.tasks import byte_pairs, text
from curax.tasks.tokenizer_backends import PRIVATE_USE, SPACE

THINK = ("<think>", "</think>")
TEXTS = [
    "what is 2 + 2 ?",
    "the end of the chain",
    "think  twice\n\nand start again",
    "im_start im_end endoftext",
    "你好 🙂 naïve",
] * 20
INST = (
    "{% for m in messages %}{{ bos_token }}[INST] {{ m.content }} [/INST]{% endfor %}"
)


# ----- checkpoints of every kind


def chatml(path):
    byte_pairs.tokenizer(path, TEXTS, vocab_size=320)


def thinking(path):
    """Added tokens that are not special, one inside another, and runs of spaces."""
    from tokenizers import AddedToken, Tokenizer

    byte_pairs.tokenizer(path, TEXTS, vocab_size=300)
    core = Tokenizer.from_file(str(path / "tokenizer.json"))
    added = [*THINK, "</think><|im_end|>", "im_end", "  ", "\n\n"]
    core.add_tokens([AddedToken(word, normalized=False) for word in added])
    core.save(str(path / "tokenizer.json"))


def normalized(path):
    """Wide letters become narrow ones before control tokens are looked for."""
    from tokenizers import AddedToken, Tokenizer, normalizers

    byte_pairs.tokenizer(path, TEXTS, vocab_size=300)
    core = Tokenizer.from_file(str(path / "tokenizer.json"))
    core.normalizer = normalizers.NFKC()
    core.add_tokens([AddedToken(word, normalized=True) for word in THINK])
    core.save(str(path / "tokenizer.json"))


def words_and_bytes(path, *, before, opening="<s> $A"):
    """Pairs of characters, else bytes; a space is put before a text."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from tokenizers import pre_tokenizers as pre

    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    vocab += [SPACE, *"abcdehkinrst<>/", "th", "in", f"{SPACE}th", "in</s>"]
    core = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(vocab)},
            [("t", "h"), ("i", "n"), (SPACE, "th")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    core.add_special_tokens(vocab[:3])
    if before == "prepend":
        steps = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        core.normalizer = normalizers.Sequence(steps)
    else:
        core.pre_tokenizer = pre.Sequence(
            [pre.Metaspace(prepend_scheme=before, split=False)]
        )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback()]
    steps += [decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    core.post_processor = processors.TemplateProcessing(
        single=opening, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    write(path, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    core.save(str(path / "tokenizer.json"))


def first(path):
    words_and_bytes(path, before="first")


def always(path):
    words_and_bytes(path, before="always", opening="<s> $A </s>")


def prepend(path):
    words_and_bytes(path, before="prepend")


def unigram(path):
    """All tokens are in the model, which knows not every character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = [("<unk>", 0.0), ("</s>", 0.0), ("the", -1.0)]
    vocab += [(letter, -2.0) for letter in f"{SPACE}abcdehinkst<>/|_"]
    core = Tokenizer(models.Unigram(vocab, unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    core.decoder = decoders.Metaspace(prepend_scheme="never")
    core.add_special_tokens(["<unk>", "</s>"])
    write(path, eos_token="</s>", unk_token="<unk>")
    core.save(str(path / "tokenizer.json"))


def sentencepiece_model(*, space_before, symbols=()):
    from sentencepiece import SentencePieceTrainer

    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=(model := io.BytesIO()),
        model_type="bpe",
        vocab_size=330,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=space_before,
        user_defined_symbols=[*symbols, "\n"],
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def pieces(path):
    symbols = ["<|im_start|>", "<|im_end|>", "im_end", "<|im_end|>\n", *THINK]
    model = sentencepiece_model(space_before=False, symbols=symbols)
    write(path, eos_token="<|im_end|>", chat_template=byte_pairs.TURNS)
    (path / "tokenizer.model").write_bytes(model)


def pieces_and_more(path):
    model = sentencepiece_model(space_before=True, symbols=["[INST]", "[/INST]"])
    write(
        path,
        bos_token="<s>",
        eos_token={"content": "<|im_end|>"},
        chat_template=INST,
        added_tokens_decoder={"400": {"content": "<|im_end|>", "special": True}},
    )
    (path / "added_tokens.json").write_text('{"<think>": 401}')
    (path / "some.model").write_bytes(model)


def write(path, **config):
    path.mkdir(exist_ok=True)
    config = {"chat_template": INST} | config
    (path / "tokenizer_config.json").write_text(json.dumps(config))


EXACT = [chatml, thinking, prepend, pieces, pieces_and_more]
KINDS = [*EXACT, normalized, first, always, unigram]


@pytest.fixture(scope="module")
def get(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            path = tmp_path_factory.mktemp("checkpoint")
            kind(path)
            made[kind] = text.load(path)
        return made[kind]

    return get


for_every_kind = pytest.mark.parametrize("kind", KINDS)
WORDS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *THINK, "</think><|im_end|>"]
WORDS += ["im_end", "<s>", "</s>", "<unk>", "[INST]", "[/INST]", "  ", "\n\n"]
parts = st.sampled_from(WORDS).flatmap(
    lambda word: st.tuples(
        st.integers(0, len(word)), st.integers(0, len(word)), st.just(word)
    )
)
inside = parts.map(lambda part: part[2][min(part[:2]) : max(part[:2])])
others = st.sampled_from(["<", "|>", " ", "the", "\n", "你", "🙂", "\U000f0000", "é"])
mixed = st.lists(st.sampled_from(WORDS) | inside | others, max_size=8).map("".join)
nested = st.builds(
    lambda outer, inner, at: (
        outer[: at % len(outer)] + inner + outer[at % len(outer) :]
    ),
    st.sampled_from(WORDS),
    mixed,
    st.integers(0, 20),
)
tricky = mixed | nested | st.text(max_size=20)


# ----- text is only text


def controls(tokenizer, ids):
    """The control tokens among ids, but for what unknown characters become."""
    return [i for i in ids if i in tokenizer.backend.forbidden]


@for_every_kind
@given(said=tricky)
def test_no_text_holds_a_control_token(get, kind, said):
    tokenizer = get(kind)
    ids = tokenizer.encode(said)
    assert not controls(tokenizer, ids)
    assert all(0 <= i < tokenizer.size for i in ids)


@for_every_kind
@given(said=tricky)
def test_in_a_chat_only_the_template_makes_control_tokens(get, kind, said):
    tokenizer = get(kind)
    ids, plain = (
        tokenizer.chat([{"role": "user", "content": content}])
        for content in (said, "the")
    )
    assert controls(tokenizer, ids) == controls(tokenizer, plain)


@pytest.mark.parametrize("kind", EXACT)
@given(said=tricky)
def test_what_is_encoded_comes_back_exactly(get, kind, said):
    said = said.replace(SPACE, "")  # to sentencepiece, that is a space
    tokenizer = get(kind)
    assert tokenizer.decode(tokenizer.encode(said)) == said
    whole = tokenizer.decode(tokenizer.prompt(said), control=True)
    begins = tokenizer.decode(tokenizer.backend.prefix, control=True)
    assert whole.removeprefix(begins).removeprefix(" " if begins else "") == said


@pytest.mark.parametrize("kind", [first, always])
@given(said=tricky)
def test_but_for_a_first_space_that_some_tokenizers_take_for_theirs(get, kind, said):
    said = said.replace(SPACE, "")
    tokenizer = get(kind)
    back = tokenizer.decode(tokenizer.encode(said))
    assert back == said.removeprefix(" ")


@pytest.mark.parametrize("kind", [chatml, thinking, pieces])
@given(said=tricky, more=tricky)
def test_a_chat_reads_as_the_template_has_it(get, kind, said, more):
    said, more = said.replace(SPACE, ""), more.replace(SPACE, "")
    tokenizer = get(kind)
    messages = [{"role": "system", "content": said}, {"role": "user", "content": more}]
    assert tokenizer.decode(tokenizer.chat(messages), control=True) == (
        f"<|im_start|>system\n{said}<|im_end|>\n<|im_start|>user\n{more}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@for_every_kind
def test_words_inside_words_are_cut_too(get, kind):
    tokenizer = get(kind)
    for word in tokenizer.backend.control:
        for at in range(len(word) + 1):
            said = word[:at] + word + word[at:] + word
            assert not controls(tokenizer, tokenizer.encode(said))


@pytest.mark.parametrize("kind", [chatml, thinking, first, always, prepend, unigram])
@given(said=mixed)
def test_without_control_words_a_text_is_encoded_in_one_call(get, kind, said):
    from tokenizers import Tokenizer

    tokenizer = get(kind)
    for word in tokenizer.backend.control:
        said = said.replace(word[0], "")
    core = Tokenizer.from_file(str(tokenizer.path / "tokenizer.json"))
    assert tokenizer.encode(said) == core.encode(said, add_special_tokens=False).ids
    rendered = f"<s>[INST] {said} [/INST]"
    if tokenizer.template == INST and tokenizer.bos is not None:
        want = core.encode(rendered, add_special_tokens=False).ids
        assert tokenizer.chat([{"role": "user", "content": said}]) == want


@pytest.mark.parametrize("kind", [pieces, pieces_and_more])
@given(said=mixed)
def test_without_control_words_sentencepiece_says_how_to_encode(get, kind, said):
    from sentencepiece import SentencePieceProcessor

    tokenizer = get(kind)
    for word in tokenizer.backend.control:
        said = said.replace(word[0], "")
    core = SentencePieceProcessor(model_file=str(tokenizer.backend.path))
    assert tokenizer.encode(said) == core.encode(said)
    if kind == pieces:
        turns = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        want = core.encode(turns.format(said))
        assert tokenizer.chat([{"role": "user", "content": said}]) == want


def test_a_control_word_is_cut_after_its_first_character(get):
    tokenizer = get(chatml)
    halves = ["the <", "|im_end|> of <", "|im_end|><", "|im_start|>"]
    ids = [i for half in halves for i in tokenizer.encode(half)]
    assert tokenizer.encode("".join(halves)) == ids
    turn = tokenizer.chat([{"role": "user", "content": "".join(halves)}])
    at = turn.index(ids[0], turn.index(tokenizer.encode("\n")[0]))
    assert turn[at : at + len(ids)] == ids


@pytest.mark.parametrize("kind", [chatml, first, always, prepend, pieces_and_more])
def test_a_cut_changes_nothing_behind_the_next_control_token(get, kind):
    tokenizer = get(kind)
    word = next(iter(tokenizer.backend.control))
    spelled, plain = (
        {"role": "user", "content": content} for content in (f"a {word} b", "then")
    )
    alone = tokenizer.chat([plain])
    assert tokenizer.chat([spelled, plain])[-len(alone) :] == alone


def test_wide_letters_make_no_control_token_either(get):
    tokenizer = get(normalized)
    wide = "a \uff1c\uff54hink> b\uff1c/think\uff1e"
    assert controls(tokenizer, tokenizer.backend.encode(wide))  # they would
    assert not controls(tokenizer, tokenizer.encode(wide))
    assert tokenizer.decode(tokenizer.encode(wide)) == "a <think> b</think>"


def test_added_spaces_are_text(get):
    tokenizer = get(thinking)
    assert tokenizer.encode("  ") == [tokenizer.backend.ids["  "]]
    assert get(pieces).encode("\n") == [get(pieces).backend.ids["\n"]]


def test_a_control_token_of_one_character_is_refused_in_text(tmp_path):
    from tokenizers import Tokenizer

    byte_pairs.tokenizer(tmp_path, TEXTS, vocab_size=300)
    core = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    core.add_special_tokens(["\u2404"])
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"'\\u2404' in a text .* remove it"):
        text.load(tmp_path).encode("over\u2404")


@pytest.mark.parametrize("kind", [chatml, pieces])
def test_half_a_character_is_refused_by_its_place(get, kind):
    with pytest.raises(ValueError, match=r"character 2 of a text is '\\ud800'"):
        get(kind).encode("ab\ud800")


# ----- decoding, prompts


def test_special_tokens_show_on_request_and_added_ones_always(get):
    tokenizer = get(thinking)
    of = tokenizer.backend.ids.get
    ids = np.array([of("<think>"), of("a"), of("</think>"), of("b"), *tokenizer.end])
    assert tokenizer.decode(ids) == "<think>a</think>b"
    assert tokenizer.decode(ids, control=True) == "<think>a</think>b<|im_end|>"


@pytest.mark.parametrize("kind", [chatml, pieces, pieces_and_more])
def test_ids_of_no_token_are_left_out(get, kind):
    tokenizer = get(kind)
    ids = [-1, tokenizer.size, 399, 1 << 40, *tokenizer.encode("end"), *tokenizer.end]
    assert tokenizer.decode(ids) == "end"


def test_sentencepiece_names_tokens_of_every_kind(get):
    tokenizer = get(pieces_and_more)
    assert (tokenizer.size, tokenizer.bos) == (402, 1)
    assert tokenizer.end == (400,)
    ids = tokenizer.chat([{"role": "user", "content": "the [/INST] <think>"}])
    assert tokenizer.decode([*ids, 401, 400]) == (
        "[INST] the [/INST] <think> [/INST]<think>"
    )
    assert [i for i in ids if i in tokenizer.backend.control.values()] == [
        tokenizer.bos,
        *(tokenizer.backend.ids[word] for word in ("[INST]", "[/INST]")),
    ]


@pytest.mark.parametrize("kind", [first, always, prepend, pieces_and_more])
def test_a_prompt_begins_as_the_tokenizer_begins_a_text_and_does_not_end(get, kind):
    tokenizer = get(kind)
    assert tokenizer.prompt("the") == [tokenizer.bos, *tokenizer.encode("the")]
    assert tokenizer.prompt("") == [tokenizer.bos]


@pytest.mark.parametrize("kind", [chatml, pieces, unigram])
def test_a_prompt_is_bare_where_the_tokenizer_adds_nothing(get, kind):
    assert get(kind).prompt("the") == get(kind).encode("the")


def test_lengths_set_in_the_file_do_not_count(tmp_path):
    from tokenizers import Tokenizer

    whole = byte_pairs.tokenizer(tmp_path, TEXTS, vocab_size=300).encode(
        "what is 2 + 2 ?"
    )
    core = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    core.enable_truncation(3)
    core.enable_padding(length=50)
    core.save(str(tmp_path / "tokenizer.json"))
    assert text.load(tmp_path).encode("what is 2 + 2 ?") == whole


# ----- templates


def templated(path, template, **config):
    byte_pairs.tokenizer(path, TEXTS, vocab_size=300, chat=False)
    read = json.loads((path / "tokenizer_config.json").read_text())
    write(path, **read | {"chat_template": template} | config)
    return text.load(path)


def said(tokenizer, content="the end", **options):
    messages = [{"role": "user", "content": content}]
    return tokenizer.decode(tokenizer.chat(messages, options=options), control=True)


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{{ messages[0].content | tojson }}", '"<a & b> é"'),
        (
            "{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}!{% endfor %}",
            "!!",
        ),
        ("{% generation %}\n  {% set x = 1 %}{{ x }}!{% endgeneration %}{{ x }}", "1!"),
        ("{{ eos_token }}{{ bos_token }}", "<|endoftext|>"),
        ("{{ enable_thinking }}{{ tools is none }}", "FalseTrue"),
        ("{{ strftime_now('%d %b %Y %%') }}", "26 Jul 2024 %"),
        ("  {% if add_generation_prompt %}\nyes\n  {% endif %}\n", "yes\n"),
    ],
)
def test_templates_find_what_they_are_written_for(tmp_path, template, want):
    tokenizer = templated(tmp_path, template)
    assert said(tokenizer, "<a & b> é", enable_thinking=False) == want


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ range(10**9) }}", "OverflowError"),
        ("{{ raise_exception('roles must alternate.') }}", "roles must alternate;"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[3].content.x }}", "UndefinedError"),
        ("a\n{% if %}", "json, line 2: .* TemplateSyntaxError"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_what_a_template_may_not_is_one_sentence(tmp_path, template, what):
    tokenizer = templated(tmp_path, template)
    with pytest.raises(ValueError, match=what) as caught:
        said(tokenizer)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "tokenizer_config.json"))
    assert "\n" not in message


def test_control_words_hide_in_no_part_of_a_message(get):
    turn = [{"role": "user<|im_end|>", "content": "the"}]
    assert get(chatml).chat(turn).count(get(chatml).end[0]) == 1


def test_options_may_hold_any_character(tmp_path):
    tokenizer = templated(tmp_path, "{{ aside }}{{ messages[0].content }}")
    aside = chr(PRIVATE_USE[0]) + chr(PRIVATE_USE[1])
    got = said(tokenizer, "<|im_end|>", aside=aside)
    assert got == f"{aside}<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "options", "what"),
    [
        ([{"role": "user"}], {}, "message 0: content=None is no text"),
        ([{"role": "user", "content": ["a"]}], {}, r"message 0: content=\['a'\]"),
        ([{"role": 1, "content": "a"}], {}, "message 0: role=1"),
        ([], {"messages": []}, "options: messages is set by chat itself"),
    ],
)
def test_messages_are_text(get, messages, options, what):
    with pytest.raises(ValueError, match=what):
        get(chatml).chat(messages, options=options)


def test_a_template_file_goes_before_the_config(tmp_path):
    templated(tmp_path, "config")
    (tmp_path / "chat_template.jinja").write_text("file{{ 1 / 0 }}")
    tokenizer = text.load(tmp_path)
    assert tokenizer.template == "file{{ 1 / 0 }}"
    with pytest.raises(ValueError, match=r"chat_template\.jinja: the chat template"):
        said(tokenizer)


def test_of_named_templates_default_is_taken(tmp_path):
    templates = [{"name": name, "template": name} for name in ("tool_use", "default")]
    assert said(templated(tmp_path, templates)) == "default"
    with pytest.raises(ValueError, match='a list of named ones with "default"'):
        templated(tmp_path, templates[:1])


def test_without_a_template_there_is_no_chat(tmp_path):
    tokenizer = byte_pairs.tokenizer(tmp_path, TEXTS, vocab_size=300, chat=False)
    assert tokenizer.template is None
    with pytest.raises(ValueError, match=r"no chat template; .* chat_template.jinja"):
        said(tokenizer)


# ----- what ends a text


def test_every_file_may_name_an_end(tmp_path):
    byte_pairs.tokenizer(tmp_path, TEXTS, vocab_size=300)
    assert text.load(tmp_path).end == (2,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    tokenizer = text.load(tmp_path)
    assert (tokenizer.end, tokenizer.pad) == ((0, 2, 7), 0)
    assert tokenizer.decode([50, 7]) == tokenizer.decode([50])


@pytest.mark.parametrize(
    ("config", "end", "pad", "bos"),
    [
        ({}, (), 0, None),
        ({"eos_token": "<|im_end|>", "bos_token": None}, (2,), 2, None),
        ({"pad_token": {"content": "<|im_start|>"}}, (), 1, None),
        ({"bos_token": "<|im_start|>", "add_bos_token": False}, (), 0, 1),
    ],
)
def test_named_tokens_are_text_or_hold_it(tmp_path, config, end, pad, bos):
    byte_pairs.tokenizer(tmp_path, TEXTS, vocab_size=300)
    write(tmp_path, **config)
    tokenizer = text.load(tmp_path)
    assert (tokenizer.end, tokenizer.pad, tokenizer.bos) == (end, pad, bos)


def test_the_map_of_special_tokens_fills_in(tmp_path):
    byte_pairs.tokenizer(tmp_path, TEXTS, vocab_size=300)
    write(tmp_path, eos_token="<|im_end|>", pad_token=None)
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|im_start|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = text.load(tmp_path)
    assert (tokenizer.end, tokenizer.pad) == ((2,), 1)


# ----- files


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read: JSON"),
        ("tokenizer_config.json", "[]", "cannot be read: ValueError: it holds no obj"),
        ("tokenizer_config.json", '{"eos_token": 7}', "eos_token=7 is no text"),
        ("tokenizer_config.json", '{"eos_token": "<x>"}', "'<x>' is no token of tok"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template must be a"),
        ("special_tokens_map.json", "7", "special_tokens_map.json cannot be read"),
        ("config.json", '{"eos_token_id": "x"}', "eos_token_id='x' must hold ids"),
        ("config.json", '{"eos_token_id": true}', "eos_token_id=True must hold ids"),
        ("generation_config.json", '{"eos_token_id": [300]}', "which are below 300"),
        ("generation_config.json", b"\xff", "generation_config.json cannot be read"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read"),
    ],
)
def test_a_broken_file_is_named_in_one_sentence(tmp_path, file, content, what):
    byte_pairs.tokenizer(tmp_path, TEXTS, vocab_size=300)
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=what) as caught:
        text.load(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "\n" not in message
    assert message.endswith(".")


def test_a_broken_model_is_named_in_one_sentence(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"tokenizer\.model cannot be read"):
        text.load(tmp_path)


def test_a_missing_checkpoint_is_said_to_be_missing(tmp_path):
    with pytest.raises(ValueError, match="none is no directory; name that of a check"):
        text.load(tmp_path / "none")
    with pytest.raises(ValueError, match=r"neither tokenizer.json .* and 0 \*\.model"):
        text.load(tmp_path)
    for name in ("a.model", "b.model"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"and 2 \*\.model; copy"):
        text.load(tmp_path)


@for_every_kind
def test_a_tokenizer_can_be_sent_elsewhere(get, kind):
    tokenizer = get(kind)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again == tokenizer == text.load(str(tokenizer.path))
    assert again.encode("the <think>") == tokenizer.encode("the <think>")


def test_libraries_are_imported_when_they_are_needed():
    heavy = {"tokenizers", "sentencepiece", "jinja2", "jax"}
    code = f"import sys, curax.tasks.text; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


# ----- byte pairs


def test_a_trained_tokenizer_ends_turns_or_texts(tmp_path):
    chat = byte_pairs.tokenizer(tmp_path / "chat", TEXTS, vocab_size=300)
    assert (chat.pad, chat.end, chat.bos) == (0, (2,), None)
    base = byte_pairs.tokenizer(tmp_path / "base", TEXTS, vocab_size=300, chat=False)
    assert (base.pad, base.end, base.bos) == (0, (0,), None)


def test_a_tokenizer_of_bytes_alone_gives_every_text_back(tmp_path):
    least = byte_pairs.tokenizer(tmp_path, [], vocab_size=259)
    assert least.decode(least.encode("  你好\n🙂\0")) == "  你好\n🙂\0"
