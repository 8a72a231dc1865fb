"""What the operator saw and what it chose: the facts that the shell gathers and the pure core decides on.

Pure data: no I/O, no clock. `None` means unknown, never zero. Built by `reconcile` from `cluster`, `prometheus` and
`scrape`; read by `capacity`, `policy` and `status`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tidegate_engine.settings import BatchSettings
from tidegate_engine.steptime import StepModel

LATELY_SECONDS = 15.0
"""Over which a jump of the load is looked for."""


class ReplicaPhase(StrEnum):
    """Where an engine pod stands. Only Starting, Pulling and Loading are credited as supply to come."""

    STARTING = "Starting"
    PULLING = "Pulling"
    LOADING = "Loading"
    READY = "Ready"
    DRAINING = "Draining"
    UNSCHEDULABLE = "Unschedulable"
    GATED = "Gated"
    CRASH_LOOPING = "CrashLooping"
    PULL_FAILED = "PullFailed"


STARTING_PHASES = (ReplicaPhase.STARTING, ReplicaPhase.PULLING, ReplicaPhase.LOADING)
WAITING_PHASES = (ReplicaPhase.UNSCHEDULABLE, ReplicaPhase.GATED)
"""Pods that no node has taken, or may take yet."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine pod. Times are Unix seconds."""

    name: str
    uid: str
    ip: str | None
    phase: ReplicaPhase
    created_at: float
    ready_at: float | None = None
    restarts: int = 0
    reason: str = ""
    """The kubelet's or scheduler's word, e.g. `OOMKilled`, `Unschedulable`."""
    message: str = ""
    updated: bool = True
    """Whether the pod is of the Deployment's newest template."""
    settings_generation: int | None = None
    """The settings generation that the pod acknowledged."""
    settings: BatchSettings | None = None
    """Its effective settings."""
    running: float | None = None
    waiting: float | None = None
    running_context_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """Traffic of one object over `window_seconds`, summed over its pods (never averaged quantiles)."""

    window_seconds: float
    sampled_at: float
    """Unix seconds of the oldest sample among the newest of each pod."""
    arrivals_per_second: Mapping[int, float]
    """By lower ISL edge."""
    finished_per_second: Mapping[tuple[int, int], float]
    """Joint counts by (lower ISL edge, lower OSL edge)."""
    running: float
    waiting: float
    waiting_prompt_tokens: float
    running_context_tokens: float
    running_past_output_edge: Mapping[int, float]
    """Running requests whose output has passed each OSL edge."""
    ttft_p95_seconds: float | None
    itl_p95_seconds: float | None
    queue_p95_seconds: float | None
    prompt_tokens_per_second: float | None
    cached_prompt_tokens_per_second: float | None
    generation_tokens_per_second: float | None
    kv_used_ratio: float | None
    preemptions_per_second: float | None
    pods_covered: int
    """Pods with a fresh sample."""
    arrived_lately: float | None = None
    """Requests of the last `LATELY_SECONDS`; None where the source does not tell."""
    finished_buckets: Mapping[tuple[str, str], Mapping[float, float]] = field(default_factory=dict)
    """Cumulative histograms (upper bound → rate) of requests that ended, by (`ttft`, `itl` or `endToEnd`, pattern)."""
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    """Likewise of all requests, as things happen, by `ttft`, `itl` or `queue`: what the 95th percentiles are of."""


class MetricsState(StrEnum):
    FRESH = "Fresh"
    STALE = "Stale"
    ABSENT = "Absent"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a pod's `/admin/v1/info` and step-model metrics say; the input of `capacity`."""

    kv_blocks: int
    block_tokens: int
    max_model_len: int
    kv_token_bytes: int
    weight_bytes: int
    gpu_product: str | None
    gpu_count: int
    version: str
    step_model: StepModel | None
    step_model_residual_ratio: float | None
    step_model_samples: float | None
    layers: int | None = None
    weight_dtype: str | None = None
    """What most of the weights are held in, in the engine's words."""
    step_model_confidence: float | None = None
    """How much of `step_model` was measured; the rest is the roofline's (`prior.believe`)."""
    prior: StepModel | None = None
    """The roofline's step model: a guess, never a reason to take a replica away. None without a known GPU."""


@dataclass(frozen=True, slots=True)
class GpuPrice:
    """What an hour of a GPU costs."""

    gpu: str
    dollars_per_hour: float
    is_default: bool
    """Of the table; else the installation says so."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that `decide` may know."""

    now: float
    current_replicas: int
    """`spec.replicas` of the child Deployment, 0 when there is none yet."""
    replicas: tuple[Replica, ...] = ()
    demand: Demand | None = None
    metrics_state: MetricsState = MetricsState.ABSENT
    metrics_message: str = ""
    engine: EngineInfo | None = None
    held_requests: float | None = None
    """Requests that the gateway holds since no pod is ready; None where there is no gateway or it does not answer."""
    granted_gpus: int | None = None
    """GPUs that this object may take, where objects want more of a kind than there are; None without such a bound."""
    start_seconds: float | None = None
    """Measured time from creation to Ready, the slowest of the recent pods."""
    rollout_in_progress: bool = False
    spec_replicas: int | None = None
    """`spec.replicas` of the object (modes Off and External)."""
    workload_reason: str = ""
    """The child Deployment's own complaint, `FailedCreate` or `ProgressDeadlineExceeded`; empty when it has none."""
    workload_message: str = ""
    price: GpuPrice | None = None
    """Of the GPUs that the engines have; None where they have none, or it is unknown."""

    def count(self, *phases: ReplicaPhase) -> int:
        return sum(replica.phase in phases for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class Limits:
    """Fewest and most replicas at a time, what set them, and the schedules in force then."""

    low: int
    high: int
    low_rule: str = "MinReplicas"
    high_rule: str = "MaxReplicas"
    schedules: tuple[str, ...] = ()


class Bottleneck(StrEnum):
    PREFILL = "Prefill"
    DECODE = "Decode"
    KV = "KV"
    QUEUE = "Queue"
    NONE = "None"


class Action(StrEnum):
    HOLD = "Hold"
    SCALE_UP = "ScaleUp"
    SCALE_DOWN = "ScaleDown"
    RETUNE = "Retune"


@dataclass(frozen=True, slots=True)
class PatternShare:
    """One query pattern in the observed mix."""

    name: str
    share: float
    requests_per_second: float
    isl_mean_tokens: float
    osl_mean_tokens: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen, and why: feeds condition, Event, log, status and test alike."""

    replicas: int
    settings: BatchSettings
    settings_generation: int
    action: Action
    reason: str
    """CamelCase."""
    message: str
    """One sentence with the figures."""
    recheck_after_seconds: float
    wanted_replicas: int | None = None
    """Before bounds and behaviour; None when demand or capacity is unknown."""
    bounded_by: tuple[str, ...] = ()
    """Rules that changed the wanted number, in order."""
    limits: Limits | None = None
    """The bounds at that time; None where others choose the number."""
    bottleneck: Bottleneck = Bottleneck.NONE
    binding: str = ""
    """The goal that limits a replica's capacity, `ttft` or `ttft:PATTERN`; empty when it is simply full."""
    mix: tuple[PatternShare, ...] = ()
    inputs: Mapping[str, float] = field(default_factory=dict)
    """The formula's values, so that a human can recompute the number."""
    settings_reason: str = ""
    """CamelCase; why the settings changed, when they did: `reason` may be about the replicas."""
    settings_message: str = ""
    """One sentence with the predicted effect of that change."""
    memory: Mapping[str, object] = field(default_factory=dict)
    """Opaque, bounded, JSON: goes into status and comes back as `memory` of the next decision."""
