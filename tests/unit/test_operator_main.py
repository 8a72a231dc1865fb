"""The running whole, without an API server: what the probes say, and how a resync corrects deaf watches."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import httpx
import pytest

from tidegate_operator.__main__ import Operator
from tidegate_operator.cluster import ApiError, Cluster
from tidegate_operator.fleet import Engines, Fleet
from tidegate_operator.metrics import Metrics, serve_health, serve_metrics
from tidegate_operator.reconcile import Outcome, Reconciler
from tidegate_operator.resources import LLM_DEPLOYMENTS, PODS, Key, Manifest, Resource
from tidegate_operator.settings import Settings
from tidegate_operator.store import Store
from tidegate_operator.tokens import KeyStore

SETTINGS = Settings(
    namespace="n",
    watch_namespaces=("n",),
    engine_image="engine:1",
    engine_image_pull_policy="IfNotPresent",
    engine_run_as_user=None,
    gpu_budgets={},
    prometheus_url=None,
    admin_key_secret="keys",
    metrics_port=0,
    health_port=0,
    resync_seconds=0.05,
    log_level="INFO",
    kubeconfig="/k",
    pod_name="operator",
)


def thing(name: str, version: int) -> dict[str, Any]:
    labels = {"tidegate.dev/deployment": "m"}
    return {
        "metadata": {"namespace": "n", "name": name, "uid": name, "resourceVersion": str(version), "labels": labels}
    }


class Lists:
    """Lists as a test sets them, and a Secret."""

    def __init__(self) -> None:
        self.items: dict[Resource, list[dict[str, Any]]] = {}
        self.fault: ApiError | None = None
        self.lists = 0

    async def list(self, resource: Resource, namespace: str | None) -> list[dict[str, Any]]:
        if self.fault is not None:
            raise self.fault
        self.lists += 1
        return self.items.get(resource, [])

    async def get_secret(self, namespace: str, name: str) -> Manifest:
        return {"metadata": {"resourceVersion": "1"}, "data": {}}

    async def patch_secret(
        self, namespace: str, name: str, *, data: Mapping[str, str | None], resource_version: str
    ) -> None:
        return None


class Passes:
    """A reconciler that notes who came, and does what it is told."""

    def __init__(self, *outcomes: Outcome | Exception) -> None:
        self.keys: list[Key] = []
        self.outcomes = list(outcomes)

    async def reconcile(self, key: Key) -> Outcome:
        self.keys.append(key)
        outcome = self.outcomes.pop(0) if self.outcomes else Outcome(None)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Whole:
    def __init__(self) -> None:
        self.lists, self.store, self.metrics = Lists(), Store(), Metrics()
        keys = KeyStore(self.lists, namespace="n", name="keys")
        self.operator = Operator(SETTINGS, self.metrics, store=self.store, cluster=cast(Cluster, self.lists), keys=keys)

    async def resync(self, times: int) -> None:
        task = asyncio.create_task(self.operator.resync_for_ever(Fleet(cast(Engines, None))))
        passed = self.lists.lists + times * 7
        await until(lambda: self.lists.lists >= passed)
        await asyncio.sleep(0.12)  # the grace after the last list
        task.cancel()

    def count(self, name: str) -> float:
        lines = self.metrics.page().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.fixture
def whole() -> Whole:
    return Whole()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.01)


async def test_it_is_ready_once_everything_was_listed(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate_operator.__main__.RETRY_SECONDS", 0.01)
    whole.lists.fault = ApiError(404, "NotFound", "the kind is not there yet")
    listing = asyncio.create_task(whole.operator.first_list())
    await asyncio.sleep(0.05)
    assert whole.operator.why_not_ready() is not None
    assert whole.operator.why_not_live() is None
    whole.lists.fault = None
    await asyncio.wait_for(listing, 5)
    assert whole.operator.why_not_ready() is None


async def test_what_was_listed_first_is_worked_on(whole: Whole) -> None:
    whole.lists.items = {LLM_DEPLOYMENTS: [thing("m", 1), thing("n", 2)]}
    await whole.operator.first_list()
    passes = Passes()
    worker = asyncio.create_task(whole.operator.work_for_ever(cast(Reconciler, passes)))
    await until(lambda: len(passes.keys) == 2)
    worker.cancel()
    assert set(passes.keys) == {("n", "m"), ("n", "n")}


async def test_news_of_a_pod_is_work_for_its_object_and_old_news_is_none(whole: Whole) -> None:
    passes = Passes()
    worker = asyncio.create_task(whole.operator.work_for_ever(cast(Reconciler, passes)))
    whole.operator.see(PODS, thing("m-a-1", 5), False)
    await until(lambda: passes.keys == [("n", "m")])
    whole.operator.see(PODS, thing("m-a-1", 5), False)
    whole.operator.see(PODS, thing("m-a-1", 4), True)
    await asyncio.sleep(0.7)
    assert len(passes.keys) == 1
    worker.cancel()


@pytest.mark.parametrize("trouble", [ApiError(500, "", "x"), TimeoutError(), ZeroDivisionError(), Outcome(None, True)])
async def test_a_pass_that_failed_comes_again_and_the_worker_lives_on(
    whole: Whole, trouble: Outcome | Exception
) -> None:
    whole.lists.items = {LLM_DEPLOYMENTS: [thing("m", 1)]}
    await whole.operator.first_list()
    passes = Passes(trouble)
    worker = asyncio.create_task(whole.operator.work_for_ever(cast(Reconciler, passes)))
    await until(lambda: len(passes.keys) == 2)
    worker.cancel()
    assert whole.count('tidegate_operator_reconcile_total{result="ok"}') == 1
    assert whole.count("tidegate_operator_reconcile_total") == 2


async def test_a_resync_finds_what_a_watch_missed(whole: Whole) -> None:
    whole.operator.see(PODS, thing("ghost", 3), False)
    whole.lists.items = {PODS: [thing("unheard", 4)]}
    await whole.resync(1)
    assert whole.store.get(PODS, ("n", "ghost")) is None
    assert whole.store.get(PODS, ("n", "unheard")) is not None
    assert whole.count('tidegate_operator_watch_missed_total{kind="Pod"}') == 2
    assert whole.operator.why_not_live() is None, "once may be chance"


async def test_a_watch_that_misses_changes_again_and_again_is_dead(whole: Whole) -> None:
    await whole.resync(1)
    for version in (5, 6, 7):
        whole.lists.items = {PODS: [thing("p", version)]}
        await whole.resync(1)
    problem = whole.operator.why_not_live()
    assert problem is not None
    assert "Pod" in problem
    await whole.resync(2)
    assert whole.operator.why_not_live() is None


async def test_it_is_not_live_when_no_resync_ends_for_three_periods(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    await whole.operator.first_list()
    assert whole.operator.why_not_live() is None
    monkeypatch.setattr("tidegate_operator.__main__.LONGEST_PASS_SECONDS", 0.0)
    await asyncio.sleep(0.2)
    assert "no resync" in (whole.operator.why_not_live() or "")


def port_of(runner: Any) -> int:
    port: int = runner.addresses[0][1]
    return port


async def test_probes_and_metrics_are_served() -> None:
    problem: list[str] = []
    health = await serve_health(
        0, why_not_live=lambda: problem[0] if problem else None, why_not_ready=lambda: "not yet"
    )
    metrics = await serve_metrics(Metrics(), 0)
    try:
        async with httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{port_of(health)}"
            assert (await client.get(f"{url}/healthz")).text == "ok"
            ready = await client.get(f"{url}/readyz")
            assert (ready.status_code, ready.text) == (503, "not yet")
            problem.append("the watch of Pod misses changes")
            assert (await client.get(f"{url}/healthz")).status_code == 503
            page = await client.get(f"http://127.0.0.1:{port_of(metrics)}/metrics")
            assert "tidegate_operator_queue_depth" in page.text
    finally:
        await health.cleanup()
        await metrics.cleanup()
