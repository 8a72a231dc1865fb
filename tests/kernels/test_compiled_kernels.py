"""What kernels take of each architecture: the table's figures against its limits, and against compiling again."""

import os

import pytest

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="what is interpreted cannot be compiled"
)

from tidegate_kernels.aot import (  # noqa: E402
    FP8_ARCHITECTURES,
    SHARED_LIMITS,
    Resources,
    cases,
    compile_case,
    read_table,
)

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
TABLE = read_table()
SOME = [("store fp8 128", 90), ("decode int8 128", 80)]
ALL = sorted({(row.case, row.architecture) for row in TABLE})


def expected_operations(row: Resources) -> str:
    """mma.sync is HMMA in machine code, wgmma HGMMA, tcgen05 UTCHMMA; the latter two begin at 64 rows."""
    if row.kernel != "attend_kernel":
        return "-"
    wide = {90: "HGMMA", 100: "UTCHMMA"}
    return wide.get(row.architecture, "HMMA") if row.case.startswith("prefill") else "HMMA"


def test_the_table_has_every_case_on_every_architecture_that_it_is_legal_on() -> None:
    legal = {
        (name, architecture)
        for name, (needs_fp8, _) in cases().items()
        for architecture in SHARED_LIMITS
        if architecture in FP8_ARCHITECTURES or not needs_fp8
    }
    assert {(row.case, row.architecture) for row in TABLE} == legal


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
