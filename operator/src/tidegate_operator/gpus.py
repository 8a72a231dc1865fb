"""What GPUs are: memory, bandwidth, arithmetic by precision, links, and a price that is only a default.

Pure data, and the match of a name (`nvidia.com/gpu.product` of a node, `gpu_product` of an engine, or what a user
types) to a row. Called by `prior`, `plan` and `status`. Nothing here is measured; `prior` says what is reached of it.

Sources: NVIDIA's data sheets of each product, dense figures (those with sparsity halved); memory as the driver reports
it; links, and the B200, as in aiconfigurator's system files (Apache-2.0). A precision that is absent does not exist in
the tensor cores: bf16 before Ampere, fp8 before Ada and Hopper, int4 on Hopper and later, fp4 before Blackwell.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tidegate_operator.observation import GpuPrice

MIB = 1 << 20
TERA = 1e12
PRICES_OF = "2026-05"
"""When the default prices were looked up: on demand, by the hour, at rental clouds. The same GPU cost up to 2.5 times
as much elsewhere in that month (an H100 from 1.99 to 5.00 USD), so they compare GPUs and make no bill."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One product."""

    name: str
    """What users type, and what stands in tables."""
    product: str
    """A regular expression for all of a normalised product name: lower case, words parted by single hyphens."""
    architecture: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    flops: Mapping[str, float]
    """Dense operations a second by precision: fp16, bf16, fp8, int8, int4, fp4."""
    link_bytes_per_second: float
    """To another GPU of the node, one direction."""
    power_limited: bool
    """A card whose power does not suffice for the clock that the data sheet counts with."""
    price_per_hour: float | None
    """US dollars, `PRICES_OF`; None = no price is known."""
    gpus_per_node: int = 8

    def has(self, precision: str) -> bool:
        """Whether tensor cores multiply in this precision; every GPU does fp32, without them."""
        return precision == "fp32" or precision in self.flops


_PCIE_4, _PCIE_5 = 32e9, 64e9
_AMPERE, _ADA, _HOPPER, _BLACKWELL = "Ampere", "Ada", "Hopper", "Blackwell"


def _tera(**precisions: float) -> dict[str, float]:
    return {name: value * TERA for name, value in precisions.items()}


def _ampere(half: float) -> dict[str, float]:
    return _tera(fp16=half, bf16=half, int8=2 * half, int4=4 * half)


def _ada(half: float, eight: float, int4: float) -> dict[str, float]:
    return _tera(fp16=half, bf16=half, fp8=eight, int8=eight, int4=int4)


def _hopper(half: float) -> dict[str, float]:
    return _tera(fp16=half, bf16=half, fp8=2 * half, int8=2 * half)


def _blackwell(half: float, fp4: float) -> dict[str, float]:
    return _tera(fp16=half, bf16=half, fp8=2 * half, int8=2 * half, fp4=fp4)


# With the accumulation in fp32 that models need, GeForce cards multiply floats half as fast as the data sheet's largest
# figures; whole numbers are not concerned.
_GEFORCE_4090 = _tera(fp16=165, bf16=165, fp8=330, int8=661, int4=1321)
_GEFORCE_5090 = _tera(fp16=210, bf16=210, fp8=419, int8=838, fp4=1676)

GPUS: tuple[Gpu, ...] = (
    Gpu("T4", "tesla-t4|t4", "Turing", 15_360 * MIB, 0.320e12, _tera(fp16=65, int8=130, int4=260), 16e9, True, 0.35),
    Gpu("A10G", "a10g", _AMPERE, 23_028 * MIB, 0.600e12, _ampere(70), _PCIE_4, True, 1.01),
    Gpu("A10", "a10", _AMPERE, 23_028 * MIB, 0.600e12, _ampere(125), _PCIE_4, True, 0.75),
    Gpu("L4", "l4", _ADA, 23_034 * MIB, 0.300e12, _ada(121, 242, 485), _PCIE_4, True, 0.44),
    Gpu("RTX 4090", "(geforce-)?rtx-4090", _ADA, 24_564 * MIB, 1.008e12, _GEFORCE_4090, _PCIE_4, False, 0.60),
    Gpu(
        "RTX 5090",
        "(geforce-)?rtx-5090",
        _BLACKWELL,
        32_607 * MIB,
        1.792e12,
        _GEFORCE_5090,
        _PCIE_5,
        False,
        0.89,
    ),
    Gpu("A40", "a40", _AMPERE, 46_068 * MIB, 0.696e12, _ampere(150), _PCIE_4, True, 0.40),
    Gpu("L40S", "l40s", _ADA, 46_068 * MIB, 0.864e12, _ada(362, 733, 733), _PCIE_4, True, 0.86),
    Gpu(
        "RTX PRO 6000",
        "rtx-pro-6000(-blackwell)?(-(server|workstation|max-q-workstation)(-edition)?)?",
        _BLACKWELL,
        97_887 * MIB,
        1.792e12,
        _blackwell(504, 2015),
        _PCIE_5,
        False,
        1.84,
    ),
    Gpu("A100 40GB", "a100-(sxm4|pcie|pci)-40gb", _AMPERE, 40_960 * MIB, 1.555e12, _ampere(312), 300e9, False, 1.29),
    Gpu(
        "A100 80GB",
        "a100(-(sxm4|pcie|pci))?(-80gb)?(-pcie)?",
        _AMPERE,
        81_920 * MIB,
        2.039e12,
        _ampere(312),
        300e9,
        False,
        1.49,
    ),
    Gpu("H100 PCIe", "h100-pcie(-80gb)?", _HOPPER, 81_559 * MIB, 2.000e12, _hopper(756), _PCIE_5, True, 2.39),
    Gpu("H100 NVL", "h100-nvl(-94gb)?", _HOPPER, 95_830 * MIB, 3.938e12, _hopper(835), 300e9, True, 2.79),
    Gpu("H100 SXM", "h100(-(sxm5?|80gb))*(-hbm3)?", _HOPPER, 81_559 * MIB, 3.350e12, _hopper(989), 450e9, False, 2.69),
    Gpu(
        "H200", "h200(-(sxm5?|nvl|141gb))*(-hbm3e)?", _HOPPER, 143_771 * MIB, 4.800e12, _hopper(989), 450e9, False, 3.59
    ),
    Gpu(
        "B200",
        "b200(-(sxm6?|180gb|192gb))*",
        _BLACKWELL,
        181_559 * MIB,
        7.700e12,
        _blackwell(2250, 9000),
        900e9,
        False,
        5.98,
    ),
)
"""By memory and price, the small ones first."""


def find_gpu(name: str) -> Gpu | None:
    """The row that a product name or a user's word means, whatever its case and hyphens; None when it is unknown.

    A slice of a GPU (MIG) is none of them: neither its bandwidth nor its memory is the product's.
    """
    wanted = _normalised(name)
    return next((gpu for gpu in GPUS if re.fullmatch(gpu.product, wanted) or _normalised(gpu.name) == wanted), None)


def _normalised(name: str) -> str:
    """`NVIDIA H100 80GB HBM3`, `NVIDIA-H100-80GB-HBM3-SHARED` → `h100-80gb-hbm3`."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and word not in ("nvidia", "shared")]
    return "-".join(words)


def nearest_names(name: str) -> list[str]:
    """Names that hold what was typed, or all of them: for a message about an unknown GPU."""
    wanted = _normalised(name)
    return [gpu.name for gpu in GPUS if wanted and wanted in _normalised(gpu.name)] or [gpu.name for gpu in GPUS]


class PriceError(ValueError):
    """A price list that cannot be read: one sentence."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What an hour of each GPU costs: a user's figures before the table's."""

    per_hour: Mapping[str, float] = field(default_factory=dict)
    """US dollars by a GPU's name."""

    def of(self, gpu: Gpu) -> float | None:
        return self.per_hour.get(gpu.name, gpu.price_per_hour)

    def is_default(self, gpu: Gpu) -> bool:
        return gpu.name not in self.per_hour


def price_of(product: str | None, prices: Prices) -> GpuPrice | None:
    """What an hour of the GPU of this product name costs; None when it is unknown, or has no price."""
    gpu = find_gpu(product) if product else None
    price = None if gpu is None else prices.of(gpu)
    if gpu is None or price is None:
        return None
    return GpuPrice(gpu=gpu.name, dollars_per_hour=price, is_default=prices.is_default(gpu))


def parse_prices(items: Iterable[str]) -> Prices:
    """Read `NAME=PRICE` items, such as `H100 SXM=2.10`; raises PriceError."""
    found: dict[str, float] = {}
    for item in items:
        name, equals, text = item.partition("=")
        gpu = find_gpu(name)
        if not equals or gpu is None:
            raise PriceError(
                f"{item!r} is no price: write GPU=DOLLARS_PER_HOUR with one of {', '.join(nearest_names(name))}"
            )
        try:
            price = float(text)
        except ValueError:
            price = -1.0
        if not 0 <= price < 1e6:
            raise PriceError(f"{item!r} has no price: {text.strip() or 'nothing'} is not a number of dollars an hour")
        found[gpu.name] = price
    return Prices(found)
