"""A day whose pattern drifts at a constant rate, served by two kinds of GPU of which now one, now the other is cheaper.

Data, the seeded workload and its runs; kept by `evaluation`, shown by `evaluation_report`. The A40 has much memory
bandwidth for its price, which long answers need; the L40S computes much, which long prompts need. Both profiles are the
roofline's, as in `tidegate plan`; prices are the GPU table's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tidegate_engine.settings import DEFAULT_SETTINGS
from tidegate_engine.steptime import Profile, load_profile
from tidegate_operator.api import Spec, parse_spec
from tidegate_operator.gpus import find_gpu
from tidegate_operator.model_shapes import known_shape
from tidegate_operator.plan import BLOCK_TOKENS, held, memory_of
from tidegate_operator.prior import step_prior, work_of
from tidegate_sim import synthetic
from tidegate_sim.arrivals import Arrival
from tidegate_sim.controller import Controller
from tidegate_sim.operator_controller import Accelerator, KindsController, OperatorController
from tidegate_sim.replica import engine_info
from tidegate_sim.results import Result
from tidegate_sim.simulation import simulate
from tidegate_sim.specification import LOOSE, FleetSpec, PodKind, start_times
from tidegate_sim.synthetic import Kind, Tail

MODEL, PRECISION, LONGEST_TOKENS = "Llama-3.1-8B", "bf16", 16_384
GPUS = ("A40", "L40S")
INITIAL_REPLICAS: Mapping[str, int] = {"A40": 4, "L40S": 0}
MOST_REPLICAS = 40
GOALS = LOOSE
START_SECONDS = 60.0
REQUESTS_PER_SECOND = 2.5
PHASE_SECONDS = 1500.0
DRIFT_SECONDS = 500.0
"""In which one pattern gives way to the next."""
MORNING = Kind("short in, long out", Tail(300, 0.5, 1200), Tail(1000, 0.4, 3000))
NOON = Kind("long in, short out", Tail(5000, 0.3, 9000), Tail(100, 0.5, 400))
NIGHT = Kind("long in, long out", Tail(2000, 0.3, 5000), Tail(1200, 0.4, 3600))
DAY = (MORNING, NOON, NIGHT)
BOTH = "both kinds"


def day(at: float) -> Mapping[Kind, float]:
    """Shares of the patterns: one after the other, each giving way within a while."""
    turn = min(int(at / PHASE_SECONDS), len(DAY) - 1)
    if turn + 1 == len(DAY):
        return {DAY[turn]: 1.0}
    done = max(0.0, 1 - ((turn + 1) * PHASE_SECONDS - at) / DRIFT_SECONDS)
    return {DAY[turn]: 1 - done, DAY[turn + 1]: done}


def workload(seed: int, *, seconds: float = len(DAY) * PHASE_SECONDS) -> Sequence[Arrival]:
    rate = synthetic.steady(REQUESTS_PER_SECOND)
    return list(synthetic.made_up(rate, day, duration_seconds=seconds, seed=seed))


def phases(seconds: float) -> list[tuple[Kind, float, float]]:
    """Each pattern, from when it is most of the traffic until when, in a day of so many seconds."""
    turns = [max(0.0, turn * PHASE_SECONDS - DRIFT_SECONDS / 2) for turn in range(len(DAY))] + [seconds]
    return list(zip(DAY, turns[:-1], turns[1:], strict=True))


def profile_of(name: str) -> Profile:
    """One GPU that serves the model, by its data sheet."""
    gpu, shape, kinds = find_gpu(name), known_shape(MODEL), held(PRECISION)
    assert gpu is not None and shape is not None
    return replace(
        load_profile("l4-llama-3.1-8b"),
        name=f"{name}-{MODEL}-{PRECISION}".lower(),
        gpu=name,
        step=step_prior(work_of(shape, precision=kinds.weights, kv_precision=kinds.kv), gpu),
        weight_dtype="bfloat16",
        weight_bytes=shape.weight_bytes(kinds.weights),
        kv_blocks=int(memory_of(shape, gpu, kinds=kinds).kv_tokens // BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        max_model_len=LONGEST_TOKENS,
    )


def price_of(name: str) -> float:
    gpu = find_gpu(name)
    assert gpu is not None and gpu.price_per_hour is not None
    return gpu.price_per_hour


def object_of_the_day() -> Spec:
    return parse_spec(
        {
            "model": {"uri": "file:///models/none"},
            "objectives": {
                "ttft": {"milliseconds": round(GOALS.ttft_seconds * 1000)},
                "interTokenLatency": {"milliseconds": round(GOALS.itl_seconds * 1000)},
            },
            "autoscaling": {"mode": "Auto", "minReplicas": 1, "maxReplicas": MOST_REPLICAS},
        }
    )


def fleet_of(names: Sequence[str]) -> FleetSpec:
    """Of these kinds of GPU; one alone begins with enough replicas for the morning."""
    kinds = [
        PodKind(
            name,
            profile_of(name),
            INITIAL_REPLICAS[name] if len(names) > 1 else max(INITIAL_REPLICAS.values()),
            DEFAULT_SETTINGS,
            start_times(START_SECONDS),
            price_of(name),
        )
        for name in names
    ]
    first = kinds[0]
    return FleetSpec(
        first.profile,
        initial_replicas=first.initial_replicas,
        settings=first.settings,
        start=first.start,
        gpu_price_per_hour=first.gpu_price_per_hour,
        other_kinds=tuple(kinds[1:]),
    )


def controller_of(names: Sequence[str]) -> Controller:
    spec = object_of_the_day()
    if len(names) == 1:
        return OperatorController(spec, engine_info(profile_of(names[0])))
    return KindsController(spec, {name: Accelerator(engine_info(profile_of(name)), price_of(name)) for name in names})


def run(names: Sequence[str], *, seed: int, seconds: float = len(DAY) * PHASE_SECONDS) -> Result:
    return simulate(workload(seed, seconds=seconds), fleet_of(names), controller_of(names), seed=seed, goals=GOALS)
