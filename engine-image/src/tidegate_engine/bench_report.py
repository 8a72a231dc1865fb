"""What a benchmark measured, as figures, text, JSON and one HTML page. Pure: a `Run` in, values and strings out.

The JSON's names are those of `vllm bench serve`, so that what reads its results reads ours.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from tidegate_engine.bench import Record, Run, failures_by_kind
from tidegate_engine.charts import Chart, Line, Span, has_data, page, svg, table, tell
from tidegate_engine.load_client import percentile

PERCENTS = (50, 90, 95, 99)
GOAL_NAMES = ("ttft", "tpot", "itl", "e2el")
TITLES = {
    "ttft": "time to first token (TTFT)",
    "itl": "between tokens (ITL)",
    "tpot": "a token after the first (TPOT)",
    "e2el": "whole request (E2E)",
}
LATE_SHARE = 0.01
LATE_SECONDS = 0.1
"""A generator later than this with more than that share of the requests measured itself."""
BINS = 120
MAX_DOTS = 3000


@dataclass(frozen=True, slots=True)
class Latency:
    """One kind of latency over the requests that succeeded (`itl`: over their tokens); None = nothing was measured."""

    mean_seconds: float | None
    percentiles_seconds: Mapping[int, float | None]
    goal_seconds: float | None = None
    met_share: float | None = None
    """Of the successful requests, those within the goal."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. Throughput counts successful requests only."""

    completed: int
    failed: int
    unfinished: int
    failures: Mapping[str, tuple[int, str]]
    duration_seconds: float
    input_tokens: int | None
    """As the server counted them; None = it does not say."""
    asked_input_tokens: int
    output_tokens: int
    asked_output_tokens: int
    latencies: Mapping[str, Latency]
    good: int | None
    """Successful requests that met every goal; None = there are no goals."""
    lag_max_seconds: float
    late: int
    """Requests that were sent noticeably later than they were due."""

    @property
    def requests_per_second(self) -> float:
        return self.completed / self.duration_seconds if self.duration_seconds else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.duration_seconds if self.duration_seconds else 0.0

    @property
    def total_tokens_per_second(self) -> float:
        tokens = self.output_tokens + (self.input_tokens or self.asked_input_tokens)
        return tokens / self.duration_seconds if self.duration_seconds else 0.0

    @property
    def goodput_per_second(self) -> float | None:
        return None if self.good is None or not self.duration_seconds else self.good / self.duration_seconds


def parse_goals(texts: Sequence[str]) -> dict[str, float]:
    """Read `ttft:500 itl:50ms e2el:2s` as seconds by name; milliseconds without a unit. Raises ValueError."""
    goals: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        digits, factor = (value[:-2], 1e-3) if value.endswith("ms") else (value, 1e-3)
        if value.endswith("s") and not value.endswith("ms"):
            digits, factor = value[:-1], 1.0
        try:
            seconds = float(digits) * factor
        except ValueError:
            seconds = math.nan
        if name not in GOAL_NAMES or not 0 < seconds < math.inf:
            raise ValueError(f"{text!r} is no goal; write {', '.join(GOAL_NAMES)} with milliseconds, such as ttft:500")
        goals[name] = seconds
    return goals


def summarise(run: Run, goals: Mapping[str, float]) -> Summary:
    records = run.records
    good = [record for record in records if record.answer.failure is None]
    counted = [record.answer.prompt_tokens for record in good if record.answer.prompt_tokens is not None]
    latencies = {name: _latency(name, run, good, goals.get(name)) for name in TITLES}
    return Summary(
        completed=len(good),
        failed=len(records) - len(good),
        unfinished=run.unfinished,
        failures=failures_by_kind(records),
        duration_seconds=run.duration_seconds,
        input_tokens=sum(counted) if good and len(counted) == len(good) else None,
        asked_input_tokens=sum(record.request.input_tokens for record in good),
        output_tokens=sum(record.answer.output_tokens or 0 for record in good),
        asked_output_tokens=sum(record.request.output_tokens for record in good),
        latencies=latencies,
        good=sum(_meets(record, goals) for record in good) if goals else None,
        lag_max_seconds=max((record.lag_seconds for record in records), default=0.0),
        late=sum(record.lag_seconds > LATE_SECONDS for record in records),
    )


def _of(record: Record, name: str) -> float | None:
    """A request's own latency; between tokens, the 95th percentile of its gaps."""
    answer = record.answer
    match name:
        case "ttft":
            return answer.ttft_seconds
        case "tpot":
            return answer.tpot_seconds
        case "itl":
            return record.itl_p95_seconds
        case _:
            return answer.e2e_seconds


def _meets(record: Record, goals: Mapping[str, float]) -> bool:
    """A latency that the request does not have (an answer of one token has no gaps) is within any goal."""
    return all(value is None or value <= goal for name, goal in goals.items() for value in (_of(record, name),))


def _latency(name: str, run: Run, good: Sequence[Record], goal: float | None) -> Latency:
    if name == "itl":
        mean = run.gaps.sum_seconds / run.gaps.total if run.gaps.total else None
        percentiles = {percent: run.gaps.percentile(percent) for percent in PERCENTS}
    else:
        values = sorted(value for record in good if (value := _of(record, name)) is not None)
        mean = sum(values) / len(values) if values else None
        percentiles = {percent: percentile(values, percent) for percent in PERCENTS}
    met = sum(_meets(record, {name: goal}) for record in good) / len(good) if goal and good else None
    return Latency(mean, percentiles, goal, met)


# --- text


def text(summary: Summary, *, title: str) -> str:
    """What a person reads in the terminal."""
    lines = [title, ""]
    state = f"{summary.completed} completed, {summary.failed} failed"
    if summary.unfinished:
        state += f", {summary.unfinished} cut when the run was stopped"
    lines.append(f"{'requests':<28} {state} in {summary.duration_seconds:.1f} s")
    for kind, (count, example) in summary.failures.items():
        lines.append(f"{'':<28} {count} x {kind}: {example.partition(':')[2].strip()[:120]}".rstrip(": "))
    rate = f"{summary.requests_per_second:.2f} requests/s, {summary.output_tokens_per_second:.1f} output tokens/s"
    lines.append(f"{'throughput':<28} {rate}, {summary.total_tokens_per_second:.1f} tokens/s in and out")
    lines.append(f"{'tokens':<28} {_tokens_text(summary)}")
    if summary.goodput_per_second is not None:
        share = 100 * (summary.good or 0) / max(1, summary.completed)
        lines.append(
            f"{'goodput':<28} {summary.goodput_per_second:.2f} requests/s, {share:.1f} % of the completed met all goals"
        )
    lines += ["", f"{'milliseconds':<32}" + "".join(f"{head:>10}" for head in ("mean", *map(_percent_name, PERCENTS)))]
    for name, latency in summary.latencies.items():
        values = (latency.mean_seconds, *latency.percentiles_seconds.values())
        goal = "" if latency.goal_seconds is None else f"   goal {1000 * latency.goal_seconds:g}: {_met(latency)}"
        lines.append(f"{TITLES[name]:<32}" + "".join(f"{_milliseconds(value):>10}" for value in values) + goal)
    return "\n".join(lines + [f"\nWarning: {warning}" for warning in warnings(summary)])


def warnings(summary: Summary) -> list[str]:
    """What makes the figures doubtful."""
    found = []
    asked, counted = summary.asked_input_tokens, summary.input_tokens
    if counted is not None and asked and abs(counted - asked) > 0.1 * asked:
        found.append(f"prompts had {counted} tokens, not the {asked} that were wanted")
    if summary.output_tokens < 0.98 * summary.asked_output_tokens:
        found.append(
            f"answers had {summary.output_tokens} tokens, not the {summary.asked_output_tokens} that were wanted: the "
            "server may not know ignore_eos; see --extra-body"
        )
    if summary.late > LATE_SHARE * (summary.completed + summary.failed):
        found.append(
            f"{summary.late} requests were sent up to {summary.lag_max_seconds:.1f} s late: the load generator could "
            "not keep up (latencies count from when they were due)"
        )
    return found


def _tokens_text(summary: Summary) -> str:
    count = max(1, summary.completed)
    into = summary.input_tokens if summary.input_tokens is not None else summary.asked_input_tokens
    how = "" if summary.input_tokens is not None else " (wanted; the server does not count)"
    return (
        f"{into} in{how}, {summary.output_tokens} out; {into / count:.0f} and {summary.output_tokens / count:.0f} each"
    )


def _percent_name(percent: int) -> str:
    return f"p{percent}"


def _met(latency: Latency) -> str:
    return "unknown" if latency.met_share is None else f"met by {100 * latency.met_share:.1f} %"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# --- JSON


def as_json(run: Run, summary: Summary, options: Mapping[str, object]) -> dict[str, object]:
    """Everything, for programs; `options` is what the run was asked to do."""
    found: dict[str, object] = {
        "date": datetime.fromtimestamp(run.began_at, UTC).strftime("%Y%m%d-%H%M%S"),
        "options": dict(options),
        "duration": summary.duration_seconds,
        "completed": summary.completed,
        "failed": summary.failed,
        "unfinished": summary.unfinished,
        "interrupted": run.is_interrupted,
        "failures": {kind: count for kind, (count, _) in summary.failures.items()},
        "errors": [example for _, example in summary.failures.values()],
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.requests_per_second,
        "output_throughput": summary.output_tokens_per_second,
        "total_token_throughput": summary.total_tokens_per_second,
        "request_goodput": summary.goodput_per_second,
        "max_lag_ms": 1000 * summary.lag_max_seconds,
        "warnings": warnings(summary),
    }
    for name, latency in summary.latencies.items():
        found[f"mean_{name}_ms"] = _in_ms(latency.mean_seconds)
        found[f"median_{name}_ms"] = _in_ms(latency.percentiles_seconds[50])
        for percent, value in latency.percentiles_seconds.items():
            found[f"p{percent}_{name}_ms"] = _in_ms(value)
        if latency.goal_seconds is not None:
            found[f"goal_{name}_ms"] = _in_ms(latency.goal_seconds)
            found[f"goal_{name}_met_share"] = latency.met_share
    return found


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


# --- HTML


def html(run: Run, summary: Summary, options: Mapping[str, object], *, title: str) -> str:
    """The page."""
    span = Span(0.0, max(1.0, run.duration_seconds), (), ())
    written = datetime.fromtimestamp(run.began_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    doubts = [f'<p class="lead bad">{escape(warning)}.</p>' for warning in warnings(summary)]
    return page(
        title,
        [
            f"<p>{written}</p>",
            *doubts,
            _figures(summary),
            "<h2>Latencies, in milliseconds</h2>",
            _latencies(summary),
            "<h2>The run</h2>",
            "<p>All plots share the time axis; a dot is one request, at the time of its end or first token.</p>",
            *(svg(chart, span) for chart in _charts(run, summary) if has_data(chart)),
            "<h2>Failures</h2>",
            table(
                ("Requests", "Kind", "The first one"),
                [(str(count), escape(kind), escape(example)) for kind, (count, example) in summary.failures.items()],
            ),
            "<h2>What was asked for</h2>",
            table(("", ""), [(escape(name), escape(str(value))) for name, value in options.items()]),
        ],
    )


def _figures(summary: Summary) -> str:
    rows = [
        ("Completed", f"{summary.completed} requests in {summary.duration_seconds:.1f} s"),
        ("Failed", f"{summary.failed}, and {summary.unfinished} cut when the run was stopped"),
        ("Requests", f"{summary.requests_per_second:.2f} a second"),
        ("Output", f"{summary.output_tokens_per_second:.1f} tokens a second"),
        ("Tokens", _tokens_text(summary)),
    ]
    if summary.goodput_per_second is not None:
        rows.append(("Goodput", f"{summary.goodput_per_second:.2f} requests a second within every goal"))
    return table(("", ""), [(escape(name), escape(value)) for name, value in rows])


def _latencies(summary: Summary) -> str:
    rows = [
        (
            escape(TITLES[name]),
            _milliseconds(latency.mean_seconds),
            *(_milliseconds(value) for value in latency.percentiles_seconds.values()),
            "" if latency.goal_seconds is None else f"{tell(1000 * latency.goal_seconds)}: {_met(latency)}",
        )
        for name, latency in summary.latencies.items()
    ]
    return table(("", "mean", *map(_percent_name, PERCENTS), "goal"), rows)


def _charts(run: Run, summary: Summary) -> list[Chart]:
    good = [record for record in run.records if record.answer.failure is None]
    goals = {name: latency.goal_seconds for name, latency in summary.latencies.items()}

    def dots(name: str, at: Callable[[Record], float | None]) -> list[tuple[float, float]]:
        found = [
            (record.due_seconds + when, 1000 * value)
            for record in _thinned(good)
            if (value := _of(record, name)) is not None and (when := at(record)) is not None
        ]
        return sorted(found)

    def first(record: Record) -> float | None:
        return record.answer.ttft_seconds

    def end(record: Record) -> float | None:
        return record.answer.e2e_seconds

    def goal(name: str) -> float | None:
        return _in_ms(goals[name])

    in_flight = Line("in flight", "s1", _in_flight(run), stepped=True)
    return [
        Chart("Output", "tokens/s", [Line("tokens/s", "s1", _token_rate(run, good))]),
        Chart("Requests", "in flight", [in_flight]),
        Chart(
            "Time to first token", "milliseconds", [], dots=dots("ttft", first), target=goal("ttft"), logarithmic=True
        ),
        Chart(
            "Between tokens, 95th percentile of each request",
            "milliseconds", [], dots=dots("itl", end), target=goal("itl"), logarithmic=True,
        ),
        Chart("Whole request", "milliseconds", [], dots=dots("e2el", end), target=goal("e2el"), logarithmic=True),
    ]  # fmt: skip


def _thinned(records: Sequence[Record]) -> Sequence[Record]:
    return records[:: max(1, math.ceil(len(records) / MAX_DOTS))]


def _token_rate(run: Run, records: Iterable[Record]) -> list[tuple[float, float | None]]:
    """A request's tokens are spread evenly from its first to its last."""
    width = max(run.duration_seconds, 1e-9) / BINS
    counts = [0.0] * BINS
    for record in records:
        answer = record.answer
        if answer.ttft_seconds is None or answer.e2e_seconds is None or not answer.output_tokens:
            continue
        start, end = record.due_seconds + answer.ttft_seconds, record.due_seconds + answer.e2e_seconds
        first, last = (min(BINS - 1, max(0, int(at / width))) for at in (start, end))
        for index in range(first, last + 1):
            counts[index] += answer.output_tokens / (last - first + 1)
    return [((index + 0.5) * width, count / width) for index, count in enumerate(counts)]


def _in_flight(run: Run) -> list[tuple[float, float | None]]:
    changes = [0] * (BINS + 2)
    width = max(run.duration_seconds, 1e-9) / BINS
    for record in run.records:
        ended = record.due_seconds + (record.answer.e2e_seconds or 0.0)
        changes[min(BINS, int(record.due_seconds / width))] += 1
        changes[min(BINS, int(ended / width)) + 1] -= 1
    total, points = 0, []
    for index in range(BINS + 1):
        total += changes[index]
        points.append((index * width, float(total)))
    return [(at, value) for at, value in points]
