"""The operator's own death and absence: what was begun is finished, and deletion needs nobody."""

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

    def unfinished() -> list[str]:
        """Objects without status, and children that are not there."""
        objects_now = {item["metadata"]["name"]: item for item in fleet.all_of("lld")}
        missing = [
            name
            for name in names
            if (objects_now[name].get("status") or {}).get("observedGeneration")
            != objects_now[name]["metadata"]["generation"]
        ]
        for kind, suffix in KINDS:
            owners = {item["metadata"]["name"]: item["metadata"].get("ownerReferences") for item in fleet.all_of(kind)}
            missing += [
                f"{kind}/{name}{suffix}"
                for name in names
                if [owner["name"] for owner in owners.get(name + suffix) or []] != [name]
            ]
        return missing

    fleet.until(
        "every object has its status and its children", lambda: not unfinished(), timeout_seconds=90, name=names[-1]
    )
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
