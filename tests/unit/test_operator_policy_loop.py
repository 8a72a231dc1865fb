"""`decide` in a closed loop with a small fleet in virtual time: what becomes of replicas and settings over minutes."""

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from tidegate_engine.settings import ISL_EDGES, OSL_EDGES, BatchSettings, lower_edge
from tidegate_engine.steptime import StepModel, StepShape
from tidegate_operator.api import Spec, parse_spec
from tidegate_operator.observation import (
    Decision,
    Demand,
    EngineInfo,
    MetricsState,
    Observation,
    Replica,
    ReplicaPhase,
)
from tidegate_operator.policy import decide

STEP = StepModel(
    base_seconds=0.03,
    threshold_tokens=64,
    token_seconds=1e-4,
    kv_token_seconds=2e-7,
    sequence_seconds=5e-5,
    attention_seconds=1e-9,
    mixed_kv_token_seconds=5e-8,
)
ENGINE = EngineInfo(
    kv_blocks=6000,
    block_tokens=16,
    max_model_len=8192,
    kv_token_bytes=131072,
    weight_bytes=1,
    gpu_product=None,
    gpu_count=1,
    version="test",
    step_model=STEP,
    step_model_residual_ratio=0.01,
    step_model_samples=1000,
)
WINDOW = 60
START_SECONDS = 20.0
START = 1_000_000.0
Lengths = tuple[int, int]
SHORT_IN_LONG_OUT: Lengths = (120, 400)
LONG_IN_SHORT_OUT: Lengths = (2500, 40)


@dataclass
class Job:
    isl: int
    osl: int
    arrived: float
    prefilled: float = 0.0
    generated: float = 0.0


@dataclass
class Engine:
    """One replica, in steps of a tenth of a second: all of its running requests advance at the model's pace."""

    created: float
    settings: BatchSettings
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)

    def advance(self, now: float, tick: float) -> tuple[list[tuple[float, float]], list[Job], float]:
        """Returns (time, TTFT) of first tokens, finished jobs and the step time."""
        while self.waiting and len(self.running) < self.settings.max_num_seqs:
            self.running.append(self.waiting.pop(0))
        reading = [job for job in self.running if job.prefilled < job.isl]
        decoding = [job for job in self.running if job.prefilled >= job.isl]
        chunk = self.settings.long_prefill_token_threshold
        budget = max(0, self.settings.max_num_batched_tokens - len(decoding))
        want = sum(min(chunk, job.isl - job.prefilled) for job in reading)
        share = min(1.0, budget / want) if want else 0.0
        context = sum(job.isl + job.generated for job in decoding)
        shape = StepShape(
            tokens=len(decoding) + want * share,
            decode_kv_tokens=context,
            sequences=len(self.running),
            prefill_attention=sum(min(chunk, job.isl) * share * job.isl / 2 for job in reading),
            has_prefill=bool(reading),
        )
        step = STEP.seconds(shape)
        first, done = [], []
        for job in reading:
            # A prompt that ends within the tick leaves the rest of it to others; a tick is one or a few steps long.
            job.prefilled += min(chunk, job.isl - job.prefilled) * share * tick / step
            if job.prefilled >= job.isl - 1:
                job.prefilled = job.isl
                first.append((now, now + tick - job.arrived))
        for job in decoding:
            job.generated += tick / step
            if job.generated >= job.osl:
                done.append(job)
        self.running = [job for job in self.running if job.generated < job.osl]
        return first, done, step


@dataclass
class Fleet:
    spec: Spec
    rate: Callable[[float], float]
    lengths: Callable[[float], Lengths]
    noise: float = 0.0
    metrics: Callable[[float], bool] = lambda now: True
    schedulable: int = 100
    down_every: float = math.inf
    """Seconds between restarts of the operator; it is away for ten of them."""
    now: float = START
    engines: list[Engine] = field(default_factory=list)
    replicas: int = 0
    memory: Mapping[str, object] = field(default_factory=dict)
    generation: int = 1
    decisions: list[tuple[float, Decision, int]] = field(default_factory=list)
    arrived: list[tuple[float, int]] = field(default_factory=list)
    finished: list[tuple[float, int, int]] = field(default_factory=list)
    first: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    owed: float = 0.0
    turn: int = 0

    def run(self, seconds: float, *, tick: float = 0.1) -> None:
        dice, end = random.Random(1), self.now + seconds
        next_decision = self.now
        factor = 1.0
        while self.now < end:
            elapsed = self.now - START
            if self.now >= next_decision:
                factor = 1 + self.noise * (2 * dice.random() - 1)
                away = elapsed % self.down_every > self.down_every - 10
                next_decision = self.now + (1 if away else self.decide_once())
            self.owed += self.rate(elapsed) * factor * tick
            ready = [engine for engine in self.engines if self.is_ready(engine)]
            while self.owed >= 1 and ready:
                self.owed -= 1
                isl, osl = self.lengths(elapsed)
                self.turn += 1
                ready[self.turn % len(ready)].waiting.append(Job(isl, osl, self.now))
                self.arrived.append((self.now, isl))
            for engine in ready:
                first, done, step = engine.advance(self.now, tick)
                self.first += first
                self.finished += [(self.now, job.isl, job.osl) for job in done]
                if engine.running:
                    self.steps.append((self.now, step))
            self.now += tick

    def is_ready(self, engine: Engine) -> bool:
        return self.now >= engine.created + START_SECONDS and self.engines.index(engine) < self.schedulable

    def decide_once(self) -> float:
        before = self.replicas
        decision = decide(self.spec, self.observe(), json.loads(json.dumps(dict(self.memory))))
        self.memory, self.replicas = decision.memory, decision.replicas
        self.generation = decision.settings_generation
        while len(self.engines) < self.replicas:
            self.engines.append(Engine(self.now, decision.settings))
        for gone in self.engines[self.replicas :]:
            self.engines[0].waiting += gone.waiting + gone.running
        del self.engines[self.replicas :]
        for engine in self.engines:
            engine.settings = decision.settings
        self.decisions.append((self.now, decision, before))
        return decision.recheck_after_seconds

    def observe(self) -> Observation:
        return Observation(
            now=self.now,
            current_replicas=self.replicas,
            replicas=tuple(
                Replica(
                    name=f"pod-{index}",
                    uid=str(index),
                    ip="10.0.0.1",
                    phase=self.phase(engine, index),
                    created_at=engine.created,
                    ready_at=engine.created + START_SECONDS if self.is_ready(engine) else None,
                    settings_generation=self.generation if self.is_ready(engine) else None,
                    settings=engine.settings if self.is_ready(engine) else None,
                )
                for index, engine in enumerate(self.engines)
            ),
            demand=self.demand() if self.metrics(self.now) else None,
            metrics_state=MetricsState.FRESH if self.metrics(self.now) else MetricsState.ABSENT,
            engine=ENGINE if any(map(self.is_ready, self.engines)) else None,
            start_seconds=START_SECONDS,
        )

    def phase(self, engine: Engine, index: int) -> ReplicaPhase:
        if index >= self.schedulable:
            return ReplicaPhase.UNSCHEDULABLE
        return ReplicaPhase.READY if self.is_ready(engine) else ReplicaPhase.LOADING

    def demand(self) -> Demand:
        since = self.now - WINDOW
        self.arrived = [item for item in self.arrived if item[0] > since]
        self.finished = [item for item in self.finished if item[0] > since]
        self.first = [item for item in self.first if item[0] > since]
        self.steps = [item for item in self.steps if item[0] > since]
        arrivals: dict[int, float] = {}
        for _, isl in self.arrived:
            edge = lower_edge(isl, ISL_EDGES)
            arrivals[edge] = arrivals.get(edge, 0) + 1 / WINDOW
        finished: dict[tuple[int, int], float] = {}
        for _, isl, osl in self.finished:
            cell = lower_edge(isl, ISL_EDGES), lower_edge(osl, OSL_EDGES)
            finished[cell] = finished.get(cell, 0) + 1 / WINDOW
        ready = [engine for engine in self.engines if self.is_ready(engine)]
        running = [job for engine in ready for job in engine.running]
        waiting = [job for engine in ready for job in engine.waiting]
        held = sum(job.prefilled + job.generated for job in running)
        return Demand(
            window_seconds=WINDOW,
            sampled_at=self.now,
            arrivals_per_second=arrivals,
            finished_per_second=finished,
            running=len(running),
            waiting=len(waiting),
            waiting_prompt_tokens=sum(job.isl for job in waiting),
            running_context_tokens=held,
            running_past_output_edge={edge: sum(job.generated >= edge for job in running) for edge in OSL_EDGES},
            ttft_p95_seconds=percentile([ttft for _, ttft in self.first]),
            itl_p95_seconds=percentile([step for _, step in self.steps]),
            queue_p95_seconds=None,
            prompt_tokens_per_second=sum(isl for _, isl in self.arrived) / WINDOW,
            cached_prompt_tokens_per_second=0.0,
            generation_tokens_per_second=sum(osl for _, _, osl in self.finished) / WINDOW,
            kv_used_ratio=held / max(1, len(ready)) / (ENGINE.kv_blocks * ENGINE.block_tokens),
            preemptions_per_second=0.0,
            pods_covered=len(ready),
        )

    def scalings(self, *, after: float = 0.0) -> list[tuple[float, int, int, str]]:
        return [
            (at - 1_000_000.0, before, decision.replicas, decision.reason)
            for at, decision, before in self.decisions
            if at >= 1_000_000.0 + after and decision.replicas != before
        ]

    def retunings(self, *, after: float = 0.0) -> list[tuple[float, BatchSettings, str]]:
        found = []
        for (_, last, _), (at, decision, _) in zip(self.decisions, self.decisions[1:], strict=False):
            if decision.settings_generation != last.settings_generation and at >= 1_000_000.0 + after:
                found.append((at - 1_000_000.0, decision.settings, decision.message))
        return found


def percentile(values: list[float]) -> float | None:
    return sorted(values)[int(0.95 * (len(values) - 1))] if values else None


def spec_with(**autoscaling: object) -> Spec:
    return parse_spec(
        {
            "model": {"uri": "file:///models/m.gguf"},
            "objectives": {"ttft": {"milliseconds": 1500}, "interTokenLatency": {"milliseconds": 120}},
            "batching": {"minIntervalSeconds": 10, "verificationSeconds": 20},
            "autoscaling": {
                "minReplicas": 1,
                "maxReplicas": 12,
                "syncPeriodSeconds": 5,
                "behavior": {
                    "scaleDown": {
                        "stabilizationWindowSeconds": 60,
                        "policies": [{"type": "Percent", "value": 50, "periodSeconds": 15}],
                    }
                },
                **autoscaling,
            },
        }
    )


def steady(rate: float) -> Callable[[float], float]:
    return lambda now: rate


def only(lengths: Lengths) -> Callable[[float], Lengths]:
    return lambda now: lengths


def test_a_flip_of_the_mix_at_a_constant_rate_changes_settings_and_replicas() -> None:
    fleet = Fleet(spec_with(), steady(3.0), lambda now: SHORT_IN_LONG_OUT if now < 300 else LONG_IN_SHORT_OUT)
    fleet.run(300)
    before = fleet.decisions[-1][1]
    fleet.run(300)
    after = fleet.decisions[-1][1]
    assert [share.name for share in before.mix] == ["ShortInLongOut"]
    assert [share.name for share in after.mix] == ["LongInShortOut"]
    assert after.replicas > before.replicas
    assert after.settings.max_num_seqs < before.settings.max_num_seqs
    assert any(at < 400 for at, _, _ in fleet.retunings(after=300)), "the settings follow within seconds, not minutes"
    late = [ttft for at, ttft in fleet.first if at > fleet.now - 60]
    assert (percentile(late) or math.inf) < 1.5, "and the target is met again"


def test_a_flip_of_the_mix_is_one_change_of_the_settings() -> None:
    """Two on the way back, where the settings of the old mix cannot carry the new one for as long as a window."""
    fleet = Fleet(spec_with(), steady(3.0), lambda now: LONG_IN_SHORT_OUT if 300 <= now < 600 else SHORT_IN_LONG_OUT)
    fleet.run(900, tick=0.25)
    flips = [[at for at, _, _ in fleet.retunings() if start <= at < start + 300] for start in (0, 300, 600)]
    assert [len(changes) for changes in flips[:2]] == [1, 1]
    assert 1 <= len(flips[2]) <= 2
    late = [ttft for at, ttft in fleet.first if at > fleet.now - 60]
    assert (percentile(late) or math.inf) < 1.5


def test_no_latency_of_a_steady_state_is_promised_while_a_backlog_drains() -> None:
    spec = parse_spec(
        spec_with(maxReplicas=1).model_dump(mode="json", by_alias=True, exclude_none=True)
        | {"batching": {"maxSequences": {"initial": 4}, "minIntervalSeconds": 10, "verificationSeconds": 20}}
    )
    fleet = Fleet(spec, steady(1.5), only(SHORT_IN_LONG_OUT))
    fleet.run(240, tick=0.25)
    first = next(message for _, _, message in fleet.retunings())
    assert "late requests a replica drain in" in first and "TTFT" not in first
    assert not any(decision.settings_reason == "SettingsRolledBack" for _, decision, _ in fleet.decisions)
    late = [ttft for at, ttft in fleet.first if at > fleet.now - 30]
    assert (percentile(late) or math.inf) < 1.5, "and it is gone afterwards"


@pytest.mark.parametrize("lengths", [SHORT_IN_LONG_OUT, LONG_IN_SHORT_OUT], ids=["decode", "prefill"])
def test_constant_load_with_noise_is_no_event_for_an_hour(lengths: Lengths) -> None:
    fleet = Fleet(spec_with(syncPeriodSeconds=15), steady(2.0), only(lengths), noise=0.05)
    fleet.run(3600 + 300, tick=0.5)
    assert fleet.scalings(after=300) == []
    assert fleet.retunings(after=300) == []


def test_at_rest_the_memory_is_not_written() -> None:
    fleet = Fleet(spec_with(), steady(2.0), only(SHORT_IN_LONG_OUT))
    fleet.run(600, tick=0.25)
    settled = [decision.memory for at, decision, _ in fleet.decisions if at > 1_000_000 + 400]
    assert all(memory == settled[0] for memory in settled)


def test_a_metrics_outage_at_the_peak_takes_nothing_away() -> None:
    fleet = Fleet(
        spec_with(),
        lambda now: 8.0 if now < 400 else 0.5,
        only(SHORT_IN_LONG_OUT),
        metrics=lambda now: not 1_000_300 <= now <= 1_000_900,
    )
    fleet.run(890, tick=0.25)
    peak = fleet.decisions[59][1].replicas
    blind = [decision for at, decision, _ in fleet.decisions if 1_000_300 <= at <= 1_000_880]
    assert {decision.replicas for decision in blind} == {blind[0].replicas} and blind[0].replicas >= peak
    assert {decision.reason for decision in blind} == {"MetricsMissing"}


def test_quiet_brings_the_minimum_back_after_the_window_and_not_before() -> None:
    fleet = Fleet(spec_with(), lambda now: 14.0 if now < 300 else 0.2, only(SHORT_IN_LONG_OUT))
    fleet.run(300, tick=0.25)
    peak = fleet.replicas
    fleet.run(300, tick=0.25)
    assert peak > 1
    assert fleet.replicas == 1
    low = next(at for at, _, after, _ in fleet.scalings(after=300) if after <= peak // 2)
    assert low >= 300 + 60


def test_a_burst_is_answered_within_seconds() -> None:
    fleet = Fleet(spec_with(), lambda now: 1.0 if now < 200 else 16.0, only(SHORT_IN_LONG_OUT))
    fleet.run(240, tick=0.25)
    ups = [at for at, before, after, _ in fleet.scalings(after=200) if after > before]
    assert ups and min(ups) <= 220


def test_a_restart_every_half_minute_changes_nothing_at_steady_load() -> None:
    """Every decision of the fleet starts from memory that went through JSON; here time also passes without any."""
    fleet = Fleet(spec_with(), steady(6.0), only(SHORT_IN_LONG_OUT))
    fleet.run(400, tick=0.25)
    fleet.down_every = 30.0
    fleet.run(600, tick=0.25)
    assert fleet.scalings(after=400) == []
    assert fleet.retunings(after=400) == []


def test_a_pod_without_a_node_blocks_neither_the_settings_nor_the_way_down() -> None:
    fleet = Fleet(
        spec_with(),
        lambda now: 10.0 if now < 400 else 0.5,
        only(SHORT_IN_LONG_OUT),
        schedulable=1,
    )
    fleet.run(200, tick=0.25)
    assert fleet.replicas <= 3, "no more is asked for once a pod finds no node"
    fleet.run(200, tick=0.25)
    assert fleet.replicas == 2, "one serves, one waits for a node, the rest is withdrawn"
    assert len(fleet.retunings()) > 0, "meanwhile the settings make the best of what is there"
    fleet.run(600, tick=0.25)
    assert fleet.replicas == 1
