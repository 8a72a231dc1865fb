from typing import Any

from tidegate_local import targets


def pod(name: str, *, phase: str, address: str | None) -> dict[str, Any]:
    status = {"phase": phase} | ({"podIP": address} if address else {})
    return {"metadata": {"name": name, "namespace": "team"}, "status": status}


def test_running_pods_become_targets_with_their_names() -> None:
    assert targets.targets([pod("a", phase="Running", address="10.244.0.2")]) == [
        {"targets": ["10.244.0.2:8001"], "labels": {"namespace": "team", "pod": "a"}}
    ]


def test_pods_that_do_not_run_or_have_no_address_are_left_out() -> None:
    waiting = [pod("a", phase="Pending", address=None), pod("b", phase="Succeeded", address="10.244.0.3")]
    assert targets.targets(waiting) == []


def test_the_order_of_targets_does_not_depend_on_the_order_of_pods() -> None:
    pods = [pod(str(n), phase="Running", address=f"10.244.0.{n}") for n in range(2, 6)]
    assert targets.targets(pods) == targets.targets(reversed(pods))
