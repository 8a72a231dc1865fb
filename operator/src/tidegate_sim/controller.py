"""The port between a simulated fleet and whatever scales it: Tidegate's own rules and every baseline alike.

Pure data and one protocol. The fleet makes a `FleetView` at each tick, a `Controller` answers with an `Order`. A view
holds only what a real cluster would tell at that moment: gauges and counters as of the last scrape, pods as listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tidegate_engine.settings import BatchSettings
from tidegate_operator.demand import PodSample
from tidegate_operator.observation import Replica, ReplicaPhase

BUSY_SECONDS = ("busy_seconds",)
"""Key in a sample's values: seconds in which any request ran, a counter. Its rate is what GPU duty cycle shows."""
WORK_SECONDS = ("work_seconds",)
"""Key in a sample's values: seconds of work done at full batches, a counter. Its rate is the true utilisation."""


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod as the API server lists it, and what was scraped of it."""

    replica: Replica
    samples: Sequence[PodSample] = ()
    """Oldest first, of the last ten minutes at least, with the engine's own counters and gauges (`demand.TERMS`)."""


@dataclass(frozen=True, slots=True)
class GatewayView:
    """What the proxy in front of the pods counts itself, exact at the moment of the view."""

    arrivals_total: float
    in_flight: float
    """Arrived and not finished: held, queued in a pod, or running."""
    in_flight_seconds_total: float
    """Integral of `in_flight` over time: the difference of two, over the time between them, is the mean."""
    held: float = 0.0
    """Requests that no pod has taken, since none is ready."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """Everything that a controller may know at `now`."""

    now: float
    """Unix seconds of the virtual clock."""
    desired_replicas: int
    """What was ordered last."""
    pods: tuple[PodView, ...]
    gateway: GatewayView
    settings: BatchSettings
    """What was ordered last."""
    settings_generation: int = 1

    def count(self, *phases: ReplicaPhase) -> int:
        return sum(pod.replica.phase in phases for pod in self.pods)


@dataclass(frozen=True, slots=True)
class Order:
    """A controller's answer. `settings` None leaves them as they are."""

    replicas: int
    settings: BatchSettings | None = None
    settings_generation: int | None = None
    reason: str = ""
    message: str = ""
    variant_replicas: tuple[tuple[str, int], ...] = ()
    """Replicas by accelerator variant where the workload has several; empty when there is one kind of pod."""


class Controller(Protocol):
    """A scaling policy with its memory. Deterministic: the same views give the same orders."""

    @property
    def name(self) -> str: ...

    @property
    def period_seconds(self) -> float:
        """Time between two ticks."""
        ...

    def decide(self, view: FleetView) -> Order: ...
