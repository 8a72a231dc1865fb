"""Padded decode steps compute what steps of just the rows do. Without a GPU nothing is recorded, only padded."""

import pytest
import torch

from tidegate_engine.architecture import DecoderConfig, LayerConfig, Rope, parameter_shapes
from tidegate_engine.decode_graphs import DecodeGraphs
from tidegate_engine.transformer import build_decoder, forward, layer_caches, new_kv_pool
from tidegate_kernels.reference import Cache, ragged_batch
from tidegate_kernels.weight import Dense, Weight

BLOCK, CONTEXT = 16, 64
CONFIG = DecoderConfig(
    layers=(LayerConfig(heads=4, kv_heads=2, inner=96),) * 2,
    hidden=64,
    head_size=16,
    vocab_size=50,
    context_tokens=CONTEXT,
    norm_eps=1e-5,
    ropes=(Rope(10_000.0),),
    tied_head=False,
)


def new_caches() -> tuple[Cache, ...]:
    return layer_caches(CONFIG, new_kv_pool(CONFIG, blocks=12, block_tokens=BLOCK, dtype=torch.float32))


def test_padded_steps_have_the_logits_of_steps_without_padding_and_touch_block_0_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    parameters: dict[str, Weight] = {
        name: Dense(torch.randn(shape, generator=generator) * shape[-1] ** -0.5)
        for name, shape in parameter_shapes(CONFIG).items()
    }
    decoder = build_decoder(CONFIG, parameters)
    padded, plain = new_caches(), new_caches()
    graphs = DecodeGraphs(decoder, padded, sizes=(2, 4, 8), context_tokens=CONTEXT)
    tables = [[1, 2, 9], [3], [4, 5]]
    for lengths, used in (([20, 3, 17], tables), ([21, 4, 18], tables), ([5], [[7]]), ([33, 5], tables[:2])):
        batch = ragged_batch([1] * len(lengths), lengths, used, cache=plain[0])
        ids, rows = torch.arange(len(lengths)) + 7, torch.arange(len(lengths))
        expected = forward(decoder, ids, batch, caches=plain, logits_rows=rows)
        torch.testing.assert_close(graphs.run(ids, batch), expected, rtol=1e-5, atol=1e-5)
    for own, other in zip(padded, plain, strict=True):
        torch.testing.assert_close(own.keys[1:], other.keys[1:])
        torch.testing.assert_close(own.values[1:], other.values[1:])


def test_a_step_beyond_what_was_recorded_is_refused() -> None:
    parameters: dict[str, Weight] = {name: Dense(torch.ones(shape)) for name, shape in parameter_shapes(CONFIG).items()}
    caches = new_caches()
    graphs = DecodeGraphs(build_decoder(CONFIG, parameters), caches, sizes=(1, 2), context_tokens=32)
    ids = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 sequences of up to 1 tokens; recorded are up to 2 of up to 32"):
        graphs.run(ids, ragged_batch([1] * 3, [1] * 3, [[1], [2], [3]], cache=caches[0]))
    with pytest.raises(ValueError, match="1 sequences of up to 40 tokens"):
        graphs.run(ids[:1], ragged_batch([1], [40], [[1, 2, 3]], cache=caches[0]))
