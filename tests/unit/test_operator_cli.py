"""`tidegate explain`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate_operator.cli import main, run_operator, the_bounds, the_sum

OBJECT: dict[str, Any] = {
    "apiVersion": "tidegate.dev/v1alpha1",
    "kind": "LLMDeployment",
    "metadata": {"namespace": "demo", "name": "tide"},
    "spec": {"objectives": {"ttft": {"milliseconds": 1000}, "interTokenLatency": {"milliseconds": 50}}},
    "status": {
        "readyReplicas": 2,
        "batching": {
            "desired": {"maxSequences": 48, "maxBatchedTokens": 1024, "prefillChunkTokens": 512},
            "generation": 3,
            "appliedReplicas": 2,
            "lastReason": "RetunedForMix",
            "lastMessage": "batch settings 64/4096/1024 → 48/1024/512: predicted ITL p95 41 → 28 ms",
            "lastChangeTime": "2026-01-01T00:00:00Z",
        },
        "traffic": {
            "arrivalRate": 8.5,
            "windowSeconds": 60,
            "classes": [
                {"name": "LongInShortOut", "sharePercent": 80, "inputTokensMean": 2400, "outputTokensMean": 60},
                {"name": "ShortInLongOut", "sharePercent": 0},
            ],
        },
        "objectives": {"ttftP95Milliseconds": 1400, "itlP95Milliseconds": 31},
        "autoscaling": {
            "mode": "Auto",
            "desiredReplicas": 3,
            "wantedReplicas": 4,
            "lastDecision": {
                "time": "2026-01-01T00:00:10Z",
                "action": "ScaleUp",
                "reason": "DemandAboveCapacity",
                "message": "2 → 3 replicas: (8.5 + 1 backlog) req/s over 3 req/s a replica",
                "replicas": 3,
                "wanted": 4,
                "boundedBy": ["ScaleUpPolicy"],
                "bottleneck": "Prefill",
                "inputs": {
                    "arrivalsPerSecond": 8.5,
                    "backlogPerSecond": 1,
                    "capacityPerReplica": 3,
                    "correction": 1,
                    "headroomPercent": 15,
                    "effect_generation": 3,
                    "effect_predicted_itl_seconds_before": 0.041,
                    "effect_predicted_itl_seconds": 0.028,
                    "effect_before_itl_seconds": 0.044,
                    "effect_measured_itl_seconds": 0.031,
                },
            },
            "decisions": [
                {
                    "time": "2025-12-31T23:59:00Z",
                    "action": "ScaleUp",
                    "reason": "BacklogAboveTarget",
                    "message": "1 → 2",
                    "replicas": 2,
                },
                {
                    "time": "2026-01-01T00:00:10Z",
                    "action": "ScaleUp",
                    "reason": "DemandAboveCapacity",
                    "message": "2 → 3",
                    "replicas": 3,
                },
                {
                    "time": "2026-01-01T00:00:20Z",
                    "action": "Retune",
                    "reason": "RetunedForMix",
                    "message": "64/4096/1024 → 48/1024/512",
                    "replicas": 3,
                },
            ],
        },
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "Serving", "message": "fine"},
            {"type": "ObjectivesMet", "status": "False", "reason": "Missed", "message": "TTFT is above its goal"},
            {"type": "Degraded", "status": "False", "reason": "AsExpected", "message": "fine too"},
        ],
    },
}


def run(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    file = tmp_path / "input"
    file.write_text(text)
    code = main(["explain", "-f", str(file)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_everything_worth_knowing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(tmp_path, json.dumps(OBJECT), capsys)
    assert code == 0
    for part in (
        "demo/tide: 2 of 3 replicas ready, the load asks for 4",
        "48 sequences, 1024 tokens a step, prompts in chunks of 512 (generation 3, applied by 2)",
        "80 % LongInShortOut, 2400 tokens in and 60 out",
        "TTFT p95: 1400 ms, goal 1000 ms - MISSED",
        "inter-token latency p95: 31 ms, goal 50 ms - met",
        "ScaleUp, DemandAboveCapacity",
        "ScaleUp to 3, DemandAboveCapacity: 2 → 3",
        "Retune, RetunedForMix: 64/4096/1024 → 48/1024/512",
        "bound by: Prefill",
        "= 3.73 replicas",
        "then bounded by: ScaleUpPolicy; decided: 3",
        "inter-token latency p95: predicted 41 → 28 ms, measured 44 → 31 ms",
        "ObjectivesMet=False (Missed): TTFT is above its goal",
    ):
        assert part in out
    assert "ShortInLongOut" not in out and "fine" not in out
    assert out.index("2 → 3\n") < out.index("1 → 2\n"), "newest first"


def test_yaml_and_lists_are_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {**OBJECT, "metadata": {"namespace": "b", "name": "other"}, "status": {}}
    code, out, _ = run(tmp_path, yaml.safe_dump({"kind": "List", "items": [OBJECT, other]}), capsys)
    assert code == 0
    assert "demo/tide: 2 of 3" in out and "b/other: no status yet" in out


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no Kubernetes object"),
        ("a: b: c", "neither JSON nor YAML"),
        ('{"kind": "Pod"}', "holds no LLMDeployment, but Pod"),
        ('{"kind": "List", "items": []}', "holds no LLMDeployment, but List"),
    ],
)
def test_what_is_no_deployment_is_one_sentence_and_exit_code_2(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(tmp_path, text, capsys)
    assert (code, out) == (2, "")
    assert sentence in err and len(err.splitlines()) == 1


def test_a_missing_file_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "-f", "/does/not/exist"]) == 2
    assert "/does/not/exist cannot be read: No such file or directory" in capsys.readouterr().err


FIGURES = {
    "arrivalsPerSecond": 8.5,
    "forecastPerSecond": 12.0,
    "backlogPerSecond": 1.0,
    "capacityPerReplica": 3.0,
    "correction": 1.0,
    "headroomPercent": 15.0,
    "currentReplicas": 2.0,
    "lostReplicas": 1.0,
    "unseenReplicas": 0.0,
    "replicasToFit": 1.0,
    "scaleUpTolerancePercent": 10.0,
    "scaleDownTolerancePercent": 10.0,
    "scaleUpLimit": 4.0,
    "minReplicas": 1.0,
    "maxReplicas": 10.0,
}


def test_the_number_is_worked_out_again_with_every_bound_in_its_order() -> None:
    needed, wanted = the_sum(FIGURES)
    assert "(arrivals 8.5, foreseen 12, + backlog 1)" in needed and "= 5.10 replicas" in needed
    assert "wanted 7: 7 if that adds, 2 if that takes away (2 present, 1 of them lost, 0 unseen)" in wanted
    (bounds,) = the_bounds(FIGURES, 4)
    assert bounds.strip() == "at most 4 by the policies of scaling up; at least 1; at most 10: 4"


def test_a_number_that_does_not_follow_is_told() -> None:
    (bounds,) = the_bounds(FIGURES, 9)
    assert bounds.endswith(": 4, though 9 was decided: by an operator of another version")


@pytest.mark.parametrize("missing", ["currentReplicas", "lostReplicas", "replicasToFit", "scaleUpTolerancePercent"])
def test_figures_of_another_version_are_explained_as_far_as_they_go(missing: str) -> None:
    fewer = {name: value for name, value in FIGURES.items() if name != missing}
    assert next(iter(the_sum(fewer))).endswith("= 5.10 replicas")
    assert len(list(the_bounds(fewer, 4))) <= 1


def test_the_formula_is_left_out_when_capacity_was_unknown() -> None:
    assert list(the_sum({"pressure_slots": 0.5})) == []


def test_odd_objects_are_explained_as_far_as_they_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = {"kind": "LLMDeployment", "metadata": None, "status": {"autoscaling": [], "conditions": "?", "traffic": {}}}
    code, out, _ = run(tmp_path, json.dumps(odd), capsys)
    assert code == 0 and "default/?" in out


def test_the_help_shows_how_to_call_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    assert "kubectl get lld my-model -o json | tidegate explain" in capsys.readouterr().out


def test_the_operators_command_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tidegate_operator.__main__", None)
    monkeypatch.setitem(sys.modules, "kopf", None)
    assert run_operator() == 2
    assert "pip install 'tidegate[operator]'" in capsys.readouterr().err


def test_the_cost_is_told_where_it_is_known(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cost = {"gpu": "L4", "gpus": 6, "dollarsPerHour": 3.0, "dollarsPerMillionOutputTokens": 0.83, "price": "Default"}
    file = tmp_path / "object.json"
    file.write_text(json.dumps(OBJECT | {"status": OBJECT["status"] | {"cost": cost}}))
    assert main(["explain", "-f", str(file)]) == 0
    expected = "cost: $3 an hour for 6 x L4, $0.83 a million output tokens (a default price)"
    assert expected in capsys.readouterr().out
