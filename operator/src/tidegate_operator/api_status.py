"""The fields of `status`, as pydantic models: `status` fills them, `crd` documents them, users' tools read them.

An absent field is unknown. Times are RFC 3339 in UTC.
"""

from typing import Annotated, Literal

from pydantic import Field

from tidegate_operator.api import ATOMIC, BatchingMode, Part, ScalingMode
from tidegate_operator.observation import MetricsState

Sentence = Annotated[str, Field(max_length=4096)]
Word = Annotated[str, Field(max_length=316)]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]

HISTORY_LENGTH = 10


class Condition(Part):
    type: Word = Field(description="What is stated, such as Ready.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: Word = Field(description="Why, as one CamelCase word.")
    message: Sentence = Field(description="Why, as a sentence.")
    observed_generation: int = Field(description="`metadata.generation` for which this was stated.")
    last_transition_time: Time = Field(description="When `status` changed last.")


class Settings(Part):
    max_sequences: int = Field(description="Sequences that one replica runs at once.")
    max_batched_tokens: int = Field(description="Tokens that one engine step computes at most.")
    prefill_chunk_tokens: int = Field(description="Prompt tokens of one request that one step takes at most.")


class BatchingStatus(Part):
    mode: BatchingMode = Field(description="Who sets the batch settings now.")
    desired: Settings = Field(description="Settings that every replica should have.")
    generation: int = Field(description="Number of these settings; it rises with each change.")
    applied_replicas: int = Field(description="Ready replicas that acknowledged this generation.")
    last_change_time: Time | None = Field(default=None, description="When the settings were changed last.")
    last_reason: Word | None = Field(default=None, description="Why they were changed last.")
    last_message: Sentence | None = Field(default=None, description="Why they were changed last, with the figures.")
    rolled_back: bool = Field(default=False, description="Whether the last change took an earlier one back.")


class Tokens(Part):
    min: int = Field(description="Smallest number of tokens, inclusive.")
    max: int | None = Field(default=None, description="Largest number of tokens, exclusive. No limit when absent.")


class ClassStatus(Part):
    name: Word = Field(description="Name of the class.")
    input_tokens: Tokens = Field(description="Length of the prompt, as it is really told apart.")
    output_tokens: Tokens = Field(description="Length of the answer, as it is really told apart.")
    share_percent: int | None = Field(default=None, description="Share of the requests.")
    input_tokens_mean: int | None = Field(default=None, description="Mean length of the prompts.")
    output_tokens_mean: int | None = Field(default=None, description="Mean length of the answers.")
    ttft_p95_milliseconds: int | None = Field(
        default=None, description="Time to the first token of requests that ended, 95th percentile."
    )
    itl_p95_milliseconds: int | None = Field(default=None, description="Time between two tokens, likewise.")
    end_to_end_p95_milliseconds: int | None = Field(default=None, description="Time to the last token, likewise.")


class TrafficStatus(Part):
    window_seconds: int | None = Field(default=None, description="Time over which the rates are taken.")
    arrival_rate: float | None = Field(
        default=None, description="Requests per second, in two significant digits; follows changes above a tenth."
    )
    dominant_class: Word | None = Field(default=None, description="Class with the largest share of the requests.")
    classes: tuple[ClassStatus, ...] = Field(
        default=(), max_length=9, description="The mix of requests.", json_schema_extra=ATOMIC
    )


class ObjectivesStatus(Part):
    ttft_p95_milliseconds: int | None = Field(default=None, description="Time to the first token, 95th percentile.")
    itl_p95_milliseconds: int | None = Field(default=None, description="Time between two tokens, 95th percentile.")
    queue_p95_milliseconds: int | None = Field(default=None, description="Time in the queue, 95th percentile.")
    end_to_end_p95_milliseconds: int | None = Field(
        default=None, description="Time to the last token of requests that ended, 95th percentile."
    )
    attainment_percent: int | None = Field(
        default=None, description="Share that kept to the goal which was kept to least, rounded down."
    )


class DecisionStatus(Part):
    time: Time = Field(description="When it was taken.")
    action: Word = Field(description="Hold, ScaleUp, ScaleDown or Retune.")
    reason: Word = Field(description="Why, as one CamelCase word.")
    message: Sentence = Field(description="Why, as a sentence with the figures.")
    replicas: int = Field(description="Replicas that were chosen.")
    wanted: int | None = Field(default=None, description="Replicas that the load asked for, before any bound.")
    bounded_by: tuple[Word, ...] = Field(
        default=(),
        max_length=16,
        description="Rules that changed the wanted number, in order.",
        json_schema_extra=ATOMIC,
    )
    bottleneck: Word = Field(default="None", description="What is scarcest: Prefill, Decode, KV, Queue or None.")
    binding: Word | None = Field(
        default=None, description="Goal that limits a replica, such as ttft or ttft:CLASS. Absent: it is simply full."
    )
    inputs: dict[str, float] = Field(
        default_factory=dict, max_length=64, description="Values of the formula, to recompute the number by hand."
    )


class AutoscalingStatus(Part):
    mode: ScalingMode = Field(description="Who sets the number of replicas now.")
    desired_replicas: int = Field(description="Replicas that should run.")
    wanted_replicas: int | None = Field(
        default=None, description="Replicas that the load asks for, before bounds and behavior."
    )
    last_scale_time: Time | None = Field(default=None, description="When the number of replicas was changed last.")
    last_decision: DecisionStatus | None = Field(
        default=None, description="The newest decision; written anew when its kind or reason changes."
    )
    decisions: tuple[DecisionStatus, ...] = Field(
        default=(),
        max_length=HISTORY_LENGTH,
        description="The last decisions that changed something, newest last.",
        json_schema_extra=ATOMIC,
    )
    memory: Annotated[str, Field(max_length=32768)] = Field(
        default="", description="What the operator needs for its next decision, as JSON; not for users."
    )


class CostStatus(Part):
    gpu: Word = Field(description="Product that the price is of.")
    gpus: int = Field(description="GPUs that the pods hold.")
    dollars_per_hour: float = Field(description="What these cost.")
    dollars_per_million_output_tokens: float | None = Field(
        default=None, description="By the tokens that were generated in the window; two significant digits."
    )
    price: Literal["Default", "Installation"] = Field(
        description="Whose price: the operator's table, which only compares GPUs, or the chart's gpuPrices."
    )


class MetricsStatus(Part):
    state: MetricsState = Field(description="Whether measurements are at hand.")
    last_sample_time: Time | None = Field(
        default=None, description="About the time of the last sample, written once they stop coming."
    )


class Status(Part):
    """What the operator saw and does."""

    observed_generation: int | None = Field(
        default=None, description="`metadata.generation` that this status is about."
    )
    replicas: int | None = Field(default=None, description="Engine pods, without those that drain.")
    ready_replicas: int | None = Field(default=None, description="Pods that serve.")
    available_replicas: int | None = Field(default=None, description="Pods that serve; the same as readyReplicas.")
    updated_replicas: int | None = Field(default=None, description="Pods of the newest version.")
    starting_replicas: int | None = Field(default=None, description="Pods that pull images or load the model.")
    draining_replicas: int | None = Field(default=None, description="Pods that finish their requests and end.")
    unschedulable_replicas: int | None = Field(default=None, description="Pods that no node has room for.")
    selector: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="Selector of the pods, for the scale subresource."
    )
    url: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="Address of the OpenAI API inside the cluster."
    )
    batching: BatchingStatus | None = Field(default=None, description="The live batch settings.")
    traffic: TrafficStatus | None = Field(default=None, description="The requests that were seen.")
    objectives: ObjectivesStatus | None = Field(default=None, description="What was measured of the latency goals.")
    autoscaling: AutoscalingStatus | None = Field(default=None, description="The number of replicas and its reasons.")
    cost: CostStatus | None = Field(default=None, description="What the GPUs cost now, where a price is known.")
    metrics: MetricsStatus | None = Field(default=None, description="The state of the measurements.")
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=32,
        description="Statements about the object, one of each type.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
