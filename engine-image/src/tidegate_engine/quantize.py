"""Weights from the precision that a checkpoint has them in to the one asked for, one tensor at a time.

Knows no file and no flag: `precision` says what is wanted, the readers call `to_precision` for each matrix as they read
it, so that no more than one is ever held in both precisions.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tidegate_engine.precision import STORED, grouping
from tidegate_engine.weights import ModelError
from tidegate_kernels.quantised import (
    FP8_BLOCK,
    quantise_fp8,
    quantise_fp8_blocks,
    quantise_groups,
    quantise_int8,
)
from tidegate_kernels.weight import Dense, Weight, concat_rows

CHUNK_VALUES = 1 << 20
"""Values brought to fp32 at once: a vocabulary's matrix is not inflated as a whole."""
_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def to_precision(name: str, weight: Weight, wanted: str) -> Weight:
    """The parameter `name` in the precision `wanted`; the same weight where that is how it is stored."""
    if wanted == STORED:
        return weight
    if dtype := _FLOATS.get(wanted):
        return _to_float(weight, dtype)
    if weight.precision == wanted:
        return weight
    rows, columns = weight.shape
    quantise = _quantiser(name, columns, wanted)
    step = _rows_at_once(columns)
    return concat_rows([quantise(weight.rows(first, min(first + step, rows))) for first in range(0, rows, step)])


def _to_float(weight: Weight, dtype: torch.dtype) -> Weight:
    if isinstance(weight, Dense):
        return Dense(weight.values.to(dtype))
    rows, columns = weight.shape
    step = _rows_at_once(columns)
    values = torch.empty(rows, columns, dtype=dtype)
    for first in range(0, rows, step):
        end = min(first + step, rows)
        values[first:end] = weight.rows(first, end)
    return Dense(values)


def _rows_at_once(columns: int) -> int:
    """A multiple of the rows that share a scale in FP8's blocks."""
    return max(1, CHUNK_VALUES // columns // FP8_BLOCK) * FP8_BLOCK


def _quantiser(name: str, columns: int, wanted: str) -> Callable[[Tensor], Weight]:
    match wanted:
        case "fp8":
            return quantise_fp8
        case "fp8-block128":
            return quantise_fp8_blocks
        case "int8":
            return quantise_int8
    groups = grouping(wanted, columns)
    if groups is None:
        raise ModelError(
            "PrecisionUnsupported",
            f"{name} has {columns} columns, which the groups of {wanted} do not divide; choose other groups",
        )
    bits, group = groups
    return partial(quantise_groups, bits=bits, group=group)
