"""The rendered children on a real API server: accepted, admitted by the restricted standard, stable when re-applied."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tidegate_engine.settings import SettingsFile
from tidegate_local import cluster
from tidegate_operator import api as contract
from tidegate_operator import render

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
PATHS = {
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Service": "/api/v1/namespaces/{}/services",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
}
DEFAULTS = render.Defaults(engine_image="registry.example/engine:1")


@pytest.fixture
def restricted(control_plane: cluster.Cluster, namespace: str) -> str:
    """The test's namespace, in which pods must meet the restricted standard."""
    control_plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    return namespace


def children(stored: dict[str, Any]) -> list[render.Manifest]:
    spec = contract.parse_spec(stored["spec"])
    metadata = stored["metadata"]
    target = contract.Target(metadata["name"], metadata["namespace"], metadata["uid"], metadata["generation"], spec)
    file = SettingsFile(1, spec.initial_settings(), spec.envelope(), spec.patterns())
    return render.objects(target, render.Plan(replicas=0, settings_file=file, jwks={"keys": []}), DEFAULTS)


def apply(api: httpx.Client, manifest: render.Manifest) -> dict[str, Any]:
    metadata = manifest["metadata"]
    answer = api.patch(
        f"{PATHS[manifest['kind']].format(metadata['namespace'])}/{metadata['name']}",
        params={"fieldManager": contract.FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"},
        headers={"Content-Type": "application/apply-patch+yaml"},
        content=json.dumps(manifest),
    )
    assert answer.status_code in (200, 201), answer.text
    assert "Warning" not in answer.headers
    applied: dict[str, Any] = answer.json()
    return applied


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_examples_children_are_accepted_admitted_and_stable(
    api: httpx.Client, restricted: str, objects_url: str, path: Path
) -> None:
    example = yaml.safe_load(path.read_text(encoding="utf-8"))
    stored = api.post(objects_url, json=example).json()
    manifests = children(stored)
    first = [apply(api, manifest) for manifest in manifests]
    again = [apply(api, manifest) for manifest in manifests]
    for before, after in zip(first, again, strict=True):
        # Controllers write the status of a Deployment in between; what was asked for stays.
        assert before["metadata"].get("generation") == after["metadata"].get("generation")
        assert before.get("data") == after.get("data")
    template = manifests[-1]["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe", **template["metadata"]}}
    answer = api.post(
        f"/api/v1/namespaces/{restricted}/pods",
        params={"dryRun": "All", "fieldValidation": "Strict"},
        json={**pod, "spec": template["spec"]},
    )
    assert answer.status_code == 201, answer.text


def test_children_go_with_their_object(
    control_plane: cluster.Cluster, api: httpx.Client, namespace: str, objects_url: str
) -> None:
    example = yaml.safe_load(EXAMPLES[0].read_text(encoding="utf-8"))
    stored = api.post(objects_url, json=example).json()
    for manifest in children(stored):
        apply(api, manifest)
    name = stored["metadata"]["name"]
    control_plane.kubectl("-n", namespace, "delete", "lld", name, "--cascade=foreground", "--timeout=60s")
    kinds = "deployments,services,poddisruptionbudgets"
    left = control_plane.kubectl("-n", namespace, "get", kinds, "-o", "name")
    assert left.strip() == ""
