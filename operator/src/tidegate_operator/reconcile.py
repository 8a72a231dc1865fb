"""One pass over one LLMDeployment: observe → decide → apply → report → the delay until the next pass.

Level-triggered and idempotent: it takes a name, never an event, and may be killed between any two lines. Reads the
store, writes only differences. Declares the ports that it needs; `__main__` wires them. Knows no kopf.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tidegate_engine.settings import SettingsFile
from tidegate_operator import api, policy, render, status
from tidegate_operator.api import InvalidSpec, Reason, Spec, Target
from tidegate_operator.cluster import ApiError
from tidegate_operator.demand import Measured
from tidegate_operator.events import EventBudget
from tidegate_operator.fleet import Fleet, Refusal
from tidegate_operator.gpus import Prices, price_of
from tidegate_operator.journal import Entry
from tidegate_operator.metrics import Metrics
from tidegate_operator.observation import Action, Decision, Observation, Replica
from tidegate_operator.observing import Facts, Workload, can_be_asked, observe
from tidegate_operator.pods import (
    DELETION_COST,
    deletion_costs,
    incarnation,
    is_finished,
    is_made_by,
    newest_template_hash,
    replica_of,
    rollout_in_progress,
    workload_complaint,
)
from tidegate_operator.resources import (
    CHILDREN,
    DEPLOYMENTS,
    LLM_DEPLOYMENTS,
    Key,
    Manifest,
    Resource,
    content_version,
    slim,
)
from tidegate_operator.shares import Claim, asked, granted_gpus
from tidegate_operator.status import Problem, StatusDict
from tidegate_operator.store import Store

STALE_RETRY_SECONDS = 0.2
IDLE_RECHECK_SECONDS = 60.0
"""Without a ready pod there is nothing to measure: the watches bring what matters."""

SHARES_SECONDS = 5.0
"""Shares of a GPU budget hold so long: they are everybody's, and with many objects too dear for every pass."""

logger = logging.getLogger(__name__)


class ClusterPort(Protocol):
    """The API server."""

    async def get(self, resource: Resource, address: Key) -> Manifest | None: ...

    async def apply(self, resource: Resource, manifest: Manifest, *, only_if_absent: bool = False) -> Manifest: ...

    async def apply_status(self, seen: Manifest, status: Mapping[str, Any]) -> Manifest: ...

    async def annotate_pod(self, address: Key, annotations: Mapping[str, str]) -> None: ...

    async def post_event(self, regarding: Manifest, *, kind: str, reason: str, note: str) -> None: ...


class ScraperPort(Protocol):
    """Direct scrape of pods."""

    def watch(self, pods: Iterable[tuple[str, str, str]], *, sync_period_seconds: float) -> None: ...

    def measured(self, incarnations: Iterable[str]) -> Measured: ...


class PrometheusPort(Protocol):
    """A Prometheus server."""

    async def measure(self, url: str, *, namespace: str, name: str, now: float) -> Measured: ...


class KeysPort(Protocol):
    """The operator's admin keys."""

    @property
    def jwks(self) -> Mapping[str, object]: ...

    def token(self, audience: str, now: float) -> str: ...


class JournalPort(Protocol):
    """Where decisions are recorded."""

    def write(self, entry: Entry) -> None: ...


@dataclass(frozen=True, slots=True)
class Ports:
    """Everything outside the process that a pass may touch, and the clock (Unix seconds)."""

    cluster: ClusterPort
    scraper: ScraperPort
    prometheus: PrometheusPort
    fleet: Fleet
    keys: KeysPort
    clock: Callable[[], float]
    journal: JournalPort | None = None
    """None where decisions are not recorded."""


@dataclass(frozen=True, slots=True)
class Installation:
    """What the installation says for objects that say nothing."""

    defaults: render.Defaults
    prometheus_url: str | None
    gpu_budgets: Mapping[str, int] = field(default_factory=dict)
    """Most GPUs for all objects together, by resource name."""
    gpu_prices: Prices = field(default_factory=Prices)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a pass ended: when to look again (None: only when something changes), or that it must be tried again."""

    recheck_after_seconds: float | None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Settled:
    """What the last pass of an object saw and chose, when it had nothing left to do."""

    version: str
    observation: Observation
    decision: Decision
    jwks: Mapping[str, object]


class _Stale(Exception):
    """The object changed since the store saw it; the pass is void and starts again from what stands now."""


class Reconciler:
    """Holds nothing durable: what was applied last is remembered only to leave out writes that change nothing."""

    def __init__(self, ports: Ports, store: Store, *, installation: Installation, metrics: Metrics) -> None:
        self._ports, self._store = ports, store
        self._installation, self._metrics = installation, metrics
        self._applied: dict[Key, dict[str, tuple[str, str]]] = {}
        self._specs: dict[Key, tuple[str, int, Spec]] = {}
        self._settled: dict[Key, _Settled] = {}
        self._shares: dict[str, tuple[float, dict[str, int]]] = {}
        self._events = EventBudget()

    async def reconcile(self, key: Key) -> Outcome:
        """Bring the object a step nearer to what is asked. Raises `ApiError` when its status cannot be written."""
        seen = self._store.get(LLM_DEPLOYMENTS, key)
        if seen is None or "deletionTimestamp" in seen["metadata"]:
            # The children carry an owner reference: the garbage collector ends them, with or without us.
            for memory in (self._applied, self._specs, self._settled):
                memory.pop(key, None)
            self._events.forget(key)
            return Outcome(None)
        try:
            return await self._pass(key, seen)
        except _Stale:
            return Outcome(STALE_RETRY_SECONDS)
        except (ApiError, TimeoutError):
            raise
        except Exception as error:
            problem = Problem(Reason.RECONCILE_FAILED, f"{type(error).__name__}: {error}", permanent=False)
            with contextlib.suppress(ApiError, _Stale):
                await self._report_problem(seen, problem)
            raise

    async def _pass(self, key: Key, seen: Manifest) -> Outcome:
        now = self._ports.clock()
        metadata, previous = seen["metadata"], seen["status"]
        try:
            spec = self._spec_of(key, seen)
        except InvalidSpec as error:
            await self._report_problem(seen, Problem(Reason.INVALID_SPEC, str(error), permanent=True))
            return Outcome(None)
        target = Target(key[1], key[0], metadata["uid"], metadata["generation"], spec)
        facts = await self._facts(target, now=now)
        observation = observe(spec, facts)
        memory = status.memory_of(previous)
        if observation.demand is None:
            decision = policy.decide(spec, observation, memory)
        else:
            # In a thread: a search of settings takes long enough to starve probes and other objects of the loop.
            decision = await asyncio.to_thread(policy.decide, spec, observation, memory)
        if self._ports.journal is not None:
            self._ports.journal.write(Entry(f"{key[0]}/{key[1]}", seen["spec"], facts, memory, decision))
        recheck_after = decision.recheck_after_seconds
        if not any(map(can_be_asked, observation.replicas)):
            recheck_after = max(recheck_after, IDLE_RECHECK_SECONDS)

        # Everything below is a function of these alone: the same again has nothing to do.
        settled = _Settled(metadata["resourceVersion"], replace(observation, now=0.0), decision, self._ports.keys.jwks)
        if settled == self._settled.get(key) and self._children_stand(key):
            return Outcome(recheck_after)
        self._tell(key, observation, decision, previous)

        if previous.get("batching", {}).get("generation") != decision.settings_generation:
            # Written before any pod hears of it: after a crash here the same number never gets other values.
            seen = await self._write_status(seen, status.build(target, observation, decision, previous, now=now))

        problems = await self._apply(target, observation, decision)
        replicas, refusals = await self._ports.fleet.send(
            observation.replicas,
            token=self._token(target, observation.replicas, now),
            generation=decision.settings_generation,
            settings=decision.settings,
            now=now,
        )
        nothing_sent = replicas == observation.replicas and not refusals
        observation = replace(observation, replicas=replicas)
        built = status.build(target, observation, decision, previous, now=now)
        built = _with_refusals(built, refusals)
        if problems:
            self._warn(key, problems, previous)
            built = status.build_problem(_as_one(problems), built, generation=target.generation, now=now)
        built = keep_transition_times(built, previous)
        seen = await self._write_status(seen, built)
        await self._post_events(seen, previous)
        if not problems and nothing_sent and seen["metadata"]["resourceVersion"] == settled.version:
            self._settled[key] = settled
        return Outcome(recheck_after, failed=bool(problems))

    def _spec_of(self, key: Key, seen: Manifest) -> Spec:
        """The parsed spec; parsed once a generation."""
        uid, generation = seen["metadata"]["uid"], seen["metadata"]["generation"]
        known = self._specs.get(key)
        if known is None or known[:2] != (uid, generation):
            known = (uid, generation, api.parse_spec(seen["spec"]))
            self._specs[key] = known
        return known[2]

    # --- observe ---------------------------------------------------------------------------------------------------

    def _token(self, target: Target, replicas: Iterable[Replica], now: float) -> str:
        """A token for the object's engines; none is made when there is none to ask."""
        return self._ports.keys.token(target.uid, now) if any(map(can_be_asked, replicas)) else ""

    async def _facts(self, target: Target, *, now: float) -> Facts:
        key = (target.namespace, target.name)
        deployment = self._own_deployment(target)
        pods = [pod for pod in self._store.pods_of(key) if is_made_by(target.name, pod) and not is_finished(pod)]
        newest = newest_template_hash(deployment, pods)
        replicas = tuple(replica_of(pod, newest_hash=newest) for pod in pods)
        ready = [replica for replica in replicas if can_be_asked(replica)]

        measured = await self._measure(target, ready, now=now)
        token = self._token(target, replicas, now)
        replicas = await self._ports.fleet.look(replicas, token=token, now=now)
        info = await self._ports.fleet.info(replicas, token=token, now=now)
        reason, message = workload_complaint(deployment)
        workload = Workload(
            current_replicas=0 if deployment is None else int(deployment["spec"].get("replicas", 0)),
            rollout_in_progress=rollout_in_progress(deployment),
            reason=reason,
            message=message,
        )
        return Facts(
            now=now,
            replicas=replicas,
            measured=measured,
            info=info,
            workload=workload,
            granted_gpus=self._granted_gpus(target, now),
            price=price_of(None if info is None else info.gpu_product, self._installation.gpu_prices),
        )

    def _granted_gpus(self, target: Target, now: float) -> int | None:
        """The object's share where the installation has a budget for its kind of GPU."""
        gpu = target.spec.resources.gpu
        budget = self._installation.gpu_budgets.get(gpu.resource_name)
        if budget is None or gpu.count == 0:
            return None
        name = f"{target.namespace}/{target.name}"
        at, shares = self._shares.get(gpu.resource_name, (0.0, {}))
        if name not in shares or not 0 <= now - at < SHARES_SECONDS:
            keys = self._store.addresses(LLM_DEPLOYMENTS)
            claims = filter(None, (self._claim(key, gpu.resource_name, now) for key in keys))
            shares = granted_gpus(claims, gpus=budget, now=now)
            self._shares[gpu.resource_name] = now, shares
        return shares.get(name)

    def _claim(self, key: Key, resource_name: str, now: float) -> Claim | None:
        """What an object claims of a kind of GPU; None when nothing."""
        seen = self._store.get(LLM_DEPLOYMENTS, key)
        if seen is None or "deletionTimestamp" in seen["metadata"]:
            return None
        try:
            spec = self._spec_of(key, seen)
        except InvalidSpec:
            return None
        if spec.resources.gpu.resource_name != resource_name:
            return None
        deployment = self._store.get(DEPLOYMENTS, key)
        held = 0 if deployment is None else int(deployment["spec"].get("replicas", 0))
        wanted = seen["status"].get("autoscaling", {}).get("wantedReplicas")
        wanted = asked(spec, wanted, status.memory_of(seen["status"]), now=now)
        return Claim(f"{key[0]}/{key[1]}", spec, held, wanted)

    def _own_deployment(self, target: Target) -> Manifest | None:
        deployment = self._store.get(DEPLOYMENTS, (target.namespace, target.name))
        return deployment if deployment and deployment["metadata"]["owner"] == target.uid else None

    async def _measure(self, target: Target, ready: Sequence[Replica], *, now: float) -> Measured:
        if not ready:
            return Measured()
        given = target.spec.metrics.prometheus
        url = given.url if given is not None else self._installation.prometheus_url
        if url is not None:
            return await self._ports.prometheus.measure(url, namespace=target.namespace, name=target.name, now=now)
        self._ports.scraper.watch(
            [(incarnation(replica), replica.name, replica.ip or "") for replica in ready],
            sync_period_seconds=target.spec.autoscaling.sync_period_seconds,
        )
        return self._ports.scraper.measured([incarnation(replica) for replica in ready])

    # --- apply -----------------------------------------------------------------------------------------------------

    async def _apply(self, target: Target, observation: Observation, decision: Decision) -> list[Problem]:
        """Bring every child to what it should be; what one of them refuses does not stop the others."""
        if decision.replicas < observation.current_replicas:
            await self._mark_victims(target, observation)
        file = SettingsFile(
            decision.settings_generation, decision.settings, target.spec.envelope(), target.spec.patterns()
        )
        plan = render.Plan(replicas=decision.replicas, settings_file=file, jwks=self._ports.keys.jwks)
        has_ready = any(map(can_be_asked, observation.replicas))
        problems = []
        for manifest in render.objects(target, plan, self._installation.defaults):
            try:
                problem = await self._apply_child(target, manifest)
            except ApiError as error:
                name = f"{manifest['kind']} {manifest['metadata']['name']}"
                reason = Reason.QUOTA_EXCEEDED if "exceeded quota" in error.message else Reason.RECONCILE_FAILED
                problem = Problem(reason, f"{name}: {error}", permanent=error.is_invalid and not has_ready)
            if problem is not None:
                problems.append(problem)
        return problems

    async def _apply_child(self, target: Target, manifest: Manifest) -> Problem | None:
        key, kind = (target.namespace, target.name), manifest["kind"]
        resource = CHILDREN[kind]
        address = (manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        live = self._store.get(resource, address)
        applied = self._applied.setdefault(key, {})
        if live is not None and applied.get(kind) == (digest, content_version(live)):
            return None
        body = None
        if live is None:
            try:
                body = await self._ports.cluster.apply(resource, manifest, only_if_absent=True)
            except ApiError as error:
                if error.status != 409:
                    raise
                # It lacks our label, or the watch has not told of it yet.
                found = await self._ports.cluster.get(resource, address)
                live = None if found is None else slim(resource, found)
        if live is not None and live["metadata"]["owner"] != target.uid:
            name = f"{kind} {address[1]}"
            message = f"{name} exists and is not ours: give this object another name, or remove that {kind}"
            return Problem(Reason.NAME_TAKEN, message, permanent=False)
        if body is None:
            body = await self._ports.cluster.apply(resource, manifest)
        self._store.put(resource, body)
        applied[kind] = (digest, content_version(body))
        return None

    def _children_stand(self, key: Key) -> bool:
        """Whether every child is as it was when we applied it."""
        applied = self._applied.get(key, {})
        addresses = {
            kind: (key[0], api.config_map_name(key[1]) if kind == "ConfigMap" else key[1]) for kind in CHILDREN
        }
        lives = {kind: self._store.get(CHILDREN[kind], address) for kind, address in addresses.items()}
        return all(
            live is not None and kind in applied and applied[kind][1] == content_version(live)
            for kind, live in lives.items()
        )

    async def _mark_victims(self, target: Target, observation: Observation) -> None:
        """Make the least loaded pods the ones that Kubernetes takes first; must precede the lower replica count."""
        costs = deletion_costs(observation.replicas)
        marks = (
            self._ports.cluster.annotate_pod((target.namespace, name), {DELETION_COST: str(cost)})
            for name, cost in costs.items()
        )
        for result in await asyncio.gather(*marks, return_exceptions=True):
            if isinstance(result, ApiError):
                # The pod drains whichever is taken, so a scale-down need not wait for this.
                logger.warning("%s/%s: a pod's deletion cost was not set: %s", target.namespace, target.name, result)
            elif isinstance(result, BaseException):
                raise result

    # --- report ----------------------------------------------------------------------------------------------------

    def _tell(self, key: Key, observation: Observation, decision: Decision, previous: Mapping[str, Any]) -> None:
        """Log and count a decision that changes something, once."""
        scales = decision.replicas != observation.current_replicas
        retunes = previous.get("batching", {}).get("generation") not in (None, decision.settings_generation)
        if decision.action is Action.HOLD or not (scales or retunes):
            return
        self._metrics.decisions.labels(str(decision.action), decision.reason).inc()
        logger.info("%s/%s: %s %s: %s", *key, decision.action, decision.reason, decision.message)

    def _warn(self, key: Key, problems: Sequence[Problem], previous: Mapping[str, Any]) -> None:
        """Log problems that the status does not tell yet: they are tried again often."""
        told = {condition["message"] for condition in previous.get("conditions") or ()}
        for problem in problems:
            if problem.message not in told:
                logger.warning("%s/%s: %s: %s", *key, problem.reason, problem.message)

    async def _report_problem(self, seen: Manifest, problem: Problem) -> None:
        built = status.build_problem(
            problem, seen["status"], generation=seen["metadata"]["generation"], now=self._ports.clock()
        )
        written = await self._write_status(seen, built)
        await self._post_events(written, seen["status"])

    async def _write_status(self, seen: Manifest, built: StatusDict) -> Manifest:
        """Write the status if it differs; the object as it stands then."""
        if built == seen["status"]:
            return seen
        try:
            body = await self._ports.cluster.apply_status(seen, built)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            await self._look_again(seen)
            raise _Stale from error
        self._store.put(LLM_DEPLOYMENTS, body)
        return slim(LLM_DEPLOYMENTS, body)

    async def _look_again(self, seen: Manifest) -> None:
        address = (seen["metadata"]["namespace"], seen["metadata"]["name"])
        live = await self._ports.cluster.get(LLM_DEPLOYMENTS, address)
        if live is None:
            self._store.drop(LLM_DEPLOYMENTS, seen)
        else:
            self._store.put(LLM_DEPLOYMENTS, live)

    async def _post_events(self, seen: Manifest, previous: Mapping[str, Any]) -> None:
        """Events for what changed. They are news, not state: one that cannot be posted is let go."""
        key = (seen["metadata"]["namespace"], seen["metadata"]["name"])
        for event in status.events(previous, seen["status"]):
            if not self._events.allows(key, self._ports.clock()):
                return
            try:
                await self._ports.cluster.post_event(seen, kind=event.type, reason=event.reason, note=event.message)
            except ApiError as error:
                logger.warning("%s/%s: an Event could not be posted: %s", *key, error)


def keep_transition_times(built: StatusDict, previous: Mapping[str, Any]) -> StatusDict:
    """A condition whose status is as before keeps its time, whatever it passed through while being built."""
    before = {condition["type"]: condition for condition in previous.get("conditions") or ()}
    kept = []
    for condition in built["conditions"]:
        old = before.get(condition["type"])
        if old is not None and old["status"] == condition["status"]:
            condition = {**condition, "lastTransitionTime": old["lastTransitionTime"]}
        kept.append(condition)
    return {**built, "conditions": kept}


def _with_refusals(built: StatusDict, refusals: Sequence[Refusal]) -> StatusDict:
    """Name in BatchingApplied the engine that refused the settings, and why."""
    if not refusals:
        return built
    first = refusals[0]
    message = f"{first.pod} refused the settings: {first.answer.reason}"
    kind = api.ConditionType.BATCHING_APPLIED
    conditions = [
        {**condition, "reason": Reason.SETTINGS_REFUSED, "message": message}
        if condition["type"] == kind and condition["status"] != "True"
        else condition
        for condition in built["conditions"]
    ]
    return {**built, "conditions": conditions}


def _as_one(problems: Sequence[Problem]) -> Problem:
    """The first problem speaks; a permanent one before others."""
    return next((problem for problem in problems if problem.permanent), problems[0])
