"""What is simulated: pods and how they start, the gateway, what goes wrong and when, and what counts as good.

Pure data with defaults. Times are seconds from the start of the workload unless a name says otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tidegate_engine.settings import DEFAULT_PATTERNS, DEFAULT_SETTINGS, BatchSettings, Pattern
from tidegate_engine.steptime import Profile

EPOCH_SECONDS = 1_704_067_200.0
"""Unix time at which workloads begin unless told otherwise: a Monday, midnight UTC."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """From a pod's creation to Ready, by phase; each varies evenly by `jitter` either way."""

    scheduling_seconds: float = 1.0
    pulling_seconds: float = 19.0
    loading_seconds: float = 40.0
    jitter: float = 0.2

    @property
    def mean_seconds(self) -> float:
        return self.scheduling_seconds + self.pulling_seconds + self.loading_seconds


def start_times(seconds: float, *, jitter: float = 0.2) -> StartTimes:
    """A start of so many seconds in usual proportions: a third to pull, most of the rest to load."""
    scheduling = min(1.0, 0.05 * seconds)
    pulling = 0.32 * seconds
    return StartTimes(scheduling, pulling, seconds - scheduling - pulling, jitter)


class Balancing(StrEnum):
    """How the gateway chooses a ready pod."""

    LEAST_IN_FLIGHT = "least-in-flight"
    """What a proxy that sees every request does (Envoy's LEAST_REQUEST over all hosts, an inference gateway)."""
    ROUND_ROBIN = "round-robin"
    """What a Service of Kubernetes comes near to, when every request has a connection of its own."""


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """The proxy in front of the pods. It holds requests while no pod is ready."""

    balancing: Balancing = Balancing.LEAST_IN_FLIGHT
    timeout_seconds: float | None = None
    """A request that has no first token after so long is given up by its client; None = clients wait for ever."""
    retries: bool = True
    """Whether a request whose pod crashed before its first token is sent to another one. Broken streams always fail."""


class OutageKind(StrEnum):
    NO_SCRAPE = "no-scrape"
    """Nothing is scraped."""
    STALE = "stale"
    """Every scrape brings what the last good one brought, with a new time."""
    HALF = "half"
    """Every other pod is not scraped."""


@dataclass(frozen=True, slots=True)
class MetricsOutage:
    at_seconds: float
    until_seconds: float
    kind: OutageKind = OutageKind.NO_SCRAPE


@dataclass(frozen=True, slots=True)
class PodCrash:
    """Ready pods whose container dies: so many of them, or a share; they load again in place."""

    at_seconds: float
    pods: int = 1
    share: float = 0.0
    """Of the ready pods, rounded up; counts when above 0."""


@dataclass(frozen=True, slots=True)
class CrashLoop:
    """Containers that would become ready in this time die instead and are started again, ever later."""

    at_seconds: float
    until_seconds: float


@dataclass(frozen=True, slots=True)
class Quota:
    """From then on nodes take at most so many pods; those that have one keep it."""

    at_seconds: float
    pods: int


Fault = MetricsOutage | PodCrash | CrashLoop | Quota


@dataclass(frozen=True, slots=True)
class PodKind:
    """Pods that are alike: what they run on, what they begin with, and what they cost."""

    name: str
    profile: Profile
    initial_replicas: int = 0
    """Ready when the workload begins."""
    settings: BatchSettings = DEFAULT_SETTINGS
    start: StartTimes = StartTimes()
    gpu_price_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """One workload's pods: all alike, but for those of `other_kinds`."""

    profile: Profile
    initial_replicas: int = 1
    """Ready when the workload begins."""
    settings: BatchSettings = DEFAULT_SETTINGS
    max_model_len: int | None = None
    """None = the profile's. Give one where kinds differ in it: any pod may get any request."""
    patterns: tuple[Pattern, ...] = DEFAULT_PATTERNS
    """By which the engines tell ended requests apart."""
    start: StartTimes = StartTimes()
    own_blocks: bool = False
    """Whether a preempted request finds in the prefix cache what it had computed, as in the engine, and not only what
    the workload says is shared. Takes about twice the time; matters where KV blocks are short."""
    scrape_seconds: float = 3.75
    scrape_delay_seconds: float = 0.0
    """From a scrape until its sample can be seen."""
    drain_timeout_seconds: float = 600.0
    """A pod that drains longer is killed with what it still serves."""
    gateway: GatewaySpec = GatewaySpec()
    faults: Sequence[Fault] = ()
    gpu_price_per_hour: float | None = None
    epoch_seconds: float = EPOCH_SECONDS
    other_kinds: tuple[PodKind, ...] = ()
    """Pods of the same model on other accelerators, behind the same gateway; profiles have blocks of the same size."""

    def __post_init__(self) -> None:
        if len({kind.name for kind in self.kinds}) <= len(self.other_kinds):
            raise ValueError(f"kinds of pods need names of their own: {', '.join(kind.name for kind in self.kinds)}")
        if len({kind.profile.block_tokens for kind in self.kinds}) > 1:
            raise ValueError("kinds of pods behind one gateway need KV blocks of the same size")

    @property
    def kinds(self) -> tuple[PodKind, ...]:
        """All of them; the first is what the other fields say, named after its GPU."""
        first = PodKind(
            self.profile.gpu, self.profile, self.initial_replicas, self.settings, self.start, self.gpu_price_per_hour
        )
        return (first, *self.other_kinds)


@dataclass(frozen=True, slots=True)
class Goals:
    """When a request was served well: TTFT within max(`ttft_seconds`, factor × an idle replica's), and mean ITL."""

    ttft_seconds: float = 0.5
    itl_seconds: float = 0.05
    unloaded_factor: float = 3.0
    """0 = the first figure alone."""
    patterns: tuple[Pattern, ...] = DEFAULT_PATTERNS
    """By which results are told apart."""


STRICT = Goals()
LOOSE = Goals(ttft_seconds=2.0, itl_seconds=0.2, unloaded_factor=3.0)
