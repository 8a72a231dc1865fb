"""NVIDIA Dynamo's planner in its SLA mode for engines that do prefill and decode: by throughput, by load, or both.

ai-dynamo/dynamo `components/src/dynamo/planner/core/{throughput_scaling,load_scaling,state_machine}.py` and
`perf_model/agg.py`. Throughput: every 180 s, one forecast each of requests, ISL and OSL; the largest batch whose step
and first token are within the targets gives an engine's rate, the rest is a division. Load: every 5 s, one more when
all engines are above a target, one fewer when each would stay below 80 % of it with the share of the one that goes.
Both: the throughput's answer is the floor of the load's. While pods come or go, nothing is decided. Its regression over
step times is replaced by the step model itself, its best case. The older formulation (docs/planner/sla_planner.md)
sizes prefill and decode apart, with correction factors; here the two shares add up, as one pool serves both.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tidegate_sim.baselines import signals
from tidegate_sim.baselines.plant import Plant
from tidegate_sim.baselines.predictors import Constant, Predictor
from tidegate_sim.controller import FleetView, Order, PodView

THROUGHPUT_SECONDS = 180.0
LOAD_SECONDS = 5.0
SENSITIVITY = 0.8
"""`load_scaling_down_sensitivity`."""
LENGTHS_WINDOW_SECONDS = 60.0


def engine_rate(plant: Plant, *, isl: float, osl: float) -> float:
    """Requests a second of one engine within both targets (`find_best_engine_agg_rps`); 0 without lengths."""
    if isl <= 0 or osl <= 0:
        return 0.0
    best = 0.0
    context = isl + osl / 2
    for batch in range(1, plant.largest_batch(isl=isl, osl=osl) + 1):
        prefill = min(batch * isl / max(1.0, osl), float(plant.settings.max_num_batched_tokens))
        kv = batch * context
        itl = plant.step_seconds(decoding=batch, decode_kv=kv, prefill=prefill, isl=isl)
        ttft = plant.prefill_seconds(prefill + isl, isl=isl, decoding=batch, decode_kv=kv)
        if batch > 1 and (itl > plant.itl_seconds or ttft > plant.ttft_seconds):
            break
        best = batch / (osl * itl)
    return best


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of the last interval: requests a second and mean lengths; 0 where there was none."""

    requests_per_second: float
    isl: float
    osl: float


@dataclass(frozen=True, slots=True)
class Correction:
    """Observed over expected, of TTFT and ITL; 1 where unknown."""

    prefill: float = 1.0
    decode: float = 1.0


def replicas_by_throughput(plant: Plant, traffic: Traffic) -> int | None:
    """None where the model has no answer: nothing changes then."""
    rate = engine_rate(plant, isl=traffic.isl, osl=traffic.osl)
    return None if rate <= 0 else max(1, math.ceil(traffic.requests_per_second / rate - 1e-9))


def replicas_with_corrections(plant: Plant, traffic: Traffic, correction: Correction) -> int | None:
    """The older formulation: tokens a second of each kind over what an engine does of that kind."""
    if traffic.isl <= 0 or traffic.osl <= 0:
        return None
    rate = traffic.requests_per_second
    prefill = rate * traffic.isl * min(1.0, correction.prefill) / plant.prefill_tokens_per_second(traffic.isl)
    per_second = plant.decode_tokens_per_second(
        context=traffic.isl + traffic.osl / 2, itl_seconds=plant.itl_seconds / max(1e-6, correction.decode)
    )
    return max(1, math.ceil(prefill + rate * traffic.osl / per_second - 1e-9))


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one engine tells of its next step."""

    queued_prefill: float
    decoding: float
    decode_kv: float
    prefill_per_step: float


def replicas_by_load(plant: Plant, loads: Sequence[EngineLoad], *, isl: float) -> int:
    """One more, one fewer, or as many: `len(loads)` engines are there."""
    count = len(loads)
    if all(_ttft(plant, load, isl=isl) > plant.ttft_seconds for load in loads):
        return count + 1
    if all(_itl(plant, load, isl=isl) > plant.itl_seconds for load in loads):
        return count + 1
    if count > 1 and all(_survives(plant, load, isl=isl, share=count / (count - 1)) for load in loads):
        return count - 1
    return count


def _ttft(plant: Plant, load: EngineLoad, *, isl: float, share: float = 1.0, queued: bool = True) -> float:
    waiting = load.queued_prefill * share if queued else 0.0
    return plant.prefill_seconds(
        waiting + isl, isl=isl, decoding=load.decoding * share, decode_kv=load.decode_kv * share
    )


def _itl(plant: Plant, load: EngineLoad, *, isl: float) -> float:
    mean_context = load.decode_kv / load.decoding if load.decoding else 0.0
    return plant.step_seconds(
        decoding=load.decoding + 1, decode_kv=load.decode_kv + mean_context, prefill=load.prefill_per_step, isl=isl
    )


def _survives(plant: Plant, load: EngineLoad, *, isl: float, share: float) -> bool:
    """Whether an engine with `share` of its load keeps both targets by the margin, and its KV fits."""
    own = _ttft(plant, load, isl=isl, share=share, queued=False)
    budget = (plant.ttft_seconds - own) * SENSITIVITY
    if budget <= 0 or _ttft(plant, load, isl=isl, share=share) - own >= budget:
        return False
    kv = (load.decode_kv + load.queued_prefill) * share
    if kv >= plant.kv_tokens:
        return False
    itl = plant.step_seconds(decoding=load.decoding * share, decode_kv=kv, prefill=load.prefill_per_step, isl=isl)
    return itl < plant.itl_seconds * SENSITIVITY


@dataclass
class Dynamo:
    """The planner. `headroom` multiplies the forecast of the requests: its documents leave that to the user."""

    plant: Plant
    throughput: bool = True
    load: bool = False
    corrections: bool = False
    headroom: float = 1.0
    predictor: Callable[[], Predictor] = Constant
    name: str = "dynamo"
    _floor: int = field(default=1, init=False)
    _planned_at: float | None = field(default=None, init=False)
    _arrivals: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if not (self.throughput or self.load):
            raise ValueError("the planner scales by throughput, by load, or by both; neither is chosen")
        self._requests, self._isl, self._osl = self.predictor(), self.predictor(), self.predictor()

    @property
    def period_seconds(self) -> float:
        return LOAD_SECONDS if self.load else THROUGHPUT_SECONDS

    def decide(self, view: FleetView) -> Order:
        current = view.desired_replicas
        pods = signals.listed(view)
        settled = len(pods) == current == len(signals.ready(view))
        planned = self._plan(view, pods) if self.throughput else None
        if self.load:
            if not settled:
                return Order(current, reason="ScalingInProgress")
            loads = [load for pod in pods if (load := _load_of(pod, view, self.plant)) is not None]
            if not loads or len(loads) != current:
                return Order(current, reason="WorkerCountMismatch")
            isl = _mean_isl(pods, now=view.now, window_seconds=LENGTHS_WINDOW_SECONDS) or 1.0
            return self._order(max(self._floor, replicas_by_load(self.plant, loads, isl=isl)), "Load")
        if planned is None or not settled:
            return Order(current, reason="NotReady")
        return self._order(planned, "Throughput")

    def _order(self, replicas: int, reason: str) -> Order:
        return Order(min(max(replicas, self.plant.lowest_replicas), self.plant.highest_replicas), reason=reason)

    def _plan(self, view: FleetView, pods: Sequence[PodView]) -> int | None:
        """At the end of each interval: the throughput's answer, which is the load's floor from then on."""
        stand = view.gateway.arrivals_total
        if self._planned_at is None:
            self._planned_at, self._arrivals = view.now, stand
            return None
        elapsed = view.now - self._planned_at
        if elapsed < THROUGHPUT_SECONDS - 1e-6:
            return None
        self._requests.add(stand - self._arrivals)
        self._isl.add(_mean_isl(pods, now=view.now, window_seconds=THROUGHPUT_SECONDS) or 0.0)
        osl = signals.mean_output_tokens(pods, now=view.now, window_seconds=THROUGHPUT_SECONDS)
        self._osl.add(osl or 0.0)
        self._planned_at, self._arrivals = view.now, stand
        rate = self._requests.predict() / elapsed * self.headroom
        traffic = Traffic(max(0.0, rate), self._isl.predict(), self._osl.predict())
        if self.corrections:
            planned = replicas_with_corrections(self.plant, traffic, correct(self.plant, traffic, pods, now=view.now))
        else:
            planned = replicas_by_throughput(self.plant, traffic)
        if planned is not None:
            self._floor = planned
        return planned


def _mean_isl(pods: Sequence[PodView], *, now: float, window_seconds: float) -> float | None:
    tokens = signals.total_rate(pods, "prompt_tokens", now=now, window_seconds=window_seconds)
    requests = signals.total_rate(pods, "arrivals", now=now, window_seconds=window_seconds)
    return tokens / requests if tokens is not None and requests else None


def _load_of(pod: PodView, view: FleetView, plant: Plant) -> EngineLoad | None:
    waiting, running, context = (
        signals.newest(pod, name, now=view.now)
        for name in ("waiting_prompt_tokens", "running", "running_context_tokens")
    )
    if waiting is None or running is None or context is None:
        return None
    rate = signals.rate(pod, "prompt_tokens", now=view.now, window_seconds=LENGTHS_WINDOW_SECONDS) or 0.0
    step = plant.step_seconds(decoding=running, decode_kv=context, prefill=0, isl=0)
    prefill = min(rate * step, float(plant.settings.max_num_batched_tokens))
    return EngineLoad(waiting, running, context, prefill)


def correct(plant: Plant, traffic: Traffic, pods: Sequence[PodView], *, now: float) -> Correction:
    """Means of the interval against what the profile says of it."""
    ttft = bucket_mean(pods, "ttft", now=now, window_seconds=THROUGHPUT_SECONDS)
    itl = bucket_mean(pods, "itl", now=now, window_seconds=THROUGHPUT_SECONDS)
    running = signals.newest_total(pods, "running", now=now)
    if traffic.isl <= 0 or not pods:
        return Correction()
    batch = max(1.0, (running or 0.0) / len(pods))
    alone = plant.prefill_seconds(traffic.isl, isl=traffic.isl, decoding=0, decode_kv=0)
    step = plant.step_seconds(decoding=batch, decode_kv=batch * (traffic.isl + traffic.osl / 2), prefill=0, isl=0)
    return Correction(
        prefill=1.0 if ttft is None else ttft / alone,
        decode=1.0 if itl is None else itl / step,
    )


def bucket_mean(pods: Sequence[PodView], name: str, *, now: float, window_seconds: float) -> float | None:
    """Mean of a histogram over the window, each observation in the middle of its bucket; None without any."""
    counts: dict[float, float] = {}
    for pod in pods:
        samples = signals.within(pod, now=now, window_seconds=window_seconds)
        for before, after in pairwise((samples[0], samples[-1]) if len(samples) > 1 else ()):
            for key, value in after.values.items():
                if key[0] == name:
                    gained = value - before.values.get(key, 0.0)
                    counts[float(key[1])] = counts.get(float(key[1]), 0.0) + max(0.0, gained)
    total, below, edge, summed = counts.get(math.inf, 0.0), 0.0, 0.0, 0.0
    for bound in sorted(counts):
        middle = edge if bound == math.inf else (edge + bound) / 2
        summed += middle * max(0.0, counts[bound] - below)
        below, edge = max(below, counts[bound]), bound
    return summed / total if total > 0 else None
