"""Two deployments and too few GPUs: shares by importance against first come, first served.

Data, the seeded workloads and their runs; kept by `evaluation`, shown by `evaluation_report`. What the archive asks for
comes first and is nearly all there is; then the assistant, which has fewer requests, needs more than is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate_engine.steptime import load_profile
from tidegate_operator.api import Spec, parse_spec
from tidegate_sim import synthetic
from tidegate_sim.arrivals import Arrival
from tidegate_sim.operator_controller import Budget, OperatorController
from tidegate_sim.replica import engine_info
from tidegate_sim.results import Result
from tidegate_sim.scenarios import CLIENT_TIMEOUT_SECONDS, GOALS, PROFILE, fits
from tidegate_sim.simulation import Deployment, simulate_together
from tidegate_sim.specification import FleetSpec, GatewaySpec, start_times

GPUS = 10
MINIMUM = 2
SECONDS = 1800.0
SHORTAGE = (600.0, 1500.0)
"""While both want more than there is together."""
START_SECONDS = 60.0


ARCHIVE_RISES_AT = 180.0


@dataclass(frozen=True, slots=True)
class Rival:
    """One of the deployments."""

    name: str
    rate: synthetic.Rate
    initial_replicas: int


RIVALS = (
    Rival("assistant", synthetic.steps([(0.0, 0.8), (SHORTAGE[0], 2.5), (SHORTAGE[1], 0.8)]), 2),
    Rival("archive", synthetic.steps([(0.0, 2.0), (ARCHIVE_RISES_AT, 5.5), (SHORTAGE[1], 2.0)]), 5),
)


@dataclass(frozen=True, slots=True)
class Contest:
    """Who wants what, and how much there is."""

    rivals: tuple[Rival, Rival] = RIVALS
    gpus: int = GPUS
    seconds: float = SECONDS

    def workload(self, number: int, seed: int) -> Sequence[Arrival]:
        """Of the rival of this number."""
        rate, shares = self.rivals[number].rate, synthetic.only(synthetic.TAILED_CHAT)
        made = synthetic.made_up(rate, shares, duration_seconds=self.seconds, seed=2 * seed + number)
        return [arrival for arrival in made if fits(arrival)]


@dataclass(frozen=True, slots=True)
class Rule:
    """How GPUs are shared out: by importance, or to whoever asks first."""

    name: str
    importance: tuple[int, int] | None
    """Of the rivals, in their order; None = no budget."""


RULES = (
    Rule("first come", None),
    Rule("shares, equal importance", (50, 50)),
    Rule("shares, the assistant more important", (80, 20)),
    Rule("shares, the archive more important", (20, 80)),
)


def object_of(importance: int, *, most_replicas: int) -> Spec:
    return parse_spec(
        {
            "model": {"uri": "file:///models/none"},
            "resources": {"gpu": {"count": 1}},
            "objectives": {
                "ttft": {"milliseconds": round(GOALS.ttft_seconds * 1000)},
                "interTokenLatency": {"milliseconds": round(GOALS.itl_seconds * 1000)},
            },
            "autoscaling": {
                "mode": "Auto",
                "minReplicas": MINIMUM,
                "maxReplicas": most_replicas,
                "importance": importance,
            },
        }
    )


def run(rule: Rule, *, seed: int, contest: Contest | None = None) -> list[Result]:
    """A result for each rival, in their order."""
    contest, profile = contest or Contest(), load_profile(PROFILE)
    budget = None if rule.importance is None else Budget(contest.gpus)
    deployments = []
    for number, (rival, importance) in enumerate(zip(contest.rivals, rule.importance or (50, 50), strict=True)):
        spec = object_of(importance, most_replicas=contest.gpus)
        fleet = FleetSpec(
            profile,
            initial_replicas=rival.initial_replicas,
            settings=spec.initial_settings(),
            start=start_times(START_SECONDS),
            gateway=GatewaySpec(timeout_seconds=CLIENT_TIMEOUT_SECONDS),
        )
        controller = OperatorController(spec, engine_info(profile), name=rival.name, budget=budget)
        deployments.append(Deployment(contest.workload(number, seed), fleet, controller, GOALS))
    return simulate_together(deployments, gpus={profile.gpu: contest.gpus}, seed=seed, duration_seconds=contest.seconds)
