"""Experiments beside the matrix: several kinds of GPU on a day that drifts, and two deployments with too few GPUs.

Each has choices that are compared, as policies of a scenario are; figures are JSON. `evaluation` runs and keeps them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tidegate_operator.observation import STARTING_PHASES, ReplicaPhase
from tidegate_sim import drift, rivals
from tidegate_sim.matrix import Figures
from tidegate_sim.results import KindPoint, Point, Result

DRIFT, RIVALS = "drift", "rivals"
SHOWN_SECONDS = 60.0
"""Between two points of a plot."""
DAYS: Mapping[str, tuple[str, ...]] = {drift.BOTH: drift.GPUS, **{f"{gpu} alone": (gpu,) for gpu in drift.GPUS}}
"""Kinds of GPU by the name of the choice."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """`run(choice, seed)` gives the figures."""

    choices: tuple[str, ...]
    run: Callable[[str, int], Figures]


def _day(choice: str, seed: int) -> Figures:
    return figures_of_day(drift.run(DAYS[choice], seed=seed))


def figures_of_day(result: Result) -> dict[str, Any]:
    every = max(1, round(SHOWN_SECONDS / result.timeline[0].at))
    return {
        "requests": result.overall.arrived,
        "attainment": result.attainment,
        "patterns": {
            kind.name: result.between(start, end).attainment
            for kind, start, end in drift.phases(result.duration_seconds)
        },
        "cost": result.cost,
        "gpu_hours": {name: use.gpu_seconds / 3600 for name, use in result.uses.items()},
        "scalings_per_hour": result.scalings_per_hour,
        "reversals": result.reversals,
        "settings_changes": len(result.retunings),
        "timeline": [_shown(point, result) for point in result.timeline[every - 1 :: every]],
    }


def _shown(point: Point, result: Result) -> dict[str, Any]:
    """A point by kind; of one kind alone, its own figures."""
    kinds = point.kinds or {result.fleet.kinds[0].name: KindPoint(point.desired, point.phases, point.settings)}
    return {
        "at": point.at,
        "arrivals_per_second": point.arrivals_per_second,
        "mix": dict(point.mix),
        "ttft_p95_seconds": point.ttft_p95_seconds,
        "kinds": {
            name: {
                "ready": each.phases.get(ReplicaPhase.READY, 0),
                "starting": sum(each.phases.get(phase, 0) for phase in STARTING_PHASES),
                "settings": each.settings.as_dict(),
            }
            for name, each in kinds.items()
        },
    }


def _rivalry(choice: str, seed: int) -> Figures:
    rule = next(rule for rule in rivals.RULES if rule.name == choice)
    return {
        rival.name: {
            "requests": result.overall.arrived,
            "attainment": result.attainment,
            "in_short_supply": result.between(*rivals.SHORTAGE).attainment,
            "gpu_hours": result.gpu_hours,
            "fewest_ready": min(point.pods(ReplicaPhase.READY) for point in result.timeline),
            "scalings_per_hour": result.scalings_per_hour,
            "reversals": result.reversals,
        }
        for rival, result in zip(rivals.RIVALS, rivals.run(rule, seed=seed), strict=True)
    }


EXPERIMENTS: Mapping[str, Experiment] = {
    DRIFT: Experiment(tuple(DAYS), _day),
    RIVALS: Experiment(tuple(rule.name for rule in rivals.RULES), _rivalry),
}
