"""The scaling rules: `decide` turns what was asked, seen and remembered into replicas, settings, and the reason why.

Pure. Rules are small functions in a fixed order, context in, context out; the first that moved the number names the
reason, those that held it back stand in `bounded_by`. Called by `reconcile`; `tuning` chooses the settings first.

With a known step model: wanted = ceil((arrivals + backlog / drain time) / (capacity of a replica under the targets x
correction x (1 - headroom))). Before any pod has told its step model, capacity is unknown and the rules are reactive:
more replicas by the ratio of the worst observed signal to its target, one step a start time; one fewer when the rest
would stay under half of every target. `formula` is that arithmetic; every figure in it is in `Decision.inputs`.
Unknown is never zero: only fresh data of every pod takes a replica away.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidegate_engine.steptime import StepModel
from tidegate_operator import formula
from tidegate_operator.api import OnMissingPolicy, PolicyType, ScalingMode, ScalingPolicy, SelectPolicy, Spec
from tidegate_operator.capacity import Capacity, Scenario, capacity_of, scenario
from tidegate_operator.forecast import Foreseen, foresee, interrupt, observe
from tidegate_operator.formula import Needs, figure
from tidegate_operator.goals import (
    eased,
    headroom_percent,
    in_short,
    judge,
    pattern_targets_of,
    prefers_safety,
    targets_of,
    worst_ratio,
)
from tidegate_operator.lengths import follow
from tidegate_operator.limits import limits_at
from tidegate_operator.memory import (
    Memory,
    Scale,
    Want,
    buckets_for,
    dump_memory,
    forget_unlanded_scale,
    forget_wants,
    load_memory,
    remember_scale,
    remember_want,
    wants_within,
)
from tidegate_operator.mix import Mix, estimate_mix, lengths_seen, pattern_shares
from tidegate_operator.observation import (
    LATELY_SECONDS,
    STARTING_PHASES,
    WAITING_PHASES,
    Action,
    Bottleneck,
    Decision,
    Demand,
    EngineInfo,
    Limits,
    MetricsState,
    Observation,
    ReplicaPhase,
)
from tidegate_operator.prior import PRIOR_ERROR
from tidegate_operator.tuning import Tuning, is_near, moments_of, significant, tune
from tidegate_operator.zero import ScaleToZero, may_sleep, must_wake, watch

WITHDRAW_SECONDS = 300
"""A pod that no node takes for this long is withdrawn, but for one that waits for the next free GPU."""
TREND_REQUESTS, TREND_SECONDS = 20, 30.0
"""So many arrivals, or a window of so long, tell a rate that replicas may be added for."""
UNKNOWN_START_SECONDS = 30
KNOWN_PERIOD_SECONDS = 15
"""Period of scaling up where the capacity is known: that of HorizontalPodAutoscaler."""
WAKING_REPLICAS = 2
"""From zero at most so many at once, or the minimum: what is held is a burst, and says little of the load after it."""
SHORTEST_DRAIN_SECONDS = 10
SHORTEST_AHEAD_SECONDS = 60.0
JUMP_DEVIATIONS = 3.0
"""So many standard deviations of a Poisson count are beyond chance."""
FULL_SLOTS = 0.9
FULL_KV = 0.8
CORRECTION_FLOOR = 0.4
CORRECTION_STEP = 0.7
CORRECTION_LIFE_SECONDS = 1800
CORRECTION_MIX_TOLERANCE = 0.3
FEEDBACK_REQUESTS = 20
FEEDBACK_MISS_RATIO = 1.1


@dataclass(frozen=True, slots=True)
class Context:
    """What the rules pass on. `replicas` is the answer so far."""

    spec: Spec
    observation: Observation
    memory: Memory
    tuning: Tuning
    mix: Mix
    scene: Scenario | None
    capacity: Capacity | None
    limits: Limits
    replicas: int
    wanted: int | None = None
    want_up: int | None = None
    """Needed when unseen replicas idle and the settings reach their aim: a reason to add."""
    want_down: int | None = None
    """Needed when unseen replicas are full, with a margin: more than this may go."""
    zero: ScaleToZero | None = None
    foreseen: Foreseen = field(default_factory=Foreseen)
    """The most that is believed to arrive within the time that a replica needs to start."""
    reason: str = "AsWanted"
    message: str = ""
    bounded_by: tuple[str, ...] = ()
    inputs: Mapping[str, float] = field(default_factory=dict)
    final: bool = False
    """Whether the rules that follow, but for the bounds, are skipped."""

    @property
    def current(self) -> int:
        return self.observation.current_replicas

    @property
    def now(self) -> float:
        return self.observation.now


Rule = Callable[[Context], Context]


def decide(
    spec: Spec, observation: Observation, memory: Mapping[str, object], *, zero: ScaleToZero | None = None
) -> Decision:
    """Choose replicas and settings. Same input, same answer; `Decision.memory` is the next call's `memory`.

    With `zero` the last replica goes after a time without requests, and comes back for those that the gateway holds.
    """
    context = replace(begin(spec, observation, load_memory(memory)), zero=zero)
    return conclude(follow_rules(context, RULES))


def follow_rules(context: Context, rules: Sequence[Rule]) -> Context:
    """One after the other; once one was final, only those that always hold."""
    for rule in rules:
        if not context.final or rule in ALWAYS:
            context = rule(context)
    return context


def begin(spec: Spec, observation: Observation, memory: Memory, *, mix: Mix | None = None) -> Context:
    """Read the data, choose the settings, and work out the capacity under them.

    `mix` is given where these pods see only a part of what arrives.
    """
    memory = forget_unlanded_scale(memory, current=observation.current_replicas)
    fresh = has_fresh_data(observation)
    engine = observation.engine
    if mix is None:
        mix = Mix(0.0, ())
        if fresh and observation.demand is not None:
            mix, memory = mix_of(observation.demand, memory, engine=engine, now=observation.now)
    model = engine.step_model if engine is not None else None
    scene = scene_of(spec, engine, model=model, mix=mix) if engine is not None and model is not None else None
    limits = limits_at(
        spec,
        observation.now,
        start_seconds=observation.start_seconds or UNKNOWN_START_SECONDS,
        granted_gpus=observation.granted_gpus,
    )
    tuning = tune(spec, observation, memory=memory, scene=scene, active=fresh and not spec.autoscaling.paused)
    return Context(
        spec=spec,
        observation=observation,
        memory=tuning.memory,
        tuning=tuning,
        mix=mix,
        scene=scene,
        capacity=capacity_of(scene, tuning.settings) if scene else None,
        limits=limits,
        replicas=observation.current_replicas,
        inputs=counts(spec, observation),
    )


def mix_of(demand: Demand, memory: Memory, *, engine: EngineInfo | None, now: float) -> tuple[Mix, Memory]:
    """What arrives, by this window and those before it; they are noted."""
    limit = engine.max_model_len if engine else None
    seen = lengths_seen(demand, max_model_len=limit)
    if not seen.shares:
        return estimate_mix(demand, max_model_len=limit), memory
    window = demand.window_seconds
    arrived = window * sum(rate for rate in demand.arrivals_per_second.values() if rate > 0)
    lengths, kept = follow(memory.lengths, seen, now=now, arrived=arrived, window_seconds=window)
    return estimate_mix(demand, max_model_len=limit, lengths=lengths), replace(memory, lengths=kept)


def scene_of(spec: Spec, engine: EngineInfo, *, model: StepModel, mix: Mix) -> Scenario | None:
    """One replica under the mix, and all that was asked of it."""
    scene = scenario(model, engine, mix=mix, targets=targets_of(spec), by_pattern=pattern_targets_of(spec))
    return replace(scene, prefers_safety=prefers_safety(spec)) if scene else None


def counts(spec: Spec, observation: Observation) -> dict[str, float]:
    """The pods, as every rule sees them."""
    ready = observation.count(ReplicaPhase.READY)
    covered = observation.demand.pods_covered if observation.demand is not None else 0
    found = {
        "currentReplicas": observation.current_replicas,
        "readyReplicas": ready,
        "startingReplicas": credited(spec, observation),
        "unseenReplicas": max(0, ready - covered),
        "lostReplicas": lost(spec, observation),
    }
    return {name: float(number) for name, number in found.items()}


def has_fresh_data(observation: Observation) -> bool:
    """Whether the window may be acted on: fresh, of at least one pod, and all its figures are numbers."""
    demand = observation.demand
    if observation.metrics_state != MetricsState.FRESH or demand is None or demand.pods_covered <= 0:
        return False
    figures = (
        demand.running,
        demand.waiting,
        *demand.arrivals_per_second.values(),
        *demand.finished_per_second.values(),
    )
    return all(math.isfinite(figure) and figure >= 0 for figure in figures)


# --- who decides -----------------------------------------------------------------------------------------------------


def let_others_decide(context: Context) -> Context:
    """Modes Off and External: the object's replicas hold."""
    mode = context.spec.autoscaling.mode
    if mode not in (ScalingMode.OFF, ScalingMode.EXTERNAL):
        return context
    given = context.observation.spec_replicas
    replicas = context.spec.fixed_replicas() if given is None else given
    reason = "ScalingOff" if mode == ScalingMode.OFF else "ScaledByOthers"
    message = f"{replicas} replicas as the object says (autoscaling.mode {mode})"
    return replace(context, replicas=replicas, reason=reason, message=message, final=True)


def stand_still_when_paused(context: Context) -> Context:
    if not context.spec.autoscaling.paused or context.current == 0:
        return context
    message = f"autoscaling is paused; {context.current} replicas stay"
    return replace(context, reason="ScalingPaused", message=message, final=True)


def sleep_and_wake(context: Context) -> Context:
    """To zero after a time without any request, from zero as soon as one is held. Unknown is neither."""
    asked, observation = context.zero, context.observation
    if asked is None or context.spec.autoscaling.mode not in (ScalingMode.AUTO, ScalingMode.OBSERVE):
        return context
    state = watch(context.memory.zero, observation)
    context = replace(context, memory=replace(context.memory, zero=state))
    held = observation.held_requests
    if context.current > 0:
        if not may_sleep(state, observation, asked):
            return context
        message = f"no request for {asked.idle_seconds:.0f} s"
        return replace(_at_zero(context), reason="Idle", message=message)
    if not must_wake(state, observation):
        message = "no request is held" if held is not None else "it is unknown whether requests are held"
        return replace(_at_zero(context), reason="ScaledToZero", message=message)
    if not state.proven:
        return context
    # Up to as many as take all that are held into their batches at once: each further start would find nothing to do.
    batches = math.ceil((held or 0.0) / context.tuning.settings.max_num_seqs)
    most = max(context.limits.low, WAKING_REPLICAS)
    replicas = min(max(context.limits.low, batches), most, context.limits.high)
    message = f"{held or 0:.0f} requests are held"
    return replace(context, replicas=replicas, reason="RequestsHeld", message=message, final=True)


def _at_zero(context: Context) -> Context:
    """At zero no bound holds, and the window of wants starts anew."""
    limits = replace(context.limits, low=0, low_rule="ScaledToZero")
    return replace(context, replicas=0, memory=_unwatched(context.memory), limits=limits, final=True)


def start_with_minimum(context: Context) -> Context:
    """No replica is asked for yet: begin with the fewest allowed."""
    if context.current > 0:
        return context
    low = context.limits.low
    return replace(
        context, replicas=low, reason="FirstReplicas", message=f"starting with minReplicas {low}", final=True
    )


def hold_without_metrics(context: Context) -> Context:
    """Unknown is not zero: without fresh data replicas stay, or rise to the fallback."""
    observation, memory = context.observation, context.memory
    if has_fresh_data(observation):
        return replace(context, memory=replace(memory, missing_since=None))
    if observation.count(ReplicaPhase.READY) == 0:
        message = "no replica is ready yet, so there is nothing to measure"
        return replace(context, memory=_unwatched(memory), reason="WaitingForReplicas", message=message, final=True)
    since = context.now if memory.missing_since is None else memory.missing_since
    context = replace(context, memory=replace(_unwatched(memory), missing_since=since), final=True)
    on_missing = context.spec.metrics.on_missing
    stale = observation.metrics_state == MetricsState.STALE
    reason = "MetricsStale" if stale else "MetricsMissing"
    detail = f": {observation.metrics_message}" if observation.metrics_message else ""
    if on_missing.policy == OnMissingPolicy.FALLBACK and context.now - since >= on_missing.hold_seconds:
        replicas = max(context.current, on_missing.fallback_replicas or 0)
        message = f"no fresh metrics for {on_missing.hold_seconds} s; at least {replicas} replicas{detail}"
        return replace(context, replicas=replicas, reason=f"{reason}Fallback", message=message)
    return replace(context, reason=reason, message=f"no fresh metrics; {context.current} replicas stay{detail}")


def _unwatched(memory: Memory) -> Memory:
    return replace(forget_wants(memory), forecast=interrupt(memory.forecast))


# --- what is needed --------------------------------------------------------------------------------------------------


def correct_by_measurement(context: Context) -> Context:
    """SLO feedback: where targets are missed though the model sees enough replicas, believe less of its capacity."""
    demand, capacity, memory = context.observation.demand, context.capacity, context.memory
    if demand is None or capacity is None or context.scene is None:
        return context
    now, mix = context.now, moments_of(context.scene)
    if memory.corrected_at is not None and (
        now - memory.corrected_at >= CORRECTION_LIFE_SECONDS
        or not is_near(memory.corrected_for, mix, tolerance=CORRECTION_MIX_TOLERANCE)
    ):
        memory = replace(memory, correction=1.0, corrected_at=None, corrected_for=())
        context = replace(context, memory=memory)
    stamps = [memory.last_scale_at, memory.changed_at, memory.corrected_at, *_ready_times(context.observation)]
    settled = all(stamp is None or now - stamp >= demand.window_seconds for stamp in stamps)
    enough = sum(demand.arrivals_per_second.values()) * demand.window_seconds >= FEEDBACK_REQUESTS
    if not settled or not enough or credited(context.spec, context.observation):
        return context
    allowed = dict(capacity.allowed)
    judged = eased(judge(context.spec, demand), allowed)
    miss = worst_ratio(judged, without=[key for key in capacity.unreachable if key not in allowed])
    figures = figures_of(context, demand, capacity)
    estimate = formula.needs(figures)
    enough_seen = estimate is not None and estimate.up <= context.current
    if miss <= FEEDBACK_MISS_RATIO or not enough_seen or memory.correction <= CORRECTION_FLOOR:
        return context
    # By the measured ratio in bounded steps, but at least so far that one more replica is the answer.
    tolerance = 1 + context.spec.autoscaling.behavior.scale_up.tolerance_percent / 100
    carried = formula.carried_by(figures, context.current * tolerance)
    one_more = memory.correction * formula.load(figures) / carried * 0.999
    correction = significant(max(CORRECTION_FLOOR, min(memory.correction * max(CORRECTION_STEP, 1 / miss), one_more)))
    return replace(context, memory=replace(memory, correction=correction, corrected_at=now, corrected_for=mix))


def _ready_times(observation: Observation) -> list[float]:
    return [replica.ready_at for replica in observation.replicas if replica.ready_at is not None]


def figures_of(context: Context, demand: Demand, capacity: Capacity) -> dict[str, float]:
    """What the formula takes where a capacity is known: the arriving work, the backlog, what one replica carries."""
    spec, memory = context.spec, context.memory
    arrivals, drain = sum(demand.arrivals_per_second.values()), drain_seconds(spec, context.observation)
    plan = context.tuning.plan if context.tuning.reason else None
    figures = {
        **context.inputs,
        **tolerances(spec),
        "arrivalsPerSecond": arrivals_to_carry(demand, capacity, context.observation.start_seconds),
        "backlogPerSecond": backlog_requests(context, demand, capacity) / drain,
        "capacityPerReplica": capacity.requests_per_second,
        "capacityInPool": capacity.pooled_per_second,
        "correction": memory.correction,
        "headroomPercent": headroom_percent(spec),
        "drainSeconds": drain,
        "replicasToFit": float(replicas_to_fit(context, demand)),
    }
    floor = spec.objectives.output_tokens_per_second
    answer = sum(cell.share * cell.osl for cell in context.mix.cells)
    if floor is not None and answer > 0:
        figures["floorPerSecond"] = floor / answer
    if plan is not None and plan.capacity.requests_per_second > capacity.requests_per_second:
        figures["plannedCapacityPerReplica"] = plan.capacity.requests_per_second
        figures["plannedCapacityInPool"] = plan.capacity.pooled_per_second
    if context.scene is not None and context.foreseen.work > arrivals * context.scene.marginal_seconds:
        figures["forecastPerSecond"] = context.foreseen.work / context.scene.marginal_seconds
    return {name: figure(value) for name, value in figures.items()}


def arrivals_to_carry(demand: Demand, capacity: Capacity, start_seconds: float | None) -> float:
    """Requests per second that the requests stand for which will run when a replica could be there.

    Requests that stay for long are few that arrive and many that run: how many came in a minute is mostly chance. Of
    those that run, the part ahead / stay leaves until then, and what arrives comes in. Where requests wait, more arrive
    than can run, and what runs does not tell less than what arrives.
    """
    arrivals = jumped(demand)
    rate, ahead = capacity.requests_per_second, max(SHORTEST_AHEAD_SECONDS, start_seconds or 0.0)
    stay = capacity.running / rate if rate > 0 else 0.0
    if stay <= ahead:
        return arrivals
    running = demand.running * (1 - ahead / stay) + arrivals * ahead
    return max(running / stay, arrivals) if demand.waiting else running / stay


def jumped(demand: Demand) -> float:
    """Requests per second that arrive, by the last seconds alone where they brought more than chance explains.

    Believed only where requests wait, too: what the replicas take in needs no more of them, however it came.
    """
    mean = sum(demand.arrivals_per_second.values())
    lately, expected = demand.arrived_lately, mean * LATELY_SECONDS
    if lately is None or demand.window_seconds < 2 * LATELY_SECONDS or demand.waiting < demand.pods_covered:
        return mean
    if lately <= expected + JUMP_DEVIATIONS * math.sqrt(expected + 1):
        return mean
    return max(mean, (lately - math.sqrt(lately)) / LATELY_SECONDS)


def tolerances(spec: Spec) -> dict[str, float]:
    behavior = spec.autoscaling.behavior
    return {
        "scaleUpTolerancePercent": float(behavior.scale_up.tolerance_percent),
        "scaleDownTolerancePercent": float(behavior.scale_down.tolerance_percent),
    }


def drain_seconds(spec: Spec, observation: Observation) -> float:
    """Time in which the backlog shall be gone; new replicas cannot help sooner than they start."""
    queue = spec.objectives.queue_time or spec.objectives.ttft
    start = min(observation.start_seconds or 0.0, 120.0)
    return max(queue.seconds if queue else 0.0, start, SHORTEST_DRAIN_SECONDS)


def backlog_requests(context: Context, demand: Demand, capacity: Capacity) -> float:
    """Requests that are late: waiting beyond the queue target, or admitted into a batch too full to serve them in time.

    The second kind is believed only as far as measured TTFTs say so too, since after a change of the mix many of the
    running requests are merely of the old kind.
    """
    arrivals = sum(demand.arrivals_per_second.values())
    waiting = max(0.0, demand.waiting - arrivals * allowed_wait_seconds(context.spec))
    target, seen = context.spec.objectives.ttft, demand.ttft_p95_seconds
    if target is None or seen is None:
        return waiting
    alone, pooled, ready = capacity.requests_per_second, capacity.pooled_per_second, demand.pods_covered
    usual = capacity.running * formula.carried(1.0, pooled / alone if alone > 0 else 1.0, ready)
    allowed = max(target.seconds, dict(capacity.allowed).get("ttft", 0.0))
    return waiting + max(0.0, min(demand.running - usual, arrivals * (seen - allowed)))


def allowed_wait_seconds(spec: Spec) -> float:
    """Waiting that is no backlog: requests within their queue target."""
    queue = spec.objectives.queue_time or spec.objectives.ttft
    return queue.seconds if queue else 1.0


def replicas_to_fit(context: Context, demand: Demand) -> int:
    """Consolidation: what runs now must find slots and KV in the replicas that stay."""
    slots = FULL_SLOTS * context.tuning.settings.max_num_seqs
    counts = [demand.running / slots]
    engine = context.observation.engine
    if engine is not None and engine.kv_blocks > 0:
        counts.append(demand.running_context_tokens / (FULL_KV * engine.kv_blocks * engine.block_tokens))
    return math.ceil(max(counts) - 1e-9)


def look_ahead(context: Context) -> Context:
    """What has proven to come at this time of the day, or to follow such a rise, within the time of a start."""
    demand, scene, memory = context.observation.demand, context.scene, context.memory
    if demand is None or scene is None:
        return context
    start = context.observation.start_seconds or UNKNOWN_START_SECONDS
    lead = start + context.spec.autoscaling.sync_period_seconds
    arrivals = sum(demand.arrivals_per_second.values())
    forecast = observe(
        memory.forecast,
        now=context.now,
        work=arrivals * scene.marginal_seconds,
        requests=arrivals * demand.window_seconds,
        lead_seconds=lead,
    )
    # By what was known before this look, so that what is foreseen does not depend on the load of this moment.
    foreseen = foresee(memory.forecast, now=context.now, lead_seconds=lead)
    return replace(context, memory=replace(memory, forecast=forecast), foreseen=foreseen)


def need_by_model(context: Context) -> Context:
    """Demand over capacity."""
    demand, capacity = context.observation.demand, context.capacity
    if demand is None or capacity is None or capacity.requests_per_second <= 0:
        return context
    figures = figures_of(context, demand, capacity)
    needed = formula.needed(figures)
    each = formula.carried(capacity.requests_per_second, capacity.pooled_per_second, needed) / needed if needed else 0.0
    corrected = "" if figures["correction"] == 1 else f" x {figures['correction']:.2f} as measured"
    arriving = f"{figures['arrivalsPerSecond']:.3g}"
    if "forecastPerSecond" in figures:
        arriving += f" rising to {figures['forecastPerSecond']:.3g} by its {context.foreseen.by}"
    floor = figures.get("floorPerSecond", 0.0)
    if floor > max(figures["arrivalsPerSecond"], figures.get("forecastPerSecond", 0.0)):
        arriving = f"{floor:.3g} as outputTokensPerSecond asks"
    message = (
        f"({arriving} + {figures['backlogPerSecond']:.3g} backlog) req/s over "
        f"{each or figures['capacityPerReplica']:.3g} req/s a replica{corrected}"
        f" less {figures['headroomPercent']:.0f} % headroom = {needed:.2f} replicas"
    )
    if capacity.unreachable:
        message += f"; no number of replicas reaches the target for {', '.join(map(in_short, capacity.unreachable))}"
    elif capacity.binding:
        message += f"; the goal for {in_short(capacity.binding)} binds"
    return _want(context, figures | {"needed": figure(needed)}, message=message)


def need_when_idle(context: Context) -> Context:
    """Nothing arrives: keep what still runs."""
    demand = context.observation.demand
    if context.want_up is not None or demand is None or context.mix.cells or demand.waiting > 0:
        return context
    figures = {**context.inputs, "replicasToFit": float(replicas_to_fit(context, demand))}
    return _want(context, figures, message=f"nothing arrives; {demand.running:.0f} requests run")


def need_by_reaction(context: Context) -> Context:
    """No capacity known: follow the observed signals."""
    demand = context.observation.demand
    if context.want_up is not None or demand is None:
        return context
    ready = max(1, context.observation.count(ReplicaPhase.READY))
    pressure = {
        "targets": worst_ratio(judge(context.spec, demand)),
        "waiting": demand.waiting / max(1.0, 0.25 * ready * context.tuning.settings.max_num_seqs),
        "slots": demand.running / (FULL_SLOTS * ready * context.tuning.settings.max_num_seqs),
        "kv": (demand.kv_used_ratio or 0.0) / FULL_SLOTS,
        **prior_pressure(context, demand),
    }
    worst, signal = max((value, name) for name, value in pressure.items())
    figures = {
        **context.inputs,
        **tolerances(context.spec),
        **{f"pressure_{name}": figure(value) for name, value in pressure.items()},
        "replicasToFit": float(replicas_to_fit(context, demand)),
    }
    return _want(context, figures, message=f"capacity is not known yet; {signal} at {worst:.2f} of its limit")


def prior_pressure(context: Context, demand: Demand) -> dict[str, float]:
    """Arrivals over what the ready pods carry by the roofline, as far as it may err on the side of too little.

    One pressure among the measured ones: it can add a replica and keep one, and never takes one away.
    """
    engine, ready = context.observation.engine, context.observation.count(ReplicaPhase.READY)
    if engine is None or engine.prior is None or not context.mix.cells or not ready:
        return {}
    scene = scene_of(context.spec, engine, model=engine.prior, mix=context.mix)
    if scene is None:
        return {}
    guessed = capacity_of(scene, context.tuning.settings).requests_per_second
    usable = guessed * (1 + PRIOR_ERROR) * (1 - context.spec.autoscaling.headroom_percent / 100) * ready
    return {"prior": sum(demand.arrivals_per_second.values()) / usable} if usable > 0 else {}


def _want(context: Context, figures: Mapping[str, float], *, message: str) -> Context:
    found = formula.needs(figures) or Needs(1, context.current)
    return replace(
        context,
        wanted=found.wanted(context.current),
        want_up=found.up,
        want_down=found.down,
        inputs=figures,
        message=message,
    )


def credited(spec: Spec, observation: Observation) -> int:
    """Pods on their way that are still within the time that a start may take."""
    return sum(
        replica.phase in STARTING_PHASES and observation.now - replica.created_at <= start_deadline(spec, observation)
        for replica in observation.replicas
    )


def lost(spec: Spec, observation: Observation) -> int:
    """Pods that do not come up though others of the same version serve: no supply, however long they are waited for."""
    if not any(replica.phase == ReplicaPhase.READY and replica.updated for replica in observation.replicas):
        return 0
    deadline = start_deadline(spec, observation)
    return sum(
        replica.phase in (ReplicaPhase.CRASH_LOOPING, ReplicaPhase.PULL_FAILED)
        or (
            replica.phase in STARTING_PHASES
            and replica.restarts == 0
            and observation.now - replica.created_at > deadline
        )
        for replica in observation.replicas
    )


def start_deadline(spec: Spec, observation: Observation) -> float:
    measured = observation.start_seconds
    return float(spec.probes.startup_timeout_seconds) if measured is None else 2 * measured + 30


# --- from wanted to decided ------------------------------------------------------------------------------------------


def move_to_wanted(context: Context) -> Context:
    """The direction, and the reason for it."""
    if context.wanted is None or context.wanted == context.current:
        return replace(context, reason="LoadAsExpected" if context.wanted is not None else context.reason)
    unseen_only = context.capacity is None and bool(context.mix.cells or _waiting(context))
    if context.wanted > context.current:
        backlog = context.inputs.get("backlogPerSecond", 0.0) > context.inputs.get("arrivalsPerSecond", 0.0)
        reason = "SignalAboveTarget" if unseen_only else "BacklogAboveTarget" if backlog else "DemandAboveCapacity"
        if _is_wanted_for_forecast_only(context):
            reason = "LoadForeseen"
        if context.memory.corrected_at == context.now:
            reason = "TargetMissed"
    else:
        reason = "SignalBelowTarget" if unseen_only else "DemandBelowCapacity"
    return replace(context, replicas=context.wanted, reason=reason)


def _is_wanted_for_forecast_only(context: Context) -> bool:
    present = {name: value for name, value in context.inputs.items() if name != "forecastPerSecond"}
    found = formula.needs(present)
    return len(present) < len(context.inputs) and found is not None and found.up <= context.current


def _waiting(context: Context) -> bool:
    return context.observation.demand is not None and context.observation.demand.waiting > 0


def stabilise(context: Context) -> Context:
    """Down only to the most wanted within its window, up only to the least; a window not filled yet holds."""
    if context.want_up is None or context.want_down is None:
        return context
    behavior = context.spec.autoscaling.behavior
    down_seconds = behavior.scale_down.stabilization_window_seconds
    up_seconds = behavior.scale_up.stabilization_window_seconds
    low, high = context.limits.low, context.limits.high
    buckets = buckets_for((down_seconds, up_seconds), sync_seconds=context.spec.autoscaling.sync_period_seconds)
    want = Want(context.now, min(max(context.want_down, low), high), min(max(context.want_up, low), high))
    # Where nobody will follow it, a want for fewer is not pending, and its time need not be written down.
    follows = (
        context.spec.autoscaling.mode == ScalingMode.AUTO and behavior.scale_down.select_policy != SelectPolicy.DISABLED
    )
    current = context.current if follows else want.most
    memory = remember_want(context.memory, want, current=current, buckets=buckets)
    context = replace(context, memory=memory)
    if context.replicas < context.current and down_seconds:
        most = max(item.most for item in wants_within(memory, now=context.now, seconds=down_seconds))
        cold = memory.since is None or context.now - memory.since < down_seconds
        floor = context.current if cold else min(most, context.current)
        context = _noted(context, "stabilizationFloor", floor)
        return _bounded(context, max(context.replicas, floor), rule="StabilizationWindow")
    if context.replicas > context.current and up_seconds:
        least = min(item.least for item in wants_within(memory, now=context.now, seconds=up_seconds))
        context = _noted(context, "stabilizationCeiling", least)
        return _bounded(context, max(context.current, min(context.replicas, least)), rule="StabilizationWindow")
    return context


def wait_for_verification(context: Context) -> Context:
    """While changed settings are watched, capacity may not move under them."""
    if context.replicas >= context.current or context.tuning.verifying_until is None:
        return context
    context = _noted(context, "verifyingSettings", 1)
    return _bounded(context, context.current, rule="SettingsVerification")


def limit_speed(context: Context) -> Context:
    """HPA v2 policies: how much may change within their periods."""
    behavior, current = context.spec.autoscaling.behavior, context.current
    if context.replicas > current:
        # What reacts to signals must see what it did before it does more; the model's number counts what is on its way.
        start = context.observation.start_seconds or UNKNOWN_START_SECONDS
        shortest = KNOWN_PERIOD_SECONDS if "capacityPerReplica" in context.inputs else start
        period = max(shortest, context.spec.autoscaling.sync_period_seconds)
        limits = [
            (_at_period_start(context, policy.period_seconds or period), policy)
            for policy in behavior.scale_up.policies
        ]
        allowed = _select(
            [_raised(base, policy) for base, policy in limits], behavior.scale_up.select_policy, more=max, fewer=min
        )
        most = max(current, current if allowed is None else allowed)
        return _bounded(_noted(context, "scaleUpLimit", most), min(context.replicas, most), rule="ScaleUpPolicy")
    if context.replicas < current:
        limits = [
            (_at_period_start(context, policy.period_seconds or 60), policy) for policy in behavior.scale_down.policies
        ]
        allowed = _select(
            [_lowered(base, policy) for base, policy in limits], behavior.scale_down.select_policy, more=min, fewer=max
        )
        fewest = min(current, current if allowed is None else allowed)
        context = _noted(context, "scaleDownLimit", fewest)
        return _bounded(context, max(context.replicas, fewest), rule="ScaleDownPolicy")
    return context


def see_enough_first(context: Context) -> Context:
    """Up only on a window that tells a rate: a few requests within seconds of the first sample are no trend."""
    demand = context.observation.demand
    if context.replicas <= context.current or demand is None:
        return context
    counted = sum(demand.arrivals_per_second.values()) * demand.window_seconds
    if counted >= TREND_REQUESTS or demand.window_seconds >= TREND_SECONDS:
        return context
    return _bounded(_noted(context, "scaleUpLimit", context.current), context.current, rule="TooFewRequests")


def _at_period_start(context: Context, period_seconds: float) -> int:
    recent = [scale for scale in context.memory.scales if scale.at > context.now - period_seconds]
    return context.current - sum(scale.after - scale.before for scale in recent)


def _raised(base: int, policy: ScalingPolicy) -> int:
    return base + policy.value if policy.type == PolicyType.PODS else math.ceil(base * (1 + policy.value / 100))


def _lowered(base: int, policy: ScalingPolicy) -> int:
    return base - policy.value if policy.type == PolicyType.PODS else int(base * (1 - policy.value / 100))


def _select(
    limits: Sequence[int],
    choice: SelectPolicy,
    *,
    more: Callable[[Sequence[int]], int],
    fewer: Callable[[Sequence[int]], int],
) -> int | None:
    """The limit that counts; None when nothing may change."""
    if choice == SelectPolicy.DISABLED or not limits:
        return None
    return more(limits) if choice == SelectPolicy.MAX else fewer(limits)


def ask_for_no_more_than_fits(context: Context) -> Context:
    """Pods that no node takes: ask for no more, and after a while withdraw all but one of them."""
    stuck = [replica for replica in context.observation.replicas if replica.phase in WAITING_PHASES]
    if not stuck:
        return context
    overdue = [replica for replica in stuck if context.now - replica.created_at > WITHDRAW_SECONDS]
    ceiling = max(context.current - max(0, len(overdue) - 1), context.limits.low)
    context = _noted(context, "placeableReplicas", ceiling)
    return _bounded(context, min(context.replicas, ceiling), rule="Unschedulable")


def note_what_is_held(context: Context) -> Context:
    """Where nothing was measured: the number that the rules before came to, since no formula gives it."""
    return context if context.wanted is not None else _noted(context, "heldReplicas", context.replicas)


def keep_bounds(context: Context) -> Context:
    """minReplicas and maxReplicas, schedules and GPU budgets: always, whatever was wanted and whoever asked."""
    mode, limits = context.spec.autoscaling.mode, context.limits
    observes = mode == ScalingMode.OBSERVE
    stands = context.spec.autoscaling.paused and context.current > 0
    if mode not in (ScalingMode.AUTO, ScalingMode.OBSERVE) or (stands and not observes):
        return context
    context = _noted(_noted(context, "minReplicas", limits.low), "maxReplicas", limits.high)
    rule = limits.high_rule if context.replicas > limits.high else limits.low_rule
    if rule == "Schedule" and not limits.low <= context.replicas <= limits.high:
        names = ", ".join(limits.schedules)
        told = f"{context.message}; " if context.message else ""
        context = replace(context, message=f"{told}schedule {names}: {limits.low} to {limits.high} replicas")
    return _bounded(context, min(max(context.replicas, limits.low), limits.high), rule=rule)


def only_observe(context: Context) -> Context:
    """Mode Observe: say it, do not do it."""
    if context.spec.autoscaling.mode != ScalingMode.OBSERVE:
        return context
    given = context.observation.spec_replicas
    replicas = context.spec.fixed_replicas() if given is None else given
    message = f"would hold {context.replicas} replicas: {context.message}"
    context = _noted(context, "specReplicas", replicas)
    return replace(context, replicas=replicas, reason="ObservingOnly", message=message)


def _noted(context: Context, name: str, value: float) -> Context:
    """A figure that a rule went by, for those who check the number."""
    return replace(context, inputs={**context.inputs, name: float(value)})


def _bounded(context: Context, replicas: int, *, rule: str) -> Context:
    if replicas == context.replicas:
        return context
    context = replace(context, replicas=replicas, bounded_by=(*context.bounded_by, rule))
    # A move that a rule stopped, or one that only this rule makes, is explained by that rule.
    direction = (replicas > context.current) - (replicas < context.current)
    asked = 0 if context.wanted is None else (context.wanted > context.current) - (context.wanted < context.current)
    return context if direction == asked else replace(context, reason=rule)


FIRST: tuple[Rule, ...] = (
    let_others_decide,
    stand_still_when_paused,
    sleep_and_wake,
    start_with_minimum,
)
NEEDS: tuple[Rule, ...] = (
    hold_without_metrics,
    correct_by_measurement,
    look_ahead,
    need_by_model,
    need_when_idle,
    need_by_reaction,
)
MOVES: tuple[Rule, ...] = (
    move_to_wanted,
    stabilise,
    wait_for_verification,
    limit_speed,
    see_enough_first,
    ask_for_no_more_than_fits,
    note_what_is_held,
    keep_bounds,
    only_observe,
)
RULES: tuple[Rule, ...] = (*FIRST, *NEEDS, *MOVES)
ALWAYS: tuple[Rule, ...] = (note_what_is_held, keep_bounds, only_observe)


# --- the answer ------------------------------------------------------------------------------------------------------


def conclude(context: Context) -> Decision:
    """Put the decision into words, and remember what the next one needs."""
    tuning, memory, current = context.tuning, context.memory, context.current
    scaled = context.replicas != current
    if scaled and current > 0 and context.spec.autoscaling.mode == ScalingMode.AUTO:
        memory = remember_scale(
            memory, Scale(context.now, current, context.replicas), keep_seconds=_longest_period(context)
        )
    if scaled:
        action = Action.SCALE_UP if context.replicas > current else Action.SCALE_DOWN
    else:
        action = Action.HOLD if tuning.reason is None else Action.RETUNE
    reason = context.reason
    if not scaled:
        reason = tuning.reason or tuning.hold_reason or reason
    capacity = context.capacity
    return Decision(
        replicas=context.replicas,
        settings=tuning.settings,
        settings_generation=tuning.generation,
        action=action,
        reason=reason,
        message=_sentence(context),
        recheck_after_seconds=_recheck(context),
        wanted_replicas=context.wanted,
        bounded_by=context.bounded_by,
        limits=context.limits if context.spec.autoscaling.mode in (ScalingMode.AUTO, ScalingMode.OBSERVE) else None,
        bottleneck=capacity.bottleneck if capacity else Bottleneck.NONE,
        binding=capacity.binding if capacity else "",
        mix=pattern_shares(context.mix, context.spec.patterns()),
        inputs=_inputs(context),
        settings_reason=tuning.reason or "",
        settings_message=tuning.message if tuning.reason else "",
        memory=dump_memory(memory),
    )


def _sentence(context: Context) -> str:
    current, replicas = context.current, context.replicas
    parts = []
    if replicas != current:
        parts.append(
            f"{current} → {replicas} replicas: {context.message}" if context.message else f"{replicas} replicas"
        )
    if context.tuning.message:
        parts.append(context.tuning.message)
    if replicas == current and context.message:
        parts.append(context.message)
    if context.bounded_by:
        parts.append(f"bounded by {', '.join(context.bounded_by)}")
    return "; ".join(parts) or f"{replicas} replicas"


def _inputs(context: Context) -> dict[str, float]:
    capacity = context.capacity
    figures = dict(context.inputs)
    engine = context.observation.engine
    if engine is not None and engine.step_model_confidence is not None:
        figures["modelConfidence"] = engine.step_model_confidence
    if capacity is not None:
        figures["idleTtftSeconds"] = capacity.idle_ttft_seconds
        figures["idleItlSeconds"] = capacity.idle_itl_seconds
        for name in capacity.unreachable:
            figures[f"unreachable_{name}"] = 1.0
        for name, seconds in capacity.allowed:
            figures[f"allowed_{name}_seconds"] = formula.figure(seconds)
    for name, value in context.memory.effect.items():
        figures[f"effect_{name}"] = value
    trial = context.memory.trial
    if trial is not None:
        figures.update({f"trial_predicted_{name}": value for name, value in trial.predicted.items()})
    aim = context.tuning.aim
    if aim is not None:
        figures.update({f"aim_{name}": float(value) for name, value in aim.as_dict().items()})
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _longest_period(context: Context) -> float:
    behavior = context.spec.autoscaling.behavior
    periods = [policy.period_seconds or 0 for policy in (*behavior.scale_up.policies, *behavior.scale_down.policies)]
    return float(max(*periods, 60, context.observation.start_seconds or 0))


def _recheck(context: Context) -> float:
    period = float(context.spec.autoscaling.sync_period_seconds)
    until = context.tuning.verifying_until
    if until is not None and 0 < until - context.now < period:
        return max(1.0, until - context.now)
    return period
