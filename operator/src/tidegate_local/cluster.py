"""A Kubernetes cluster on this machine: started, used and stopped through `start`, `attach` and `Cluster`.

Owns the processes, their flags and the order in which they start. Binaries, images and namespaces come from the
modules of those names. Called by the tests, the demo and the command line.
"""

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from tidegate_local import binaries, cache, credentials, namespaces, store, templates

DEFAULT_NAME = "tidegate"
NODE_NAME = "node-1"
NODE_ADDRESS = "10.200.0.1"
POD_RANGE = "10.244.0.0/24"
SERVICE_RANGE = "10.96.0.0/16"
KUBERNETES_ADDRESS = "10.96.0.1"
DNS_ADDRESS = "10.96.0.10"
API_PORT = 6443
PROMETHEUS_PORT = 9090
FORWARDER = Path(__file__).parent / "forward.py"
TARGETS = Path(__file__).parent / "targets.py"
GPU_RESOURCE = "nvidia.com/gpu"
NODE_BINARIES = ("kube-scheduler", "kubelet", "kube-proxy", "coredns")

Report = Callable[[str], None]


class ClusterFailed(Exception):
    """A part of the cluster did not come up; the message says which, with the end of its log."""


class CommandFailed(Exception):
    """kubectl, helm or another command exited with an error; the message is what it printed."""


class NotRunning(Exception):
    """There is no running cluster of that name."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to bring up. `detached` clusters outlive their starter; others end with it, however it ends."""

    name: str
    node: bool
    gpus: int = 0
    prometheus: bool = False
    detached: bool = False


@dataclass(frozen=True, slots=True)
class Description:
    """What another process needs to use or stop a running cluster; kept as cluster.json in its state folder."""

    name: str
    node: bool
    pid: int
    cgroups: tuple[str, ...]
    api_port: int
    admin_token: str


def start(
    name: str,
    *,
    node: bool,
    gpus: int = 0,
    prometheus: bool = False,
    report: Report = print,
) -> "Cluster":
    """Start a cluster that ends with `stop`, with the `with` block, or with this process.

    Without `node`: etcd, API server and controller manager, in seconds. With it: scheduler, containerd, kubelet,
    kube-proxy and DNS as well, and pods that run. Raises cache.Busy, binaries.MissingBinary or ClusterFailed.
    """
    return bring_up(Plan(name=name, node=node, gpus=gpus, prometheus=prometheus), report)


def bring_up(plan: Plan, report: Report = print) -> "Cluster":
    """Start what the plan says; nothing is left behind when a part fails."""
    _require_binaries(plan)
    sweep()
    state = state_folder(plan.name)
    held = [cache.take_lock(f"cluster name {plan.name}", purpose=_purpose(plan.name))]
    try:
        if plan.node:
            held.append(store.take_lock(_purpose(plan.name)))
        state.mkdir(parents=True, mode=0o700)
        if plan.node:
            report("image store: clearing what earlier clusters left")
            with store.upkeep(held[-1]) as upkeep:
                upkeep.clear()
        inside, life = namespaces.create(state, node=plan.node, detached=plan.detached, inherited=held)
    finally:
        for handle in held:
            os.close(handle)
    try:
        described = _describe(plan, state, inside)
    except BaseException:
        inside.end(state)
        raise
    cluster = Cluster(described, life)
    try:
        cluster.start_control_plane(report)
        if plan.node:
            cluster.start_node(report)
        if plan.prometheus:
            cluster.start_prometheus()
        if plan.gpus:
            cluster.set_gpus(plan.gpus)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def attach(name: str) -> "Cluster":
    """A running cluster by name. Raises NotRunning."""
    try:
        cluster = Cluster(_read_description(state_folder(name)), None)
    except NotRunning as error:
        running = ", ".join(names())
        hint = f"running: {running} (say --name)" if running else "none is running (tidegate-local up starts one)"
        raise NotRunning(f"{error}; {hint}.") from None
    if not cluster.running():
        raise NotRunning(f"The cluster {name} is not running; start it with: tidegate-local up --name {name}")
    return cluster


def names() -> list[str]:
    """Names of the clusters that are running."""
    folders = cache.folder("clusters").glob("*/cluster.json")
    return sorted(path.parent.name for path in folders if _is_running(path.parent))


def running_node() -> "Cluster | None":
    """The running cluster that has a node, and with it the image store."""
    for name in names():
        found = attach(name)
        if found.description.node:
            return found
    return None


def state_folder(name: str) -> Path:
    return cache.root() / "clusters" / name


class Cluster:
    """A running cluster. Addresses that it gives are reachable from the machine unless named `in_cluster`."""

    def __init__(self, description: Description, life: int | None) -> None:
        self.description = description
        self.state = state_folder(description.name)
        self._inside = namespaces.Namespaces(description.pid, description.cgroups, description.node)
        self._life = life
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.description.api_port}"

    @property
    def kubeconfig(self) -> Path:
        """An administrator's kubeconfig for use on the machine."""
        return self.state / "kubeconfig"

    @property
    def ca_file(self) -> Path:
        return self.state / "ca.crt"

    @property
    def admin_token(self) -> str:
        return self.description.admin_token

    @property
    def images(self) -> list[str]:
        """Names of the images that pods can use."""
        return sorted(name for name in self.image_store.image_names() if not name.startswith("sha256:"))

    @property
    def image_store(self) -> store.Containerd:
        """The node's containerd, for imports."""
        return store.Containerd(self._inside)

    @property
    def prometheus_url_in_cluster(self) -> str:
        return f"http://{NODE_ADDRESS}:{PROMETHEUS_PORT}"

    @property
    def prometheus_url(self) -> str:
        return f"http://{self.forward(NODE_ADDRESS, PROMETHEUS_PORT)}"

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """Standard output of kubectl as administrator. Raises CommandFailed with what it printed to standard error."""
        return self._run([binaries.path("kubectl"), *arguments], input)

    def helm(self, *arguments: str) -> str:
        return self._run([binaries.path("helm"), *arguments], None)

    def exec(self, argv: Sequence[str | Path]) -> str:
        """Run a command to its end in the node's network; its standard output. Raises CommandFailed."""
        return self._run(self._inside.enter_network(argv), None)

    def popen(self, argv: Sequence[str | Path]) -> subprocess.Popen[str]:
        """Start a command in the node's network, with pipes; it is the caller's child, to be ended by the caller."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self._inside.enter_network(argv), stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=self.environment()
        )

    def enter(self, argv: Sequence[str | Path]) -> list[str]:
        """The command line that runs `argv` in all of the cluster's namespaces, for a look around by hand."""
        return self._inside.enter(argv)

    def environment(self) -> dict[str, str]:
        """Environment in which kubectl and helm find this cluster and leave no trace in the home folder."""
        folders = {name: str(self.state / name.lower()) for name in _TOOL_FOLDERS}
        return {**namespaces.environment(), "KUBECONFIG": str(self.kubeconfig), **folders}

    def forward(self, host: str, port: int) -> str:
        """`127.0.0.1:PORT` of a forwarder to a Service, a pod or the node inside. It lives as long as the cluster."""
        if not self.description.node:
            return f"{host}:{port}"
        known = self.state / "forwards" / f"{host}:{port}"
        if not known.exists():
            known.parent.mkdir(exist_ok=True)
            known.write_text(str(_forward(self._inside, host, port)))
        return f"127.0.0.1:{known.read_text()}"

    def set_gpus(self, count: int) -> None:
        """Put `count` fake GPUs on the node; the scheduler and limits honour them until the kubelet restarts."""
        amounts = {"capacity": {GPU_RESOURCE: str(count)}, "allocatable": {GPU_RESOURCE: str(count)}}
        patch = json.dumps({"status": amounts})
        self.kubectl("patch", "node", NODE_NAME, "--subresource=status", "--type=merge", f"--patch={patch}")

    def start_prometheus(self) -> None:
        """Start Prometheus on the node (again, on the same data) and wait until it answers."""
        config = self.state / "prometheus.yaml"
        config.write_text(self._render("prometheus.yaml"))
        flags = [f"--config.file={config}", f"--storage.tsdb.path={self.state}/prometheus", "--log.level=warn"]
        address = f"--web.listen-address={NODE_ADDRESS}:{PROMETHEUS_PORT}"
        if not (self.state / "pids" / "targets").exists():
            self._spawn("targets", _targets(self.state))
        self._spawn("prometheus", ["prometheus", *flags, address])
        url = f"{self.prometheus_url}/-/ready"
        self._wait("prometheus", lambda: _answers(url, None), timeout_seconds=30)

    def stop_prometheus(self) -> None:
        """Kill Prometheus as a crash would; its data stay for the next start."""
        self._kill("prometheus")

    def log(self, name: str) -> str:
        """What a component has logged: etcd, kube-apiserver, kubelet, containerd, ..."""
        return (self.state / "logs" / f"{name}.log").read_text(errors="replace")

    def running(self) -> bool:
        return self._inside.belong_to(self.state)

    def stop(self) -> None:
        """End everything inside and remove the state folder; the caches stay."""
        self._inside.end(self.state)
        for process in self._processes.values():
            process.wait()
        if self._life is not None:
            os.close(self._life)
            self._life = None
        shutil.rmtree(self.state, ignore_errors=True)

    def start_control_plane(self, report: Report) -> None:
        """etcd, API server, controller manager; ready when the controllers have made the first service account."""
        api_port = API_PORT if self.description.node else self.description.api_port
        etcd_port, peer_port = (2379, 2380) if self.description.node else _free_ports(2)
        etcd, peer = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
        report("control plane: etcd, kube-apiserver, kube-controller-manager")
        self._spawn("etcd", _etcd(self.state, client=etcd, peer=peer))
        bind = "0.0.0.0" if self.description.node else "127.0.0.1"
        self._spawn("kube-apiserver", _api_server(self.state, etcd=etcd, bind=bind, port=api_port))
        trust = ssl.create_default_context(cafile=str(self.ca_file))
        self._wait("kube-apiserver", lambda: _answers(f"{self.server}/readyz", trust), timeout_seconds=90)
        self._spawn("kube-controller-manager", _controller_manager(self.state))
        self._wait("kube-controller-manager", self._has_default_service_account, timeout_seconds=60)

    def start_node(self, report: Report) -> None:
        """Scheduler, containerd, kubelet, kube-proxy and DNS; ready when the node is."""
        for name in ("kubelet.yaml", "kube-proxy.yaml", "Corefile"):
            (self.state / name).write_text(self._render(name))
        (self.state / "cni").mkdir()
        (self.state / "cni" / "bridge.conflist").write_text(self._render("bridge.conflist"))
        (self.state / "containerd.toml").write_text(store.configuration(self.state, upkeep=False))
        report("node: containerd, kubelet, kube-scheduler, kube-proxy, CoreDNS")
        self._spawn("containerd", store.containerd(self.state))
        self._wait("containerd", self._containerd_answers, timeout_seconds=60)
        self._spawn("kube-scheduler", _scheduler(self.state))
        self._spawn("kubelet", _kubelet(self.state))
        self._spawn("kube-proxy", [binaries.path("kube-proxy"), "--config", self.state / "kube-proxy.yaml"])
        self._spawn("coredns", [binaries.path("coredns"), "-conf", self.state / "Corefile"])
        self.kubectl("apply", "--server-side", "--filename=-", input=self._render("dns.yaml"))
        self._wait("kubelet", self._node_is_ready, timeout_seconds=120)

    def _render(self, name: str) -> str:
        values = {
            "state": str(self.state),
            "socket": store.SOCKET,
            "node_name": NODE_NAME,
            "node_address": NODE_ADDRESS,
            "pod_range": POD_RANGE,
            "dns_address": DNS_ADDRESS,
        }
        return templates.render(name, values)

    def _has_default_service_account(self) -> bool:
        return bool(self.kubectl("get", "serviceaccount", "default", "--ignore-not-found", "--output=name"))

    def _containerd_answers(self) -> bool:
        try:
            store.run_ctr(self._inside, ["version"])
        except store.StoreFailed:
            return False
        return True

    def _node_is_ready(self) -> bool:
        query = 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}'
        return self.kubectl("get", "nodes", "--output", query) == "True"

    def _run(self, argv: Sequence[str | Path], input: str | None) -> str:
        words = [str(word) for word in argv]
        done = subprocess.run(words, input=input, capture_output=True, text=True, env=self.environment())
        if done.returncode != 0:
            raise CommandFailed(f"{Path(words[0]).name} {' '.join(words[1:])}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def _spawn(self, name: str, argv: Sequence[str | Path]) -> None:
        pids = self.state / "pids"
        pids.mkdir(exist_ok=True)
        with (self.state / "logs" / f"{name}.log").open("a") as log:
            self._processes[name] = subprocess.Popen(
                self._inside.enter(argv, pid_file=pids / name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=namespaces.environment(),
                cwd="/",
                start_new_session=True,
            )

    def _kill(self, name: str) -> None:
        pid = (self.state / "pids" / name).read_text().strip()
        self._run(self._inside.enter(["kill", "-KILL", pid]), None)
        process = self._processes.pop(name, None)
        if process is not None:
            process.wait()

    def _wait(self, name: str, ready: Callable[[], bool], *, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not ready():
            ended = [other for other, process in self._processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                what = f"{ended[0]} exited" if ended else f"{name} was not ready after {timeout_seconds:.0f} s"
                raise ClusterFailed(f"{what}; the end of its log:\n{self.log(ended[0] if ended else name)[-3000:]}")
            time.sleep(0.05)


_TOOL_FOLDERS = ("KUBECACHEDIR", "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")


def _etcd(state: Path, *, client: str, peer: str) -> list[str | Path]:
    listen = [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    peers = [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"]
    quick = ["--unsafe-no-fsync", "--log-level=warn"]
    return [binaries.path("etcd"), f"--data-dir={state / 'etcd'}", *listen, *peers, *quick]


def _api_server(state: Path, *, etcd: str, bind: str, port: int) -> list[str | Path]:
    return [
        binaries.path("kube-apiserver"),
        f"--etcd-servers={etcd}",
        f"--bind-address={bind}",
        f"--secure-port={port}",
        # A loopback address is refused here; without a node nothing uses it.
        f"--advertise-address={NODE_ADDRESS}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        f"--tls-cert-file={state / 'apiserver.crt'}",
        f"--tls-private-key-file={state / 'apiserver.key'}",
        f"--cert-dir={state}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={state / 'service-accounts.pub'}",
        f"--service-account-signing-key-file={state / 'service-accounts.key'}",
        f"--token-auth-file={state / 'tokens.csv'}",
        f"--kubelet-client-certificate={state / 'kubelet-client.crt'}",
        f"--kubelet-client-key={state / 'kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--authorization-mode=RBAC",
    ]


def _controller_manager(state: Path) -> list[str | Path]:
    return [
        binaries.path("kube-controller-manager"),
        f"--kubeconfig={state / 'node.kubeconfig'}",
        f"--service-account-private-key-file={state / 'service-accounts.key'}",
        f"--root-ca-file={state / 'ca.crt'}",
        "--leader-elect=false",
        "--secure-port=0",
    ]


def _scheduler(state: Path) -> list[str | Path]:
    flags = ["--leader-elect=false", "--secure-port=0"]
    return [binaries.path("kube-scheduler"), f"--kubeconfig={state / 'node.kubeconfig'}", *flags]


def _targets(state: Path) -> list[str | Path]:
    server = f"https://{NODE_ADDRESS}:{API_PORT}"
    files = [str(state / name) for name in ("ca.crt", "tokens.csv", "targets.json")]
    return [sys.executable, "-I", "-S", str(TARGETS), server, *files]


def _kubelet(state: Path) -> list[str | Path]:
    return [
        binaries.path("kubelet"),
        f"--config={state / 'kubelet.yaml'}",
        f"--kubeconfig={state / 'node.kubeconfig'}",
        f"--root-dir={state / 'kubelet'}",
        f"--cert-dir={state / 'kubelet-certificates'}",
        f"--node-ip={NODE_ADDRESS}",
        f"--hostname-override={NODE_NAME}",
    ]


def _describe(plan: Plan, state: Path, inside: namespaces.Namespaces) -> Description:
    """Credentials, kubeconfigs and the API server's port on the machine, written to the state folder."""
    made = credentials.create(state, ["127.0.0.1", NODE_ADDRESS, KUBERNETES_ADDRESS])
    port = _forward(inside, NODE_ADDRESS, API_PORT) if plan.node else _free_ports(1)[0]
    outside = f"https://127.0.0.1:{port}"
    within = f"https://{NODE_ADDRESS}:{API_PORT}" if plan.node else outside
    credentials.kubeconfig(state / "kubeconfig", server=outside, credentials=made)
    credentials.kubeconfig(state / "node.kubeconfig", server=within, credentials=made)
    described = Description(plan.name, plan.node, inside.pid, inside.cgroups, port, made.admin_token)
    path = state / "cluster.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(asdict(described)))
    return described


def _read_description(state: Path) -> Description:
    try:
        content = json.loads((state / "cluster.json").read_text())
    except FileNotFoundError:
        raise NotRunning(f"There is no cluster called {state.name}") from None
    return Description(**{**content, "cgroups": tuple(content["cgroups"])})


def _is_running(state: Path) -> bool:
    described = _read_description(state)
    return namespaces.Namespaces(described.pid, described.cgroups, described.node).belong_to(state)


def sweep() -> None:
    """Remove what clusters left behind that ended without `stop`: killed with their starter, or with the machine."""
    for state in cache.folder("clusters").iterdir():
        try:
            with cache.lock(f"cluster name {state.name}", purpose="a clean-up"):
                _clear(state)
        except cache.Busy:
            continue


def _clear(state: Path) -> None:
    """Remove the state of a cluster that ended without `stop`."""
    if (state / "cluster.json").exists():
        described = _read_description(state)
        namespaces.Namespaces(described.pid, described.cgroups, described.node).end(state)
    shutil.rmtree(state, ignore_errors=True)


def _purpose(name: str) -> str:
    return f"the cluster {name}, which `tidegate-local down --name {name}` stops"


def _require_binaries(plan: Plan) -> None:
    """Fail before anything is started, not half-way."""
    for name in ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", *(NODE_BINARIES if plan.node else ())):
        binaries.path(name)


def _forward(inside: namespaces.Namespaces, host: str, port: int) -> int:
    """Start a forwarder inside for a socket made out here; the port of that socket."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        argv = [sys.executable, "-I", "-S", str(FORWARDER), str(listener.fileno()), host, str(port)]
        subprocess.Popen(
            inside.enter(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=namespaces.environment(),
            start_new_session=True,
            pass_fds=(listener.fileno(),),
        )
        return int(listener.getsockname()[1])


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago: all are held before any is let go, so that they differ."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(listener.getsockname()[1]) for listener in held]
    finally:
        for listener in held:
            listener.close()


def _answers(url: str, trust: ssl.SSLContext | None) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2, context=trust) as answer:  # noqa: S310 (our own http address)
            return bool(answer.status == 200)
    except OSError:
        return False
