"""Chunks that have a text and nothing else are written past the general way, and look the same."""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from tidegate_engine.openai import Delta, Envelope

TEXTS = st.text(max_size=20)


def envelope(model: str, *, is_chat: bool, with_logprobs: bool) -> Envelope:
    return Envelope("cmpl-1", 1700000000, model, is_chat, with_logprobs=with_logprobs)


@given(
    model=TEXTS,
    is_chat=st.booleans(),
    with_logprobs=st.booleans(),
    parts=st.lists(st.tuples(st.integers(0, 2), TEXTS, st.sampled_from([None, None, "stop"]), TEXTS), max_size=8),
)
def test_an_event_does_not_depend_on_those_before_it(
    model: str, is_chat: bool, with_logprobs: bool, parts: list[tuple[int, str, str | None, str]]
) -> None:
    stream = envelope(model, is_chat=is_chat, with_logprobs=with_logprobs)
    begun: set[int] = set()
    for index, text, finish, thoughts in parts:
        delta = Delta(index, text, finish_reason=finish, reasoning=thoughts if is_chat else "")
        anew = envelope(model, is_chat=is_chat, with_logprobs=with_logprobs).chunks([delta])
        expected = anew.split(b"\n\n")[1 if is_chat and index in begun else 0 :]  # a chat's choice begins with a role
        begun.add(index)
        assert stream.chunks([delta]) == b"\n\n".join(expected)


def test_a_text_that_looks_like_its_surroundings_stays_a_text() -> None:
    stream = envelope("m", is_chat=False, with_logprobs=False)
    for text in ('"}]}', "cmpl-1 m", '{"id":"cmpl-1"', "\n\ndata: x", "é\x00"):
        for _ in range(2):
            (line, *rest) = stream.chunks([Delta(0, text)]).split(b"\n\n")
            assert rest == [b""]
            assert orjson.loads(line.removeprefix(b"data: "))["choices"][0]["text"] == text
