"""One pass, with ports that fail on demand: the faults that a real cluster does not give when asked."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest

from tidegate_engine.settings import BatchSettings
from tidegate_operator import render
from tidegate_operator.cluster import ApiError
from tidegate_operator.demand import Measured
from tidegate_operator.engines import Answer, Applied, Refused, Unreachable
from tidegate_operator.events import BURST, SECONDS_PER_EVENT, EventBudget
from tidegate_operator.fleet import Fleet
from tidegate_operator.gpus import Prices
from tidegate_operator.journal import Entry
from tidegate_operator.metrics import Metrics
from tidegate_operator.observation import EngineInfo
from tidegate_operator.pods import DELETION_COST
from tidegate_operator.reconcile import Installation, Outcome, Ports, Reconciler, keep_transition_times
from tidegate_operator.replay import replay
from tidegate_operator.resources import DEPLOYMENTS, LLM_DEPLOYMENTS, PODS, Key, Manifest, Resource
from tidegate_operator.store import Store
from tidegate_operator.tokens import KeyRing, new_private_key, rotated, sign

KEY: Key = ("n", "m")
NOW = 1_800_000_000.0
Write = tuple[str, str]


class MemoryCluster:
    """An API server in a dict: versions, preconditions, a log of writes, and faults by (verb, kind)."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, Key], dict[str, Any]] = {}
        self.writes: list[Write] = []
        self.events: list[tuple[str, str]] = []
        self.costs: dict[str, str] = {}
        self.faults: dict[Write, ApiError] = {}
        self.version = 100

    def stored(self, kind: str, key: Key = KEY) -> dict[str, Any]:
        return self.objects[kind, key]

    def put(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        metadata = {"uid": f"uid-{kind}", "generation": 1} | body["metadata"] | {"resourceVersion": str(self.version)}
        stored = body | {"metadata": metadata}
        self.objects[kind, (metadata["namespace"], metadata["name"])] = stored
        return deepcopy(stored)

    async def get(self, resource: Resource, address: Key) -> Manifest | None:
        self._fail("get", resource.kind)
        return deepcopy(self.objects.get((resource.kind, address)))

    async def apply(self, resource: Resource, manifest: Manifest, *, only_if_absent: bool = False) -> Manifest:
        self._fail("apply", resource.kind)
        address = (manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        if only_if_absent and (resource.kind, address) in self.objects:
            raise ApiError(409, "Conflict", "it is there")
        self.writes.append(("apply", resource.kind))
        return self.put(resource.kind, deepcopy(dict(manifest)))

    async def apply_status(self, seen: Manifest, status: Mapping[str, Any]) -> Manifest:
        self._fail("status", "LLMDeployment")
        stored = self.objects.get(("LLMDeployment", KEY))
        if stored is None:
            raise ApiError(404, "NotFound", "gone")
        if stored["metadata"]["resourceVersion"] != seen["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "changed since")
        self.writes.append(("status", "LLMDeployment"))
        return self.put("LLMDeployment", stored | {"status": deepcopy(dict(status))})

    async def annotate_pod(self, address: Key, annotations: Mapping[str, str]) -> None:
        self._fail("annotate", "Pod")
        self.writes.append(("annotate", "Pod"))
        self.costs[address[1]] = annotations[DELETION_COST]

    async def post_event(self, regarding: Manifest, *, kind: str, reason: str, note: str) -> None:
        self._fail("event", "Event")
        self.events.append((kind, reason))

    def _fail(self, verb: str, kind: str) -> None:
        if (verb, kind) in self.faults:
            raise self.faults[verb, kind]


class NoMetrics:
    """Both metrics sources, having seen nothing."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def watch(self, pods: Iterable[tuple[str, str, str]], *, sync_period_seconds: float) -> None:
        self.asked.append("scrape")

    def measured(self, incarnations: Iterable[str]) -> Measured:
        return Measured()

    async def measure(self, url: str, *, namespace: str, name: str, now: float) -> Measured:
        self.asked.append(url)
        return Measured(error=f"PrometheusError: {url} is down")


@dataclass
class FakeEngines:
    """Engines that answer what they are told to."""

    answer: Answer | None = None
    known: EngineInfo | None = None
    told: list[tuple[int, BatchSettings]] = field(default_factory=list)

    async def batching(self, ip: str, *, token: str) -> Answer:
        return Unreachable("not yet")

    async def apply(self, ip: str, *, token: str, generation: int, settings: BatchSettings) -> Answer:
        self.told.append((generation, settings))
        return self.answer or Applied(generation, settings)

    async def info(self, ip: str, *, token: str) -> EngineInfo | None:
        return self.known


@dataclass(frozen=True)
class Keys:
    ring: KeyRing = field(default_factory=lambda: rotated(None, new_key=new_private_key(), now=0.0))

    @property
    def jwks(self) -> dict[str, object]:
        return self.ring.jwks()

    def token(self, audience: str, now: float) -> str:
        return sign(self.ring, audience=audience, now=now)


class Noted(list[Entry]):
    """A journal in memory."""

    def write(self, entry: Entry) -> None:
        self.append(entry)


class World:
    """A reconciler with its ports, and one object."""

    def __init__(self, prometheus_url: str | None = None) -> None:
        self.cluster, self.metrics, self.engines, self.store = MemoryCluster(), NoMetrics(), FakeEngines(), Store()
        self.now = NOW
        self.keys = Keys()
        self.journal = Noted()
        self.prometheus_url = prometheus_url
        self.gpu_budgets: dict[str, int] = {}
        self.reconciler = self.new_reconciler()

    def new_reconciler(self) -> Reconciler:
        ports = Ports(
            cluster=self.cluster,
            scraper=self.metrics,
            prometheus=self.metrics,
            fleet=Fleet(self.engines),
            keys=self.keys,
            clock=lambda: self.now,
            journal=self.journal,
        )
        installation = Installation(
            render.Defaults("engine:1"), self.prometheus_url, self.gpu_budgets, Prices({"L4": 0.25})
        )
        return Reconciler(ports, self.store, installation=installation, metrics=Metrics())

    def create(self, **spec: Any) -> None:
        body = {"metadata": {"namespace": "n", "name": "m"}, "spec": {"model": {"uri": "file:///m.gguf"}, **spec}}
        self.store.put(LLM_DEPLOYMENTS, self.cluster.put("LLMDeployment", body))

    def change(self, **spec: Any) -> None:
        """A user edits the object, and the watch tells."""
        stored = self.cluster.stored("LLMDeployment")
        metadata = stored["metadata"] | {"generation": stored["metadata"]["generation"] + 1}
        body = self.cluster.put("LLMDeployment", stored | {"metadata": metadata, "spec": stored["spec"] | spec})
        self.store.put(LLM_DEPLOYMENTS, body)

    def add_pod(self, name: str, *, ready: bool = True, replica_set: str = "m-abc") -> None:
        labels = {"tidegate.dev/deployment": "m", "pod-template-hash": "abc"}
        owner = {"kind": "ReplicaSet", "name": replica_set, "uid": "rs", "controller": True}
        metadata = {"namespace": "n", "name": name, "uid": name, "labels": labels, "ownerReferences": [owner]}
        status = {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T00:00:00Z"}],
            "containerStatuses": [{"state": {"running": {}}, "ready": ready}],
        }
        self.store.put(PODS, self.cluster.put("Pod", {"metadata": metadata, "spec": {}, "status": status}))

    async def run(self) -> Outcome:
        return await self.reconciler.reconcile(KEY)

    def condition(self, kind: str) -> dict[str, Any]:
        conditions: list[dict[str, Any]] = self.cluster.stored("LLMDeployment")["status"]["conditions"]
        return next(condition for condition in conditions if condition["type"] == kind)

    def forget_writes(self) -> None:
        self.cluster.writes.clear()
        self.cluster.events.clear()


@pytest.fixture
def world() -> World:
    made = World()
    made.create()
    return made


async def test_a_pass_writes_status_and_children_and_the_next_one_nothing(world: World) -> None:
    outcome = await world.run()
    assert not outcome.failed
    applied = [kind for verb, kind in world.cluster.writes if verb == "apply"]
    assert applied == ["ServiceAccount", "ConfigMap", "Service", "PodDisruptionBudget", "Deployment"]
    assert world.condition("Ready")["status"] == "False"
    await world.run()
    world.forget_writes()
    world.now += 1000
    await world.run()
    assert world.cluster.writes == []
    assert world.cluster.events == []


async def test_every_pass_is_on_record_with_what_makes_the_same_decision_again(world: World) -> None:
    await world.run()
    world.add_pod("m-abc-1")
    world.now += 30
    await world.run()
    await world.run()
    assert [entry.name for entry in world.journal] == ["n/m"] * 3
    assert [entry.memory for entry in world.journal[1:]] == [entry.decision.memory for entry in world.journal[:2]]
    assert [replica.name for replica in world.journal[1].facts.replicas] == ["m-abc-1"]
    assert [each.now for each in replay(world.journal)] == [entry.decision for entry in world.journal]


async def test_the_status_with_a_new_generation_is_written_before_anything_hears_of_it(world: World) -> None:
    await world.run()
    assert world.cluster.writes[0] == ("status", "LLMDeployment")
    assert world.cluster.stored("LLMDeployment")["status"]["batching"]["generation"] == 1


@pytest.mark.parametrize("kind", ["ServiceAccount", "ConfigMap", "Service", "PodDisruptionBudget", "Deployment"])
@pytest.mark.parametrize("status", [409, 422, 403, 500, 0])
async def test_one_refused_child_stops_neither_the_others_nor_the_status(world: World, kind: str, status: int) -> None:
    world.cluster.faults["apply", kind] = ApiError(status, "Refused", "for a test")
    outcome = await world.run()
    assert outcome.failed
    assert len([verb for verb, _ in world.cluster.writes if verb == "apply"]) == 4
    told = [world.condition("Stalled"), world.condition("Reconciling")]
    assert any(condition["status"] == "True" and kind in condition["message"] for condition in told)

    await world.run()
    world.forget_writes()
    await world.run()
    assert world.cluster.writes == [], "the same trouble again is no news"

    world.cluster.faults.clear()
    assert not (await world.run()).failed
    assert world.condition("Stalled")["status"] == "False"
    assert world.condition("Reconciling")["reason"] != "ReconcileFailed"


async def test_a_budget_of_gpus_bounds_an_object_by_what_the_others_claim() -> None:
    world = World()
    world.gpu_budgets["nvidia.com/gpu"] = 8
    scaled = {"mode": "Auto", "minReplicas": 1, "maxReplicas": 9, "importance": 50}
    world.create(autoscaling={**scaled, "schedules": [{"name": "all", **ALL_DAY, "minReplicas": 6}]})
    other: dict[str, Any] = {
        "metadata": {"namespace": "n", "name": "other"},
        "spec": {"model": {"uri": "file:///m.gguf"}},
    }
    other["spec"]["autoscaling"] = {**scaled, "minReplicas": 3, "importance": 60}
    world.store.put(LLM_DEPLOYMENTS, world.cluster.put("LLMDeployment", other))
    await world.run()
    assert world.cluster.stored("Deployment")["spec"]["replicas"] == 5
    decision = world.cluster.stored("LLMDeployment")["status"]["autoscaling"]["lastDecision"]
    assert (decision["inputs"]["minReplicas"], decision["inputs"]["maxReplicas"]) == (5, 5)
    other["spec"]["resources"] = {"gpu": {"resourceName": "amd.com/gpu"}}
    other["metadata"]["generation"] = 2
    world.store.put(LLM_DEPLOYMENTS, world.cluster.put("LLMDeployment", other))
    world.now += 5
    await world.run()
    assert world.cluster.stored("Deployment")["spec"]["replicas"] == 6, "another kind of GPU is no matter"


ALL_DAY = {"startTime": "00:00", "endTime": "00:00"}


async def test_a_spec_that_cannot_be_read_is_told_once_and_touches_nothing(world: World) -> None:
    await world.run()
    world.change(replicas="many")
    world.forget_writes()
    assert await world.run() == Outcome(None)
    assert world.condition("Stalled")["reason"] == world.condition("Ready")["reason"] == "InvalidSpec"
    assert "spec.replicas" in world.condition("Stalled")["message"]
    assert world.condition("Stalled")["observedGeneration"] == 2
    assert world.cluster.writes == [("status", "LLMDeployment")]
    world.forget_writes()
    await world.run()
    assert world.cluster.writes == []


async def test_a_new_object_that_cannot_be_read_has_conditions_at_once() -> None:
    world = World()
    world.create(model={})
    await world.run()
    assert world.condition("Ready")["status"] == "False"
    assert ("Warning", "InvalidSpec") in world.cluster.events


async def test_an_object_that_is_gone_or_going_is_left_to_the_garbage_collector(world: World) -> None:
    await world.run()
    world.forget_writes()
    stored = world.cluster.stored("LLMDeployment")
    going = stored | {"metadata": stored["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
    world.store.put(LLM_DEPLOYMENTS, world.cluster.put("LLMDeployment", going))
    assert await world.run() == Outcome(None)
    assert await world.reconciler.reconcile(("n", "never-there")) == Outcome(None)
    assert world.cluster.writes == []


async def test_a_status_conflict_voids_the_pass_and_the_next_one_sees_what_changed(world: World) -> None:
    await world.run()
    stored = world.cluster.stored("LLMDeployment")
    metadata = stored["metadata"] | {"generation": 2}
    world.cluster.put("LLMDeployment", stored | {"metadata": metadata, "spec": stored["spec"] | {"replicas": 5}})
    world.add_pod("m-a-1", ready=False)  # news that changes the status, while the watch is late with the spec
    outcome = await world.run()
    assert not outcome.failed
    assert outcome.recheck_after_seconds is not None
    assert outcome.recheck_after_seconds < 1
    await world.run()
    assert world.cluster.stored("Deployment")["spec"]["replicas"] == 5
    assert world.condition("Ready")["observedGeneration"] == 2


async def test_an_object_that_vanishes_under_a_pass_is_forgotten(world: World) -> None:
    await world.run()
    del world.cluster.objects["LLMDeployment", KEY]
    world.add_pod("m-a-1", ready=False)
    await world.run()
    assert world.store.get(LLM_DEPLOYMENTS, KEY) is None
    assert await world.run() == Outcome(None)


async def test_a_child_of_somebody_else_is_neither_taken_nor_changed(world: World) -> None:
    theirs = {"metadata": {"namespace": "n", "name": "m", "labels": {}}, "spec": {"selector": {"app": "x"}}}
    world.cluster.put("Service", theirs)
    outcome = await world.run()
    assert outcome.failed
    assert world.condition("Reconciling")["reason"] == "NameTaken"
    assert (world.condition("Ready")["status"], world.condition("Ready")["reason"]) == ("False", "NameTaken")
    assert ("Warning", "NameTaken") in world.cluster.events
    assert world.cluster.stored("Service")["spec"] == {"selector": {"app": "x"}}
    del world.cluster.objects["Service", KEY]
    assert not (await world.run()).failed


async def test_children_of_an_earlier_object_of_the_same_name_are_waited_for(world: World) -> None:
    owner = {"uid": "earlier", "controller": True}
    old = {"metadata": {"namespace": "n", "name": "m", "ownerReferences": [owner]}, "spec": {"replicas": 7}}
    world.store.put(DEPLOYMENTS, world.cluster.put("Deployment", old))
    assert (await world.run()).failed
    assert world.cluster.stored("Deployment")["spec"] == {"replicas": 7}


async def test_a_defect_is_told_in_the_conditions_and_raised(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("for a test")

    monkeypatch.setattr("tidegate_operator.policy.decide", broken)
    with pytest.raises(ZeroDivisionError):
        await world.run()
    assert world.condition("Reconciling")["reason"] == "ReconcileFailed"
    assert "ZeroDivisionError" in world.condition("Reconciling")["message"]


async def test_an_api_server_that_does_not_answer_is_raised_for_another_try(world: World) -> None:
    world.cluster.faults["status", "LLMDeployment"] = ApiError(0, "Timeout", "no answer")
    with pytest.raises(ApiError):
        await world.run()


async def test_an_event_that_cannot_be_posted_does_not_fail_the_pass(world: World) -> None:
    world.cluster.faults["event", "Event"] = ApiError(403, "Forbidden", "for a test")
    world.add_pod("m-a-1")
    assert not (await world.run()).failed


async def test_what_the_pods_gpus_cost_is_told_by_the_installations_price(world: World) -> None:
    world.engines.known = EngineInfo(
        kv_blocks=1, block_tokens=16, max_model_len=1, kv_token_bytes=1, weight_bytes=1, gpu_product="NVIDIA-L4",
        gpu_count=2, version="", step_model=None, step_model_residual_ratio=None, step_model_samples=None,
    )  # fmt: skip
    world.add_pod("m-a-1")
    await world.run()
    cost = world.cluster.stored("LLMDeployment")["status"]["cost"]
    assert cost == {"gpu": "L4", "gpus": 2, "dollarsPerHour": 0.5, "price": "Installation"}


async def test_a_crash_between_any_two_calls_is_made_good_by_the_next_pass() -> None:
    undisturbed = World()
    undisturbed.create(replicas=2)
    await undisturbed.run()
    await undisturbed.run()
    expected = {key: body.get("spec") or body.get("data") for key, body in undisturbed.cluster.objects.items()}

    class Killed(BaseException):
        pass

    for calls in range(1, 14):
        world = World()
        world.keys = undisturbed.keys
        world.create(replicas=2)
        left = {"calls": calls}

        def die(verb: str, kind: str, left: dict[str, int] = left) -> None:
            left["calls"] -= 1
            if left["calls"] == 0:
                raise Killed

        world.cluster._fail = die  # type: ignore[method-assign]
        world.reconciler = world.new_reconciler()
        try:
            await world.run()
        except Killed:
            world.reconciler = world.new_reconciler()
        left["calls"] = -1
        await world.run()
        await world.run()
        found = {key: body.get("spec") or body.get("data") for key, body in world.cluster.objects.items()}
        assert found == expected, f"killed at call {calls}"


async def test_settings_go_to_every_ready_pod_that_has_not_acknowledged_them(world: World) -> None:
    world.add_pod("m-a-1")
    world.add_pod("m-a-2")
    world.add_pod("m-a-3", ready=False)
    await world.run()
    assert len(world.engines.told) == 2
    assert world.condition("BatchingApplied")["status"] == "True"
    await world.run()
    assert len(world.engines.told) == 2


async def test_an_engine_that_refuses_is_named_in_the_condition(world: World) -> None:
    world.add_pod("m-a-1")
    world.engines.answer = Refused(422, "max_num_seqs", "max_num_seqs is 64; allowed are 1 to 32")
    outcome = await world.run()
    assert not outcome.failed
    condition = world.condition("BatchingApplied")
    assert (condition["status"], condition["reason"]) == ("False", "SettingsRefused")
    assert "m-a-1 refused" in condition["message"]
    assert "allowed are 1 to 32" in condition["message"]


async def test_an_engine_that_cannot_be_reached_is_tried_again_and_the_status_tells(world: World) -> None:
    world.add_pod("m-a-1")
    world.engines.answer = Unreachable("no answer in time")
    await world.run()
    assert world.condition("BatchingApplied")["reason"] == "WaitingForReplicas"
    world.engines.answer = None
    await world.run()
    assert world.condition("BatchingApplied")["status"] == "True"


async def test_the_pods_are_marked_before_fewer_replicas_are_asked_for(world: World) -> None:
    world.change(replicas=2)
    world.add_pod("m-a-1")
    world.add_pod("m-a-2", ready=False)
    await world.run()
    assert world.cluster.costs == {}
    world.change(replicas=1)
    world.forget_writes()
    await world.run()
    assert int(world.cluster.costs["m-a-2"]) < int(world.cluster.costs["m-a-1"])
    marked, scaled = (
        world.cluster.writes.index(("annotate", "Pod")),
        world.cluster.writes.index(("apply", "Deployment")),
    )
    assert marked < scaled


async def test_a_mark_that_cannot_be_set_does_not_stop_the_scaling(world: World) -> None:
    world.change(replicas=2)
    world.add_pod("m-a-1")
    await world.run()
    world.change(replicas=1)
    world.cluster.faults["annotate", "Pod"] = ApiError(403, "Forbidden", "for a test")
    assert not (await world.run()).failed
    assert world.cluster.stored("Deployment")["spec"]["replicas"] == 1


@pytest.mark.parametrize(
    ("default", "spec", "asked"),
    [
        (None, {}, ["scrape"]),
        ("http://default:9090", {}, ["http://default:9090"]),
        ("http://default:9090", {"metrics": {"prometheus": {"url": "http://own:9090"}}}, ["http://own:9090"]),
    ],
)
async def test_measurements_come_from_the_objects_prometheus_or_the_default_or_the_pods(
    default: str | None, spec: dict[str, Any], asked: list[str]
) -> None:
    world = World(default)
    world.create(**spec)
    await world.run()
    assert world.metrics.asked == [], "without a ready pod there is nothing to ask for"
    world.add_pod("m-a-1")
    await world.run()
    assert world.metrics.asked == asked


async def test_a_prometheus_that_is_down_is_named_in_the_condition() -> None:
    world = World("http://p:9090")
    world.create()
    world.add_pod("m-a-1")
    await world.run()
    condition = world.condition("MetricsAvailable")
    assert (condition["status"], condition["reason"]) == ("False", "PrometheusError")


async def test_a_rotated_key_reaches_the_config_map(world: World) -> None:
    await world.run()
    before = world.cluster.stored("ConfigMap", ("n", "m-engine"))["data"]["admin-keys.json"]
    world.keys = Keys(rotated(world.keys.ring, new_key=new_private_key(), now=NOW))
    world.reconciler = world.new_reconciler()
    await world.run()
    after = world.cluster.stored("ConfigMap", ("n", "m-engine"))["data"]["admin-keys.json"]
    assert len(after) > len(before)


def test_a_condition_keeps_its_time_while_its_status_is_the_same() -> None:
    old = {"type": "Reconciling", "status": "True", "lastTransitionTime": "old"}
    new = {"type": "Reconciling", "status": "True", "lastTransitionTime": "new"}
    fresh = {"type": "Ready", "status": "True", "lastTransitionTime": "new"}
    kept = keep_transition_times({"conditions": [new, fresh]}, {"conditions": [old]})
    assert [condition["lastTransitionTime"] for condition in kept["conditions"]] == ["old", "new"]


def test_an_object_may_post_a_burst_of_events_and_then_one_now_and_then() -> None:
    budget = EventBudget()
    assert sum(budget.allows(KEY, 0.0) for _ in range(100)) == BURST
    assert not budget.allows(KEY, SECONDS_PER_EVENT * 0.9)
    assert budget.allows(KEY, SECONDS_PER_EVENT)
    assert budget.allows(("n", "other"), 0.0)


async def test_a_pod_that_only_carries_the_labels_is_neither_counted_nor_told_anything(world: World) -> None:
    world.add_pod("stray", replica_set="other-abc")
    await world.run()
    assert world.engines.told == []
    assert world.cluster.stored("LLMDeployment")["status"]["readyReplicas"] == 0
    world.add_pod("ours")
    await world.run()
    assert len(world.engines.told) == 1
    assert world.cluster.stored("LLMDeployment")["status"]["readyReplicas"] == 1


def test_refusals_of_the_api_server_are_told_apart() -> None:
    assert ApiError(422, "", "").is_invalid
    assert not ApiError(500, "", "").is_invalid
