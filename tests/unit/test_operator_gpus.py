"""The GPU table: names that nodes and engines give, precisions that exist, prices that users override."""

import pytest

from tidegate_operator.gpus import GPUS, PriceError, Prices, find_gpu, nearest_names, parse_prices, price_of


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("Tesla-T4", "T4"),
        ("NVIDIA-L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA-A10", "A10"),
        ("NVIDIA-A10G", "A10G"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA-A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA-A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA-A100-SXM4-80GB-SHARED", "A100 80GB"),
        ("NVIDIA-H100-80GB-HBM3", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA-H100-PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA-H200", "H200"),
        ("NVIDIA-B200", "B200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", "RTX PRO 6000"),
        ("h100", "H100 SXM"),
        ("a100-80gb", "A100 80GB"),
    ],
)
def test_a_product_name_means_its_row(product: str, name: str) -> None:
    gpu = find_gpu(product)
    assert gpu is not None and gpu.name == name


@pytest.mark.parametrize("product", ["NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "NVIDIA-GB300", "AMD-Instinct-MI300X", ""])
def test_a_slice_or_another_product_is_no_row(product: str) -> None:
    assert find_gpu(product) is None


def test_every_row_is_found_by_its_own_name_and_by_no_other_rows_pattern() -> None:
    for gpu in GPUS:
        assert find_gpu(gpu.name) is gpu
        assert find_gpu(gpu.name.replace(" ", "-").lower()) is gpu


def test_precisions_exist_from_their_generation_on() -> None:
    has = {gpu.name: set(gpu.flops) for gpu in GPUS}
    assert "bf16" not in has["T4"]
    assert "fp8" not in has["A100 80GB"] and "fp8" in has["L4"] and "fp8" in has["H100 SXM"]
    assert "int4" in has["A100 80GB"] and "int4" not in has["H100 SXM"]
    assert "fp4" in has["B200"] and "fp4" not in has["H200"]
    assert all(gpu.has("fp32") for gpu in GPUS)


def test_eight_bits_are_never_slower_than_sixteen_and_memory_is_below_what_the_name_says() -> None:
    for gpu in GPUS:
        assert gpu.flops["fp16"] <= gpu.flops["int8"]
        assert gpu.flops.get("fp8", gpu.flops["fp16"]) >= gpu.flops["fp16"]
    assert {gpu.name: round(gpu.memory_bytes / (1 << 30)) for gpu in GPUS if gpu.name in ("L4", "H100 SXM")} == {
        "L4": 22,
        "H100 SXM": 80,
    }


def test_a_users_price_wins_over_the_tables() -> None:
    prices = parse_prices(["H100 SXM=2.10", "nvidia-l4 = 0"])
    h100, l4, h200 = (find_gpu(name) for name in ("H100", "L4", "H200"))
    assert h100 and l4 and h200
    assert prices.of(h100) == 2.10 and not prices.is_default(h100)
    assert prices.of(l4) == 0
    assert prices.of(h200) == h200.price_per_hour and prices.is_default(h200)


@pytest.mark.parametrize("item", ["H100 SXM", "V100=1", "L4=cheap", "L4=-1", "L4="])
def test_a_price_that_cannot_be_read_is_refused(item: str) -> None:
    with pytest.raises(PriceError, match="price"):
        parse_prices([item])


def test_an_unknown_product_has_no_price() -> None:
    assert price_of("NVIDIA-GB300", Prices()) is None
    assert price_of(None, Prices()) is None
    found = price_of("NVIDIA-L4", Prices({"L4": 0.3}))
    assert found is not None and (found.gpu, found.dollars_per_hour, found.is_default) == ("L4", 0.3, False)


def test_names_that_hold_what_was_typed_are_offered() -> None:
    assert nearest_names("a100") == ["A100 40GB", "A100 80GB"]
    assert len(nearest_names("voodoo")) == len(GPUS)
