"""`tidegate simulate`: from files to a table, JSON and a page of its own; what cannot be read is named."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tidegate_operator.cli import main

OBJECT: dict[str, Any] = {
    "apiVersion": "tidegate.dev/v1alpha1",
    "kind": "LLMDeployment",
    "metadata": {"name": "assistant"},
    "spec": {
        "model": {"uri": "file:///models/none"},
        "objectives": {"ttft": {"milliseconds": 800}, "interTokenLatency": {"milliseconds": 60}},
        "autoscaling": {"mode": "Auto", "minReplicas": 1, "maxReplicas": 4},
    },
}
PROFILE = ["--profile", "h100-llama-3.1-8b"]


@pytest.fixture
def deployment(tmp_path: Path) -> str:
    path = tmp_path / "object.json"
    path.write_text(json.dumps(OBJECT))
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text("t,isl,osl\n" + "".join(f"{n / 4},{300 + n % 900},{20 + n % 60}\n" for n in range(400)))
    return str(path)


def test_a_trace_is_served_beside_a_baseline(
    deployment: str, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    arguments = ["simulate", "-f", deployment, "--trace", trace, *PROFILE, "--baseline", "static=2", "--price", "2"]
    assert main([*arguments, "--html", str(page), "--json", str(figures)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["policy", "tidegate", "static=2"]
    found = json.loads(figures.read_text())
    first, second = found["results"]
    assert first["requests"] == second["requests"] == 400
    assert first["attainment"] > 0.99 and second["gpu_hours"] > first["gpu_hours"]
    assert second["cost"] == pytest.approx(2 * second["gpu_hours"])
    assert first["timeline"] and {"at", "mix", "settings", "ttft_p95_seconds"} <= set(first["timeline"][0])
    html = page.read_text()
    assert "Simulation of assistant" in html and html.count("<svg") >= 10
    assert not re.search(r"(src|href)=|@import|url\(|https?:", html), "nothing is fetched"


def test_the_same_seed_prints_the_same(deployment: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "-f", deployment, *PROFILE, "--rate", "3", "--duration-seconds", "60", "--json", "-"]
    printed = []
    for seed in ("5", "5", "6"):
        assert main([*arguments, "--seed", seed]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]


def attainments(spec: dict[str, Any], trace: str, folder: Path) -> dict[str, float]:
    """Of the object with these parts of its spec: overall, and by pattern."""
    content = deepcopy(OBJECT)
    content["spec"] |= spec
    path, figures = folder / "own.json", folder / "own-figures.json"
    path.write_text(json.dumps(content))
    assert main(["simulate", "-f", str(path), "--trace", trace, *PROFILE, "--json", str(figures)]) == 0
    (result,) = json.loads(figures.read_text())["results"]
    assert result["overall"]["attainment"] == result["attainment"]
    assert sum(each["met"] for each in result["patterns"].values()) == result["overall"]["met"]
    return {"overall": result["attainment"]} | {name: each["attainment"] for name, each in result["patterns"].items()}


def test_a_class_is_held_against_its_own_goals(trace: str, tmp_path: Path) -> None:
    short = {"name": "Short", "outputTokens": {"max": 64}}
    plain = attainments({"trafficClasses": [short]}, trace, tmp_path)
    assert plain["Short"] > 0.99 and plain["Other"] > 0.99
    strict = short | {"objectives": {"interTokenLatency": {"milliseconds": 1}}}
    own = attainments({"trafficClasses": [strict]}, trace, tmp_path)
    assert own["Short"] == 0.0 and own["Other"] == plain["Other"]
    assert own["overall"] == pytest.approx(plain["Other"] * 96 / 400), "96 answers of 400 are longer"


def test_goals_on_whole_answers_and_on_waiting_count_too(trace: str, tmp_path: Path) -> None:
    free = {"ttft": {"milliseconds": 800}, "interTokenLatency": {"milliseconds": 60}}
    assert attainments({"objectives": free}, trace, tmp_path)["overall"] > 0.99
    for objective, goal in (("endToEnd", 300), ("queueTime", 1)):
        found = attainments({"objectives": free | {objective: {"milliseconds": goal}}}, trace, tmp_path)
        assert 0 < found["overall"] < 0.9, objective


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rate", "1"], "give --profile"),
        (PROFILE, "give either --trace, or --rate"),
        ([*PROFILE, "--trace", "nowhere.csv"], "nowhere.csv cannot be read"),
        ([*PROFILE, "--rate", "1", "--baseline", "guess"], "there is no baseline 'guess'; there are static"),
        ([*PROFILE, "--rate", "1", "--baseline", "hpa-concurency=4"], "is hpa-concurrency meant?"),
        ([*PROFILE, "--rate", "1e-3", "--duration-seconds", "1e9"], "ten years are the most"),
        ([*PROFILE, "--rate", "1", "--html", "nowhere/page.html"], "there is no folder nowhere"),
        ([*PROFILE, "--rate", "1", "--json", "."], "is a folder; name a file to write"),
        (["--profile", "abacus", "--rate", "1"], "there is no profile 'abacus'"),
        ([*PROFILE, "--rate", "1", "--isl", "many"], "is no distribution of lengths"),
        ([*PROFILE, "--rate", "1", "--baseline", "static=two"], "its knob must be a number, not 'two'"),
        ([*PROFILE, "--rate", "1e9"], "are more than 20,000,000"),
        ([*PROFILE, "--rate", "1", "--duration-seconds", "1e8"], "are more than 20,000,000"),
        ([*PROFILE, "--rate", "1", "--baseline", "hpa-concurrency=nan"], "its knob (requests in a pod) is 0.001"),
        ([*PROFILE, "--rate", "1", "--baseline", "keda=0"], "its knob (waiting requests a replica) is 0.001"),
        ([*PROFILE, "--rate", "1", "--baseline", "clairvoyant=1e300"], "its knob (margin over the demand) is 0"),
    ],
)
def test_what_cannot_be_simulated_is_named(
    deployment: str, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "-f", deployment, *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_file_that_is_no_object_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"kind": "Pod"}')
    assert main(["simulate", "-f", str(path), *PROFILE, "--rate", "1"]) == 2
    assert "holds no LLMDeployment" in capsys.readouterr().err


def test_a_flag_that_is_no_number_is_told_so(deployment: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--rate", "ten"), ("--start-seconds", "soon"), ("--initial-replicas", "1.5")):
        with pytest.raises(SystemExit):
            main(["simulate", "-f", deployment, *PROFILE, flag, value])
        assert re.search(rf"argument {flag}: must be a (whole )?number, not '?{value}", capsys.readouterr().err)


def test_a_file_that_is_not_there_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "-f", "nowhere.yaml", *PROFILE, "--rate", "1"]) == 2
    assert capsys.readouterr().err == "tidegate simulate: nowhere.yaml cannot be read: No such file or directory\n"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("long.csv", b"t,isl,osl\n0,10,10\n1,99999999999999999999,10\n", "1,073,741,824 are the most"),
        ("late.csv", b"t,isl,osl\n0,10,10\n1e18,10,10\n", "ten years are the most"),
        ("broken.csv.gz", b"\x1f\x8b\x08\x00abcdefgh", "cannot be read"),
        (
            "cut.csv.gz",
            gzip.compress(b"t,isl,osl\n" + b"0,1,1\n" * 99, mtime=0)[:-9],
            "cannot be read: Compressed file ended",
        ),
        ("plain.csv.gz", b"t,isl,osl\n0,1,1\n", "Not a gzipped file"),
        ("named.csv", gzip.compress(b"t,isl,osl\n0,1,1\n", mtime=0), "a compressed trace is called .gz"),
        ("empty.csv", b"", "is empty"),
        ("header.csv", b"t,isl,osl\n", "has no request in the chosen part"),
        ("missing.csv", b"t,isl\n0,10\n", "has no column osl"),
        ("headless.csv", b"0,10,10\n", "its first line must name the columns, parted by commas, and is '0,10,10'"),
        ("semicolons.csv", b"t;isl;osl\n0;10;10\n", "parted by commas, and is 't;isl;osl'"),
        ("short.csv", b"t,isl,osl\n0,10\n", "line 2: ['0', '10'] is no request (2 columns of 3)"),
        ("unsorted.csv", b"t,isl,osl\n500,10,10\n1,10,10\n", "a request at 1 s stands after the first one, at 500 s"),
        ("negative.csv", b"t,isl,osl\n0,-10,10\n", "1 rows have no tokens"),
        ("nan.csv", b"t,isl,osl\n0,nan,10\n", "line 2"),
        ("never.csv", b"t,isl,osl\nnan,10,10\n", "nan is no time"),
        ("endless.csv", b"t,isl,osl\n0,1e400,10\n", "line 2"),
        ("mooncake.jsonl", b'{"timestamp": 0, "input_length": 1}\n', "input_length and output_length are wanted"),
    ],
)
def test_a_trace_that_no_simulation_could_serve_is_named(
    deployment: str, tmp_path: Path, name: str, content: bytes, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["simulate", "-f", deployment, *PROFILE, "--trace", str(path)]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--speed", "--rate-scale", "--length-scale"])
@pytest.mark.parametrize("value", ["1e300", "1e-320", "nan", "0"])
def test_a_factor_is_one_that_a_trace_could_have(
    deployment: str, trace: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "-f", deployment, *PROFILE, "--trace", trace, flag, value])
    assert "must be 1e-06 to 1e+06" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("kind: List\nitems: 5\n", "holds no LLMDeployment"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("kind: LLMDeployment\nspec: {a: 2020-99-99}\n", "neither JSON nor YAML"),
        ("kind: LLMDeployment\nmetadata: [1]\nspec: [1]\n", "spec"),
        ("kind: LLMDeployment\nmetadata: null\nspec: {}\n", "model"),
    ],
)
def test_an_object_that_is_none_is_named_by_every_command(
    tmp_path: Path, content: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "object.yaml"
    path.write_text(content)
    assert main(["simulate", "-f", str(path), *PROFILE, "--rate", "1"]) == 2
    assert complaint in capsys.readouterr().err
    assert main(["explain", "-f", str(path)]) in (0, 2)


def test_a_trace_in_a_folders_place_is_named(
    deployment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "-f", deployment, *PROFILE, "--trace", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"objetcives": {}}, "spec.objetcives (is objectives meant?)"),
        ({"objectives": {"ttft": {"ms": 5, "milliseconds": 5}}}, "no LLMDeployment has: spec.objectives.ttft.ms"),
        ({"trafficClasses": [{"name": "A"}, {"name": "B", "input": {}}]}, "spec.trafficClasses[1].input"),
        (
            {"autoscaling": {"minReplicas": 5, "maxReplicas": 2}},
            "spec.autoscaling: minReplicas 5 is above maxReplicas 2",
        ),
        ({"batching": {"maxSequences": {"min": 9, "max": 2}}}, "spec.batching.maxSequences: min 9 is above max 2"),
        ({"autoscaling": {"mode": "Sometimes"}}, "spec.autoscaling.mode"),
        ({"replicas": 10**9}, "less than or equal to 1000"),
    ],
)
def test_what_the_api_server_would_refuse_is_not_simulated(
    tmp_path: Path, spec: dict[str, Any], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "object.json"
    path.write_text(json.dumps(OBJECT | {"spec": OBJECT["spec"] | spec}))
    assert main(["simulate", "-f", str(path), *PROFILE, "--rate", "1"]) == 2
    assert complaint in capsys.readouterr().err


def test_the_object_may_stand_among_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(f"---\nkind: ConfigMap\n---\n{json.dumps(OBJECT)}\n---\n")
    assert main(["simulate", "-f", str(path), *PROFILE, "--rate", "1", "--duration-seconds", "20"]) == 0
    assert "tidegate" in capsys.readouterr().out


def test_what_became_of_requests_that_were_not_served_is_told(
    deployment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("t,isl,osl\n0,100,10\n1,100000000,10\n")
    assert main(["simulate", "-f", deployment, *PROFILE, "--trace", str(path)]) == 0
    assert "tidegate: 1 refused, since they can never fit into the engine" in capsys.readouterr().out


@pytest.mark.parametrize(("flag", "value"), [("--price", "1e300"), ("--initial-replicas", "100000"), ("--rate", "-1")])
def test_a_figure_beyond_sense_is_told_its_bounds(
    deployment: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "-f", deployment, *PROFILE, flag, value])
    assert f"argument {flag}: must be" in capsys.readouterr().err


def test_ctrl_c_ends_it_with_a_sentence_and_no_file(deployment: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code = "import sys; from tidegate_sim import command; command.PROGRESS_SECONDS = 0.0; "
    code += "from tidegate_operator.cli import main; sys.exit(main())"
    arguments = ["simulate", "-f", deployment, *PROFILE, "--rate", "10", "--duration-seconds", "10000"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--html", str(page)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("tidegate: "), "it simulates"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "tidegate simulate: stopped; nothing was written"
    assert "Traceback" not in err and out == "" and not page.exists()


def test_a_reader_that_has_enough_is_no_error(deployment: str) -> None:
    code = "import sys; from tidegate_operator.cli import main; sys.exit(main())"
    arguments = ["simulate", "-f", deployment, *PROFILE, "--rate", "1", "--duration-seconds", "20", "--json", "-"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        found = subprocess.run(
            [sys.executable, "-c", code, *arguments], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(write_end)
    assert "Traceback" not in found.stderr and "BrokenPipe" not in found.stderr
