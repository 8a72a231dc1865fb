"""Sends a workload to a server or to an engine in this process, and keeps what became of each request.

With arrival times the loop is open: requests are sent when they are due, however slow the answers are, and latencies
count from then, so that a server that stalls cannot hide it. Owns time and concurrency; figures are `bench_report`'s.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import aiohttp

from tidegate_engine.engine import Engine, Output
from tidegate_engine.load_client import Answer, Endpoint, open_session, percentile, send
from tidegate_engine.request import Request, SamplingParams
from tidegate_engine.workload import (
    PROBES,
    PlannedRequest,
    PromptScale,
    measured_scale,
    prompt_text,
    random_text,
)

GAP_PRECISION = 1.005
"""Gaps are counted in classes that are this factor wide."""


class TargetError(Exception):
    """The server cannot be measured at all; the message says why."""


class Target(Protocol):
    """What is measured."""

    async def send(self, prompt: str, *, output_tokens: int, due: float) -> Answer:
        """Latencies count from `due`, in monotonic seconds."""
        ...

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of `text` as a prompt; None = the server does not say. Raises TargetError."""
        ...


class Server:
    """An OpenAI server."""

    def __init__(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> None:
        self._endpoint = endpoint
        self._session = session

    async def send(self, prompt: str, *, output_tokens: int, due: float) -> Answer:
        return await send(self._session, self._endpoint, prompt, output_tokens=output_tokens, due=due)

    async def count_tokens(self, text: str) -> int | None:
        answer = await self.send(text, output_tokens=1, due=time.monotonic())
        if answer.failure is not None:
            raise TargetError(f"{self._endpoint.url} does not answer a first request: {answer.failure}")
        return answer.prompt_tokens


async def served_model(url: str, *, api_key: str | None) -> str:
    """The first name that the server lists. Raises TargetError."""
    endpoint = Endpoint(url, "", timeout_seconds=30.0, api_key=api_key)
    try:
        async with open_session(endpoint, keep_alive=False) as session, session.get(f"{url}/v1/models") as response:
            response.raise_for_status()
            models = await response.json()
            return str(models["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise TargetError(f"{url}/v1/models names no model ({type(error).__name__}: {error}); give --model") from error


class InProcess:
    """An engine in this process, without HTTP. `encode` makes ids of a prompt; start the engine before."""

    def __init__(self, engine: Engine, encode: Callable[[str], list[int]]) -> None:
        self._engine = engine
        self._encode = encode
        self._number = 0

    async def send(self, prompt: str, *, output_tokens: int, due: float) -> Answer:
        ids = self._encode(prompt)
        self._number += 1
        params = SamplingParams(temperature=0.0, min_tokens=output_tokens, ignore_eos=True)
        request = Request(
            f"bench-{self._number}", len(ids), output_tokens, time.monotonic(), prompt_ids=ids, params=params
        )
        sink = _Sink()
        self._engine.submit(request, sink)
        try:
            await sink.ended.wait()
        except asyncio.CancelledError:
            self._engine.abort(request.id)
            raise
        times = sink.token_times
        return Answer(
            ttft_seconds=times[0] - due if times else None,
            e2e_seconds=times[-1] - due if times else None,
            gaps_seconds=[after - before for before, after in pairwise(times)],
            output_tokens=len(times),
            prompt_tokens=len(ids),
            finish_reason=sink.finish_reason,
            failure=sink.failure,
        )

    async def count_tokens(self, text: str) -> int | None:
        return len(self._encode(text))


class _Sink:
    """Notes when each token came."""

    def __init__(self) -> None:
        self.token_times: list[float] = []
        self.ended = asyncio.Event()
        self.finish_reason: str | None = None
        self.failure: str | None = None

    def push(self, output: Output) -> None:
        if output.token is not None:
            self.token_times.append(time.monotonic())
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.failure = None if output.error is None else f"error: {output.error}"
            self.ended.set()


class GapHistogram:
    """Gaps between tokens in classes 0.5 % wide, so that a long run takes no more memory than a short one."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0
        self.sum_seconds = 0.0

    def add(self, gaps_seconds: Iterable[float]) -> None:
        for gap in gaps_seconds:
            key = round(math.log(max(gap, 1e-6), GAP_PRECISION))
            self._counts[key] = self._counts.get(key, 0) + 1
            self.total += 1
            self.sum_seconds += gap

    def percentile(self, percent: float) -> float | None:
        left = math.ceil(self.total * percent / 100)
        for key in sorted(self._counts):
            left -= self._counts[key]
            if left <= 0:
                return GAP_PRECISION**key
        return None


@dataclass(frozen=True, slots=True)
class Record:
    """One request that ended. `answer` is without its gaps, which the histogram has."""

    request: PlannedRequest
    due_seconds: float
    """From the start of the load."""
    lag_seconds: float
    """How much later than due it was sent."""
    itl_p95_seconds: float | None
    answer: Answer


@dataclass(slots=True)
class Run:
    """What was measured so far."""

    began_at: float
    """Unix seconds."""
    records: list[Record] = field(default_factory=list)
    gaps: GapHistogram = field(default_factory=GapHistogram)
    duration_seconds: float = 0.0
    """From the first request that was due to the end of the last one."""
    sent: int = 0
    unfinished: int = 0
    """Requests that were cut when the run was stopped."""
    is_interrupted: bool = False

    @property
    def running(self) -> int:
        return self.sent - len(self.records) - self.unfinished


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to send: each request when it is due or, with `concurrency`, as soon as another one has ended."""

    concurrency: int | None = None
    duration_seconds: float = math.inf
    """No request begins later."""
    seed: int = 0


async def scale_of(target: Target, *, seed: int) -> PromptScale:
    """How words become tokens at `target`. Raises TargetError when it does not answer."""
    counts = {words: await target.count_tokens(random_text(words, f"{seed} probe {words}")) for words in PROBES}
    known = {words: tokens for words, tokens in counts.items() if tokens is not None}
    return measured_scale(known) if len(known) == len(PROBES) else PromptScale()


async def run_load(
    target: Target,
    requests: Iterator[PlannedRequest],
    options: LoadOptions,
    *,
    scale: PromptScale,
    stop: asyncio.Event,
    watch: Callable[[Run], None] | None = None,
) -> Run:
    """Send all of `requests` and follow each to its end, or until `stop` is set; `watch` sees the run every second."""
    run = Run(began_at=time.time())
    began = time.monotonic()

    def prompt_of(request: PlannedRequest) -> str:
        return prompt_text(request, scale, seed=options.seed)

    async def follow(request: PlannedRequest, prompt: str, due: float) -> None:
        run.sent += 1
        lag = max(0.0, time.monotonic() - due)
        try:
            answer = await target.send(prompt, output_tokens=request.output_tokens, due=due)
        except asyncio.CancelledError:
            run.unfinished += 1
            raise
        run.records.append(_record(run.gaps, request, answer, due_seconds=due - began, lag_seconds=lag))

    sending = asyncio.create_task(
        _send_all(((each, prompt_of(each)) for each in requests), options, began=began, follow=follow)
    )
    watching = asyncio.create_task(_watch(run, began, watch))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
        run.is_interrupted = not sending.done()
    finally:
        for task in (sending, watching, stopping):
            task.cancel()
        ended = await asyncio.gather(sending, watching, stopping, return_exceptions=True)
    for error in ended:
        if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
            raise error
    run.duration_seconds = time.monotonic() - began
    return run


async def _send_all(
    prompts: Iterator[tuple[PlannedRequest, str]],
    options: LoadOptions,
    *,
    began: float,
    follow: Callable[[PlannedRequest, str, float], Coroutine[None, None, None]],
) -> None:
    """Ends when all have ended; cancelled, it cancels them. A prompt is made before its request is due."""

    async def take_turns() -> None:
        for request, prompt in prompts:
            now = time.monotonic()
            if now - began >= options.duration_seconds:
                return
            await follow(request, prompt, now)

    async with asyncio.TaskGroup() as tasks:
        if options.concurrency is not None:
            for _ in range(options.concurrency):
                tasks.create_task(take_turns())
            return
        for request, prompt in prompts:
            if request.at_seconds >= options.duration_seconds:
                return
            due = began + request.at_seconds
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.create_task(follow(request, prompt, due))


async def _watch(run: Run, began: float, watch: Callable[[Run], None] | None) -> None:
    while watch is not None:
        await asyncio.sleep(1.0)
        run.duration_seconds = time.monotonic() - began
        watch(run)


def _record(
    gaps: GapHistogram, request: PlannedRequest, answer: Answer, *, due_seconds: float, lag_seconds: float
) -> Record:
    own: Sequence[float] = answer.gaps_seconds
    if answer.failure is None:
        gaps.add(own)
    light = Answer(
        ttft_seconds=answer.ttft_seconds,
        e2e_seconds=answer.e2e_seconds,
        output_tokens=answer.output_tokens if answer.output_tokens is not None else _counted(answer),
        prompt_tokens=answer.prompt_tokens,
        finish_reason=answer.finish_reason,
        failure=answer.failure,
    )
    return Record(request, due_seconds, lag_seconds, percentile(own, 95), light)


def _counted(answer: Answer) -> int | None:
    """Where the server does not count, an event is a token."""
    return None if answer.ttft_seconds is None else 1 + len(answer.gaps_seconds)


def failures_by_kind(records: Iterable[Record]) -> Mapping[str, tuple[int, str]]:
    """Kind to (how many, the first one's whole text)."""
    found: dict[str, tuple[int, str]] = {}
    for record in records:
        if record.answer.failure is not None:
            kind = record.answer.failure.partition(":")[0]
            count, example = found.get(kind, (0, record.answer.failure))
            found[kind] = (count + 1, example)
    return found
