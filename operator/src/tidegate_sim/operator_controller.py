"""Tidegate's own rules as a `Controller`.

The observation is put together by what `reconcile` calls too, and the memory goes through JSON as in a status.
"""

import json
from collections.abc import Mapping, Sequence

from tidegate_operator.api import Spec
from tidegate_operator.demand import WINDOW_SECONDS, PodSample, measured_of
from tidegate_operator.observation import Decision, EngineInfo
from tidegate_operator.observing import Facts, Workload, can_be_asked, observe
from tidegate_operator.policy import decide
from tidegate_operator.zero import ScaleToZero
from tidegate_sim.controller import FleetView, Order, PodView

SCRAPES_PER_SYNC = 4
SHORTEST_SCRAPE_SECONDS = 1.0


def scrape_seconds(spec: Spec) -> float:
    """How often the operator's own scraper looks at a pod of this object."""
    return max(SHORTEST_SCRAPE_SECONDS, spec.autoscaling.sync_period_seconds / SCRAPES_PER_SYNC)


class OperatorController:
    """Carries the decision's memory as the object's status would; `last` is what was decided last."""

    def __init__(
        self, spec: Spec, engine: EngineInfo, *, name: str = "tidegate", zero: ScaleToZero | None = None
    ) -> None:
        self._spec = spec
        self._engine = engine
        self._name = name
        self._zero = zero
        self._memory: Mapping[str, object] = {}
        self._kept_seconds = WINDOW_SECONDS + scrape_seconds(spec)
        self.last: Decision | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def period_seconds(self) -> float:
        """The operator's own choice, which may change with each decision."""
        return self._spec.autoscaling.sync_period_seconds if self.last is None else self.last.recheck_after_seconds

    def facts(self, view: FleetView) -> Facts:
        """What the operator would have found."""
        replicas = tuple(pod.replica for pod in view.pods)
        return Facts(
            now=view.now,
            replicas=replicas,
            measured=measured_of({pod.replica.name: self._kept(pod) for pod in view.pods if can_be_asked(pod.replica)}),
            info=self._engine if any(map(can_be_asked, replicas)) else None,
            workload=Workload(current_replicas=view.desired_replicas),
            held_requests=view.gateway.held,
        )

    def decide(self, view: FleetView) -> Order:
        observation = observe(self._spec, self.facts(view))
        memory = json.loads(json.dumps(dict(self._memory)))
        decision = self.last = decide(self._spec, observation, memory, zero=self._zero)
        self._memory = decision.memory
        return Order(
            replicas=decision.replicas,
            settings=decision.settings,
            settings_generation=decision.settings_generation,
            reason=decision.reason,
            message=decision.message,
        )

    def _kept(self, pod: PodView) -> Sequence[PodSample]:
        """What the scraper would still have."""
        newest = pod.samples[-1].at if pod.samples else 0.0
        return tuple(sample for sample in pod.samples if sample.at >= newest - self._kept_seconds)
