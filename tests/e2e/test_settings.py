"""Live batch settings on running pods: changed under load without a restart or a lost request, wrong ones refused."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tidegate_local import load
from tidegate_operator import tokens

NAME = "retuned"
KIND = load.TrafficClass("short", (20, 60), (20, 40))


@pytest.fixture(scope="module", autouse=True)
def retuned(fleet: Any, objects: Any) -> Iterator[None]:
    fleet.apply(objects.modelled(NAME, replicas=2))
    yield
    fleet.kubectl("delete", "lld", NAME, "--wait=false")


def sequences(value: int) -> dict[str, object]:
    return {"batching": {"mode": "Fixed", "maxSequences": {"initial": value}}}


def test_settings_change_on_running_pods_without_a_restart_or_a_lost_request(fleet: Any, tmp_path: Path) -> None:
    fleet.wait_ready(NAME)
    before = {pod.uid for pod in fleet.ready_pods(NAME)}
    assert len(before) == 2
    sending = fleet.send(NAME, (load.Phase("steady", 20, 4, (KIND,)),), tmp_path)
    fleet.until("the first requests have ended", lambda: len(sending.outcomes()) > 3)
    for value in (3, 40, 1, 17, 64):
        fleet.patch(NAME, sequences(value))

        def acknowledged(value: int = value) -> bool:
            batching = fleet.get(NAME)["status"]["batching"]
            return bool(batching["desired"]["maxSequences"] == value and batching["appliedReplicas"] == 2)

        fleet.until(f"both pods run with {value} sequences", acknowledged, timeout_seconds=30, name=NAME)
        for pod in fleet.pods(NAME):
            metrics = httpx.get(f"{fleet.admin_url(pod)}/metrics").text
            effective = [
                float(line.rsplit(" ", 1)[1])
                for line in metrics.splitlines()
                if line.startswith("tidegate_engine_batching_limit{")
                and 'name="max_num_seqs"' in line
                and 'kind="effective"' in line
            ]
            assert effective == [value]
    outcomes = sending.finish()
    assert [outcome.failure for outcome in outcomes if outcome.failure] == []
    after = fleet.ready_pods(NAME)
    assert {pod.uid for pod in after} == before
    assert [pod.restarts for pod in after] == [0, 0]


def operators_token(fleet: Any) -> str:
    """A token as the operator makes them, from its own key, which an administrator may read."""
    ring = tokens.read_secret(fleet.get("tidegate-admin-keys", "secret")["data"])
    assert ring is not None
    return tokens.sign(ring, audience=fleet.get(NAME)["metadata"]["uid"], now=time.time())


def test_a_wrong_settings_value_is_refused_and_changes_nothing(fleet: Any) -> None:
    fleet.wait_ready(NAME)
    url = f"{fleet.admin_url(fleet.pods(NAME)[0])}/admin/v1/batching"
    assert httpx.get(url).status_code == 401
    headers = {"Authorization": f"Bearer {operators_token(fleet)}"}
    before = httpx.get(url, headers=headers).json()
    for query in ("?dryRun=true", ""):
        refused = httpx.patch(url + query, json={"max_num_seqs": 1_000_000}, headers=headers)
        assert refused.status_code == 422
        error = refused.json()["error"]
        assert error["field"] == "max_num_seqs" and error["allowed"] == before["envelope"]["max_num_seqs"]
    assert httpx.get(url, headers=headers).json()["spec"] == before["spec"]


def test_the_api_server_refuses_settings_outside_their_bounds(fleet: Any) -> None:
    with pytest.raises(Exception, match="initial must lie between min and max"):
        fleet.patch(NAME, {"batching": {"maxSequences": {"min": 1, "max": 8, "initial": 9}}})
