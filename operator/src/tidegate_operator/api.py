"""The contract with users: group, names, labels, condition types, reasons, and the fields of `spec` as pydantic models.

Field descriptions become `kubectl explain`, the rules beside them become CEL in the CRD (`crd` generates it from here).
Reading is lenient (unknown fields are ignored, every default is filled): the CRD is the strict gate. No I/O, no clock.
Read by `policy`, `render`, `status` and the shell.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from tidegate_engine.settings import (
    DEFAULT_PATTERNS,
    DEFAULT_SETTINGS,
    ISL_EDGES,
    OSL_EDGES,
    OTHER_PATTERN,
    BatchSettings,
    Envelope,
    Pattern,
)

GROUP = "tidegate.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMDeployment"
PLURAL = "llmdeployments"
SINGULAR = "llmdeployment"
SHORT_NAME = "lld"
CATEGORIES = ("all", "llm")
FIELD_MANAGER = "tidegate-operator"

NAME_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
DEPLOYMENT_LABEL = f"{GROUP}/deployment"
ENGINE_NAME = "tidegate-engine"
OPERATOR_NAME = "tidegate-operator"

MAX_NAME_LENGTH = 52
HTTP_PORT = 8000
ADMIN_PORT = 8001
CONFIG_DIR = "/etc/tidegate"
MODELS_DIR = "/models"
OBJECT_UID_ENV = "TIDEGATE_OBJECT_UID"


class ConditionType(StrEnum):
    """Types of `status.conditions`. Reconciling, Stalled and Degraded are good when False, the others when True."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    AVAILABLE = "Available"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    MODEL_READY = "ModelReady"
    CAPACITY_AVAILABLE = "CapacityAvailable"
    METRICS_AVAILABLE = "MetricsAvailable"
    ABLE_TO_SCALE = "AbleToScale"
    SCALING_ACTIVE = "ScalingActive"
    SCALING_LIMITED = "ScalingLimited"
    BATCHING_APPLIED = "BatchingApplied"
    OBJECTIVES_MET = "ObjectivesMet"


class Reason(StrEnum):
    """Reasons of conditions and Events that the operator itself gives. Pods and decisions bring their own."""

    SERVING = "Serving"
    STARTING = "Starting"
    SCALED_TO_ZERO = "ScaledToZero"
    INVALID_SPEC = "InvalidSpec"
    RECONCILE_FAILED = "ReconcileFailed"
    NAME_TAKEN = "NameTaken"
    AS_EXPECTED = "AsExpected"
    ROLLING_OUT = "RollingOut"
    SCALING = "Scaling"
    SETTLED = "Settled"
    NO_READY_REPLICA = "NoReadyReplica"
    MINIMUM_AVAILABLE = "MinimumAvailable"
    MODEL_LOADED = "ModelLoaded"
    MODEL_LOADING = "ModelLoading"
    MODEL_NOT_FOUND = "ModelNotFound"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    ENGINE_FAILED = "EngineFailed"
    SCHEDULED = "Scheduled"
    UNSCHEDULABLE = "Unschedulable"
    QUOTA_EXCEEDED = "QuotaExceeded"
    GATED = "Gated"
    METRICS_FOUND = "MetricsFound"
    METRICS_STALE = "MetricsStale"
    METRICS_MISSING = "MetricsMissing"
    READY_FOR_NEW_SCALE = "ReadyForNewScale"
    VALID_METRIC_FOUND = "ValidMetricFound"
    SCALING_OFF = "ScalingOff"
    SCALING_PAUSED = "ScalingPaused"
    SCALED_BY_OTHERS = "ScaledByOthers"
    OBSERVING_ONLY = "ObservingOnly"
    WITHIN_BOUNDS = "WithinBounds"
    TOO_FEW_REPLICAS = "TooFewReplicas"
    TOO_MANY_REPLICAS = "TooManyReplicas"
    ALL_REPLICAS_APPLIED = "AllReplicasApplied"
    WAITING_FOR_REPLICAS = "WaitingForReplicas"
    SETTINGS_REFUSED = "SettingsRefused"
    MET = "Met"
    MISSED = "Missed"
    NO_OBJECTIVES = "NoObjectives"
    NO_TRAFFIC = "NoTraffic"


class BatchingMode(StrEnum):
    AUTO = "Auto"
    FIXED = "Fixed"
    OBSERVE = "Observe"


class ScalingMode(StrEnum):
    OFF = "Off"
    OBSERVE = "Observe"
    AUTO = "Auto"
    EXTERNAL = "External"


class SelectPolicy(StrEnum):
    MAX = "Max"
    MIN = "Min"
    DISABLED = "Disabled"


class PolicyType(StrEnum):
    PODS = "Pods"
    PERCENT = "Percent"


class Priority(StrEnum):
    LATENCY = "Latency"
    THROUGHPUT = "Throughput"
    COST = "Cost"


class OnMissingPolicy(StrEnum):
    HOLD = "Hold"
    FALLBACK = "Fallback"


class RolloutStrategy(StrEnum):
    SURGE = "Surge"
    DRAIN_FIRST = "DrainFirst"
    RECREATE = "Recreate"


class InvalidSpec(ValueError):
    """The object cannot be read as an LLMDeployment; the message says which field, for a condition."""


def _rules(*pairs: tuple[str, str]) -> JsonDict:
    """CEL rules as (expression, message); they hold where they stand, `self` is that value."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


_MAP_BY_NAME: JsonDict = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
ATOMIC: JsonDict = {"x-kubernetes-list-type": "atomic"}

ResourceName = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A DNS label or the name of an object."""
LabelText = Annotated[str, Field(max_length=63)]
AnnotationText = Annotated[str, Field(max_length=4096)]
Quantity = Annotated[
    int | str,
    Field(
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "maxLength": 32,
            "pattern": r"^\+?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?[0-9]+))?$",
        }
    ),
]
"""A Kubernetes quantity such as 500m, 2 or 8Gi."""


class Part(BaseModel):
    """A part of the object: frozen, camelCase on the wire, unknown fields ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


NAME_RULES = _rules(
    (
        f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
        f"metadata.name must not be longer than {MAX_NAME_LENGTH} characters: pods and Services are named after it",
    ),
    (
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name must start with a letter and hold only lower-case letters, digits and hyphens, as Services need",
    ),
    (
        "!(self.metadata.name in ['default', 'kubernetes'])",
        "metadata.name must not be default or kubernetes: every namespace's own ServiceAccount or Service is called so",
    ),
)
"""Rules on the object as a whole; only there a rule sees the name."""


# --- model ---------------------------------------------------------------------------------------------------------


class Model(Part):
    uri: str = Field(
        min_length=1,
        max_length=1024,
        description=(
            "Where the model's files come from. `file:///path` is a path inside the engine image or a volume mounted by"
            " `podTemplate`. `oci://IMAGE` names an image that carries the files under /models: its `cp` copies them"
            " when a pod starts; `oci://IMAGE#FILE` picks one of several files."
        ),
        json_schema_extra=_rules(
            (
                "self.startsWith('file:///') || self.startsWith('oci://')",
                "model.uri must start with file:/// or oci://; other schemes are not supported yet",
            ),
            (
                "self.matches('^[!-~]+$')",
                "model.uri must not contain spaces or control characters",
            ),
            (
                "!self.startsWith('file://') || (self != 'file:///' && !self.split('/').exists(p, p == '..'))",
                "model.uri must name an absolute path without '..', such as file:///models/model.gguf",
            ),
            (
                "!self.startsWith('oci://') || self.matches('^oci://[A-Za-z0-9][A-Za-z0-9._:/@-]*(#[A-Za-z0-9._-]+)?$')",
                "model.uri must name an image, such as oci://registry.example/models/smollm2:1.0",
            ),
        ),
    )
    served_names: tuple[Annotated[str, Field(min_length=1, max_length=253)], ...] = Field(
        default=(),
        max_length=16,
        description=(
            "Names under which clients ask for the model (`model` of the OpenAI API). The object's name when absent;"
            " that default is computed and never written here."
        ),
        json_schema_extra={
            "x-kubernetes-list-type": "set",
            **_rules(
                (
                    "self.all(n, n.matches('^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$'))",
                    "model.servedNames may hold letters, digits and the signs . _ : / - only",
                )
            ),
        },
    )


# --- engine --------------------------------------------------------------------------------------------------------

OPERATOR_OWNED_FLAGS = (
    "model",
    "served-model-name",
    "config-dir",
    "admin-keys",
    "host",
    "port",
    "admin-port",
    "shutdown-timeout",
    "endpoint-removal-seconds",
    "liveness-stall-seconds",
    "max-num-seqs",
    "max-num-active-seqs",
    "max-num-batched-tokens",
    "long-prefill-token-threshold",
)
"""Flags that the operator sets itself; `engine.args` may not."""


class EnvVar(Part):
    name: str = Field(
        min_length=1,
        max_length=128,
        description="Name of the variable: letters, digits and underscores, no digit in front; not TIDEGATE_*.",
        json_schema_extra=_rules(
            ("self.matches('^[A-Za-z_][A-Za-z0-9_]*$')", "engine.env names are letters, digits and underscores"),
            ("!self.startsWith('TIDEGATE_')", "engine.env names that start with TIDEGATE_ are set by the operator"),
        ),
    )
    value: str = Field(default="", max_length=4096, description="Value of the variable.")


class Engine(Part):
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Image of the engine. The operator's default image when absent.",
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the node pulls the images. The operator's default when absent."
    )
    max_model_length: int | None = Field(
        default=None,
        ge=16,
        le=16_777_216,
        description="Longest context in tokens, prompt and output together. The model's own when absent.",
    )
    kv_block_tokens: Literal[8, 16, 32, 64, 128] = Field(default=16, description="Tokens of one KV cache block.")
    prefix_caching: bool = Field(
        default=True, description="Whether the KV cache of shared prompt beginnings is kept and used again."
    )
    args: tuple[Annotated[str, Field(max_length=1024)], ...] = Field(
        default=(),
        max_length=64,
        description=(
            "Further command-line arguments of the engine, in `--flag=value` form. Flags that the operator owns (model,"
            " ports, batch settings, drain times) are refused."
        ),
        json_schema_extra={
            **ATOMIC,
            **_rules(
                (
                    f"self.all(a, !a.matches('^--?({'|'.join(OPERATOR_OWNED_FLAGS)})(=.*)?$'))",
                    "engine.args must not set a flag that the operator sets: "
                    + ", ".join(f"--{flag}" for flag in OPERATOR_OWNED_FLAGS),
                )
            ),
        },
    )
    env: tuple[EnvVar, ...] = Field(
        default=(),
        max_length=64,
        description="Further environment variables of the engine's container.",
        json_schema_extra=_MAP_BY_NAME,
    )


# --- batching ------------------------------------------------------------------------------------------------------


def _range_rules(name: str, low: int, high: int) -> JsonDict:
    """min <= initial <= max, absent ends taken as the default (which gives way to a given one)."""
    top = f"(has(self.max) ? self.max : (has(self.min) && self.min > {high} ? self.min : {high}))"
    bottom = f"(has(self.min) ? self.min : (has(self.max) && self.max < {low} ? self.max : {low}))"
    return _rules(
        (f"{bottom} <= {top}", f"batching.{name}: min must not be above max"),
        (
            f"!has(self.initial) || ({bottom} <= self.initial && self.initial <= {top})",
            f"batching.{name}: initial must lie between min and max",
        ),
    )


class Range(Part):
    """The envelope of a live setting. An absent end is the default, bent to the ends that are given."""

    min: int | None = Field(default=None, ge=1, le=1_048_576, description="Lowest value that may be set.")
    max: int | None = Field(
        default=None,
        ge=1,
        le=1_048_576,
        description="Highest value that may be set. Buffers are sized by it: a change restarts the pods.",
    )
    initial: int | None = Field(
        default=None,
        ge=1,
        le=1_048_576,
        description="Value to start from; with mode Fixed the value that holds.",
    )

    def bounds(self, low: int, high: int) -> tuple[int, int]:
        """Both ends, with `low` and `high` for absent ones."""
        top = self.max if self.max is not None else max(high, self.min or 0)
        return (self.min if self.min is not None else min(low, top)), top


DEFAULT_ENVELOPE = Envelope()


class Batching(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "!has(self.prefillChunkTokens) || !has(self.prefillChunkTokens.max) || self.prefillChunkTokens.max <="
                " (has(self.maxBatchedTokens) && has(self.maxBatchedTokens.max) ? self.maxBatchedTokens.max : 16384)",
                "batching.prefillChunkTokens.max must not be above batching.maxBatchedTokens.max (16384 when absent)",
            ),
            (
                "!has(self.maxSequences) || !has(self.maxSequences.max) || self.maxSequences.max <="
                " (has(self.maxBatchedTokens) && has(self.maxBatchedTokens.max) ? self.maxBatchedTokens.max : 16384)",
                "batching.maxSequences.max must not be above batching.maxBatchedTokens.max (16384 when absent)",
            ),
            (
                "!has(self.maxBatchedTokens) || !has(self.maxBatchedTokens.max)"
                " || !has(self.prefillChunkTokens) || !has(self.prefillChunkTokens.min)"
                " || self.prefillChunkTokens.min <= self.maxBatchedTokens.max",
                "batching.prefillChunkTokens.min must not be above batching.maxBatchedTokens.max",
            ),
            (
                "!has(self.maxBatchedTokens) || !has(self.maxBatchedTokens.max)"
                " || !has(self.maxSequences) || !has(self.maxSequences.min)"
                " || self.maxSequences.min <= self.maxBatchedTokens.max",
                "batching.maxSequences.min must not be above batching.maxBatchedTokens.max",
            ),
            (
                "!has(self.maxSequences) || !has(self.maxSequences.initial) || !has(self.maxBatchedTokens)"
                " || !has(self.maxBatchedTokens.initial)"
                " || self.maxSequences.initial <= self.maxBatchedTokens.initial",
                "batching.maxSequences.initial must not be above batching.maxBatchedTokens.initial",
            ),
        )
    )

    mode: BatchingMode = Field(
        default=BatchingMode.AUTO,
        description=(
            "Who sets the live batch settings. Auto: the operator, by what it sees of the traffic. Observe: it only"
            " writes into status what it would set. Fixed: the initial values hold. No change restarts a pod."
        ),
    )
    max_sequences: Range = Field(
        default_factory=Range,
        description="Sequences that one replica runs at once. Default: 1 to 256, initial 64.",
        json_schema_extra=_range_rules("maxSequences", 1, 256),
    )
    max_batched_tokens: Range = Field(
        default_factory=Range,
        description="Tokens that one engine step computes at most. Default: 512 to 16384, initial 4096.",
        json_schema_extra=_range_rules("maxBatchedTokens", 512, 16384),
    )
    prefill_chunk_tokens: Range = Field(
        default_factory=Range,
        description="Prompt tokens of one request that one step takes at most. Default: 256 to 8192, initial 1024.",
        json_schema_extra=_range_rules("prefillChunkTokens", 256, 8192),
    )
    max_step_percent: int | None = Field(
        default=None,
        ge=1,
        le=400,
        description="Largest change of a setting at once, in percent of its value. No limit when absent.",
    )
    min_interval_seconds: int = Field(
        default=30, ge=1, le=3600, description="Shortest time between two changes of the settings."
    )
    verification_seconds: int = Field(
        default=60,
        ge=0,
        le=3600,
        description="Time after a change in which the objectives are watched; if they got worse, it is rolled back.",
    )


# --- objectives and traffic ----------------------------------------------------------------------------------------


class Objective(Part):
    percentile: Literal[95] = Field(default=95, description="Percentile that must keep to the goal; 95.")
    milliseconds: int = Field(ge=1, le=3_600_000, description="Goal in milliseconds.")

    @property
    def seconds(self) -> float:
        return self.milliseconds / 1000


_ENDS_LAST = (
    "!has(self.ttft) || !has(self.endToEnd) || self.ttft.milliseconds <= self.endToEnd.milliseconds",
    "objectives: endToEnd must not be below ttft",
)


class LatencyObjectives(Part):
    ttft: Objective | None = Field(
        default=None, description="Goal for the time from the arrival of a request to its first token."
    )
    inter_token_latency: Objective | None = Field(
        default=None, description="Goal for the time between two output tokens of a request."
    )
    end_to_end: Objective | None = Field(
        default=None, description="Goal for the time from the arrival of a request to its last token."
    )


class Objectives(LatencyObjectives):
    model_config = ConfigDict(json_schema_extra=_rules(_ENDS_LAST))

    queue_time: Objective | None = Field(
        default=None, description="Goal for the time that a request waits before its first step."
    )
    output_tokens_per_second: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Output tokens a second that all replicas together must be able to give, whatever arrives.",
    )
    attainment_percent: int = Field(
        default=95,
        ge=95,
        le=99,
        description=(
            "Share of the requests that must keep to each goal. Above 95 what is measured is held against it, and a"
            " miss adds replicas; the model behind batch settings and capacity knows the 95th percentile only."
        ),
    )
    long_prompt_factor: int = Field(
        default=3,
        ge=0,
        le=100,
        description=(
            "The first token of a prompt may take so many times as long as on an idle replica, where that is more than"
            " the goal ttft: no number of replicas reads a long prompt faster. 0: the goal holds for prompts of any"
            " length."
        ),
    )
    priority: Priority = Field(
        default=Priority.LATENCY,
        description=(
            "What wins where goals leave a choice. Latency: batch settings that bear an overload, for up to a twentieth"
            " of the rate. Throughput: those of the largest rate. Cost: these, and no replica for headroomPercent."
        ),
    )


class ClassObjectives(LatencyObjectives):
    """Goals of one class; what it does not give is the object's."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            _ENDS_LAST,
            (
                "has(self.ttft) || has(self.interTokenLatency) || has(self.endToEnd)",
                "trafficClasses.objectives: give ttft, interTokenLatency or endToEnd",
            ),
        )
    )


class TokenRange(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(
            ("!has(self.max) || (has(self.min) ? self.min : 0) < self.max", "min must be below max"),
        )
    )

    min: int = Field(default=0, ge=0, le=16_777_216, description="Smallest number of tokens, inclusive.")
    max: int | None = Field(
        default=None, ge=1, le=16_777_216, description="Largest number of tokens, exclusive. No limit when absent."
    )


class TrafficClass(Part):
    name: str = Field(
        min_length=1,
        max_length=63,
        description="Name of the class in status and metrics.",
        json_schema_extra=_rules(
            ("self.matches('^[A-Za-z][A-Za-z0-9-]*$')", "trafficClasses names are letters, digits and hyphens"),
            (f"self != '{OTHER_PATTERN}'", f"the class {OTHER_PATTERN} is built in: it holds what no class holds"),
        ),
    )
    input_tokens: TokenRange = Field(
        default_factory=TokenRange,
        description="Length of the prompt. Snaps to the edges of the metrics: 0, 64, 256, 1024, 4096, 16384, 65536.",
    )
    output_tokens: TokenRange = Field(
        default_factory=TokenRange,
        description="Length of the answer. Snaps to the edges of the metrics: 0, 16, 64, 256, 1024, 4096, 16384.",
    )
    objectives: ClassObjectives | None = Field(
        default=None,
        description="Goals of this class in place of the object's; it is judged by itself, by requests that ended.",
    )


# --- autoscaling ---------------------------------------------------------------------------------------------------


class ScalingPolicy(Part):
    type: PolicyType = Field(description="Whether `value` counts pods or percent of the present replicas.")
    value: int = Field(ge=1, le=1000, description="Largest change within the period.")
    period_seconds: int | None = Field(
        default=None,
        ge=1,
        le=3600,
        description=(
            "Length of the period. When absent: 60 for scaling down; 15 for scaling up, or a replica's start while its"
            " capacity is unknown."
        ),
    )


_POLICIES = "Limits on the speed; `selectPolicy` says which one counts."


class ScaleUp(Part):
    stabilization_window_seconds: int = Field(
        default=0, ge=0, le=3600, description="Scales to the lowest number recommended within this time."
    )
    tolerance_percent: int = Field(
        default=10, ge=0, le=100, description="A lack of less than this share of the present replicas is left alone."
    )
    select_policy: SelectPolicy = Field(
        default=SelectPolicy.MAX,
        description="Which policy counts. Max: the one that allows most. Min: least. Disabled: never scale up.",
    )
    policies: tuple[ScalingPolicy, ...] = Field(
        default=(ScalingPolicy(type=PolicyType.PERCENT, value=100), ScalingPolicy(type=PolicyType.PODS, value=2)),
        min_length=1,
        max_length=8,
        description=f"{_POLICIES} Default: 100 percent or 2 pods in a period.",
        json_schema_extra={**ATOMIC, "default": None},
    )


class ScaleDown(Part):
    stabilization_window_seconds: int = Field(
        default=300, ge=0, le=3600, description="Scales to the highest number recommended within this time."
    )
    tolerance_percent: int = Field(
        default=10, ge=0, le=100, description="A surplus of less than this share of the present replicas is left alone."
    )
    select_policy: SelectPolicy = Field(
        default=SelectPolicy.MAX,
        description="Which policy counts. Max: the one that allows most. Min: least. Disabled: never scale down.",
    )
    policies: tuple[ScalingPolicy, ...] = Field(
        default=(
            ScalingPolicy(type=PolicyType.PERCENT, value=50, period_seconds=60),
            ScalingPolicy(type=PolicyType.PODS, value=1, period_seconds=60),
        ),
        min_length=1,
        max_length=8,
        description=f"{_POLICIES} Default: 50 percent or 1 pod in 60 seconds.",
        json_schema_extra={**ATOMIC, "default": None},
    )


class Behavior(Part):
    scale_up: ScaleUp = Field(default_factory=ScaleUp, description="How fast replicas may be added.")
    scale_down: ScaleDown = Field(default_factory=ScaleDown, description="How fast replicas may be taken away.")


CLOCK_TIME = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"
ClockTime = Annotated[str, Field(max_length=5, pattern=CLOCK_TIME)]
"""Hours and minutes of a wall clock, such as 08:30."""
Weekday = Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
WEEKDAYS: tuple[Weekday, ...] = get_args(Weekday)


class Schedule(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "has(self.minReplicas) || has(self.maxReplicas)",
                "autoscaling.schedules: give minReplicas, maxReplicas or both",
            ),
        )
    )

    name: str = Field(min_length=1, max_length=63, description="Name of the schedule in status.")
    time_zone: str | None = Field(
        default=None, max_length=64, description="IANA name of the time zone, such as Europe/Berlin. UTC when absent."
    )
    days_of_week: tuple[Weekday, ...] = Field(
        default=(),
        max_length=7,
        description="Days on which it begins. Every day when absent.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    start_time: ClockTime = Field(description="When it begins, HH:MM; the minimum already a replica's start earlier.")
    end_time: ClockTime = Field(description="When it ends, HH:MM; on the next day when not after startTime.")
    min_replicas: int | None = Field(
        default=None, ge=1, le=1000, description="Replaces autoscaling.minReplicas meanwhile."
    )
    max_replicas: int | None = Field(
        default=None, ge=1, le=1000, description="Replaces autoscaling.maxReplicas meanwhile."
    )

    @field_validator("time_zone")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        # No schema can say which zones there are, and without one nobody knows when the schedule holds.
        if name is not None and name != "UTC":
            try:
                ZoneInfo(name)
            except (ZoneInfoNotFoundError, ValueError, OSError) as error:
                raise ValueError(f"{name} is no time zone that is known here: give an IANA name") from error
        return name


class Autoscaling(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "!(self.mode in ['Auto', 'Observe']) || has(self.maxReplicas)",
                "autoscaling.maxReplicas is required with autoscaling.mode Auto and Observe",
            ),
            (
                "!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
                "autoscaling.minReplicas must not be above autoscaling.maxReplicas",
            ),
            (
                "!has(self.schedules) || self.schedules.all(s, (has(s.minReplicas) ? s.minReplicas : self.minReplicas)"
                " <= (has(s.maxReplicas) ? s.maxReplicas : has(self.maxReplicas) ? self.maxReplicas : 1000))",
                "autoscaling.schedules: minReplicas must not be above maxReplicas; what a schedule does not give is"
                " autoscaling.minReplicas and autoscaling.maxReplicas",
            ),
        )
    )

    mode: ScalingMode = Field(
        default=ScalingMode.AUTO,
        description=(
            "Who sets the number of replicas. Auto: the operator, by what it measures. Observe: it only writes into"
            " status what it would do, `replicas` holds. External: an HPA or KEDA through the scale subresource."
            " Off: `replicas` holds."
        ),
    )
    min_replicas: int = Field(default=1, ge=1, le=1000, description="Fewest replicas with mode Auto.")
    max_replicas: int | None = Field(
        default=None, ge=1, le=1000, description="Most replicas with mode Auto; required there and with Observe."
    )
    max_gpus: int | None = Field(
        default=None,
        alias="maxGPUs",
        ge=1,
        le=64_000,
        description="Most GPUs that the replicas may take together, schedules included. No limit when absent.",
    )
    importance: int = Field(
        default=50,
        ge=1,
        le=100,
        description=(
            "Weight against other objects where the installation's GPU budget is less than all want together: twice the"
            " importance is about twice the share. Minima come first."
        ),
    )
    schedules: tuple[Schedule, ...] = Field(
        default=(),
        max_length=16,
        description="Other bounds at times of the day. Where several hold at once the highest of each bound counts.",
        json_schema_extra=_MAP_BY_NAME,
    )
    headroom_percent: int = Field(
        default=15, ge=0, le=90, description="Share of a replica's capacity that is kept free for bursts."
    )
    sync_period_seconds: int = Field(
        default=15, ge=1, le=300, description="Time between two looks at the metrics of this object."
    )
    behavior: Behavior = Field(
        default_factory=Behavior, description="How fast replicas may change; the fields of HorizontalPodAutoscaler v2."
    )
    paused: bool = Field(
        default=False, description="While true the operator changes neither replicas nor batch settings by itself."
    )


# --- metrics -------------------------------------------------------------------------------------------------------


class Prometheus(Part):
    url: str = Field(
        max_length=1024,
        description="Base address of a Prometheus that scrapes the engine pods, such as http://prometheus.monitoring:9090.",
        json_schema_extra=_rules(
            (
                "self.matches('^https?://[^ /?#@]+(/[^ ?#]*)?$')",
                "metrics.prometheus.url must be an http:// or https:// address without user, query and fragment",
            )
        ),
    )


class OnMissing(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "self.policy != 'Fallback' || has(self.fallbackReplicas)",
                "metrics.onMissing.fallbackReplicas is required with metrics.onMissing.policy Fallback",
            )
        )
    )

    policy: OnMissingPolicy = Field(
        default=OnMissingPolicy.HOLD,
        description=(
            "What to do without metrics. Hold: keep the replicas. Fallback: after `holdSeconds` raise them to"
            " `fallbackReplicas`, never lower them."
        ),
    )
    hold_seconds: int = Field(
        default=900, ge=0, le=86_400, description="Time without metrics before the fallback comes into force."
    )
    fallback_replicas: int | None = Field(
        default=None, ge=1, le=1000, description="Replicas to hold at least once the fallback is in force."
    )


class Metrics(Part):
    prometheus: Prometheus | None = Field(
        default=None,
        description="Prometheus to ask. The operator's default when absent; without one it scrapes the pods itself.",
    )
    stale_after_seconds: int = Field(default=60, ge=5, le=3600, description="Samples older than this count as missing.")
    on_missing: OnMissing = Field(default_factory=OnMissing, description="What to do while metrics are missing.")


# --- pods ----------------------------------------------------------------------------------------------------------


class Gpu(Part):
    count: int = Field(default=1, ge=0, le=64, description="GPUs of one replica. 0: the engine runs on the CPU.")
    resource_name: str = Field(
        default="nvidia.com/gpu",
        min_length=3,
        max_length=253,
        description="Name under which the nodes offer GPUs.",
        json_schema_extra=_rules(
            (
                "self.matches('^[a-z0-9.-]+/[A-Za-z0-9._-]+$')",
                "resources.gpu.resourceName must be an extended resource such as nvidia.com/gpu",
            )
        ),
    )


class Resources(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "!has(self.limits) || !((has(self.gpu) ? self.gpu.resourceName : 'nvidia.com/gpu') in self.limits)",
                "resources.limits must not name the GPU resource: set resources.gpu.count",
            ),
            (
                "!has(self.requests) || !((has(self.gpu) ? self.gpu.resourceName : 'nvidia.com/gpu') in self.requests)",
                "resources.requests must not name the GPU resource: set resources.gpu.count",
            ),
        )
    )

    gpu: Gpu = Field(default_factory=Gpu, description="GPUs of one replica. One nvidia.com/gpu when absent.")
    requests: Mapping[str, Quantity] = Field(
        default_factory=dict, max_length=16, description="Resources that the scheduler reserves for a replica."
    )
    limits: Mapping[str, Quantity] = Field(
        default_factory=dict,
        max_length=16,
        description="Resources that a replica may use at most. The engine takes its thread count from the CPU limit.",
    )


class Toleration(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "self.operator == 'Equal' ? has(self.key) : !has(self.value)",
                "placement.tolerations: operator Equal needs a key, operator Exists takes no value",
            ),
            (
                "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
                "placement.tolerations: tolerationSeconds needs effect NoExecute",
            ),
        )
    )

    key: str | None = Field(default=None, max_length=316, description="Key of the taint. Every key when absent.")
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="How the value is compared.")
    value: str | None = Field(default=None, max_length=63, description="Value of the taint, with operator Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint. Every effect when absent."
    )
    toleration_seconds: int | None = Field(
        default=None, ge=0, le=86_400, description="How long a NoExecute taint is tolerated. For ever when absent."
    )


class Placement(Part):
    node_selector: Mapping[str, LabelText] = Field(
        default_factory=dict, max_length=32, description="Labels that a node must have."
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(), max_length=32, description="Taints that the pods tolerate.", json_schema_extra=ATOMIC
    )
    priority_class_name: str | None = Field(default=None, max_length=253, description="PriorityClass of the pods.")
    runtime_class_name: str | None = Field(default=None, max_length=253, description="RuntimeClass of the pods.")
    scheduler_name: str | None = Field(default=None, max_length=253, description="Scheduler that places the pods.")


class Rollout(Part):
    strategy: RolloutStrategy = Field(
        default=RolloutStrategy.SURGE,
        description=(
            "How pods of a new version replace old ones. Surge: one new pod first, so it needs a free GPU. DrainFirst:"
            " one old pod drains first. Recreate: all old pods drain first."
        ),
    )
    progress_deadline_seconds: int = Field(
        default=1800,
        ge=60,
        le=86_400,
        description="Time after which a rollout without progress counts as failed; never below the start-up timeout.",
    )


class Drain(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "self.timeoutSeconds + self.endpointRemovalSeconds <= 3600",
                "drain.timeoutSeconds and drain.endpointRemovalSeconds must not exceed 3600 together",
            )
        )
    )

    timeout_seconds: int = Field(
        default=600, ge=0, le=3600, description="Time that running requests get to finish before a pod ends."
    )
    endpoint_removal_seconds: int = Field(
        default=10,
        ge=0,
        le=3600,
        description="Time in which a pod that ends still takes requests, since clients may not know yet.",
    )


class Probes(Part):
    startup_timeout_seconds: int = Field(
        default=1800, ge=10, le=86_400, description="Time that a pod gets to load its model before it is restarted."
    )
    liveness_stall_seconds: int = Field(
        default=60,
        ge=5,
        le=3600,
        description="Time without any engine step while requests wait, after which a pod counts as dead.",
    )


class Service(Part):
    port: int = Field(default=8000, ge=1, le=65_535, description="Port of the Service.")
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        default="ClusterIP", description="Type of the Service."
    )
    annotations: Mapping[str, AnnotationText] = Field(
        default_factory=dict, max_length=32, description="Annotations of the Service."
    )


class PersistentVolumeClaimSource(Part):
    claim_name: ResourceName = Field(description="Name of the PersistentVolumeClaim in the same namespace.")
    read_only: bool = Field(default=False, description="Whether the claim is mounted read-only.")


class ConfigMapSource(Part):
    name: str = Field(min_length=1, max_length=253, description="Name of the ConfigMap in the same namespace.")


class SecretSource(Part):
    secret_name: str = Field(min_length=1, max_length=253, description="Name of the Secret in the same namespace.")


class EmptyDirSource(Part):
    medium: Literal["Memory"] | None = Field(
        default=None, description="Memory for a tmpfs. The node's disk when absent."
    )
    size_limit: Quantity | None = Field(default=None, description="Largest size of the folder.")


class HostPathSource(Part):
    path: str = Field(min_length=1, max_length=1024, description="Folder or file on the node.")
    type: Literal["Directory", "DirectoryOrCreate", "File", "FileOrCreate"] | None = Field(
        default=None, description="What must exist at the path. Nothing is checked when absent."
    )


VOLUME_PREFIX = "tidegate-"
"""Names of the operator's own volumes start with this."""


class Volume(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "[has(self.persistentVolumeClaim), has(self.configMap), has(self.secret), has(self.emptyDir),"
                " has(self.hostPath)].filter(x, x).size() == 1",
                "podTemplate.volumes: give exactly one of persistentVolumeClaim, configMap, secret, emptyDir, hostPath",
            )
        )
    )

    name: str = Field(
        min_length=1,
        max_length=63,
        description="Name of the volume. Names that start with tidegate- are the operator's.",
        json_schema_extra=_rules(
            ("self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')", "podTemplate.volumes names are DNS labels"),
            (f"!self.startsWith('{VOLUME_PREFIX}')", "podTemplate.volumes names must not start with tidegate-"),
        ),
    )
    persistent_volume_claim: PersistentVolumeClaimSource | None = Field(
        default=None, description="A PersistentVolumeClaim."
    )
    config_map: ConfigMapSource | None = Field(default=None, description="The keys of a ConfigMap as files.")
    secret: SecretSource | None = Field(default=None, description="The keys of a Secret as files.")
    empty_dir: EmptyDirSource | None = Field(default=None, description="An empty folder that lives as long as the pod.")
    host_path: HostPathSource | None = Field(
        default=None, description="A folder of the node; namespaces with restricted pod security refuse it."
    )


class VolumeMount(Part):
    name: str = Field(min_length=1, max_length=63, description="Name of a volume in `volumes`.")
    mount_path: str = Field(
        min_length=1,
        max_length=1024,
        description="Where the engine's container sees it.",
        json_schema_extra=_rules(
            ("self.startsWith('/')", "podTemplate.volumeMounts: mountPath must be absolute"),
            (
                "!(self in ['/', '/tmp', '/tmp/', '/etc/tidegate', '/etc/tidegate/'])"
                " && !self.startsWith('/etc/tidegate/')",
                "podTemplate.volumeMounts: /, /tmp and /etc/tidegate are mounted by the operator",
            ),
        ),
    )
    sub_path: str | None = Field(default=None, max_length=1024, description="Path inside the volume.")
    read_only: bool = Field(default=False, description="Whether the container may only read.")


class LocalObjectReference(Part):
    name: str = Field(min_length=1, max_length=253, description="Name of the Secret in the same namespace.")


class PodTemplate(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "!has(self.volumeMounts) || self.volumeMounts.all(m,"
                " has(self.volumes) && self.volumes.exists(v, v.name == m.name))",
                "podTemplate.volumeMounts: every name must be one of podTemplate.volumes",
            )
        )
    )

    labels: Mapping[str, LabelText] = Field(
        default_factory=dict,
        max_length=32,
        description="Further labels of the pods.",
        json_schema_extra=_rules(
            (
                f"self.all(k, !(k in ['{NAME_LABEL}', '{INSTANCE_LABEL}', '{MANAGED_BY_LABEL}'])"
                f" && !k.startsWith('{GROUP}/'))",
                "podTemplate.labels must not set app.kubernetes.io/name, app.kubernetes.io/instance,"
                " app.kubernetes.io/managed-by or tidegate.dev/*: they are the operator's",
            )
        ),
    )
    annotations: Mapping[str, AnnotationText] = Field(
        default_factory=dict,
        max_length=32,
        description="Further annotations of the pods.",
        json_schema_extra=_rules(
            (
                f"self.all(k, !k.startsWith('{GROUP}/'))",
                "podTemplate.annotations must not set tidegate.dev/*: they are the operator's",
            )
        ),
    )
    image_pull_secrets: tuple[LocalObjectReference, ...] = Field(
        default=(),
        max_length=16,
        description="Secrets with the credentials of image registries.",
        json_schema_extra=_MAP_BY_NAME,
    )
    volumes: tuple[Volume, ...] = Field(
        default=(), max_length=16, description="Further volumes of the pods.", json_schema_extra=_MAP_BY_NAME
    )
    volume_mounts: tuple[VolumeMount, ...] = Field(
        default=(),
        max_length=16,
        description="Where the engine's container sees those volumes.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["mountPath"]},
    )


# --- the whole -----------------------------------------------------------------------------------------------------


class Spec(Part):
    """What the user asked for."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "!(has(self.replicas) && has(self.autoscaling) && self.autoscaling.mode == 'Auto')",
                "replicas and autoscaling.mode Auto exclude each other: remove replicas, or set autoscaling.mode to"
                " Off, Observe or External",
            ),
            (
                "!(has(self.autoscaling) && self.autoscaling.mode == 'External') || has(self.replicas)",
                "replicas is required with autoscaling.mode External: the scale subresource starts from it",
            ),
            (
                "!has(self.autoscaling) || !has(self.autoscaling.maxGPUs) || self.autoscaling.maxGPUs >="
                " self.autoscaling.minReplicas * (has(self.resources) && has(self.resources.gpu) ?"
                " self.resources.gpu.count : 1)",
                "autoscaling.maxGPUs must not be below autoscaling.minReplicas times resources.gpu.count",
            ),
            (
                "!self.model.uri.startsWith('oci://') || !has(self.podTemplate) || !has(self.podTemplate.volumeMounts)"
                " || self.podTemplate.volumeMounts.all(m,"
                " m.mountPath != '/models' && !m.mountPath.startsWith('/models/'))",
                "podTemplate.volumeMounts: /models is mounted by the operator when model.uri is oci://",
            ),
        )
    )

    model: Model = Field(description="The model to serve.")
    engine: Engine = Field(default_factory=Engine, description="The program that serves the model.")
    batching: Batching = Field(
        default_factory=Batching,
        description="Live batch settings of the engine, and the envelope in which the operator may change them.",
    )
    objectives: Objectives = Field(
        default_factory=Objectives, description="Latency goals that replicas and batch settings are chosen for."
    )
    traffic_classes: tuple[TrafficClass, ...] = Field(
        default=(),
        max_length=8,
        description=(
            "Classes of requests by prompt and answer length, told apart in status; the first that fits counts. When"
            " absent: LongInShortOut, LongInLongOut, ShortInLongOut and ShortInShortOut (long: from 1024 tokens in,"
            " from 256 out)."
        ),
        json_schema_extra=_MAP_BY_NAME,
    )
    replicas: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Number of replicas, 1 when absent. Refused with autoscaling.mode Auto, required with External.",
    )
    autoscaling: Autoscaling = Field(
        default_factory=lambda: Autoscaling(mode=ScalingMode.OFF),
        description="How the number of replicas follows the load. When absent, `replicas` holds.",
    )
    metrics: Metrics = Field(default_factory=Metrics, description="Where measurements come from.")
    resources: Resources = Field(default_factory=Resources, description="What one replica needs of a node.")
    placement: Placement = Field(default_factory=Placement, description="Which nodes the pods may run on.")
    rollout: Rollout = Field(default_factory=Rollout, description="How a new version replaces the old one.")
    drain: Drain = Field(default_factory=Drain, description="How a pod ends without cutting off requests.")
    probes: Probes = Field(default_factory=Probes, description="How long a pod may start, and when it counts as dead.")
    service: Service = Field(default_factory=Service, description="The Service in front of the pods.")
    pod_template: PodTemplate = Field(
        default_factory=PodTemplate, description="Additions to the pods that the operator makes."
    )

    def served_names(self, name: str) -> tuple[str, ...]:
        """Names that clients ask for; the object's `name` when none is given."""
        return self.model.served_names or (name,)

    def envelope(self) -> Envelope:
        """Bounds of the live settings. Defaults give way to the ends that the user gave."""
        tokens = self.batching.max_batched_tokens.bounds(*DEFAULT_ENVELOPE.max_num_batched_tokens)

        def within_tokens(given: Range, default: tuple[int, int]) -> tuple[int, int]:
            return given.bounds(min(default[0], tokens[1]), min(default[1], tokens[1]))

        return Envelope(
            max_num_seqs=within_tokens(self.batching.max_sequences, DEFAULT_ENVELOPE.max_num_seqs),
            max_num_batched_tokens=tokens,
            long_prefill_token_threshold=within_tokens(
                self.batching.prefill_chunk_tokens, DEFAULT_ENVELOPE.long_prefill_token_threshold
            ),
        )

    def initial_settings(self) -> BatchSettings:
        """Settings that the first pod starts with; always inside `envelope()`."""
        envelope, batching = self.envelope(), self.batching

        def start(given: int | None, default: int, bounds: tuple[int, int]) -> int:
            return min(max(default if given is None else given, bounds[0]), bounds[1])

        sequences = start(batching.max_sequences.initial, DEFAULT_SETTINGS.max_num_seqs, envelope.max_num_seqs)
        tokens = start(
            batching.max_batched_tokens.initial,
            DEFAULT_SETTINGS.max_num_batched_tokens,
            envelope.max_num_batched_tokens,
        )
        return BatchSettings(
            max_num_seqs=sequences,
            max_num_batched_tokens=max(tokens, sequences),
            long_prefill_token_threshold=start(
                batching.prefill_chunk_tokens.initial,
                DEFAULT_SETTINGS.long_prefill_token_threshold,
                envelope.long_prefill_token_threshold,
            ),
        )

    def patterns(self) -> tuple[Pattern, ...]:
        """The query patterns that are told apart: the classes, snapped to the metrics' edges, and the rest."""
        if not self.traffic_classes:
            return DEFAULT_PATTERNS
        return (*map(_snapped, self.traffic_classes), Pattern(OTHER_PATTERN))

    def replica_bounds(self) -> tuple[int, int]:
        """Fewest and most replicas of autoscaling."""
        low = self.autoscaling.min_replicas
        return low, max(low, self.autoscaling.max_replicas or low)

    def fixed_replicas(self) -> int:
        """Replicas that hold wherever the operator does not choose them."""
        return 1 if self.replicas is None else self.replicas


def _snapped(traffic_class: TrafficClass) -> Pattern:
    isl_min, isl_max = _snap(traffic_class.input_tokens, ISL_EDGES)
    osl_min, osl_max = _snap(traffic_class.output_tokens, OSL_EDGES)
    return Pattern(traffic_class.name, isl_min, isl_max, osl_min, osl_max)


def _snap(tokens: TokenRange, edges: tuple[int, ...]) -> tuple[int, int | None]:
    """Both ends at the edge nearest in ratio; never empty; above the last edge the range is open."""

    def nearest(value: int) -> int:
        return min(edges, key=lambda edge: max(value, edge, 1) / max(min(value, edge), 1))

    low = nearest(tokens.min)
    if tokens.max is None or tokens.max > edges[-1]:
        return low, None
    high = max(nearest(tokens.max), low)
    if high > low:
        return low, high
    following = [edge for edge in edges if edge > low]
    return low, following[0] if following else None


def parse_spec(data: Mapping[str, object]) -> Spec:
    """Read `spec` of an object; raises `InvalidSpec` with a sentence that names the fields."""
    try:
        return Spec.model_validate(data)
    except ValidationError as error:
        parts = [f"spec.{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise InvalidSpec("; ".join(parts[:5])) from error


@dataclass(frozen=True, slots=True)
class Target:
    """One LLMDeployment as the pure core sees it."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Spec


def selector(name: str) -> dict[str, str]:
    """Labels that choose the engine pods of one object; immutable in its Deployment."""
    return {NAME_LABEL: ENGINE_NAME, INSTANCE_LABEL: name}


def labels(name: str) -> dict[str, str]:
    """Labels of everything that the operator makes for one object."""
    return {**selector(name), MANAGED_BY_LABEL: OPERATOR_NAME, DEPLOYMENT_LABEL: name}


def config_map_name(name: str) -> str:
    return f"{name}-engine"
