"""Tidegate's own rules as a `Controller`, for one kind of pod, for several, and for one of several objects.

The observation is put together by what `reconcile` calls too, and the memory goes through JSON as in a status.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from tidegate_operator.api import Spec
from tidegate_operator.demand import WINDOW_SECONDS, PodSample, measured_of
from tidegate_operator.kinds import KindsDecision, KindSeen, decide_kinds
from tidegate_operator.observation import Decision, EngineInfo
from tidegate_operator.observing import Facts, Workload, can_be_asked, observe
from tidegate_operator.policy import decide
from tidegate_operator.shares import Claim, asked, granted_gpus
from tidegate_operator.zero import ScaleToZero
from tidegate_sim.controller import FleetView, KindOrder, Order, PodView

Last = TypeVar("Last", Decision, KindsDecision)
SCRAPES_PER_SYNC = 4
SHORTEST_SCRAPE_SECONDS = 1.0


def scrape_seconds(spec: Spec) -> float:
    """How often the operator's own scraper looks at a pod of this object."""
    return max(SHORTEST_SCRAPE_SECONDS, spec.autoscaling.sync_period_seconds / SCRAPES_PER_SYNC)


def facts_of(spec: Spec, pods: Sequence[PodView], *, now: float, desired: int, info: EngineInfo) -> Facts:
    """What the operator would have found of these pods."""
    kept_seconds = WINDOW_SECONDS + scrape_seconds(spec)
    replicas = tuple(pod.replica for pod in pods)
    return Facts(
        now=now,
        replicas=replicas,
        measured=measured_of({pod.replica.name: _kept(pod, kept_seconds) for pod in pods if can_be_asked(pod.replica)}),
        info=info if any(map(can_be_asked, replicas)) else None,
        workload=Workload(current_replicas=desired),
    )


def _kept(pod: PodView, kept_seconds: float) -> Sequence[PodSample]:
    """What the scraper would still have."""
    newest = pod.samples[-1].at if pod.samples else 0.0
    return tuple(sample for sample in pod.samples if sample.at >= newest - kept_seconds)


def _through_json(memory: Mapping[str, object]) -> Mapping[str, object]:
    return dict(json.loads(json.dumps(dict(memory))))


class Budget:
    """GPUs that several objects share: what each claims, as the operator looks it up in their statuses."""

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus
        self._claims: dict[str, Claim] = {}

    def claim(self, name: str, spec: Spec, *, held: int, wanted: int | None) -> None:
        self._claims[name] = Claim(name, spec, held, wanted)

    def granted(self, name: str, now: float) -> int | None:
        return granted_gpus(self._claims.values(), gpus=self._gpus, now=now).get(name)


class _Rechecking(Generic[Last]):
    """What controllers share that decide as the operator does; `last` is what was decided last."""

    def __init__(self, spec: Spec, name: str) -> None:
        self._spec = spec
        self._name = name
        self._memory: Mapping[str, object] = {}
        self.last: Last | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def period_seconds(self) -> float:
        """The operator's own choice, which may change with each decision."""
        return self._spec.autoscaling.sync_period_seconds if self.last is None else self.last.recheck_after_seconds


class OperatorController(_Rechecking[Decision]):
    """Carries the decision's memory as the object's status would; `last` is what was decided last.

    `budget` is shared with the controllers of other objects, whose names are others.
    """

    def __init__(
        self,
        spec: Spec,
        engine: EngineInfo,
        *,
        name: str = "tidegate",
        zero: ScaleToZero | None = None,
        budget: Budget | None = None,
    ) -> None:
        super().__init__(spec, name)
        self._engine = engine
        self._zero = zero
        self._budget = budget

    def facts(self, view: FleetView) -> Facts:
        """What the operator would have found."""
        granted = None if self._budget is None else self._budget.granted(self._name, view.now)
        facts = facts_of(self._spec, view.pods, now=view.now, desired=view.desired_replicas, info=self._engine)
        return replace(facts, held_requests=view.gateway.held, granted_gpus=granted)

    def decide(self, view: FleetView) -> Order:
        self._claim(view.desired_replicas, view.now)
        observation = observe(self._spec, self.facts(view))
        decision = self.last = decide(self._spec, observation, _through_json(self._memory), zero=self._zero)
        self._memory = decision.memory
        self._claim(decision.replicas, view.now)
        return Order(
            replicas=decision.replicas,
            settings=decision.settings,
            settings_generation=decision.settings_generation,
            reason=decision.reason,
            message=decision.message,
        )

    def _claim(self, held: int, now: float) -> None:
        if self._budget is not None:
            wanted = None if self.last is None else asked(self._spec, self.last.wanted_replicas, self._memory, now=now)
            self._budget.claim(self._name, self._spec, held=held, wanted=wanted)


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A kind of pod as its controller knows it."""

    engine: EngineInfo
    price_per_hour: float
    """Of a replica."""
    most_replicas: int = 1000


class KindsController(_Rechecking[KindsDecision]):
    """Several kinds of pod behind one gateway; `last` is what was decided last."""

    def __init__(self, spec: Spec, kinds: Mapping[str, Accelerator], *, name: str = "tidegate-kinds") -> None:
        super().__init__(spec, name)
        self._kinds = kinds

    def decide(self, view: FleetView) -> Order:
        desired = {kind.name: kind.desired_replicas for kind in view.kinds}
        seen = []
        for name, kind in self._kinds.items():
            pods = [pod for pod in view.pods if pod.kind == name]
            facts = facts_of(self._spec, pods, now=view.now, desired=desired[name], info=kind.engine)
            # What a pod of this kind can do is known even where none runs.
            observation = observe(self._spec, replace(facts, info=kind.engine))
            seen.append(KindSeen(name, kind.price_per_hour, observation, high=kind.most_replicas))
        first = seen[0].observation.engine
        assert first is not None
        all_pods = facts_of(self._spec, view.pods, now=view.now, desired=view.desired_replicas, info=first)
        together = observe(self._spec, replace(all_pods, info=first))
        decided = self.last = decide_kinds(self._spec, seen, together=together, memory=_through_json(self._memory))
        self._memory = decided.memory
        orders = tuple(
            KindOrder(name, each.replicas, each.settings, each.settings_generation, decided.weights[name])
            for name, each in decided.decisions.items()
        )
        return Order(
            sum(order.replicas for order in orders), reason=decided.reason, message=decided.message, kinds=orders
        )
