"""From token ids to the text that a client gets, for three kinds of tokenizers: the same in every grouping."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tidegate_engine.completions import Choice, Wake
from tidegate_engine.detokenizer import Detokenizer
from tidegate_engine.engine import Output
from tidegate_engine.request import FinishReason, Request, SampledToken, SamplingParams
from tidegate_engine.text_meter import TextMeter

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
CORPUS = [
    "the tide gate opens and the tide comes in",
    "où est l'océan? à côté",
    "END of the story. Stop! 😀😀 and so on",
]
WORDS = st.sampled_from(
    [
        "the",
        " tide",
        " gate",
        "END",
        "Stop!",
        "é",
        " à",
        "😀",
        "€",
        "\n",
        "  ",
        "x",
        "�",
        "<0x41>",
        "日本",
        ".",
        "E",
        "EN",
    ]
)
TEXTS = st.lists(WORDS, max_size=14).map("".join)
STOPS = st.lists(
    st.sampled_from(["END", "Stop!", "😀", " tide", "e", "x.", "ENDEND", "\n\n", "本"]), max_size=3, unique=True
).map(tuple)
CUTS = st.lists(st.integers(0, 60), max_size=10)


@dataclass(frozen=True)
class Kind:
    """A tokenizer, and the bytes of its tokens."""

    tokenizer: Tokenizer
    bytes_of: Callable[[str], bytes]
    knows_every_text: bool
    chat_template: str | None = None
    meter: TextMeter = field(default_factory=TextMeter)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids))
        return text

    def token_bytes(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        assert token is not None
        return b"" if token == "<unk>" else self.bytes_of(token)

    def chat(self, messages: object, **options: object) -> list[int]:
        raise NotImplementedError


def byte_level() -> Kind:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return Kind(tokenizer, lambda token: bytes(alphabet[character] for character in token), knows_every_text=True)


def words_with_their_space() -> Kind:
    """As SentencePiece writes them, without bytes for what the vocabulary lacks."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Replace("▁", " ")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, "€ 日本\n"], trainer)
    return Kind(tokenizer, lambda token: token.replace("▁", " ").encode(), knows_every_text=False)


def byte_fallback() -> Kind:
    """As Llama 2's: what the vocabulary lacks is written in tokens of one byte."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁thedigaopnsEND.!x",
        "th",
        "the",
        "▁t",
        "EN",
        "END",
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "t"), ("E", "N"), ("EN", "D")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])

    def bytes_of(token: str) -> bytes:
        if len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    return Kind(tokenizer, bytes_of, knows_every_text=True)


KINDS = {"byte-level": byte_level(), "with spaces": words_with_their_space(), "byte fallback": byte_fallback()}
MOST_TOKENS_GROUPED = 9
"""There are 256 ways to group nine."""
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def grouped(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in pairwise(edges)]


def read(
    kind: Kind, groups: Sequence[Sequence[int]], *, stops: tuple[str, ...] = (), min_tokens: int = 0, keep: bool = False
) -> tuple[list[str], str | None]:
    """What the client is sent piece by piece, and why the answer ended."""
    request = Request("a", 1, 1000, 0.0, params=SamplingParams(min_tokens=min_tokens))
    detokenizer = Detokenizer(stops, include_stop=keep)
    choice = Choice(0, request, detokenizer, tokenizer=kind, wake=Wake())
    total = sum(map(len, groups))
    pieces = []
    done = 0
    for group in groups:
        for token_id in group:
            done += 1
            choice.push(Output(SampledToken(token_id), FinishReason.LENGTH if done == total else None))
        if (delta := choice.advance()) is not None:
            pieces.append(delta.text)
            if delta.finish_reason is not None:
                return pieces, delta.finish_reason
    return pieces, None


def cut(text: str, stops: tuple[str, ...], *, keep: bool = False) -> tuple[str, bool]:
    """The text before the stop string that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        if matches := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end if keep else end - max(map(len, matches))], True
    return text, False


@pytest.mark.prove
@pytest.mark.timeout(3600)
@EVERY_KIND
@settings(max_examples=5000 if PROVE else 50, deadline=None)
@given(text=TEXTS, stops=STOPS, cuts=CUTS, keep=st.booleans())
def test_every_grouping_gives_what_decoding_the_whole_gives(
    kind: str, text: str, stops: tuple[str, ...], cuts: list[int], keep: bool
) -> None:
    chosen = KINDS[kind]
    ids = chosen.encode(text)
    if chosen.knows_every_text:
        assert chosen.decode(ids) == text
    if not ids:
        return
    wanted, is_stopped = cut(chosen.decode(ids), stops, keep=keep)
    pieces, reason = read(chosen, grouped(ids, cuts), stops=stops, keep=keep)
    assert "".join(pieces) == wanted
    assert reason == ("stop" if is_stopped else "length")
    one_by_one, _ = read(chosen, [[token_id] for token_id in ids], stops=stops, keep=keep)
    assert "".join(one_by_one) == wanted


@pytest.mark.prove
@pytest.mark.timeout(3600)
@EVERY_KIND
@settings(max_examples=5000 if PROVE else 30, deadline=None)
@given(data=st.data(), cuts=CUTS)
def test_ids_in_any_order_give_the_same_text_in_every_grouping(kind: str, data: st.DataObject, cuts: list[int]) -> None:
    chosen = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, chosen.vocab_size - 1), min_size=1, max_size=20))
    pieces, _ = read(chosen, grouped(ids, cuts))
    whole = b"".join(map(chosen.token_bytes, ids)).decode(errors="replace")
    assert "".join(pieces) == whole
    if kind == "byte-level":
        assert whole == chosen.decode(ids)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@EVERY_KIND
@settings(max_examples=5000 if PROVE else 30, deadline=None)
@given(text=TEXTS, stops=STOPS, cuts=CUTS, min_tokens=st.integers(0, 8))
def test_a_stop_string_counts_once_the_minimum_length_is_reached_and_only_where_it_begins_after_it(
    kind: str, text: str, stops: tuple[str, ...], cuts: list[int], min_tokens: int
) -> None:
    chosen = KINDS[kind]
    ids = chosen.encode(text)
    if not ids:
        return
    data = [chosen.token_bytes(token_id) for token_id in ids]
    decoded = b"".join(data).decode(errors="replace")
    early = b"".join(data[:min_tokens]).decode(errors="ignore")  # a character that is not whole yet comes later
    rest, is_stopped = cut(decoded[len(early) :], stops)
    pieces, reason = read(chosen, grouped(ids, cuts), stops=stops, min_tokens=min_tokens)
    assert "".join(pieces) == early + rest
    assert reason == ("stop" if is_stopped else "length")


@pytest.mark.prove
@pytest.mark.timeout(3600)
@EVERY_KIND
@settings(max_examples=300 if PROVE else 5, deadline=None)
@given(text=TEXTS, stops=STOPS, first=st.integers(0, 30))
def test_all_groupings_of_a_few_tokens_give_the_same_text(
    kind: str, text: str, stops: tuple[str, ...], first: int
) -> None:
    chosen = KINDS[kind]
    ids = chosen.encode(text)
    start = first % max(1, len(ids) - MOST_TOKENS_GROUPED + 1)
    ids = ids[start : start + MOST_TOKENS_GROUPED]
    if not ids:
        return
    decoded = b"".join(map(chosen.token_bytes, ids)).decode(errors="replace")
    wanted, is_stopped = cut(decoded, stops)
    for mask in range(1 << (len(ids) - 1)):
        cuts = [place + 1 for place in range(len(ids) - 1) if mask >> place & 1]
        pieces, reason = read(chosen, grouped(ids, cuts), stops=stops)
        assert ("".join(pieces), reason) == (wanted, "stop" if is_stopped else "length"), cuts


@EVERY_KIND
def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not(kind: str) -> None:
    chosen = KINDS[kind]
    ids = chosen.encode("the ENEND")
    pieces, reason = read(chosen, [[token_id] for token_id in ids], stops=("ENDED",))
    assert "".join(pieces) == "the ENEND" and reason == "length"
    assert pieces[-1].endswith("END")
    assert not any("END" in piece for piece in pieces[:-1])


@EVERY_KIND
def test_nothing_comes_after_a_stop_string_whatever_follows_in_the_same_step(kind: str) -> None:
    chosen = KINDS[kind]
    ids = chosen.encode("the END the END the")
    pieces, reason = read(chosen, [ids], stops=("END",))
    assert ("".join(pieces), reason) == ("the ", "stop")
