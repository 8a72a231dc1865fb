"""An open-loop load generator for OpenAI endpoints: Poisson arrivals in phases, streamed completions, honest outcomes.

Owns planning, sending and measuring; knows nothing of Kubernetes. Needs aiohttp only, so that the demo can mount this
one file into a pod: `python load.py --url URL --phases FILE --out FILE`. A late or failed request stays in the record.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp

TAIL_BYTES = 4096
"""How much of a stream's end is kept: its last events hold the usage, or the error."""


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """A kind of request: lengths are drawn uniformly between the inclusive bounds, in tokens."""

    name: str
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of load with one rate and one mix of classes."""

    name: str
    seconds: float
    requests_per_second: float
    classes: tuple[TrafficClass, ...]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the plan; `at_seconds` counts from the start of the load."""

    index: int
    at_seconds: float
    phase: str
    traffic_class: str
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the requests go and how a prompt of n tokens is made."""

    url: str
    model: str
    characters_per_token: int = 4
    timeout_seconds: float = 300.0
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Latencies count from the planned arrival, so a late generator hides nothing.

    `failure` None means: HTTP 200 and a stream that ended with `[DONE]` and without an error event.
    """

    index: int
    phase: str
    traffic_class: str
    input_tokens: int
    output_tokens_asked: int
    arrived_at: float
    """Unix seconds."""
    lag_seconds: float
    """How much later than planned the request was sent."""
    ttft_seconds: float | None = None
    itl_mean_seconds: float | None = None
    longest_gap_seconds: float | None = None
    e2e_seconds: float | None = None
    output_tokens: int | None = None
    prompt_tokens_counted: int | None = None
    finish_reason: str | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a set of outcomes; percentiles are of the successful ones, None when there were none."""

    sent: int
    failed: int
    failures: Mapping[str, int]
    output_tokens: int
    ttft_p50_seconds: float | None
    ttft_p95_seconds: float | None
    itl_p95_seconds: float | None
    e2e_p95_seconds: float | None
    lag_max_seconds: float


def parse_phases(data: object) -> tuple[Phase, ...]:
    """Read the phases' JSON; raises ValueError that names what is wrong."""
    try:
        if not isinstance(data, list) or not data:
            raise TypeError("a list of phases is expected")
        return tuple(
            Phase(
                name=str(item["name"]),
                seconds=float(item["seconds"]),
                requests_per_second=float(item["requests_per_second"]),
                classes=tuple(
                    TrafficClass(
                        name=str(kind["name"]),
                        input_tokens=(int(kind["input_tokens"][0]), int(kind["input_tokens"][1])),
                        output_tokens=(int(kind["output_tokens"][0]), int(kind["output_tokens"][1])),
                        share=float(kind.get("share", 1.0)),
                    )
                    for kind in item["classes"]
                ),
            )
            for item in data
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"The phases are not as expected: {error!r}") from error


def phases_json(phases: Iterable[Phase]) -> str:
    """The inverse of `parse_phases`."""
    return json.dumps([asdict(phase) for phase in phases])


def plan(phases: Sequence[Phase], rng: random.Random) -> list[PlannedRequest]:
    """Poisson arrivals for every phase, in order of time; the same seed gives the same plan."""
    planned: list[PlannedRequest] = []
    began = 0.0
    for phase in phases:
        at = began
        shares = [kind.share for kind in phase.classes]
        while phase.requests_per_second > 0:
            at += rng.expovariate(phase.requests_per_second)
            if at >= began + phase.seconds:
                break
            kind = rng.choices(phase.classes, shares)[0]
            planned.append(
                PlannedRequest(
                    index=len(planned),
                    at_seconds=at,
                    phase=phase.name,
                    traffic_class=kind.name,
                    input_tokens=rng.randint(*kind.input_tokens),
                    output_tokens=rng.randint(*kind.output_tokens),
                )
            )
        began += phase.seconds
    return planned


class StreamMeter:
    """Counts server-sent events and their gaps by looking at bytes only; JSON is read once, at the end."""

    def __init__(self) -> None:
        self.events = 0
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.longest_gap_seconds = 0.0
        self._tail = b""

    def feed(self, chunk: bytes, now: float) -> None:
        ended = chunk.count(b"\n\n")
        if self._tail.endswith(b"\n") and chunk.startswith(b"\n"):
            ended += 1
        self._tail = (self._tail + chunk)[-TAIL_BYTES:]
        if not ended:
            return
        self.events += ended
        if self.first_at is None:
            self.first_at = now
        elif self.last_at is not None:
            self.longest_gap_seconds = max(self.longest_gap_seconds, now - self.last_at)
        self.last_at = now

    def last_events(self) -> list[dict[str, object]]:
        """The JSON events in the kept tail, in order; a first one that was cut is left out."""
        found: list[dict[str, object]] = []
        for part in self._tail.split(b"\n\n"):
            if not part.startswith(b"data: {"):
                continue
            try:
                event = json.loads(part[6:])
            except ValueError:
                continue
            if isinstance(event, dict):
                found.append(event)
        return found

    @property
    def done(self) -> bool:
        return self._tail.rstrip().endswith(b"data: [DONE]")


def finish(outcome: Outcome, meter: StreamMeter, *, began: float) -> Outcome:
    """Complete `outcome` from a stream that has ended; `began` is the planned arrival on the meter's clock."""
    failure: str | None = None if meter.done else "cut: the stream ended without [DONE]"
    tokens = prompt_tokens = reason = None
    for event in meter.last_events():
        if isinstance(event.get("error"), dict):
            failure = f"error in the stream: {json.dumps(event['error'])[:200]}"
        usage = event.get("usage")
        if isinstance(usage, dict):
            tokens, prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
        choices = event.get("choices")
        if isinstance(choices, list) and choices and choices[0].get("finish_reason"):
            reason = choices[0]["finish_reason"]
    if failure is None and meter.first_at is None:
        failure = "empty: the stream had no event"
    first, last = meter.first_at, meter.last_at
    itl = None
    if first is not None and last is not None and isinstance(tokens, int) and tokens > 1:
        itl = (last - first) / (tokens - 1)
    return replace(
        outcome,
        ttft_seconds=None if first is None else first - began,
        itl_mean_seconds=itl,
        longest_gap_seconds=meter.longest_gap_seconds if meter.events > 1 else None,
        e2e_seconds=None if last is None else last - began,
        output_tokens=tokens if isinstance(tokens, int) else None,
        prompt_tokens_counted=prompt_tokens if isinstance(prompt_tokens, int) else None,
        finish_reason=reason,
        failure=failure,
    )


def prompt_text(request: PlannedRequest, *, seed: int, characters_per_token: int) -> str:
    """A prompt that shares no prefix with another, so that a prefix cache cannot answer for it."""
    characters = max(1, request.input_tokens * characters_per_token)
    return random.Random(seed * 1_000_003 + request.index).randbytes(characters // 2 + 1).hex()[:characters]


async def send(
    session: aiohttp.ClientSession, endpoint: Endpoint, request: PlannedRequest, *, seed: int, began: float
) -> Outcome:
    """Send one request now and follow its stream to the end. Network and HTTP errors become the outcome's failure."""
    now = time.monotonic()
    due = began + request.at_seconds
    outcome = Outcome(
        index=request.index,
        phase=request.phase,
        traffic_class=request.traffic_class,
        input_tokens=request.input_tokens,
        output_tokens_asked=request.output_tokens,
        arrived_at=time.time() - (now - due),
        lag_seconds=max(0.0, now - due),
    )
    body = {
        "model": endpoint.model,
        "prompt": prompt_text(request, seed=seed, characters_per_token=endpoint.characters_per_token),
        "max_tokens": request.output_tokens,
        "min_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {} if endpoint.api_key is None else {"Authorization": f"Bearer {endpoint.api_key}"}
    meter = StreamMeter()
    try:
        async with session.post(f"{endpoint.url}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                return replace(outcome, failure=f"HTTP {response.status}: {text}")
            async for chunk in response.content.iter_any():
                meter.feed(chunk, time.monotonic())
    except TimeoutError:
        return replace(finish(outcome, meter, began=due), failure=f"no end within {endpoint.timeout_seconds:.0f} s")
    except aiohttp.ClientError as error:
        return replace(finish(outcome, meter, began=due), failure=f"{type(error).__name__}: {error}")
    return finish(outcome, meter, began=due)


async def run(
    phases: Sequence[Phase], endpoint: Endpoint, *, seed: int, report: Callable[[dict[str, object]], None]
) -> list[Outcome]:
    """Send the whole plan and wait for every stream's end; `report` gets a record per phase, request and the end."""
    planned = plan(phases, random.Random(seed))
    # One connection a request: a kept one would pin the load to the replicas of the first minute.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout_seconds)
    outcomes: list[Outcome] = []

    async def follow(request: PlannedRequest) -> None:
        outcome = await send(session, endpoint, request, seed=seed, began=began)
        outcomes.append(outcome)
        report({"kind": "request", **asdict(outcome)})

    async def announce() -> None:
        starts = 0.0
        for phase in phases:
            await asyncio.sleep(max(0.0, began + starts - time.monotonic()))
            report({"kind": "phase", "at": time.time(), **asdict(phase)})
            starts += phase.seconds
        await asyncio.sleep(max(0.0, began + starts - time.monotonic()))

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(announce())
            for request in planned:
                await asyncio.sleep(max(0.0, began + request.at_seconds - time.monotonic()))
                tasks.create_task(follow(request))
    report({"kind": "end", "at": time.time(), "summary": asdict(summarise(outcomes))})
    return outcomes


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The smallest value that at least `percent` % of the values do not exceed; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, -(-len(ordered) * percent // 100).__trunc__() - 1)]


def summarise(outcomes: Sequence[Outcome]) -> Summary:
    failures: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.failure is not None:
            kind = outcome.failure.partition(":")[0]
            failures[kind] = failures.get(kind, 0) + 1
    good = [outcome for outcome in outcomes if outcome.failure is None]
    ttft = [outcome.ttft_seconds for outcome in good if outcome.ttft_seconds is not None]
    return Summary(
        sent=len(outcomes),
        failed=sum(failures.values()),
        failures=failures,
        output_tokens=sum(outcome.output_tokens or 0 for outcome in outcomes),
        ttft_p50_seconds=percentile(ttft, 50),
        ttft_p95_seconds=percentile(ttft, 95),
        itl_p95_seconds=percentile((o.itl_mean_seconds for o in good if o.itl_mean_seconds is not None), 95),
        e2e_p95_seconds=percentile((o.e2e_seconds for o in good if o.e2e_seconds is not None), 95),
        lag_max_seconds=max((outcome.lag_seconds for outcome in outcomes), default=0.0),
    )


def outcome_of(record: Mapping[str, object]) -> Outcome:
    """Read back a `request` record."""
    return Outcome(**{name: value for name, value in record.items() if name != "kind"})  # type: ignore[arg-type]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tidegate-load", description="Send an open-loop load to an OpenAI endpoint.")
    parser.add_argument("--url", required=True, help="base URL without /v1, e.g. http://10.96.3.4:8000")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--phases", required=True, type=Path, help="JSON file with the phases")
    parser.add_argument("--out", default="-", help="file for one JSON record a line; - is standard output")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--characters-per-token", type=int, default=4)
    parser.add_argument("--timeout-seconds", type=float, default=300.0, help="per request, from its sending")
    parser.add_argument("--api-key")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when every request succeeded, 1 when one failed, 2 for wrong input."""
    arguments = build_parser().parse_args(argv)
    try:
        phases = parse_phases(json.loads(arguments.phases.read_text()))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    endpoint = Endpoint(
        url=arguments.url.rstrip("/"),
        model=arguments.model,
        characters_per_token=arguments.characters_per_token,
        timeout_seconds=arguments.timeout_seconds,
        api_key=arguments.api_key,
    )
    with contextlib.nullcontext(sys.stdout) if arguments.out == "-" else open(arguments.out, "w") as out:

        def report(record: dict[str, object]) -> None:
            out.write(json.dumps(record) + "\n")
            out.flush()

        outcomes = asyncio.run(run(phases, endpoint, seed=arguments.seed, report=report))
    return 1 if any(outcome.failure is not None for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
