"""What kernels take of each architecture: the table's figures against its limits, and against compiling again."""

import os
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="what is interpreted cannot be compiled"
)

import torch  # noqa: E402

import tidegate_kernels.aot_cases  # noqa: E402
from tidegate_kernels.aot import (  # noqa: E402
    SHARED_LIMITS,
    Resources,
    compile_case,
    legal_cases,
    read_table,
)
from tidegate_kernels.aot_cases import cases  # noqa: E402
from tidegate_kernels.float8 import FP8  # noqa: E402

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
TABLE = read_table()
CASES = cases()
SOME = [("store fp8 128", 90), ("decode int8 128", 80), ("scaled fp8 16", 89)]
ALL = sorted({(row.case, row.architecture) for row in TABLE})
WGMMA = {torch.bfloat16: "HGMMA", FP8: "QGMMA", torch.int8: "IGMMA"}
TCGEN05 = {torch.bfloat16: "UTCHMMA", FP8: "UTCQMMA", torch.int8: "UTCIMMA"}
MMA_SYNC = {torch.bfloat16: "HMMA", FP8: "QMMA", torch.int8: "IMMA"}


def expected_operations(row: Resources) -> str:
    """What wgmma, tcgen05 and mma.sync are in machine code; the first two begin at 64 rows."""
    case = CASES[row.case]
    if case.products is None or row.kernel == "combine_kernel":
        return "-"
    if case.is_wide and row.architecture in (90, 100):
        return (WGMMA if row.architecture == 90 else TCGEN05)[case.products]
    if case.products == FP8 and row.architecture in (90, 100):
        return "HMMA"  # their mma.sync has no FP8: codes are multiplied as fp16, which loses nothing
    return MMA_SYNC[case.products]


def test_the_table_has_every_case_on_every_architecture_that_it_is_legal_on() -> None:
    assert {(row.case, row.architecture) for row in TABLE} == set(legal_cases())


def test_every_kernel_of_the_package_has_a_case() -> None:
    source = Path(tidegate_kernels.aot_cases.__file__).parent
    written = {
        name for file in source.glob("*.py") for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M)
    }
    assert {row.kernel for row in TABLE} == written


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.case} {row.kernel} sm_{row.architecture}")
def test_kernels_spill_nothing_fit_shared_memory_and_use_the_matrix_units(row: Resources) -> None:
    assert row.spilled_bytes == 0
    assert row.shared_bytes <= SHARED_LIMITS[row.architecture]
    assert row.registers <= 255
    assert row.matrix_operations == expected_operations(row)


@pytest.mark.prove
@pytest.mark.parametrize(("case", "architecture"), ALL if PROVE else SOME)
def test_compiling_again_takes_what_the_table_says(case: str, architecture: int) -> None:
    expected = [row for row in TABLE if (row.case, row.architecture) == (case, architecture)]
    assert compile_case(case, architecture) == expected, (
        "kernels take other resources than kernels/resources.tsv says: "
        "if that is meant, rewrite it with `make resources`"
    )


def test_fp8_is_refused_at_compile_time_where_the_architecture_has_none() -> None:
    with pytest.raises(Exception, match="fp8e4nv"):
        compile_case("decode fp8 128", 80)
