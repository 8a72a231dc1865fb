"""The baselines by name, each with the one knob that a tuning sweep turns, and its values.

`tidegate simulate --baseline NAME` and `evaluation` look here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tidegate_sim import bounds
from tidegate_sim.arrivals import Arrival
from tidegate_sim.baselines import hpa
from tidegate_sim.baselines.aibrix import Aibrix
from tidegate_sim.baselines.chiron import Chiron
from tidegate_sim.baselines.dynamo import Dynamo
from tidegate_sim.baselines.hpa import Bounds, Hpa
from tidegate_sim.baselines.keda import Keda
from tidegate_sim.baselines.knative import Knative
from tidegate_sim.baselines.plant import Plant
from tidegate_sim.baselines.predictors import Kalman
from tidegate_sim.baselines.schedule import Scheduled, Static, ahead
from tidegate_sim.baselines.token_velocity import TokenVelocity
from tidegate_sim.baselines.wva import Thresholds, Wva
from tidegate_sim.controller import Controller

Make = Callable[[Plant, float, Sequence[Arrival]], Controller]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A policy to be made: `make(plant, knob, arrivals)`. Only the clairvoyant looks at the arrivals."""

    make: Make
    knob: str
    """What the knob is, in a few words."""
    default: float
    """As its authors ship it, or, where they ship none, a middle value."""
    grid: tuple[float, ...]
    about: str


def bounds_of(plant: Plant) -> Bounds:
    return Bounds(plant.lowest_replicas, plant.highest_replicas)


def _static(plant: Plant, knob: float, arrivals: Sequence[Arrival]) -> Controller:
    return Static(min(max(round(knob), plant.lowest_replicas), plant.highest_replicas))


def _hpa(name: str, metric: Callable[[float], hpa.Metric]) -> Make:
    return lambda plant, knob, arrivals: Hpa([metric(knob)], bounds_of(plant), name=name)


def _hpa_both(plant: Plant, knob: float, arrivals: Sequence[Arrival]) -> Controller:
    metrics = [hpa.concurrency_per_pod(knob), hpa.waiting_per_pod(WAITING_BESIDE)]
    return Hpa(metrics, bounds_of(plant), name="hpa-both")


MIN_KNOB, MAX_KNOB = 1e-3, 1e6
WAITING_BESIDE = 2.0
"""Target of the second metric of `hpa-both`."""


def clairvoyant_schedule(plant: Plant, margin: float, arrivals: Sequence[Arrival]) -> list[tuple[float, int]]:
    """The fleet of LB2 for (1 + margin) times the demand, each replica ordered so early that it is ready in time."""
    works = bounds.works_of(plant.step, largest_batch=plant.settings.max_num_seqs, kv_tokens=plant.kv_tokens)
    needs = [need * (1 + margin) for need in bounds.demand(arrivals, works, itl_seconds=plant.itl_seconds)]
    first = bounds.whole_replicas(needs[:1], floor=plant.lowest_replicas) or [plant.lowest_replicas]
    costs = bounds.Costs(plant.start_seconds, floor=plant.lowest_replicas, initial=first[0])
    wanted = [min(count, plant.highest_replicas) for count in bounds.bridged(needs, costs)] or first
    # A slot more, as the work of a slot is there from its beginning.
    lead = plant.start_seconds + bounds.SLOT_SECONDS
    return ahead(wanted, slot_seconds=bounds.SLOT_SECONDS, lead_seconds=lead)


def _clairvoyant(plant: Plant, knob: float, arrivals: Sequence[Arrival]) -> Controller:
    return Scheduled(clairvoyant_schedule(plant, knob, arrivals))


def _dynamo(name: str, *, throughput: bool = True, load: bool = False) -> Make:
    return lambda plant, knob, arrivals: Dynamo(plant, throughput, load, headroom=knob, name=name)


BASELINES: Mapping[str, Baseline] = {
    "static": Baseline(_static, "replicas", 8, (4, 6, 8, 10, 12, 14, 16, 20), "a fixed number of replicas"),
    "hpa-waiting": Baseline(
        _hpa("hpa-waiting", hpa.waiting_per_pod),
        "waiting requests a pod",
        5,
        (0.25, 0.5, 1, 2, 5),
        "HPA on waiting requests",
    ),
    "hpa-duty-cycle": Baseline(
        _hpa("hpa-duty-cycle", hpa.duty_cycle),
        "share of busy time",
        0.7,
        (0.5, 0.7, 0.8, 0.9),
        "HPA on what a GPU's utilisation counter shows",
    ),
    "hpa-work": Baseline(
        _hpa("hpa-work", hpa.work_utilisation),
        "share of the work",
        0.7,
        (0.4, 0.5, 0.6, 0.7, 0.8),
        "HPA on the share of a replica's work, which no counter shows",
    ),
    "hpa-concurrency": Baseline(
        _hpa("hpa-concurrency", hpa.concurrency_per_pod),
        "requests in a pod",
        32,
        (2, 3, 4, 6, 8, 10, 12, 16, 24),
        "HPA on requests in the engines",
    ),
    "hpa-both": Baseline(
        _hpa_both, "requests in a pod", 32, (2, 3, 4, 6, 8, 10, 12, 16), "HPA on requests in and waiting"
    ),
    "rps": Baseline(
        lambda plant, knob, arrivals: Hpa([hpa.RequestsPerSecond(knob).metric()], bounds_of(plant), name="rps"),
        "requests/s a replica",
        0.5,
        (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1),
        "HPA on requests a second",
    ),
    "keda": Baseline(
        lambda plant, knob, arrivals: Keda(knob, bounds_of(plant)),
        "waiting requests a replica",
        5,
        (1, 2, 5),
        "KEDA on waiting requests",
    ),
    "knative": Baseline(
        lambda plant, knob, arrivals: Knative(knob, bounds_of(plant)),
        "requests in a pod",
        100,
        (3, 4.5, 6, 9, 12, 16, 20, 28, 100),
        "Knative's KPA on concurrency",
    ),
    "wva": Baseline(
        lambda plant, knob, arrivals: Wva(Thresholds(kv_used_ratio=knob), bounds_of(plant)),
        "KV use that saturates",
        0.8,
        (0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
        "llm-d's variant autoscaler, by saturation",
    ),
    "dynamo-throughput": Baseline(
        _dynamo("dynamo-throughput"), "forecast times", 1, (1, 1.25, 1.5, 2), "Dynamo's planner by throughput"
    ),
    "dynamo-kalman": Baseline(
        lambda plant, knob, arrivals: Dynamo(plant, headroom=knob, predictor=Kalman, name="dynamo-kalman"),
        "forecast times",
        1,
        (1, 1.25, 1.5, 2),
        "the same with a Kalman filter's forecast",
    ),
    "dynamo-corrected": Baseline(
        lambda plant, knob, arrivals: Dynamo(plant, headroom=knob, corrections=True, name="dynamo-corrected"),
        "forecast times",
        1,
        (1, 1.25, 1.5, 2),
        "the planner's older formulation, with correction factors",
    ),
    "dynamo-load": Baseline(
        _dynamo("dynamo-load", throughput=False, load=True), "none", 1, (1,), "Dynamo's planner by load"
    ),
    "dynamo-both": Baseline(
        _dynamo("dynamo-both", load=True),
        "forecast times",
        1,
        (1, 1.25, 1.5, 2),
        "by load, above the throughput's floor",
    ),
    "aibrix-apa": Baseline(
        lambda plant, knob, arrivals: Aibrix(knob, bounds_of(plant)),
        "KV use of a pod",
        0.5,
        (0.15, 0.25, 0.35, 0.5, 0.65),
        "AIBrix APA on KV use",
    ),
    "aibrix-kpa": Baseline(
        lambda plant, knob, arrivals: Aibrix(knob, bounds_of(plant), windows=True, name="aibrix-kpa"),
        "KV use of a pod",
        0.5,
        (0.15, 0.25, 0.35, 0.5, 0.65),
        "AIBrix KPA on KV use",
    ),
    "chiron": Baseline(
        lambda plant, knob, arrivals: Chiron(plant, knob), "busy share", 0.67, (0.33, 0.5, 0.67, 0.85), "like Chiron"
    ),
    "token-velocity": Baseline(
        lambda plant, knob, arrivals: TokenVelocity(plant, knob),
        "share of the velocity",
        0.8,
        (0.5, 0.65, 0.8, 0.95),
        "tokens a second over calibrated velocities",
    ),
    "clairvoyant": Baseline(
        _clairvoyant, "margin over the demand", 0.5, (0, 0.25, 0.5, 1), "a schedule made with the workload known"
    ),
}


def make(name: str, plant: Plant, *, knob: float | None = None, arrivals: Sequence[Arrival] = ()) -> Controller:
    """The baseline of that name; raises ValueError with the names there are, or the knob's bounds."""
    if name not in BASELINES:
        raise ValueError(f"there is no baseline {name!r}; there are {', '.join(BASELINES)}")
    if name == "clairvoyant" and not arrivals:
        raise ValueError("the clairvoyant needs the workload's arrivals beforehand")
    baseline = BASELINES[name]
    lowest = 0.0 if 0 in baseline.grid else MIN_KNOB
    if knob is not None and not lowest <= knob <= MAX_KNOB:
        raise ValueError(f"its knob ({baseline.knob}) is {lowest:g} to {MAX_KNOB:g}, not {knob:g}")
    return baseline.make(plant, baseline.default if knob is None else knob, arrivals)
