"""The evaluation as Markdown with tables, and plots as SVG files beside it.

Pure but for `write`. Only figures that a run gave stand in it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from tidegate_engine.charts import SLOTS, Chart, Line, Span, has_data, picture
from tidegate_sim import drift, rivals
from tidegate_sim.experiments import DRIFT, RIVALS
from tidegate_sim.matrix import Figures, Interval, Matrix, Tuned, bootstrap, paired
from tidegate_sim.scenarios import CLIENT_TIMEOUT_SECONDS, GOALS, PROFILE, Scenario
from tidegate_sim.specification import MetricsOutage

OURS, HPA, FIXED_SETTINGS = "tidegate", "hpa-concurrency", "static-settings"
BOUND_GOALS = {"S2": 1.10, "S2-full": 1.10, "S3": 1.15, "S3-full": 1.15}
HPA_GOALS = {"S3": 0.80, "S3-full": 0.80}
MIX_SHIFT, BY_TURNS, STEADY = "S5-0min", "S6", "S1-poisson"
"""Poisson arrivals of 5 requests/s are, minute by minute, a steady load with a noise of 5.8 %."""
WIDTH, HEIGHT = 900, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 30, 50
COLOURS = (
    "#0b6e4f", "#c1440e", "#3d5a98", "#8a5a9e", "#b08900", "#00798c", "#d1495b", "#5c6b73", "#7a9e3a", "#a23b72",
)  # fmt: skip


def write(matrix: Matrix, out: Path) -> None:
    """The file, and one plot for each training workload in a folder of its name."""
    folder = out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for training in _trainings(matrix):
        (folder / f"{training}.svg").write_text(plot([each for each in matrix.tuned if each.training == training]))
    if day := matrix.experiments.get((DRIFT, drift.BOTH)):
        (folder / f"{DRIFT}.svg").write_text(day_plot(day[0]))
    out.write_text("\n".join(page(matrix, plots=folder.name)) + "\n")


def tables(matrix: Matrix) -> str:
    """For a terminal: no plots."""
    return "\n".join(
        [
            *overview(matrix),
            "",
            *(line for each in matrix.scenarios for line in scenario_table(matrix, each)),
            *experiments(matrix),
        ]
    )


def page(matrix: Matrix, *, plots: str) -> list[str]:
    lines = ["# Evaluation", "", *method(matrix), "", "## Goals", "", *goals(matrix), ""]
    lines += ["## All scenarios", "", *overview(matrix), ""]
    lines += ["## Tuning", "", *tuning(matrix), ""]
    for training in _trainings(matrix):
        lines += [f"![Attainment over GPU-hours on {training}]({plots}/{training}.svg)", ""]
    lines += ["## Scenario by scenario", ""]
    for scenario in matrix.scenarios:
        lines += [*scenario_table(matrix, scenario), ""]
    lines += [*experiments(matrix, plots=plots)]
    if matrix.missing:
        lines += [f"Left out, as their trace was not given: {', '.join(matrix.missing)}.", ""]
    while not lines[-1]:
        lines.pop()
    return lines


def method(matrix: Matrix) -> list[str]:
    ttft, itl = GOALS.ttft_seconds, GOALS.itl_seconds
    settings = "; ".join(
        f"{training}: {each.max_num_seqs} sequences, {each.max_num_batched_tokens} tokens, chunks of"
        f" {each.long_prefill_token_threshold}"
        for training, each in matrix.settings.items()
    )
    return [
        "Written by `python -m tidegate_sim.evaluation`. Each scenario is simulated, request by request, under each"
        f" policy with {matrix.seeds} seeds: the engine's real scheduler and block pool, steps as long as the profile"
        f" `{PROFILE}` says, pods that start, drain and fail. Nothing of it was measured on a GPU.",
        "",
        f"- **Good**: first token within {ttft:g} s (or three times what an idle replica needs, where that is more) and"
        f" mean time between tokens within {itl * 1000:g} ms. **Attainment** is the good share of all that arrived;"
        f" refused requests, and those whose client gave up after {CLIENT_TIMEOUT_SECONDS:g} s, are missed.",
        "- **GPU-hours** run from the moment that a node takes a pod until it is gone.",
        "- **Tuned**: each policy's one knob is set on the training workload (another day, or other seeds) to the"
        " fewest GPU-hours that attain 99 %, or else to the most attainment. Every policy begins with the"
        f" batch settings that were the best of a sweep on that workload ({settings}); those that can, change them.",
        "- **Over the bound**: GPU-hours over those of LB(v), the fewest that any fleet known beforehand would take for"
        " the same share of the work, with no queues and no chance. The **oracle** is the smallest schedule made"
        " beforehand with which the simulator attains 99 %: what lies between the two is the price of chance.",
        "- **Against Tidegate**: the mean difference, seed by seed, and its 95 % bootstrap interval; bold where zero"
        " lies outside.",
    ]


def goals(matrix: Matrix) -> list[str]:
    """What Tidegate shall reach, and what it reached, each as a mean over the seeds."""
    lines = _row(["goal", "scenario", "reached", ""], head=True)
    for scenario in matrix.scenarios:
        if (scenario.name, OURS) not in matrix.figures:
            continue
        for goal, reached, holds in _goals_of(matrix, scenario):
            lines += _row([goal, scenario.name, reached, "holds" if holds else "**missed**"])
    return lines


def _goals_of(matrix: Matrix, scenario: Scenario) -> Iterator[tuple[str, str, bool]]:
    """Each with what was reached in words, and whether that is enough."""
    name, figures = scenario.name, matrix.figures[scenario.name, OURS]

    def mean(policy: str, figure: str) -> float:
        return fmean(matrix.values(name, policy, figure))

    attained, hours = mean(OURS, "attainment"), mean(OURS, "gpu_hours")
    if name in BOUND_GOALS:
        most = BOUND_GOALS[name]
        ratio = fmean(float(each["gpu_hours"]) / float(each["lbv_hours"]) for each in figures)
        yield f"at most {most:.2f} of the bound", f"{ratio:.2f} at {_percent(attained)}", ratio <= most
        oracle = fmean(each["gpu_hours"] for each in matrix.oracles[name]) if name in matrix.oracles else None
        if oracle:
            yield f"at most {most:.2f} of the oracle", f"{hours / oracle:.2f}", hours <= most * oracle
    if name in HPA_GOALS and (name, HPA) in matrix.figures:
        ratio = hours / mean(HPA, "gpu_hours")
        yield (
            f"at most {HPA_GOALS[name]:.2f} of {HPA}, both at 99 %",
            f"{ratio:.2f} at {_percent(attained)}, {HPA} at {_percent(mean(HPA, 'attainment'))}",
            ratio <= HPA_GOALS[name] and attained >= 0.99,
        )
    if name == MIX_SHIFT:
        recovered = [event["recovered_after"] for each in figures for event in each["events"]]
        known, most = [each for each in recovered if each is not None], scenario.start_seconds + 60
        yield (
            f"well again after a shift of the mix within {most:.0f} s",
            f"{fmean(known):.0f} s, the longest {max(known):.0f} s" if len(known) == len(recovered) else "never",
            len(known) == len(recovered) and fmean(known) <= most,
        )
    if name == BY_TURNS and (name, FIXED_SETTINGS) in matrix.figures:
        ratio = mean(OURS, "goodput_per_second") / mean(FIXED_SETTINGS, "goodput_per_second")
        yield "1.30 of the goodput of the best settings that never move", f"{ratio:.2f}", ratio >= 1.3
    if name == STEADY:
        yield "no scaling an hour", f"{mean(OURS, 'scalings_per_hour'):.2f}", not mean(OURS, "scalings_per_hour")
    if any(isinstance(fault, MetricsOutage) for fault in scenario.faults):
        removed = sum(int(each["blind_removals"]) for each in figures)
        yield "no replica less without metrics", f"{removed} orders in {len(figures)} runs", not removed


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def overview(matrix: Matrix) -> list[str]:
    """Policies down, scenarios across: attainment in percent, and GPU-hours."""
    scenarios = [each for each in matrix.scenarios if not each.fixed_replicas]
    policies = [policy for policy in matrix.contenders if any((s.name, policy) in matrix.figures for s in scenarios)]
    lines = _row(["policy", *(scenario.name for scenario in scenarios)], head=True)
    for policy in policies:
        cells = []
        for scenario in scenarios:
            if (scenario.name, policy) not in matrix.figures:
                cells.append("")
                continue
            attained = fmean(matrix.values(scenario.name, policy, "attainment"))
            hours = fmean(matrix.values(scenario.name, policy, "gpu_hours"))
            cells.append(f"{100 * attained:.1f} / {hours:.1f}")
        lines += _row([policy, *cells])
    oracles = []
    for scenario in scenarios:
        found = matrix.oracles.get(scenario.name, ())
        oracles.append(
            _pair(fmean(f["attainment"] for f in found), fmean(f["gpu_hours"] for f in found)) if found else ""
        )
    return [*lines, *_row(["*oracle*", *oracles])]


def _pair(attained: float, hours: float) -> str:
    return f"{100 * attained:.1f} / {hours:.1f}"


def tuning(matrix: Matrix) -> list[str]:
    trainings = _trainings(matrix)
    lines = _row(["policy", "knob", "as shipped", *trainings], head=True)
    for policy, contender in matrix.contenders.items():
        chosen = {each.training: each for each in matrix.tuned if each.policy == policy}
        if chosen:
            cells = [f"{chosen[training].knob:g}" if training in chosen else "" for training in trainings]
            lines += _row([policy, contender.knob, f"{contender.default:g}", *cells])
    return lines


def scenario_table(matrix: Matrix, scenario: Scenario) -> list[str]:
    """One scenario: every policy with its figures and its difference to Tidegate."""
    policies = matrix.policies_of(scenario)
    any_figures = matrix.figures[scenario.name, policies[0]]
    requests, lb0, lb2 = (
        fmean(float(each[name]) for each in any_figures) for name in ("requests", "lb0_hours", "lb2_hours")
    )
    about = f"{scenario.about[0].upper()}{scenario.about[1:]}"
    alone = "; one seed" if len(matrix.figures[scenario.name, policies[0]]) == 1 < matrix.seeds else ""
    oracle = ""
    if found := matrix.oracles.get(scenario.name):
        hours, share = fmean(each["gpu_hours"] for each in found), fmean(each["attainment"] for each in found)
        oracle = f"; the oracle takes {hours:.2f} at {100 * share:.1f} %"
    lines = [
        f"### {scenario.name}",
        "",
        f"{about}. {requests:,.0f} requests; starts of {scenario.start_seconds:g} s{alone}. In GPU-hours: work alone"
        f" {lb0:.2f}, in whole replicas with their starts {lb2:.2f}{oracle}.",
        "",
    ]
    has_events = bool(scenario.events)
    head = [
        "policy",
        "knob",
        "attainment %",
        "GPU-h",
        "over the bound",
        "TTFT p99 s",
        "ITL p99 ms",
        "scalings/h",
        "reversals",
    ]
    head += ["failed"]
    head += ["TTFT p99 s, minutes 0–5", "5–15", "well again after s"] if has_events else []
    head += ["attainment against Tidegate", "GPU-h against Tidegate"]
    lines += _row(head, head=True)
    for policy in policies:
        lines += _row(_policy_cells(matrix, scenario, policy, has_events=has_events))
    return lines


def _policy_cells(matrix: Matrix, scenario: Scenario, policy: str, *, has_events: bool) -> list[str]:
    figures = matrix.figures[scenario.name, policy]

    def mean(name: str) -> float:
        return fmean(matrix.values(scenario.name, policy, name))

    bound = [float(each["gpu_hours"]) / float(each["lbv_hours"]) for each in figures]
    cells = [
        f"**{policy}**" if policy == OURS else policy,
        f"{matrix.knob(scenario.training, policy):g}",
        _spread(bootstrap([100 * value for value in matrix.values(scenario.name, policy, "attainment")]), digits=1),
        _spread(bootstrap(matrix.values(scenario.name, policy, "gpu_hours")), digits=2),
        f"{fmean(bound):.2f}",
        _mean_of((each["ttft"]["p99"] for each in figures), digits=2),
        _mean_of((None if each["itl"]["p99"] is None else 1000 * each["itl"]["p99"] for each in figures), digits=0),
        f"{mean('scalings_per_hour'):.1f}",
        f"{mean('reversals'):.1f}",
        f"{fmean(each['outcomes'].get('failed', 0) for each in figures):.1f}",
    ]
    if has_events:
        events = [event for each in figures for event in each["events"]]
        cells += [_mean_of((event["ttft_p99"][window] for event in events), digits=1) for window in (0, 1)]
        recovered = [event["recovered_after"] for event in events]
        never = sum(each is None for each in recovered)
        cells.append(_mean_of(recovered, digits=0) + (f" ({never} of {len(recovered)} never)" if never else ""))
    if policy == OURS or (scenario.name, OURS) not in matrix.figures:
        return [*cells, "", ""]
    for name, scale, digits in (("attainment", 100.0, 1), ("gpu_hours", 1.0, 2)):
        ours, theirs = (matrix.values(scenario.name, each, name) for each in (OURS, policy))
        cells.append(_difference(paired([scale * v for v in theirs], [scale * v for v in ours]), digits=digits))
    return cells


def _spread(interval: Interval, *, digits: int) -> str:
    half = (interval.high - interval.low) / 2
    return f"{interval.mean:.{digits}f}" + (f" ± {half:.{digits}f}" if math.isfinite(half) else "")


def _difference(interval: Interval, *, digits: int) -> str:
    text = f"{interval.mean:+.{digits}f}"
    if math.isfinite(interval.low):
        text += f" ({interval.low:+.{digits}f} to {interval.high:+.{digits}f})"
    return f"**{text}**" if interval.is_clear else text


def _mean_of(values: Iterable[float | None], *, digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.{digits}f}" if known else "–"


def _row(cells: Sequence[str], *, head: bool = False) -> list[str]:
    line = f"| {' | '.join(cells)} |"
    return [line, f"|{'---|' * len(cells)}"] if head else [line]


def _trainings(matrix: Matrix) -> list[str]:
    return list(dict.fromkeys(item.training for item in matrix.tuned))


# --- the experiments -------------------------------------------------------------------------------------------------


def experiments(matrix: Matrix, *, plots: str | None = None) -> list[str]:
    """Those that were run; `plots` is the folder of the plot."""
    run = {name for name, _ in matrix.experiments}
    lines = [*_day(matrix, plots), ""] if DRIFT in run else []
    return lines + ([*_rivals(matrix), ""] if RIVALS in run else [])


def _choices(matrix: Matrix, experiment: str) -> dict[str, tuple[Figures, ...]]:
    return {choice: found for (name, choice), found in matrix.experiments.items() if name == experiment}


def _day(matrix: Matrix, plots: str | None) -> list[str]:
    """The day whose pattern drifts, and what two kinds of GPU cost against each alone."""
    days = _choices(matrix, DRIFT)
    prices = " and ".join(f"{gpu} at {drift.price_of(gpu):.2f} USD an hour" for gpu in drift.GPUS)
    parts = ", then ".join(f"{kind.name} ({kind.isl.median:g}/{kind.osl.median:g} tokens)" for kind in drift.DAY)
    lines = [
        "## A day whose pattern drifts",
        "",
        f"{drift.REQUESTS_PER_SECOND:g} requests a second all day, {drift.PHASE_SECONDS / 60:g} minutes each of"
        f" {parts}, each giving way to the next within {drift.DRIFT_SECONDS / 60:g} minutes. {drift.MODEL} in"
        f" {drift.PRECISION} is served by two kinds of GPU behind one gateway, {prices}, steps as long as the roofline"
        f" of `tidegate plan` says. {matrix.seeds} seeds. Alone, a kind is scaled and tuned by the same rules.",
        "",
    ]
    head = ["GPUs", "attainment %", *(f"{kind.name} %" for kind in drift.DAY), "cost USD"]
    head += [f"{gpu} hours" for gpu in drift.GPUS]
    lines += _row([*head, "settings changes", "scalings/h", "reversals", "cost against both"], head=True)
    both = [float(each["cost"]) for each in days[drift.BOTH]]
    for choice, found in days.items():
        costs = [float(each["cost"]) for each in found]
        against = [100 * (cost / base - 1) for cost, base in zip(costs, both, strict=True)]
        lines += _row(
            [
                f"**{choice}**" if choice == drift.BOTH else choice,
                _spread(bootstrap([100 * each["attainment"] for each in found]), digits=1),
                *(f"{100 * fmean(each['patterns'][kind.name] for each in found):.1f}" for kind in drift.DAY),
                _spread(bootstrap(costs), digits=2),
                *(f"{fmean(each['gpu_hours'].get(gpu, 0.0) for each in found):.2f}" for gpu in drift.GPUS),
                f"{fmean(each['settings_changes'] for each in found):.1f}",
                f"{fmean(each['scalings_per_hour'] for each in found):.1f}",
                f"{fmean(each['reversals'] for each in found):.1f}",
                "" if choice == drift.BOTH else f"{_difference(bootstrap(against), digits=0)} %",
            ]
        )
    if plots is not None:
        lines += ["", f"![Mix, replicas by kind of GPU, and settings over the day]({plots}/{DRIFT}.svg)"]
    return lines


def day_plot(figures: Figures) -> str:
    """Mix, replicas of each kind, their settings and the TTFT over the day."""
    points = figures["timeline"]
    names = sorted({name for point in points for name in point["mix"]})
    gpus = dict(zip(points[0]["kinds"], SLOTS, strict=False))

    def by_kind(value: Callable[[Mapping[str, Any]], float | None]) -> list[Line]:
        return [
            Line(gpu, slot, [(point["at"], value(point["kinds"][gpu])) for point in points], stepped=True)
            for gpu, slot in gpus.items()
        ]

    def setting(name: str) -> list[Line]:
        """Unknown while none of a kind is there: settings for a next pod are felt by nobody."""
        return by_kind(lambda kind: kind["settings"][name] if kind["ready"] else None)

    shares = [
        Line(name, slot, [(point["at"], 100 * point["mix"].get(name, 0.0)) for point in points])
        for name, slot in zip(names, SLOTS, strict=False)
    ]
    rate = Line("arriving", SLOTS[2], [(point["at"], point["arrivals_per_second"]) for point in points])
    ttft = Line("p95", SLOTS[2], [(point["at"], point["ttft_p95_seconds"]) for point in points])
    charts = [
        Chart("Arrival rate", "requests/s", [rate], height=60),
        Chart("Mix", "% of arrivals", shares, stacked=True),
        Chart("Ready replicas", "pods", by_kind(lambda kind: kind["ready"])),
        Chart("Sequences at once", "max_num_seqs", setting("max_num_seqs"), height=80),
        Chart(
            "Tokens a step", "max_num_batched_tokens", setting("max_num_batched_tokens"), logarithmic=True, height=80
        ),
        Chart("Prefill chunk", "tokens", setting("long_prefill_token_threshold"), logarithmic=True, height=80),
        Chart("Time to first token, 95th percentile", "seconds", [ttft], target=drift.GOALS.ttft_seconds, height=80),
    ]
    end = points[-1]["at"]
    bands = [(kind.name, start, until) for kind, start, until in drift.phases(end)]
    return picture([chart for chart in charts if has_data(chart)], Span(0.0, end, bands, []))


def _rivals(matrix: Matrix) -> list[str]:
    """Attainment of two deployments that want more GPUs than there are."""
    assistant, archive = rivals.RIVALS
    first, second = assistant.name, archive.name
    rises, begin, end = (seconds / 60 for seconds in (rivals.ARCHIVE_RISES_AT, *rivals.SHORTAGE))
    lines = [
        "## Two deployments and too few GPUs",
        "",
        f"Two deployments of chat on the same {rivals.GPUS} GPUs, with minima of {rivals.MINIMUM}: the {second} rises"
        f" from {archive.rate(0.0):g} to {archive.rate(rivals.ARCHIVE_RISES_AT):g} requests/s at minute {rises:g} and"
        f" then holds most GPUs; the {first} rises from {assistant.rate(0.0):g} to"
        f" {assistant.rate(rivals.SHORTAGE[0]):g} at minute {begin:g}; both fall at minute {end:g}. First come: no"
        " budget, and a pod that no node takes waits for"
        " the next free GPU. Shares: a budget, shared out by `allocate` as the operator does it."
        f" {matrix.seeds} seeds.",
        "",
    ]
    head = ["rule", *(f"{name}, minutes {begin:g} to {end:g} %" for name in (first, second))]
    head += [*(f"{name}, all %" for name in (first, second)), "met of both %"]
    head += [*(f"{name} GPU-h" for name in (first, second)), *(f"{name} fewest ready" for name in (first, second))]
    lines += _row([*head, "scalings/h", "reversals"], head=True)
    for choice, found in _choices(matrix, RIVALS).items():
        pairs = [(each[first], each[second]) for each in found]
        met = [
            100 * sum(item["requests"] * item["attainment"] for item in pair) / sum(item["requests"] for item in pair)
            for pair in pairs
        ]
        cells = [choice]
        for figure in ("in_short_supply", "attainment"):
            cells += [_spread(bootstrap([100 * pair[n][figure] for pair in pairs]), digits=1) for n in (0, 1)]
        cells.append(_spread(bootstrap(met), digits=1))
        cells += [f"{fmean(pair[n]['gpu_hours'] for pair in pairs):.2f}" for n in (0, 1)]
        cells += [str(min(pair[n]["fewest_ready"] for pair in pairs)) for n in (0, 1)]
        for figure in ("scalings_per_hour", "reversals"):
            cells.append(f"{fmean(sum(item[figure] for item in pair) for pair in pairs):.1f}")
        lines += _row(cells)
    return lines


# --- the plots -------------------------------------------------------------------------------------------------------


def plot(tuned: Sequence[Tuned]) -> str:
    """Each policy's sweep: GPU-hours across, missed requests on a logarithmic scale, the fewest at the top."""
    points = [attempt for each in tuned for attempt in each.sweep]
    hours = [attempt.gpu_hours for attempt in points]
    low, high = min(hours), max(hours)
    span = max(high - low, 1e-6)
    least = min(0.002, *(max(1e-4, 1 - attempt.attainment) for attempt in points))

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low + 0.02 * span) / (1.04 * span)

    def y(attainment: float) -> float:
        missed = max(least, 1 - attainment)
        return TOP + (HEIGHT - TOP - BOTTOM) * math.log(missed / least) / math.log(1 / least)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for attainment in (0.999, 0.99, 0.95, 0.9, 0.5, 0.0):
        if 1 - attainment >= least:
            at = y(attainment)
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#dddddd"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{100 * attainment:g} %</text>')
    for tick in range(6):
        value = low + span * tick / 5
        parts.append(f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:.1f}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">GPU-hours</text>')
    parts.append(f'<text x="{LEFT}" y="18">attainment, on a scale of misses</text>')
    for number, each in enumerate(tuned):
        parts += _line(each, number, x=[x(a.gpu_hours) for a in each.sweep], y=[y(a.attainment) for a in each.sweep])
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(tuned: Tuned, number: int, *, x: Sequence[float], y: Sequence[float]) -> list[str]:
    colour, ours = COLOURS[number % len(COLOURS)], tuned.policy == OURS
    width, dashes = (3 if ours else 1.2), ("" if number < len(COLOURS) else ' stroke-dasharray="4 3"')
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in sorted(zip(x, y, strict=True)))
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>']
    for a, b, attempt in zip(x, y, tuned.sweep, strict=True):
        radius = 4.5 if attempt.knob == tuned.knob else 2.2
        title = escape(
            f"{tuned.policy}, {attempt.knob:g}: {100 * attempt.attainment:.2f} %, {attempt.gpu_hours:.2f} GPU-h"
        )
        parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{radius}" fill="{colour}"><title>{title}</title></circle>')
    row = TOP + 16 * number
    parts.append(f'<line x1="{WIDTH - RIGHT + 12}" x2="{WIDTH - RIGHT + 34}" y1="{row}" y2="{row}" stroke="{colour}"')
    parts[-1] += f' stroke-width="{width}"{dashes}/>'
    weight = ' font-weight="bold"' if ours else ""
    parts.append(f'<text x="{WIDTH - RIGHT + 40}" y="{row + 4}"{weight}>{escape(tuned.policy)}</text>')
    return parts
