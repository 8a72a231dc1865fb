"""Every number can be worked out again from the status alone, by the program in the documentation."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.steptime import load_profile
from tidegate_operator import formula, status
from tidegate_operator.api import Spec, Target, parse_spec
from tidegate_operator.observation import Demand, EngineInfo, MetricsState, Observation, Replica, ReplicaPhase
from tidegate_operator.policy import decide
from tidegate_operator.zero import ScaleToZero

NOW = 1_700_000_000.0
ENGINE = EngineInfo(
    kv_blocks=22_000,
    block_tokens=16,
    max_model_len=32768,
    kv_token_bytes=131072,
    weight_bytes=1,
    gpu_product=None,
    gpu_count=1,
    version="test",
    step_model=load_profile("h100-llama-3.1-8b").step,
    step_model_residual_ratio=0.01,
    step_model_samples=1000,
)
DOCUMENT = Path(__file__).parents[2] / "docs/decisions-of-the-operator.md"
EXAMPLES = 1500 if os.environ.get("TIDEGATE_PROVE") else 100


def documented() -> dict[str, Callable[[Mapping[str, float]], float | None]]:
    """What the documentation's program defines."""
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


PROGRAM = documented()

PHASES = (ReplicaPhase.READY, ReplicaPhase.LOADING, ReplicaPhase.CRASH_LOOPING, ReplicaPhase.UNSCHEDULABLE)
policies = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["Pods", "Percent"]), "value": st.integers(1, 200), "periodSeconds": st.just(60)}
    ),
    min_size=1,
    max_size=2,
)
directions = st.fixed_dictionaries(
    {},
    optional={
        "stabilizationWindowSeconds": st.sampled_from([0, 30, 300]),
        "tolerancePercent": st.sampled_from([0, 7, 10, 100]),
        "selectPolicy": st.sampled_from(["Max", "Min", "Disabled"]),
        "policies": policies,
    },
)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    low = draw(st.integers(1, 4))
    autoscaling: dict[str, Any] = {
        "mode": draw(st.sampled_from(["Auto", "Auto", "Auto", "Observe", "Off"])),
        "minReplicas": low,
        "maxReplicas": draw(st.integers(low, 12)),
        "headroomPercent": draw(st.sampled_from([0, 15, 33])),
        "paused": draw(st.sampled_from([False, False, False, True])),
        "behavior": {"scaleUp": draw(directions), "scaleDown": draw(directions)},
    }
    if draw(st.booleans()):
        autoscaling["maxGPUs"] = draw(st.integers(low, 12))
    if draw(st.booleans()):
        day = {"startTime": "00:00", "endTime": draw(st.sampled_from(["00:00", "23:00"]))}
        autoscaling["schedules"] = [{"name": "day", "minReplicas": draw(st.integers(1, 6)), **day}]
    return parse_spec(
        {
            "model": {"uri": "file:///m"},
            "objectives": {"ttft": {"milliseconds": 1000}, "interTokenLatency": {"milliseconds": 50}},
            "autoscaling": autoscaling,
            "batching": {"mode": draw(st.sampled_from(["Auto", "Fixed"])), "verificationSeconds": 60},
            "metrics": {"onMissing": {"policy": "Fallback", "holdSeconds": 60, "fallbackReplicas": 3}},
        }
    )


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    phases = draw(st.lists(st.sampled_from(PHASES), max_size=8))
    replicas = tuple(
        Replica(
            name=f"pod-{index}",
            uid=str(index),
            ip="10.0.0.1",
            phase=phase,
            created_at=NOW - draw(st.sampled_from([20.0, 400.0, 5000.0])),
            ready_at=NOW - 10 if phase == ReplicaPhase.READY else None,
        )
        for index, phase in enumerate(phases)
    )
    ready = phases.count(ReplicaPhase.READY)
    cell = (draw(st.sampled_from([64, 1024, 4096])), draw(st.sampled_from([16, 256, 1024])))
    rate = draw(st.sampled_from([0.0, 0.5]) | st.floats(0, 80))
    demand = Demand(
        window_seconds=60,
        sampled_at=NOW,
        arrivals_per_second={cell[0]: rate} if rate else {},
        finished_per_second={cell: rate} if rate else {},
        running=draw(st.sampled_from([0.0, 3.0, 300.0])),
        waiting=draw(st.sampled_from([0.0, 0.0, 7.0, 900.0])),
        waiting_prompt_tokens=0,
        running_context_tokens=draw(st.sampled_from([0.0, 5e5])),
        running_past_output_edge={},
        ttft_p95_seconds=draw(st.sampled_from([None, 0.1, 4.0])),
        itl_p95_seconds=draw(st.sampled_from([None, 0.02, 0.2])),
        queue_p95_seconds=None,
        prompt_tokens_per_second=None,
        cached_prompt_tokens_per_second=None,
        generation_tokens_per_second=None,
        kv_used_ratio=draw(st.sampled_from([None, 0.1, 0.95])),
        preemptions_per_second=0,
        pods_covered=draw(st.integers(min(1, ready), ready)),
    )
    state = draw(st.sampled_from([MetricsState.FRESH, MetricsState.FRESH, MetricsState.FRESH, MetricsState.STALE]))
    return Observation(
        now=NOW,
        current_replicas=draw(st.sampled_from([len(phases), len(phases), 0])),
        replicas=replicas,
        demand=demand if draw(st.integers(0, 5)) else None,
        metrics_state=state,
        engine=ENGINE if draw(st.integers(0, 3)) else replace(ENGINE, step_model=None),
        start_seconds=draw(st.sampled_from([None, 20.0, 300.0])),
        spec_replicas=draw(st.sampled_from([None, 3])),
        held_requests=draw(st.sampled_from([None, 0.0, 5.0])),
        granted_gpus=draw(st.sampled_from([None, None, 5])),
    )


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    specs(),
    st.lists(st.tuples(observations(), st.sampled_from([15.0, 90.0, 700.0])), min_size=1, max_size=4),
    st.sampled_from([None, None, ScaleToZero(60)]),
)
def test_wanted_and_decided_follow_from_the_status_alone(
    spec: Spec, looks: list[tuple[Observation, float]], zero: ScaleToZero | None
) -> None:
    memory: Mapping[str, object] = {}
    now, told = NOW, {}
    target = Target(name="tide", namespace="demo", uid="u", generation=1, spec=spec)
    for observation, delay in looks:
        now += delay
        decision = decide(spec, replace(observation, now=now), memory, zero=zero)
        memory = decision.memory
        told = status.build(target, replace(observation, now=now), decision, {}, now=now)
        shown = told["autoscaling"]["lastDecision"]
        assert len(decision.inputs) <= 64, "more would be cut off in the status"
        assert PROGRAM["wanted"](shown["inputs"]) == shown.get("wanted")
        assert PROGRAM["bounded"](shown["inputs"]) == shown["replicas"]
        needs = formula.needs(shown["inputs"])
        assert formula.bounded(shown["inputs"], shown.get("wanted")) == shown["replicas"]
        assert (None if needs is None else needs.wanted(int(shown["inputs"]["currentReplicas"]))) == shown.get("wanted")


@pytest.mark.parametrize("name", ["wanted", "bounded"])
def test_every_figure_that_the_program_reads_is_explained(name: str) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    program = text[text.index("```python") :]
    tables = text[: text.index("```python")]
    for figure in set(re.findall(r'"([a-z][A-Za-z]+)"', program)):
        assert f"`{figure}`" in tables, figure
    assert f"def {name}(" in program


@given(alone=st.floats(0.01, 100.0), gain=st.floats(1.0, 5.0), replicas=st.floats(0.0, 500.0), more=st.floats(1.0, 3.0))
def test_what_replicas_carry_together_is_the_inverse_of_how_many_are_needed(
    alone: float, gain: float, replicas: float, more: float
) -> None:
    rate = formula.carried(alone, alone * gain, replicas)
    assert formula.replicas_for(rate, alone, alone * gain) == pytest.approx(replicas)
    assert formula.carried(alone, alone * gain, replicas * more) >= rate
    assert replicas * alone * (1 - 1e-9) <= rate <= replicas * alone * gain * (1 + 1e-9)
