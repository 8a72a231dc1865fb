"""Compiles every kernel for every architecture without a GPU, and keeps the table of what they need there.

Cases are calls of the launchers themselves, so what is compiled is what they would launch, specialisations included.
`python -m tidegate_kernels.aot` rewrites `kernels/resources.tsv`; tests compile again and compare. Figures are of one
version of Triton, whose ptxas is part of it; they say nothing about speed.
"""

import os

# As in production; Triton warns where it is left open.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tidegate_kernels.float8 import FP8
from tidegate_kernels.kv_store import store_kv
from tidegate_kernels.paged_attention import paged_attention
from tidegate_kernels.reference import AttentionRule, Cache, ragged_batch

SHARED_LIMITS = {90: 227 << 10, 89: 99 << 10, 100: 227 << 10, 120: 99 << 10, 80: 163 << 10}
"""Bytes of shared memory that one program may take, by architecture."""
FP8_ARCHITECTURES = (89, 90, 100, 120)
"""Those that convert from and to e4m3."""
MATRIX_OPERATIONS = ("UTCHMMA", "HGMMA", "HMMA", "UTCQMMA", "QGMMA", "QMMA", "UTCIMMA", "IGMMA", "IMMA")
TABLE_PATH = Path(__file__).parents[2] / "resources.tsv"
KV_TYPES = {"bf16": torch.bfloat16, "fp8": FP8, "int8": torch.int8}


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


def cases() -> dict[str, tuple[bool, Callable[[], object]]]:
    """What is compiled, by name: whether it needs FP8, and a call of a launcher."""
    found: dict[str, tuple[bool, Callable[[], object]]] = {}
    for name, dtype in KV_TYPES.items():
        is_fp8 = dtype == FP8
        found[f"store {name} 128"] = is_fp8, _store(8, 128, dtype)
        found[f"decode {name} 128"] = is_fp8, _attend(1, 128, dtype)
        found[f"prefill {name} 128"] = is_fp8, _attend(512, 128, dtype)
    found["store bf16 256"] = False, _store(16, 256, torch.bfloat16)
    found["decode fp8 256"] = True, _attend(1, 256, FP8)
    found["prefill bf16 256"] = False, _attend(512, 256, torch.bfloat16)
    bent = AttentionRule(0.1, window=4096, soft_cap=50.0, sinks=torch.zeros(32))
    found["decode int8 96 window cap sinks"] = False, _attend(1, 96, torch.int8, rule=bent)
    found["prefill bf16 96 window cap sinks"] = False, _attend(512, 96, torch.bfloat16, rule=bent)
    return found


def compile_case(name: str, architecture: int) -> list[Resources]:
    """Compile what a case launches. Raises KeyError for a name that is none of `cases`."""
    _, call = cases()[name]
    compiled: list[Any] = []
    run = JITFunction.run

    def record(self: Any, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        compiled.append(run(self, *arguments, grid=grid, warmup=True, **options))

    with mock.patch.object(driver, "_active", _Absent(architecture)), mock.patch.object(JITFunction, "run", record):
        call()
    return [_resources(name, architecture, kernel) for kernel in compiled]


def compile_all() -> Iterator[Resources]:
    """Every case on every architecture that it is legal on."""
    for architecture in SHARED_LIMITS:
        for name, (needs_fp8, _) in cases().items():
            if architecture in FP8_ARCHITECTURES or not needs_fp8:
                yield from compile_case(name, architecture)


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


def _cache(heads: int, size: int, dtype: torch.dtype) -> Cache:
    keys = torch.empty(4, heads, 16, size, dtype=dtype)
    scales = torch.empty(4, heads, 16) if dtype.itemsize == 1 else None
    return Cache(keys, keys.clone(), scales, None if scales is None else scales.clone())


def _store(heads: int, size: int, dtype: torch.dtype) -> Callable[[], None]:
    def call() -> None:
        new = torch.empty(4, heads, size, dtype=torch.bfloat16)
        store_kv(new, new, _cache(heads, size, dtype), torch.zeros(4, dtype=torch.int64))

    return call


def _attend(new: int, size: int, dtype: torch.dtype, *, rule: AttentionRule | None = None) -> Callable[[], Tensor]:
    """32 heads over 8; decodes with their keys split, prefills without."""

    def call() -> Tensor:
        cache = _cache(8, size, dtype)
        batch = ragged_batch([new], [new], [[0] * -(-new // 16)], cache=cache)
        query = torch.empty(new, 32, size, dtype=torch.bfloat16)
        return paged_attention(query, cache, batch, rule or AttentionRule(0.1), splits=8 if new == 1 else 1)

    return call


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
