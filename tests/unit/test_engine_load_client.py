"""The meter of a stream: tokens are tokens, however the bytes are cut and whatever else the server says."""

import json
from collections.abc import Iterable

import pytest

from tidegate_engine.load_client import Answer, Endpoint, StreamMeter, percentile, request_body


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode()


def text(value: str, reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": value, "finish_reason": reason}])


def delta(reason: str | None = None, **fields: object) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": reason}])


USAGE = event(choices=[], usage={"completion_tokens": 3, "prompt_tokens": 7})
COMPLETION = (text("a"), text(""), text("b", "length"), USAGE, b"data: [DONE]")
CHAT = (
    delta(role="assistant", content=""),
    *(delta(content=text) for text in "abc"),
    delta(reason="stop"),
    USAGE,
    b"data: [DONE]",
)


def meter_of(events: Iterable[bytes], *, size: int | None = None, end: bytes = b"\n\n") -> StreamMeter:
    """The chunks come a second apart: an event each, or `size` bytes each."""
    stream = [each + end for each in events]
    if size is not None:
        joined = b"".join(stream)
        stream = [joined[start : start + size] for start in range(0, len(joined), size)]
    meter = StreamMeter()
    for second, chunk in enumerate(stream):
        meter.feed(chunk, float(second))
    return meter


@pytest.mark.parametrize("events", [COMPLETION, CHAT])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_tokens_are_counted_however_the_bytes_are_cut(events: tuple[bytes, ...], end: bytes, size: int) -> None:
    meter = meter_of(events, size=size, end=end)
    answer = meter.answer(due=0.0)
    assert answer.failure is None
    assert len(answer.gaps_seconds) == 2
    assert (answer.output_tokens, answer.prompt_tokens) == (3, 7)
    assert answer.finish_reason in ("length", "stop")


def test_what_holds_no_token_moves_no_time() -> None:
    chat = meter_of(CHAT).answer(due=-10.0)
    assert (chat.ttft_seconds, chat.e2e_seconds) == (11.0, 13.0)
    assert chat.gaps_seconds == [1.0, 1.0]
    assert chat.tpot_seconds == 1.0
    completion = meter_of((*COMPLETION[:2], text("b"), text("", "stop"), *COMPLETION[3:])).answer(due=0.0)
    assert (completion.ttft_seconds, completion.e2e_seconds) == (0.0, 2.0)


def test_a_call_of_a_tool_is_a_token() -> None:
    events = (delta(role="assistant", content=None), delta(tool_calls=[{"index": 0}]), b"data: [DONE]")
    assert meter_of(events).answer(due=0.0).ttft_seconds == 1.0


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        (COMPLETION[:3], "cut"),
        ((text("a"), event(error={"message": "drained"}), b"data: [DONE]"), "error in the stream"),
        ((b"data: [DONE]",), "empty"),
        ((b"data: {", *COMPLETION), "unreadable"),
        ((b"data: 3", *COMPLETION), "unreadable"),
        ((b": a comment", *COMPLETION), None),
        ((b"data: " + b"x" * (1 << 20), *COMPLETION), "unreadable"),
    ],
)
def test_a_stream_that_does_not_end_well_is_a_failure(events: tuple[bytes, ...], failure: str | None) -> None:
    found = meter_of(events).answer(due=0.0).failure
    assert found is None if failure is None else found is not None and found.startswith(failure)


def test_a_stream_without_line_ends_takes_no_memory() -> None:
    meter = StreamMeter()
    for _ in range(40):
        meter.feed(b"x" * 65_536, 0.0)
    assert len(meter._rest) <= 1 << 20
    assert (meter.answer(due=0.0).failure or "").startswith("unreadable")


def test_one_token_has_no_time_per_token() -> None:
    assert Answer(ttft_seconds=1.0, e2e_seconds=1.0, output_tokens=1).tpot_seconds is None
    assert Answer(ttft_seconds=1.0, e2e_seconds=3.0, output_tokens=5).tpot_seconds == 0.5
    assert Answer(ttft_seconds=1.0, e2e_seconds=3.0).tpot_seconds is None


def test_extra_fields_win_over_ours() -> None:
    endpoint = Endpoint("http://x", "m", chat=True, extra_body={"temperature": 1, "top_k": 5})
    body = request_body(endpoint, "hello", 9)
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["max_tokens"], body["temperature"], body["top_k"]) == (9, 1, 5)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([], 95) is None
    assert percentile([3.0], 95) == 3.0
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (0, 50, 95, 99, 100)] == [1.0, 50.0, 95.0, 99.0, 100.0]
