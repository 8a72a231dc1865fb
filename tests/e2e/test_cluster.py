"""The one-machine cluster itself, without Tidegate in it. Its node is stopped before the other files start theirs."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidegate_local import activity, binaries, cache, cluster, setup
from tidegate_local.cluster import Cluster, CommandFailed

NAME = "e2e-cluster"
IMAGE = "tidegate.local/smollm2:dev"
SYSCTLS = ("net/ipv4/ip_forward", "vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")

Machine = dict[str, object]


def web(name: str, *, replicas: int, cpu: str = "300m", gpus: int = 0) -> str:
    """A Deployment as restricted as an engine's, serving the model's folder, and its Service."""
    container = {
        "name": "web",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-m", "http.server", "8001", "--directory", "/models"],
        "resources": {
            "requests": {"cpu": "20m", "memory": "20Mi"},
            "limits": {"cpu": cpu, "memory": "100Mi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {}),
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "readinessProbe": {"httpGet": {"port": 8001, "path": "/"}, "periodSeconds": 1},
    }
    user = {"runAsNonRoot": True, "runAsUser": 123456, "seccompProfile": {"type": "RuntimeDefault"}}
    labels = {
        "app": name,
        "app.kubernetes.io/managed-by": "tidegate-operator",
        "app.kubernetes.io/name": "tidegate-engine",
    }
    pod = {"securityContext": user, "containers": [container], "terminationGracePeriodSeconds": 1}
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}
    ports = [{"port": 80, "targetPort": 8001}]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": ports},
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [deployment, service]})


def until(what: str, condition: Callable[[], object], *, timeout_seconds: float = 60) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_seconds:.0f} s: {what}"
        time.sleep(0.2)


def output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def settings_of_machine() -> Machine:
    """What a cluster must not change even while it runs."""
    links = [re.sub(r"@\S+", "", line.split(": ")[1]) for line in output("ip", "-oneline", "link").splitlines()]
    return {
        "links": links,
        "addresses": re.findall(r"inet6? \S+", output("ip", "-oneline", "address")),
        "routes": output("ip", "route", "show", "table", "all"),
        "firewall": output("nft", "list", "ruleset"),
        "mounts": [line.split(" ", 3)[3] for line in Path("/proc/self/mountinfo").read_text().splitlines()],
        "sysctls": {name: Path("/proc/sys", name).read_text() for name in SYSCTLS},
    }


def leftovers() -> Machine:
    """What a cluster may have while it runs, and must have taken away when it has stopped."""
    state = str(cluster.state_folder(NAME))
    return {
        "cgroups": sorted(str(path) for path in Path("/sys/fs/cgroup").rglob(f"*tidegate-{NAME}")),
        "processes": [line for line in output("ps", "-eo", "args").splitlines() if state in line],
        "state": cluster.state_folder(NAME).exists(),
    }


@pytest.fixture(scope="module")
def machine_before() -> Machine:
    with activity.Progress() as progress:
        setup.everything(progress, ["smollm2"])
    return settings_of_machine()


@pytest.fixture(scope="module")
def running(machine_before: Machine) -> Iterator[Cluster]:
    with cluster.start(NAME, node=True, gpus=2, prometheus=True) as started:
        started.kubectl("apply", "--filename=-", input=web("web", replicas=2, gpus=1))
        started.kubectl("rollout", "status", "deployment/web", "--timeout=120s")
        yield started


@pytest.fixture(scope="module")
def pod(running: Cluster) -> str:
    return running.kubectl("get", "pods", "--selector=app=web", "--output=name").split()[0]


def test_a_restricted_pod_runs_as_any_user_without_rights_on_a_read_only_root(running: Cluster, pod: str) -> None:
    script = "id -u; grep -E 'CapEff|Seccomp:' /proc/self/status; touch /file || echo refused"
    said = running.kubectl("exec", pod, "--", "sh", "-c", script).split()
    assert said == ["123456", "CapEff:", "0000000000000000", "Seccomp:", "2", "refused"]


def test_a_pods_cpu_limit_reaches_its_cgroup(running: Cluster, pod: str) -> None:
    script = "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu.max 2>/dev/null | cut -d' ' -f1"
    assert running.kubectl("exec", pod, "--", "sh", "-c", script).strip() == "30000"


def test_a_pod_finds_a_service_by_name(running: Cluster, pod: str) -> None:
    script = "import urllib.request as u; print(u.urlopen('http://web.default.svc.cluster.local/').status)"
    assert running.kubectl("exec", pod, "--", "python3", "-c", script).strip() == "200"


def test_a_service_is_reached_from_the_machine_and_from_the_nodes_network(running: Cluster, pod: str) -> None:
    address = running.kubectl("get", "service", "web", "--output=jsonpath={.spec.clusterIP}")
    with urllib.request.urlopen(f"http://{running.forward(address, 80)}/", timeout=10) as answer:
        assert b".gguf" in answer.read()
    script = f"import urllib.request as u; print(u.urlopen('http://{address}/').status)"
    assert running.exec([sys.executable, "-c", script]).strip() == "200"


def test_logs_and_port_forward_work(running: Cluster, pod: str) -> None:
    assert "GET /" in running.kubectl("logs", pod)
    argv = [str(word) for word in (binaries.path("kubectl"), "port-forward", pod, ":8001")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=running.environment()) as forwarding:
        assert forwarding.stdout is not None
        try:
            address = forwarding.stdout.readline().split()[2]
            with urllib.request.urlopen(f"http://{address}/", timeout=10) as answer:
                assert answer.status == 200
        finally:
            forwarding.terminate()


def test_pods_beyond_the_pretended_gpus_wait_until_there_are_more(running: Cluster, pod: str) -> None:
    running.kubectl("scale", "deployment/web", "--replicas=3")
    until("a pod is refused for want of a GPU", lambda: "nvidia.com/gpu" in running.kubectl("get", "events"))
    running.set_gpus(3)
    running.kubectl("rollout", "status", "deployment/web", "--timeout=60s")


def test_prometheus_scrapes_engine_pods_and_comes_back_after_a_crash(running: Cluster, pod: str) -> None:
    url = f"{running.prometheus_url}/api/v1/targets?state=active"

    def scraped() -> list[str]:
        with urllib.request.urlopen(url, timeout=5) as answer:
            active = json.load(answer)["data"]["activeTargets"]
        return [target["labels"]["pod"] for target in active if target["labels"]["namespace"] == "default"]

    name = pod.removeprefix("pod/")
    until("the pod is a target", lambda: name in scraped())
    running.stop_prometheus()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=5)
    running.start_prometheus()
    until("the pod is a target again", lambda: name in scraped())


def test_a_second_node_is_refused_by_the_name_of_the_first(running: Cluster) -> None:
    with pytest.raises(cache.Busy, match=f"in use by the cluster {NAME}"):
        cluster.start("e2e-second", node=True)
    assert not cluster.state_folder("e2e-second").exists()


def test_a_control_plane_runs_beside_a_node_and_ends_with_its_starter(running: Cluster) -> None:
    script = (
        "import os; from tidegate_local import cluster\n"
        "started = cluster.start('e2e-beside', node=False, report=lambda line: None)\n"
        "print(started.description.pid, flush=True); os._exit(0)"
    )
    pid = int(output(sys.executable, "-c", script))
    until("its process 1 is gone", lambda: not Path(f"/proc/{pid}").exists())
    cluster.sweep()
    assert not cluster.state_folder("e2e-beside").exists()
    assert running.running()


def test_kubectls_own_message_is_what_is_raised(running: Cluster) -> None:
    with pytest.raises(CommandFailed, match=r'deployments\.apps "nothing" not found'):
        running.kubectl("get", "deployment", "nothing")


def test_the_machine_stays_as_it_was_and_nothing_is_left(running: Cluster, machine_before: Machine) -> None:
    assert settings_of_machine() == machine_before
    running.stop()
    assert settings_of_machine() == machine_before
    assert leftovers() == {"cgroups": [], "processes": [], "state": False}
