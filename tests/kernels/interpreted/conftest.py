"""Kernels under the interpreter, in poisoned memory.

What the interpreter gets wrong, and what is done about it: products of bf16 are garbage, so kernels multiply in fp32
under it; fp32 stored as bf16 is cut, not rounded, so outputs are compared in fp32; its cast to FP8 does not round to
nearest, so kernels round before it.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from tidegate_kernels.float8 import FP8
from tidegate_kernels.reference import Cache


@pytest.fixture(autouse=True, scope="session")
def _poisoned() -> Iterator[None]:
    """What `torch.empty` returns holds NaN (the largest integer): nothing that was not written passes for a result."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def new_cache() -> Callable[..., Cache]:
    """Makes a cache `[blocks, K, block tokens, D]` that holds `fill` everywhere, its scales too."""

    def make(shape: tuple[int, int, int, int], dtype: torch.dtype, *, fill: float = 0.0) -> Cache:
        keys, values = (torch.full(shape, fill, dtype=torch.float32).to(dtype) for _ in range(2))
        if dtype not in (FP8, torch.int8):
            return Cache(keys, values)
        return Cache(keys, values, torch.full(shape[:3], fill), torch.full(shape[:3], fill))

    return make
