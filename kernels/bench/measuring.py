"""What the GPU measurements share: where they run, how a call is timed, until when, and the rows that they leave.

Rows are printed and written as they come, so that what a section was killed for is lost and nothing before it. Nothing
here knows what is measured.
"""

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

Row = Mapping[str, Any]
FLUSHED_BYTES = 256 << 20
"""Written before each call that shall find nothing in the L2 cache: five times an H200's."""


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU, or, to rehearse, a CPU on which kernels are interpreted, with tiny shapes."""

    device: torch.device
    rehearsed: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of activations: the interpreter multiplies bf16 wrongly."""
        return torch.float32 if self.rehearsed else torch.bfloat16

    @property
    def architecture(self) -> int:
        """90 for sm_90; 0 of the interpreter."""
        if self.rehearsed:
            return 0
        major, minor = torch.cuda.get_device_capability(self.device)
        return 10 * major + minor

    def describe(self) -> str:
        if self.rehearsed:
            return "a CPU, kernels interpreted: code paths only, the figures mean nothing"
        return f"{torch.cuda.get_device_name(self.device)}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def place_of(*, rehearse: bool) -> Place:
    return Place(torch.device("cpu" if rehearse else "cuda"), rehearse)


class Timer:
    """Times calls on the GPU with events; on a CPU by the clock, once. The L2 cache is emptied where asked for."""

    def __init__(self, place: Place) -> None:
        self._place = place
        size = 1 if place.rehearsed else FLUSHED_BYTES
        self._flushed = torch.empty(size, dtype=torch.int8, device=place.device)

    def seconds(self, call: Callable[[], object], *, repeats: int = 20, cold: bool = True) -> float:
        """The median of `repeats` calls, after two that compile and warm up."""
        return median(self.samples(call, repeats=repeats, cold=cold))

    def samples(self, call: Callable[[], object], *, repeats: int = 20, cold: bool = True) -> list[float]:
        if self._place.rehearsed:
            started = time.perf_counter()
            call()
            return [time.perf_counter() - started]
        for _ in range(2):
            call()
        found = []
        for _ in range(repeats):
            if cold:
                self._flushed.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1000)
        return found


@dataclass(slots=True)
class Report:
    """A section's rows; `deadline` is of `time.monotonic`."""

    section: str
    folder: Path
    deadline: float
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """What `guarded` caught."""
    left_out: int = 0
    error: str | None = None

    def has_time(self) -> bool:
        """Whether there is time for another row; if not, it counts as left out."""
        if time.monotonic() < self.deadline:
            return True
        self.left_out += 1
        return False

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Whatever fails in it is reported, and the rows after it are measured all the same."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever it is, it is one row's
            traceback.print_exc()
            self.failed.append(f"{what}: {type(error).__name__}: {error}"[:300])
            print(f"  failed: {self.failed[-1]}", flush=True)
            self.write()

    def add(self, **values: Any) -> None:
        self.rows.append(values)
        print("  " + "  ".join(f"{name}={written(value)}" for name, value in values.items()), flush=True)
        self.write()

    def write(self) -> None:
        found = {
            "section": self.section,
            "rows": self.rows,
            "failed": self.failed,
            "left_out": self.left_out,
            "error": self.error,
        }
        path_of(self.folder, self.section).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def path_of(folder: Path, section: str) -> Path:
    return folder / f"{section}.json"


def read_section(folder: Path, section: str) -> dict[str, Any] | None:
    """What a section wrote; None where it wrote nothing."""
    path = path_of(folder, section)
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def measured(folder: Path, name: str) -> float | None:
    """A rate that the section `rates` found; None where it did not."""
    found = read_section(folder, "rates")
    return next((row["value"] for row in found["rows"] if row["rate"] == name), None) if found else None


def share_of(value: float, whole: float | None) -> float | None:
    return None if whole is None else value / whole


def written(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def markdown(title: str, rows: list[Row]) -> str:
    """A table; columns are those of all rows, in the order in which they first come."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"## {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(written(row.get(name)) for name in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"
