"""One full-node cluster with the chart installed, for the whole session; every test uses objects of its own in it.

Nothing here sleeps for a fixed time: `until` waits for a condition and says what it saw last when it gives up.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tidegate_local import access, activity, cache, cluster, load, recording, setup, store
from tidegate_local.cluster import Cluster, CommandFailed

OPERATOR_LABEL = "app.kubernetes.io/name=tidegate-operator"
GPUS = 38
REPOSITORY = Path(__file__).parents[2]
POLL_SECONDS = 0.25
STEP = {
    "base_seconds": 0.1,
    "threshold_tokens": 256,
    "token_seconds": 0.0001,
    "kv_token_seconds": 0.0,
    "sequence_seconds": 0.0,
    "attention_seconds": 0.0,
    "mixed_kv_token_seconds": 0.0,
}
STEP_PROFILE: dict[str, object] = {
    "name": "test-100ms",
    "gpu": "test",
    "gpus": 1,
    "model": "test",
    "layers": 1,
    "kv_heads": 1,
    "head_size": 64,
    "vocab_size": 1000,
    "weight_dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "weight_bytes": 1000000,
    "kv_token_bytes": 256,
    "kv_blocks": 4096,
    "block_tokens": 16,
    "max_model_len": 4096,
    "start_seconds": {"weights": 0.5, "warmup": 0.0},
    "step": STEP,
}
STEP_PROFILE["source"] = dict.fromkeys(
    ("kv_blocks", "start_seconds", *STEP), "invented: ten steps a second, so that few tokens fill a replica"
)

Manifest = dict[str, Any]
Resource = dict[str, Any]


@dataclass(frozen=True)
class Fleet:
    """The cluster with Tidegate in it, and what tests do with it."""

    cluster: Cluster
    reached: access.Access
    namespace: str = "tidegate"
    release: str = "tidegate"

    def install(self, *sets: str) -> None:
        """Install the chart as a user would; on failure the operator's own words are in the error."""
        values = ("image=tidegate.local/operator:dev", "engine.image=tidegate.local/engine:torch", *sets)
        options = [f"--set={value}" for value in values]
        where = [f"--namespace={self.namespace}", "--create-namespace", "--wait", "--timeout=60s"]
        chart = str(REPOSITORY / "charts" / "tidegate")
        try:
            self.reached.helm("upgrade", "--install", self.release, chart, *where, *options)
        except CommandFailed as error:
            raise AssertionError(f"{error}\n{self.describe(None)}") from error

    def give_profile(self, profile: Mapping[str, object]) -> None:
        """Let the modelled engines of this namespace compute by this one."""
        data = {"profile.json": json.dumps(profile)}
        self.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "profiles"}, "data": data})

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        return self.reached.kubectl(f"--namespace={self.namespace}", *arguments, input=input)

    def apply(self, *manifests: Manifest) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", input=json.dumps(items))

    def patch(self, name: str, spec: Mapping[str, object]) -> None:
        self.kubectl("patch", "lld", name, "--type=merge", f"--patch={json.dumps({'spec': spec})}")

    def get(self, name: str, kind: str = "lld") -> Resource:
        found: Resource = json.loads(self.kubectl("get", kind, name, "--output=json"))
        return found

    def all_of(self, kind: str) -> list[Resource]:
        items: list[Resource] = json.loads(self.kubectl("get", kind, "--output=json"))["items"]
        return items

    def pods(self, name: str) -> list[Resource]:
        selector = f"--selector=tidegate.dev/deployment={name}"
        found: list[Resource] = json.loads(self.kubectl("get", "pods", selector, "--output=json"))["items"]
        return found

    def ready_pods(self, name: str) -> list[recording.PodFact]:
        facts = [recording.pod_fact(pod) for pod in self.pods(name)]
        return [fact for fact in facts if fact.ready and not fact.terminating]

    def children(self, name: str) -> list[str]:
        """Everything of the kinds that the operator makes, and their pods."""
        kinds = "deployments,replicasets,pods,services,configmaps,serviceaccounts,poddisruptionbudgets,endpointslices"
        selectors = (f"tidegate.dev/deployment={name}", f"app.kubernetes.io/instance={name}")
        found = {line for s in selectors for line in self.kubectl("get", kinds, f"-l={s}", "-o=name").splitlines()}
        return sorted(found)

    def condition(self, name: str, kind: str) -> Mapping[str, Any]:
        return recording.conditions_of(self.get(name)).get(kind, {})

    def url(self, name: str) -> str:
        """Base URL of the object's Service, from this machine."""
        return f"http://{self.cluster.forward(self.service_address(name), 8000)}"

    def admin_url(self, pod: Resource) -> str:
        return f"http://{self.cluster.forward(pod['status']['podIP'], 8001)}"

    def service_address(self, name: str) -> str:
        return str(self.get(name, "service")["spec"]["clusterIP"])

    def until(
        self, what: str, condition: Callable[[], object], *, timeout_seconds: float = 60, name: str | None = None
    ) -> Any:
        """Wait until `condition` gives something true, and return that; on time-out show the object `name`."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            found = condition()
            if found:
                return found
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_seconds:.0f} s: {what}\n{self.describe(name)}")
            time.sleep(POLL_SECONDS)

    def wait_ready(self, name: str, *, timeout_seconds: float = 120) -> Resource:
        def ready() -> Resource | None:
            found = self.get(name)
            assert not recording.condition_is_true(found, "Stalled"), f"{name} is stalled\n{self.describe(name)}"
            return found if recording.condition_is_true(found, "Ready") else None

        found: Resource = self.until(f"{name} is Ready", ready, timeout_seconds=timeout_seconds, name=name)
        return found

    def wait_condition(self, name: str, kind: str, status: str, *, timeout_seconds: float = 60) -> Mapping[str, Any]:
        def holds() -> Mapping[str, Any] | None:
            found = self.condition(name, kind)
            return found if found.get("status") == status else None

        found: Mapping[str, Any] = self.until(
            f"{name} has {kind}={status}", holds, timeout_seconds=timeout_seconds, name=name
        )
        return found

    def wait_gone(self, name: str, *, timeout_seconds: float = 60) -> None:
        self.until(f"nothing of {name} is left", lambda: not self.children(name), timeout_seconds=timeout_seconds)

    def describe(self, name: str | None) -> str:
        """What a reader of a failed test wants to see."""
        parts = []
        if name is not None:
            news = recording.condition_news({}, self.get(name))
            parts += [
                "conditions:",
                *news,
                self.kubectl("get", "pods", f"-l=tidegate.dev/deployment={name}", "-o=wide"),
            ]
        try:
            parts += ["operator's log:", self.kubectl("logs", f"deployment/{self.release}", "--tail=25")]
        except CommandFailed as error:
            parts.append(str(error))
        return "\n".join(parts)

    def send(self, name: str, phases: Sequence[load.Phase], tmp_path: Path, *, seed: int = 1) -> "Sending":
        """Start a load on the object's Service from inside the node's network."""
        plan = tmp_path / f"{name}-{seed}.phases.json"
        plan.write_text(load.phases_json(phases))
        argv = [sys.executable, load.__file__, f"--url=http://{self.service_address(name)}:8000", f"--model={name}"]
        out = plan.with_suffix(".jsonl")
        process = self.cluster.popen([*argv, f"--phases={plan}", f"--out={out}", f"--seed={seed}"])
        return Sending(process, out)

    def operator_container(self) -> str:
        pods = json.loads(self.kubectl("get", "pods", f"-l={OPERATOR_LABEL}", "-o=json"))["items"]
        return str(pods[0]["status"]["containerStatuses"][0]["containerID"]).removeprefix("containerd://")

    def kill_operator(self) -> str:
        """SIGKILL to the operator's process; returns the container's id."""
        container = self.operator_container()
        ctr = ["ctr", "--address", store.SOCKET, "--namespace", "k8s.io"]
        argv = self.cluster.enter([*ctr, "tasks", "kill", "--signal", "SIGKILL", container])
        subprocess.run(argv, check=True, capture_output=True)
        return container


@dataclass(frozen=True)
class Sending:
    """A load under way."""

    process: subprocess.Popen[str]
    out: Path

    def outcomes(self) -> list[load.Outcome]:
        """Those that have ended so far."""
        if not self.out.exists():
            return []
        lines = self.out.read_text().splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [load.outcome_of(record) for record in records if record["kind"] == "request"]

    def finish(self, *, timeout_seconds: float = 180) -> list[load.Outcome]:
        """Wait for the last stream's end; every outcome."""
        _, errors = self.process.communicate(timeout=timeout_seconds)
        outcomes = self.outcomes()
        assert outcomes, f"the load sent nothing: {errors}"
        return outcomes


def modelled(name: str, **spec: object) -> Manifest:
    """An object of the modelled engine with the test profile; `spec` replaces top-level fields, None removes one."""
    fields: dict[str, object] = {
        "model": {"uri": "file:///models/modelled"},
        "engine": {
            "image": "tidegate.local/engine:modelled",
            "args": ["--runner=modelled", "--profile=/profiles/profile.json"],
        },
        "replicas": 1,
        "autoscaling": {"mode": "Off"},
        "batching": {"mode": "Fixed"},
        "resources": {"gpu": {"count": 1}, "requests": {"cpu": "20m"}},
        "drain": {"timeoutSeconds": 120, "endpointRemovalSeconds": 2},
        "podTemplate": {
            "volumes": [{"name": "profiles", "configMap": {"name": "profiles"}}],
            "volumeMounts": [{"name": "profiles", "mountPath": "/profiles", "readOnly": True}],
        },
        **spec,
    }
    return resource(name, fields)


def real(name: str, uri: str, **spec: object) -> Manifest:
    """An object of the torch engine on the CPU."""
    fields: dict[str, object] = {
        "model": {"uri": uri},
        "engine": {"image": "tidegate.local/engine:torch", "maxModelLength": 1024},
        "replicas": 1,
        "autoscaling": {"mode": "Off"},
        "batching": {"mode": "Fixed"},
        "resources": {"gpu": {"count": 0}, "requests": {"cpu": "20m"}},
        "drain": {"timeoutSeconds": 5, "endpointRemovalSeconds": 0},
        **spec,
    }
    return resource(name, fields)


def resource(name: str, spec: Mapping[str, object]) -> Manifest:
    return {
        "apiVersion": "tidegate.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {name: value for name, value in spec.items() if value is not None},
    }


@dataclass(frozen=True)
class Objects:
    """The makers of manifests, as a fixture, since test files do not import each other."""

    modelled: Callable[..., Manifest] = modelled
    real: Callable[..., Manifest] = real


@pytest.fixture(scope="session")
def objects() -> Objects:
    return Objects()


@pytest.fixture(scope="session", autouse=True)
def store_is_free() -> None:
    """Another cluster with a node, the demo's for one, is waited for: only one can use the image store."""
    with cache.in_turn(store.LOCK, purpose="the end-to-end tests", say=lambda line: print(line, file=sys.stderr)):
        pass


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    with activity.Progress() as progress:
        setup.everything(progress)
    with cluster.start("e2e", node=True, gpus=GPUS, prometheus=True) as running:
        found = Fleet(running, access.of_cluster(running))
        found.install(f"prometheus.url={running.prometheus_url_in_cluster}")
        found.give_profile(STEP_PROFILE)
        yield found
