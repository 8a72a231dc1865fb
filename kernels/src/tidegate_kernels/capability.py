"""Which types the matrix units and conversions of a GPU's architecture have, and what to hold a KV cache in otherwise.

Pure: architectures are CUDA's compute capabilities, `(8, 9)` for sm_89. Callers ask before they allocate a cache or
launch a kernel, since a kernel that is not legal fails only when it is compiled.
"""

import torch

from tidegate_kernels.float8 import FP8

FIRST_WITH = {torch.bfloat16: (8, 0), torch.int8: (7, 5), torch.float16: (7, 0), FP8: (8, 9)}
"""The first architecture that has a type: its conversions, and products that it goes into."""


def has_type(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether kernels may use `dtype`, one of FIRST_WITH."""
    return capability >= FIRST_WITH[dtype]


def kv_type_for(wanted: torch.dtype, capability: tuple[int, int]) -> tuple[torch.dtype, str | None]:
    """The type that a KV cache is held in on this architecture, and, where it is not the one asked for, why.

    FP8 falls back to bf16, not INT8: keys with a few large channels lose most of their meaning in INT8, and only the
    user can know the model. Raises ValueError where no kernel of ours runs at all.
    """
    name = "sm_{}{}".format(*capability)
    if not has_type(torch.bfloat16, capability):
        raise ValueError(f"{name} has no bf16, which the kernels multiply in; they need sm_80 or newer")
    if has_type(wanted, capability):
        return wanted, None
    first = "sm_{}{}".format(*FIRST_WITH[wanted])
    return torch.bfloat16, (
        f"an FP8 KV cache needs {first} or newer, and this GPU is {name}: the cache is held in bf16 and takes twice "
        "the memory; --kv-cache-dtype int8 takes as little as FP8 would"
    )
