"""One real control plane (etcd, kube-apiserver, kube-controller-manager) for all tests here, and a namespace a test."""

import itertools
import os
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tidegate_local import cluster

ROOT = Path(__file__).parents[2]
CRD_FILE = ROOT / "crds" / "tidegate.dev_llmdeployments.yaml"

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[cluster.Cluster]:
    """A running control plane in which LLMDeployments are known."""
    with cluster.start(f"apiserver-{os.getpid()}", node=False) as running:
        running.kubectl("apply", "-f", str(CRD_FILE))
        wait_until_served(running)
        yield running


def wait_until_served(running: cluster.Cluster, *, seconds: float = 30) -> None:
    """`kubectl wait` will not do: it gives up on a CRD that has no conditions yet."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            running.kubectl("get", "llmdeployments")
        except cluster.CommandFailed:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


@pytest.fixture
def namespace(control_plane: cluster.Cluster) -> Iterator[str]:
    """A namespace of this test's own."""
    name = f"test-{next(_numbers)}"
    control_plane.kubectl("create", "namespace", name)
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def api(control_plane: cluster.Cluster) -> Iterator[httpx.Client]:
    """A plain HTTP client with the rights of an administrator."""
    trust = ssl.create_default_context(cafile=str(control_plane.ca_file))
    headers = {"Authorization": f"Bearer {control_plane.admin_token}"}
    with httpx.Client(base_url=control_plane.server, verify=trust, headers=headers, timeout=20) as client:
        yield client


@pytest.fixture
def objects_url(namespace: str) -> str:
    return f"/apis/tidegate.dev/v1alpha1/namespaces/{namespace}/llmdeployments"


@pytest.fixture
def make(api: httpx.Client, objects_url: str) -> Callable[..., dict[str, Any]]:
    """Create an LLMDeployment from keyword arguments of its spec; returns it as stored."""

    def create(name: str = "model", **spec: Any) -> dict[str, Any]:
        body = {
            "apiVersion": "tidegate.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": name},
            "spec": {"model": {"uri": "file:///models/m.gguf"}, **spec},
        }
        response = api.post(objects_url, json=body)
        assert response.status_code == 201, response.text
        stored: dict[str, Any] = response.json()
        return stored

    return create
