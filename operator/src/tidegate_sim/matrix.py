"""What the evaluation found, as values, and the statistics over its seeds.

Pure. Made by `evaluation`, read by `evaluation_report`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tidegate_engine.settings import BatchSettings
from tidegate_sim.contenders import Contender
from tidegate_sim.scenarios import Scenario

Figures = Mapping[str, Any]
"""Of one simulation, as JSON."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A policy with one value of its knob, on a training workload."""

    knob: float
    attainment: float
    gpu_hours: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """The knob of a policy for a training workload, and the sweep that it was chosen from."""

    policy: str
    training: str
    knob: float
    sweep: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Everything that the report is written from."""

    scenarios: tuple[Scenario, ...]
    contenders: Mapping[str, Contender]
    tuned: tuple[Tuned, ...]
    figures: Mapping[tuple[str, str], tuple[Figures, ...]]
    """By (scenario, policy), one of each seed, in order."""
    oracles: Mapping[str, tuple[Figures, ...]]
    settings: Mapping[str, BatchSettings]
    """By training workload."""
    seeds: int
    missing: tuple[str, ...]
    """Scenarios left out for want of a trace."""
    experiments: Mapping[tuple[str, str], tuple[Figures, ...]] = field(default_factory=dict)
    """By (experiment, choice), one of each seed, in order."""

    def policies_of(self, scenario: Scenario) -> list[str]:
        return [policy for policy in self.contenders if (scenario.name, policy) in self.figures]

    def values(self, scenario: str, policy: str, name: str) -> list[float]:
        """A figure for each seed."""
        return [float(each[name]) for each in self.figures[scenario, policy]]

    def knob(self, training: str, policy: str) -> float:
        return next(item.knob for item in self.tuned if (item.training, item.policy) == (training, policy))


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether zero lies outside."""
        return self.low > 0 or self.high < 0


def bootstrap(values: Sequence[float], *, seed: int = 0, draws: int = 2000) -> Interval:
    """By drawing among the values again; one alone tells no interval. Raises ValueError when there are none."""
    if not values:
        raise ValueError("there is nothing to draw from")
    if len(values) == 1:
        return Interval(values[0], -math.inf, math.inf)
    random = Random(f"{seed} bootstrap")
    count = len(values)
    means = sorted(sum(random.choices(values, k=count)) / count for _ in range(draws))
    return Interval(sum(values) / count, means[int(0.025 * draws)], means[min(draws - 1, int(0.975 * draws))])


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Of the differences, seed by seed."""
    return bootstrap([mine - other for mine, other in zip(ours, theirs, strict=True)])


def best_of(sweep: Sequence[Attempt], *, attainment: float) -> float:
    """The knob with the fewest GPU-hours among those that attain, else the one that attains most."""
    attaining = [item for item in sweep if item.attainment >= attainment]
    if attaining:
        return min(attaining, key=lambda item: (round(item.gpu_hours, 6), -item.attainment)).knob
    return max(sweep, key=lambda item: (item.attainment, -item.gpu_hours)).knob
