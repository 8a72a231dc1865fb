"""Which batch settings hold: the first half of a decision, made of small rules in a fixed order.

Pure. Follows the mix (`capacity.best_settings`) in limited steps, watches every change for `verificationSeconds`, rolls
it back when the objectives got worse, and numbers each change with a generation that the pods acknowledge. `policy`
calls `tune` before it chooses replicas, since settings act in seconds and replicas in minutes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from tidegate_engine.settings import SETTING_NAMES, BatchSettings, Envelope
from tidegate_operator.api import BatchingMode, Spec
from tidegate_operator.capacity import (
    SEQUENCE_MULTIPLE,
    TOKEN_MULTIPLE,
    Plan,
    Scenario,
    Targets,
    best_settings,
    capacity_of,
    full_batch_itl_seconds,
    predict,
    round_to,
    score_of,
)
from tidegate_operator.demand import WINDOW_SECONDS
from tidegate_operator.goals import Judged, eased, goals_of, judge, miss_of
from tidegate_operator.memory import Memory, Trial
from tidegate_operator.observation import Demand, Observation, ReplicaPhase

SETTLE_SECONDS, WATCH_TOLERANCE = WINDOW_SECONDS / 4, 0.2
"""The mix must have been about the same for so long: while another one comes in, the window holds both, and what is
best for their blend is best for neither."""
MIN_GAIN_RATIO = 1.1
"""Predicted gain below which the settings stay: noise must not move them."""
URGENT_GAIN_RATIO = 1.5
"""Predicted gain for which a replica that cannot carry the load does not wait until the mix has settled."""
MIN_REQUESTS = 10
MIN_ANSWERS = 5
"""Requests that arrived, and that finished, in the window, below which the mix is too thin to act on."""
SETTLED_TOLERANCE = 0.1
WORSE_RATIO = 1.2
MISSED_RATIO = 1.1
COMPARABLE_LOAD_RATIO = 1.2
COMPARABLE_MIX_RATIO = 1.3
COOLDOWN_FACTOR = 10
MIN_LATE = 2.0
"""Late requests a replica below which there is no backlog."""
WINDOW_SHARE = 0.75
"""Share of the rate window that must lie after a change before its effect counts as measured."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The settings half of a decision."""

    settings: BatchSettings
    generation: int
    memory: Memory
    reason: str | None = None
    """CamelCase; None when nothing changed."""
    hold_reason: str = ""
    """Why a decision that changes nothing is still worth reading."""
    message: str = ""
    aim: BatchSettings | None = None
    """Where the steps lead to; None when the present settings stay."""
    plan: Plan | None = None
    verifying_until: float | None = None


def tune(spec: Spec, observation: Observation, *, memory: Memory, scene: Scenario | None, active: bool) -> Tuning:
    """Choose the settings. `active`: whether the data is fresh and the operator may act on its own."""
    tuning = adopt(spec, observation, memory=memory)
    mode = spec.batching.mode
    if mode == BatchingMode.FIXED:
        return hold_fixed(spec, tuning)
    tuning = clamp(spec.envelope(), tuning)
    demand = observation.demand
    if not active or demand is None:
        return watch_clock(spec, tuning, now=observation.now)
    tuning = judge_trial(spec, observation, tuning=tuning, demand=demand, scene=scene)
    if tuning.reason is not None or scene is None or not may_search(observation, tuning, demand=demand):
        return tuning
    return follow_mix(spec, observation, tuning=tuning, demand=demand, scene=scene)


def adopt(spec: Spec, observation: Observation, *, memory: Memory) -> Tuning:
    """The settings that hold so far: remembered ones, or newer ones that pods already run, or the object's initial."""
    settings, generation = memory.settings, memory.generation
    known = [replica for replica in observation.replicas if replica.settings_generation is not None]
    newest = max(known, key=lambda replica: replica.settings_generation or 0, default=None)
    if newest is not None and (newest.settings_generation or 0) > generation:
        # A change went out, but its record was lost: what the pods run is the truth.
        generation = newest.settings_generation or 0
        if newest.settings is not None:
            settings = newest.settings
        elif settings is not None:
            generation += 1
    if settings is None:
        settings = spec.initial_settings()
    generation = max(1, generation)
    return Tuning(settings, generation, replace(memory, settings=settings, generation=generation))


def hold_fixed(spec: Spec, tuning: Tuning) -> Tuning:
    """Mode Fixed: the object's initial settings hold."""
    memory = replace(tuning.memory, trial=None, cooldown_until=None, settled=())
    tuning = replace(tuning, memory=memory)
    wanted = spec.initial_settings()
    if wanted == tuning.settings:
        return tuning
    return _change(
        tuning, wanted, reason="SettingsFixed", message=f"batch settings {describe(wanted)} as the object says"
    )


def clamp(envelope: Envelope, tuning: Tuning) -> Tuning:
    """Settings outside a changed envelope move to its edge."""
    clamped = within(tuning.settings, envelope)
    if clamped == tuning.settings:
        return tuning
    return _change(
        tuning, clamped, reason="SettingsClamped", message=f"batch settings {describe(clamped)}: the envelope changed"
    )


def watch_clock(spec: Spec, tuning: Tuning, *, now: float) -> Tuning:
    """Without fresh data a trial is neither judged nor forgotten; its freeze still ends."""
    trial = tuning.memory.trial
    until = None if trial is None else trial.at + spec.batching.verification_seconds
    return replace(tuning, verifying_until=until if until is not None and until > now else None)


def judge_trial(
    spec: Spec, observation: Observation, *, tuning: Tuning, demand: Demand, scene: Scenario | None
) -> Tuning:
    """After the verification window: keep the change and note its effect, or roll it back."""
    trial = tuning.memory.trial
    if trial is None:
        return tuning
    now, verification = observation.now, spec.batching.verification_seconds
    due = trial.at + max(verification, WINDOW_SHARE * demand.window_seconds)
    applied = _applied_everywhere(observation, tuning.generation)
    if now < due or (not applied and now < due + max(verification, demand.window_seconds)):
        return replace(tuning, verifying_until=due if verification and now < due else None)
    measured = measure(demand, spec=spec, scene=scene)
    effect = {
        "generation": float(tuning.generation),
        **{f"predicted_{name}": value for name, value in trial.predicted.items()},
        **{f"before_{name}": value for name, value in trial.measured.items() if name.endswith("_seconds")},
        **{f"measured_{name}": value for name, value in measured.items() if name.endswith("_seconds")},
    }
    memory = replace(tuning.memory, trial=None, effect=effect)
    allowed = dict(capacity_of(scene, tuning.settings).allowed) if scene else {}
    goals = eased(goals_of(spec), allowed)
    if verification and applied and got_worse(goals, before=trial.measured, after=measured):
        until = now + COOLDOWN_FACTOR * verification
        memory = replace(memory, cooldown_until=until, settled=())
        return _change(
            replace(tuning, memory=memory),
            within(trial.before, spec.envelope()),
            reason="SettingsRolledBack",
            message=f"batch settings back to {describe(trial.before)}: {compare(trial.measured, measured)}",
            now=now,
        )
    seen = compare(trial.measured, measured)
    if not comparable(trial.measured, measured):
        seen += " under another load"
    elif trial.measured.get("late"):
        seen += " while a backlog drained"
    message = f"batch settings {describe(tuning.settings)} kept: {foretell(trial.predicted)}; {seen}"
    return replace(tuning, memory=memory, hold_reason="SettingsVerified", message=message)


def got_worse(goals: Sequence[Judged], *, before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Whether an objective is missed now and was not, or less so, under a comparable load."""
    if not comparable(before, after):
        return False
    judged = list(goals)
    if before.get("late"):
        # A backlog shows in the waits of those that leave it: they say nothing about the settings that drain it.
        judged = [item for item in judged if item.key.startswith("itl")]
    return miss_of(after, judged) > MISSED_RATIO and miss_of(after, judged) > WORSE_RATIO * miss_of(before, judged)


def comparable(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Whether two measurements are of about the same load: rate and mix."""
    for name in ("rate", "prefill_tokens", "decode_tokens"):
        limit = COMPARABLE_LOAD_RATIO if name == "rate" else COMPARABLE_MIX_RATIO
        if before.get(name, 0) <= 0 or not 1 / limit <= after.get(name, 0) / before[name] <= limit:
            return False
    return True


def may_search(observation: Observation, tuning: Tuning, *, demand: Demand) -> bool:
    """Whether the data is good enough to look for other settings: every pod seen, all on one generation."""
    ready = observation.count(ReplicaPhase.READY)
    return (
        ready > 0
        and demand.pods_covered >= ready
        and not is_thin(demand)
        and _applied_everywhere(observation, tuning.generation)
        and not (tuning.memory.cooldown_until is not None and observation.now < tuning.memory.cooldown_until)
    )


def is_thin(demand: Demand) -> bool:
    """Whether too few requests came and ended to tell anything by."""
    arrived, ended = (
        sum(rates.values()) * demand.window_seconds
        for rates in (demand.arrivals_per_second, demand.finished_per_second)
    )
    return arrived < MIN_REQUESTS or round(ended) < MIN_ANSWERS


def follow_mix(spec: Spec, observation: Observation, *, tuning: Tuning, demand: Demand, scene: Scenario) -> Tuning:
    """Step towards the best settings for the mix, when they are worth it."""
    now, memory = observation.now, tuning.memory
    memory = watch_mix(memory, moments_of(scene), now=now, full_window=demand.window_seconds >= WINDOW_SECONDS)
    tuning = replace(tuning, memory=memory)
    if memory.changed_at is not None and now < memory.changed_at + spec.batching.min_interval_seconds:
        return tuning
    per_replica = sum(demand.arrivals_per_second.values()) / max(1, observation.count(ReplicaPhase.READY))
    is_settled = memory.watched_since is not None and now >= memory.watched_since + SETTLE_SECONDS
    if not is_settled and capacity_of(scene, tuning.settings).requests_per_second >= per_replica:
        return tuning
    late = late_per_replica(spec, demand)
    if late:
        scene = draining(scene)
    signature = signature_of(scene, spec.envelope())
    if is_near(memory.settled, signature, tolerance=SETTLED_TOLERANCE):
        return tuning
    plan = best_settings(scene, spec.envelope(), present=tuning.settings)
    if not is_settled and plan.gain_ratio < URGENT_GAIN_RATIO:
        return tuning
    # Among settings of one rate the safer ones are better; those that serve are not given up for safer ones of less.
    if (
        plan.gain_ratio < MIN_GAIN_RATIO
        or plan.capacity.requests_per_second < capacity_of(scene, tuning.settings).requests_per_second
    ):
        return replace(tuning, memory=replace(memory, settled=signature))
    step = best_step(scene, plan.settings, present=tuning.settings, spec=spec)
    if step == tuning.settings:
        return replace(tuning, memory=replace(memory, settled=signature))
    predicted = foresee(scene, present=tuning.settings, step=step, rate=per_replica)
    if late:
        predicted = foresee_drain(predicted, late=late, rate=per_replica)
    message = f"{describe(tuning.settings)} → {describe(step)}: {foretell(predicted)}"
    if step != plan.settings:
        message += f"; a step towards {describe(plan.settings)}"
    if spec.batching.mode == BatchingMode.OBSERVE:
        return replace(tuning, message=f"would set batch settings {message}", aim=plan.settings, plan=plan)
    trial = Trial(at=now, before=tuning.settings, measured=measure(demand, spec=spec, scene=scene), predicted=predicted)
    tuning = _change(
        replace(tuning, memory=replace(memory, trial=_continued(memory.trial, trial), settled=())),
        step,
        reason="RetunedForMix",
        message=f"batch settings {message}",
        now=now,
    )
    verification = spec.batching.verification_seconds
    return replace(tuning, aim=plan.settings, plan=plan, verifying_until=now + verification if verification else None)


def tune_unwatched(spec: Spec, tuning: Tuning, *, scene: Scenario) -> Tuning:
    """Settings of a kind that serves nothing or next to it: the best for the mix at once, since nothing can be watched.

    What its next pods carry would else be judged by settings for a mix that is long gone.
    """
    signature = signature_of(scene, spec.envelope())
    if spec.batching.mode != BatchingMode.AUTO or is_near(
        tuning.memory.settled, signature, tolerance=SETTLED_TOLERANCE
    ):
        return tuning
    plan = best_settings(scene, spec.envelope(), present=tuning.settings)
    if plan.settings != tuning.settings:
        message = f"batch settings {describe(plan.settings)} for the next replica"
        tuning = _change(tuning, plan.settings, reason="RetunedForMix", message=message)
    return replace(tuning, memory=replace(tuning.memory, trial=None, settled=signature), verifying_until=None)


def _continued(running: Trial | None, step: Trial) -> Trial:
    """Steps in a row under one mix are one trial, against what held before the first of them."""
    if running is None or not comparable(running.measured, step.measured):
        return step
    first = {name: value for name, value in running.predicted.items() if name.endswith("_before")}
    return replace(step, before=running.before, measured=running.measured, predicted={**step.predicted, **first})


def _change(tuning: Tuning, settings: BatchSettings, *, reason: str, message: str, now: float | None = None) -> Tuning:
    generation = tuning.generation + 1
    memory = replace(tuning.memory, settings=settings, generation=generation)
    memory = replace(memory, trial=None, settled=()) if now is None else replace(memory, changed_at=now)
    return replace(tuning, settings=settings, generation=generation, memory=memory, reason=reason, message=message)


def _applied_everywhere(observation: Observation, generation: int) -> bool:
    return all(
        replica.settings_generation in (None, generation)
        for replica in observation.replicas
        if replica.phase == ReplicaPhase.READY
    )


def watch_mix(memory: Memory, moments: tuple[float, ...], *, now: float, full_window: bool) -> Memory:
    """Note since when the mix has been what it is. A full window that nobody watched before is taken as it is."""
    if is_near(memory.watched, moments, tolerance=WATCH_TOLERANCE):
        return memory
    since = now - WINDOW_SECONDS if full_window and not memory.watched else now
    return replace(memory, watched=moments, watched_since=since)


def late_per_replica(spec: Spec, demand: Demand) -> float:
    """Requests that wait on each replica beyond what the goals allow; 0 unless they are many."""
    goal = spec.objectives.queue_time or spec.objectives.ttft
    rate = sum(demand.arrivals_per_second.values()) / max(1, demand.pods_covered)
    allowed = rate * (goal.seconds if goal else 1.0)
    late = demand.waiting / max(1, demand.pods_covered) - allowed
    return late if late > max(MIN_LATE, allowed) else 0.0


def draining(scene: Scenario) -> Scenario:
    """What settings are chosen for while a backlog drains: the largest rate that leaves the ITL alone.

    The goals for waiting are missed already by those that wait, under any settings.
    """

    def without_waits(targets: Targets) -> Targets:
        return Targets(itl_seconds=targets.itl_seconds)

    own = tuple((name, without_waits(targets)) for name, targets in scene.own_targets)
    return replace(scene, targets=without_waits(scene.targets), own_targets=own, prefers_safety=False)


def measure(demand: Demand, *, spec: Spec, scene: Scenario | None) -> dict[str, float]:
    """What is compared before and after a change: every figure that has a goal, and the load."""
    figures = {
        "ttft_seconds": demand.ttft_p95_seconds,
        "itl_seconds": demand.itl_p95_seconds,
        "queue_seconds": demand.queue_p95_seconds,
        **{f"{item.key}_seconds": item.seen_seconds for item in judge(spec, demand)},
        "rate": sum(demand.arrivals_per_second.values()),
        "prefill_tokens": scene.prefill_tokens if scene else None,
        "decode_tokens": scene.decode_steps if scene else None,
        "late": late_per_replica(spec, demand) or None,
    }
    return {name: significant(value) for name, value in figures.items() if value is not None and math.isfinite(value)}


def foresee(scene: Scenario, *, present: BatchSettings, step: BatchSettings, rate: float) -> dict[str, float]:
    """Predicted figures with the new settings, and with the old ones (`…_before`), at `rate` requests/s a replica."""
    figures: dict[str, float | None] = {}
    for settings, suffix in ((present, "_before"), (step, "")):
        prediction = predict(scene, settings, rate)
        figures[f"ttft_seconds{suffix}"] = prediction.ttft_p95_seconds
        figures[f"itl_seconds{suffix}"] = prediction.itl_p95_seconds
        figures[f"capacity{suffix}"] = capacity_of(scene, settings).requests_per_second
        figures[f"full_batch_itl_seconds{suffix}"] = full_batch_itl_seconds(scene, settings)
    return {name: significant(value) for name, value in figures.items() if value is not None and math.isfinite(value)}


def foresee_drain(predicted: Mapping[str, float], *, late: float, rate: float) -> dict[str, float]:
    """How long the late requests of a replica take to be served beside what arrives. Absent: they only grow in number.

    The latencies of a steady state are taken out: it begins when the backlog is gone.
    """
    figures = {name: value for name, value in predicted.items() if not name.startswith("ttft_")} | {"late": late}
    for suffix in ("", "_before"):
        spare = predicted.get(f"capacity{suffix}", 0.0) - rate
        if spare > 0:
            figures[f"drain_seconds{suffix}"] = late / spare
    return {name: significant(value) for name, value in figures.items()}


def foretell(predicted: Mapping[str, float]) -> str:
    """The predicted effect in words: `predicted ITL p95 41 → 28 ms, capacity 3.1 → 4.4 req/s`."""
    parts = []
    for name, label in (
        ("ttft_seconds", "TTFT p95"),
        ("itl_seconds", "ITL p95"),
        ("full_batch_itl_seconds", "ITL of a full batch"),
    ):
        after, before = predicted.get(name), predicted.get(f"{name}_before")
        if after is not None:
            old = "unbounded" if before is None else f"{before * 1000:.0f}"
            parts.append(f"{label} {old} → {after * 1000:.0f} ms")
    parts.append(f"capacity {predicted.get('capacity_before', 0):.3g} → {predicted.get('capacity', 0):.3g} req/s")
    told = f"predicted {', '.join(parts)} a replica"
    if "late" not in predicted:
        return told
    drain, drain_before = (_drain_words(predicted.get(f"drain_seconds{suffix}")) for suffix in ("", "_before"))
    return f"{told}; {predicted['late']:.0f} late requests a replica drain {drain} instead of {drain_before}"


def _drain_words(seconds: float | None) -> str:
    return "never" if seconds is None else f"in {seconds:.0f} s"


def compare(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Measured before and after, in words."""
    parts = [
        f"{label} {before[name] * 1000:.0f} → {after[name] * 1000:.0f} ms"
        for name, label in (("ttft_seconds", "TTFT p95"), ("itl_seconds", "ITL p95"), ("queue_seconds", "queue p95"))
        if name in before and name in after
    ]
    return f"measured {', '.join(parts)}" if parts else "nothing measured"


def describe(settings: BatchSettings) -> str:
    return f"{settings.max_num_seqs}/{settings.max_num_batched_tokens}/{settings.long_prefill_token_threshold}"


def within(settings: BatchSettings, envelope: Envelope) -> BatchSettings:
    """`settings` inside the envelope and its cross-field rule."""
    values = {}
    for name, value in settings.as_dict().items():
        low, high = envelope.bounds(name)
        values[name] = min(max(value, low), high)
    tokens = max(values["max_num_batched_tokens"], values["max_num_seqs"])
    values["max_num_batched_tokens"] = min(tokens, envelope.max_num_batched_tokens[1])
    values["max_num_seqs"] = min(values["max_num_seqs"], values["max_num_batched_tokens"])
    return BatchSettings(**values)


def step_towards(aim: BatchSettings, present: BatchSettings, *, percent: int, envelope: Envelope) -> BatchSettings:
    """`aim`, or as near to it as one step of `percent` allows, at round numbers."""
    factor = 1 + percent / 100
    values = {}
    for name in SETTING_NAMES:
        old, new = getattr(present, name), getattr(aim, name)
        low, high = old / factor, old * factor
        if low <= new <= high:
            values[name] = new
            continue
        multiple = SEQUENCE_MULTIPLE if name == "max_num_seqs" else TOKEN_MULTIPLE
        rounded = round_to(min(max(new, low), high), multiple=multiple)
        forward = 1 if new > old else -1
        if not low <= rounded <= high or (rounded - old) * forward <= 0:
            rounded = old + forward * max(1, math.floor(abs(min(max(new, low), high) - old)))
        values[name] = rounded
    return within(BatchSettings(**values), envelope)


def best_step(scene: Scenario, aim: BatchSettings, *, present: BatchSettings, spec: Spec) -> BatchSettings:
    """One allowed step towards `aim`: of all settings at once or of some, whichever is predicted to be best.

    On the way to good settings some steps are bad ones, such as a smaller budget before a smaller number of sequences.
    """
    percent = spec.batching.max_step_percent
    if percent is None:
        return aim
    full = step_towards(aim, present, percent=percent, envelope=spec.envelope())
    if full == aim:
        return full
    moved = [name for name in SETTING_NAMES if getattr(full, name) != getattr(present, name)]
    parts = {
        within(replace(present, **{name: getattr(full, name) for name in names}), spec.envelope())
        for count in range(1, len(moved) + 1)
        for names in combinations(moved, count)
    }
    ordered = sorted(parts - {present}, key=lambda settings: tuple(settings.as_dict().values()))
    return max([full, *ordered], key=lambda settings: score_of(scene, settings))


def signature_of(scene: Scenario, envelope: Envelope) -> tuple[float, ...]:
    """What the best settings depend on, in few figures: a search is spared while they stay."""
    step = scene.step
    parts = (
        step.base_seconds,
        step.token_seconds,
        step.kv_token_seconds,
        scene.targets.ttft_seconds or 0.0,
        scene.targets.idle_factor,
        scene.targets.itl_seconds or 0.0,
        scene.targets.queue_seconds or 0.0,
        *(end for name in SETTING_NAMES for end in envelope.bounds(name)),
    )
    return (*moments_of(scene), *(significant(part) for part in parts))


def moments_of(scene: Scenario) -> tuple[float, ...]:
    """The mix in few figures."""
    parts = (
        scene.prefill_tokens,
        math.sqrt(scene.prefill_square_tokens),
        scene.decode_steps,
        math.sqrt(scene.decode_square_steps),
        scene.context,
    )
    return tuple(significant(part) for part in parts)


def is_near(old: Sequence[float], new: Sequence[float], *, tolerance: float) -> bool:
    """Whether all figures agree within a share of themselves."""
    return len(old) == len(new) and all(
        abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in zip(old, new, strict=True)
    )


def significant(value: float) -> float:
    """Three digits: what is stored must not change for noise in the last ones."""
    return float(f"{value:.3g}")
