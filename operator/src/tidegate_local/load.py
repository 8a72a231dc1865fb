"""An open-loop load generator for OpenAI endpoints: Poisson arrivals in phases, streamed completions, honest outcomes.

Owns the plan and the record; sending is the engine's `load_client`. Knows nothing of Kubernetes. The demo mounts this
file into a pod of the operator's image: `python load.py --url URL --phases FILE --out FILE`. A late or failed request
stays in the record.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from tidegate_engine.load_client import Endpoint, open_session, percentile, send

CHARACTERS_PER_TOKEN = 4


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


def prompt_text(request: PlannedRequest, *, seed: int, characters_per_token: int) -> str:
    """A prompt that shares no prefix with another, so that a prefix cache cannot answer for it."""
    characters = max(1, request.input_tokens * characters_per_token)
    return random.Random(seed * 1_000_003 + request.index).randbytes(characters // 2 + 1).hex()[:characters]


async def follow(
    session: aiohttp.ClientSession, endpoint: Endpoint, request: PlannedRequest, *, prompt: str, began: float
) -> Outcome:
    """Send `request` now and follow its stream to the end; `began` is the load's start in monotonic seconds."""
    now = time.monotonic()
    due = began + request.at_seconds
    arrived_at = time.time() - (now - due)
    answer = await send(session, endpoint, prompt, output_tokens=request.output_tokens, due=due)
    return Outcome(
        index=request.index,
        phase=request.phase,
        traffic_class=request.traffic_class,
        input_tokens=request.input_tokens,
        output_tokens_asked=request.output_tokens,
        arrived_at=arrived_at,
        lag_seconds=max(0.0, now - due),
        ttft_seconds=answer.ttft_seconds,
        itl_mean_seconds=answer.tpot_seconds,
        longest_gap_seconds=max(answer.gaps_seconds, default=None),
        e2e_seconds=answer.e2e_seconds,
        output_tokens=answer.output_tokens,
        prompt_tokens_counted=answer.prompt_tokens,
        finish_reason=answer.finish_reason,
        failure=answer.failure,
    )


async def run(
    phases: Sequence[Phase],
    endpoint: Endpoint,
    *,
    seed: int,
    report: Callable[[dict[str, object]], None],
    characters_per_token: int = CHARACTERS_PER_TOKEN,
) -> list[Outcome]:
    """Send the whole plan and wait for every stream's end; `report` gets a record per phase, request and the end."""
    planned = plan(phases, random.Random(seed))
    outcomes: list[Outcome] = []

    async def send_one(request: PlannedRequest) -> None:
        prompt = prompt_text(request, seed=seed, characters_per_token=characters_per_token)
        outcome = await follow(session, endpoint, request, prompt=prompt, began=began)
        outcomes.append(outcome)
        report({"kind": "request", **asdict(outcome)})

    async def announce() -> None:
        starts = 0.0
        for phase in phases:
            await asyncio.sleep(max(0.0, began + starts - time.monotonic()))
            report({"kind": "phase", "at": time.time(), **asdict(phase)})
            starts += phase.seconds
        await asyncio.sleep(max(0.0, began + starts - time.monotonic()))

    # One connection a request: a kept one would pin the load to the replicas of the first minute.
    async with open_session(endpoint, keep_alive=False) as session:
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(announce())
            for request in planned:
                await asyncio.sleep(max(0.0, began + request.at_seconds - time.monotonic()))
                tasks.create_task(send_one(request))
    report({"kind": "end", "at": time.time(), "summary": asdict(summarise(outcomes))})
    return outcomes


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
    parser.add_argument("--characters-per-token", type=int, default=CHARACTERS_PER_TOKEN)
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
        timeout_seconds=arguments.timeout_seconds,
        api_key=arguments.api_key,
    )
    with contextlib.nullcontext(sys.stdout) if arguments.out == "-" else open(arguments.out, "w") as out:

        def report(record: dict[str, object]) -> None:
            out.write(json.dumps(record) + "\n")
            out.flush()

        characters_per_token = arguments.characters_per_token
        outcomes = asyncio.run(
            run(phases, endpoint, seed=arguments.seed, report=report, characters_per_token=characters_per_token)
        )
    return 1 if any(outcome.failure is not None for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
