"""Models for the tests of the engine's model: tiny random ones of every family, and the small real one.

A tiny file is written from weights with Hugging Face's names (kept beside it as `.pt`), by code that the
engine's reader does not share.
"""

import json
import os

# As `torch_runner` does it, before torch is loaded: two threads that spin for each other make busy machines slow.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import multiprocessing
import random
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator
from copy import deepcopy
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tidegate_kernels import native
from tidegate_local import model

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INNER, LAYERS, CONTEXT = 72, 9, 3, 8, 96, 2, 256
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "i n", "Ġ the"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> list[str]:
    """Three special tokens, the 256 bytes in GPT-2's alphabet, the merges."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]


def random_weights(seed: int, *, tied: bool, bias: bool) -> dict[str, torch.Tensor]:
    """By Hugging Face's names; large enough for logits that differ."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.25

    vocab = len(vocabulary())
    weights = {"model.embed_tokens.weight": draw(vocab, HIDDEN) * 2, "model.norm.weight": 1 + draw(HIDDEN)}
    if not tied:
        weights["lm_head.weight"] = draw(vocab, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for part, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{prefix}self_attn.{part}_proj.weight"] = draw(rows * HEAD_SIZE, HIDDEN)
            if bias:
                weights[f"{prefix}self_attn.{part}_proj.bias"] = draw(rows * HEAD_SIZE)
        weights[f"{prefix}self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * HEAD_SIZE)
        weights[f"{prefix}mlp.gate_proj.weight"] = draw(INNER, HIDDEN)
        weights[f"{prefix}mlp.up_proj.weight"] = draw(INNER, HIDDEN)
        weights[f"{prefix}mlp.down_proj.weight"] = draw(HIDDEN, INNER)
        weights[f"{prefix}input_layernorm.weight"] = 1 + draw(HIDDEN)
        weights[f"{prefix}post_attention_layernorm.weight"] = 1 + draw(HIDDEN)
    return weights


FILE_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_model(
    path: Path,
    *,
    architecture: str = "llama",
    tied: bool = True,
    metadata: dict[str, Any] | None = None,
    edit: Callable[[dict[str, np.ndarray]], None] | None = None,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write a tiny model. `metadata` replaces entries (None leaves one out), `edit` changes the file's tensors, `types`
    quantises some."""
    weights = random_weights(7, tied=tied, bias=architecture == "qwen2")
    torch.save(weights, path.with_suffix(".pt"))
    entries: dict[str, Any] = {
        "general.name": "tiny",
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": CONTEXT,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary(),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    entries |= metadata or {}
    tensors: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        values = weight.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):  # as llama.cpp's converter does
            heads = HEADS if "q_proj" in name else KV_HEADS
            halves = values.reshape(heads, 2, HEAD_SIZE // 2, HIDDEN)
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            tensors[f"blk.{layer}.{FILE_NAMES[part]}.{kind}"] = values
        else:
            tensors[f"{FILE_NAMES[stem]}.{kind}"] = values
    if edit:
        edit(tensors)
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in entries.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    for name, array in tensors.items():
        if stored := (types or {}).get(name):
            writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def write_tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny model with changes: see `write_model`."""

    def write(**changes: Any) -> Path:
        return write_model(tmp_path / "tiny.gguf", **changes)

    return write


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where no C compiler was: torch computes everything."""
    monkeypatch.setattr(native, "_path", lambda _: Path("/nonexistent/native.so"))
    native.library.cache_clear()
    yield
    monkeypatch.undo()
    native.library.cache_clear()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def even_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with heads that two ranks can share evenly."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HIDDEN": 64, "HEADS": 8, "KV_HEADS": 2}.items():
            patch.setitem(globals(), name, value)
        return write_model(tmp_path_factory.mktemp("even") / "even.gguf")


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct."""
    return model.path()


# --- the families of models

FAMILY_VOCAB = 160
SMALL: dict[str, Any] = {
    "vocab_size": FAMILY_VOCAB,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "head_dim": 8,
}
GEMMA = {"query_pre_attn_scalar": 12, "sliding_window": 16, "num_hidden_layers": 3}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 3.0, 5.0],
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.25}, "max_position_embeddings": 20},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3-window": ("SmolLM3", {"use_sliding_window": True, "sliding_window": 7, "no_rope_layers": [1, 0]}),
    "phi3": ("Phi3", {"sliding_window": 30}),
    "phi4-mini": (
        "Phi3",
        {"rope_parameters": LONGROPE, "tie_word_embeddings": True, "original_max_position_embeddings": 32},
    ),
    "phi4-mini-short": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 300}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {**GEMMA, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3-moe-all": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
}


def family_model(case: str) -> Any:
    """transformers' model of a case, with weights large enough for logits that differ."""
    import transformers

    name, changes = FAMILIES[case]
    kind = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    # transformers writes into what it is given.
    settings = deepcopy(SMALL | changes)
    if name in ("SmolLM3", "Phi3", "Qwen2"):
        settings = {key: value for key, value in settings.items() if key != "head_dim"}
    config = getattr(transformers, kind)(**settings, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in dict(model.named_parameters()).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and "gemma" not in case:
                parameter.add_(1.0)
    return model.eval()


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """A case of FAMILIES, one after the other."""
    return str(request.param)


@pytest.fixture(scope="session")
def save_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Saves a case's model once; returns its folder and the model."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    saved: dict[str, tuple[Path, Any]] = {}

    def of(case: str) -> tuple[Path, Any]:
        if case not in saved:
            folder, model = tmp_path_factory.mktemp(case), family_model(case)
            model.save_pretrained(folder)
            saved[case] = folder, model
        return saved[case]

    return of


# --- LoRA adapters

ADAPTED = {
    "self_attn.q_proj": (HEADS * HEAD_SIZE, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "self_attn.qkv_proj": ((HEADS + 2 * KV_HEADS) * HEAD_SIZE, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_SIZE),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.gate_up_proj": (2 * INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
SPLIT = tuple(name for name in ADAPTED if name not in ("self_attn.qkv_proj", "mlp.gate_up_proj"))


def write_adapter(
    folder: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    ranks: dict[str, int] | None = None,
    modules: tuple[str, ...] = SPLIT,
    layers: int = LAYERS,
    edit: Callable[[dict[str, torch.Tensor]], object] | None = None,
    **config: object,
) -> Path:
    """Write an adapter of tiny models as PEFT does; `ranks` are those of some modules, `config` replaces fields."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name in modules:
            rows, columns = ADAPTED[name]
            own = next((value for end, value in (ranks or {}).items() if name.endswith(end)), rank)
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(own, columns, generator=generator) * 0.2
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, own, generator=generator) * 0.2
    if edit is not None:
        edit(tensors)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "fan_in_fan_out": False,
        "rank_pattern": ranks or {},
        "alpha_pattern": {},
        "qalora_group_size": 16,
        "megatron_core": "megatron.core",
        "loftq_config": {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Path]:
    """Writes an adapter of tiny models under a name: see `write_adapter`."""

    def make(name: str, **changes: Any) -> Path:
        return write_adapter(tmp_path / "adapters" / name, **changes)

    return make


# --- damaged models

INTERESTING = (0, 1, 3, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
SPARE_BYTES = 32 << 20
"""What reading a small model may take in address space beside the file itself."""
SECONDS_A_MODEL = 60
GGUF_HEADER_BYTES = 6_000
"""Of the tiny models, and a little more."""


@pytest.fixture
def load_damaged(tmp_path: Path) -> Callable[[Path, int], dict[str, int]]:
    """Loads so many damaged copies of a sound model in a process that can have no more memory than the sound one took.

    Headers are damaged, and configurations. Each copy loads or is refused in one sentence, or the test fails with what
    happened and the seed. Returns how many did which.
    """

    def load(sound: Path, count: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(
            target=_load_damaged_copies, args=(sound, tmp_path / "damaged", count, sender)
        )
        child.start()
        sender.close()
        seed, outcome = -1, ""
        while True:
            assert receiver.poll(SECONDS_A_MODEL), f"hangs after the seed {seed}"
            try:
                seed, outcome = receiver.recv()
            except EOFError:
                break
            counts[outcome] = counts.get(outcome, 0) + 1
            assert outcome in ("loaded", "refused"), f"seed {seed}: {outcome}"
        child.join()
        assert child.exitcode == 0, f"ends with {child.exitcode} after the seed {seed}"
        assert sum(counts.values()) == count
        return counts

    return load


def _load_damaged_copies(sound: Path, scratch: Path, count: int, outcomes: Connection) -> None:
    from tidegate_engine.weights import ModelError

    torch.set_num_threads(1)
    damaged = scratch / sound.name if sound.is_file() else scratch
    _load_whole(sound, as_stored=True)
    _load_whole(sound, as_stored=False)
    size = sum(file.stat().st_size for file in ([sound] if sound.is_file() else sound.iterdir()))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = taken + SPARE_BYTES + 4 * size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for seed in range(count):
        chance = random.Random(seed)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        _write_damaged(sound, damaged, chance)
        outcome = "loaded"
        try:
            _load_whole(damaged, as_stored=chance.random() < 0.5)
        except ModelError as error:
            outcome = "refused" if "\n" not in str(error) else f"several lines: {error}"
        except BaseException as error:  # noqa: BLE001  # whatever it is, the parent shall say it
            outcome = "".join(traceback.format_exception(error)[-3:])
        outcomes.send((seed, outcome))
    outcomes.close()
    os._exit(0)


def _load_whole(path: Path, *, as_stored: bool) -> None:
    from tidegate_engine.checkpoint import open_checkpoint
    from tidegate_engine.precision import Precision
    from tidegate_engine.precision import as_stored as stored
    from tidegate_engine.tokenizer import load_tokenizer
    from tidegate_engine.transformer import build_decoder

    checkpoint = open_checkpoint(path)
    policy = stored(Precision()) if as_stored or checkpoint.packed else Precision()
    build_decoder(checkpoint.config, checkpoint.load(torch.float32, policy))
    if path.is_file():
        load_tokenizer(path)


def _write_damaged(sound: Path, damaged: Path, chance: random.Random) -> None:
    if sound.is_file():
        damaged.write_bytes(_damage(sound.read_bytes(), chance))
        return
    files = sorted(sound.iterdir())
    hit = chance.choice([file for file in files if file.name == "config.json" or "model" in file.name])
    for file in files:
        content = file.read_bytes()
        (damaged / file.name).write_bytes(_damage(content, chance) if file == hit else content)


def _damage(content: bytes, chance: random.Random) -> bytes:
    """One to three changes within a header: of its bytes, or of its fields so that it can still be read."""
    changes = chance.randint(1, 3)
    if chance.random() < 0.3:
        data = bytearray(content)
        for _ in range(changes):
            _damage_bytes(data, chance)
        return bytes(data)
    if content[:4] == b"GGUF":
        data = bytearray(content)
        own, of_structure = _gguf_fields(content)
        for _ in range(changes):
            start, width = chance.choice(own if chance.random() < 0.85 else of_structure)
            known = [content[place : place + width] for place, other in (*own, *of_structure) if other == width]
            number = chance.choice((*INTERESTING, 2, 6, 8, 10, 12, 14, 32, 72)).to_bytes(8, "little")[:width]
            data[start : start + width] = chance.choice((number, chance.choice(known)))
        return bytes(data)
    if content[:8] == b"TIDEGATE":  # the header's checksum tells any change
        return bytes([*content[:60], content[60] ^ 1, *content[61:]])
    start = 8 if content[8:9] == b"{" else 0
    end = 8 + int.from_bytes(content[:8], "little") if start else len(content)
    described = json.loads(content[start:end])
    for _ in range(changes):
        _damage_json(described, chance)
    header = json.dumps(described).encode()
    return (len(header).to_bytes(8, "little") if start else b"") + header + content[end:]


def _damage_bytes(data: bytearray, chance: random.Random) -> None:
    end = _header_bytes(data)
    place = chance.randrange(end) if end else 0
    match chance.randrange(6):
        case 0:
            data[place : place + 1] = bytes([chance.randrange(256)])
        case 1:
            number, width = chance.choice(INTERESTING), chance.choice((4, 8))
            data[place : place + width] = number.to_bytes(8, "little")[:width]
        case 2:
            data[place:place] = chance.choice((b"9", b"-", b"[", b"{", b'"', b",", b"\x00", b"0e9", b"null"))
        case 3:
            del data[place : place + chance.randint(1, 8)]
        case 4:
            del data[place:]
        case _:
            source = chance.randrange(end) if end else 0
            data[place : place + 16] = data[source : source + 16]


def _header_bytes(data: bytearray) -> int:
    if data[:4] == b"GGUF":
        return min(len(data), GGUF_HEADER_BYTES)
    if data[:8] == b"TIDEGATE":
        return min(len(data), 52 + int.from_bytes(data[12:20], "little"))
    if data[8:9] == b"{":
        return min(len(data), 8 + int.from_bytes(data[:8], "little"))
    return len(data)


def _damage_json(described: Any, chance: random.Random) -> None:
    """Change, delete, copy or rename one thing, at any depth."""
    if not described:
        return
    places = list(described) if isinstance(described, dict) else list(range(len(described)))
    place, other = chance.choice(places), chance.choice(places)
    if isinstance(described[place], dict | list) and chance.random() < 0.85:
        _damage_json(described[place], chance)
        return
    match chance.randrange(6):
        case 0:
            del described[place]
        case 1:
            described[place] = deepcopy(described[other])
        case 2 if isinstance(described, dict):
            described[chance.choice((f"{place}x", str(other), "__metadata__"))] = described.pop(place)
        case _:
            found = described[place]
            numbers = [*INTERESTING, -1, 2, 8, 72, 10**30, 0.5, float("inf"), float("nan")]
            if isinstance(found, int | float):
                numbers += [found + 1, found - 1, found * 2, found // 2]
            strings = ["F32", "F16", "I32", "U8", "F8_E4M3", "I64", "", "llama", "mixtral", "fp8", "gptq", "mlx"]
            described[place] = chance.choice((chance.choice(numbers), chance.choice(strings), None, [], {}, [1], True))


def _gguf_fields(content: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(place, bytes) of what can be changed without losing the header's thread: single values, names, dimensions,
    types, offsets; and of what cannot: counts, lengths, kinds of values, the vocabulary."""
    own: list[tuple[int, int]] = []
    of_structure: list[tuple[int, int]] = [(4, 4)]
    place = 8

    def number(width: int, fields: list[tuple[int, int]]) -> int:
        nonlocal place
        fields.append((place, width))
        place += width
        return int.from_bytes(content[place - width : place], "little")

    def text(fields: list[tuple[int, int]]) -> None:
        nonlocal place
        length = number(8, of_structure)
        if length:
            fields.append((place + length - min(4, length), min(4, length)))
        place += length

    def value(kind: int, fields: list[tuple[int, int]]) -> None:
        if kind == 8:
            text(fields)
        elif kind == 9:
            item, count = number(4, of_structure), number(8, of_structure)
            for _ in range(count):
                value(item, of_structure)
        else:
            number({0: 1, 1: 1, 2: 2, 3: 2, 7: 1, 10: 8, 11: 8, 12: 8}.get(kind, 4), fields)

    tensors, entries = number(8, of_structure), number(8, of_structure)
    for _ in range(entries):
        text(of_structure)
        value(number(4, of_structure), own)
    for _ in range(tensors):
        text(own)
        for _ in range(number(4, of_structure)):
            number(8, own)
        number(4, own)
        number(8, own)
    return own, of_structure
