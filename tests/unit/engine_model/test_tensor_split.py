"""A decoder split over two processes computes what one does, and what cannot be split is refused."""

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from tidegate_engine.architecture import DecoderConfig, Experts, LayerConfig, Rope, parameter_shapes
from tidegate_engine.collectives import ALONE, Collectives, join
from tidegate_engine.native_decoder import native_decoder
from tidegate_engine.tensor_split import Share, split_config, split_parameters
from tidegate_engine.transformer import (
    RowDeltas,
    build_decoder,
    forward,
    fused_names,
    layer_caches,
    new_kv_pool,
)
from tidegate_engine.weights import ModelError
from tidegate_kernels.quantised import (
    quantise_fp8,
    quantise_fp8_blocks,
    quantise_groups,
    quantise_int8,
)
from tidegate_kernels.reference import ragged_batch
from tidegate_kernels.weight import Dense, Weight, concat_rows

VOCAB, BLOCK, RANKS = 51, 16, 2
PLAIN = DecoderConfig(
    layers=(LayerConfig(heads=4, kv_heads=2, inner=128), LayerConfig(heads=4, kv_heads=2, inner=128, window=5)),
    hidden=64,
    head_size=32,
    vocab_size=VOCAB,
    context_tokens=256,
    norm_eps=1e-5,
    ropes=(Rope(10_000.0),),
    tied_head=False,
)
BLOCKS = replace(PLAIN, layers=(LayerConfig(heads=4, kv_heads=2, inner=256),), hidden=128, head_size=128)
CONFIGS = {
    "plain": PLAIN,
    "biases": replace(PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True),
    "a tied head, norms, caps": replace(
        PLAIN, tied_head=True, qk_norm=True, post_norms=True, attention_soft_cap=20.0, logit_soft_cap=10.0
    ),
    "one KV head for both": replace(PLAIN, layers=(LayerConfig(heads=4, kv_heads=1, inner=64),)),
    "experts": replace(PLAIN, layers=(replace(PLAIN.layers[0], experts=Experts(4, 2, normalised=True)),)),
    "int4": PLAIN,
    "int6": PLAIN,
    "fp8 in blocks": BLOCKS,
    "fp8": PLAIN,
    "int8": PLAIN,
    "fused on disk": PLAIN,
}
QUANTISE: dict[str, Callable[[Tensor], Weight]] = {
    "int4": lambda values: quantise_groups(values, bits=4, group=32),
    "int6": lambda values: quantise_groups(values, bits=6, group=32),
    "fp8 in blocks": quantise_fp8_blocks,
    "fp8": quantise_fp8,
    "int8": quantise_int8,
}
ROUNDED = {"fp8": 0.05, "int8": 0.05, "fp8 in blocks": 0.005}
"""How far logits may differ: a rank's part of an activation has a scale of its own, finer than that of the whole, and
with blocks, whose scales are the same, one in the middle between two codes goes to either."""


def parameters_of(name: str) -> dict[str, Weight]:
    config, quantise = CONFIGS[name], QUANTISE.get(name, Dense)
    generator = torch.Generator().manual_seed(7)
    found: dict[str, Weight] = {}
    for parameter, shape in parameter_shapes(config).items():
        values = torch.randn(shape, generator=generator) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)
        is_kept = len(shape) == 1 or parameter in ("embedding", "head") or "router" in parameter
        found[parameter] = Dense(values) if is_kept else quantise(values)
    for names in fused_names(config) if name == "fused on disk" else ():
        start = names[0].rpartition(".")[0]
        joined_name = f"{start}." + "+".join(each.rpartition(".")[2] for each in names)
        found[joined_name] = concat_rows([found.pop(each) for each in names])
    return found


def logits_of(name: str, share: Share, collectives: Collectives) -> Tensor:
    """A chunk of one sequence with the whole of another, then a decode of both."""
    config = split_config(CONFIGS[name], share.ranks)
    parameters = split_parameters(CONFIGS[name], parameters_of(name), share)
    decoder = build_decoder(config, parameters, collectives=collectives)
    caches = layer_caches(config, new_kv_pool(config, blocks=9, block_tokens=BLOCK, dtype=torch.float32))
    ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    tables, found = [[3, 1, 7], [5, 2]], []
    for new, total in (([7, 2], [7, 2]), ([11, 1], [18, 3]), ([1, 1], [19, 4])):
        batch = ragged_batch(new, total, tables, cache=caches[0])
        rows = torch.arange(sum(new))
        found.append(forward(decoder, ids[: len(rows)], batch, caches=caches, logits_rows=rows))
    return torch.cat(found)


def run_rank(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    share, store = Share(rank, RANKS), FileStore(str(folder / "meeting"), RANKS)
    collectives = join(share, store=store, device=torch.device("cpu"))
    torch.save({name: logits_of(name, share, collectives) for name in CONFIGS}, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Each rank's logits of every case."""
    folder = tmp_path_factory.mktemp("ranks")
    started = [
        multiprocessing.get_context("fork").Process(target=run_rank, args=(folder, rank)) for rank in range(RANKS)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=120)
        process.kill()
    assert [process.exitcode for process in started] == [0] * RANKS
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_have_the_logits_of_one(name: str, of_ranks: list[dict[str, Tensor]]) -> None:
    expected = logits_of(name, Share(0, 1), ALONE)
    first, second = (logits[name] for logits in of_ranks)
    assert torch.equal(first, second)
    assert (first - expected).norm() <= ROUNDED.get(name, 1e-5) * expected.norm()
    if name not in ROUNDED:
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "ranks", "message"),
    [
        (LayerConfig(9, 3, 96), 2, "layer 0 has 9 heads, which 2 GPUs cannot share; choose another number of GPUs"),
        (LayerConfig(6, 3, 96), 2, "layer 0 has 3 key-value heads, neither a multiple nor a divisor of 2"),
        (LayerConfig(12, 4, 96), 6, "layer 0 has 4 key-value heads, neither a multiple nor a divisor of 6"),
        (LayerConfig(4, 2, 97), 2, "layer 0 has an inner dimension of 97"),
    ],
)
def test_what_ranks_cannot_share_evenly_is_refused(layer: LayerConfig, ranks: int, message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        split_config(replace(PLAIN, layers=(layer,)), ranks)
    assert raised.value.reason == "TensorParallelUneven"


def split(config: DecoderConfig, name: str, weight: Weight, share: Share) -> Weight:
    return split_parameters(config, {name: weight}, share)[name]


def test_groups_and_blocks_that_a_rank_would_get_a_part_of_are_refused() -> None:
    inner_96 = replace(PLAIN, layers=(LayerConfig(4, 2, 96),))
    values = torch.randn(64, 96)
    with pytest.raises(ModelError, match=r"layers\.0\.down cannot be shared: columns 0 to 48 of 96 cut through groups"):
        split(inner_96, "layers.0.down", quantise_groups(values, bits=4, group=32), Share(0, 2))
    with pytest.raises(ModelError, match=r"columns 0 to 48 of 96 cut through blocks of 128 columns"):
        split(inner_96, "layers.0.down", quantise_fp8_blocks(values), Share(0, 2))
    with pytest.raises(ModelError, match=r"layers\.0\.up cannot be shared: rows 48 to 96 cut through blocks of fp8"):
        split(inner_96, "layers.0.up", quantise_fp8_blocks(torch.randn(96, 64)), Share(1, 2))
    ordered = replace(quantise_groups(torch.randn(64, 128), bits=4, group=32), order=torch.arange(128).flip(0))
    with pytest.raises(ModelError, match="grouped by importance"):
        split(PLAIN, "layers.0.down", ordered, Share(0, 2))


def test_ranks_hold_every_row_and_column_once_and_each_bias_behind_a_sum_once() -> None:
    config = replace(CONFIGS["biases"], tied_head=False)
    shares = [split_parameters(config, parameters_of("biases"), Share(rank, 2)) for rank in range(2)]
    whole = parameters_of("biases")
    for name, weight in whole.items():
        first, second = (share[name] for share in shares)
        assert isinstance(weight, Dense) and isinstance(first, Dense) and isinstance(second, Dense)
        last = name.rpartition(".")[2]
        if last in ("attention_output", "down"):
            together = torch.cat((first.values, second.values), dim=1)
        elif last in ("attention_output_bias", "down_bias"):
            assert not second.values.any()
            together = first.values + second.values
        elif last == "embedding" or last.endswith("norm"):
            assert torch.equal(first.values, second.values)
            together = first.values
        else:
            together = torch.cat((first.values, second.values))
        assert torch.equal(together, weight.values), name


def test_ranks_with_less_than_a_kv_head_each_hold_the_one_that_their_heads_read() -> None:
    config = replace(PLAIN, layers=(LayerConfig(heads=8, kv_heads=2, inner=64),), head_size=2)
    keys = torch.arange(4.0)[:, None].expand(4, 64)
    held = [split(config, "layers.0.k", Dense(keys), Share(rank, 4)) for rank in range(4)]
    assert [part.dequantised()[:, 0].tolist() for part in held] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert split_config(config, 4).layers[0].kv_heads == 1


def test_a_part_of_a_decoder_takes_no_adapters_and_is_left_to_torch() -> None:
    """Compiled code would leave the sums out."""
    others = replace(ALONE)
    config = split_config(PLAIN, 2)
    decoder = build_decoder(config, split_parameters(PLAIN, parameters_of("plain"), Share(0, 2)), collectives=others)
    caches = layer_caches(config, new_kv_pool(config, blocks=3, block_tokens=BLOCK, dtype=torch.float32))
    assert native_decoder(decoder, caches) is None
    batch = ragged_batch([1], [1], [[1]], cache=caches[0])
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="serve it on one GPU"):
        forward(decoder, one, batch, caches=caches, logits_rows=one, adapters=[RowDeltas([{}, {}], one)])
