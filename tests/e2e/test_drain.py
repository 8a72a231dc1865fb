"""A scale-down with long streams in flight: the pod that goes finishes them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidegate_local import load

NAME = "drained"
STREAM_TOKENS = 600
"""At ten steps a second: sixty seconds."""


@pytest.fixture(scope="module", autouse=True)
def drained(fleet: Any, objects: Any) -> Iterator[None]:
    fleet.apply(objects.modelled(NAME, replicas=2))
    yield
    fleet.kubectl("delete", "lld", NAME, "--wait=false")


def test_a_stream_of_sixty_seconds_survives_the_scale_down_of_its_pod(fleet: Any, tmp_path: Path) -> None:
    fleet.wait_ready(NAME)
    fleet.until("two pods are ready", lambda: len(fleet.ready_pods(NAME)) == 2, name=NAME)
    long = load.TrafficClass("long", (10, 20), (STREAM_TOKENS, STREAM_TOKENS))
    short = load.TrafficClass("short", (10, 20), (3, 5))
    streams = fleet.send(NAME, (load.Phase("streams", 1, 12, (long,)),), tmp_path, seed=5)
    running = fleet.until("both pods stream", lambda: busy_pods(fleet) == 2 and time.time(), name=NAME)
    fleet.patch(NAME, {"replicas": 1})
    new_ones = fleet.send(NAME, (load.Phase("new ones", 40, 2, (short,)),), tmp_path, seed=6)
    fleet.until("one pod is draining", lambda: fleet.get(NAME)["status"].get("drainingReplicas") == 1, name=NAME)
    fleet.until("one pod is left", lambda: len(fleet.pods(NAME)) == 1, timeout_seconds=100, name=NAME)
    gone_after = time.time() - running
    outcomes = streams.finish()
    assert len(outcomes) > 3
    assert [outcome.failure for outcome in outcomes if outcome.failure] == []
    assert {outcome.output_tokens for outcome in outcomes} == {STREAM_TOKENS}
    assert min(outcome.e2e_seconds or 0 for outcome in outcomes) > 50
    assert gone_after > 45, "the pod went before its streams could have ended"
    assert [outcome.failure for outcome in new_ones.finish() if outcome.failure] == []


def busy_pods(fleet: Any) -> int:
    return sum("requests_running 0" not in metrics for metrics in running_metrics(fleet))


def running_metrics(fleet: Any) -> list[str]:
    argv = ["get", "--raw"]
    return [
        fleet.kubectl(*argv, f"/api/v1/namespaces/tidegate/pods/{pod.name}:8001/proxy/metrics")
        for pod in fleet.ready_pods(NAME)
    ]
