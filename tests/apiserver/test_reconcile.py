"""The operator as a process against a real API server, with the chart's ServiceAccount, rights and environment.

There is no node: pods stay pending, and where a test needs a ready one it writes the kubelet's part into the pod's
status itself, with the address of a real modelled engine on loopback.
"""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tidegate_local import cluster

CHART = Path(__file__).parents[2] / "charts" / "tidegate"
Make = Callable[..., dict[str, Any]]
OFTEN = {"mode": "Off", "syncPeriodSeconds": 1}
"""Looks at the object every second, so that a test need not wait long for the next passes."""
_numbers, _shared_numbers = itertools.count(), itertools.count()
CHILDREN = {
    "Deployment": ("/apis/apps/v1", "deployments", "model"),
    "Service": ("/api/v1", "services", "model"),
    "ConfigMap": ("/api/v1", "configmaps", "model-engine"),
    "ServiceAccount": ("/api/v1", "serviceaccounts", "model"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets", "model"),
}


def until(condition: Callable[[], Any], what: str, *, seconds: float = 60) -> Any:
    """Wait for a condition and return its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


class Operators:
    """Starts operators as the chart would, in `namespace` for these namespaces, and ends them."""

    def __init__(self, control_plane: cluster.Cluster, namespace: str, folder: Path, *, watched: Sequence[str]) -> None:
        self.control_plane, self.namespace, self.folder = control_plane, namespace, folder
        text = control_plane.helm(
            "template", "tidegate", str(CHART), f"--namespace={namespace}", "--set=crds.enabled=false",
            "--set=image=operator:none", "--set=engine.image=engine:none",
            f"--set=watch.namespaces={{{','.join(watched)}}}",
        )  # fmt: skip
        documents = [document for document in yaml.safe_load_all(text) if document]
        (self.deployment,) = [item for item in documents if item["kind"] == "Deployment"]
        rest = [item for item in documents if item["kind"] != "Deployment"]
        control_plane.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(rest))
        self.account = self.deployment["spec"]["template"]["spec"]["serviceAccountName"]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.metrics_port = self.health_port = 0

    def start(self) -> subprocess.Popen[bytes]:
        """An operator, not yet ready."""
        self.metrics_port, self.health_port = free_port(), free_port()
        (container,) = self.deployment["spec"]["template"]["spec"]["containers"]
        given = {item["name"]: item.get("value", self.namespace) for item in container["env"]}
        environment = {"PATH": os.environ["PATH"], "HOSTNAME": f"operator-{len(self.processes)}"} | given
        environment |= {
            "KUBECONFIG": str(self._kubeconfig()),
            "TIDEGATE_METRICS_PORT": str(self.metrics_port),
            "TIDEGATE_HEALTH_PORT": str(self.health_port),
            "TIDEGATE_RESYNC_SECONDS": "3",
        }
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tidegate_operator", *container["args"]],
                env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        self.processes.append(process)
        return process

    @property
    def log(self) -> Path:
        return self.folder / "operator.log"

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{self.health_port}/readyz").status_code == 200
            except httpx.HTTPError:
                return False

        until(is_ready, "the operator is ready", seconds=120)

    def counter(self, pattern: str) -> float:
        """Sum of the newest operator's series that match."""
        page = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text
        return sum(float(value) for value in re.findall(rf"^{pattern}\S* (\S+)$", page, re.M))

    def writes(self) -> float:
        return self.counter(r'tidegate_operator_api_requests_total\{code="\d+",verb="(?:PATCH|POST|PUT|DELETE)"')

    def passes(self) -> float:
        return self.counter("tidegate_operator_reconcile_total")

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait(20)

    def _kubeconfig(self) -> Path:
        token = self.control_plane.kubectl("create", "token", self.account, "-n", self.namespace).strip()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "operator",
            "contexts": [{"name": "operator", "context": {"cluster": "local", "user": "operator"}}],
            "clusters": [
                {
                    "name": "local",
                    "cluster": {
                        "server": self.control_plane.server,
                        "certificate-authority": str(self.control_plane.ca_file),
                    },
                }
            ],
            "users": [{"name": "operator", "user": {"token": token}}],
        }
        path = self.folder / "operator.kubeconfig"
        path.write_text(yaml.safe_dump(config))
        return path


SHARED = [f"shared-{number}" for number in range(24)]


@pytest.fixture(scope="module")
def operator(control_plane: cluster.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operators]:
    """One running operator for all tests that do not end it; each has a namespace of its own."""
    for name in ("shared", *SHARED):
        control_plane.kubectl("create", "namespace", name)
    made = Operators(control_plane, "shared", tmp_path_factory.mktemp("operator"), watched=SHARED)
    made.start()
    made.wait_until_ready()
    yield made
    made.stop()
    print(made.log.read_text())
    control_plane.kubectl("delete", "namespace", "shared", *SHARED, "--wait=false")


@pytest.fixture
def namespace(request: pytest.FixtureRequest, control_plane: cluster.Cluster) -> Iterator[str]:
    """A namespace of this test's own: one that the shared operator watches, if the test uses that one."""
    if "operator" not in request.fixturenames:
        name = f"own-{next(_numbers)}"
        control_plane.kubectl("create", "namespace", name)
        yield name
        control_plane.kubectl("delete", "namespace", name, "--wait=false")
        return
    name = SHARED[next(_shared_numbers)]
    yield name
    control_plane.kubectl("delete", "llmdeployments", "--all", "-n", name)


@pytest.fixture
def operators(control_plane: cluster.Cluster, namespace: str, tmp_path: Path) -> Iterator[Operators]:
    """Operators of this test's own, for its namespace alone; none runs yet."""
    made = Operators(control_plane, namespace, tmp_path, watched=[namespace])
    yield made
    made.stop()
    print(made.log.read_text() if made.log.exists() else "no operator ran")


class View:
    """What a user sees of the namespace."""

    def __init__(self, api: httpx.Client, namespace: str) -> None:
        self.api, self.namespace = api, namespace
        self.objects = f"/apis/tidegate.dev/v1alpha1/namespaces/{namespace}/llmdeployments"

    def get(self, root: str, plural: str, name: str) -> dict[str, Any] | None:
        response = self.api.get(f"{root}/namespaces/{self.namespace}/{plural}/{name}")
        if response.status_code == 404:
            return None
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found

    def listed(self, root: str, plural: str) -> list[dict[str, Any]]:
        response = self.api.get(f"{root}/namespaces/{self.namespace}/{plural}")
        response.raise_for_status()
        items: list[dict[str, Any]] = response.json()["items"]
        return items

    def child(self, kind: str) -> dict[str, Any] | None:
        return self.get(*CHILDREN[kind])

    def object(self, name: str = "model") -> dict[str, Any]:
        response = self.api.get(f"{self.objects}/{name}")
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found

    def condition(self, kind: str, name: str = "model") -> dict[str, Any]:
        conditions = self.object(name).get("status", {}).get("conditions", [])
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def events(self, name: str = "model") -> list[tuple[str, str]]:
        """Type and reason of the Events about an object, oldest first."""
        items = self.listed("/apis/events.k8s.io/v1", "events")
        about = [item for item in items if item["regarding"].get("kind") == "LLMDeployment"]
        about = [item for item in about if item["regarding"]["name"] == name]
        return [(item["type"], item["reason"]) for item in sorted(about, key=lambda item: item["eventTime"])]

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.api.patch(path, json=body, headers={"Content-Type": "application/merge-patch+json"})
        assert response.status_code == 200, response.text
        changed: dict[str, Any] = response.json()
        return changed

    def pods(self) -> list[dict[str, Any]]:
        return self.listed("/api/v1", "pods")

    def is_counted(self, deployment: dict[str, Any]) -> bool:
        """Whether the Deployment's own controllers are done with it: what they do later would be news."""
        metadata, wanted = deployment["metadata"], deployment["spec"]["replicas"]
        pods = [
            pod for pod in self.listed("/api/v1", "pods") if pod["metadata"]["name"].startswith(f"{metadata['name']}-")
        ]
        status = deployment.get("status", {})
        seen = status.get("observedGeneration") == metadata["generation"]
        return bool(seen and status.get("replicas", 0) == wanted <= len(pods))

    def versions(self) -> dict[str, str]:
        """Resource versions of the objects and everything below them."""
        places = [
            ("/apis/tidegate.dev/v1alpha1", "llmdeployments"),
            *((root, plural) for root, plural, _ in CHILDREN.values()),
        ]
        return {
            f"{plural}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
            for root, plural in places
            for item in self.listed(root, plural)
        }


@pytest.fixture
def view(api: httpx.Client, namespace: str) -> View:
    return View(api, namespace)


def until_reconciled(view: View, name: str = "model") -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = view.object(name)
        status = found.get("status", {})
        told = status.get("observedGeneration") == found["metadata"]["generation"]
        return found if told and view.get("/apis/apps/v1", "deployments", name) else None

    found: dict[str, Any] = until(look, f"{name} is reconciled")
    return found


def until_quiet(operator: Operators, view: View) -> float:
    """Wait until the controllers have made all pods and several passes wrote nothing; returns the count of writes."""
    until(
        lambda: all(map(view.is_counted, view.listed("/apis/apps/v1", "deployments"))), "all pods are made and counted"
    )
    seen = {"writes": -1.0, "passes": 0.0}

    def is_quiet() -> bool:
        writes, passes = operator.writes(), operator.passes()
        if writes != seen["writes"]:
            seen.update(writes=writes, passes=passes)
            return False
        return passes >= seen["passes"] + 10

    until(is_quiet, "the operator writes no more", seconds=120)
    return seen["writes"]


def test_an_object_gets_its_children_and_a_truthful_status(operator: Operators, make: Make, view: View) -> None:
    made = make()
    found = until_reconciled(view)
    for kind in CHILDREN:
        child = view.child(kind)
        assert child is not None, kind
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("LLMDeployment", made["metadata"]["uid"], True)
        assert child["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "tidegate-operator"
    assert found["metadata"].get("finalizers") is None
    assert found["metadata"].get("annotations") is None
    assert view.condition("Ready")["status"] == "False"
    assert view.condition("Ready")["reason"] == "Starting"
    assert view.condition("Reconciling")["status"] == "True"
    assert all(condition["observedGeneration"] == 1 for condition in found["status"]["conditions"])
    keys = json.loads(view.child("ConfigMap")["data"]["admin-keys.json"])["keys"]  # type: ignore[index]
    assert [key["crv"] for key in keys] == ["Ed25519"]


def test_at_rest_nothing_is_written_over_several_resyncs(operator: Operators, make: Make, view: View) -> None:
    make(autoscaling=OFTEN)
    make("other", autoscaling={"mode": "Auto", "maxReplicas": 3, "syncPeriodSeconds": 1})
    until_reconciled(view)
    until_reconciled(view, "other")
    writes = until_quiet(operator, view)
    versions, passes = view.versions(), operator.passes()
    until(lambda: operator.passes() >= passes + 12, "a dozen more passes", seconds=120)
    assert operator.writes() == writes
    assert view.versions() == versions


def test_told_to_end_it_does_so_well_and_the_next_one_writes_nothing(
    operators: Operators, make: Make, view: View
) -> None:
    process = operators.start()
    operators.wait_until_ready()
    make(autoscaling=OFTEN)
    until_reconciled(view)
    until_quiet(operators, view)
    versions, events = view.versions(), view.events()
    process.terminate()
    assert process.wait(20) == 0
    operators.start()
    operators.wait_until_ready()
    until(lambda: operators.passes() >= 3, "passes after the restart")
    assert view.versions() == versions
    assert view.events() == events


@pytest.mark.parametrize("kind", CHILDREN)
def test_a_child_that_is_deleted_comes_back(kind: str, operator: Operators, make: Make, view: View) -> None:
    make()
    until_reconciled(view)
    before = until(lambda: view.child(kind), kind)
    root, plural, name = CHILDREN[kind]
    view.api.delete(f"{root}/namespaces/{view.namespace}/{plural}/{name}").raise_for_status()

    def is_back() -> bool:
        child = view.child(kind)
        return child is not None and child["metadata"]["uid"] != before["metadata"]["uid"]

    until(is_back, f"the {kind} is back")


def test_what_others_change_of_ours_is_put_right_and_what_they_add_stays(
    operator: Operators, make: Make, view: View
) -> None:
    make()
    until_reconciled(view)
    path = f"/api/v1/namespaces/{view.namespace}/services/model"
    view.patch(path, {"metadata": {"annotations": {"theirs": "1"}}, "spec": {"selector": {"app": "theirs"}}})

    def is_right() -> bool:
        service = view.child("Service")
        return service is not None and "app" not in service["spec"]["selector"]

    until(is_right, "the selector is ours again")
    assert view.child("Service")["metadata"]["annotations"]["theirs"] == "1"  # type: ignore[index]


def test_a_change_of_the_spec_reaches_the_children(operator: Operators, make: Make, view: View) -> None:
    make()
    until_reconciled(view)
    view.patch(f"{view.objects}/model", {"spec": {"replicas": 3, "service": {"port": 80}}})
    until(lambda: view.child("Deployment")["spec"]["replicas"] == 3, "three replicas")  # type: ignore[index]
    until(lambda: view.child("Service")["spec"]["ports"][0]["port"] == 80, "the new port")  # type: ignore[index]
    until(lambda: view.object()["status"]["observedGeneration"] == 2, "the status is about the new spec")


def delete_and_expect_nothing(view: View) -> None:
    view.api.delete(f"{view.objects}/model").raise_for_status()
    until(lambda: view.api.get(f"{view.objects}/model").status_code == 404, "the object is gone")
    until(lambda: not any(view.child(kind) for kind in CHILDREN) and not view.pods(), "the children are gone")


def test_deleting_the_object_leaves_nothing(operator: Operators, make: Make, view: View) -> None:
    make()
    until_reconciled(view)
    until(view.pods, "a pod")
    delete_and_expect_nothing(view)


def test_deleting_the_object_when_the_operator_is_gone_leaves_nothing(
    operators: Operators, make: Make, view: View
) -> None:
    operators.start()
    make()
    until_reconciled(view)
    until(view.pods, "a pod")
    operators.stop()
    delete_and_expect_nothing(view)


def test_an_autoscaler_of_others_scales_through_the_scale_subresource(
    operator: Operators, make: Make, view: View
) -> None:
    make(replicas=1, autoscaling={"mode": "External"})
    until_reconciled(view)
    scale = view.patch(f"{view.objects}/model/scale", {"spec": {"replicas": 4}})
    until(lambda: view.child("Deployment")["spec"]["replicas"] == 4, "four replicas")  # type: ignore[index]
    until(lambda: len(view.pods()) == 4, "four pods")
    scale = until(
        lambda: (found := view.api.get(f"{view.objects}/model/scale").json())["status"]["replicas"] == 4 and found,
        "the scale tells four",
    )
    selector = scale["status"]["selector"]
    matched = view.api.get(f"/api/v1/namespaces/{view.namespace}/pods", params={"labelSelector": selector})
    assert len(matched.json()["items"]) == 4


def test_killed_in_the_middle_it_converges_without_doing_anything_twice(
    operators: Operators, make: Make, view: View
) -> None:
    names = [f"model-{number}" for number in range(12)]
    for name in names:
        make(name, autoscaling=OFTEN)
    for after_writes in (3, 17, 40):
        process = operators.start()
        operators.wait_until_ready()

        def has_written(count: int = after_writes) -> bool:
            try:
                return operators.writes() >= count or operators.passes() >= len(names)
            except httpx.HTTPError:
                return False

        until(has_written, "it is in the middle")
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    operators.start()
    operators.wait_until_ready()
    for name in names:
        until_reconciled(view, name)
    until(lambda: len(view.pods()) == len(names), "a pod each")
    until_quiet(operators, view)
    deployments = view.listed("/apis/apps/v1", "deployments")
    assert {item["metadata"]["name"]: item["metadata"]["generation"] for item in deployments} == dict.fromkeys(names, 1)
    assert len(view.listed("/api/v1", "pods")) == len(names)


def test_two_operators_at_once_agree_and_come_to_rest(operators: Operators, make: Make, view: View) -> None:
    operators.start()
    operators.wait_until_ready()
    operators.start()
    operators.wait_until_ready()
    for number in range(4):
        make(f"model-{number}", autoscaling=OFTEN)
    for number in range(4):
        until_reconciled(view, f"model-{number}")
    until_quiet(operators, view)
    versions, passes = view.versions(), operators.passes()
    until(lambda: operators.passes() >= passes + 8, "more passes")
    assert view.versions() == versions
    assert [process.poll() for process in operators.processes] == [None, None]


def test_a_name_that_is_taken_is_told_and_left_alone_until_it_is_free(
    operator: Operators, make: Make, view: View
) -> None:
    path = f"/api/v1/namespaces/{view.namespace}/services"
    theirs = {"metadata": {"name": "model"}, "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 5432}]}}
    stored = view.api.post(path, json=theirs).json()
    make()
    until(lambda: view.condition("Reconciling").get("reason") == "NameTaken", "the condition tells")
    assert "Service model" in view.condition("Reconciling")["message"]
    assert view.child("Service")["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]  # type: ignore[index]
    assert view.child("Deployment") is not None, "one child does not stop the others"
    view.api.delete(f"{path}/model").raise_for_status()
    until(lambda: (view.child("Service") or {}).get("metadata", {}).get("ownerReferences"), "the Service is ours")
    until(lambda: view.condition("Reconciling").get("reason") == "Starting", "the condition is as usual")


def test_a_quota_that_is_used_up_is_told(operator: Operators, make: Make, view: View) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"services": "0"}}}
    view.api.post(f"/api/v1/namespaces/{view.namespace}/resourcequotas", json=quota).raise_for_status()
    quotas = f"/api/v1/namespaces/{view.namespace}/resourcequotas/none"
    until(lambda: view.api.get(quotas).json().get("status", {}).get("hard"), "the quota is in force")
    make()
    until(lambda: view.condition("Stalled").get("status") == "True", "the condition tells")
    assert view.condition("Stalled")["reason"] == "QuotaExceeded"
    assert view.child("Deployment") is not None
    until(lambda: ("Warning", "QuotaExceeded") in view.events(), "an Event")


def test_events_tell_changes_only(operator: Operators, make: Make, view: View) -> None:
    make(autoscaling={"mode": "Auto", "minReplicas": 2, "maxReplicas": 3, "syncPeriodSeconds": 1})
    until_reconciled(view)
    until_quiet(operator, view)
    events, passes = view.events(), operator.passes()
    assert len(events) == len(set(events))
    until(lambda: operator.passes() >= passes + 5, "more passes")
    assert view.events() == events


def test_the_liveness_probe_answers(operator: Operators) -> None:
    assert httpx.get(f"http://127.0.0.1:{operator.health_port}/healthz").text == "ok"


# --- with a real engine --------------------------------------------------------------------------------------------


class Engine:
    """A real modelled engine at a loopback address, started with what the object's ConfigMap says."""

    def __init__(self, address: str, uid: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self._uid = uid
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, config_map: dict[str, Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        for name, text in config_map["data"].items():
            (self.folder / name).write_text(text)
        arguments = [
            "serve", "--runner=modelled", "--profile=l4-llama-3.1-8b", "--served-model-name=model",
            f"--config-dir={self.folder}", f"--host={self.address}", "--port=8000", "--admin-port=8001",
        ]  # fmt: skip
        with (self.folder / "engine.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tidegate_engine.cli", *arguments],
                env={"PATH": os.environ["PATH"], "TIDEGATE_OBJECT_UID": self._uid}, stdout=log, stderr=log,
            )  # fmt: skip

        def is_ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "engine.log").read_text()
            try:
                return httpx.get(f"http://{self.address}:8001/readyz").status_code == 200
            except httpx.HTTPError:
                return False

        until(is_ready, "the engine is ready", seconds=120)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(20)

    def settings(self) -> dict[str, float]:
        page = httpx.get(f"http://{self.address}:8001/metrics").text
        found = re.findall(
            r'^tidegate_engine_batching_limit\{(?=.*kind="effective").*name="(\w+)".*\} (\S+)$', page, re.M
        )
        found += re.findall(r'^tidegate_engine_batching_limit\{.*name="(\w+)".*kind="effective".*\} (\S+)$', page, re.M)
        return {name: float(value) for name, value in found}


Engines = Callable[[dict[str, Any]], Engine]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Make engines, each at an address of its own in 127/8: their ports are fixed."""
    made: list[Engine] = []

    def make_engine(made_object: dict[str, Any]) -> Engine:
        number = len(made) + 1
        address = f"127.{os.getpid() % 250 + 1}.{os.getpid() // 250 % 250}.{number}"
        engine = Engine(address, made_object["metadata"]["uid"], tmp_path / f"engine-{number}")
        made.append(engine)
        return engine

    yield make_engine
    for engine in made:
        engine.stop()


def be_the_kubelet(view: View, pod: dict[str, Any], address: str) -> None:
    """Write what a kubelet writes about a pod that runs and is ready."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": now}
        for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    ]
    running = {"name": "engine", "ready": True, "started": True, "restartCount": 0, "image": "e", "imageID": "e"}
    status = {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": conditions,
        "containerStatuses": [running | {"state": {"running": {"startedAt": now}}}],
    }
    view.patch(f"/api/v1/namespaces/{view.namespace}/pods/{pod['metadata']['name']}/status", {"status": status})


def test_settings_reach_a_running_engine_and_its_word_reaches_the_status(
    operator: Operators, make: Make, view: View, engines: Engines
) -> None:
    made = make(
        batching={"mode": "Fixed", "maxSequences": {"initial": 48}}, autoscaling={"mode": "Off", "syncPeriodSeconds": 4}
    )
    until_reconciled(view)
    engine = engines(made)
    engine.start(until(lambda: view.child("ConfigMap"), "the ConfigMap"))
    assert engine.settings()["max_num_seqs"] == 48
    (pod,) = until(view.pods, "a pod")
    be_the_kubelet(view, pod, engine.address)
    until(lambda: view.condition("BatchingApplied").get("status") == "True", "the engine acknowledged")
    until(lambda: view.condition("Ready").get("status") == "True", "the object is ready")
    until(lambda: view.condition("MetricsAvailable").get("status") == "True", "the scrape has four samples")

    view.patch(f"{view.objects}/model", {"spec": {"batching": {"maxSequences": {"initial": 24}}}})
    until(lambda: engine.settings()["max_num_seqs"] == 24, "the running engine has the new settings")
    batching = until(
        lambda: (
            (found := view.object()["status"]["batching"])["appliedReplicas"] == 1
            and found["desired"]["maxSequences"] == 24
            and found
        ),
        "the status tells",
    )
    assert batching["generation"] > 1
    stored = json.loads(view.child("ConfigMap")["data"]["settings.json"])  # type: ignore[index]
    assert (stored["generation"], stored["settings"]["max_num_seqs"]) == (batching["generation"], 24)
    assert [pod["metadata"]["uid"] for pod in view.pods()] == [pod["metadata"]["uid"]], "no pod was replaced"
    assert ("Normal", "Serving") in view.events()


def test_a_new_operator_neither_flaps_nor_forgets(
    operators: Operators, make: Make, view: View, engines: Engines
) -> None:
    operators.start()
    made = make(
        batching={"mode": "Fixed", "maxSequences": {"initial": 48}},
        autoscaling={"mode": "Auto", "minReplicas": 1, "maxReplicas": 2, "syncPeriodSeconds": 2},
    )
    until_reconciled(view)
    engine = engines(made)
    engine.start(until(lambda: view.child("ConfigMap"), "the ConfigMap"))
    (pod,) = until(view.pods, "a pod")
    be_the_kubelet(view, pod, engine.address)
    until(lambda: view.condition("BatchingApplied").get("status") == "True", "the engine acknowledged")
    until(lambda: view.condition("MetricsAvailable").get("status") == "True", "metrics are there")
    generation = view.object()["status"]["batching"]["generation"]
    for _ in range(2):
        operators.processes[-1].kill()
        operators.processes[-1].wait(20)
        operators.start()
        operators.wait_until_ready()
        until(lambda: operators.passes() >= 4, "passes of the new one")
        until(lambda: view.condition("BatchingApplied").get("status") == "True", "acknowledged still")
    assert view.object()["status"]["batching"]["generation"] == generation
    assert view.child("Deployment")["spec"]["replicas"] == 1  # type: ignore[index]
    assert view.child("Deployment")["metadata"]["generation"] == 1  # type: ignore[index]


def test_scaling_down_takes_the_pod_that_does_not_serve_and_marks_the_others_by_load(
    operator: Operators, make: Make, view: View, engines: Engines
) -> None:
    made = make(replicas=3, autoscaling={"mode": "Off", "syncPeriodSeconds": 2})
    until_reconciled(view)
    pods = until(lambda: len(found := view.pods()) == 3 and found, "three pods")
    for pod in pods[:2]:
        engine = engines(made)
        engine.start(until(lambda: view.child("ConfigMap"), "the ConfigMap"))
        be_the_kubelet(view, pod, engine.address)
    until(lambda: view.object()["status"]["readyReplicas"] == 2, "two serve")
    until(lambda: view.condition("MetricsAvailable").get("status") == "True", "metrics are there")
    view.patch(f"{view.objects}/model", {"spec": {"replicas": 2}})
    until(lambda: len([pod for pod in view.pods() if "deletionTimestamp" not in pod["metadata"]]) == 2, "two pods stay")
    serving = {pod["metadata"]["name"] for pod in pods[:2]}
    stay = [pod for pod in view.pods() if "deletionTimestamp" not in pod["metadata"]]
    assert {pod["metadata"]["name"] for pod in stay} == serving
    costs = [int(pod["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"]) for pod in stay]
    assert min(costs) >= 0, "those that serve cost more than one that does not"
