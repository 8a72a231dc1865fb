"""The script that measures a GPU, rehearsed on the CPU: every section runs, reports, and fails alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate_kernels.launches import TABLE_PATH, read_choices

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
BENCH = Path(__file__).parents[2] / "kernels" / "bench"
SECTIONS = (
    "rates", "numerics", "attention", "products", "fusions", "steps-bf16", "steps-fp8", "fit", "served", "vllm",
)  # fmt: skip


def run(*arguments: str, script: Path = BENCH / "h200.py") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_a_rehearsal_runs_sections_and_writes_what_they_found(tmp_path: Path) -> None:
    names = SECTIONS if PROVE else ("rates", "products")
    found = run("--rehearse", "--out", str(tmp_path), "--only", *names)
    assert found.returncode == 0, found.stdout + found.stderr
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert list(results) == list(names)
    for name in names:
        assert results[name]["rows"] and results[name]["error"] is None and results[name]["left_out"] == 0, name
        assert not results[name]["failed"], results[name]["failed"]
    written = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert written.count("\n## ") + written.startswith("## ") == 1 + len(names)
    assert written.startswith("## Goals\n") and "| 0.85 | - |" in written, "a CPU has no cache so long"
    if PROVE:
        sources = (BENCH.parent / "src" / "tidegate_kernels").glob("*.py")
        kernels = {name for file in sources for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M)}
        assert {row["kernel"] for row in results["numerics"]["rows"]} == kernels
        assert all(row["passed"] for row in results["numerics"]["rows"])


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_tuning_writes_a_table_whose_measured_rows_say_so_and_leaves_the_others(tmp_path: Path) -> None:
    found = run("--rehearse", "--tune", "--out", str(tmp_path))
    assert found.returncode == 0, found.stdout + found.stderr
    before = read_choices(TABLE_PATH.read_text(encoding="utf-8"))
    after = read_choices((tmp_path / TABLE_PATH.name).read_text(encoding="utf-8"))
    assert [(each.kernel, each.architecture, each.rows_at_most) for each in after] == [
        (each.kernel, each.architecture, each.rows_at_most) for each in before
    ]
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert [(each.kernel, each.rows_at_most, each.source) for each in changed] == [("scaled", 16, "measured")]


def test_a_section_that_fails_is_reported_and_the_others_run(tmp_path: Path) -> None:
    broken = tmp_path / "bench"
    broken.mkdir()
    for file in BENCH.glob("*.py"):
        (broken / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    source = (broken / "speed.py").read_text(encoding="utf-8")
    (broken / "speed.py").write_text(
        source.replace("def rates(", "def rates(place: Place, report: Report) -> None:\n    1 / 0\n\n\ndef unused("),
        encoding="utf-8",
    )
    (broken / "numerics.py").write_text(
        (BENCH / "numerics.py").read_text(encoding="utf-8")
        + "\n\ndef run(place: Place, report: Report) -> None:\n"
        + "    report.add(kernel='norm_kernel', case='made up', error=1.0, allowed=0.1, passed=False)\n",
        encoding="utf-8",
    )
    out = tmp_path / "out"
    found = run("--rehearse", "--out", str(out), "--only", "rates", "numerics", script=broken / "h200.py")
    assert found.returncode == 1
    assert found.stdout.endswith("section rates failed\nnorm_kernel is wrong: made up\n")
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert results["rates"] == {
        "section": "rates", "rows": [], "failed": [], "left_out": 0, "error": "ZeroDivisionError: division by zero"
    }  # fmt: skip
    assert results["numerics"]["rows"][0]["case"] == "made up"
