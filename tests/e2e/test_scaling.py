"""One story of a fleet: it grows under load, holds while its Prometheus is gone, and shrinks when it sees again."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tidegate_local import load

NAME = "scaled"
KIND = load.TrafficClass("chat", (20, 60), (40, 60))
BLIND_SECONDS = 20.0
"""How long the idle fleet is watched without metrics: several times its scale-down window."""


@dataclass
class Story:
    """What was seen, in order."""

    peak_replicas: int = 0
    blind_reason: str = ""
    blind_replicas: tuple[int, ...] = ()
    small_again: bool = False
    failures: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def story(fleet: Any, objects: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    fleet.apply(
        objects.modelled(
            NAME,
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
    )
    yield tell(fleet, tmp_path_factory.mktemp("story"))
    fleet.kubectl("delete", "lld", NAME, "--wait=false")


def tell(fleet: Any, folder: Path) -> Story:
    seen = Story()
    fleet.wait_ready(NAME)
    # 4 slots of 10 tokens a second and 50 tokens a request: 0.8 requests a second fill a replica.
    sending = fleet.send(NAME, (load.Phase("peak", 75, 1.6, (KIND,)),), folder)
    fleet.until("more replicas are ready", lambda: len(fleet.ready_pods(NAME)) > 1, timeout_seconds=75, name=NAME)
    fleet.cluster.stop_prometheus()
    try:
        blind = fleet.wait_condition(NAME, "MetricsAvailable", "False", timeout_seconds=45)
        seen.blind_reason = str(blind["reason"])
        seen.peak_replicas = fleet.get(NAME, "deployment")["spec"]["replicas"]
        outcomes = sending.finish()
        seen.failures = tuple(outcome.failure for outcome in outcomes if outcome.failure)
        seen.blind_replicas = watch(fleet, BLIND_SECONDS)
    finally:
        fleet.cluster.start_prometheus()
    fleet.wait_condition(NAME, "MetricsAvailable", "True")
    fleet.until(
        "one replica is left",
        lambda: fleet.get(NAME, "deployment")["spec"]["replicas"] == 1 and len(fleet.pods(NAME)) == 1,
        timeout_seconds=150,
        name=NAME,
    )
    seen.small_again = True
    return seen


def watch(fleet: Any, seconds: float) -> tuple[int, ...]:
    """The Deployment's replicas over a stretch of time, a look every second."""
    counts = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        counts.append(int(fleet.get(NAME, "deployment")["spec"]["replicas"]))
        time.sleep(1)
    return tuple(counts)


def test_replicas_grow_under_load(story: Story) -> None:
    assert story.peak_replicas > 1


def test_no_request_is_lost_while_the_fleet_grows(story: Story) -> None:
    assert story.failures == ()


def test_without_prometheus_replicas_do_not_fall_and_the_condition_says_why(story: Story) -> None:
    assert story.blind_replicas and min(story.blind_replicas) == story.peak_replicas
    assert story.blind_reason in ("PrometheusError", "MetricsStale", "MetricsMissing")


def test_the_fleet_shrinks_when_metrics_come_back_and_show_no_load(story: Story) -> None:
    assert story.small_again
