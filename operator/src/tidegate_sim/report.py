"""The simulator's report: text for a terminal, and one HTML page with inline plots, no script, nothing fetched.

Pure: results in, strings out. Called by the command.
"""

from collections.abc import Callable, Sequence
from html import escape

from tidegate_engine.charts import SLOTS, Chart, Line, Span, clock, has_data, page, svg, table, tell, tell_milliseconds
from tidegate_operator.observation import STARTING_PHASES, ReplicaPhase
from tidegate_sim.results import Change, Point, Result, Service

MAX_LISTED = 200
"""Changes in the table of a page; marks are drawn for as many."""
MAX_MARKS = 40

HEAD = ("Policy", "Within goals", "Goodput", "GPU-hours", "Cost", "Scalings/h", "Reversals", "Settings changes")
COLUMNS = ("policy", "requests", "in goals", "GPU-h", "cost", "scale/h", "TTFT p95", "p99", "ITL p95", "retunes")
LATENCIES = ("TTFT p50 / p95 / p99", "ITL p50 / p95 / p99", "Queue p95", "Preemptions")


def text(results: Sequence[Result]) -> str:
    """A table with a row for each policy, and one for each of its patterns."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for result in results:
        rows.append((result.controller, *_cells(result, result.overall)))
        rows += [(f"  {name}", *_cells(None, service)) for name, service in result.patterns.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) if n == 0 else cell.rjust(width) for n, (cell, width) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    return "\n".join([*lines, *(f"{each.controller}: {lost}" for each in results if (lost := _lost(each.overall)))])


LOST = {
    "refused": "refused, since they can never fit into the engine",
    "timed_out": "given up by their clients",
    "failed": "broken off",
    "in_flight": "not ended an hour after the last arrival",
}


def _lost(service: Service) -> str:
    """What became of those that were not served."""
    return ", ".join(f"{service.outcomes[name]} {words}" for name, words in LOST.items() if service.outcomes.get(name))


def _cells(result: Result | None, service: Service) -> tuple[str, ...]:
    """A row's figures; those of the whole fleet are blank for a pattern."""
    whole = ("", "", "") if result is None else (tell(result.gpu_hours), _cost(result), tell(result.scalings_per_hour))
    return (
        str(service.arrived),
        _percent(service.attainment),
        *whole,
        tell(service.ttft.p95, " s"),
        tell(service.ttft.p99, " s"),
        tell_milliseconds(service.itl.p95),
        "" if result is None else str(len(result.retunings)),
    )


def html(results: Sequence[Result], *, title: str, facts: Sequence[tuple[str, str]]) -> str:
    """The whole page."""
    parts = [
        table(("", ""), [(escape(name), escape(value)) for name, value in facts]),
        "<h2>Policies compared</h2>",
        "<p>A request counts as within the goals when its first token came in time, its tokens followed each other "
        "fast enough on average, and all else that is asked of it was held; of all that arrived, those refused, failed "
        "or given up among the missed.</p>",
        table((*HEAD, *LATENCIES), [_row(result) for result in results]),
    ]
    for result in results:
        parts += _section(result)
    return page(title, parts)


def _row(result: Result) -> tuple[str, ...]:
    service = result.overall
    return (
        escape(result.controller),
        f"<b>{_percent(service.attainment)}</b>",
        tell(result.goodput, "/s"),
        f"<b>{tell(result.gpu_hours)}</b>",
        _cost(result) or "no price given",
        tell(result.scalings_per_hour),
        str(result.reversals),
        str(len(result.retunings)),
        f"{tell(service.ttft.p50)} / {tell(service.ttft.p95)} / {tell(service.ttft.p99)} s",
        " / ".join(tell_milliseconds(each) for each in (service.itl.p50, service.itl.p95, service.itl.p99)),
        tell(service.queue.p95, " s"),
        str(result.preemptions),
    )


def _section(result: Result) -> list[str]:
    start = result.fleet.epoch_seconds
    end = start + max(1.0, result.duration_seconds)
    changes = [change for change in result.changes if change.scales or change.retunes]
    marks = [(start + change.at, str(n + 1)) for n, change in enumerate(changes)] if len(changes) <= MAX_MARKS else []
    span = Span(start, end, [], marks)
    return [
        f"<h2>{escape(result.controller)}</h2>",
        "<p>All plots share the time axis; numbered lines are decisions, listed below. Hover for values.</p>",
        *(svg(chart, span) for chart in charts(result) if has_data(chart)),
        _patterns(result),
        "<h3>Decisions</h3>",
        *([f"<p>The first {MAX_LISTED} of {len(changes)}.</p>"] if len(changes) > MAX_LISTED else []),
        table(
            ("", "At", "Replicas", "Batch settings", "Reason", "In the policy's words"),
            [(str(n + 1), *_decision(change)) for n, change in enumerate(changes[:MAX_LISTED])],
        ),
    ]


def charts(result: Result) -> list[Chart]:
    """The plots, top to bottom."""
    start, points = result.fleet.epoch_seconds, result.timeline

    def line(name: str, slot: str, value: Callable[[Point], float | None], *, stepped: bool = False) -> Line:
        return Line(name, slot, [(start + point.at, value(point)) for point in points], stepped)

    patterns = sorted(result.patterns, key=lambda name: -result.patterns[name].arrived)[: len(SLOTS)]
    arrivals = [point for point in points if point.mix]
    return [
        Chart("Arrival rate", "requests/s", [line("arriving", "s1", lambda point: point.arrivals_per_second)]),
        Chart(
            "Mix",
            "% of arrivals",
            [
                Line(name, slot, [(start + point.at, 100 * point.mix.get(name, 0.0)) for point in arrivals])
                for name, slot in zip(sorted(patterns), SLOTS, strict=False)
            ],
            stacked=True,
        ),
        Chart(
            "Replicas",
            "pods",
            [
                line("wanted", "s2", lambda point: point.desired, stepped=True),
                line("ready", "s1", lambda point: point.pods(ReplicaPhase.READY), stepped=True),
                line("starting", "s3", lambda point: point.pods(*STARTING_PHASES), stepped=True),
                line("draining", "s5", lambda point: point.pods(ReplicaPhase.DRAINING), stepped=True),
            ],
        ),
        Chart(
            "Time to first token, 95th percentile",
            "seconds",
            [line("p95", "s1", lambda point: point.ttft_p95_seconds)],
            logarithmic=True,
            target=result.goals.ttft_seconds,
            height=150,
        ),
        Chart(
            "Requests",
            "requests",
            [
                line("waiting", "s2", lambda point: point.waiting),
                line("running", "s1", lambda point: point.running),
                *([line("held", "s4", lambda point: point.held)] if any(point.held for point in points) else []),
            ],
        ),
        Chart(
            "KV cache of the fullest pod",
            "% used",
            [line("used", "s1", lambda point: None if point.kv_used_ratio is None else 100 * point.kv_used_ratio)],
            height=80,
        ),
        Chart(
            "Batch settings: sequences",
            "max_num_seqs",
            [line("set", "s3", lambda point: point.settings.max_num_seqs, stepped=True)],
            height=80,
        ),
        Chart(
            "Batch settings: tokens a step and prefill chunk",
            "tokens",
            [
                line("tokens a step", "s3", lambda point: point.settings.max_num_batched_tokens, stepped=True),
                line("prefill chunk", "s4", lambda point: point.settings.long_prefill_token_threshold, stepped=True),
            ],
            logarithmic=True,
            height=90,
        ),
    ]


def _patterns(result: Result) -> str:
    return table(
        ("Pattern", "Requests", "Within goals", *LATENCIES[:3]),
        [
            (
                escape(name),
                str(service.arrived),
                _percent(service.attainment),
                f"{tell(service.ttft.p50)} / {tell(service.ttft.p95)} / {tell(service.ttft.p99)} s",
                " / ".join(tell_milliseconds(each) for each in (service.itl.p50, service.itl.p95, service.itl.p99)),
                tell(service.queue.p95, " s"),
            )
            for name, service in result.patterns.items()
        ],
    )


def _decision(change: Change) -> tuple[str, ...]:
    before, after = change.settings_before, change.settings_after
    return (
        clock(change.at),
        f"{change.before} → <b>{change.after}</b>" if change.scales else str(change.after),
        escape(
            " → ".join("/".join(map(str, each.as_dict().values())) for each in (before, after))
            if change.retunes
            else ""
        ),
        escape(change.reason),
        escape(change.message),
    )


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.2f} %"


def _cost(result: Result) -> str:
    return "" if result.cost is None else f"${result.cost:.2f}"
