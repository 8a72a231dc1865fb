"""Every kind of weight against the values that its format defines and the plain product with them."""

import torch

from tidegate_kernels.weight import Dense, Stacked, concat_rows, gather_rows, linear


def test_packed_weights_give_the_same_product_for_any_number_of_rows() -> None:
    weight, bias = torch.randn(48, 32), torch.randn(48)
    packed = Dense(weight).laid_out()
    assert packed.size_bytes == weight.nbytes
    torch.testing.assert_close(packed.dequantised(), weight, atol=0, rtol=0)
    for rows in (1, 2, 7, 64, 200):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(linear(x, packed, bias), x @ weight.T + bias, atol=1e-4, rtol=1e-4)


def test_an_embedding_gives_the_rows_asked_for() -> None:
    weight = torch.randn(10, 4)
    found = gather_rows(Dense(weight.bfloat16()), torch.tensor([3, 3, 0]), dtype=torch.float32)
    torch.testing.assert_close(found, weight.bfloat16().float()[[3, 3, 0]], atol=0, rtol=0)


def test_parts_of_one_kind_become_one_weight_and_parts_of_different_kinds_are_stacked() -> None:
    first, second = torch.randn(6, 8), torch.randn(4, 8)
    x, bias = torch.randn(3, 8), torch.randn(10)
    together = concat_rows([Dense(first), Dense(second)])
    assert isinstance(together, Dense)
    apart = concat_rows([Dense(first), Dense(second.bfloat16())])
    assert isinstance(apart, Stacked)
    assert apart.precision == "float32+bfloat16"
    assert apart.size_bytes == first.nbytes + second.nbytes // 2
    for weight in (together, apart, apart.laid_out()):
        assert weight.shape == (10, 8)
        expected = x @ weight.dequantised().T + bias
        torch.testing.assert_close(linear(x, weight, bias), expected, atol=2e-2, rtol=2e-2)
