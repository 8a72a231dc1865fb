"""The operator's own death and absence: what was begun is finished, and deletion needs nobody."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

KINDS = (
    ("deployments", ""),
    ("services", ""),
    ("serviceaccounts", ""),
    ("poddisruptionbudgets", ""),
    ("configmaps", "-engine"),
)
"""What the operator makes for each object, and what follows the object's name in theirs."""


def test_killed_in_the_middle_of_its_work_the_operator_comes_back_and_finishes(fleet: Any, objects: Any) -> None:
    names = [f"interrupted-{n}" for n in range(24)]
    manifests = [objects.modelled(name, replicas=1 if name == names[0] else 0) for name in names]

    def begun() -> int:
        found = fleet.kubectl("get", "serviceaccounts", "-l=app.kubernetes.io/managed-by=tidegate-operator", "-o=name")
        return sum("interrupted-" in line for line in found.splitlines())

    with ThreadPoolExecutor(1) as pool:
        applying = pool.submit(fleet.apply, *manifests)
        fleet.until("the operator has begun", begun)
        killed = fleet.kill_operator()
        assert begun() < len(names), "the operator was through before it was killed"
        applying.result()

    def converged() -> bool:
        found = json.loads(fleet.kubectl("get", "lld", "--output=json"))["items"]
        seen = {item["metadata"]["name"]: item for item in found}
        return all(
            (seen[name].get("status") or {}).get("observedGeneration") == seen[name]["metadata"]["generation"]
            for name in names
        )

    fleet.until("every object has its status", converged, timeout_seconds=90)
    for kind, suffix in KINDS:
        items = {item["metadata"]["name"]: item for item in fleet.all_of(kind)}
        owners = {name: items[name + suffix]["metadata"]["ownerReferences"][0]["name"] for name in names}
        assert owners == dict(zip(names, names, strict=True))
    fleet.wait_ready(names[0])
    assert fleet.operator_container() != killed
    fleet.kubectl("delete", "lld", *names, "--wait=false")


def test_deletion_leaves_nothing_behind(fleet: Any, objects: Any) -> None:
    fleet.apply(objects.modelled("short-lived", drain={"timeoutSeconds": 5, "endpointRemovalSeconds": 0}))
    fleet.wait_ready("short-lived")
    assert fleet.children("short-lived")
    fleet.kubectl("delete", "lld", "short-lived", "--timeout=30s")
    fleet.wait_gone("short-lived")


def test_deletion_leaves_nothing_behind_when_the_operator_is_gone_first(fleet: Any, objects: Any) -> None:
    fleet.apply(objects.modelled("orphan", drain={"timeoutSeconds": 5, "endpointRemovalSeconds": 0}))
    fleet.wait_ready("orphan")
    fleet.kubectl("scale", "deployment", "tidegate", "--replicas=0")
    try:
        fleet.kubectl("wait", "pods", "-l=app.kubernetes.io/name=tidegate-operator", "--for=delete", "--timeout=60s")
        fleet.kubectl("delete", "lld", "orphan", "--timeout=30s")
        fleet.wait_gone("orphan")
    finally:
        fleet.kubectl("scale", "deployment", "tidegate", "--replicas=1")
        fleet.kubectl("rollout", "status", "deployment/tidegate", "--timeout=60s")
