"""A fleet in virtual time: pods from creation to termination, the gateway in front of them, scrapes, and what fails.

Deterministic: chance comes from the seed alone. Owns the agenda of what happens when; `simulation` runs it, lets
arrivals in and asks the controller. What becomes of requests goes into `Records`.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

from tidegate_engine.request import Request, SamplingParams
from tidegate_engine.scheduler import RequestRefused
from tidegate_engine.settings import BatchSettings
from tidegate_operator.demand import PodSample
from tidegate_operator.observation import Replica as PodFacts
from tidegate_operator.observation import ReplicaPhase
from tidegate_operator.pods import deletion_costs
from tidegate_sim.arrivals import Arrival
from tidegate_sim.controller import FleetView, GatewayView, KindOrder, KindView, PodView
from tidegate_sim.records import Outcome, Records, Use
from tidegate_sim.replica import NEVER, Replica
from tidegate_sim.specification import (
    Balancing,
    CrashLoop,
    FleetSpec,
    MetricsOutage,
    OutageKind,
    PodCrash,
    PodKind,
    Quota,
)

KEPT_SAMPLES_SECONDS = 600.0
BACK_OFF_SECONDS = (10.0, 300.0)
"""The kubelet's first wait before a crashed container is started again, which doubles, and the longest."""
_PARAMS = SamplingParams()

Happening = Callable[[float, Any], None]


class Agenda:
    """What is to happen, in order of time; of what is due at once, the first put first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Happening, Any]] = []
        self._count = 0

    def put(self, at: float, happening: Happening, argument: Any = None) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, happening, argument))

    @property
    def next_at(self) -> float:
        return self._heap[0][0] if self._heap else NEVER

    def run_next(self) -> float:
        """Let the next thing happen; returns its time."""
        at, _, happening, argument = heapq.heappop(self._heap)
        happening(at, argument)
        return at


class GpuPool:
    """GPUs of the nodes, which one or more fleets take; those of a product that it does not name have no end."""

    def __init__(self, gpus: Mapping[str, int] | None = None) -> None:
        self._free = dict(gpus or {})
        self._fleets: list[Fleet] = []

    def join(self, fleet: "Fleet") -> None:
        self._fleets.append(fleet)

    def take(self, gpu: str, count: int) -> bool:
        """Whether there were so many."""
        free = self._free.get(gpu)
        if free is None:
            return True
        if free < count:
            return False
        self._free[gpu] = free - count
        return True

    def give_back(self, gpu: str, count: int) -> None:
        if gpu in self._free:
            self._free[gpu] += count

    def waiting(self) -> list["Pod"]:
        """Pods that no node has taken, of all fleets: those created first come first."""
        found = [pod for fleet in self._fleets for pod in fleet.pods if pod.phase is ReplicaPhase.UNSCHEDULABLE]
        return sorted(found, key=lambda pod: pod.created_at)


class Kind:
    """What was ordered for one kind of pod."""

    def __init__(self, spec: PodKind) -> None:
        self.spec = spec
        self.name = spec.name
        self.desired = spec.initial_replicas
        self.settings = spec.settings
        self.generation = 1
        self.weight = 1.0

    def view(self) -> KindView:
        return KindView(self.name, self.desired, self.settings, self.generation)


class Pod:
    """One pod and, while its container serves or drains, the engine in it."""

    def __init__(self, fleet: "Fleet", number: int, now: float, kind: Kind) -> None:
        self.fleet = fleet
        self.kind = kind
        self.number = number
        self.name = f"pod-{number}"
        self.phase = ReplicaPhase.STARTING
        self.created_at = now
        self.bound_at: float | None = None
        """When a node took it: from then on it holds GPUs."""
        self.ready_at: float | None = None
        self.ended_at: float | None = None
        self.restarts = 0
        self.failed_starts = 0
        self.reason = ""
        self.replica: Replica | None = None
        self.planned_wake = NEVER
        self.in_flight = 0
        self.samples: deque[PodSample] = deque()
        self.acknowledged: tuple[int, BatchSettings] | None = None

    # what the replica tells

    def first_token(self, request: Request) -> None:
        records = self.fleet.records
        assert request.first_token_at is not None
        records.first_token(int(request.id), request.first_token_at, scheduled_at=request.scheduled_at)

    def ended(self, request: Request) -> None:
        self.in_flight -= 1
        assert request.finished_at is not None
        self.fleet.count_in_flight(-1, request.finished_at)
        self.fleet.records.finished(int(request.id), request)
        if self.phase is ReplicaPhase.DRAINING and not self.in_flight:
            self.fleet.terminate(self, request.finished_at)


class Fleet:
    """Invariant: every request that came is held, in one pod, or has an outcome."""

    def __init__(
        self,
        spec: FleetSpec,
        records: Records,
        *,
        seed: int,
        leaps: bool = True,
        agenda: Agenda | None = None,
        pool: GpuPool | None = None,
        number: int = 0,
    ) -> None:
        """`agenda` and `pool` are those of other fleets on the same clock and nodes; each has its own `number`."""
        self.spec = spec
        self.records = records
        self.agenda = agenda or Agenda()
        self.kinds = tuple(map(Kind, spec.kinds))
        """In the order of the spec's."""
        self.pods: list[Pod] = []
        """All that stand, in order of creation."""
        self.gone: list[Pod] = []
        self.preemptions = 0
        """Of pods that are gone."""
        self.held: deque[Request] = deque()
        self.arrivals = 0
        self.in_flight = 0
        self._in_flight_integral = 0.0
        self._in_flight_since = 0.0
        self._leaps = leaps
        self._random = Random(f"{seed} fleet {number}" if number else f"{seed} fleet")
        self._pool = pool or GpuPool()
        self._pool.join(self)
        self._is_weighted = False
        self._ready: list[Pod] = []
        self._turn = 0
        self._created = 0
        self._quota = math.inf
        self._outages = [fault for fault in spec.faults if isinstance(fault, MetricsOutage)]
        self._loops = [fault for fault in spec.faults if isinstance(fault, CrashLoop)]
        for fault in spec.faults:
            if isinstance(fault, PodCrash):
                self.agenda.put(fault.at_seconds, self._crash_some, fault)
            elif isinstance(fault, Quota):
                self.agenda.put(fault.at_seconds, self._set_quota, fault.pods)
        for kind in self.kinds:
            for _ in range(kind.desired):
                pod = self._create(-kind.spec.start.mean_seconds, kind)
                if not self._take_gpus(pod):
                    raise ValueError(f"there are too few {kind.spec.profile.gpu} for the pods that are there at first")
                pod.bound_at = pod.ready_at = 0.0
                self._serve(pod)
        self.agenda.put(spec.scrape_seconds, self._scrape)

    # --- the gateway

    def arrive(self, arrival: Arrival) -> None:
        now = arrival.at_seconds
        index = self.records.arrived(arrival)
        self.arrivals += 1
        self.count_in_flight(1, now)
        request = Request(
            str(index),
            arrival.isl,
            arrival.osl,
            now,
            params=_PARAMS,
            block_hashes=self._block_hashes(arrival, index),
        )
        if self.spec.gateway.timeout_seconds is not None:
            self.agenda.put(now + self.spec.gateway.timeout_seconds, self._give_up, index)
        self._send(request, now)

    def _block_hashes(self, arrival: Arrival, index: int) -> list[bytes]:
        """Those that others may share, and the request's own, which it finds again after a preemption."""
        hashes = list(arrival.block_hashes)
        if self.spec.own_blocks:
            whole = (arrival.isl + arrival.osl) // self.spec.profile.block_tokens
            hashes += [b"%d:%d" % (index, place) for place in range(len(hashes), whole)]
        return hashes

    def count_in_flight(self, change: int, now: float) -> None:
        self._in_flight_integral += self.in_flight * (now - self._in_flight_since)
        self._in_flight_since = now
        self.in_flight += change

    def _send(self, request: Request, now: float) -> None:
        ready = self._ready
        if not ready:
            self.held.append(request)
            return
        if self._is_weighted:
            pod = self._least_loaded()
        elif self.spec.gateway.balancing is Balancing.LEAST_IN_FLIGHT:
            # From another pod on each time, so that equals take turns.
            self._turn += 1
            turn, count = self._turn, len(ready)
            pod = ready[turn % count]
            least = pod.in_flight
            for offset in range(1, count):
                other = ready[(turn + offset) % count]
                if other.in_flight < least:
                    pod, least = other, other.in_flight
        else:
            self._turn += 1
            pod = ready[self._turn % len(ready)]
        replica = pod.replica
        assert replica is not None
        try:
            replica.add(request, now)
        except RequestRefused:
            self._end(int(request.id), Outcome.REFUSED, now)
        else:
            pod.in_flight += 1
        self._plan_wake(pod)

    def _least_loaded(self) -> Pod:
        """With one more request, for its weight: as Envoy's LEAST_REQUEST with weighted hosts. Equals take turns."""
        ready = self._ready
        self._turn += 1
        turn = self._turn % len(ready)
        return min((*ready[turn:], *ready[:turn]), key=lambda pod: (pod.in_flight + 1) / pod.kind.weight)

    def _end(self, index: int, outcome: Outcome, now: float) -> None:
        self.count_in_flight(-1, now)
        self.records.lost(index, outcome, now)

    def _give_up(self, now: float, index: int) -> None:
        """The client waits no longer, if it has nothing yet."""
        if self.records.is_settled(index) or self.records.has_begun(index):
            return
        name = str(index)
        for request in self.held:
            if request.id == name:
                self.held.remove(request)
                self._end(index, Outcome.TIMED_OUT, now)
                return
        for pod in self.pods:
            request_or_none = None if pod.replica is None else pod.replica.scheduler.get(name)
            if request_or_none is not None and pod.replica is not None:
                pod.replica.abort(request_or_none, now)
                self._plan_wake(pod)
                pod.in_flight -= 1
                self._end(index, Outcome.TIMED_OUT, now)
                if pod.phase is ReplicaPhase.DRAINING and not pod.in_flight:
                    self.terminate(pod, now)
                return

    def _release_held(self, now: float) -> None:
        held, self.held = self.held, deque()
        for request in held:
            request.arrival = now
            self._send(request, now)

    # --- engines

    def _plan_wake(self, pod: Pod) -> None:
        assert pod.replica is not None
        at = pod.replica.wake_at
        if at != NEVER and at != pod.planned_wake:
            pod.planned_wake = at
            self.agenda.put(at, self._wake, pod)

    def _wake(self, now: float, pod: Pod) -> None:
        replica = pod.replica
        if replica is None or replica.wake_at != now:
            return
        replica.wake()
        if pod.replica is not None:  # else its last request ended, and it with it
            self._plan_wake(pod)

    # --- pods' lives

    def order(self, kinds: Iterable[KindOrder], now: float) -> None:
        """Bring each kind that is named to what is ordered. Raises KeyError for one that there is not."""
        for order in kinds:
            kind = self.kind(order.name)
            self._scale(kind, order.replicas, now)
            if order.settings is not None:
                self._apply(kind, order.settings, order.settings_generation, now)
            if order.weight is not None:
                kind.weight = order.weight
        differs = len({kind.weight for kind in self.kinds}) > 1
        self._is_weighted = differs and self.spec.gateway.balancing is Balancing.LEAST_IN_FLIGHT

    def kind(self, name: str) -> Kind:
        for kind in self.kinds:
            if kind.name == name:
                return kind
        raise KeyError(name)

    @property
    def desired(self) -> int:
        """Pods that were ordered, of all kinds."""
        return sum(kind.desired for kind in self.kinds)

    def _scale(self, kind: Kind, replicas: int, now: float) -> None:
        """Create pods, or drain the least loaded, until so many of a kind stand that do not drain."""
        kind.desired = replicas
        standing = [pod for pod in self.pods if pod.phase is not ReplicaPhase.DRAINING and pod.kind is kind]
        for _ in range(len(standing), replicas):
            self.bind(self._create(now, kind), now)
        if len(standing) > replicas:
            costs = deletion_costs(self._facts(pod) for pod in standing)
            standing.sort(key=lambda pod: (*_removal_order(pod), costs[pod.name], -pod.number))
            for pod in standing[: len(standing) - replicas]:
                self._drain(pod, now)

    def _apply(self, kind: Kind, settings: BatchSettings, generation: int | None, now: float) -> None:
        """Bring settings to every ready pod of a kind; new ones start with them."""
        changed = settings != kind.settings
        kind.settings = settings
        kind.generation = generation if generation is not None else kind.generation + changed
        for pod in self._ready:
            if pod.kind is kind and pod.acknowledged != (kind.generation, settings) and pod.replica is not None:
                if pod.acknowledged is None or pod.acknowledged[1] != settings:
                    pod.replica.apply(settings, now)
                    self._plan_wake(pod)
                pod.acknowledged = (kind.generation, settings)

    def _create(self, now: float, kind: Kind) -> Pod:
        self._created += 1
        pod = Pod(self, self._created, now, kind)
        self.pods.append(pod)
        return pod

    def _take_gpus(self, pod: Pod) -> bool:
        profile = pod.kind.spec.profile
        return self._pool.take(profile.gpu, profile.gpus)

    def bind(self, pod: Pod, now: float) -> None:
        """A node takes the pod, where the quota allows it and there are GPUs."""
        if sum(other.bound_at is not None for other in self.pods) >= self._quota or not self._take_gpus(pod):
            pod.phase, pod.reason = ReplicaPhase.UNSCHEDULABLE, "Unschedulable"
            return
        pod.phase, pod.reason = ReplicaPhase.STARTING, ""
        pod.bound_at = now
        start = pod.kind.spec.start
        self.agenda.put(now + self._vary(start.scheduling_seconds, start.jitter), self._pull, pod)

    def _vary(self, seconds: float, jitter: float) -> float:
        return seconds * self._random.uniform(1 - jitter, 1 + jitter)

    def _pull(self, now: float, pod: Pod) -> None:
        if pod.phase is ReplicaPhase.STARTING:
            pod.phase = ReplicaPhase.PULLING
            start = pod.kind.spec.start
            self.agenda.put(now + self._vary(start.pulling_seconds, start.jitter), self._load, pod)

    def _load(self, now: float, pod: Pod) -> None:
        if pod.phase in (ReplicaPhase.PULLING, ReplicaPhase.CRASH_LOOPING):
            self._start_loading(pod, now)

    def _start_loading(self, pod: Pod, now: float) -> None:
        pod.phase, pod.reason = ReplicaPhase.LOADING, ""
        start = pod.kind.spec.start
        self.agenda.put(now + self._vary(start.loading_seconds, start.jitter), self._become_ready, (pod, pod.restarts))

    def _become_ready(self, now: float, start: tuple[Pod, int]) -> None:
        pod, restarts = start
        if pod.phase is not ReplicaPhase.LOADING or pod.restarts != restarts:
            return
        if any(loop.at_seconds <= now < loop.until_seconds for loop in self._loops):
            wait = min(BACK_OFF_SECONDS[0] * 2**pod.failed_starts, BACK_OFF_SECONDS[1])
            pod.restarts += 1
            pod.failed_starts += 1
            pod.phase, pod.reason = ReplicaPhase.CRASH_LOOPING, "Error"
            self.agenda.put(now + wait, self._load, pod)
            return
        pod.ready_at, pod.failed_starts = now, 0
        self._serve(pod)
        self._release_held(now)

    def _serve(self, pod: Pod) -> None:
        spec, kind = self.spec, pod.kind
        pod.phase = ReplicaPhase.READY
        pod.replica = Replica(
            kind.spec.profile,
            kind.settings,
            pod,
            max_model_len=spec.max_model_len,
            patterns=spec.patterns,
            leaps=self._leaps,
        )
        pod.planned_wake = NEVER
        pod.samples.clear()
        pod.acknowledged = (kind.generation, kind.settings)
        self._ready.append(pod)

    def _drain(self, pod: Pod, now: float) -> None:
        """No new requests; it ends with the last one that it has."""
        if pod.phase is ReplicaPhase.READY:
            self._ready.remove(pod)
        pod.phase, pod.reason = ReplicaPhase.DRAINING, "Terminating"
        if pod.replica is None or not pod.in_flight:
            self.terminate(pod, now)
        else:
            self.agenda.put(now + self.spec.drain_timeout_seconds, self._kill, pod)

    def _kill(self, now: float, pod: Pod) -> None:
        if pod.ended_at is None:
            self._lose_requests(pod, now, retries=False)
            self.terminate(pod, now)

    def terminate(self, pod: Pod, now: float) -> None:
        if pod.replica is not None:
            self.preemptions += pod.replica.preemptions
        pod.replica = None
        pod.ended_at = now
        self.pods.remove(pod)
        self.gone.append(pod)
        if pod.bound_at is not None:
            self._pool.give_back(pod.kind.spec.profile.gpu, pod.kind.spec.profile.gpus)
        self._bind_waiting(now)

    def _bind_waiting(self, now: float) -> None:
        for pod in self._pool.waiting():
            pod.fleet.bind(pod, now)

    # --- what goes wrong

    def _set_quota(self, now: float, pods: int) -> None:
        self._quota = pods
        self._bind_waiting(now)

    def _crash_some(self, now: float, fault: PodCrash) -> None:
        count = math.ceil(fault.share * len(self._ready)) if fault.share > 0 else fault.pods
        for pod in self._random.sample(self._ready, min(count, len(self._ready))):
            self._ready.remove(pod)
            pod.restarts += 1
            pod.ready_at = None
            pod.samples.clear()
            self._start_loading(pod, now)
            pod.reason = "Error"
            self._lose_requests(pod, now, retries=self.spec.gateway.retries)

    def _lose_requests(self, pod: Pod, now: float, *, retries: bool) -> None:
        """Broken streams fail; what had no token yet may go to another pod."""
        replica, pod.replica = pod.replica, None
        if replica is None:
            return
        self.preemptions += replica.preemptions
        pod.in_flight = 0
        for request in replica.requests():
            if retries and request.first_token_at is None:
                again = Request(
                    request.id,
                    request.prompt_tokens,
                    request.max_tokens,
                    now,
                    params=_PARAMS,
                    block_hashes=request.block_hashes,
                )
                self._send(again, now)
            else:
                self._end(int(request.id), Outcome.FAILED, now)

    # --- what can be seen

    def _scrape(self, now: float, _: object) -> None:
        kinds = {outage.kind for outage in self._outages if outage.at_seconds <= now < outage.until_seconds}
        self.agenda.put(now + self.spec.scrape_seconds, self._scrape)
        if OutageKind.NO_SCRAPE in kinds:
            return
        at = now + self.spec.epoch_seconds
        for pod in self._ready:
            if OutageKind.HALF in kinds and pod.number % 2:
                continue
            assert pod.replica is not None
            if OutageKind.STALE in kinds:
                if not pod.samples:
                    continue
                values = pod.samples[-1].values
            else:
                values = pod.replica.look(now)
            pod.samples.append(PodSample(at, values))
            while pod.samples[0].at < at - KEPT_SAMPLES_SECONDS:
                pod.samples.popleft()

    def view(self, now: float) -> FleetView:
        self.count_in_flight(0, now)
        epoch = self.spec.epoch_seconds
        seen_until = now + epoch - self.spec.scrape_delay_seconds
        return FleetView(
            now=now + epoch,
            desired_replicas=self.desired,
            pods=tuple(
                PodView(
                    self._facts(pod),
                    tuple(sample for sample in pod.samples if sample.at <= seen_until),
                    pod.kind.name,
                )
                for pod in self.pods
            ),
            gateway=GatewayView(
                arrivals_total=self.arrivals,
                in_flight=self.in_flight,
                in_flight_seconds_total=self._in_flight_integral,
                held=len(self.held),
            ),
            settings=self.kinds[0].settings,
            settings_generation=self.kinds[0].generation,
            kinds=tuple(kind.view() for kind in self.kinds),
        )

    def replicas(self) -> Iterable[Replica]:
        """Engines that serve or drain."""
        return (pod.replica for pod in self.pods if pod.replica is not None)

    def count(self, *phases: ReplicaPhase) -> int:
        return sum(pod.phase in phases for pod in self.pods)

    def uses(self, *, until: float) -> dict[str, Use]:
        """Of each kind's pods on nodes, from the moment that a node took them until they were gone or `until`."""
        return {kind.name: self._use(kind, until=until) for kind in self.kinds}

    def _use(self, kind: Kind, *, until: float) -> Use:
        seconds, created = 0.0, 0
        for pod in (*self.pods, *self.gone):
            if pod.kind is not kind:
                continue
            created += 1
            if pod.bound_at is not None and pod.bound_at < until:
                end = until if pod.ended_at is None else min(until, pod.ended_at)
                seconds += end - pod.bound_at
        return Use(seconds * kind.spec.profile.gpus, created, kind.spec.gpu_price_per_hour)

    def _facts(self, pod: Pod) -> PodFacts:
        epoch = self.spec.epoch_seconds
        newest = pod.samples[-1].values if pod.samples else {}
        generation, settings = pod.acknowledged or (None, None)
        is_ready = pod.phase is ReplicaPhase.READY
        return PodFacts(
            name=pod.name,
            uid=str(pod.number),
            ip="10.0.0.1" if pod.bound_at is not None else None,
            phase=pod.phase,
            created_at=pod.created_at + epoch,
            ready_at=None if pod.ready_at is None or not is_ready else pod.ready_at + epoch,
            restarts=pod.restarts,
            reason=pod.reason,
            settings_generation=generation if is_ready else None,
            settings=settings if is_ready else None,
            running=newest.get(("running",)),
            waiting=newest.get(("waiting",)),
            running_context_tokens=newest.get(("running_context_tokens",)),
        )


def _removal_order(pod: Pod) -> tuple[bool, bool]:
    """As Kubernetes: those without a node first, then those that are not ready."""
    return pod.bound_at is not None, pod.phase is ReplicaPhase.READY
