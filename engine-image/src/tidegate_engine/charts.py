"""Pages of one file: inline SVG plots over a time axis, tables and a style sheet; no script, nothing fetched.

Pure: values in, HTML out. Called by the reports of `bench` and of the demo.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 960
LEFT = 64
RIGHT = 150
BAND_LABEL_HEIGHT = 18
TITLE_HEIGHT = 20
SLOTS = ("s1", "s2", "s3", "s4", "s5")
"""Colour classes of the style sheet; a pattern keeps its slot over the whole page."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series of (Unix seconds, value); None breaks the line."""

    name: str
    slot: str
    points: Sequence[tuple[float, float | None]]
    stepped: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One plot. `dots` are single measurements behind the lines, `target` a goal drawn across."""

    title: str
    unit: str
    lines: Sequence[Line]
    height: int = 120
    logarithmic: bool = False
    dots: Sequence[tuple[float, float]] = ()
    target: float | None = None
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """The time that all plots share, and its phases as (name, start, end)."""

    start: float
    end: float
    bands: Sequence[tuple[str, float, float]]
    marks: Sequence[tuple[float, str]]
    """Decisions as (time, number in the table)."""

    def x(self, at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (at - self.start) / max(1e-9, self.end - self.start)


def page(title: str, parts: Iterable[str]) -> str:
    """The whole document; `parts` are HTML."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
            f"<h1>{escape(title)}</h1>",
            *parts,
            "</main></body></html>",
        ]
    )


def has_data(chart: Chart) -> bool:
    return bool(chart.dots) or any(value is not None for line in chart.lines for _, value in line.points)


@dataclass(frozen=True, slots=True)
class Axis:
    """A vertical scale from `low` to `high`, drawn between `top` and `bottom` pixels."""

    low: float
    high: float
    top: float
    bottom: float
    logarithmic: bool

    def y(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.logarithmic:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.bottom - (self.bottom - self.top) * (at - low) / (high - low)

    def ticks(self) -> list[float]:
        if self.logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for multiples in ((1.0,), (1.0, 2.0, 5.0)):
                values = [m * 10.0**power for power in powers for m in multiples]
                kept = [value for value in values if self.low <= value <= self.high]
                if len(kept) >= 3:
                    break
            return kept
        step = nice_step((self.high - self.low) / 3)
        count = int((self.high - self.low) / step + 1e-9)
        return [self.low + n * step for n in range(count + 1)]


def nice_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `rough`."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next((m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * (1 - 1e-9)), 10.0 * power)


def _axis(chart: Chart, top: float, bottom: float) -> Axis:
    values = [value for line in chart.lines for _, value in line.points if value is not None]
    values += [value for _, value in chart.dots]
    if chart.target is not None:
        values.append(chart.target)
    if chart.stacked:
        return Axis(0, 100, top, bottom, False)
    if chart.logarithmic:
        positive = [value for value in values if value > 0] or [1.0]
        return Axis(min(positive) / 1.3, max(positive) * 1.3, top, bottom, True)
    high = max([*values, 0.0]) or 1.0
    step = nice_step(high / 3)
    return Axis(0, step * math.ceil(high / step * 1.0001), top, bottom, False)


def svg(chart: Chart, span: Span) -> str:
    """One plot of a page, whose points tell their values."""
    return "\n".join(
        [
            f'<figure><figcaption>{escape(chart.title)} <span class="unit">{escape(chart.unit)}</span></figcaption>',
            f'<svg viewBox="0 0 {WIDTH} {_height(chart):.0f}" role="img" aria-label="{escape(chart.title)}">',
            *_drawing(chart, span, tells=True),
            "</svg></figure>",
        ]
    )


def picture(charts: Sequence[Chart], span: Span) -> str:
    """Plots below each other as an SVG file of its own."""
    parts, top = [], 0.0
    for chart in charts:
        title = f"{escape(chart.title)}, {escape(chart.unit)}"
        parts += [
            f'<g transform="translate(0 {top + TITLE_HEIGHT:.0f})">',
            f'<text class="title" y="-2">{title}</text>',
        ]
        parts += [*_drawing(chart, span, tells=False), "</g>"]
        top += TITLE_HEIGHT + _height(chart)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" role="img">',
            f"<style>{STYLE}text.title{{font-size:14px;font-weight:600;fill:var(--ink)}}</style>",
            f'<rect width="{WIDTH}" height="{top:.0f}" fill="var(--page)"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _height(chart: Chart) -> float:
    return BAND_LABEL_HEIGHT + 6.0 + chart.height + 22.0


def _drawing(chart: Chart, span: Span, *, tells: bool) -> list[str]:
    """What is inside a plot's frame."""
    top, bottom = BAND_LABEL_HEIGHT + 6.0, BAND_LABEL_HEIGHT + 6.0 + chart.height
    axis = _axis(chart, top, bottom)
    parts = [
        *_bands(span, top, bottom),
        *_grid(axis),
        *_times(span, bottom),
    ]
    if chart.stacked:
        parts += _areas(chart.lines, span, axis)
    else:
        parts += [
            f'<circle class="dot" cx="{span.x(at):.1f}" cy="{axis.y(value):.1f}" r="1.8"><title>{tell(value)}</title>'
            "</circle>"
            for at, value in chart.dots
            if span.start <= at <= span.end and (value > 0 or not chart.logarithmic)
        ]
        parts += [_path(line, span, axis) + (_hover(line, span, axis) if tells else "") for line in chart.lines]
        parts += _labels(chart.lines, span, axis)
    if chart.target is not None:
        y = axis.y(chart.target)
        parts.append(f'<line class="target" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="label" x="{WIDTH - RIGHT + 6}" y="{y + 4:.1f}">goal {tell(chart.target)}</text>')
    for at, number in span.marks:
        parts.append(
            f'<line class="mark" x1="{span.x(at):.1f}" x2="{span.x(at):.1f}" y1="{top}" y2="{bottom}"/>'
            f'<text class="number" x="{span.x(at):.1f}" y="{bottom - 3:.1f}">{number}</text>'
        )
    return parts


def _bands(span: Span, top: float, bottom: float) -> list[str]:
    parts = []
    for n, (name, start, end) in enumerate(span.bands):
        x, width = span.x(start), max(0.0, span.x(end) - span.x(start))
        parts.append(
            f'<rect class="band{n % 2}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{bottom - top:.1f}"/>'
            f'<text class="bandname" x="{x + 3:.1f}" y="{top - 6}">{escape(name)}</text>'
        )
    return parts


def _grid(axis: Axis) -> list[str]:
    return [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{axis.y(value):.1f}" y2="{axis.y(value):.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{axis.y(value) + 4:.1f}">{value:.6g}</text>'
        for value in axis.ticks()
    ]


def _times(span: Span, bottom: float) -> list[str]:
    step = max(15.0, 15.0 * math.ceil((span.end - span.start) / 10 / 15))
    count = int((span.end - span.start) / step)
    return [
        f'<text class="time" x="{span.x(span.start + n * step):.1f}" y="{bottom + 15:.1f}">{clock(n * step)}</text>'
        for n in range(count + 1)
    ]


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _path(line: Line, span: Span, axis: Axis) -> str:
    commands: list[str] = []
    y_before: float | None = None
    for at, value in line.points:
        if value is None or (axis.logarithmic and value <= 0):
            y_before = None
            continue
        x, y = span.x(at), axis.y(value)
        if y_before is None:
            commands.append(f"M{x:.1f},{y:.1f}")
        else:
            commands.append(f"H{x:.1f}V{y:.1f}" if line.stepped else f"L{x:.1f},{y:.1f}")
        y_before = y
    return f'<path class="line {line.slot}" d="{"".join(commands)}"/>'


def _hover(line: Line, span: Span, axis: Axis) -> str:
    return "".join(
        f'<circle class="hover" cx="{span.x(at):.1f}" cy="{axis.y(value):.1f}" r="6"><title>{escape(line.name)} at '
        f"{clock(at - span.start)}: {tell(value)}</title></circle>"
        for at, value in line.points
        if value is not None and (value > 0 or not axis.logarithmic)
    )


def _labels(lines: Sequence[Line], span: Span, axis: Axis) -> list[str]:
    """Names at the lines' ends, pushed apart so that none covers another."""
    ends: list[tuple[float, Line]] = []
    for line in lines:
        last = next((value for _, value in reversed(line.points) if value is not None), None)
        if last is not None and (last > 0 or not axis.logarithmic):
            ends.append((axis.y(last), line))
    parts: list[str] = []
    floor = -math.inf
    for y, line in sorted(ends, key=lambda end: end[0]):
        floor = max(y, floor + 14)
        parts.append(
            f'<circle class="key {line.slot}" cx="{WIDTH - RIGHT + 8}" cy="{floor:.1f}" r="4"/>'
            f'<text class="label" x="{WIDTH - RIGHT + 16}" y="{floor + 4:.1f}">{escape(line.name)}</text>'
        )
    return parts


def _areas(lines: Sequence[Line], span: Span, axis: Axis) -> list[str]:
    """Stacked areas over the times at which all are known; their names in a column on the right."""
    parts: list[str] = []
    if not lines:
        return parts
    times = [at for at, value in lines[0].points if value is not None]
    base = [0.0] * len(times)
    for n, line in enumerate(lines):
        values = [value for _, value in line.points if value is not None]
        upper = [below + value for below, value in zip(base, values, strict=True)]
        forth = " ".join(f"{span.x(at):.1f},{axis.y(value):.1f}" for at, value in zip(times, upper, strict=True))
        back = " ".join(
            f"{span.x(at):.1f},{axis.y(value):.1f}" for at, value in zip(reversed(times), reversed(base), strict=True)
        )
        y = axis.top + 10 + 16 * n
        parts.append(
            f'<polygon class="area {line.slot}" points="{forth} {back}"><title>{escape(line.name)}</title></polygon>'
            f'<circle class="key {line.slot}" cx="{WIDTH - RIGHT + 8}" cy="{y:.1f}" r="4"/>'
            f'<text class="label" x="{WIDTH - RIGHT + 16}" y="{y + 4:.1f}">{escape(line.name)}</text>'
        )
        base = upper
    return parts


def tell(value: float | None, unit: str = "") -> str:
    if value is None:
        return "unknown"
    digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}{unit}"


def tell_milliseconds(seconds: float | None) -> str:
    return tell(None if seconds is None else 1000 * seconds, "" if seconds is None else " ms")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells of `rows` are HTML already."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    if not body:
        return "<p>None.</p>"
    return (
        '<div class="scroll"><table><thead><tr>'
        + "".join(f"<th>{escape(name)}</th>" for name in head)
        + f"</tr></thead><tbody>{body}</tbody></table></div>"
    )


STYLE = """
:root{--page:#fff;--ink:#1b1f24;--soft:#5b6470;--grid:#e4e7eb;--band:#f3f5f8;--card:#fafbfc;--good:#0b6b3a;--bad:#a3241b;
--c1:#2563c9;--c2:#c2570c;--c3:#0f766e;--c4:#8b3fb3;--c5:#76808c}
@media (prefers-color-scheme:dark){:root{--page:#14171b;--ink:#e6e9ed;--soft:#9aa4b0;--grid:#2b3138;--band:#1b2026;
--card:#1a1e23;--good:#5cc98c;--bad:#f08379;--c1:#6ea2f5;--c2:#f0924f;--c3:#4fb8ad;--c4:#c78be6;--c5:#8b95a1}}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:36px 0 6px}p{margin:6px 0 12px}
.lead{font-size:17px;font-weight:600}.good{color:var(--good)}.bad{color:var(--bad)}
.findings{list-style:none;padding:0;display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:10px}
.findings li{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:10px 14px;color:var(--ink)}
.findings li.good b{color:var(--good)}.findings li.bad b{color:var(--bad)}
figure{margin:14px 0 0}figcaption{font-weight:600}.unit{font-weight:400;color:var(--soft)}
svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
.band0{fill:var(--band)}.band1{fill:none}.grid{stroke:var(--grid)}
.tick{text-anchor:end}.time{text-anchor:middle}text.label{fill:var(--ink);font-size:12px}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.dot{fill:var(--c5);fill-opacity:.45}
.hover{fill:transparent}.hover:hover{fill:var(--soft);fill-opacity:.35}
.target{stroke:var(--bad);stroke-dasharray:5 4}.mark{stroke:var(--soft);stroke-dasharray:2 3}
.number{text-anchor:middle;font-weight:600;stroke:var(--page);stroke-width:3px;paint-order:stroke}
.line.s1{stroke:var(--c1)}.line.s2{stroke:var(--c2)}.line.s3{stroke:var(--c3)}.line.s4{stroke:var(--c4)}
.line.s5{stroke:var(--c5)}.key.s1,.area.s1{fill:var(--c1)}.key.s2,.area.s2{fill:var(--c2)}
.key.s3,.area.s3{fill:var(--c3)}.key.s4,.area.s4{fill:var(--c4)}.key.s5,.area.s5{fill:var(--c5)}
.area{fill-opacity:.75;stroke:var(--page);stroke-width:1}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13.5px}
td,th{text-align:left;vertical-align:top;padding:6px 10px 6px 0;border-bottom:1px solid var(--grid)}
th{color:var(--soft);font-weight:600}
"""
