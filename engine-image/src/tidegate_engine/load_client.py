"""One streamed request to an OpenAI server, measured: what the load generators of `bench` and of the demo share.

Owns sending and metering; knows nothing of plans and reports. Needs aiohttp only. A failure is a result, no exception.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

MAX_LINE_BYTES = 1 << 20
"""A longer line is no event of a stream of tokens."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. `url` is without /v1; `extra_body` is added to every request as it stands."""

    url: str
    model: str
    chat: bool = False
    timeout_seconds: float = 300.0
    api_key: str | None = None
    extra_body: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request; seconds count from when it was due, so a late generator hides nothing.

    `failure` None means: HTTP 200 and a stream that ended with `[DONE]`, with a token and without an error. Otherwise
    it is `kind: detail`.
    """

    ttft_seconds: float | None = None
    e2e_seconds: float | None = None
    """Until the last token."""
    gaps_seconds: Sequence[float] = ()
    """Between events that carry a token; several that came in one piece are 0 apart."""
    output_tokens: int | None = None
    """As the server counted them."""
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    failure: str | None = None

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time per output token after the first; None without a second one."""
        first, last, tokens = self.ttft_seconds, self.e2e_seconds, self.output_tokens
        if first is None or last is None or tokens is None or tokens < 2:
            return None
        return (last - first) / (tokens - 1)


class StreamMeter:
    """Reads server-sent events, however their bytes are cut, and notes when each token came."""

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.gaps_seconds: list[float] = []
        self.is_done = False
        self.failure: str | None = None
        self.output_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.finish_reason: str | None = None
        self._rest = b""

    def feed(self, chunk: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._read(line[5:].strip(), now)
        if len(self._rest) > MAX_LINE_BYTES:
            self.failure, self._rest = "unreadable: a line of the stream is longer than 1 MiB", b""

    def _read(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self.failure = f"unreadable: {data[:100]!r} is no event"
            return
        if event.get("error"):
            self.failure = f"error in the stream: {json.dumps(event['error'])[:200]}"
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.output_tokens = _count(usage.get("completion_tokens"))
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return
        self.finish_reason = choices[0].get("finish_reason") or self.finish_reason
        if _holds_token(choices[0]):
            self._token(now)

    def _token(self, now: float) -> None:
        if self.last_at is None:
            self.first_at = now
        else:
            self.gaps_seconds.append(now - self.last_at)
        self.last_at = now

    def answer(self, *, due: float, failure: str | None = None) -> Answer:
        """The result of a stream that ended; `failure` is what cut it, `due` is on the meter's clock."""
        failure = failure or self.failure
        if failure is None and not self.is_done:
            failure = "cut: the stream ended without [DONE]"
        if failure is None and self.first_at is None:
            failure = "empty: the stream had no token"
        return Answer(
            ttft_seconds=None if self.first_at is None else self.first_at - due,
            e2e_seconds=None if self.last_at is None else self.last_at - due,
            gaps_seconds=self.gaps_seconds,
            output_tokens=self.output_tokens,
            prompt_tokens=self.prompt_tokens,
            finish_reason=self.finish_reason,
            failure=failure,
        )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _holds_token(choice: Mapping[str, object]) -> bool:
    """An empty text is a token that is not a whole character yet, unless the event only begins or ends the answer."""
    delta = choice.get("delta")
    if isinstance(delta, Mapping):
        if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
            return True
        return "role" not in delta and not choice.get("finish_reason")
    return bool(choice.get("text")) or not choice.get("finish_reason")


def request_body(endpoint: Endpoint, prompt: str, output_tokens: int) -> dict[str, object]:
    """A greedy request that ends after exactly `output_tokens`, for servers that know `ignore_eos`."""
    content = {"messages": [{"role": "user", "content": prompt}]} if endpoint.chat else {"prompt": prompt}
    return {
        "model": endpoint.model,
        **content,
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.extra_body,
    }


def open_session(endpoint: Endpoint, *, keep_alive: bool) -> aiohttp.ClientSession:
    """Without `keep_alive` each request has a connection of its own, which a Service may send to another replica."""
    connector = aiohttp.TCPConnector(limit=0, force_close=not keep_alive)
    headers = {} if endpoint.api_key is None else {"Authorization": f"Bearer {endpoint.api_key}"}
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout_seconds)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)


async def send(
    session: aiohttp.ClientSession, endpoint: Endpoint, prompt: str, *, output_tokens: int, due: float
) -> Answer:
    """Send now and follow the stream to its end. `due` (monotonic seconds) is where latencies begin."""
    url = f"{endpoint.url}/v1/{'chat/completions' if endpoint.chat else 'completions'}"
    meter = StreamMeter()
    try:
        async with session.post(url, json=request_body(endpoint, prompt, output_tokens)) as response:
            if response.status != 200:
                text = (await response.content.read(4096)).decode(errors="replace")[:200]
                return Answer(failure=f"HTTP {response.status}: {text}")
            async for chunk in response.content.iter_any():
                meter.feed(chunk, time.monotonic())
    except TimeoutError:
        return meter.answer(due=due, failure=f"no end within {endpoint.timeout_seconds:.0f} s")
    except aiohttp.ClientError as error:
        return meter.answer(due=due, failure=f"{type(error).__name__}: {error}")
    return meter.answer(due=due)


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The smallest value that at least `percent` % of the values do not exceed; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
