"""`tidegate simulate`: an LLMDeployment, a trace and a GPU's profile in virtual time, beside what others would do.

Reads files, writes a table, JSON and a page. Everything else is `simulation`'s. Needs no cluster and no GPU.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from itertools import islice, takewhile
from pathlib import Path
from typing import TextIO

from pydantic.alias_generators import to_camel

from tidegate_engine.settings import pattern_of
from tidegate_engine.steptime import Profile, load_profile, profile_names
from tidegate_engine.workload import Lengths, WorkloadError, made_up, parse_lengths, poisson
from tidegate_operator.api import InvalidSpec, ScalingMode, Spec, parse_spec
from tidegate_operator.capacity import Targets
from tidegate_operator.goals import pattern_targets_of, targets_of
from tidegate_operator.objects import UnreadableInput, read_objects, read_text, unknown_fields
from tidegate_sim.arrivals import Arrival
from tidegate_sim.baselines import table
from tidegate_sim.baselines.plant import Plant
from tidegate_sim.controller import Controller
from tidegate_sim.operator_controller import OperatorController, scrape_seconds
from tidegate_sim.replica import engine_info
from tidegate_sim.report import html, text
from tidegate_sim.results import Result, has_met, ttft_limit
from tidegate_sim.simulation import POINT_SECONDS, Progress, simulate
from tidegate_sim.specification import STRICT, FleetSpec, GatewaySpec, Goals, start_times
from tidegate_sim.traces import Counted, Cut, read

POINTS = 600
"""Most points of a plot."""
MAX_ARRIVALS = 20_000_000
"""Of one simulation; each takes about a hundred bytes."""
MAX_SIMULATED_SECONDS = 10 * 366 * 86_400.0
MAX_INITIAL_REPLICAS = 1000
"""As many as an object may ask for."""
MAX_PRICE = 1e6
MAX_FACTOR = 1e6
PROGRESS_SECONDS = 5.0
EXIT_INTERRUPTED = 130
DESCRIPTION = """\
Serve a trace with an LLMDeployment in virtual time: the operator's own rules scale a fleet of the engine's own
scheduler, whose steps take as long as a GPU's profile says. Hours pass in seconds; nothing is needed but files."""
EPILOG = """\
examples:
  would this object hold its goals under last week's traffic?
    tidegate simulate -f my.yaml --trace week.csv --profile h100-llama-3.1-8b --html week.html
  the same beside an HPA, for 2 USD a GPU-hour, with pods that take three minutes to start
    tidegate simulate -f my.yaml --trace week.csv --baseline hpa-concurrency --start-seconds 180 --price 2
  no trace yet: ten requests a second for an hour
    tidegate simulate -f my.yaml --rate 10 --isl lognormal:800,0.8 --osl lognormal:200,0.6 --duration-seconds 3600"""


class SimulationRefused(Exception):
    """What was asked for cannot be simulated; the message says what to do."""


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, 2 with one sentence on stderr when something cannot be read or written, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (SimulationRefused, WorkloadError, UnreadableInput, InvalidSpec) as error:
        print(f"tidegate simulate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tidegate simulate: stopped; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tidegate simulate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-f", "--deployment", required=True, metavar="FILE", help="LLMDeployment, as YAML or JSON; - is standard input"
    )
    parser.add_argument(
        "--profile",
        metavar="NAME|FILE",
        help=f"GPU and model: {', '.join(profile_names())}, or a .json file; default: the object's own --profile",
    )
    load = parser.add_argument_group("what arrives")
    load.add_argument("--trace", type=Path, metavar="FILE", help="CSV with a time and two lengths, or Mooncake's JSONL")
    load.add_argument("--trace-start-seconds", type=_not_negative, default=0.0, metavar="S", help="begin there in it")
    load.add_argument("--speed", type=_factor, default=1.0, metavar="X", help="its time passes X times faster")
    load.add_argument("--rate-scale", type=_factor, default=1.0, metavar="X", help="X times its requests")
    load.add_argument("--length-scale", type=_factor, default=1.0, metavar="X", help="X times its tokens a request")
    load.add_argument("--rate", type=_above_zero, metavar="R", help="without a trace: requests a second")
    lengths = "512, uniform:128,1024 or lognormal:512,0.8"
    load.add_argument("--isl", default="1000", metavar="N", help=f"and their prompts: {lengths} tokens (%(default)s)")
    load.add_argument("--osl", default="250", metavar="N", help="and their answers (%(default)s)")
    load.add_argument(
        "--duration-seconds", type=_above_zero, metavar="S", help="of the trace, before --speed; all of it, or 3600"
    )
    fleet = parser.add_argument_group("the fleet")
    fleet.add_argument("--start-seconds", type=_not_negative, default=60.0, metavar="S", help="to start a pod; 60")
    fleet.add_argument("--initial-replicas", type=_replicas, metavar="N", help="ready at the start; the fewest allowed")
    fleet.add_argument("--timeout-seconds", type=_above_zero, metavar="S", help="clients give up without a first token")
    fleet.add_argument("--price", type=_price, metavar="USD", help="of a GPU-hour")
    compare = parser.add_argument_group("comparison and output")
    compare.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="NAME[=KNOB]",
        help=f"also under this policy; may be given again. There are {', '.join(table.BASELINES)}",
    )
    compare.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of start times, and of a load that is made up"
    )
    compare.add_argument("--json", metavar="FILE", help="write all figures and decisions; - is standard output")
    compare.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots and decisions")
    return parser


def _run(options: argparse.Namespace) -> int:
    for path in (options.html, None if options.json in (None, "-") else Path(options.json)):
        _check_place(path)
    name, spec = _object(options.deployment)
    profile = _profile(options.profile, spec)
    arrivals, described = _arrivals(options, profile)
    if arrivals[-1].at_seconds > MAX_SIMULATED_SECONDS:
        raise SimulationRefused(
            f"the last request comes after {arrivals[-1].at_seconds:g} s, and ten years are the most; are the trace's "
            "times seconds? Choose a part with --duration-seconds, or a higher --speed"
        )
    low, high = spec.replica_bounds() if spec.autoscaling.mode is ScalingMode.AUTO else (spec.fixed_replicas(),) * 2
    fleet = FleetSpec(
        profile,
        initial_replicas=low if options.initial_replicas is None else options.initial_replicas,
        settings=spec.initial_settings(),
        max_model_len=min(spec.engine.max_model_length or profile.max_model_len, profile.max_model_len),
        patterns=spec.patterns(),
        start=start_times(options.start_seconds),
        scrape_seconds=scrape_seconds(spec),
        drain_timeout_seconds=float(spec.drain.timeout_seconds),
        gateway=GatewaySpec(timeout_seconds=options.timeout_seconds),
        gpu_price_per_hour=options.price,
    )
    goals = _goals(targets_of(spec), spec)
    plant = Plant(
        step=profile.step,
        kv_tokens=profile.kv_blocks * profile.block_tokens,
        settings=fleet.settings,
        ttft_seconds=goals.ttft_seconds,
        itl_seconds=goals.itl_seconds,
        start_seconds=options.start_seconds,
        lowest_replicas=low,
        highest_replicas=high,
    )
    info = engine_info(profile, max_model_len=fleet.max_model_len)
    contenders: list[Controller] = [OperatorController(spec, info)]
    contenders += [_baseline(each, plant, arrivals) for each in options.baseline]
    # As they were asked for: the same policy with two knobs is two rows.
    names = [contenders[0].name, *options.baseline]
    progress = _Progress(sys.stderr, arrivals[-1].at_seconds)
    results = []
    for shown, controller in zip(names, contenders, strict=True):
        progress.begin(shown)
        try:
            result = simulate(
                arrivals,
                fleet,
                controller,
                seed=options.seed,
                goals=goals,
                point_seconds=max(POINT_SECONDS, arrivals[-1].at_seconds / POINTS),
                watch=progress.show,
            )
        finally:
            progress.end()
        results.append(replace(judged(result, spec), controller=shown))
    _write(options, results, name=name, described=described, goals=_told_goals(spec))
    return 0


def _object(filename: str) -> tuple[str, Spec]:
    """Name and spec of the file's first LLMDeployment. What the API server would refuse of it is refused here too."""
    found = next(read_objects(read_text(filename)))
    metadata, given = found.get("metadata"), found.get("spec") or {}
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    spec = parse_spec(given)
    unknown = list(unknown_fields(spec, given))
    if unknown:
        raise SimulationRefused(f"{filename} has fields that no LLMDeployment has: {', '.join(unknown[:5])}")
    scaling = spec.autoscaling
    bounds = [("autoscaling", "minReplicas", scaling.min_replicas, "maxReplicas", scaling.max_replicas)]
    for place in ("max_sequences", "max_batched_tokens", "prefill_chunk_tokens"):
        ends = getattr(spec.batching, place)
        bounds.append((f"batching.{to_camel(place)}", "min", ends.min, "max", ends.max))
    for place, low_name, low, high_name, high in bounds:
        if low is not None and high is not None and low > high:
            raise SimulationRefused(f"{filename}: spec.{place}: {low_name} {low} is above {high_name} {high}")
    return str(name or "unnamed"), spec


def _profile(name: str | None, spec: Spec) -> Profile:
    own = next((each.partition("=")[2] for each in spec.engine.args if each.startswith("--profile=")), None)
    chosen = name or own
    if chosen is None:
        raise SimulationRefused(
            f"give --profile, what GPU and model to simulate: {', '.join(profile_names())}, or a file"
        )
    try:
        profile = load_profile(chosen)
    except ValueError as error:
        raise SimulationRefused(str(error)) from error
    return replace(profile, gpus=spec.resources.gpu.count or profile.gpus)


def _arrivals(options: argparse.Namespace, profile: Profile) -> tuple[list[Arrival], str]:
    """What arrives, in order, and a sentence about it."""
    if (options.trace is None) == (options.rate is None):
        raise SimulationRefused("give either --trace, or --rate for a load that is made up")
    duration = options.duration_seconds
    if options.trace is None:
        seconds = 3600.0 if duration is None else duration
        if seconds > MAX_SIMULATED_SECONDS:
            raise SimulationRefused("ten years are the most that is simulated; lower --duration-seconds")
        if not options.rate * seconds <= MAX_ARRIVALS:
            raise SimulationRefused(
                f"{options.rate:g} requests/s for {seconds:g} s are more than {MAX_ARRIVALS:,}; lower one of them"
            )
        isl, osl = parse_lengths(options.isl), parse_lengths(options.osl)
        made = _made_up(options.rate, isl, osl, seconds=seconds, seed=options.seed)
        if not made:
            raise SimulationRefused("nothing arrives at that rate in that time; raise one of them")
        return made, f"made up: {options.rate:g} requests/s, prompts of {options.isl}, answers of {options.osl}"
    cut = Cut(
        start_seconds=options.trace_start_seconds,
        duration_seconds=math.inf if duration is None else duration,
        speed=options.speed,
        rate_scale=options.rate_scale,
        length_scale=options.length_scale,
    )
    counted = Counted()
    each = read(options.trace, cut, block_tokens=profile.block_tokens, seed=options.seed, counted=counted)
    found = list(islice(each, MAX_ARRIVALS + 1))
    if len(found) > MAX_ARRIVALS:
        raise SimulationRefused(
            f"{options.trace} has more than {MAX_ARRIVALS:,} requests; choose some with --duration-seconds"
        )
    left_out = f"; {counted.skipped} rows without tokens left out" if counted.skipped else ""
    return found, f"{options.trace.name}{left_out}"


def _made_up(rate: float, isl: Lengths, osl: Lengths, *, seconds: float, seed: int) -> list[Arrival]:
    times = takewhile(lambda at: at < seconds, poisson(rate, burstiness=1.0, rng=random.Random(seed)))
    requests = made_up(isl, osl, arrivals=times, rng=random.Random(seed + 1))
    return [Arrival(each.at_seconds, each.input_tokens, each.output_tokens) for each in requests]


def _goals(targets: Targets, spec: Spec) -> Goals:
    """TTFT and ITL of a request; where the object says nothing of one, the usual."""
    ttft, itl = targets.ttft_seconds, targets.itl_seconds
    return Goals(
        ttft_seconds=STRICT.ttft_seconds if ttft is None else ttft,
        itl_seconds=STRICT.itl_seconds if itl is None else itl,
        unloaded_factor=STRICT.unloaded_factor if ttft is None else 0.0,
        patterns=spec.patterns(),
    )


def _targets(spec: Spec) -> dict[str, Targets]:
    """What is asked for a request, by pattern where that has goals of its own; `""` is for all others."""
    common = targets_of(spec)
    own = {name: replace(each, queue_seconds=common.queue_seconds) for name, each in pattern_targets_of(spec).own}
    return {"": common, **own}


def judged(result: Result, spec: Spec) -> Result:
    """`result` by all that the object asks of a request: its class's own goals, queue and end-to-end time too."""
    asked = {name: (targets, _goals(targets, spec)) for name, targets in _targets(spec).items()}
    limits: dict[tuple[str, int], float] = {}
    met = dict.fromkeys(result.patterns, 0)
    records = result.records
    for index, (isl, osl) in enumerate(zip(records.isl, records.osl, strict=True)):
        pattern = pattern_of(isl, osl, result.goals.patterns)
        own = pattern if pattern in asked else ""
        targets, goals = asked[own]
        limit = limits.get((own, isl))
        if limit is None:
            limit = limits[own, isl] = ttft_limit(isl, goals, result.fleet)
        met[pattern] += (
            has_met(records, index, goals, limit=limit)
            and _is_within(records.queue[index], targets.queue_seconds)
            and _is_within(records.ended[index] - records.at[index], targets.end_to_end_seconds)
        )
    return replace(
        result,
        overall=replace(result.overall, met=sum(met.values())),
        patterns={name: replace(service, met=met[name]) for name, service in result.patterns.items()},
    )


def _is_within(seconds: float, goal_seconds: float | None) -> bool:
    return goal_seconds is None or seconds <= goal_seconds


def _told_goals(spec: Spec) -> list[tuple[str, str]]:
    """The goals as facts of the report: those of all, and of each class with its own."""
    return [
        (
            f"Goals of {name}" if name else "Goals",
            f"{_told(targets, _goals(targets, spec))}, for {spec.objectives.attainment_percent} % of the requests",
        )
        for name, targets in _targets(spec).items()
    ]


def _told(targets: Targets, goals: Goals) -> str:
    figures = (
        ("TTFT", goals.ttft_seconds),
        ("ITL", goals.itl_seconds),
        ("queue time", targets.queue_seconds),
        ("end-to-end time", targets.end_to_end_seconds),
    )
    least = f" (or {goals.unloaded_factor:g} x an idle replica's TTFT)" if goals.unloaded_factor else ""
    told = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in figures if seconds is not None)
    return told + least


def _baseline(given: str, plant: Plant, arrivals: Sequence[Arrival]) -> Controller:
    name, has_knob, knob = given.partition("=")
    near = get_close_matches(name, table.BASELINES, n=1)
    if name not in table.BASELINES and near:
        raise SimulationRefused(f"--baseline {given}: there is no baseline {name!r}; is {near[0]} meant?")
    try:
        value = _number(knob) if has_knob else None
    except argparse.ArgumentTypeError as error:
        raise SimulationRefused(f"--baseline {given}: its knob {error}") from error
    try:
        return table.make(name, plant, knob=value, arrivals=arrivals)
    except ValueError as error:
        raise SimulationRefused(f"--baseline {given}: {error}") from error


def _write(
    options: argparse.Namespace,
    results: Sequence[Result],
    *,
    name: str,
    described: str,
    goals: Sequence[tuple[str, str]],
) -> None:
    fleet = results[0].fleet
    facts = [
        ("Object", name),
        ("Load", f"{described}; {len(results[0].records)} requests in {results[0].duration_seconds / 3600:.2f} h"),
        ("Replica", f"{fleet.profile.name}, {fleet.profile.gpus} x {fleet.profile.gpu}"),
        ("A pod starts in", f"{fleet.start.mean_seconds:g} s, {100 * fleet.start.jitter:.0f} % either way by phase"),
        *goals,
        ("Gateway", f"{fleet.gateway.balancing}; holds requests while no pod is ready"),
        ("Seed", str(options.seed)),
    ]
    if options.json is not None:
        content = json.dumps({"facts": dict(facts), "results": [as_json(result) for result in results]}, indent=1)
        if options.json == "-":
            print(content)
        else:
            _save(Path(options.json), content + "\n")
    print(text(results), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.html is not None:
        _save(options.html, html(results, title=f"Simulation of {name}", facts=facts))


def as_json(result: Result) -> dict[str, object]:
    """All figures, decisions and points."""
    return {
        **result.summary(),
        "reasons": dict(result.reasons),
        "changes": [asdict(change) for change in result.changes],
        "timeline": [
            {**asdict(point), "phases": {str(phase): count for phase, count in point.phases.items()}}
            for point in result.timeline
        ],
    }


def _check_place(path: Path | None) -> None:
    """Before hours of work rather than after them."""
    if path is None:
        return
    if path.is_dir():
        raise SimulationRefused(f"{path} is a folder; name a file to write")
    if not path.parent.is_dir():
        raise SimulationRefused(f"{path} cannot be written: there is no folder {path.parent}")


def _save(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise SimulationRefused(f"{path} cannot be written: {error.strerror}") from error


class _Progress:
    """A line every few seconds about a simulation that takes longer."""

    def __init__(self, out: TextIO, duration_seconds: float) -> None:
        self._out = out
        self._duration = max(1.0, duration_seconds)
        self._name = ""
        self._shown_at = 0.0

    def begin(self, name: str) -> None:
        self._name, self._shown_at = name, time.monotonic()

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._shown_at < PROGRESS_SECONDS:
            return
        self._shown_at = now
        share = min(1.0, progress.now / self._duration)
        line = (
            f"{self._name}: {100 * share:.0f} %, {progress.arrived} requests, {progress.in_flight} in flight, "
            f"{progress.replicas} replicas"
        )
        end = "" if self._out.isatty() else "\n"
        print(f"\r\x1b[K{line}" if self._out.isatty() else line, end=end, file=self._out, flush=True)

    def end(self) -> None:
        if self._out.isatty():
            print("\r\x1b[K", end="", file=self._out, flush=True)


def _number(given: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {given!r}") from None


def _above_zero(given: str) -> float:
    value = _number(given)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, not {given}")
    return value


def _not_negative(given: str) -> float:
    value = _number(given)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {given}")
    return value


def _price(given: str) -> float:
    value = _not_negative(given)
    if value > MAX_PRICE:
        raise argparse.ArgumentTypeError(f"must be 0 to {MAX_PRICE:g}, not {given}")
    return value


def _factor(given: str) -> float:
    value = _number(given)
    if not 1 / MAX_FACTOR <= value <= MAX_FACTOR:
        raise argparse.ArgumentTypeError(f"must be {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}, not {given}")
    return value


def _replicas(given: str) -> int:
    value = _not_negative(given)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number, not {given}")
    if value > MAX_INITIAL_REPLICAS:
        raise argparse.ArgumentTypeError(f"must be 0 to {MAX_INITIAL_REPLICAS}, not {given}")
    return int(value)
