"""Who takes part in the evaluation: Tidegate, without and with its live settings, and every baseline, each with a knob.

A contender is made for a plant and a workload. All have the same bounds, goals, and first batch settings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate_engine.settings import BatchSettings
from tidegate_engine.steptime import Profile
from tidegate_operator.api import Spec, parse_spec
from tidegate_sim.arrivals import Arrival
from tidegate_sim.baselines import table
from tidegate_sim.baselines.plant import Plant
from tidegate_sim.baselines.schedule import Static
from tidegate_sim.controller import Controller
from tidegate_sim.operator_controller import OperatorController
from tidegate_sim.replica import engine_info


@dataclass(frozen=True, slots=True)
class Setup:
    """What a contender is made for."""

    profile: Profile
    plant: Plant
    arrivals: Sequence[Arrival]


@dataclass(frozen=True, slots=True)
class Contender:
    """`make(setup, knob)`; `own` ones depend on the operator's code, others on the baselines'."""

    make: Callable[[Setup, float], Controller]
    knob: str
    default: float
    grid: tuple[float, ...]
    about: str
    own: bool = False


FIXED_CHOICES = (
    BatchSettings(64, 4096, 1024),
    BatchSettings(32, 512, 256),
    BatchSettings(24, 2048, 512),
    BatchSettings(16, 4096, 512),
    BatchSettings(12, 4096, 256),
    BatchSettings(8, 4096, 1024),
    BatchSettings(128, 8192, 2048),
)
"""Batch settings that never move, of which a tuning run finds the best."""


def object_of(setup: Setup, *, headroom_percent: int, tunes: bool) -> Spec:
    """The LLMDeployment that a user would write for this plant."""
    plant, settings = setup.plant, setup.plant.settings
    batching: dict[str, Any] = {
        "mode": "Auto" if tunes else "Fixed",
        "maxSequences": {"initial": settings.max_num_seqs},
        "maxBatchedTokens": {"initial": settings.max_num_batched_tokens},
        "prefillChunkTokens": {"initial": settings.long_prefill_token_threshold},
    }
    return parse_spec(
        {
            "model": {"uri": "file:///models/none"},
            "objectives": {
                "ttft": {"milliseconds": round(plant.ttft_seconds * 1000)},
                "interTokenLatency": {"milliseconds": round(plant.itl_seconds * 1000)},
            },
            "batching": batching,
            "autoscaling": {
                "mode": "Auto",
                "minReplicas": plant.lowest_replicas,
                "maxReplicas": plant.highest_replicas,
                "headroomPercent": headroom_percent,
            },
        }
    )


def _tidegate(name: str, *, tunes: bool) -> Contender:
    def make(setup: Setup, knob: float) -> Controller:
        spec = object_of(setup, headroom_percent=round(knob), tunes=tunes)
        return OperatorController(spec, engine_info(setup.profile), name=name)

    about = "Tidegate" if tunes else "Tidegate with fixed batch settings"
    return Contender(make, "headroom in percent", 15, (0, 15, 30, 45), about, own=True)


def _with_settings(setup: Setup, knob: float) -> Controller:
    settings = FIXED_CHOICES[round(knob)]
    return Static(setup.plant.lowest_replicas, settings=settings, name="static-settings")


def _baseline(name: str, baseline: table.Baseline) -> Contender:
    def make(setup: Setup, knob: float) -> Controller:
        return table.make(name, setup.plant, knob=knob, arrivals=setup.arrivals)

    return Contender(make, baseline.knob, baseline.default, baseline.grid, baseline.about)


def contenders() -> dict[str, Contender]:
    """By name, in the order of the tables. The clairvoyant is the oracle, and no contender."""
    choices = tuple(float(number) for number in range(len(FIXED_CHOICES)))
    return {
        "tidegate": _tidegate("tidegate", tunes=True),
        "tidegate-fixed": _tidegate("tidegate-fixed", tunes=False),
        **{name: _baseline(name, item) for name, item in table.BASELINES.items() if name != "clairvoyant"},
        "static-settings": Contender(
            _with_settings, "choice of settings", 0, choices, "the best settings that never move"
        ),
    }
