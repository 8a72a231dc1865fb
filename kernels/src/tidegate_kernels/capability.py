"""Which types the matrix units and conversions of a GPU's architecture have, and what to hold KV cache and weights in
otherwise.

Pure: architectures are CUDA's compute capabilities, `(8, 9)` for sm_89. Callers ask before they allocate a cache or
launch a kernel, since a kernel that is not legal fails only when it is compiled.
"""

import re

import torch

from tidegate_kernels.float8 import FP8

FIRST_WITH = {torch.bfloat16: (8, 0), torch.int8: (7, 5), torch.float16: (7, 0), FP8: (8, 9)}
"""The first architecture that has a type: its conversions, and products that it goes into."""
INT4_GROUP_MULTIPLE = 32
"""Columns that the kernel's layout of four bits has a scale for."""


def has_type(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether kernels may use `dtype`, one of FIRST_WITH."""
    return capability >= FIRST_WITH[dtype]


def kv_type_for(wanted: torch.dtype, capability: tuple[int, int]) -> tuple[torch.dtype, str | None]:
    """The type that a KV cache is held in on this architecture, and, where it is not the one asked for, why.

    FP8 falls back to bf16, not INT8: keys with a few large channels lose most of their meaning in INT8, and only the
    user can know the model. Raises ValueError where no kernel of ours runs at all.
    """
    _check(capability)
    if wanted == torch.float32:
        return torch.bfloat16, "the kernels multiply no fp32 keys: the KV cache is held in bf16"
    if has_type(wanted, capability):
        return wanted, None
    return torch.bfloat16, (
        f"an FP8 KV cache needs {_name(FIRST_WITH[wanted])} or newer, and this GPU is {_name(capability)}: the cache "
        "is held in bf16 and takes twice the memory; --kv-cache-dtype int8 takes as little as FP8 would"
    )


def weight_precision_for(wanted: str, capability: tuple[int, int]) -> tuple[str, str | None]:
    """The precision that a weight is multiplied in here, and, where it is not the one that it has, why.

    Names are those of `Weight.precision`. What has no kernel is dequantised to bf16 when it is loaded: every
    architecture multiplies that, and no weight changes by more than bf16's rounding. Raises ValueError where no kernel
    of ours runs at all, or a name is none.
    """
    _check(capability)
    if wanted in ("bfloat16", "float16", "int8"):
        return wanted, None
    if wanted in ("fp8", "fp8-block128"):
        if has_type(FP8, capability):
            return wanted, None
        return "bfloat16", (
            f"FP8 weights need {_name(FIRST_WITH[FP8])} or newer, and this GPU is {_name(capability)}: they are held "
            "in bf16 and take twice the memory; a checkpoint in int8 or int4 takes no more than FP8 would"
        )
    if wanted == "float32":
        return "bfloat16", "the kernels multiply no fp32 weights: they are held in bf16; --dtype bfloat16 says so"
    grouped = re.fullmatch(r"int(\d)-g(\d+)", wanted)
    if grouped is None and not re.fullmatch(r"I?Q\d\w*", wanted):
        raise ValueError(f"{wanted!r} is no precision that weights are held in")
    if grouped is not None and int(grouped[1]) == 4 and int(grouped[2]) % INT4_GROUP_MULTIPLE == 0:
        return wanted, None
    return "bfloat16", (
        f"weights in {wanted} have no kernel: they are held in bf16 and take up to four times the memory; there is one "
        f"for four bits in groups of a multiple of {INT4_GROUP_MULTIPLE}"
    )


def _check(capability: tuple[int, int]) -> None:
    if not has_type(torch.bfloat16, capability):
        raise ValueError(f"{_name(capability)} has no bf16, which the kernels multiply in; they need sm_80 or newer")


def _name(capability: tuple[int, int]) -> str:
    return "sm_{}{}".format(*capability)
