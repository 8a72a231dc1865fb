"""The tokenizer from a GGUF file against transformers' byte-level BPE with the same vocabulary, and chat templates.

transformers' own GGUF conversion ignores the file's pre-tokeniser, so the oracle is its GPT-2 tokenizer, given the text
in pieces as the `smollm` rule cuts it: every numeric character by itself.
"""

import sys
import threading
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tidegate_engine.chat import ChatTemplate, ChatTemplateError
from tidegate_engine.context import ContextPolicy, fit_messages
from tidegate_engine.tokenizer import ModelTokenizer, load_tokenizer
from tidegate_engine.weights import ModelError

WriteModel = Callable[..., Path]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>there</b> & you"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Count to 123."},
]
PHRASES = st.sampled_from(
    [
        "the ",
        " in",
        "12",
        "3 4",
        "  ",
        "\n\n",
        "\t",
        "é",
        "日本",
        "😀",
        "👩‍👧",
        "²",
        "½",
        "'s",
        "don't",
        "I'LL",
        "...",
        "\u00a0",
    ]
)
TEXTS = st.one_of(st.text(max_size=40), st.lists(PHRASES, max_size=12).map("".join))


@pytest.fixture(scope="module")
def tokenizer(real_model: Path) -> ModelTokenizer:
    return load_tokenizer(real_model)


@pytest.fixture(scope="module")
def known_bytes(tokenizer: ModelTokenizer) -> set[int]:
    """Bytes that have a token: this vocabulary lacks a few that text hardly has."""
    pieces = map(tokenizer.token_bytes, range(tokenizer.vocab_size))
    return {piece[0] for piece in pieces if len(piece) == 1}


@pytest.fixture(scope="module")
def oracle(real_model: Path) -> Any:
    from transformers import GPT2Tokenizer

    fields = gguf.GGUFReader(real_model).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    types = fields["tokenizer.ggml.token_type"].contents()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    made = GPT2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        extra_special_tokens=special,
    )
    made.chat_template = fields["tokenizer.chat_template"].contents()
    return made


def encode_by_oracle(oracle: Any, text: str) -> list[int]:
    ids: list[int] = []
    piece = ""
    for character in text:
        if unicodedata.category(character).startswith("N"):
            ids += oracle.encode(piece, add_special_tokens=False) if piece else []
            ids += oracle.encode(character, add_special_tokens=False)
            piece = ""
        else:
            piece += character
    return ids + (oracle.encode(piece, add_special_tokens=False) if piece else [])


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_texts_are_cut_as_by_transformers(tokenizer: ModelTokenizer, oracle: Any, text: str) -> None:
    assert tokenizer.encode(text) == encode_by_oracle(oracle, text)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_the_tokens_bytes_make_up_the_text(tokenizer: ModelTokenizer, known_bytes: set[int], text: str) -> None:
    assume(known_bytes.issuperset(text.encode()))
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.decode(ids) == text


def test_other_threads_run_while_a_long_text_is_cut(tokenizer: ModelTokenizer) -> None:
    order: list[str] = []
    text = " ".join(map(str, range(40_000)))

    def cut() -> None:
        tokenizer.encode(text)
        order.append("cut")

    thread = threading.Thread(target=cut)
    interval = sys.getswitchinterval()
    # No thread is stopped in its work, so the other one runs only where the first lets go by itself.
    sys.setswitchinterval(60)
    try:
        thread.start()
        order.append("other")
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert order == ["other", "cut"]


def test_special_tokens_are_read_by_name_and_add_no_text(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "user"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>user<|im_end|>"
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 49152


def test_chats_are_rendered_and_cut_as_by_transformers(tokenizer: ModelTokenizer, oracle: Any) -> None:
    for messages in (MESSAGES, MESSAGES[1:]):
        expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.render_chat(messages) == expected
        assert tokenizer.chat(messages) == tokenizer.encode(expected, add_special=False)
        whole = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        assert tokenizer.render_chat(messages, add_generation_prompt=False) == whole


def test_bos_is_added_to_plain_texts_when_the_model_wants_it_and_never_to_chats(write_tiny_model: WriteModel) -> None:
    tokenizer = load_tokenizer(write_tiny_model(metadata={"tokenizer.ggml.add_bos_token": 1}))
    plain = tokenizer.encode("the", add_special=False)
    assert tokenizer.encode("the") == [1, *plain]
    assert tokenizer.chat([{"role": "user", "content": "the"}]).count(1) == 2  # both are the template's


@pytest.mark.parametrize(
    ("name", "stated", "begins"),
    [
        *((name, None, True) for name in ("llama-bpe", "llama3", "llama-v3")),
        ("llama-bpe", 0, False),
        ("dbrx", None, False),
        ("qwen2", None, False),
    ],
)
def test_llama_3s_vocabularies_want_bos_unless_the_file_says_no(
    write_tiny_model: WriteModel, name: str, stated: int | None, begins: bool
) -> None:
    metadata = {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": stated}
    tokenizer = load_tokenizer(write_tiny_model(metadata=metadata))
    plain = tokenizer.encode("the", add_special=False)
    assert tokenizer.encode("the") == ([1, *plain] if begins else plain)


def test_merges_are_applied(write_tiny_model: WriteModel) -> None:
    tokenizer = load_tokenizer(write_tiny_model())
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("in the")] == [b"in", b" the"]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"tokenizer.ggml.pre": "tekken"},
            "has the pre-tokeniser tekken; supported are gpt-2, smollm, qwen2",
        ),
        ({"tokenizer.ggml.model": "t5"}, "has a tokenizer of the kind t5; supported are gpt2"),
        ({"tokenizer.ggml.model": "llama"}, "has no tokenizer: tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer: tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "is damaged: it has 263 tokens and 2 token types"),
        (
            {"tokenizer.ggml.add_bos_token": 1, "tokenizer.ggml.bos_token_id": 263},
            "names the token 263 as the beginning, and its vocabulary has 263 tokens",
        ),
        ({"tokenizer.ggml.merges": ["q zzz"]}, "is damaged: its merges do not fit its vocabulary"),
        ({"tokenizer.ggml.merges": ["th"]}, "is damaged: the merge 'th' has one part"),
    ],
)
def test_a_tokenizer_that_would_cut_wrongly_is_refused(
    write_tiny_model: WriteModel, metadata: dict[str, object], expected: str
) -> None:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(write_tiny_model(metadata=metadata))
    assert expected in str(caught.value)


def render(source: str, messages: list[dict[str, str]] | None = None) -> str:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"}).render(messages or MESSAGES)


def test_templates_may_refuse_messages_in_their_own_words() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_templates_have_the_tokens_the_loop_controls_and_plain_json() -> None:
    assert render("{{ bos_token }}{% for m in messages %}{% break %}{% endfor %}") == "<s>"
    assert render("{{ messages[1].content | tojson }}") == '"Hi <b>there</b> & you"'
    assert render("""{{ {"b": "é", "a": 1} | tojson(true, none, (",", ":"), true) }}""") == '{"a":1,"b":"\\u00e9"}'
    assert render("""{{ {"b": "é"} | tojson(indent=1, separators=(", ", ":")) }}""") == '{\n "b":"é"\n}'


def test_what_a_template_marks_as_generated_is_text_as_any_other() -> None:
    source = """
        {%- for m in messages %}
        {%- if m.role == "assistant" %}{% generation %}
        {%- set said = m.content %}{{ "A:" + said }}{% endgeneration %}
        {%- else %}{{ "Q:" + m.content | string | length | string }}{% endif %};
        {%- endfor %}{{ said is defined }}"""
    assert render(source) == "Q:9;Q:21;A:Hello.;Q:13;False"
    with pytest.raises(ChatTemplateError, match=r"cannot be read: .*endgeneration"):
        render("{% generation %}")


def test_templates_multiply_what_they_need_for_a_layout() -> None:
    assert render(
        "{{ '-' * 3 }}{{ 2 * '=' }} {{ 6 * 7 }} {{ 2 ** 10 }} {{ 2.5 * 2 }} {{ 4 ** -1 }} {{ 'x' * -1 }}"
    ) == ("---== 42 1024 5.0 0.25 ")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for x in range(999999999) %}{% endfor %}",
        "{{ messages[99].content.x }}",
        "{{ 1 / 0 }}",
        "{{ 'a' * 10 ** 11 }}",
        "{{ 100000000000 * [0] }}",
        "{% set n = messages | length * 10 ** 11 %}{{ 'a' * n }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 2 ** 20000 }}",
        "{{ 'a'.index('b') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_oversteps_fails_as_one_request(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_a_template_that_cannot_be_read_and_a_model_without_one_are_refused(write_tiny_model: WriteModel) -> None:
    with pytest.raises(ModelError, match=r"ModelInvalid: .*its chat template cannot be read"):
        load_tokenizer(write_tiny_model(metadata={"tokenizer.chat_template": "{% if %}"}))
    bare = load_tokenizer(write_tiny_model(metadata={"tokenizer.chat_template": None}))
    with pytest.raises(ChatTemplateError, match="the model has no chat template"):
        bare.chat(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for x in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "1" * 5000 + " }}",
    ],
)
def test_a_template_too_large_to_compile_is_refused(write_tiny_model: WriteModel, source: str) -> None:
    with pytest.raises(ModelError, match=r"ModelInvalid: .*its chat template cannot be read"):
        load_tokenizer(write_tiny_model(metadata={"tokenizer.chat_template": source}))


def test_another_template_may_be_used_and_renders_tools(tokenizer: ModelTokenizer, real_model: Path) -> None:
    own = load_tokenizer(real_model)
    tools = [{"type": "function", "function": {"name": "tide", "parameters": {}}}]
    source = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}{{ eos_token }}"
    own.use_template(source)
    assert own.chat_template == source != tokenizer.chat_template
    assert own.render_chat(MESSAGES[:1]) == "Be brief.<|im_end|>"
    rendered = own.render_chat(MESSAGES[:1], tools=tools)
    assert rendered == '[{"type": "function", "function": {"name": "tide", "parameters": {}}}]Be brief.<|im_end|>'
    with pytest.raises(ChatTemplateError, match="cannot be read"):
        own.use_template("{% if %}")


@pytest.mark.parametrize(
    ("policy", "kept", "cut"),
    [
        (ContextPolicy.TRUNCATE_LEFT, ["LAST"], ["FIRST", "CENTRE"]),
        (ContextPolicy.TRUNCATE_MIDDLE, ["FIRST", "LAST"], ["CENTRE"]),
    ],
)
def test_ten_thousand_words_are_cut_within_the_real_template(
    tokenizer: ModelTokenizer, policy: ContextPolicy, kept: list[str], cut: list[str]
) -> None:
    half = " ".join(f"word{index % 97}" for index in range(5_000))
    question = f"The FIRST fact. {half} The CENTRE fact. {half} The LAST fact. What is the tide?"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    fitted = fit_messages(
        messages,
        tokenizer.chat,
        room=1_792,
        policy=policy,
        token_lengths=lambda text: [len(tokenizer.token_bytes(token)) for token in tokenizer.encode(text)],
    )
    prompt = tokenizer.decode(fitted.ids, skip_special=False)
    assert 1_600 < len(fitted.ids) <= 1_792
    assert fitted.truncated_tokens == len(tokenizer.chat(messages)) - len(fitted.ids) > 10_000
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert prompt.endswith("What is the tide?<|im_end|>\n<|im_start|>assistant\n")
    assert all(f"The {fact} fact." in prompt for fact in kept)
    assert not any(fact in prompt for fact in cut)


# --- SentencePiece's vocabularies

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\n\n", *"▁theinaks", "th", "he", "the"]
PIECES += ["▁t", "▁th", "▁the", "in", "▁in", "an", "ank", "ks", "hank"]
KINDS = [2, 3, 3, *[6] * 256, 4, *[1] * (len(PIECES) - 260)]
SCORES = [float(-(index * 7 % 31) - index / 1000) for index in range(len(PIECES))]


def join_pieces(text: str) -> list[str]:
    """By the definition: of all neighbours whose joint piece is known, join those of the highest score, the first ones
    where these are several."""
    scores = dict(zip(PIECES, SCORES, strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(pairwise(parts))
            if left + right in scores
        ]
        if not pairs:
            return [piece for part in parts for piece in ([part] if part in scores else byte_names(part))]
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def byte_names(character: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in character.encode()]


@pytest.fixture
def pieces(write_tiny_model: WriteModel) -> ModelTokenizer:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.merges": None,
    }
    return load_tokenizer(write_tiny_model(metadata=metadata))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=" thehinaksé日\n", max_size=30))
def test_pieces_are_joined_by_their_scores(pieces: ModelTokenizer, text: str) -> None:
    assume("\n\n" not in text and text)
    ids = pieces.encode(text, add_special=False)
    assert [PIECES[token] for token in ids] == join_pieces(text)
    assert b"".join(map(pieces.token_bytes, ids)).decode() == " " + text
    assert pieces.decode(ids) == text


def test_pieces_of_the_user_and_special_ones_are_found_in_a_text(pieces: ModelTokenizer) -> None:
    ids = pieces.encode("the\n\nin</s>")
    assert ids[0] == 1
    assert [ids[-1], pieces.token_bytes(PIECES.index("\n\n"))] == [2, b"\n\n"]
    assert PIECES.index("\n\n") in ids


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "llama-bpe",
            "I'LL pay 12345 for the\n\n cats",
            ["I", "'LL", " pay", " ", "123", "45", " for", " the", "\n\n", " cats"],
        ),
        ("qwen2", "pay 123", ["pay", " ", "1", "2", "3"]),
        ("gpt-4o", "theCats don't//", ["the", "Cats", " don't", "//"]),
    ],
)
def test_texts_are_cut_as_the_name_in_the_file_says(
    write_tiny_model: WriteModel, name: str, text: str, expected: list[str]
) -> None:
    tokenizer = load_tokenizer(write_tiny_model(metadata={"tokenizer.ggml.pre": name}))
    cuts = tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cuts] == expected
