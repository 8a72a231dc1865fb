"""Replicas that change under load: two stories on two objects, told at the same time, since both mostly wait.

The first fleet grows under load, holds while its Prometheus is gone, and shrinks when it sees again. The second is made
smaller while long streams run on both of its pods.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tidegate_local import load, recording

SCALED, DRAINED = "scaled", "drained"
CHAT = load.TrafficClass("chat", (20, 60), (40, 60))
STREAM_TOKENS = 600
"""At ten steps a second: sixty seconds."""
STREAM = load.TrafficClass("stream", (10, 20), (STREAM_TOKENS, STREAM_TOKENS))
SHORT = load.TrafficClass("short", (10, 20), (3, 5))
BLIND_SECONDS = 15.0
"""How long the idle fleet is watched without metrics: three times its scale-down window."""


@dataclass
class Scaling:
    """What was seen of the first fleet, in order."""

    peak_replicas: int = 0
    blind_reason: str = ""
    blind_replicas: tuple[int, ...] = ()
    small_again: bool = False
    failures: tuple[str, ...] = ()


@dataclass
class Draining:
    """What was seen of the second."""

    streams: list[load.Outcome] = field(default_factory=list)
    new_requests: list[load.Outcome] = field(default_factory=list)
    pod_stayed_seconds: float = 0.0


@dataclass(frozen=True)
class Stories:
    scaling: Future[Scaling]
    draining: Future[Draining]


@pytest.fixture(scope="module")
def stories(fleet: Any, objects: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    fleet.apply(objects.modelled(DRAINED, replicas=2), scaled_object(objects))
    with ThreadPoolExecutor(2) as pool:
        scaling = pool.submit(tell_scaling, fleet, tmp_path_factory.mktemp(SCALED))
        draining = pool.submit(tell_draining, fleet, tmp_path_factory.mktemp(DRAINED))
        yield Stories(scaling, draining)
    fleet.kubectl("delete", "lld", SCALED, DRAINED, "--wait=false")


def scaled_object(objects: Any) -> Any:
    return objects.modelled(
        SCALED,
        replicas=None,
        batching={"mode": "Fixed", "maxSequences": {"initial": 4, "max": 4}},
        objectives={"ttft": {"percentile": 95, "milliseconds": 2000}},
        autoscaling={
            "mode": "Auto",
            "minReplicas": 1,
            "maxReplicas": 3,
            "syncPeriodSeconds": 3,
            "behavior": {
                "scaleDown": {
                    "stabilizationWindowSeconds": 5,
                    "policies": [{"type": "Pods", "value": 3, "periodSeconds": 5}],
                }
            },
        },
        metrics={"staleAfterSeconds": 10},
        drain={"timeoutSeconds": 30, "endpointRemovalSeconds": 2},
    )


def tell_scaling(fleet: Any, folder: Path) -> Scaling:
    seen = Scaling()
    fleet.wait_ready(SCALED)
    # 4 slots of 10 tokens a second and 50 tokens a request: 0.8 requests a second fill a replica.
    sending = fleet.send(SCALED, (load.Phase("peak", 60, 1.6, (CHAT,)),), folder)
    fleet.until("more replicas are ready", lambda: len(fleet.ready_pods(SCALED)) > 1, timeout_seconds=60, name=SCALED)
    fleet.cluster.stop_prometheus()
    try:
        blind = fleet.wait_condition(SCALED, "MetricsAvailable", "False", timeout_seconds=45)
        seen.blind_reason = str(blind["reason"])
        seen.peak_replicas = fleet.get(SCALED, "deployment")["spec"]["replicas"]
        outcomes = sending.finish()
        seen.failures = tuple(outcome.failure for outcome in outcomes if outcome.failure)
        seen.blind_replicas = watch_replicas(fleet, BLIND_SECONDS)
    finally:
        fleet.cluster.start_prometheus()
    fleet.wait_condition(SCALED, "MetricsAvailable", "True")
    fleet.until(
        "one replica is left",
        lambda: fleet.get(SCALED, "deployment")["spec"]["replicas"] == 1 and len(fleet.pods(SCALED)) == 1,
        timeout_seconds=150,
        name=SCALED,
    )
    seen.small_again = True
    return seen


def watch_replicas(fleet: Any, seconds: float) -> tuple[int, ...]:
    """The Deployment's replicas over a stretch of time, a look every second."""
    counts = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        counts.append(int(fleet.get(SCALED, "deployment")["spec"]["replicas"]))
        time.sleep(1)
    return tuple(counts)


def tell_draining(fleet: Any, folder: Path) -> Draining:
    fleet.wait_ready(DRAINED)
    fleet.until("two pods are ready", lambda: len(fleet.ready_pods(DRAINED)) == 2, name=DRAINED)
    streams = fleet.send(DRAINED, (load.Phase("streams", 1, 12, (STREAM,)),), folder, seed=5)
    fleet.until("both pods stream", lambda: busy_pods(fleet) == 2, name=DRAINED)
    began = time.monotonic()
    fleet.patch(DRAINED, {"replicas": 1})
    new_ones = fleet.send(DRAINED, (load.Phase("new ones", 40, 2, (SHORT,)),), folder, seed=6)
    fleet.until("one pod is draining", lambda: fleet.get(DRAINED)["status"].get("drainingReplicas") == 1, name=DRAINED)
    fleet.until("one pod is left", lambda: len(fleet.pods(DRAINED)) == 1, timeout_seconds=100, name=DRAINED)
    stayed_seconds = time.monotonic() - began
    return Draining(streams.finish(), new_ones.finish(), stayed_seconds)


def busy_pods(fleet: Any) -> int:
    pages = [
        fleet.kubectl("get", "--raw", f"/api/v1/namespaces/tidegate/pods/{pod.name}:8001/proxy/metrics")
        for pod in fleet.ready_pods(DRAINED)
    ]
    return sum((recording.gauge_total(page, "tidegate_engine_requests_running") or 0) > 0 for page in pages)


def test_a_stream_of_sixty_seconds_survives_the_scale_down_of_its_pod(stories: Stories) -> None:
    seen = stories.draining.result()
    assert len(seen.streams) > 3
    assert [outcome.failure for outcome in seen.streams if outcome.failure] == []
    assert {outcome.output_tokens for outcome in seen.streams} == {STREAM_TOKENS}
    assert min(outcome.e2e_seconds or 0 for outcome in seen.streams) > 55
    assert seen.pod_stayed_seconds > 45, "the pod went before its streams could have ended"


def test_requests_that_come_while_a_pod_drains_are_all_served(stories: Stories) -> None:
    assert [outcome.failure for outcome in stories.draining.result().new_requests if outcome.failure] == []


def test_replicas_grow_under_load(stories: Stories) -> None:
    assert stories.scaling.result().peak_replicas > 1


def test_no_request_is_lost_while_the_fleet_grows(stories: Stories) -> None:
    assert stories.scaling.result().failures == ()


def test_without_prometheus_replicas_do_not_fall_and_the_condition_says_why(stories: Stories) -> None:
    seen = stories.scaling.result()
    assert seen.blind_replicas and min(seen.blind_replicas) == seen.peak_replicas
    assert seen.blind_reason in ("PrometheusError", "MetricsStale", "MetricsMissing")


def test_the_fleet_shrinks_when_metrics_come_back_and_show_no_load(stories: Stories) -> None:
    assert stories.scaling.result().small_again
