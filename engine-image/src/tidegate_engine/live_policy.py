"""What may change on a running engine beside its batch settings: queue limits, what a call may ask for, admission.

Pure: the values, their bounds, and the reading of a change. `policy_control` applies them; the flags give what an
engine starts with. The batch settings, which the operator writes, are `settings`'.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum

from tidegate_engine.context import ContextPolicy
from tidegate_engine.openai import MAX_ANSWERS
from tidegate_engine.settings import (
    MAX_QUEUE_TIMEOUT_SECONDS,
    MAX_WATERMARK,
    MIN_KV_ADMISSION,
    AdmissionPolicy,
    Violation,
)

MAX_QUEUED_REQUESTS = 1_000_000
MAX_QUEUED_TOKENS = 1 << 40
MAX_STREAM_INTERVAL = 1024
MAX_PARTIAL_PREFILLS = 4096


class SchedulingPolicy(StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"
    """A call may name its priority."""


@dataclass(frozen=True, slots=True)
class LivePolicy(AdmissionPolicy):
    """The scheduler's part and the rest. None = no limit. Names are vLLM's where it has the thing."""

    context_policy: ContextPolicy = ContextPolicy.REJECT
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    max_num_queued_reqs: int | None = None
    """More waiting requests get 429."""
    max_num_queued_tokens: int | None = None
    """While prompts of so many tokens wait, new requests get 429."""
    default_max_tokens: int | None = None
    """Of a chat's answer whose length the call does not name; None = what the context holds."""
    max_n: int = MAX_ANSWERS
    stream_interval: int = 1
    """Tokens of a chunk in a stream; the first one always goes at once."""

    @property
    def admission(self) -> AdmissionPolicy:
        """The part that the scheduler needs."""
        return AdmissionPolicy(**{each.name: getattr(self, each.name) for each in fields(AdmissionPolicy)})

    @property
    def limits(self) -> dict[str, float]:
        """What is a number or a switch, as metrics show it; what has no limit is left out."""
        values = self.as_dict().items()
        return {name: float(value) for name, value in values if isinstance(value, int | float)}

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


_CHOICES: Mapping[str, type[StrEnum]] = {"context_policy": ContextPolicy, "scheduling_policy": SchedulingPolicy}
_FRACTIONS = frozenset({"queue_timeout_s", "kv_admission_limit", "watermark", "reserve_ratio"})
_SWITCHES = frozenset({"enable_prefix_caching"})
_OPTIONAL = frozenset(
    {
        "max_num_queued_reqs", "max_num_queued_tokens", "queue_timeout_s", "default_max_tokens",
        "max_num_partial_prefills", "max_prefill_tokens_per_step", "reserve_ratio",
    }
)  # fmt: skip


def policy_bounds(*, max_model_len: int, max_num_batched_tokens: int) -> dict[str, tuple[float, float]]:
    """The inclusive bounds of the numbers, and of the switches: 0 and 1 stand for false and true.

    `max_num_batched_tokens` is the most that the envelope of the batch settings allows.
    """
    return {
        "max_num_queued_reqs": (0, MAX_QUEUED_REQUESTS),
        "max_num_queued_tokens": (1, MAX_QUEUED_TOKENS),
        "queue_timeout_s": (0.001, MAX_QUEUE_TIMEOUT_SECONDS),
        "default_max_tokens": (1, max_model_len),
        "max_n": (1, MAX_ANSWERS),
        "max_num_partial_prefills": (1, MAX_PARTIAL_PREFILLS),
        "max_prefill_tokens_per_step": (1, max_num_batched_tokens),
        "kv_admission_limit": (MIN_KV_ADMISSION, 1.0),
        "watermark": (0.0, MAX_WATERMARK),
        "reserve_ratio": (0.0, 1.0),
        "enable_prefix_caching": (0, 1),
        "stream_interval": (1, MAX_STREAM_INTERVAL),
    }


def change_policy(
    policy: LivePolicy, data: object, *, bounds: Mapping[str, tuple[float, float]]
) -> LivePolicy | Violation:
    """`policy` with the values that `data`, a PATCH body, names; or the first reason why it is refused."""
    if not isinstance(data, Mapping):
        return Violation("body", None, "the body must be a JSON object")
    known = {*_CHOICES, *bounds}
    values: dict[str, object] = {}
    for name, value in data.items():
        if name not in known:
            return Violation(str(name), None, f"{name} is unknown; known are {', '.join(sorted(known))}")
        read = _read(name, value, bounds)
        if isinstance(read, Violation):
            return read
        values[name] = read
    return replace(policy, **values)  # type: ignore[arg-type]


def _read(name: str, value: object, bounds: Mapping[str, tuple[float, float]]) -> object:
    if name in _CHOICES:
        choices = [choice.value for choice in _CHOICES[name]]
        if value not in choices:
            return Violation(name, None, f"{name} is {value!r}; allowed are {', '.join(choices)}")
        return _CHOICES[name](value)
    if name in _SWITCHES:
        refused = Violation(name, None, f"{name} is {value!r}; allowed are true and false")
        return value if isinstance(value, bool) else refused
    if value is None and name in _OPTIONAL:
        return None
    low, high = bounds[name]
    kind = "number" if name in _FRACTIONS else "whole number"
    is_kind = isinstance(value, int | float if name in _FRACTIONS else int) and not isinstance(value, bool)
    if not is_kind or not low <= value <= high:  # type: ignore[operator]
        or_null = " or null" if name in _OPTIONAL else ""
        return Violation(name, (low, high), f"{name} is {value!r}; allowed is a {kind} of {low} to {high}{or_null}")
    return value
