"""How fast and how quiet the operator is with many objects, on a real API server with controllers and no node.

Prints seconds from the operator's start until every object is reconciled (first from nothing, then after a restart with
nothing to do), requests that write within a minute at rest, and the operator's memory.
"""

import argparse
import asyncio
import contextlib
import os
import re
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tidegate_local import cluster

ROOT = Path(__file__).parents[2]
GROUP = "/apis/tidegate.dev/v1alpha1/namespaces/bench/llmdeployments"
METRICS_PORT, HEALTH_PORT = 29090, 28080


def api_client(running: cluster.Cluster) -> httpx.AsyncClient:
    trust = ssl.create_default_context(cafile=str(running.ca_file))
    headers = {"Authorization": f"Bearer {running.admin_token}"}
    return httpx.AsyncClient(base_url=running.server, verify=trust, headers=headers, timeout=60)


async def create_objects(client: httpx.AsyncClient, count: int) -> None:
    slots = asyncio.Semaphore(16)

    async def create(number: int) -> None:
        body = {
            "apiVersion": "tidegate.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": f"model-{number}"},
            "spec": {
                "model": {"uri": "file:///models/m.gguf"},
                "autoscaling": {"mode": "Auto", "minReplicas": 1, "maxReplicas": 4},
            },
        }
        async with slots:
            (await client.post(GROUP, json=body)).raise_for_status()

    await asyncio.gather(*map(create, range(count)))


async def listed(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    response = await client.get(path)
    response.raise_for_status()
    return {item["metadata"]["name"]: item for item in response.json()["items"]}


def is_reconciled(item: dict[str, Any]) -> bool:
    status = item.get("status", {})
    return bool(status.get("conditions")) and status.get("observedGeneration") == item["metadata"]["generation"]


def start_operator(running: cluster.Cluster, log: Path) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "KUBERNETES_SERVICE_HOST"} | {
        "KUBECONFIG": str(running.kubeconfig),
        "TIDEGATE_NAMESPACE": "bench",
        "TIDEGATE_WATCH_NAMESPACES": "bench",
        "TIDEGATE_ENGINE_IMAGE": "engine:none",
        "TIDEGATE_ADMIN_KEY_SECRET": "keys",
        "TIDEGATE_METRICS_PORT": str(METRICS_PORT),
        "TIDEGATE_HEALTH_PORT": str(HEALTH_PORT),
    }
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "tidegate_operator", "run"], env=environment, stdout=file, stderr=file
        )


def memory_mib(pid: int) -> dict[str, int]:
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: int(value) // 1024 for name, value in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", text, re.M)}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_of_all(operator: int) -> dict[str, float]:
    """CPU seconds so far of everything that takes part: the operator is not the one that is short of it."""
    names = {"etcd", "kube-apiserver", "kube-controller-manager"}
    seconds = {"operator": cpu_seconds(operator), "this bench": time.process_time()}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            program = Path((folder / "cmdline").read_text().split("\0", 1)[0]).name
            if program in names:
                seconds[program] = cpu_seconds(int(folder.name))
    return seconds


def own_counters() -> dict[str, float]:
    """Requests of the operator that write, its passes, and objects that wait for one; nothing while it starts."""
    try:
        page = httpx.get(f"http://127.0.0.1:{METRICS_PORT}/metrics").text
    except httpx.HTTPError:
        return {}
    series = {
        "writes": r'^tidegate_operator_api_requests_total\{code="\d+",verb="(?!GET)\w+"\} (\S+)',
        "passes": r"^tidegate_operator_reconcile_total\{\S+ (\S+)",
        "waiting": r"^tidegate_operator_queue_depth (\S+)",
    }
    return {name: sum(map(float, re.findall(pattern, page, re.M))) for name, pattern in series.items()}


async def until_reconciled(client: httpx.AsyncClient, count: int, process: subprocess.Popen[bytes]) -> float:
    """The time (as of `perf_counter`) at which the last object was reconciled.

    A pass writes the status first and the Deployment last. Counting Deployments costs little; lists of a thousand
    objects, which prove it afterwards, would be the heaviest load here.
    """
    while process.poll() is None:
        if await counted(client, "/apis/apps/v1/namespaces/bench/deployments") == count:
            at = time.perf_counter()
            if all(map(is_reconciled, (await listed(client, GROUP)).values())):
                return at
        await asyncio.sleep(0.5)
    raise RuntimeError(f"the operator ended with {process.returncode}")


async def counted(client: httpx.AsyncClient, path: str) -> int:
    response = await client.get(path, params={"limit": 1})
    response.raise_for_status()
    page = response.json()
    return len(page["items"]) + int(page["metadata"].get("remainingItemCount", 0))


async def until_quiet() -> None:
    before = own_counters()
    while True:
        await asyncio.sleep(5)
        after = own_counters()
        if after["writes"] == before["writes"]:
            return
        before = after


async def until_idle_after_restart(process: subprocess.Popen[bytes], count: int) -> None:
    while process.poll() is None and own_counters().get("passes", 0) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.2)


async def bench(running: cluster.Cluster, count: int, *, rest_seconds: float, log: Path) -> None:
    async with api_client(running) as client:
        started = time.perf_counter()
        await create_objects(client, count)
        print(f"{count} objects created in {time.perf_counter() - started:.1f} s")

        started = time.perf_counter()
        process = start_operator(running, log)
        try:
            cpu_before = cpu_of_all(process.pid)
            reconciled = await until_reconciled(client, count, process)
            print(f"from operator start until all are reconciled: {reconciled - started:.1f} s (goal: < 60 s)")
            spent = {name: seconds - cpu_before.get(name, 0.0) for name, seconds in cpu_of_all(process.pid).items()}
            print("CPU seconds for that: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items()))
            print(f"memory: {memory_mib(process.pid)} MiB")
            await until_quiet()
            total = own_counters()
            print(
                f"no write any more after {time.perf_counter() - started:.0f} s: an object took "
                f"{total['writes'] / count:.1f} writes and {total['passes'] / count:.1f} passes"
            )
            before, versions, cpu = own_counters(), await listed(client, GROUP), cpu_seconds(process.pid)
            await asyncio.sleep(rest_seconds)
            after, later = own_counters(), await listed(client, GROUP)
            changed = sum(
                versions[name]["metadata"]["resourceVersion"] != later[name]["metadata"]["resourceVersion"]
                for name in versions
            )
            minutes = rest_seconds / 60
            print(
                f"at rest: {(after['writes'] - before['writes']) / minutes:.1f} writes a minute (goal: 0), "
                f"{changed} objects changed, {(after['passes'] - before['passes']) / minutes:.0f} passes a minute, "
                f"{(cpu_seconds(process.pid) - cpu) / rest_seconds:.1%} of a core"
            )
            print(f"memory: {memory_mib(process.pid)} MiB (goal: < 250)")
        finally:
            process.terminate()
            process.wait(30)

        started = time.perf_counter()
        process = start_operator(running, log)
        try:
            await until_idle_after_restart(process, count)
            print(f"restart with nothing to do: {time.perf_counter() - started:.1f} s for a pass over all")
            later_still = await listed(client, GROUP)
            changed = sum(
                later[name]["metadata"]["resourceVersion"] != later_still[name]["metadata"]["resourceVersion"]
                for name in later
            )
            print(f"objects changed by the restart: {changed}; memory: {memory_mib(process.pid)} MiB")
        finally:
            process.terminate()
            process.wait(30)


def wait_for_kind(running: cluster.Cluster) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            running.kubectl("get", "llmdeployments")
        except cluster.CommandFailed:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError("the kind LLMDeployment is not served")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=1000)
    parser.add_argument("--rest-seconds", type=float, default=60)
    options = parser.parse_args()
    with cluster.start(f"bench-operator-{os.getpid()}", node=False) as running:
        running.kubectl("apply", "-f", str(ROOT / "crds" / "tidegate.dev_llmdeployments.yaml"))
        wait_for_kind(running)
        running.kubectl("create", "namespace", "bench")
        running.kubectl("-n", "bench", "create", "secret", "generic", "keys")
        log = running.kubeconfig.parent / "operator.log"
        try:
            asyncio.run(bench(running, options.objects, rest_seconds=options.rest_seconds, log=log))
        finally:
            print("".join(log.read_text().splitlines(keepends=True)[-10:]) if log.exists() else "")


if __name__ == "__main__":
    main()
