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
    kind: str = ""
    """Which of `FleetView.kinds` it is of."""


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
class KindView:
    """What was ordered last for one kind of pod."""

    name: str
    desired_replicas: int
    settings: BatchSettings
    settings_generation: int


@dataclass(frozen=True, slots=True)
class FleetView:
    """Everything that a controller may know at `now`."""

    now: float
    """Unix seconds of the virtual clock."""
    desired_replicas: int
    """What was ordered last, of all kinds together."""
    pods: tuple[PodView, ...]
    gateway: GatewayView
    settings: BatchSettings
    """What was ordered last, for the first kind."""
    settings_generation: int = 1
    kinds: tuple[KindView, ...] = ()
    """By kind, in the fleet's order."""

    def count(self, *phases: ReplicaPhase) -> int:
        return sum(pod.replica.phase in phases for pod in self.pods)


@dataclass(frozen=True, slots=True)
class KindOrder:
    """What shall be of one kind of pod. None leaves settings and weight as they are."""

    name: str
    replicas: int
    settings: BatchSettings | None = None
    settings_generation: int | None = None
    weight: float | None = None
    """Requests in flight that one of its pods shall have, against those of another kind; 1 at first."""


@dataclass(frozen=True, slots=True)
class Order:
    """A controller's answer, about the first kind of pod unless it names `kinds`. `settings` None leaves them."""

    replicas: int
    settings: BatchSettings | None = None
    settings_generation: int | None = None
    reason: str = ""
    message: str = ""
    kinds: tuple[KindOrder, ...] = ()
    """In place of the fields above; kinds that are not named stay as they are."""

    def by_kind(self, first: str) -> tuple[KindOrder, ...]:
        """For each kind that it is about; `first` is the name of the fleet's first."""
        return self.kinds or (KindOrder(first, self.replicas, self.settings, self.settings_generation),)


class Controller(Protocol):
    """A scaling policy with its memory. Deterministic: the same views give the same orders."""

    @property
    def name(self) -> str: ...

    @property
    def period_seconds(self) -> float:
        """Time between two ticks."""
        ...

    def decide(self, view: FleetView) -> Order: ...
