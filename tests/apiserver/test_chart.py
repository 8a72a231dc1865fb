"""The Helm chart on a real API server: what it installs, what its ServiceAccount may do, and what an upgrade leaves."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate_local import cluster
from tidegate_operator import crd, settings
from tidegate_operator.gpus import Prices

CHART = Path(__file__).parents[2] / "charts" / "tidegate"
IMAGES = ("--set=image=registry.example/operator:1", "--set=engine.image=registry.example/engine:1")


def template(control_plane: cluster.Cluster, *options: str) -> list[dict[str, Any]]:
    text = control_plane.helm("template", "tidegate", str(CHART), "--namespace=somewhere", *IMAGES, *options)
    return [document for document in yaml.safe_load_all(text) if document]


def only(documents: list[dict[str, Any]], kind: str, name: str = "tidegate") -> dict[str, Any]:
    (found,) = [item for item in documents if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def operators_settings(documents: list[dict[str, Any]]) -> settings.Settings:
    """What the operator reads from the environment that the chart gives it."""
    (container,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    environment = {item["name"]: item.get("value", "somewhere") for item in container["env"]}
    return settings.read({**environment, "KUBERNETES_SERVICE_HOST": "10.0.0.1"})


@pytest.fixture
def release(control_plane: cluster.Cluster, namespace: str) -> Iterator[str]:
    """The chart installed in the test's namespace; the CRD is there already. Returns the release's name."""
    name = f"tidegate-{namespace}"
    control_plane.helm("install", name, str(CHART), f"--namespace={namespace}", *IMAGES, "--set=crds.enabled=false")
    yield name
    control_plane.helm("uninstall", name, f"--namespace={namespace}", "--ignore-not-found")


def test_the_chart_is_free_of_lint(control_plane: cluster.Cluster) -> None:
    assert "0 chart(s) failed" in control_plane.helm("lint", "--strict", str(CHART), *IMAGES)


def test_the_server_accepts_every_manifest(control_plane: cluster.Cluster, namespace: str) -> None:
    control_plane.helm(
        "install", f"dry-{namespace}", str(CHART), f"--namespace={namespace}", "--dry-run=server", *IMAGES,
        "--set=metrics.service.enabled=true", "--set=crds.enabled=false", "--set=watch.clusterWide=true",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set=image=",), "image is required"),
        (("--set=engine.image=",), "engine.image is required"),
        (("--set=imagez=x",), "additional properties 'imagez' not allowed"),
        (("--set=watch.clusterWide=true", "--set=watch.namespaces={a}"), "namespaces"),
        (("--set=prometheus.url=prometheus:9090",), "does not match pattern"),
        (("--set=gpuBudgets.nvidia\\.com/gpu=-1",), "gpuBudgets"),
        (("--set=gpuPrices.L4=cheap",), "number"),
    ],
)
def test_a_wrong_value_is_refused_with_a_clear_message(
    control_plane: cluster.Cluster, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(cluster.CommandFailed, match=message):
        template(control_plane, *options)


def test_the_operator_can_read_the_environment_that_the_chart_sets(control_plane: cluster.Cluster) -> None:
    options = ("--set=watch.namespaces={a,b}", "--set=gpuBudgets.nvidia\\.com/gpu=16")
    documents = template(control_plane, *options)
    read = operators_settings(documents)
    assert read.namespace == "somewhere"
    assert read.watch_namespaces == ("a", "b")
    assert read.engine_image == "registry.example/engine:1"
    assert read.engine_run_as_user == 10001
    assert read.prometheus_url is None
    assert read.gpu_budgets == {"nvidia.com/gpu": 16}
    assert read.admin_key_secret == only(template(control_plane), "Secret", "tidegate-admin-keys")["metadata"]["name"]
    (container,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"metrics": read.metrics_port, "health": read.health_port}


def test_gpu_prices_reach_the_operator(control_plane: cluster.Cluster) -> None:
    read = operators_settings(template(control_plane, '--set-json=gpuPrices={"H100 SXM":2.1,"L4":0}'))
    assert read.gpu_prices == Prices({"H100 SXM": 2.1, "L4": 0})


def test_decisions_are_recorded_where_the_chart_says_so(control_plane: cluster.Cluster) -> None:
    assert operators_settings(template(control_plane)).journal is None
    read = operators_settings(template(control_plane, "--set=journal.enabled=true", "--set=journal.megabytes=8"))
    assert (str(read.journal), read.journal_megabytes) == ("/tmp/decisions.jsonl.gz", 8)


def test_user_ids_can_be_left_to_the_cluster(control_plane: cluster.Cluster) -> None:
    deployment = only(template(control_plane, "--set=runAsUser=null", "--set=engine.runAsUser=null"), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert "runAsUser" not in pod["securityContext"]
    environment = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
    assert environment["TIDEGATE_ENGINE_RUN_AS_USER"] == ""


def test_the_chart_carries_the_same_crd(control_plane: cluster.Cluster) -> None:
    made = only(template(control_plane), "CustomResourceDefinition", "llmdeployments.tidegate.dev")
    assert made["spec"] == crd.custom_resource_definition()["spec"]
    assert made["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    dropped = template(control_plane, "--set=crds.keep=false")
    assert "annotations" not in only(dropped, "CustomResourceDefinition", "llmdeployments.tidegate.dev")["metadata"]
    kinds = {item["kind"] for item in template(control_plane, "--set=crds.enabled=false")}
    assert "CustomResourceDefinition" not in kinds


def test_no_cluster_role_is_the_operators_unless_asked_for(control_plane: cluster.Cluster) -> None:
    documents = template(control_plane)
    assert not any(item["kind"] == "ClusterRoleBinding" for item in documents)
    assert {item["metadata"]["namespace"] for item in documents if item["kind"] == "Role"} == {"somewhere"}
    wide = template(control_plane, "--set=watch.clusterWide=true")
    assert only(wide, "ClusterRoleBinding")["roleRef"]["name"] == "tidegate"
    named = template(control_plane, "--set=watch.namespaces={a,b}")
    assert {item["metadata"]["namespace"] for item in named if item["kind"] == "Role"} == {"a", "b", "somewhere"}


ALLOWED = [
    "list llmdeployments.tidegate.dev",
    "watch pods",
    "patch pods",
    "create deployments.apps",
    "patch deployments.apps",
    "patch services",
    "patch configmaps",
    "patch serviceaccounts",
    "patch poddisruptionbudgets.policy",
    "patch llmdeployments.tidegate.dev --subresource=status",
    "create events.events.k8s.io",
    "get secrets/{release}-admin-keys",
    "patch secrets/{release}-admin-keys",
]
REFUSED = [
    "list secrets",
    "get secrets/another",
    "create secrets",
    "delete pods",
    "create pods",
    "create pods --subresource=exec",
    "delete deployments.apps",
    "patch llmdeployments.tidegate.dev",
    "delete llmdeployments.tidegate.dev",
    "create roles.rbac.authorization.k8s.io",
    "create serviceaccounts --subresource=token",
    "list nodes",
    "list namespaces",
]


@pytest.mark.parametrize(("questions", "answer"), [(ALLOWED, "yes"), (REFUSED, "no")], ids=["allowed", "refused"])
def test_the_service_account_may_do_what_the_operator_does_and_nothing_else(
    control_plane: cluster.Cluster, namespace: str, release: str, questions: list[str], answer: str
) -> None:
    account = f"system:serviceaccount:{namespace}:{release}"
    wrong = []
    for question in questions:
        words = question.format(release=release).split()
        if can_i(control_plane, namespace, account, words) != answer:
            wrong.append(question)
    assert wrong == []
    assert can_i(control_plane, "default", account, ["list", "pods"]) == "no"


def can_i(control_plane: cluster.Cluster, namespace: str, account: str, words: list[str]) -> str:
    try:  # a no is told by the exit code
        return control_plane.kubectl("auth", "can-i", *words, f"--as={account}", "-n", namespace).strip()
    except cluster.CommandFailed:
        return "no"


def test_an_upgrade_leaves_the_operators_key_in_its_secret(
    control_plane: cluster.Cluster, namespace: str, release: str
) -> None:
    secret = f"secret/{release}-admin-keys"
    key = base64.b64encode(b"k" * 32).decode()
    control_plane.kubectl(
        "-n", namespace, "patch", secret, "--type=merge", "-p", json.dumps({"data": {"current": key}})
    )
    control_plane.helm(
        "upgrade", release, str(CHART), f"--namespace={namespace}", *IMAGES, "--set=crds.enabled=false",
        "--set=logLevel=DEBUG",
    )  # fmt: skip
    assert control_plane.kubectl("-n", namespace, "get", secret, "-o", "jsonpath={.data.current}") == key


def test_the_crd_and_its_objects_outlive_the_release(control_plane: cluster.Cluster, namespace: str) -> None:
    name = f"owner-{namespace}"
    control_plane.helm(
        "install", name, str(CHART), f"--namespace={namespace}", *IMAGES, "--take-ownership", "--force-conflicts"
    )
    example = CHART.parents[1] / "examples" / "smollm2.yaml"
    control_plane.kubectl("-n", namespace, "apply", "-f", str(example))
    control_plane.helm("uninstall", name, f"--namespace={namespace}")
    assert "smollm2" in control_plane.kubectl("-n", namespace, "get", "lld", "-o", "name")
