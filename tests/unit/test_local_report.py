"""The report and the verdict: pure functions of a recording."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from tidegate_engine import charts
from tidegate_local import report, verdict
from tidegate_local.load import Outcome
from tidegate_local.recording import (
    DecisionFact,
    EventFact,
    PhaseMark,
    PodFact,
    Recording,
    Sample,
    Settings,
    Targets,
    condition_is_true,
    condition_news,
    event_fact,
    gauge_total,
    pod_fact,
    sample_of,
    settings_of,
)

SMALL = Settings(16, 2048, 256)
BIG = Settings(64, 4096, 1024)
ONE = (PodFact("chat-1", "u1", True, 0),)
TWO = (*ONE, PodFact("chat-2", "u2", True, 0))


def sample(at: float, leader: str, settings: Settings = BIG, replicas: int = 1) -> Sample:
    pods = TWO if replicas == 2 else ONE
    return Sample(
        at=at,
        arrivals_per_second=2.0,
        mix={leader: 0.9, "ShortInShortOut": 0.1},
        ttft_p95_seconds=0.4,
        itl_p95_seconds=0.07,
        waiting=1,
        running=10,
        desired_replicas=replicas,
        ready_replicas=len(pods),
        settings=settings,
        settings_generation=2 if settings is SMALL else 1,
        settings_applied_replicas=len(pods),
        settings_reason="MixChanged",
        settings_message="predicted <90 ms>",
        reason="Holding",
        message="nothing to do",
        decisions=(DecisionFact(at, "ScaleUp", "LoadNeedsMore", "2 wanted", 2),) if replicas == 2 else (),
        pods=pods,
    )


def outcome(at: float, *, phase: str = "b", failure: str | None = None, itl: float = 0.05) -> Outcome:
    return Outcome(
        index=int(at),
        phase=phase,
        traffic_class="k",
        input_tokens=10,
        output_tokens_asked=10,
        arrived_at=at,
        lag_seconds=0,
        ttft_seconds=0.2,
        itl_mean_seconds=itl,
        e2e_seconds=1.0,
        output_tokens=10,
        failure=failure,
    )


def good_run() -> Recording:
    return Recording(
        title="Tidegate <demo>",
        targets=Targets(1.0, 0.1),
        samples=[
            sample(1000, "ShortInLongOut"),
            sample(1050, "ShortInLongOut"),
            sample(1062, "LongInShortOut"),
            sample(1070, "LongInShortOut", SMALL),
            sample(1080, "LongInShortOut", SMALL),
            sample(1090, "LongInShortOut", SMALL, 2),
            sample(1150, "LongInShortOut", SMALL),
        ],
        events=[EventFact(1070, "Retuned", "settings changed")],
        phases=[PhaseMark("a", 1000, 2), PhaseMark("b", 1050, 2)],
        outcomes=[outcome(at, itl=0.09 if at < 1070 else 0.05) for at in range(1050, 1120)],
        ended_at=1160,
    )


def test_a_run_that_shows_everything_passes() -> None:
    assert [finding.promise for finding in verdict.findings(good_run()) if not finding.seen] == []


def test_the_effect_of_a_change_is_measured_on_both_sides_within_one_phase() -> None:
    (change,) = verdict.live_changes(good_run())
    assert (change.before, change.after) == (BIG, SMALL)
    assert change.mix_changed and change.pods_kept == ONE
    assert change.felt_before.itl_p95_seconds == 0.09 and change.felt_after.itl_p95_seconds == 0.05
    assert change.felt_before.requests == 20


def test_a_change_that_clients_felt_no_gain_from_is_told_so() -> None:
    def told(run: Recording) -> bool:
        return "felt no gain" in verdict.findings(run)[0].detail

    run = good_run()
    slower = [replace(o, ttft_seconds=0.9) if o.arrived_at > 1070 else o for o in run.outcomes]
    assert not told(run)
    assert told(replace(run, outcomes=slower))


def without_restart_proof(run: Recording) -> Recording:
    restarted = (PodFact("chat-1", "u1", True, 1),)
    return replace(run, samples=[replace(s, pods=restarted) if s.settings is SMALL else s for s in run.samples])


def other_pod(run: Recording) -> Recording:
    other = (PodFact("chat-9", "u9", True, 0),)
    return replace(run, samples=[replace(s, pods=other) if s.settings is SMALL else s for s in run.samples])


def unacknowledged(run: Recording) -> Recording:
    return replace(
        run, samples=[replace(s, settings_applied_replicas=0) if s.settings is SMALL else s for s in run.samples]
    )


def same_mix(run: Recording) -> Recording:
    return replace(run, samples=[replace(s, mix={"ShortInLongOut": 1.0}) for s in run.samples])


def no_scale_down(run: Recording) -> Recording:
    return replace(run, samples=run.samples[:-1])


def never_ready(run: Recording) -> Recording:
    return replace(run, samples=[replace(s, ready_replicas=1) for s in run.samples])


def one_failure(run: Recording) -> Recording:
    return replace(run, outcomes=[*run.outcomes, outcome(1100, failure="cut: no end")])


def nothing_sent(run: Recording) -> Recording:
    return replace(run, outcomes=[])


@pytest.mark.parametrize(
    ("spoil", "missed"),
    [
        (without_restart_proof, "Batch settings"),
        (other_pod, "Batch settings"),
        (unacknowledged, "Batch settings"),
        (same_mix, "Batch settings"),
        (no_scale_down, "Scaled down"),
        (never_ready, "Scaled up"),
        (one_failure, "Every request"),
        (nothing_sent, "Every request"),
    ],
)
def test_what_was_not_seen_is_said(spoil: object, missed: str) -> None:
    assert callable(spoil)
    findings = verdict.findings(spoil(good_run()))
    assert any(finding.promise.startswith(missed) and not finding.seen for finding in findings)


def parsed(page: str) -> ElementTree.Element:
    """Well-formedness by an XML parser, of the part that is XML."""
    return ElementTree.fromstring(
        "<main>" + page.split("<main>", 1)[1].split("</main>", 1)[0].replace("<br>", "<br/>") + "</main>"
    )


def test_the_page_is_well_formed_self_contained_and_escapes_what_it_shows() -> None:
    page = report.html(good_run())
    parsed(page)
    assert "<script" not in page and "http://" not in page and "https://" not in page and "url(" not in page
    assert "Tidegate &lt;demo&gt;" in page and "predicted &lt;90 ms&gt;" in page


def test_every_plot_with_data_is_drawn_and_decisions_are_numbered() -> None:
    root = parsed(report.html(good_run()))
    assert len(root.findall(".//svg")) == len(report.charts(good_run()))
    first = root.find(".//svg")
    assert first is not None
    numbers = [text.text for text in first.iter("text") if text.get("class") == "number"]
    assert numbers == ["1", "2", "3"]


def test_an_empty_recording_still_makes_a_page_that_says_what_is_missing() -> None:
    page = report.html(Recording(title="nothing"))
    parsed(page)
    assert "Not seen" in page and "<svg" not in page


def test_unknown_values_break_the_line_instead_of_falling_to_zero() -> None:
    run = good_run()
    gap = [replace(s, ttft_p95_seconds=None) if s.at == 1070 else s for s in run.samples]
    with_gap = report.html(replace(run, samples=gap))
    path = next(p for p in parsed(with_gap).iter("path") if (p.get("d") or "").count("M") == 2)
    assert path.get("class") == "line s1"


@pytest.mark.parametrize(("rough", "step"), [(0, 1), (0.3, 0.5), (1, 1), (1.01, 2), (7, 10), (34, 50)])
def test_axis_steps_are_round(rough: float, step: float) -> None:
    assert charts.nice_step(rough) == pytest.approx(step)


def test_a_pod_is_read_from_the_api_servers_json() -> None:
    pod = {
        "metadata": {"name": "a", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"restartCount": 2}],
        },
    }
    assert pod_fact(pod) == PodFact("a", "u", True, 2, terminating=True)
    assert pod_fact({}) == PodFact("", "", False, 0)


def test_an_event_takes_the_first_time_it_has() -> None:
    event = {
        "eventTime": None,
        "lastTimestamp": "1970-01-01T00:00:10Z",
        "reason": "R",
        "message": "m",
        "type": "Warning",
    }
    assert event_fact(event) == EventFact(10.0, "R", "m", warning=True)
    assert event_fact({"reason": "R"}) is None


def test_a_scaling_is_explained_by_the_decision_in_the_objects_history() -> None:
    up, down = verdict.scalings(good_run())
    assert (up.reason, up.message) == ("LoadNeedsMore", "2 wanted")
    assert (down.before, down.after) == (2, 1)


def test_the_status_of_an_object_is_read_and_what_it_lacks_stays_unknown() -> None:
    status = {
        "traffic": {"arrivalRate": 1.5, "classes": [{"name": "LongInShortOut", "sharePercent": 80}, {"name": "x"}]},
        "objectives": {"ttftP95Milliseconds": 250, "queueP95Milliseconds": 10},
        "batching": {
            "desired": {"maxSequences": 8, "maxBatchedTokens": 2048, "prefillChunkTokens": 512},
            "generation": 3,
            "appliedReplicas": 1,
            "lastReason": "MixChanged",
            "lastMessage": "m",
        },
        "autoscaling": {
            "desiredReplicas": 2,
            "lastDecision": {"reason": "Hold", "message": "h"},
            "decisions": [
                {"time": "1970-01-01T00:00:05Z", "action": "ScaleUp", "reason": "r", "message": "m", "replicas": 2}
            ],
        },
    }
    found = sample_of({"status": status}, [], 9.0)
    assert found.arrivals_per_second == 1.5 and found.mix == {"LongInShortOut": 1.0}
    assert found.ttft_p95_seconds == 0.25 and found.queue_p95_seconds == 0.01 and found.itl_p95_seconds is None
    assert found.settings == Settings(8, 2048, 512) and found.settings_message == "m"
    assert found.decisions == (DecisionFact(5.0, "ScaleUp", "r", "m", 2),)
    assert sample_of({}, [], 9.0) == Sample(at=9.0, ready_replicas=0)


def test_news_are_conditions_that_changed() -> None:
    def resource(status: str) -> dict[str, object]:
        condition = {"type": "Ready", "status": status, "reason": "R", "message": "m", "observedGeneration": 2}
        return {"metadata": {"generation": 2}, "status": {"conditions": [condition]}}

    assert condition_news({}, resource("False")) == ["Ready=False (R): m"]
    assert condition_news(resource("False"), resource("False")) == []
    assert condition_news({}, resource("Unknown")) == [] != condition_news(resource("True"), resource("Unknown"))
    assert condition_news({}, resource("True"), ("Stalled",)) == []
    assert condition_is_true(resource("True"), "Ready") and not condition_is_true(resource("False"), "Ready")
    outdated = {**resource("True"), "metadata": {"generation": 3}}
    assert not condition_is_true(outdated, "Ready")


def test_gauges_are_summed_over_their_series_by_exact_name() -> None:
    text = '# TYPE a gauge\na 1\na{x="1 2"} 2.5\nab 7\n'
    assert gauge_total(text, "a") == 3.5 and gauge_total(text, "c") is None


def test_settings_are_unknown_unless_all_three_are_there() -> None:
    assert settings_of({"maxSequences": 1, "maxBatchedTokens": 2, "prefillChunkTokens": 3}) == Settings(1, 2, 3)
    assert settings_of({"maxSequences": 1}) is None and settings_of(None) is None
