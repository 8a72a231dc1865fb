"""LoRA adapters: the logits of transformers with each delta merged by hand, whatever else is in the batch."""

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tidegate_engine.blocks import BlockPool
from tidegate_engine.cgroup import Machine
from tidegate_engine.lora import LoraAdapter, LoraLimits, LoraStore, adapter_bytes, read_adapter
from tidegate_engine.ngrams import NgramSpeculation
from tidegate_engine.precision import Precision, parse_precision
from tidegate_engine.request import Adapter, Request, SamplingParams
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import BatchSettings
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
from tidegate_engine.transformer import Decoder, RowDeltas, build_decoder, forward, layer_caches, new_kv_pool
from tidegate_engine.weights import ModelError
from tidegate_engine.weights_gguf import load_gguf
from tidegate_engine.weights_safetensors import load_safetensors
from tidegate_kernels.reference import ragged_batch
from tidegate_kernels.weight import Dense

PROVE = os.environ.get("TIDEGATE_PROVE") == "1"
BLOCK = 4
MakeAdapter = Callable[..., Path]
SaveFamily = Callable[[str], tuple[Path, Any]]
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PHI = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
ALL = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
FAMILIES = {
    "llama": ALL,
    "llama-biases": ALL,
    "qwen2": ALL,
    "qwen3": ALL,
    "gemma2": ALL,
    "phi3": PHI,
    "mixtral": ATTENTION,
    "qwen3-moe": ATTENTION,
}


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 150, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch_logits(
    decoder: Decoder, prompts: Sequence[Sequence[int]], adapters: Sequence[LoraAdapter | None]
) -> list[torch.Tensor]:
    """Logits after each token of each prompt, all computed in one step, each with its own adapter."""
    config = decoder.config
    blocks = [-(-len(ids) // BLOCK) for ids in prompts]
    pool = new_kv_pool(config, blocks=sum(blocks) + 1, block_tokens=BLOCK, dtype=torch.float32)
    caches = layer_caches(config, pool)
    tables = [list(range(1 + sum(blocks[:index]), 1 + sum(blocks[: index + 1]))) for index in range(len(blocks))]
    lengths = [len(ids) for ids in prompts]
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    deltas = [
        RowDeltas(adapter.layers, torch.arange(end - length, end))
        for adapter, length, end in zip(adapters, lengths, ends, strict=True)
        if adapter is not None
    ]
    with torch.inference_mode():
        logits = forward(
            decoder,
            torch.tensor([token for ids in prompts for token in ids]),
            ragged_batch(lengths, lengths, tables, cache=caches[0]),
            caches=caches,
            logits_rows=torch.arange(ends[-1]),
            adapters=deltas,
        )
    return list(torch.split(logits, lengths))


def merged(model: Any, folder: Path) -> Any:
    """transformers' model with the adapter's deltas added to its weights, by PEFT's formula."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    model = deepcopy(model)
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
            alpha = next(
                (value for end, value in config["alpha_pattern"].items() if module.endswith(end)), config["lora_alpha"]
            )
            scale = alpha / (math.sqrt(len(a)) if config["use_rslora"] else len(a))
            with torch.no_grad():
                model.get_submodule(module).weight += scale * (b.double() @ a.double()).float()
    return model


def expected_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize("case", FAMILIES)
def test_adapters_of_different_ranks_in_one_batch_have_the_logits_of_transformers_with_each_merged(
    save_family: SaveFamily, make_adapter: MakeAdapter, case: str
) -> None:
    folder, oracle = save_family(case)
    layers = oracle.config.num_hidden_layers
    one = make_adapter("one", seed=1, rank=4, modules=FAMILIES[case], layers=layers)
    other = make_adapter(
        "other",
        seed=2,
        rank=3,
        modules=FAMILIES[case],
        layers=layers,
        ranks={FAMILIES[case][1].rpartition(".")[2]: 7},
        alpha_pattern={"layers.1.self_attn.o_proj": 5, "o_proj": 1.5},
        use_rslora=True,
        target_modules="all-linear",
    )
    decoder = build_decoder(*load_safetensors(folder, dtype=torch.float32))
    held = [read_adapter(path.name, path, decoder.config, max_rank=8, dtype=torch.float32) for path in (one, other)]
    prompts = [prompt(seed, length) for seed, length in enumerate((9, 13, 5, 6))]
    found = batch_logits(decoder, prompts, [held[0], None, held[1], held[0]])
    models = [merged(oracle, one), oracle, merged(oracle, other), merged(oracle, one)]
    for logits, model, ids in zip(found, models, prompts, strict=True):
        torch.testing.assert_close(logits, expected_logits(model, ids), atol=1e-4, rtol=1e-4)
    plain = batch_logits(decoder, prompts, [None] * 4)
    assert torch.equal(found[1], plain[1])
    assert all((found[index] - plain[index]).abs().max() > 0.1 for index in (0, 2, 3))


def test_an_adapter_of_some_modules_and_layers_leaves_the_others_alone(
    save_family: SaveFamily, make_adapter: MakeAdapter
) -> None:
    folder, oracle = save_family("llama")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.0." in name]:
            del tensors[name]

    path = make_adapter("late", modules=("self_attn.v_proj", "mlp.up_proj"), edit=edit, layers_to_transform=[1])
    decoder = build_decoder(*load_safetensors(folder, dtype=torch.float32))
    adapter = read_adapter("late", path, decoder.config, max_rank=4, dtype=torch.float32)
    ids = prompt(3, 12)
    (found,) = batch_logits(decoder, [ids], [adapter])
    torch.testing.assert_close(found, expected_logits(merged(oracle, path), ids), atol=1e-4, rtol=1e-4)


def test_a_quantised_model_with_an_adapter_is_the_model_of_its_dequantised_weights_with_it_merged(
    save_family: SaveFamily, make_adapter: MakeAdapter
) -> None:
    folder, _ = save_family("llama")
    path = make_adapter("one")
    precision = parse_precision("int4-g8")
    config, parameters = load_safetensors(folder, dtype=torch.float32, precision=precision)
    assert parameters["layers.0.q"].precision == "int4-g8"
    values = {name: weight.dequantised() for name, weight in parameters.items()}
    tensors = load_file(path / "adapter_model.safetensors")
    names = {"self_attn.o_proj": "attention_output"} | {
        f"{part}.{name}_proj": name for part, group in (("self_attn", "qkv"), ("mlp", ("gate", "up", "down")))
        for name in group
    }  # fmt: skip
    for layer in range(len(config.layers)):
        for module, name in names.items():
            stem = f"base_model.model.model.layers.{layer}.{module}"
            delta = tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
            values[f"layers.{layer}.{name}"] = values[f"layers.{layer}.{name}"] + 2 * delta
    merged_decoder = build_decoder(config, {name: Dense(value) for name, value in values.items()})
    adapter = read_adapter("one", path, config, max_rank=4, dtype=torch.float32)
    ids = prompt(4, 14)
    (found,) = batch_logits(build_decoder(config, parameters), [ids], [adapter])
    (expected,) = batch_logits(merged_decoder, [ids], [None])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# --- served

OUTPUT = 10
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
PROMPTS = [prompt(seed, length) for seed, length in enumerate((5, 17, 9, 30, 4, 12))]
OWNERS = ("one", None, "other", "other", None, "one")


@pytest.fixture
def runner(tiny_model: Path, make_adapter: MakeAdapter) -> TorchRunner:
    options = TorchOptions(kv_blocks=200, block_tokens=BLOCK, threads=1, lora=LoraLimits(2, 8))
    runner = TorchRunner(tiny_model, options=options)
    load(runner, make_adapter("one", seed=1))
    load(runner, make_adapter("other", seed=2, rank=8))
    return runner


def load(runner: TorchRunner, folder: Path) -> None:
    assert runner.adapters is not None
    runner.adapters.read(folder.name, folder)()


def key(runner: TorchRunner, name: str | None) -> Adapter | None:
    assert runner.adapters is not None
    digests = {info.name: info.digest for info in runner.adapters.infos()}
    return None if name is None else Adapter(name, digests[name])


def new_scheduler(
    *, chunk: int = 512, caching: bool = False, blocks: int = 200, speculation: NgramSpeculation | None = None
) -> Scheduler:
    pool = BlockPool(blocks, BLOCK, prefix_caching=caching)
    return Scheduler(BatchSettings(16, 512, chunk), pool, max_model_len=256, speculation=speculation)


def serve(
    runner: TorchRunner,
    prompts: Sequence[Sequence[int]],
    owners: Sequence[str | None],
    scheduler: Scheduler | None = None,
) -> list[Request]:
    """The requests of all prompts, served together to their end."""
    scheduler = scheduler or new_scheduler()
    requests = [
        Request(f"r{index}", len(ids), OUTPUT, 0.0, prompt_ids=ids, params=GREEDY, adapter=key(runner, owner))
        for index, (ids, owner) in enumerate(zip(prompts, owners, strict=True))
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        scheduler.commit(step, runner.run(step), 0.0)
        scheduler.check_integrity()
    return requests


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output_ids for request in requests]


def test_a_mixed_batch_gives_each_request_what_it_gets_alone_however_prompts_are_cut(runner: TorchRunner) -> None:
    alone = [outputs(serve(runner, [ids], [owner]))[0] for ids, owner in zip(PROMPTS, OWNERS, strict=True)]
    assert outputs(serve(runner, PROMPTS, OWNERS)) == alone
    assert outputs(serve(runner, PROMPTS, OWNERS, new_scheduler(chunk=3))) == alone
    assert outputs(serve(runner, PROMPTS, OWNERS, new_scheduler(blocks=30))) == alone
    guessing = new_scheduler(speculation=NgramSpeculation(4, 1, 3))
    assert outputs(serve(runner, PROMPTS, OWNERS, guessing)) == alone
    assert guessing.drafted_tokens > 0
    unadapted = outputs(serve(runner, PROMPTS, [None] * len(PROMPTS)))
    assert [ids == base for ids, base in zip(alone, unadapted, strict=True)] == [owner is None for owner in OWNERS]


def test_a_prefix_is_shared_by_the_requests_of_one_adapter_only(runner: TorchRunner, make_adapter: MakeAdapter) -> None:
    scheduler = new_scheduler(caching=True)
    ids = PROMPTS[3]
    expected = {owner: outputs(serve(runner, [ids], [owner]))[0] for owner in (None, "one", "other")}
    for owner in (None, "one", "other"):
        (first,) = serve(runner, [ids], [owner], scheduler)
        (again,) = serve(runner, [ids], [owner], scheduler)
        assert (first.num_cached, again.num_cached) == (0, 28)
        assert first.output_ids == again.output_ids == expected[owner]
    assert runner.adapters is not None
    runner.adapters.remove("one")
    load(runner, make_adapter("one", seed=3))
    (changed,) = serve(runner, [ids], ["one"], scheduler)
    assert changed.num_cached == 0 and changed.output_ids != expected["one"]
    runner.adapters.remove("one")
    load(runner, make_adapter("one", seed=1))
    (back,) = serve(runner, [ids], ["one"], scheduler)
    assert back.num_cached == 28 and back.output_ids == expected["one"]


def test_an_adapter_with_other_scales_of_the_same_tensors_has_another_digest(
    runner: TorchRunner, make_adapter: MakeAdapter
) -> None:
    before = key(runner, "one")
    assert runner.adapters is not None
    runner.adapters.remove("one")
    load(runner, make_adapter("one", seed=1, lora_alpha=99))
    assert key(runner, "one") != before


def test_adapters_are_held_in_the_type_of_activations(tiny_model: Path, make_adapter: MakeAdapter) -> None:
    options = TorchOptions(
        precision=Precision(dtype="bfloat16"), kv_blocks=200, block_tokens=BLOCK, threads=1, lora=LoraLimits(1, 4)
    )
    half = TorchRunner(tiny_model, options=options)
    load(half, make_adapter("one", seed=1))
    assert half.adapters is not None
    assert half.adapters.size_bytes == half.adapters.reserved_bytes == 2 * 4 * 2 * (72 + 24 + 24 + 72 + 96 * 3 + 72 * 7)
    assert [len(ids) for ids in outputs(serve(half, PROMPTS[:3], ["one", None, "one"]))] == [OUTPUT] * 3


# --- the bound


def test_an_adapter_beyond_the_bound_is_refused_and_fits_when_another_one_has_gone(
    runner: TorchRunner, make_adapter: MakeAdapter
) -> None:
    third = make_adapter("third", seed=3)
    with pytest.raises(ModelError, match=r"2 adapters are loaded \(one, other\) and --max-loras is 2; unload one"):
        load(runner, third)
    assert runner.adapters is not None
    runner.adapters.remove("other")
    load(runner, third)
    assert {info.name for info in runner.adapters.infos()} == {"one", "third"}
    with pytest.raises(ModelError, match="an adapter 'one' is loaded already"):
        load(runner, make_adapter("one"))


def test_the_memory_for_adapters_is_set_aside_before_the_cache_is_sized(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "available_bytes", lambda self: 10_000_000)
    plain = TorchRunner(tiny_model, options=TorchOptions(block_tokens=BLOCK)).info
    runner = TorchRunner(tiny_model, options=TorchOptions(block_tokens=BLOCK, lora=LoraLimits(8, 16)))
    assert runner.adapters is not None
    block_bytes = plain.kv_token_bytes * BLOCK
    assert runner.info.kv_blocks == int((10_000_000 - runner.adapters.reserved_bytes) * 0.5) // block_bytes
    with pytest.raises(
        ModelError, match=r"AdaptersTooLarge: 500 adapters of the largest rank take \d+ MiB, and 10 MiB"
    ):
        TorchRunner(tiny_model, options=TorchOptions(block_tokens=BLOCK, lora=LoraLimits(500, 16)))


# --- files that are not what they should be


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Decoder:
    return build_decoder(*load_gguf(tiny_model, dtype=torch.float32))


def refusal(folder: Path, decoder: Decoder, *, max_rank: int = 8) -> str:
    with pytest.raises(ModelError) as caught:
        read_adapter("one", folder, decoder.config, max_rank=max_rank, dtype=torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"use_dora": True}, "uses 'use_dora', which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "uses 'modules_to_save'"),
        ({"lora_bias": True}, "uses 'lora_bias'"),
        ({"fan_in_fan_out": True}, "uses 'fan_in_fan_out'"),
        ({"trainable_token_indices": [1]}, "uses 'trainable_token_indices'"),
        ({"target_parameters": ["experts.down_proj"]}, "uses 'target_parameters'"),
        ({"layer_replication": [[0, 2]], "use_qalora": True}, "uses 'layer_replication' and 1 others"),
        ({"alora_invocation_tokens": [1]}, "uses 'alora_invocation_tokens'"),
        ({"some_new_thing": {"a": 1}}, "uses 'some_new_thing'"),
        ({"bias": "lora_only"}, "has 'lora_only' as bias; supported is none"),
        ({"peft_type": "ADALORA"}, "has the peft_type 'ADALORA'; supported is LORA"),
        ({"init_lora_weights": "pissa_niter_16"}, "has 'pissa_niter_16' as init_lora_weights, which changes the model"),
        ({"r": 0}, "has 0 as r; a positive integer is needed"),
        ({"r": True}, "has True as r"),
        ({"r": None}, "has None as r"),
        ({"r": 9}, "has the rank 9, and --max-lora-rank is 8"),
        ({"lora_alpha": "8"}, "has '8' as lora_alpha; a number is needed"),
        ({"lora_alpha": 1e300}, "as lora_alpha"),
        ({"use_rslora": "yes"}, "has 'yes' as use_rslora"),
        ({"target_modules": None}, "has None as target_modules"),
        ({"target_modules": ["q_proj"]}, "does not name model.layers.0.mlp.down_proj in its target_modules"),
        ({"rank_pattern": {"q_proj": 5}}, "q_proj.lora_A.weight in the shape (4, 72); expected is (5, 72)"),
        (
            {"rank_pattern": {"q_proj": 99}},
            "gives model.layers.0.self_attn.q_proj the rank 99, and --max-lora-rank is 8",
        ),
        ({"rank_pattern": [1]}, "has [1] as rank_pattern"),
        ({"alpha_pattern": {"(a+)+$": 5}}, "has '(a+)+$' in alpha_pattern; names of modules"),
        ({"alpha_pattern": {"q_proj": None}}, "has None as alpha_pattern of q_proj"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_its_name(
    make_adapter: MakeAdapter, decoder: Decoder, config: dict[str, object], expected: str
) -> None:
    assert expected in refusal(make_adapter("one", **config), decoder)


def test_tensors_that_have_no_place_are_refused_by_their_name(make_adapter: MakeAdapter, decoder: Decoder) -> None:
    layer = "base_model.model.model.layers.0."

    def refused(edit: Callable[[dict[str, torch.Tensor]], object], **changes: object) -> str:
        return refusal(make_adapter("one", edit=edit, target_modules="all-linear", **changes), decoder)

    def add(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], None]:
        return lambda tensors: tensors.__setitem__(name, torch.ones(shape))

    for name in (
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        f"{layer}self_attn.q_proj.lora_magnitude_vector",
        f"{layer}self_attn.q_proj.lora_B.bias",
        f"{layer}mlp.experts.0.gate_proj.lora_A.weight",
        f"{layer}block_sparse_moe.gate.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.12345.self_attn.q_proj.lora_A.weight",
    ):
        assert f"holds '{name}'; supported are lora_A and lora_B of linear layers" in refused(add(name, 4, 72))
    assert "supported are self_attn.q_proj, self_attn.k_proj" in refused(
        lambda tensors: tensors.update({f"{layer}mlp.other_proj.lora_{side}.weight": torch.ones(4, 4) for side in "AB"})
    )
    assert "adapts model.layers.2.mlp.down_proj; supported are" in refused(lambda tensors: None, layers=3)
    assert "holds lora_A of model.layers.0.self_attn.q_proj and not the other one" in refused(
        lambda tensors: tensors.__delitem__(f"{layer}self_attn.q_proj.lora_B.weight")
    )
    again = "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora"
    assert "adapts self_attn.q_proj of layer 0 twice" in refused(
        lambda tensors: tensors.update({f"{again}_A.weight": torch.ones(4, 72), f"{again}_B.weight": torch.ones(72, 4)})
    )
    fused_too = (*ALL, "self_attn.qkv_proj")
    assert "takes 75264 bytes, and an adapter of rank 8 takes 62976" in refused(
        lambda tensors: None, modules=fused_too, rank=8
    )
    assert "adapts nothing" in refused(lambda tensors: tensors.clear())
    assert "q_proj.lora_B.weight in the shape (71, 4); expected is (72, 4)" in refused(
        add(f"{layer}self_attn.q_proj.lora_B.weight", 71, 4)
    )
    assert "holds values that are not finite" in refused(
        lambda tensors: tensors[f"{layer}self_attn.q_proj.lora_B.weight"].fill_(torch.inf)
    )
    assert "in the type I64; supported are F32, F16, BF16" in refused(
        lambda tensors: tensors.__setitem__(
            f"{layer}self_attn.q_proj.lora_B.weight", torch.ones(72, 4, dtype=torch.int64)
        )
    )


def test_adapters_of_experts_are_refused_by_their_name(save_family: SaveFamily, make_adapter: MakeAdapter) -> None:
    config, _ = load_safetensors(save_family("qwen3-moe-all")[0], dtype=torch.float32)
    with pytest.raises(ModelError, match=r"adapts model\.layers\.0\.mlp\.down_proj; .* not those of experts"):
        read_adapter("one", make_adapter("one"), config, max_rank=8, dtype=torch.float32)


def test_folders_without_their_files_or_with_others_are_refused(make_adapter: MakeAdapter, decoder: Decoder) -> None:
    folder = make_adapter("one")
    config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1])
    assert "is truncated" in refusal(folder, decoder)
    tensors.write_bytes(struct.pack("<Q", 5 << 20) + whole)
    assert "its header is larger than" in refusal(folder, decoder)
    with tensors.open("wb") as file:
        file.truncate(1 << 34)
    assert f"has {1 << 34} bytes; at most" in refusal(folder, decoder)
    tensors.unlink()
    os.mkfifo(tensors)
    assert "does not exist, or is no file" in refusal(folder, decoder)
    config.write_text(" " * (1 << 21))
    assert "bytes; at most 1048576 are read" in refusal(folder, decoder)
    config.write_text("[" * 100_000)
    assert "its JSON cannot be read" in refusal(folder, decoder)
    config.unlink()
    assert "ModelNotFound" in refusal(folder, decoder)
    assert "ModelNotFound" in refusal(folder / "nowhere", decoder)


@settings(
    max_examples=2000 if PROVE else 100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_adapter_is_read_or_refused_and_nothing_else(
    make_adapter: MakeAdapter, decoder: Decoder, data: st.DataObject
) -> None:
    folder = make_adapter("one", modules=("self_attn.q_proj", "mlp.down_proj"))
    path = folder / data.draw(st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
    content = bytearray(path.read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0] if path.suffix == ".safetensors" else len(content)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, header - 1))
        content[place] = data.draw(st.sampled_from([*b'0123456789-[]{},:"enE. ', 0, 255]))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        adapter = read_adapter("one", folder, decoder.config, max_rank=8, dtype=torch.float32)
    except ModelError:
        return
    assert adapter.info.size_bytes <= adapter_bytes(decoder.config, rank=8, dtype=torch.float32)


def test_the_store_adds_no_adapter_that_was_read_while_its_place_was_taken(
    make_adapter: MakeAdapter, decoder: Decoder
) -> None:
    store = LoraStore(decoder.config, LoraLimits(1, 8), dtype=torch.float32)
    first, second = store.read("one", make_adapter("one")), store.read("two", make_adapter("two"))
    first()
    with pytest.raises(ModelError, match="AdapterLimit"):
        second()
