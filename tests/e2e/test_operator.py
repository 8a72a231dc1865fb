"""The operator's own death and absence: what was begun is finished, and deletion needs nobody."""

from typing import Any

from tidegate_local import recording

KINDS = ("deployment", "service", "serviceaccount", "poddisruptionbudget")


def test_killed_in_the_middle_of_its_work_the_operator_comes_back_and_finishes(fleet: Any, objects: Any) -> None:
    names = [f"interrupted-{n}" for n in range(8)]
    fleet.apply(*(objects.modelled(name, replicas=1 if n == 7 else 0) for n, name in enumerate(names)))
    fleet.until("the operator has begun", lambda: any(fleet.children(name) for name in names))
    killed = fleet.kill_operator()
    done_before = [name for name in names if len(fleet.children(name)) >= 5]
    assert len(done_before) < len(names), "the operator was through before it could be killed"

    def converged() -> bool:
        for name in names:
            found = fleet.get(name)
            if (
                recording.number((found.get("status") or {}).get("observedGeneration"))
                != found["metadata"]["generation"]
            ):
                return False
        return True

    fleet.until("every object has its status", converged, timeout_seconds=90)
    for name in names:
        for kind in KINDS:
            assert fleet.get(name, kind)["metadata"]["ownerReferences"][0]["name"] == name
        assert fleet.get(f"{name}-engine", "configmap")
    fleet.wait_ready("interrupted-7")
    assert fleet.kill_operator() != killed
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
