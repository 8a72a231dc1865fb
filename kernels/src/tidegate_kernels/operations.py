"""What a decoder's steps are computed with, as one value: plain torch here, Triton's kernels in `compiled`.

Signatures are those of `reference`. Owns no arithmetic; the engine's `transformer` calls what it is given.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tidegate_kernels import native, reference
from tidegate_kernels.weight import ExpertMatrices, Weight


@dataclass(frozen=True, slots=True)
class Operations:
    """One implementation of everything that a step does, but for the products, which are the weights' own."""

    laid_out: Callable[[Weight], Weight]
    """Brings a weight into the layout that its product is made with."""
    experts_laid_out: Callable[[Sequence[Weight]], ExpertMatrices]
    """The same of one matrix of every expert."""
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., Tensor]
    turn_and_store: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    activations: Mapping[str, Callable[[Tensor], Tensor]]
    """By the names that configurations have for them."""
    choose_tokens: Callable[..., Tensor] | None
    """None = the engine's sampler does all of it."""


TORCH = Operations(
    laid_out=native.laid_out,
    experts_laid_out=lambda weights: reference.ExpertsApart(tuple(map(native.laid_out, weights))),
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    turn_and_store=reference.turn_and_store,
    paged_attention=reference.paged_attention,
    activations={"silu": reference.silu_mul, "gelu_tanh": reference.gelu_mul},
    choose_tokens=None,
)
