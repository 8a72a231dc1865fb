"""The demo's live view: a panel that redraws itself on a terminal, one line every few seconds elsewhere.

Owns how a sample looks as text; knows nothing of where it comes from. Called by the demo.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tidegate_local.recording import Sample

PLAIN_INTERVAL_SECONDS = 5.0
HISTORY = 60
BARS = "▁▂▃▄▅▆▇█"


def figure(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def mix_text(mix: Mapping[str, float] | None) -> str:
    """The patterns by share, largest first; those under 5 % left out."""
    if not mix:
        return "–"
    shares = sorted(mix.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share >= 0.05) or "–"


def sparkline(values: list[float]) -> str:
    top = max(values, default=0.0)
    return "".join(BARS[round(value / top * (len(BARS) - 1))] if top > 0 else BARS[0] for value in values)


def replicas_text(sample: Sample) -> str:
    starting = sum(not pod.ready and not pod.terminating for pod in sample.pods)
    leaving = sum(pod.terminating for pod in sample.pods)
    text = f"{figure(sample.ready_replicas, 0)} ready of {figure(sample.desired_replicas, 0)} wanted"
    return text + (f", {starting} starting" if starting else "") + (f", {leaving} draining" if leaving else "")


def plain_line(sample: Sample, *, phase: str, elapsed_seconds: float) -> str:
    """One line that says everything."""
    settings = sample.settings
    batch = (
        "–"
        if settings is None
        else f"{settings.max_sequences} seq/{settings.max_batched_tokens} tok/{settings.prefill_chunk_tokens} chunk"
    )
    return (
        f"load {elapsed_seconds:4.0f} s  {phase:<20}  {figure(sample.arrivals_per_second, 2):>5}/s  "
        f"{mix_text(sample.mix):<42}  TTFT p95 {figure(sample.ttft_p95_seconds, 2, ' s'):>7}  "
        f"waiting {figure(sample.waiting, 0):>3}  replicas {figure(sample.ready_replicas, 0)}"
        f"/{figure(sample.desired_replicas, 0)}  batch {batch}  {sample.reason}"
    )


class View:
    """What is on the screen now: the last sample, a short history of rates, and the news."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._rates: deque[float] = deque(maxlen=HISTORY)
        self._news: deque[str] = deque(maxlen=10)
        self._shown_at = -PLAIN_INTERVAL_SECONDS

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw live until the block ends; without a terminal nothing is redrawn."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, refresh_per_second=2, transient=True) as self._live:
            try:
                yield
            finally:
                self._live = None

    def news(self, text: str, *, elapsed_seconds: float) -> None:
        """Something that happened once: a phase, a decision, an Event."""
        line = f"load {elapsed_seconds:4.0f} s  {text}"
        if self._live is None:
            self._console.print(f"  >>  {line}", highlight=False, markup=False, soft_wrap=True)
        else:
            self._news.append(line)
            self._live.console.print(line, highlight=False, markup=False)

    def sample(self, sample: Sample, *, phase: str, elapsed_seconds: float) -> None:
        self._rates.append(sample.arrivals_per_second or 0.0)
        if self._live is not None:
            self._live.update(self._panel(sample, phase=phase, elapsed_seconds=elapsed_seconds))
        elif elapsed_seconds - self._shown_at >= PLAIN_INTERVAL_SECONDS:
            self._shown_at = elapsed_seconds
            self._console.print(
                plain_line(sample, phase=phase, elapsed_seconds=elapsed_seconds),
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def _panel(self, sample: Sample, *, phase: str, elapsed_seconds: float) -> Panel:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        rows = (
            ("Load", f"{phase}"),
            ("Arrival rate", f"{figure(sample.arrivals_per_second, 2)}/s  {sparkline(list(self._rates))}"),
            ("Pattern mix", mix_text(sample.mix)),
            ("TTFT p95", figure(sample.ttft_p95_seconds, 2, " s")),
            ("Between tokens p95", figure(_milliseconds(sample.itl_p95_seconds), 0, " ms")),
            ("Queue time p95", figure(sample.queue_p95_seconds, 2, " s")),
            ("Requests", f"{figure(sample.running, 0)} running, {figure(sample.waiting, 0)} waiting"),
            ("Replicas", replicas_text(sample)),
            ("Batch settings", "–" if sample.settings is None else str(sample.settings)),
            ("Reason", sample.reason or "–"),
        )
        for name, value in rows:
            table.add_row(name, Text(value))
        return Panel(
            Group(table, Text(sample.message, style="italic")),
            title=f"What the operator sees and decides · load {elapsed_seconds:.0f} s",
            title_align="left",
        )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
