"""What goes wrong is said in conditions, and what still works goes on working."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tidegate_local import model

BROKEN_BYTES = 256 * 1024


@pytest.fixture(scope="module", autouse=True)
def broken(fleet: Any, objects: Any) -> Iterator[None]:
    fleet.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "truncated", "namespace": "tidegate"},
            "binaryData": {"model.gguf": base64.b64encode(beginning_of_the_model()).decode()},
        },
        objects.real("absent-model", "file:///models/no-such-model.gguf"),
        objects.real(
            "truncated-model",
            "file:///truncated/model.gguf",
            podTemplate={
                "volumes": [{"name": "truncated", "configMap": {"name": "truncated"}}],
                "volumeMounts": [{"name": "truncated", "mountPath": "/truncated", "readOnly": True}],
            },
        ),
        objects.modelled("cramped", replicas=2, resources={"gpu": {"count": 10}, "requests": {"cpu": "20m"}}),
    )
    yield
    fleet.kubectl("delete", "lld", "absent-model", "truncated-model", "cramped", "--wait=false")


def beginning_of_the_model() -> bytes:
    with model.path().open("rb") as file:
        return file.read(BROKEN_BYTES)


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("absent-model", "ModelNotFound", "/models/no-such-model.gguf"),
        ("truncated-model", "ModelInvalid", "/truncated/model.gguf"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_told_in_the_conditions(
    fleet: Any, name: str, reason: str, words: str
) -> None:
    def told() -> bool:
        condition = fleet.condition(name, "ModelReady")
        return bool(condition.get("status") == "False" and condition.get("reason") == reason)

    fleet.until(f"ModelReady says {reason}", told, timeout_seconds=60, name=name)
    assert words in fleet.condition(name, "ModelReady")["message"]
    ready = fleet.condition(name, "Ready")
    assert ready["status"] == "False" and ready["reason"] == reason


def test_a_crash_loop_never_stands_without_its_reason(fleet: Any) -> None:
    def crashed_again() -> bool:
        pods = fleet.pods("absent-model")
        return any(status["restartCount"] > 0 for pod in pods for status in pod["status"].get("containerStatuses", []))

    fleet.until("the engine was started again", crashed_again, timeout_seconds=60, name="absent-model")
    condition = fleet.condition("absent-model", "ModelReady")
    assert (condition["status"], condition["reason"]) == ("False", "ModelNotFound")


def test_pods_that_no_node_has_room_for_are_said_and_the_rest_goes_on(fleet: Any) -> None:
    """Thirty-eight GPUs hold three replicas of ten; the fourth waits, and the three serve and take new settings."""
    fleet.until("two pods are ready", lambda: len(fleet.ready_pods("cramped")) == 2, name="cramped")
    fleet.patch("cramped", {"replicas": 4})
    condition = fleet.wait_condition("cramped", "CapacityAvailable", "False")
    assert condition["reason"] == "Unschedulable" and "nvidia.com/gpu" in condition["message"]
    assert fleet.get("cramped")["status"]["unschedulableReplicas"] >= 1
    body = {"model": "cramped", "prompt": "hello", "max_tokens": 2}
    assert httpx.post(f"{fleet.url('cramped')}/v1/completions", json=body, timeout=30).status_code == 200
    fleet.patch("cramped", {"batching": {"mode": "Fixed", "maxSequences": {"initial": 7}}})

    def applied() -> bool:
        status = fleet.get("cramped")["status"]
        batching = status["batching"]
        return bool(
            batching["desired"]["maxSequences"] == 7 and batching["appliedReplicas"] == status["readyReplicas"] >= 2
        )

    fleet.until("the pods that run have the new settings", applied, name="cramped")
    fleet.patch("cramped", {"replicas": 1})
    fleet.wait_condition("cramped", "CapacityAvailable", "True")
