"""Views of small fleets, as a simulated cluster would show them."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from tidegate_engine.settings import BatchSettings
from tidegate_engine.steptime import StepModel
from tidegate_operator.demand import PodSample
from tidegate_operator.observation import Replica, ReplicaPhase
from tidegate_sim.baselines.plant import Plant
from tidegate_sim.controller import FleetView, GatewayView, PodView

NOW = 10_000.0
Values = Mapping[tuple[str, ...], float]


def make_pod(phase: ReplicaPhase = ReplicaPhase.READY, *samples: tuple[float, Values], **levels: float) -> PodView:
    """A pod whose newest scrape has `levels`, or one with all of its (time, values) samples."""
    made = [PodSample(at, values) for at, values in samples]
    if levels:
        made.append(PodSample(NOW, {(name,): value for name, value in levels.items()}))
    return PodView(Replica(name="pod", uid="uid", ip=None, phase=phase, created_at=0.0), tuple(made))


def make_view(
    pods: Sequence[PodView] = (),
    *,
    now: float = NOW,
    desired: int | None = None,
    arrivals: float = 0.0,
    in_flight_seconds: float = 0.0,
    held: float = 0.0,
) -> FleetView:
    return FleetView(
        now=now,
        desired_replicas=len(pods) if desired is None else desired,
        pods=tuple(pods),
        gateway=GatewayView(arrivals, held, in_flight_seconds, held),
        settings=BatchSettings(64, 4096, 1024),
    )


@pytest.fixture
def pod() -> Callable[..., PodView]:
    return make_pod


@pytest.fixture
def view() -> Callable[..., FleetView]:
    return make_view


@pytest.fixture
def now() -> float:
    return NOW


@pytest.fixture
def plant() -> Plant:
    """Ten milliseconds a step, and a hundred microseconds a token: sums that can be done by hand."""
    step = StepModel(
        base_seconds=0.01,
        threshold_tokens=0,
        token_seconds=1e-4,
        kv_token_seconds=0.0,
        sequence_seconds=0.0,
        attention_seconds=0.0,
        mixed_kv_token_seconds=0.0,
    )
    return Plant(
        step=step,
        kv_tokens=100_000,
        settings=BatchSettings(max_num_seqs=64, max_num_batched_tokens=1000, long_prefill_token_threshold=1000),
        ttft_seconds=0.5,
        itl_seconds=0.05,
        start_seconds=60.0,
        highest_replicas=20,
    )
