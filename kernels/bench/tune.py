"""Tries other cuts of the products and writes the table of launches with what was fastest here, labelled measured.

The table goes to the results' folder; who likes it puts it in the place of `launches.tsv` in the package. Called by
`h200` where it is asked for.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from itertools import product
from unittest import mock

import torch
from torch import Tensor

from measuring import Place, Report, Timer
from numerics import relative_error
from speed import sizes_at
from tidegate_kernels import block_scaled_gemm, int4_gemm, quantise, scaled_gemm
from tidegate_kernels.float8 import FP8
from tidegate_kernels.launches import TABLE_PATH, Choice, Tiles, read_choices, tiles_of
from tidegate_kernels.quantised import FP8_BLOCK, quantise_fp8, quantise_fp8_blocks, quantise_groups
from tidegate_kernels.reference import Code

MODULES = {"scaled": scaled_gemm, "block_scaled": block_scaled_gemm, "int4": int4_gemm}
"""`grouped` is left as it is: which experts get rows decides there."""
ROWS = {16: 16, 32: 32, 64: 64, None: 512}
"""Of activations that a class of rows is tried with."""
MOST_DIFFERENCE = 0.01


def run(place: Place, report: Report) -> None:
    """Each class of rows of the current architecture, by the sum over the products of a layer."""
    timer, found = Timer(place), []
    for kernel in MODULES if not place.rehearsed else ("scaled",):
        classes = [each.rows_at_most for each in _now(kernel, place.architecture)]
        for rows_at_most in classes if not place.rehearsed else classes[:1]:
            rows = 2 if place.rehearsed else ROWS[rows_at_most]
            now = tiles_of(kernel, rows=rows, architecture=place.architecture)
            calls = [_call(kernel, place, shape, rows) for shape in sizes_at(place).products.values()]
            best, seconds = now, _seconds(kernel, now, calls, timer)
            before, expected = seconds, calls[0]()
            for tiles in _candidates(now, short=place.rehearsed):
                if not report.has_time():
                    break
                tried = _seconds(kernel, tiles, calls, timer)
                if tried < seconds and _is_right(kernel, tiles, calls[0], expected):
                    best, seconds = tiles, tried
            if math.isinf(seconds):
                continue
            found.append(Choice(kernel, place.architecture, rows_at_most, best, "measured"))
            report.add(
                kernel=kernel, rows=rows, tiles=str(astuple(best)), microseconds=seconds * 1e6, of=seconds / before
            )
    _write(report, found)


def _now(kernel: str, architecture: int) -> list[Choice]:
    choices = [each for each in read_choices(TABLE_PATH.read_text(encoding="utf-8")) if each.kernel == kernel]
    own = [each for each in choices if each.architecture == architecture]
    return own or [each for each in choices if each.architecture == 0]


def _candidates(now: Tiles, *, short: bool) -> Iterator[Tiles]:
    """DEPTH stays: scales or the layout hang on it."""
    columns = (32, 64) if short else (32, 64, 128)
    for width, warps, stages in product(columns, (4,) if short else (4, 8), (3,) if short else (2, 3, 4, 5)):
        tiles = replace(now, columns=width, warps=warps, stages=stages)
        if tiles != now:
            yield tiles


def _call(kernel: str, place: Place, shape: tuple[int, int], rows: int) -> Callable[[], Tensor]:
    out, depth = shape
    x = torch.randn(rows, depth, device=place.device).to(place.dtype)
    values = torch.randn(out, depth, device=place.device) * depth**-0.5
    if kernel == "scaled":
        fp8, codes = quantise_fp8(values), quantise.quantise_rows(x, Code(FP8))
        return lambda: scaled_gemm.scaled_linear(codes, fp8, dtype=place.dtype, library=False)
    if kernel == "block_scaled":
        blocks, in_groups = quantise_fp8_blocks(values), quantise.quantise_rows(x, Code(FP8, FP8_BLOCK))
        return lambda: block_scaled_gemm.scaled_linear(in_groups, blocks, dtype=place.dtype)
    groups = int4_gemm.repack(quantise_groups(values, bits=4, group=64))
    return lambda: int4_gemm.int4_linear(x, groups)


def _seconds(kernel: str, tiles: Tiles, calls: list[Callable[[], Tensor]], timer: Timer) -> float:
    """Of all calls; infinite where the tiles do not fit the GPU."""
    with mock.patch.object(MODULES[kernel], "tiles_for", return_value=tiles):
        try:
            return sum(timer.seconds(call, repeats=10) for call in calls)
        except Exception as error:  # noqa: BLE001  # too much shared memory, and whatever the compiler refuses
            print(f"  {kernel} {astuple(tiles)}: {type(error).__name__}", flush=True)
            return math.inf


def _is_right(kernel: str, tiles: Tiles, call: Callable[[], Tensor], expected: Tensor) -> bool:
    with mock.patch.object(MODULES[kernel], "tiles_for", return_value=tiles):
        return relative_error(call(), expected.cpu()) < MOST_DIFFERENCE


def _write(report: Report, found: list[Choice]) -> None:
    """The table with these rows, and of kernels that have some now, the architecture's other rows as well."""
    text = TABLE_PATH.read_text(encoding="utf-8")
    places = {(each.kernel, each.architecture, each.rows_at_most): each for each in read_choices(text)}
    for kernel, architecture in {(each.kernel, each.architecture) for each in found}:
        for each in _now(kernel, architecture):
            places.setdefault((kernel, architecture, each.rows_at_most), replace(each, architecture=architecture))
    places |= {(each.kernel, each.architecture, each.rows_at_most): each for each in found}
    lines = [text.splitlines()[0]]
    for each in places.values():
        rows = "any" if each.rows_at_most is None else each.rows_at_most
        lines.append("\t".join(map(str, (each.kernel, each.architecture, rows, *astuple(each.tiles), each.source))))
    (report.folder / TABLE_PATH.name).write_text("\n".join(lines) + "\n", encoding="utf-8")
