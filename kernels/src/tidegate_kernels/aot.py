"""Compiles every kernel for every architecture without a GPU, and keeps the table of what they need there.

Cases (`aot_cases`) are calls of the launchers themselves, so what is compiled is what they would launch,
specialisations included. `python -m tidegate_kernels.aot` rewrites `kernels/resources.tsv`; tests compile again and
compare. Figures are of one version of Triton, whose ptxas is part of it; they say nothing about speed.
"""

import os

# As in production; Triton warns where it is left open.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tidegate_kernels.aot_cases import cases

SHARED_LIMITS = {90: 227 << 10, 89: 99 << 10, 100: 227 << 10, 120: 99 << 10, 80: 163 << 10}
"""Bytes of shared memory that one program may take, by architecture."""
FP8_ARCHITECTURES = (89, 90, 100, 120)
"""Those that convert from and to e4m3."""
MATRIX_OPERATIONS = ("UTCHMMA", "HGMMA", "HMMA", "UTCQMMA", "QGMMA", "QMMA", "UTCIMMA", "IGMMA", "IMMA")
TABLE_PATH = Path(__file__).parents[2] / "resources.tsv"


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes of an architecture."""

    case: str
    kernel: str
    architecture: int
    registers: int
    """Of a thread."""
    spilled_bytes: int
    shared_bytes: int
    matrix_operations: str
    """The families of matrix instructions in its machine code, joined by `+`."""


def compile_case(name: str, architecture: int) -> list[Resources]:
    """Compile what a case launches. Raises KeyError for a name that is none of `cases`."""
    call = cases()[name].call
    compiled: list[Any] = []
    run = JITFunction.run

    def record(self: Any, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        compiled.append(run(self, *arguments, grid=grid, warmup=True, **options))

    with (
        mock.patch.object(driver, "_active", absent_driver(architecture)),
        mock.patch.object(JITFunction, "run", record),
    ):
        call()
    return [_resources(name, architecture, kernel) for kernel in compiled]


def compile_all() -> Iterator[Resources]:
    """Every case on every architecture that it is legal on."""
    for name, architecture in legal_cases():
        yield from compile_case(name, architecture)


def legal_cases() -> list[tuple[str, int]]:
    """Every case's name with every architecture that has what it needs."""
    return [
        (name, architecture)
        for architecture in SHARED_LIMITS
        for name, case in cases().items()
        if architecture in FP8_ARCHITECTURES or not case.needs_fp8
    ]


def read_table() -> list[Resources]:
    """The table as it was written last. Raises ValueError where another version of Triton wrote it."""
    version, _, *rows = TABLE_PATH.read_text(encoding="utf-8").splitlines()
    if version != _version_line():
        raise ValueError(f"{TABLE_PATH.name} is of {version[2:]}, and this is {_version_line()[2:]}: rewrite it")
    return [
        Resources(case, kernel, int(architecture), int(registers), int(spilled), int(shared), operations)
        for case, kernel, architecture, registers, spilled, shared, operations in (row.split("\t") for row in rows)
    ]


def write_table() -> None:
    header = "\t".join(field.name for field in fields(Resources))
    rows = []
    for resources in compile_all():
        rows.append("\t".join(map(str, astuple(resources))))
        print(rows[-1], flush=True)
    TABLE_PATH.write_text("\n".join((_version_line(), header, *rows)) + "\n", encoding="utf-8")


def absent_driver(architecture: int) -> Any:
    """What Triton asks of a GPU of this architecture, 90 for sm_90, where there is none."""
    return _Absent(architecture)


class _Absent:
    """A driver of a GPU that is not there: enough of one for what compiles, and no more."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        # Compiled kernels are kept by device.
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        return 0


def _resources(case: str, architecture: int, kernel: Any) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        code = _cuobjdump("-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump tells nothing of {case} on sm_{architecture}: {usage}")
    operations = [name for name in MATRIX_OPERATIONS if re.search(rf"\s{name}\b", code)]
    return Resources(
        case=case,
        kernel=kernel.name,
        architecture=architecture,
        registers=int(found[1]),
        # What is spilled lies on the stack.
        spilled_bytes=int(found[2]) + int(found[4]),
        shared_bytes=kernel.metadata.shared,
        matrix_operations="+".join(operations) or "-",
    )


def _cuobjdump(*arguments: str) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _version_line() -> str:
    return f"# triton {triton.__version__}"


if __name__ == "__main__":
    write_table()
