"""Where a model is computed: in host memory or on a GPU; how much memory is there, and what it holds in another form.

Owns no model. Called by `torch_runner` when it loads one. What an architecture has is `capability`'s to say.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tidegate_engine.cgroup import Machine
from tidegate_engine.weights import ModelError
from tidegate_kernels.capability import kv_type_for, weight_precision_for
from tidegate_kernels.operations import TORCH, Operations
from tidegate_kernels.weight import Dense, Stacked, Weight

DEVICES = ("cpu", "cuda")
KERNELS = ("auto", "torch", "triton")
Architecture = tuple[int, int]
Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """A device and the operations that are computed there."""

    device: torch.device
    operations: Operations
    architecture: Architecture | None
    """CUDA's compute capability, `(9, 0)`; None = nothing is missing here, as on a CPU."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def product(self) -> str | None:
        """The GPU's name; None on a CPU."""
        return torch.cuda.get_device_name(self.device) if self.is_gpu else None

    def available_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0]) if self.is_gpu else Machine().available_bytes()

    def kv_type(self, wanted: torch.dtype) -> torch.dtype:
        """What a KV cache is held in here; a warning says why, where it is not `wanted`. Raises ModelError."""
        if self.architecture is None:
            return wanted
        found, reason = _ask(lambda own: kv_type_for(wanted, own), self.architecture)
        if reason is not None:
            logger.warning("%s", reason)
        return found

    def fit(self, parameters: dict[str, Weight]) -> None:
        """Bring the parameters here, those in a precision that this architecture does not multiply in bf16.

        A warning says why, once for each precision. Raises ModelError where no kernel of ours runs at all.
        """
        reasons: dict[str, None] = {}
        for name in list(parameters):
            weight = parameters.pop(name)
            if self.architecture is not None:
                weight, reason = fitted(weight, self.architecture)
                reasons |= {} if reason is None else {reason: None}
            parameters[name] = weight if self.device.type == "cpu" else moved(weight, self.device)
        for reason in reasons:
            logger.warning("%s", reason)


def place_of(name: str, kernels: str, *, rank: int, ranks: int, architecture: Architecture | None) -> Place:
    """The place of one of several ranks. `architecture` None = that of the GPU.

    Raises ModelError for a choice that there is not, or that cannot run here.
    """
    if name not in DEVICES:
        raise ModelError("DeviceUnknown", f"there is no device {name!r}; choose {' or '.join(DEVICES)}")
    if name == "cpu":
        return Place(torch.device("cpu"), operations_of(kernels, is_gpu=False), architecture)
    count = torch.cuda.device_count()
    if count < ranks:
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        raise ModelError("DeviceMissing", f"{ranks} GPUs are asked for, and torch finds {count} here; {built}")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return Place(device, operations_of(kernels, is_gpu=True), architecture or torch.cuda.get_device_capability(device))


def operations_of(kernels: str, *, is_gpu: bool) -> Operations:
    """What steps are computed with. Raises ModelError for a choice that there is not, or that cannot run there."""
    if kernels not in KERNELS:
        raise ModelError("KernelsUnknown", f"there are no kernels called {kernels!r}; choose auto, torch or triton")
    if kernels == "torch" and is_gpu:
        raise ModelError("KernelsNeedCpu", "torch's own operations are the CPU's path; choose triton on a GPU")
    if not is_gpu and kernels != "triton":
        return TORCH
    if not is_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ModelError(
            "KernelsNeedGpu",
            "compiled kernels cannot read host memory; choose torch, a GPU by --device cuda, or set TRITON_INTERPRET=1 "
            "to have them interpreted",
        )
    # Triton takes a second to import, and is not there in images without a GPU.
    from tidegate_kernels.compiled import TRITON

    return TRITON


def fitted(weight: Weight, architecture: Architecture) -> tuple[Weight, str | None]:
    """The weight as this architecture can multiply it, and, where that is not as it was, why. Raises ModelError."""
    if isinstance(weight, Stacked):
        parts = [fitted(part, architecture) for part in weight.parts]
        return Stacked(tuple(part for part, _ in parts)), next((why for _, why in parts if why is not None), None)
    if isinstance(weight, Dense) and weight.values.dim() == 1:
        return weight, None  # a norm or a bias
    found, reason = _ask(lambda own: weight_precision_for(weight.precision, own), architecture)
    return (weight, None) if reason is None else (Dense(weight.dequantised(getattr(torch, found))), reason)


def _ask(question: Callable[[Architecture], Answer], architecture: Architecture) -> Answer:
    try:
        return question(architecture)
    except ValueError as error:
        raise ModelError("GpuUnsupported", f"this GPU cannot be computed on: {error}") from error


def moved(weight: Weight, device: torch.device) -> Weight:
    """The same weight with its tensors on `device`."""

    def there(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        if isinstance(value, Weight):
            return moved(value, device)
        return tuple(map(there, value)) if isinstance(value, tuple) else value

    own: Any = weight  # every weight is a dataclass
    return replace(own, **{field.name: there(getattr(own, field.name)) for field in fields(own)})  # type: ignore[no-any-return]
