"""The demo's report: one HTML page with inline SVG plots, no script, nothing fetched.

Pure: a `Recording` in, a string out. Called by the demo when the load has ended.
"""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from html import escape

from tidegate_engine.charts import SLOTS, Chart, Line, Span, clock, has_data, page, svg, table, tell, tell_milliseconds
from tidegate_local import verdict
from tidegate_local.load import summarise
from tidegate_local.recording import Recording, Sample


def html(recording: Recording) -> str:
    """The whole page."""
    span = _span(recording)
    failed = [finding for finding in verdict.findings(recording) if not finding.seen]
    headline = "All that the demo promises was seen" if not failed else f"Not seen: {failed[0].promise.lower()}"
    return page(
        recording.title,
        [
            f'<p class="lead {"good" if not failed else "bad"}">{escape(headline)}.</p>',
            f"<p>{escape(_written_on(recording))}</p>",
            _findings(recording),
            _facts(recording),
            "<h2>The run</h2>",
            "<p>All plots share the time axis. Shaded stretches are the phases of the load; numbered lines are "
            "decisions, listed below. Hover over a point for its value.</p>",
            *(svg(chart, span) for chart in charts(recording) if has_data(chart)),
            "<h2>Batch settings, before and after</h2>",
            _changes(recording),
            "<h2>Decisions</h2>",
            _decisions(recording),
            "<h2>What clients felt, phase by phase</h2>",
            _phases(recording),
            "<h2>Events</h2>",
            _events(recording, span),
        ],
    )


def charts(recording: Recording) -> list[Chart]:
    """The plots, top to bottom."""
    samples = recording.samples
    targets = recording.targets

    def line(name: str, slot: str, value: Callable[[Sample], float | None], *, stepped: bool = False) -> Line:
        return Line(name, slot, [(sample.at, value(sample)) for sample in samples], stepped)

    good = [outcome for outcome in recording.outcomes if outcome.failure is None]
    ttft_dots = [(o.arrived_at + o.ttft_seconds, o.ttft_seconds) for o in good if o.ttft_seconds is not None]
    itl_dots = [
        (o.arrived_at + o.e2e_seconds, o.itl_mean_seconds * 1000)
        for o in good
        if o.itl_mean_seconds is not None and o.e2e_seconds is not None
    ]
    sent = Line("sent", "s2", _steps_of_phases(recording), stepped=True)
    patterns = _patterns(samples)
    return [
        Chart("Arrival rate", "requests/s", [line("seen", "s1", lambda s: s.arrivals_per_second), sent]),
        Chart(
            "Pattern mix that the operator sees",
            "% of requests",
            [
                Line(name, slot, [(s.at, None if s.mix is None else 100 * s.mix.get(name, 0.0)) for s in samples])
                for name, slot in zip(patterns, SLOTS, strict=False)
            ],
            stacked=True,
        ),
        Chart(
            "Time to first token, 95th percentile (dots: single requests)",
            "seconds",
            [line("p95 in status", "s1", lambda s: s.ttft_p95_seconds)],
            logarithmic=True,
            dots=ttft_dots,
            target=targets.ttft_seconds,
            height=150,
        ),
        Chart(
            "Time between tokens, 95th percentile (dots: means of single requests)",
            "milliseconds",
            [line("p95 in status", "s1", lambda s: None if s.itl_p95_seconds is None else 1000 * s.itl_p95_seconds)],
            dots=itl_dots,
            target=None if targets.itl_seconds is None else 1000 * targets.itl_seconds,
        ),
        Chart(
            "Requests in the engines",
            "requests",
            [line("waiting", "s2", lambda s: s.waiting), line("running", "s1", lambda s: s.running)],
        ),
        Chart(
            "Replicas",
            "pods",
            [
                line("wanted", "s2", lambda s: s.desired_replicas, stepped=True),
                line("ready", "s1", lambda s: s.ready_replicas, stepped=True),
            ],
            height=90,
        ),
        Chart(
            "Batch settings: sequences",
            "maxSequences",
            [line("set", "s3", lambda s: s.settings.max_sequences if s.settings else None, stepped=True)],
            height=80,
        ),
        Chart(
            "Batch settings: tokens a step and prefill chunk",
            "tokens",
            [
                line(
                    "tokens a step", "s3", lambda s: s.settings.max_batched_tokens if s.settings else None, stepped=True
                ),
                line(
                    "prefill chunk",
                    "s4",
                    lambda s: s.settings.prefill_chunk_tokens if s.settings else None,
                    stepped=True,
                ),
            ],
            height=90,
            logarithmic=True,
        ),
    ]


def _patterns(samples: Iterable[Sample]) -> list[str]:
    """Patterns that ever had a share, in a fixed order, the biggest kept when there are more than colours."""
    total: dict[str, float] = {}
    for sample in samples:
        for name, share in (sample.mix or {}).items():
            total[name] = total.get(name, 0.0) + share
    kept = sorted((name for name in total if total[name] > 0), key=lambda name: -total[name])[: len(SLOTS)]
    return sorted(kept)


def _steps_of_phases(recording: Recording) -> list[tuple[float, float | None]]:
    points: list[tuple[float, float | None]] = [(mark.at, mark.requests_per_second) for mark in recording.phases]
    if points and recording.ended_at is not None:
        points.append((recording.ended_at, points[-1][1]))
    return points


def _span(recording: Recording) -> Span:
    times = [sample.at for sample in recording.samples] + [mark.at for mark in recording.phases]
    if recording.ended_at is not None:
        times.append(recording.ended_at)
    start, end = (min(times), max(times)) if times else (0.0, 1.0)
    starts = [mark.at for mark in recording.phases] + [recording.ended_at or end]
    bands = [(mark.name, mark.at, starts[n + 1]) for n, mark in enumerate(recording.phases)]
    return Span(start, end, bands, [(at, str(n + 1)) for n, (at, *_) in enumerate(_decision_rows(recording))])


# --- tables --------------------------------------------------------------------------------------------------------


def _findings(recording: Recording) -> str:
    return (
        '<ul class="findings">'
        + "".join(
            f'<li class="{"good" if finding.seen else "bad"}"><b>{"✓" if finding.seen else "✗"} '
            f"{escape(finding.promise)}</b><br>{escape(finding.detail)}</li>"
            for finding in verdict.findings(recording)
        )
        + "</ul>"
    )


def _facts(recording: Recording) -> str:
    return table(("", ""), [(escape(name), escape(value)) for name, value in recording.facts])


def _changes(recording: Recording) -> str:
    rows = []
    for change in verdict.live_changes(recording):
        before, after = change.felt_before, change.felt_after
        rows.append(
            (
                clock(change.at - _span_start(recording)),
                f"{escape(str(change.before))}<br>→ <b>{escape(str(change.after))}</b>",
                f"{escape(change.pattern or 'unknown')}{' (new)' if change.mix_changed else ''}",
                escape(change.message),
                f"{tell(before.ttft_p50_seconds, ' s')} → <b>{tell(after.ttft_p50_seconds, ' s')}</b>",
                f"{tell(before.ttft_p95_seconds, ' s')} → <b>{tell(after.ttft_p95_seconds, ' s')}</b>",
                f"{tell_milliseconds(before.itl_p95_seconds)} → <b>{tell_milliseconds(after.itl_p95_seconds)}</b>",
                f"{before.requests}, {after.requests}",
                ", ".join(escape(pod.name) for pod in change.pods_kept) or "not seen",
            )
        )
    return table(
        (
            "At",
            "Settings",
            "Leading pattern",
            "Why, and what was predicted",
            "TTFT p50, measured by the clients",
            "TTFT p95",
            "Mean time between tokens, p95 of the requests",
            "Requests measured",
            "Pods that took it without a restart",
        ),
        rows,
    )


def _span_start(recording: Recording) -> float:
    times = [sample.at for sample in recording.samples] + [mark.at for mark in recording.phases]
    return min(times, default=0.0)


def _decision_rows(recording: Recording) -> list[tuple[float, str, str, str]]:
    """Changes of replicas and of settings in order of time: (at, what, reason, message)."""
    rows = [
        (move.at, f"{move.before} → {move.after} replicas", move.reason, move.message)
        for move in verdict.scalings(recording)
    ]
    rows += [
        (change.at, f"{change.before} → {change.after}", change.reason, change.message)
        for change in verdict.live_changes(recording)
    ]
    return sorted(rows)


def _decisions(recording: Recording) -> str:
    start = _span_start(recording)
    return table(
        ("", "At", "Decision", "Reason", "In the operator's words"),
        [
            (str(n + 1), clock(at - start), escape(what), escape(reason), escape(message))
            for n, (at, what, reason, message) in enumerate(_decision_rows(recording))
        ],
    )


def _phases(recording: Recording) -> str:
    rows = []
    for mark in recording.phases:
        outcomes = [outcome for outcome in recording.outcomes if outcome.phase == mark.name]
        summary = summarise(outcomes)
        rows.append(
            (
                escape(mark.name),
                tell(mark.requests_per_second, "/s"),
                str(summary.sent),
                str(summary.failed),
                str(summary.output_tokens),
                f"{tell(summary.ttft_p50_seconds)} / {tell(summary.ttft_p95_seconds)} s",
                tell_milliseconds(summary.itl_p95_seconds),
                tell(summary.e2e_p95_seconds, " s"),
            )
        )
    return table(
        ("Phase", "Rate", "Requests", "Failed", "Tokens", "TTFT p50 / p95", "Between tokens p95", "Whole p95"), rows
    )


def _events(recording: Recording, span: Span) -> str:
    return table(
        ("At", "Reason", "Message"),
        [
            (
                clock(max(0.0, event.at - span.start)) if event.at >= span.start else "before",
                escape(event.reason),
                escape(event.message),
            )
            for event in recording.events
        ],
    )


def _written_on(recording: Recording) -> str:
    """The day of the run, for the page's head."""
    at = recording.ended_at or _span_start(recording)
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
