"""Speed of the simulator: CPU time of a request, and where it goes, beside the goal of a million requests in 600 s.

Run as a script: a line for each size, then one JSON line. `--million` adds the million itself, `--trace FILE` serves a
trace instead of what is made up. Times are CPU time of this process.
"""

import argparse
import cProfile
import json
import pstats
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from time import process_time

from tidegate_engine.steptime import load_profile
from tidegate_operator.api import parse_spec
from tidegate_sim import synthetic
from tidegate_sim.arrivals import Arrival
from tidegate_sim.controller import Controller, FleetView, Order
from tidegate_sim.operator_controller import OperatorController
from tidegate_sim.replica import engine_info
from tidegate_sim.results import Result
from tidegate_sim.simulation import simulate
from tidegate_sim.specification import FleetSpec
from tidegate_sim.traces import Cut, read

GOAL_MICROSECONDS = 600.0
"""CPU time of a request, if a million take ten minutes."""
PROFILED_REQUESTS = 3_000
REPLICAS = 8
RATE = 60.0
CONVERSATION = synthetic.Kind("conversation", synthetic.Tail(900, 1.0, 16_000), synthetic.Tail(100, 0.8, 2000))
CODE = synthetic.Kind("code", synthetic.Tail(1800, 0.9, 16_000), synthetic.Tail(14, 0.9, 1000))
"""About as in the public Azure traces."""
OBJECT = {
    "model": {"uri": "file:///models/none"},
    "objectives": {"ttft": {"milliseconds": 1000}, "interTokenLatency": {"milliseconds": 60}},
    "batching": {"mode": "Auto"},
    "autoscaling": {"mode": "Auto", "minReplicas": 2, "maxReplicas": 12},
}


class Fixed:
    """So many replicas, always."""

    name = "fixed"
    period_seconds = 15.0

    def decide(self, view: FleetView) -> Order:
        return Order(REPLICAS)


def made_up(count: int) -> Iterator[Arrival]:
    rate = synthetic.daily(RATE, swing=0.5, peak_hour=1.0)
    found = synthetic.made_up(rate, lambda _: {CONVERSATION: 0.6, CODE: 0.4}, duration_seconds=1e9, seed=1)
    return islice(found, count)


def controller_of(name: str) -> Controller:
    if name == "fixed":
        return Fixed()
    return OperatorController(parse_spec(OBJECT), engine_info(load_profile("h100-llama-3.1-8b")))


def run(workload: Iterable[Arrival], controller: str) -> tuple[Result, float]:
    fleet = FleetSpec(load_profile("h100-llama-3.1-8b"), initial_replicas=REPLICAS)
    began = process_time()
    result = simulate(workload, fleet, controller_of(controller), seed=1)
    return result, process_time() - began


def split(workload: Iterable[Arrival], controller: str) -> dict[str, float]:
    """Share of the time by module, the largest first; under the profiler, so small functions weigh too much."""
    profiler = cProfile.Profile()
    profiler.runcall(run, workload, controller)
    times: dict[str, float] = {}
    for (file, _, _), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        module = Path(file).stem if "tidegate" in file else "built-in" if file == "~" else "library"
        times[module] = times.get(module, 0.0) + own
    total = sum(times.values())
    shares = {module: round(own / total, 3) for module, own in times.items() if own / total >= 0.01}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", action="store_true", help="also a million requests; takes ten minutes or so")
    parser.add_argument("--trace", type=Path, help="a trace to serve instead")
    options = parser.parse_args()

    def workload(count: int) -> Iterator[Arrival]:
        return made_up(count) if options.trace is None else read(options.trace, Cut(count=count))

    rows = []
    for controller in ("fixed", "tidegate"):
        for count in (10_000, 100_000, *((1_000_000,) if options.million else ())):
            result, seconds = run(workload(count), controller)
            each = 1e6 * seconds / len(result.records)
            rows.append(
                {
                    "controller": controller,
                    "requests": len(result.records),
                    "seconds": round(seconds, 2),
                    "microseconds_per_request": round(each, 1),
                    "ratio_to_goal": round(each / GOAL_MICROSECONDS, 3),
                    "simulated_seconds": round(result.duration_seconds),
                    "attainment": result.attainment,
                }
            )
            print(
                f"{controller}: {len(result.records)} requests, {result.duration_seconds / 3600:.1f} h, in "
                f"{seconds:.1f} s = {each:.0f} µs each = {each / GOAL_MICROSECONDS:.2f} of the goal",
                flush=True,
            )
    shares = {controller: split(workload(PROFILED_REQUESTS), controller) for controller in ("fixed", "tidegate")}
    for controller, modules in shares.items():
        print(f"{controller}: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in modules.items()))
    print(json.dumps({"benchmark": "simulator", "goal_microseconds": GOAL_MICROSECONDS, "rows": rows, "split": shares}))


if __name__ == "__main__":
    main()
