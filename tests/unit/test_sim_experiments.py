"""The experiments beside the matrix, in small: the kind of GPU follows the mix, and shares help whom they shall."""

import json
from itertools import pairwise

import pytest

from tidegate_engine.settings import BatchSettings
from tidegate_operator.observation import ReplicaPhase
from tidegate_sim import drift, evaluation_report, experiments, rivals, synthetic
from tidegate_sim.matrix import Figures, Matrix
from tidegate_sim.results import Result
from tidegate_sim.rivals import Contest, Rival, Rule

CONTEST = Contest(
    rivals=(
        Rival("assistant", synthetic.steps([(0.0, 0.3), (240.0, 1.8)]), 2),
        Rival("archive", synthetic.steps([(0.0, 1.6)]), 4),
    ),
    gpus=6,
    seconds=660.0,
)


def test_the_day_turns_from_one_pattern_to_the_next() -> None:
    assert drift.day(0.0)[drift.MORNING] == 1.0
    turn = drift.PHASE_SECONDS - drift.DRIFT_SECONDS / 2
    assert drift.day(turn) == {drift.MORNING: pytest.approx(0.5), drift.NOON: pytest.approx(0.5)}
    assert drift.day(len(drift.DAY) * drift.PHASE_SECONDS) == {drift.NIGHT: 1.0}
    phases = drift.phases(len(drift.DAY) * drift.PHASE_SECONDS)
    assert [kind for kind, _, _ in phases] == list(drift.DAY)
    assert all(end == start for (_, _, end), (_, start, _) in pairwise(phases))


@pytest.fixture(scope="module")
def short_day() -> tuple[Result, Figures]:
    """A day of 21 minutes, and its figures as they are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "PHASE_SECONDS", 420.0)
        patch.setattr(drift, "DRIFT_SECONDS", 60.0)
        patch.setattr(drift, "REQUESTS_PER_SECOND", 1.2)
        result = drift.run(drift.GPUS, seed=1, seconds=1260.0)
        return result, json.loads(json.dumps(experiments.figures_of_day(result)))


def test_the_kind_that_serves_and_its_settings_follow_the_mix(short_day: tuple[Result, Figures]) -> None:
    result, _ = short_day
    morning, noon = (result.timeline[int(at / 15)] for at in (330, 780))
    ready = [
        {name: kind.phases.get(ReplicaPhase.READY, 0) for name, kind in point.kinds.items()}
        for point in (morning, noon)
    ]
    assert ready[0]["L40S"] == 0 and ready[0]["A40"] > 0
    assert ready[1]["L40S"] > 0
    before, after = (point.kinds["L40S"].settings for point in (morning, noon))
    assert isinstance(before, BatchSettings) and before.max_num_seqs > 2 * after.max_num_seqs
    assert before.long_prefill_token_threshold < after.long_prefill_token_threshold
    assert result.attainment is not None and result.attainment > 0.9
    assert result.cost == pytest.approx(sum(use.cost or 0.0 for use in result.uses.values()))


def contested(importance: tuple[int, int] | None) -> list[Result]:
    return rivals.run(Rule("test", importance), seed=1, contest=CONTEST)


def test_shares_help_the_one_that_came_late_and_leave_nobody_below_its_minimum() -> None:
    first_come, shared = contested(None), contested((80, 20))
    late = [results[0].between(450.0, 660.0).attainment or 0.0 for results in (first_come, shared)]
    assert late[1] > late[0] + 0.2
    for result in shared:
        assert min(point.pods(ReplicaPhase.READY) for point in result.timeline) >= rivals.MINIMUM
    waiting = [max(point.pods(ReplicaPhase.UNSCHEDULABLE) for point in result.timeline) for result in first_come]
    assert max(waiting) > 0
    for here, there in zip(shared[0].timeline, shared[1].timeline, strict=True):
        on_nodes = [point.pods(*ReplicaPhase) - point.pods(ReplicaPhase.UNSCHEDULABLE) for point in (here, there)]
        assert sum(on_nodes) <= CONTEST.gpus
    assert all(result.reversals <= 1 for result in shared), "GPUs do not go to and fro"


def found_by(day: Figures) -> Matrix:
    rivalry = {
        rival.name: {
            "requests": 100, "attainment": 0.5, "in_short_supply": 0.25, "gpu_hours": 2.0, "fewest_ready": 2,
            "scalings_per_hour": 3.0, "reversals": 0,
        }
        for rival in rivals.RIVALS
    }  # fmt: skip
    found: dict[tuple[str, str], tuple[Figures, ...]] = {(experiments.DRIFT, name): (day,) for name in experiments.DAYS}
    found |= {(experiments.RIVALS, rule.name): (rivalry,) for rule in rivals.RULES}
    return Matrix((), {}, (), {}, {}, {}, 1, (), experiments=found)


def test_both_are_told_in_the_report_with_a_plot_of_the_day(
    short_day: tuple[Result, Figures],
) -> None:
    result, figures = short_day
    matrix = found_by(figures)
    text = "\n".join(evaluation_report.experiments(matrix, plots="evaluation"))
    assert f"| {100 * (result.attainment or 0):.1f} |" in text
    assert "evaluation/drift.svg" in text and "| first come | 25.0 |" in text
    plot = evaluation_report.day_plot(matrix.experiments[experiments.DRIFT, drift.BOTH][0])
    assert all(name in plot for name in ("A40", "L40S", "Mix", "Ready replicas", "Prefill chunk"))
