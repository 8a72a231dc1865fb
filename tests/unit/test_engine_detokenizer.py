"""The text out of tokens: the same for every grouping of the bytes."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.byte_tokenizer import ByteTokenizer
from tidegate_engine.detokenizer import Detokenizer

ALPHABET = st.sampled_from(["a", "b", "c", "é", "€", "😀", " "])
TEXTS = st.text(ALPHABET, max_size=24)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3).map(tuple)


def expected(text: str, stops: tuple[str, ...], *, include_stop: bool = False) -> tuple[str, bool]:
    """What the whole text says: everything before the stop string that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(map(len, matches))
            return text[: end if include_stop else end - longest], True
    return text, False


def read(pieces: list[bytes], detokenizer: Detokenizer) -> list[str]:
    texts = [detokenizer.push(piece) for piece in pieces]
    return [*texts, detokenizer.finish()]


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(edges)]


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 200), max_size=12), include_stop=st.booleans())
def test_every_grouping_gives_what_the_whole_text_says(
    text: str, stops: tuple[str, ...], cuts: list[int], include_stop: bool
) -> None:
    detokenizer = Detokenizer(stops, include_stop=include_stop)
    released = "".join(read(split(text.encode(), cuts), detokenizer))
    wanted, is_stopped = expected(text, stops, include_stop=include_stop)
    assert released == wanted
    assert (detokenizer.matched_stop is not None) == is_stopped


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=20), cuts=st.lists(st.integers(0, 30), max_size=8))
def test_invalid_bytes_become_the_same_replacement_characters_in_every_grouping(data: bytes, cuts: list[int]) -> None:
    assert "".join(read(split(data, cuts), Detokenizer())) == data.decode(errors="replace")


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, stops=STOPS)
def test_released_text_is_never_taken_back(text: str, stops: tuple[str, ...]) -> None:
    wanted, _ = expected(text, stops)
    detokenizer = Detokenizer(stops)
    shown = ""
    for byte in text.encode():
        shown += detokenizer.push(bytes([byte]))
        assert wanted.startswith(shown)


def test_a_character_split_over_tokens_appears_once_it_is_whole() -> None:
    detokenizer = Detokenizer()
    assert [detokenizer.push(bytes([byte])) for byte in "😀".encode()] == ["", "", "", "😀"]


def test_text_that_may_begin_a_stop_string_is_held_back_and_released_when_it_does_not() -> None:
    detokenizer = Detokenizer(("END",))
    assert detokenizer.push(b"xE") == "x"
    assert detokenizer.push(b"N") == ""
    assert detokenizer.push(b"T") == "ENT"
    assert detokenizer.push(b"END more") == ""
    assert detokenizer.matched_stop == "END"
    assert detokenizer.push(b"anything") == ""


def test_stop_strings_are_plain_text_while_they_may_not_stop() -> None:
    detokenizer = Detokenizer(("b",))
    assert detokenizer.push(b"ab", may_stop=False) == "ab"
    assert detokenizer.push(b"ab") == "a"


def test_an_unfinished_character_at_the_end_is_shown_as_replacement() -> None:
    detokenizer = Detokenizer()
    assert detokenizer.push("é".encode()[:1]) == ""
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_the_byte_tokenizer_gives_back_what_it_was_given(text: str) -> None:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == -(-len(data) // 4)
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)


@pytest.mark.parametrize("token_id", [0, 1, 17, 50_000, 2**33 - 1])
def test_every_id_below_the_vocabulary_size_has_bytes(token_id: int) -> None:
    assert isinstance(ByteTokenizer().token_bytes(token_id), bytes)
