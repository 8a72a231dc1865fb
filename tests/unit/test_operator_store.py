"""The store: newer beats older, lists correct what watches lost."""

from typing import Any

from tidegate_operator.resources import CHILDREN, DEPLOYMENTS, LLM_DEPLOYMENTS, PODS, key_of, slim
from tidegate_operator.store import Store

OWNER = {"kind": "ReplicaSet", "name": "m-abc", "uid": "o", "controller": True}


def thing(name: str, version: int, **more: Any) -> dict[str, Any]:
    labels = {"tidegate.dev/deployment": more.pop("of", "m")}
    metadata = {"namespace": "n", "name": name, "uid": name, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata | more}


def test_older_news_is_no_news() -> None:
    store = Store()
    assert store.put(PODS, thing("a", 5))
    assert not store.put(PODS, thing("a", 5))
    assert not store.put(PODS, thing("a", 4))
    assert store.put(PODS, thing("a", 6))


def test_a_late_deletion_does_not_remove_what_was_made_anew() -> None:
    store = Store()
    store.put(DEPLOYMENTS, thing("a", 9))
    assert not store.drop(DEPLOYMENTS, thing("a", 8))
    assert store.get(DEPLOYMENTS, ("n", "a")) is not None
    assert store.drop(DEPLOYMENTS, thing("a", 10))
    assert store.get(DEPLOYMENTS, ("n", "a")) is None


def test_pods_are_found_by_their_object_also_when_they_change_it_or_go() -> None:
    store = Store()
    store.put(PODS, thing("b", 1))
    store.put(PODS, thing("a", 2))
    store.put(PODS, thing("c", 3, of="other"))
    assert [pod["metadata"]["name"] for pod in store.pods_of(("n", "m"))] == ["a", "b"]
    store.put(PODS, thing("a", 4, of="other"))
    store.drop(PODS, thing("b", 5))
    assert store.pods_of(("n", "m")) == []
    assert len(store.pods_of(("n", "other"))) == 2


def test_a_list_shows_what_was_missed_and_settling_it_tells_whose_it_is() -> None:
    store = Store()
    store.put(PODS, thing("ghost", 1))
    store.put(PODS, thing("same", 2))
    store.put(PODS, thing("old", 3))
    suspects = store.differences(PODS, [thing("same", 2), thing("old", 7), thing("new", 8)], "n")
    assert {suspect.address[1] for suspect in suspects} == {"ghost", "old", "new"}
    assert [store.settle(suspect) for suspect in suspects] == [("n", "m")] * 3
    assert store.differences(PODS, [thing("same", 2), thing("old", 7), thing("new", 8)], "n") == []


def test_what_a_watch_explained_meanwhile_was_not_missed() -> None:
    store = Store()
    store.put(PODS, thing("going", 1))
    suspects = store.differences(PODS, [thing("coming", 8)], "n")
    store.drop(PODS, thing("going", 9))
    store.put(PODS, thing("coming", 8))
    assert [store.settle(suspect) for suspect in suspects] == [None, None]


def test_an_object_that_came_after_the_list_is_not_taken_for_a_ghost() -> None:
    store = Store()
    store.put(PODS, thing("a", 1))
    (suspect,) = store.differences(PODS, [], "n")
    store.put(PODS, thing("a", 5))
    assert store.settle(suspect) is None
    assert store.get(PODS, ("n", "a")) is not None


def test_a_list_of_one_namespace_says_nothing_about_others() -> None:
    store = Store()
    store.put(PODS, thing("a", 1))
    assert store.differences(PODS, [], "elsewhere") == []
    assert len(store.differences(PODS, [], None)) == 1


def test_only_what_is_needed_is_kept_of_a_pod() -> None:
    body = thing("a", 1, managedFields=[{"big": 1}], ownerReferences=[OWNER]) | {
        "spec": {"nodeName": "n", "containers": [{}]},
        "status": {"podIP": "10.0.0.1", "hostIPs": []},
    }
    kept = slim(PODS, body)
    assert kept["spec"] == {"nodeName": "n"}
    assert kept["status"] == {"podIP": "10.0.0.1"}
    assert kept["metadata"]["owner"] == "o"
    assert kept["metadata"]["replicaSet"] == "m-abc"
    assert "managedFields" not in kept["metadata"]


def test_an_object_is_about_itself_and_a_child_about_its_label() -> None:
    assert key_of(LLM_DEPLOYMENTS, thing("x", 1)) == ("n", "x")
    assert key_of(CHILDREN["Service"], thing("x", 1)) == ("n", "m")
    assert key_of(PODS, {"metadata": {"namespace": "n", "name": "stray"}}) is None
