"""Several kinds of accelerator under one model: how many replicas of each, with which settings, and why.

Pure. Whatever arrives is one load, since the gateway sends any request to any pod: its mix and its forecast come from
all pods together. Each kind is measured, tuned and corrected by itself, by the rules of `policy`; `variants.choose`
splits the load; then each kind moves to its share by the same rules again: stabilisation, verification, speed, bounds.
For autoscaling in mode Auto; the object has no field for kinds yet, the simulator calls it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidegate_operator import formula, policy
from tidegate_operator.api import Spec
from tidegate_operator.capacity import capacity_of
from tidegate_operator.formula import figure
from tidegate_operator.goals import headroom_percent
from tidegate_operator.memory import Memory, dump_memory, load_memory
from tidegate_operator.mix import Mix
from tidegate_operator.observation import WAITING_PHASES, Decision, Observation, ReplicaPhase
from tidegate_operator.policy import Context
from tidegate_operator.tuning import is_thin, tune_unwatched
from tidegate_operator.variants import Choice, Variant, choose

LEAST_LOAD = 1e-3
"""Requests per second that are planned for when nothing arrives: one replica of some kind stays."""


@dataclass(frozen=True, slots=True)
class KindSeen:
    """One kind of replica and what was seen of its own pods; `observation.engine` is told even where none runs."""

    name: str
    price: float
    """Of a replica for an hour."""
    observation: Observation
    low: int = 0
    high: int = 1000


@dataclass(frozen=True, slots=True)
class KindsDecision:
    """A decision for each kind."""

    decisions: Mapping[str, Decision]
    weights: Mapping[str, float]
    """Requests in progress that a replica of each kind takes at its largest rate: the gateway's shares."""
    reason: str
    """CamelCase; why the load is split as it is, or why it is not."""
    message: str
    memory: Mapping[str, object] = field(default_factory=dict)
    """Opaque, bounded, JSON: the next decision's `memory`."""

    @property
    def recheck_after_seconds(self) -> float:
        return min(decision.recheck_after_seconds for decision in self.decisions.values())


def decide_kinds(
    spec: Spec, kinds: Sequence[KindSeen], *, together: Observation, memory: Mapping[str, object]
) -> KindsDecision:
    """Replicas and settings of each kind. `together` is the observation of all their pods at once."""
    remembered = memory.get("kinds")
    own = remembered if isinstance(remembered, Mapping) else {}
    load = memory.get("load")
    shared = load_memory(load if isinstance(load, Mapping) else {})
    mix = Mix(0.0, ())
    if policy.has_fresh_data(together) and together.demand is not None:
        mix, shared = policy.mix_of(together.demand, shared, engine=together.engine, now=together.now)
    contexts = {kind.name: _needs_of(spec, kind, mix=mix, memory=load_memory(own.get(kind.name, {}))) for kind in kinds}
    if not any(context.current for context in contexts.values()):
        contexts, reason, message = _first_replica(kinds, contexts), "FirstReplicas", "no replica is asked for yet"
    elif spec.autoscaling.paused:
        contexts = {name: policy.stand_still_when_paused(context) for name, context in contexts.items()}
        reason, message = "ScalingPaused", "autoscaling is paused; all kinds stay"
    elif not _is_known(contexts):
        reason, message = "CapacityUnknown", "each kind follows what is seen of its own replicas"
    else:
        foreseen, shared = _look_ahead(contexts, together, shared)
        contexts, reason, message = _split(kinds, contexts, foreseen=foreseen)
    decisions = {
        name: policy.conclude(policy.follow_rules(context, policy.MOVES)) for name, context in contexts.items()
    }
    return KindsDecision(
        decisions=decisions,
        weights={name: max(1.0, _running(context)) for name, context in contexts.items()},
        reason=reason,
        message=message,
        memory={
            "kinds": {name: decision.memory for name, decision in decisions.items()},
            "load": dump_memory(shared),
        },
    )


def _needs_of(spec: Spec, kind: KindSeen, *, mix: Mix, memory: Memory) -> Context:
    """A kind by itself: its capacity for the mix, its settings, and what its own pods have to carry."""
    context = policy.begin(spec, kind.observation, memory, mix=mix)
    limits = replace(context.limits, low=kind.low, high=min(kind.high, context.limits.high))
    context = replace(context, limits=limits)
    if context.scene is not None and context.memory.trial is None and _is_unwatched(kind.observation):
        tuning = tune_unwatched(spec, context.tuning, scene=context.scene)
        context = replace(
            context, tuning=tuning, memory=tuning.memory, capacity=capacity_of(context.scene, tuning.settings)
        )
    if not context.current:
        return context
    # The load of all kinds is looked ahead, not that of each.
    rules = [rule for rule in policy.NEEDS if rule is not policy.look_ahead]
    return policy.follow_rules(context, rules)


def _is_unwatched(observation: Observation) -> bool:
    """Whether its pods serve nothing or next to it. What is not seen may be much."""
    if not observation.count(ReplicaPhase.READY):
        return True
    return policy.has_fresh_data(observation) and observation.demand is not None and is_thin(observation.demand)


def _first_replica(kinds: Sequence[KindSeen], contexts: Mapping[str, Context]) -> dict[str, Context]:
    """Of the kind with the cheapest replica, besides what each has as its minimum."""
    first = min(kinds, key=lambda kind: (kind.price, kind.name)).name
    return {
        name: replace(context, replicas=max(context.limits.low, name == first), final=True)
        for name, context in contexts.items()
    }


def _is_known(contexts: Mapping[str, Context]) -> bool:
    """Whether what each measured kind carries is known, and thus what the load is in requests."""
    measured = [context for context in contexts.values() if context.wanted is not None]
    known = all("capacityPerReplica" in context.inputs for context in measured)
    return known and any(context.capacity is not None for context in contexts.values())


def _look_ahead(contexts: Mapping[str, Context], together: Observation, shared: Memory) -> tuple[float, Memory]:
    """Requests per second that are foreseen for all kinds together; 0 when nothing is."""
    lead = next(context for context in contexts.values() if context.scene is not None)
    assert lead.scene is not None
    ahead = policy.look_ahead(replace(lead, observation=together, memory=shared))
    return ahead.foreseen.work / lead.scene.marginal_seconds, ahead.memory


# --- the split -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Supply:
    """One kind as the split sees it, in requests per second."""

    context: Context
    usable: float
    """Of a replica, as far as it may be planned with."""
    planned: float
    """The same when its settings have reached their aim."""
    absent: int
    """Replicas that are asked for and will not serve soon."""
    stuck: int
    unseen: int
    starting: int
    blind: bool
    """It serves, and nothing fresh is known of what."""

    @property
    def serving(self) -> float:
        return self.usable * max(0, self.context.current - self.absent)


def _supply_of(context: Context, *, missed: int, pool: int) -> _Supply:
    """`pool` is how many replicas of all kinds share what they keep free for chance."""
    observation, capacity = context.observation, context.capacity
    figures = {
        "correction": context.memory.correction,
        "headroomPercent": headroom_percent(context.spec),
        "capacityPerReplica": figure(capacity.requests_per_second) if capacity else 0.0,
        "capacityInPool": figure(capacity.pooled_per_second) if capacity else 0.0,
        **context.inputs,
    }
    # What misses goals that another kind reaches is no way to serve this mix.
    usable = formula.carried_by(figures, pool) / pool if capacity and len(capacity.unreachable) <= missed else 0.0
    stuck = observation.count(*WAITING_PHASES)
    return _Supply(
        context=context,
        usable=usable,
        planned=max(usable, formula.carried_ahead(figures, pool) / pool if usable else 0.0),
        absent=stuck + min(1, int(figures["lostReplicas"])),
        stuck=stuck,
        unseen=int(figures["unseenReplicas"]),
        starting=int(figures["startingReplicas"]),
        blind=bool(observation.count(ReplicaPhase.READY)) and not policy.has_fresh_data(observation),
    )


def _split(
    kinds: Sequence[KindSeen], contexts: Mapping[str, Context], *, foreseen: float
) -> tuple[dict[str, Context], str, str]:
    """Each kind with its share of the load as what is wanted of it; the reason, and the sentence about it."""
    missed = min(len(context.capacity.unreachable) for context in contexts.values() if context.capacity)
    pool = max(1, sum(context.current for context in contexts.values()))
    supplies = {name: _supply_of(context, missed=missed, pool=pool) for name, context in contexts.items()}
    load = _load_of(supplies, foreseen=foreseen)
    behavior = next(iter(contexts.values())).spec.autoscaling.behavior
    supply = sum(each.serving for each in supplies.values())
    grows = load > (1 + behavior.scale_up.tolerance_percent / 100) * supply
    margin = 1 - min(0.9, behavior.scale_down.tolerance_percent / 100)
    unseen = sum(each.unseen * each.usable for each in supplies.values())
    # Within the tolerances what is there is enough, and all of it is needed.
    needed = load if grows else min((load + unseen) / margin, supply)
    # Pods that will not serve are no supply: what they should have carried is load for others.
    carried = max(LEAST_LOAD, needed + sum(each.absent * each.usable for each in supplies.values()))
    variants = [_variant(kind, supplies[kind.name], grows=grows) for kind in kinds]
    present = {name: context.current for name, context in contexts.items()}
    hold = any(
        each.starting or each.blind or each.context.tuning.verifying_until is not None for each in supplies.values()
    )
    choice = choose(variants, carried, present=present, hold_down=hold)
    if not hold and not _fits(contexts, choice.replicas):
        choice = choose(variants, carried, present=present, hold_down=True)
    message = _in_words(choice, carried)
    shares = {
        name: context
        if supplies[name].blind
        else _with_share(context, choice.replicas[name], load=load, usable=supplies[name].usable, message=message)
        for name, context in contexts.items()
    }
    return shares, choice.reason, message


def _load_of(supplies: Mapping[str, _Supply], *, foreseen: float) -> float:
    """Requests per second to be carried by all. Of a kind that is not seen: as much as it can carry."""
    inputs = [each.context.inputs for each in supplies.values()]
    figures = {name: sum(item.get(name, 0.0) for item in inputs) for name in ("arrivalsPerSecond", "backlogPerSecond")}
    figures["forecastPerSecond"] = foreseen
    figures["floorPerSecond"] = max(item.get("floorPerSecond", 0.0) for item in inputs)
    return formula.load(figures) + sum(each.serving for each in supplies.values() if each.blind)


def _variant(kind: KindSeen, supply: _Supply, *, grows: bool) -> Variant:
    context = supply.context
    high = min(context.limits.high, context.current) if supply.stuck else context.limits.high
    return Variant(
        kind.name,
        capacity=supply.planned if grows else supply.usable,
        price=kind.price,
        low=min(context.limits.low, high),
        high=high,
    )


def _fits(contexts: Mapping[str, Context], replicas: Mapping[str, int]) -> bool:
    """Whether what runs now finds slots and KV in the replicas that stay."""
    running = kv = slots = tokens = 0.0
    for name, context in contexts.items():
        demand, engine = context.observation.demand, context.observation.engine
        if demand is not None:
            running, kv = running + demand.running, kv + demand.running_context_tokens
        slots += replicas[name] * policy.FULL_SLOTS * context.tuning.settings.max_num_seqs
        tokens += replicas[name] * policy.FULL_KV * (engine.kv_blocks * engine.block_tokens if engine else math.inf)
    return running <= slots and kv <= tokens


def _with_share(context: Context, wanted: int, *, load: float, usable: float, message: str) -> Context:
    inputs = {**context.inputs, "loadOfAllKinds": figure(load), "usablePerReplica": figure(usable)}
    return replace(
        context, wanted=wanted, want_up=wanted, want_down=wanted, inputs=inputs, message=message, final=False
    )


def _running(context: Context) -> float:
    return context.capacity.running if context.capacity is not None else 0.0


def _in_words(choice: Choice, carried: float) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in choice.replicas.items())
    return f"{carried:.3g} req/s on {counts} for {choice.price:.2f} an hour ({choice.reason})"
