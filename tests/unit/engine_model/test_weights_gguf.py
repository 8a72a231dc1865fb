"""What the reader makes of sound, foreign and damaged files."""

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tidegate_engine.architecture import parameter_shapes
from tidegate_engine.transformer import build_decoder
from tidegate_engine.weights import ModelError, find_model_file
from tidegate_engine.weights_gguf import load_gguf
from tidegate_kernels.weight import Dense

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
WriteModel = Callable[..., Path]


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_gguf(path, dtype=torch.float32)
    text = str(caught.value)
    assert re.fullmatch(r"[A-Z][A-Za-z]+: [^\n]+", text), text
    return text


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    assert refusal(tmp_path / "x.gguf") == f"ModelNotFound: {tmp_path / 'x.gguf'} does not exist"


def test_a_folder_means_its_only_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"ModelNotFound: .* holds no \.gguf file, nor config\.json"):
        find_model_file(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "README").touch()
    assert find_model_file(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"ModelInvalid: .* several .gguf files \(a.gguf, b.gguf\)"):
        find_model_file(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"), [(b"", "is empty"), (b"PK\x03\x04 something else", "is not a GGUF file")]
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert refusal(path) == f"ModelInvalid: {path} {expected}"


def test_a_file_cut_anywhere_is_called_truncated(tiny_model: Path, tmp_path: Path) -> None:
    content = tiny_model.read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(5, 400, 7), 3_000, 10_000, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        assert "is truncated" in refusal(path), length


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_damaged_header_is_loaded_or_refused_in_one_sentence_and_takes_no_memory(
    write_tiny_model: WriteModel, load_damaged: Callable[[Path, int], dict[str, int]], architecture: str
) -> None:
    types = {
        "blk.0.ffn_down.weight": gguf.GGMLQuantizationType.Q4_1,
        "blk.1.ffn_down.weight": gguf.GGMLQuantizationType.Q8_0,
    }
    path = write_tiny_model(architecture=architecture, types=types)
    counts = load_damaged(path, 400 if PROVE else 60)
    assert counts["refused"] > counts["loaded"] > 0


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.block_count": 3}, "lacks the tensor blk.2.attn_k.weight and 8 others"),
        ({"llama.block_count": 1}, "has the tensor blk.1.attn_k.weight and 8 others, which this engine has no use for"),
        ({"llama.embedding_length": None}, "has None as llama.embedding_length; a positive integer is needed"),
        ({"llama.attention.head_count_kv": 2}, "has 9 heads, which 2 key-value heads do not divide"),
        ({"llama.feed_forward_length": 95}, "in the shape"),
        ({"llama.block_count": 2_000_000_000}, "is damaged: it claims 2000000000 layers and has 20 tensors"),
        (
            {"llama.rope.scaling.type": "ntk"},
            "scales its rotary positions by the method ntk; supported are none, linear",
        ),
        ({"general.architecture": "mamba"}, "has the architecture mamba; supported are llama, qwen2, qwen3, qwen3moe"),
    ],
)
def test_what_the_engine_cannot_serve_is_named(
    write_tiny_model: WriteModel, metadata: dict[str, object], expected: str
) -> None:
    if architecture := metadata.get("general.architecture"):
        path = write_tiny_model(architecture=architecture)
    else:
        path = write_tiny_model(metadata=metadata)
    assert expected in refusal(path)


def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    name, count, of_bytes = b"tokenizer.ggml.token_type", 300 << 20, 0
    path = tmp_path / "x.gguf"
    head = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(name)) + name + struct.pack("<IIQ", 9, of_bytes, count)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + count)
    assert refusal(path) == f"ModelInvalid: {path} has a header of more than 256 MiB, which no model needs"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((0, 72), "has token_embd.weight in the shape (0, 72); a row for each token is needed"),
        ((72,), "has token_embd.weight in the shape (72,); a row for each token is needed"),
        ((262, 72), "has 263 tokens, and token_embd.weight has 262 rows"),
    ],
)
def test_an_embedding_without_a_row_for_each_token_is_refused(
    write_tiny_model: WriteModel, shape: tuple[int, ...], expected: str
) -> None:
    def cut(tensors: dict[str, np.ndarray]) -> None:
        tensors["token_embd.weight"] = np.ones(shape, dtype=np.float32)

    assert expected in refusal(write_tiny_model(edit=cut))


def test_a_tensor_too_many_is_refused(write_tiny_model: WriteModel) -> None:
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.0.attn_rot_embd.weight"] = np.ones(4, dtype=np.float32)

    expected = "has the tensor blk.0.attn_rot_embd.weight, which this engine has no use for"
    assert expected in refusal(write_tiny_model(edit=add))


@pytest.mark.parametrize(
    ("values", "expected"), [([1, 1, 1], "as F32 (3,); expected is F32 (4,)"), ([1, 0, 1, 1], "no divisors")]
)
def test_divisors_of_frequencies_that_make_no_sense_are_refused(
    write_tiny_model: WriteModel, values: list[float], expected: str
) -> None:
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["rope_freqs.weight"] = np.array(values, dtype=np.float32)

    assert expected in refusal(write_tiny_model(edit=add))


def test_values_that_are_not_finite_are_refused(write_tiny_model: WriteModel) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"].copy()
        tensors["blk.1.ffn_up.weight"][5, 5] = np.nan

    assert "is damaged: blk.1.ffn_up.weight holds values that are not finite" in refusal(write_tiny_model(edit=spoil))


def test_every_parameter_is_used_exactly_once(tiny_model: Path) -> None:
    config, parameters = load_gguf(tiny_model, dtype=torch.float32)
    assert parameters.keys() == parameter_shapes(config).keys()
    with pytest.raises(ValueError, match="no use for: stray"):
        build_decoder(config, parameters | {"stray": Dense(torch.zeros(1))})
    del parameters["layers.1.gate"]
    with pytest.raises(KeyError, match=r"layers\.1\.gate"):
        build_decoder(config, dict(parameters))


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
def test_a_quantised_tensor_is_loaded_with_the_values_that_its_format_defines(
    write_tiny_model: WriteModel, kind: str
) -> None:
    original: dict[str, np.ndarray] = {}

    def quantise(tensors: dict[str, np.ndarray]) -> None:
        original["down"] = tensors["blk.0.ffn_down.weight"]

    path = write_tiny_model(edit=quantise, types={"blk.0.ffn_down.weight": gguf.GGMLQuantizationType[kind]})
    stored = gguf.quants.quantize(original["down"], gguf.GGMLQuantizationType[kind])
    expected = torch.tensor([row_values(kind, row.tobytes()) for row in stored])
    _, parameters = load_gguf(path, dtype=torch.float32)
    torch.testing.assert_close(parameters["layers.0.down"].dequantised(), expected, atol=0, rtol=0)


def row_values(kind: str, row: bytes) -> list[float]:
    """A row's values by the formats' definitions: blocks of 32 codes with an fp16 scale and, in Q4_1, a minimum."""
    if kind == "F16":
        return list(struct.unpack(f"<{len(row) // 2}e", row))
    f32 = np.float32
    size = 34 if kind == "Q8_0" else 20
    values: list[float] = []
    for start in range(0, len(row), size):
        block = row[start : start + size]
        scale = f32(struct.unpack("<e", block[:2])[0])
        if kind == "Q8_0":
            values += [float(scale * f32(code)) for code in struct.unpack("32b", block[2:])]
        else:
            minimum = f32(struct.unpack("<e", block[2:4])[0])
            codes = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
            values += [float(scale * f32(code) + minimum) for code in codes]
    return values
