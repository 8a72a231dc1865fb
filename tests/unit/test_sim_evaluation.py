"""Scenarios, contenders, the matrix and its report, on workloads of a minute."""

import dataclasses
import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_engine.settings import BatchSettings
from tidegate_sim import bounds, evaluation, evaluation_report, synthetic
from tidegate_sim.arrivals import Arrival
from tidegate_sim.contenders import FIXED_CHOICES, contenders, object_of
from tidegate_sim.evaluation import Job, Place
from tidegate_sim.matrix import Attempt, Matrix, Tuned, best_of, bootstrap, paired
from tidegate_sim.scenarios import GOALS, LONGEST_TOKENS, REQUESTS, Scenario, all_scenarios, fits, made_up
from tidegate_sim.sources import reached
from tidegate_sim.specification import LOOSE, MetricsOutage

SCENARIOS = all_scenarios()
SHORT = synthetic.only(synthetic.SHORT)


def tiny(name: str, training: str, **fields: object) -> Scenario:
    build = made_up(synthetic.steady(3.0), SHORT, seconds=60.0, first_seed=len(name))
    return Scenario(name, "a minute of short requests", build, training, **fields)  # type: ignore[arg-type]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "train": tiny("train", "train"),
        "S1": tiny("S1", "train", events=(20.0,)),
        "S2-half": tiny("S2-half", "train", policies=("static",)),
        "S3": tiny("S3", "train", needs="absent.csv"),
    }
    monkeypatch.setattr(evaluation, "all_scenarios", lambda: known)


# --- scenarios and contenders ----------------------------------------------------------------------------------------


@cache
def built(name: str, seed: int) -> Sequence[Arrival]:
    return SCENARIOS[name].build(None, seed)


MADE_UP = [name for name, each in SCENARIOS.items() if each.needs is None and not name.startswith("S7")]


@pytest.mark.parametrize("name", MADE_UP)
def test_a_scenario_is_in_order_within_the_context_and_of_a_size_for_a_matrix(name: str) -> None:
    scenario, arrivals = SCENARIOS[name], built(name, 1)
    assert 100 < len(arrivals) <= 1.1 * REQUESTS
    assert all(before.at_seconds <= after.at_seconds for before, after in pairwise(arrivals))
    assert all(fits(arrival) for arrival in arrivals)
    end = arrivals[-1].at_seconds
    assert all(event < end for event in scenario.events)
    assert all(getattr(fault, "at_seconds", 0.0) < end for fault in scenario.faults)


def test_a_seed_makes_the_workload() -> None:
    assert SCENARIOS["S12"].build(None, 1) == built("S12", 1) != built("S12", 2)


def test_every_scenario_is_tuned_elsewhere_and_for_policies_that_there_are() -> None:
    for scenario in SCENARIOS.values():
        training = SCENARIOS[scenario.training]
        assert training.is_training
        assert set(scenario.policies) <= set(contenders())
        if training.policies:
            assert set(scenario.policies) <= set(training.policies)
    for name in MADE_UP:
        if not SCENARIOS[name].is_training:
            assert built(name, 1)[0] != built(SCENARIOS[name].training, 1)[0]


def test_all_protocol_scenarios_are_there() -> None:
    assert {name.split("-")[0] for name in SCENARIOS if name.startswith("S")} == {f"S{n}" for n in range(1, 14)}


def test_a_trace_that_is_not_given_is_asked_for() -> None:
    with pytest.raises(ValueError, match="give the folder with the traces"):
        SCENARIOS["S2"].build(None, 1)


def test_a_cut_begins_at_zero_leaves_out_what_does_not_fit_and_moves_with_the_seed(tmp_path: Path) -> None:
    rows = [f"{second},{9000 if second % 7 == 0 else 100},{second},chat" for second in range(1, 4000)]
    (tmp_path / "replay").mkdir()
    name = "replay/rows.csv"
    (tmp_path / name).write_text("\n".join(["t_s,isl,osl,service", *rows]) + "\n")
    from tidegate_sim.scenarios import traced

    one, other = (traced(name, start_hours=0.5, count=50)(tmp_path, seed) for seed in (0, 1))
    assert len(one) == 50 and one[0].at_seconds == 0.0
    assert all(arrival.isl + arrival.osl <= LONGEST_TOKENS for arrival in one)
    assert other[0].osl - one[0].osl == pytest.approx(300, abs=2)


SMALL = evaluation.setup_of(tiny("S1", "train", settings=BatchSettings(24, 512, 256)), [Arrival(0.0, 10, 10)])


@pytest.mark.parametrize("name", contenders())
def test_every_contender_can_be_made_with_every_knob(name: str) -> None:
    contender = contenders()[name]
    for knob in (contender.default, *contender.grid):
        controller = contender.make(SMALL, knob)
        assert controller.name == name
        assert controller.period_seconds > 0


def test_the_object_says_what_the_plant_is() -> None:
    spec = object_of(SMALL, headroom_percent=30, tunes=False)
    assert spec.initial_settings() == BatchSettings(24, 512, 256)
    assert spec.replica_bounds() == (1, 24)
    assert spec.objectives.ttft is not None and spec.objectives.ttft.seconds == GOALS.ttft_seconds


def test_fixed_choices_fit_the_envelope() -> None:
    for settings in FIXED_CHOICES:
        assert settings.max_num_seqs <= settings.max_num_batched_tokens <= 16384


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_a_run_is_kept_and_found_again_and_another_knob_is_another_run(tmp_path: Path) -> None:
    place = Place(None, tmp_path)
    job = Job("S1", "static", 2.0, 1)
    first = evaluation.run(job, place)
    assert first["requests"] > 100 and first["attainment"] > 0.9
    (kept,) = tmp_path.iterdir()
    kept.write_text(json.dumps({**first, "attainment": 0.123}))
    assert evaluation.run(job, place)["attainment"] == 0.123
    assert evaluation.run(Job("S1", "static", 3.0, 1), place)["attainment"] != 0.123
    assert evaluation.run(Job("S1", "static", 2.0, 2), place)["attainment"] != 0.123
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.usefixtures("small")
def test_figures_hold_together(tmp_path: Path) -> None:
    figures = evaluation.run(Job("S1", "static", 3.0, 1), Place(None, tmp_path))
    assert 0 < figures["lb0_hours"] <= figures["lb1_hours"] <= figures["lb2_hours"] + 1e-9
    assert figures["lbv_hours"] <= figures["lb2_hours"] + 1e-9 <= figures["gpu_hours"] + 1e-9
    (event,) = figures["events"]
    assert event["at"] == 20.0 and event["recovered_after"] is None, "forty seconds are no two good minutes"
    assert sum(figures["outcomes"].values()) == figures["requests"]


@pytest.mark.usefixtures("small")
def test_the_oracle_attains_where_a_schedule_can(tmp_path: Path) -> None:
    figures = evaluation.run(Job("S1", evaluation.ORACLE, 0.0, 1), Place(None, tmp_path))
    assert figures["attainment"] >= evaluation.ATTAINMENT
    assert 0 <= figures["margin"] <= 4


@pytest.mark.usefixtures("small")
def test_the_command_tunes_runs_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "docs" / "evaluation.md"
    out.parent.mkdir()
    arguments = ["--cache", str(tmp_path / "kept"), "--policies", "static,hpa-concurrency", "--seeds", "2"]
    assert evaluation.main([*arguments, "--jobs", "2", "--out", str(out)]) == 0
    text = out.read_text()
    assert "### S1" in text and "### S2-half" in text and "### S3" not in text
    assert "Left out, as their trace was not given: S3." in text
    assert "![Attainment over GPU-hours on train](evaluation/train.svg)" in text
    ElementTree.parse(out.parent / "evaluation" / "train.svg")
    half = text[text.index("### S2-half") :]
    assert "static" in half and "hpa-concurrency" not in half
    assert evaluation.main([*arguments, "--scenarios", "S1", "--oracle-seeds", "0"]) == 0
    assert "| static |" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_unknown_names_are_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--scenarios", "S9"], "no scenario S9; there are S1"),
        (["--policies", "hpa2"], "no policy"),
    ):
        with pytest.raises(SystemExit):
            evaluation.main(arguments)
        assert said in capsys.readouterr().err


def test_a_pattern_stands_for_all_that_it_fits() -> None:
    known = dict.fromkeys(("S1", "S2", "S2-180", "S20"))
    assert evaluation.choose("S2-*,S1", known, "scenario") == ["S2-180", "S1"]
    assert evaluation.choose("S2,S1", known, "policy") == ["S2", "S1"]


# --- statistics and report -------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_an_interval_holds_its_mean(values: list[float]) -> None:
    interval = bootstrap(values, draws=200)
    assert min(values) - 1e-9 <= interval.low <= interval.high <= max(values) + 1e-9
    assert interval.low - 1e-9 <= interval.mean <= interval.high + 1e-9 or len(set(values)) > 1


def test_a_difference_that_all_seeds_show_is_clear_and_a_mixed_one_is_not() -> None:
    assert paired([2.0, 3.1, 4.0], [1.0, 2.0, 3.2]).is_clear
    assert not paired([2.0, 1.0, 4.0], [1.0, 2.0, 4.1]).is_clear
    assert not paired([2.0], [1.0]).is_clear, "one seed tells nothing of chance"
    with pytest.raises(ValueError, match="nothing to draw from"):
        bootstrap([])


@pytest.mark.parametrize(
    ("sweep", "knob"),
    [
        pytest.param([(1, 0.999, 9.0), (2, 0.991, 7.0), (3, 0.98, 5.0)], 2, id="the cheapest that attains"),
        pytest.param([(1, 0.95, 9.0), (2, 0.97, 12.0), (3, 0.9, 5.0)], 2, id="else the one that attains most"),
        pytest.param([(1, 0.97, 9.0), (2, 0.97, 8.0)], 2, id="of these the cheaper"),
        pytest.param([(1, 0.992, 4.0), (2, 0.999, 4.0)], 2, id="of equal price the better"),
    ],
)
def test_tuning_wants_attainment_first(sweep: list[tuple[float, float, float]], knob: float) -> None:
    assert best_of([Attempt(*item) for item in sweep], attainment=0.99) == knob


def figures(attainment: float, hours: float) -> dict[str, object]:
    return {
        "requests": 1000,
        "attainment": attainment,
        "gpu_hours": hours,
        "outcomes": {"finished": 1000},
        "scalings_per_hour": 3.0,
        "reversals": 1,
        "ttft": {"p99": 1.5},
        "itl": {"p99": None},
        "lb0_hours": 2.0,
        "lb2_hours": 3.0,
        "lbv_hours": 2.5,
        "goodput_per_second": 1.0,
        "blind_removals": 0,
        "events": [{"ttft_p99": [4.0, None], "recovered_after": None}],
    }


def matrix() -> Matrix:
    scenario = tiny("S1", "train", events=(20.0,))
    return Matrix(
        scenarios=(scenario,),
        contenders=contenders(),
        tuned=tuple(
            Tuned(policy, "train", 2.0, (Attempt(1.0, 0.9, 4.0), Attempt(2.0, 0.995, 5.0)))
            for policy in ("tidegate", "static")
        ),
        figures={
            ("S1", "tidegate"): (figures(0.99, 4.0), figures(0.98, 4.2)),
            ("S1", "static"): (figures(0.97, 6.0), figures(0.99, 6.2)),
        },
        oracles={"S1": (figures(0.99, 3.5),)},
        settings={"train": BatchSettings(24, 512, 256)},
        seeds=2,
        missing=(),
    )


def test_the_report_says_means_bounds_and_differences() -> None:
    table = evaluation_report.scenario_table(matrix(), matrix().scenarios[0])
    static = next(line for line in table if line.startswith("| static"))
    assert "98.0 ± 1.0" in static and "6.10 ± 0.10" in static
    assert "| 2.44 |" in static, "6.1 over a bound of 2.5"
    assert "**+2.00 (+2.00 to +2.00)**" in static, "two GPU-hours more with each seed"
    assert "-0.5 (-2.0 to +1.0)" in static
    assert "– (2 of 2 never)" in static
    assert "the oracle takes 3.50 at 99.0 %" in "\n".join(table)
    (row,) = [line for line in evaluation_report.overview(matrix()) if line.startswith("| tidegate ")]
    assert row == "| tidegate | 98.5 / 4.1 |"


def test_of_one_seed_no_interval_is_told() -> None:
    once = dataclasses.replace(
        matrix(), figures={("S1", "tidegate"): (figures(0.99, 4.0),), ("S1", "static"): (figures(0.97, 6.0),)}
    )
    table = evaluation_report.scenario_table(once, once.scenarios[0])
    assert "; one seed." in table[2]
    static = next(line for line in table if line.startswith("| static"))
    assert "| 97.0 | 6.00 |" in static and "| -2.0 | +2.00 |" in static


def of_scenario(name: str, ours: dict[str, object], theirs: dict[str, object], **fields: object) -> list[str]:
    """The rows of goals of a matrix of two seeds, where one other policy took part."""
    other = "static-settings" if name == "S6" else "hpa-concurrency"
    scenario = tiny(name, "train", **fields)
    figured = {(name, "tidegate"): (ours, ours), (name, other): (theirs, theirs)}
    return evaluation_report.goals(dataclasses.replace(matrix(), scenarios=(scenario,), figures=figured, oracles={}))[
        2:
    ]


def test_goals_are_told_with_what_was_reached() -> None:
    bound, peer = of_scenario("S3", figures(0.992, 2.8), figures(0.99, 4.0))
    assert bound == "| at most 1.15 of the bound | S3 | 1.12 at 99.2 % | holds |"
    assert (
        peer
        == "| at most 0.80 of hpa-concurrency, both at 99 % | S3 | 0.70 at 99.2 %, hpa-concurrency at 99.0 % | holds |"
    )
    bound, peer = of_scenario("S3", figures(0.98, 3.0), figures(0.99, 4.0))
    assert bound.endswith("| 1.20 at 98.0 % | **missed** |")
    assert peer.endswith("| **missed** |"), "fewer GPUs, but less than 99 % in time"
    (never,) = of_scenario("S5-0min", figures(0.99, 3.0), figures(0.99, 4.0))
    assert never.endswith("| never | **missed** |")
    (turns,) = of_scenario("S6", figures(0.99, 3.0) | {"goodput_per_second": 1.4}, figures(0.99, 3.0))
    assert turns.endswith("| 1.40 | holds |")
    (steady,) = of_scenario("S1-poisson", figures(0.99, 3.0) | {"scalings_per_hour": 0.5}, figures(0.99, 3.0))
    assert steady.endswith("| 0.50 | **missed** |")
    blind = of_scenario("S8", figures(0.99, 3.0), figures(0.99, 3.0), faults=(MetricsOutage(1.0, 2.0),))
    assert blind == ["| no replica less without metrics | S8 | 0 orders in 2 runs | holds |"]


def test_the_plot_marks_what_was_chosen_and_more_attainment_is_higher() -> None:
    root = ElementTree.fromstring(evaluation_report.plot(matrix().tuned))
    circles = [each for each in root.iter() if each.tag.endswith("circle")]
    assert len(circles) == 4
    worse, better = circles[:2]
    assert float(better.attrib["cy"]) < float(worse.attrib["cy"])
    assert float(better.attrib["r"]) > float(worse.attrib["r"])


def test_bounds_hold_for_a_fleet_of_fixed_size() -> None:
    scenario = SCENARIOS["S6"]
    assert evaluation.costs_of(scenario) == bounds.Costs(60.0, floor=8, initial=8)
    assert GOALS == LOOSE


def test_what_shows_results_makes_none_and_what_makes_them_counts() -> None:
    baselines, own = (set(reached(*code)) for code in (evaluation.OTHERS_CODE, evaluation.OWN_CODE))
    assert not [name for name in baselines | own if "report" in name or "command" in name or "evaluation" in name]
    made_by = {"tidegate_sim.fleet", "tidegate_sim.replica", "tidegate_sim.baselines.hpa", "tidegate_engine.scheduler"}
    assert made_by <= baselines < own
    assert {"tidegate_operator.policy", "tidegate_operator.capacity", "tidegate_operator.formula"} <= own - baselines
    assert "tidegate_operator.reconcile" not in own


def test_a_fleet_that_starts_otherwise_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (60.0, 61.0, 60.0):
        known = {"S1": tiny("S1", "train", start_seconds=seconds)}
        monkeypatch.setattr(evaluation, "all_scenarios", lambda known=known: known)
        evaluation.run(Job("S1", "static", 2.0, 1), Place(None, tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
