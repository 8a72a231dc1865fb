"""Checks and measures every kernel and an 8B-shaped model on one GPU, in under eight minutes.

    python kernels/bench/h200.py --out results            on a GPU
    python kernels/bench/h200.py --out results --rehearse on a CPU: every code path but recording and timing

Each section is a process of its own with a time of its own: one that fails, hangs or ruins the GPU's context ends
alone, and its rows so far stay. Writes a JSON file a section as rows come, and all so far as `results.json` and
`results.md` after each section. Ends with 1 where something failed or a kernel is wrong. What is measured is in the
other modules here.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOTAL_SECONDS = 470
GRACE_SECONDS = 10
"""Beyond its time a section may finish the row that it is at."""
LEAST_SECONDS = 5
"""With less a section is not begun."""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    module: str
    function: str
    seconds: int


SECTIONS = {
    "rates": Section("What the GPU does at most", "speed", "rates", 15),
    "numerics": Section("Kernels against float64", "numerics", "run", 65),
    "attention": Section("Decode attention", "speed", "attention", 45),
    "products": Section("Products", "speed", "products", 55),
    "fusions": Section("Fused kernels", "speed", "fusions", 20),
    "steps-bf16": Section("Decode steps, 8B in bf16", "whole_model", "steps_bf16", 45),
    "steps-fp8": Section("Decode steps, 8B in FP8", "whole_model", "steps_fp8", 45),
    "fit": Section("Step times of bf16 and their fit", "whole_model", "fit", 35),
    "served": Section("8B in bf16 behind the HTTP server", "served", "served", 80),
    "vllm": Section("vLLM beside it, 8B in bf16", "served", "beside", 65),
    "tune": Section("Launches tried", "tune", "run", 400),
}
LONG_TOKENS = 1 << 18
"""Tokens of a KV cache from which decode attention is measured against its goal."""
USUAL = [name for name in SECTIONS if name != "tune"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder that results are written to")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, interpreted on the CPU")
    parser.add_argument("--only", nargs="+", choices=USUAL, default=USUAL, help="sections to run")
    parser.add_argument("--tune", action="store_true", help="try other cuts of the products, and nothing else")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.section:
        sys.exit(run_here(options.section, options.out, rehearse=options.rehearse, seconds=options.seconds))
    sys.exit(run_all(["tune"] if options.tune else options.only, options.out, rehearse=options.rehearse))


def run_all(names: list[str], folder: Path, *, rehearse: bool) -> int:
    """Each section in a process, and the report after each; returns the exit status."""
    from measuring import path_of

    started = time.monotonic()
    failed = []
    for name in names:
        path_of(folder, name).unlink(missing_ok=True)
    for done, name in enumerate(names, 1):
        left = TOTAL_SECONDS - (time.monotonic() - started)
        # A rehearsal proves that all of it runs, however long a busy CPU takes.
        seconds = 600.0 if rehearse else min(float(SECTIONS[name].seconds), left)
        print(f"{name}: {seconds:.0f} s at most, {left:.0f} s left of all", flush=True)
        if seconds < LEAST_SECONDS:
            failed.append(name)
            continue
        if not _run_apart(name, folder, rehearse=rehearse, seconds=seconds):
            failed.append(name)
        write_report(names[:done], folder)
        print(f"{name}: {time.monotonic() - started:.0f} s since the start", flush=True)
    wrong = write_report(names, folder)
    for line in (*(f"section {name} failed" for name in failed), *wrong):
        print(line, flush=True)
    return 1 if failed or wrong else 0


def _run_apart(name: str, folder: Path, *, rehearse: bool, seconds: float) -> bool:
    command = [sys.executable, __file__, "--section", name, "--out", str(folder), "--seconds", str(seconds)]
    # Triton reads it when it is imported.
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if rehearse else {"TRITON_DEFAULT_FP_FUSION": "1"})
    try:
        run = subprocess.run(
            command + ["--rehearse"] * rehearse, env=environment, timeout=seconds + GRACE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"  killed after {seconds + GRACE_SECONDS:.0f} s", flush=True)
        return False
    return run.returncode == 0


def run_here(name: str, folder: Path, *, rehearse: bool, seconds: float) -> int:
    """One section in this process."""
    from measuring import Report, place_of

    report = Report(name, folder, time.monotonic() + seconds)
    section = SECTIONS[name]
    try:
        place = place_of(rehearse=rehearse)
        print(f"  {section.title}, on {place.describe()}", flush=True)
        getattr(importlib.import_module(section.module), section.function)(place, report)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is reported, and the other sections run
        traceback.print_exc()
        report.error = f"{type(error).__name__}: {error}"
    report.write()
    return 1 if report.error or report.failed else 0


def write_report(names: list[str], folder: Path) -> list[str]:
    """`results.json` and `results.md`; returns a line for each check that did not pass."""
    from measuring import markdown, read_section

    sections: dict[str, dict[str, Any] | None] = {name: read_section(folder, name) for name in names}
    parts, wrong = [], []
    for name, found in sections.items():
        title = SECTIONS[name].title
        if found is None:
            parts.append(f"## {title}\n\nNothing: the section ended before its first row.\n")
            continue
        rows = found["rows"]
        parts.append(markdown(title, rows))
        parts += [f"Failed: {each}\n" for each in found["failed"]]
        if found["left_out"]:
            parts.append(f"{found['left_out']} rows left out for lack of time.\n")
        if found["error"]:
            parts.append(f"Ended by {found['error']}\n")
        wrong += [f"{row['kernel']} is wrong: {row['case']}" for row in rows if row.get("passed") is False]
    parts.insert(0, markdown("Goals", goals(sections)))
    (folder / "results.json").write_text(json.dumps(sections, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text("\n".join(parts), encoding="utf-8")
    return wrong


def goals(sections: Mapping[str, Mapping[str, Any] | None]) -> list[Mapping[str, Any]]:
    """What was wanted beside what was found; None = it was not measured."""

    def shares(section: str, share: str, counts: Callable[[Mapping[str, Any]], bool]) -> list[float]:
        rows = (sections.get(section) or {"rows": ()})["rows"]
        return [row[share] for row in rows if row.get(share) is not None and counts(row)]

    attention = shares("attention", "of_copy", lambda row: int(row["batch"]) * int(row["context"]) >= LONG_TOKENS)
    products = shares("products", "of_product", lambda row: str(row["kind"]).startswith("fp8"))
    alone = shares("steps-bf16", "of_floor", lambda row: row["batch"] == 1)
    return [
        {"goal": "decode attention, of the copy's bytes/s, the least of long caches", "wanted": 0.85}
        | {"found": min(attention, default=None)},
        {"goal": "FP8 product, of the FP8 rate seen, the most", "wanted": 0.75, "found": max(products, default=None)},
        {"goal": "a sequence alone in bf16, of the memory's floor", "wanted": 0.7, "found": max(alone, default=None)},
    ]


if __name__ == "__main__":
    main()
