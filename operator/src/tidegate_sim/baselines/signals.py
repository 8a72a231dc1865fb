"""What a policy reads out of a view: newest levels, the most and rates over a window, of a pod and of all pods.

Pure. A reading that is not there, or older than `STALE_SECONDS`, is None: each policy says what it makes of that.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from tidegate_engine.settings import OSL_EDGES
from tidegate_operator.demand import PodSample
from tidegate_operator.observation import ReplicaPhase
from tidegate_sim.controller import FleetView, PodView

STALE_SECONDS = 60.0
"""Prometheus marks a series stale when its target stops to answer; no policy here may use older samples."""
PENDING_PHASES = frozenset(
    (
        ReplicaPhase.STARTING,
        ReplicaPhase.PULLING,
        ReplicaPhase.UNSCHEDULABLE,
        ReplicaPhase.GATED,
        ReplicaPhase.PULL_FAILED,
    )
)
"""Pods whose `status.phase` is Pending: no container of theirs runs yet. A pod that loads weights is Running."""


def listed(view: FleetView) -> list[PodView]:
    """Pods that no one has deleted."""
    return [pod for pod in view.pods if pod.replica.phase != ReplicaPhase.DRAINING]


def ready(view: FleetView) -> list[PodView]:
    return [pod for pod in view.pods if pod.replica.phase == ReplicaPhase.READY]


def newest(pod: PodView, *key: str, now: float) -> float | None:
    """A level, or a counter's stand, as of the last scrape."""
    sample = _newest_sample(pod, now)
    return None if sample is None else sample.values.get(key)


def newest_total(pods: Sequence[PodView], *key: str, now: float) -> float | None:
    """Sum over the pods that tell it; None when none does."""
    values = [value for pod in pods if (value := newest(pod, *key, now=now)) is not None]
    return sum(values) if values else None


def _newest_sample(pod: PodView, now: float) -> PodSample | None:
    if not pod.samples or now - pod.samples[-1].at > STALE_SECONDS:
        return None
    return pod.samples[-1]


def within(pod: PodView, *, now: float, window_seconds: float) -> Sequence[PodSample]:
    """Samples of the window, oldest first; the one at its very beginning counts."""
    first = len(pod.samples)
    while first > 0 and pod.samples[first - 1].at >= now - window_seconds - 0.5:
        first -= 1
    return pod.samples[first:]


def max_level(pod: PodView, *key: str, now: float, window_seconds: float) -> float | None:
    samples = within(pod, now=now, window_seconds=window_seconds)
    return max((sample.values[key] for sample in samples if key in sample.values), default=None)


def rate(pod: PodView, name: str, *, now: float, window_seconds: float) -> float | None:
    """Increase a second of a counter, all its labels summed; a counter that fell was reset."""
    samples = within(pod, now=now, window_seconds=window_seconds)
    if len(samples) < 2 or now - samples[-1].at > STALE_SECONDS:
        return None
    stands = [_summed(sample, name) for sample in samples]
    gained = sum(after - before if after >= before else after for before, after in pairwise(stands))
    return gained / (samples[-1].at - samples[0].at)


def total_rate(pods: Sequence[PodView], name: str, *, now: float, window_seconds: float) -> float | None:
    rates = [each for pod in pods if (each := rate(pod, name, now=now, window_seconds=window_seconds)) is not None]
    return sum(rates) if rates else None


def _summed(sample: PodSample, name: str) -> float:
    plain = sample.values.get((name,))
    if plain is not None:
        return plain
    return sum(value for key, value in sample.values.items() if key[0] == name)


def mean_output_tokens(pods: Sequence[PodView], *, now: float, window_seconds: float) -> float | None:
    """Mean length of the answers that ended in the window; None when none did.

    A frontend that counts whole answers knows it. Tokens made over answers ended would be more while load rises and
    less while it falls, so lengths come from the cells, put right by the ratio of the two since the pods began.
    """
    ended: dict[int, float] = {}
    since: dict[int, float] = {}
    made = 0.0
    for pod in pods:
        samples = within(pod, now=now, window_seconds=window_seconds)
        if len(samples) < 2:
            continue
        for key, stand in samples[-1].values.items():
            if key[0] == "finished":
                edge, before = int(key[2]), samples[0].values.get(key, 0.0)
                ended[edge] = ended.get(edge, 0.0) + (stand - before if stand >= before else stand)
                since[edge] = since.get(edge, 0.0) + stand
        made += samples[-1].values.get(("generation_tokens",), 0.0)
    count, in_cells = sum(ended.values()), _tokens_in_cells(since)
    if count <= 0 or in_cells <= 0:
        return None
    return _tokens_in_cells(ended) / count * min(2.0, max(0.5, made / in_cells))


def _tokens_in_cells(cells: Mapping[int, float]) -> float:
    """Each answer in the geometric middle of its cell."""
    total = 0.0
    for edge, count in cells.items():
        above = next((other for other in OSL_EDGES if other > edge), 2 * edge)
        total += count * math.sqrt(max(1, edge) * above)
    return total


def kv_used_ratio(sample: PodSample) -> float | None:
    """Blocks that running requests hold, of all; blocks that only the prefix cache keeps are free for vLLM's gauge."""
    states = {key[1]: value for key, value in sample.values.items() if key[0] == "kv_blocks"}
    blocks = sum(states.values())
    return states.get("used", 0.0) / blocks if blocks > 0 else None


class WindowedCounter:
    """Stands of an exact counter as a ticking policy saw them, for the increase over its own windows."""

    def __init__(self, keep_seconds: float) -> None:
        self._keep_seconds = keep_seconds
        self._stands: list[tuple[float, float]] = []

    def record(self, at: float, stand: float) -> None:
        self._stands.append((at, stand))
        # One older than the window stays, so that the window's beginning lies between two stands.
        while len(self._stands) > 2 and self._stands[1][0] <= at - self._keep_seconds:
            del self._stands[0]

    def rate(self, window_seconds: float) -> float | None:
        """Increase a second over the last `window_seconds`, or over what there is; None before two stands."""
        if len(self._stands) < 2:
            return None
        at, stand = self._stands[-1]
        begin = max(at - window_seconds, self._stands[0][0])
        return (stand - self._stand_at(begin)) / (at - begin)

    def _stand_at(self, at: float) -> float:
        for (before, low), (after, high) in zip(self._stands, self._stands[1:], strict=False):
            if before <= at <= after:
                return low + (high - low) * (at - before) / (after - before)
        return self._stands[0][1]
