"""The engine's own format: what was packed comes back as it was, and a damaged file is refused."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate_engine import cli
from tidegate_engine.checkpoint import open_checkpoint
from tidegate_engine.packed import PAGE_BYTES, load_packed, read_packed
from tidegate_engine.pooling import Pooling
from tidegate_engine.precision import Precision, as_stored, parse_precision
from tidegate_engine.request import PoolingKind
from tidegate_engine.tokenizer import load_tokenizer
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
from tidegate_engine.transformer import build_decoder, forward, layer_caches, new_kv_pool
from tidegate_engine.weights import PACKED_FILE, ModelError
from tidegate_kernels.reference import ragged_batch

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
POLICIES = ["stored", "float32", "bf16", "fp8", "fp8-block128", "int8", "int4-g8", "int3-g24", "{attn: int8, mlp: fp8}"]


def pack(model: Path, folder: Path, policy: str) -> Path:
    assert cli.main(["pack", "--model", str(model), "--output", str(folder), "--precision", policy]) == 0
    return folder


def logits(path: Path, precision: Precision) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    decoder = build_decoder(config, checkpoint.load(torch.float32, precision))
    caches = layer_caches(config, new_kv_pool(config, blocks=2, block_tokens=16, dtype=torch.float32))
    ids = torch.arange(3, 15)
    batch = ragged_batch([12], [12], [[1]], cache=caches[0])
    with torch.inference_mode():
        return forward(decoder, ids, batch, caches=caches, logits_rows=torch.arange(12))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_packed_model_computes_what_the_model_does(tiny_model: Path, tmp_path: Path, policy: str) -> None:
    folder = pack(tiny_model, tmp_path / "packed", policy)
    expected = logits(tiny_model, as_stored(parse_precision(policy)))
    torch.testing.assert_close(logits(folder, as_stored(Precision())), expected, atol=0, rtol=0)


def test_how_embeddings_are_made_is_packed_and_can_be_said_when_packing_or_serving(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["pack", "--model", str(tiny_model), "--output"]
    flag = ["--pooler-config", '{"pooling_type": "mean", "normalize": false}']
    said, unsaid = tmp_path / "said", tmp_path / "unsaid"
    assert cli.main([*command, str(said), *flag]) == cli.main([*command, str(unsaid)]) == 0
    mean = Pooling(PoolingKind.MEAN, is_normalised=False)
    assert (read_packed(said).pooling, read_packed(unsaid).pooling) == (mean, Pooling())
    last = Pooling()
    for folder, wanted, expected in (
        (said, None, mean),
        (said, last, last),
        (unsaid, None, last),
        (unsaid, mean, mean),
    ):
        info = TorchRunner(folder, options=TorchOptions(kv_blocks=8, threads=1, pooling=wanted)).info
        assert Pooling(PoolingKind(info.pooling or ""), is_normalised=info.embedding_normalised) == expected
    assert cli.main([*command, str(tmp_path / "wrong"), "--pooler-config", '{"pooling_type": "max"}']) == 2
    assert "FlagsInvalid: --pooler-config: " in capsys.readouterr().err and not (tmp_path / "wrong").exists()


def test_a_files_own_blocks_and_kinds_that_cannot_be_fused_are_packed_too(
    write_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    kinds = {"blk.0.ffn_down.weight": "Q5_1", "blk.1.attn_q.weight": "F16"}
    path = write_tiny_model(types={name: GGMLQuantizationType[kind] for name, kind in kinds.items()})
    folder = pack(path, tmp_path / "packed", "stored")
    torch.testing.assert_close(
        logits(folder, as_stored(Precision())), logits(path, as_stored(Precision())), atol=0, rtol=0
    )
    assert {"layers.1.q", "layers.0.q+k+v", "layers.1.gate+up"} <= read_packed(folder).weights.keys()


def test_a_packed_model_is_served_as_it_was_packed_with_its_name_and_tokenizer(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = pack(tiny_model, tmp_path / "packed", "int8")
    options = TorchOptions(kv_blocks=8)
    packed, plain = (TorchRunner(path, options=options).info for path in (folder, tiny_model))
    assert packed.weight_dtype == "float32+int8"
    assert packed.weight_bytes < plain.weight_bytes
    assert (packed.name, packed.eos_token_ids, packed.max_model_len) == (
        plain.name, plain.eos_token_ids, plain.max_model_len,
    )  # fmt: skip
    tokenizers = [load_tokenizer(path) for path in (folder, tiny_model)]
    assert tokenizers[0].encode("in the end") == tokenizers[1].encode("in the end")
    messages = [{"role": "user", "content": "the"}]
    assert tokenizers[0].chat(messages) == tokenizers[1].chat(messages)


def test_tensors_lie_at_page_boundaries(tiny_model: Path, tmp_path: Path) -> None:
    model = read_packed(pack(tiny_model, tmp_path / "packed", "int4-g8"))
    starts = [tensor["start"] for entry in model.weights.values() for tensor in entry["tensors"].values()]
    assert len(starts) > 20
    assert all(start % PAGE_BYTES == 0 for start in starts)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_packed(folder, dtype=torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_byte_is_seen(tiny_model: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "packed"
    if not folder.exists():
        pack(tiny_model, folder, "int8")
        (tmp_path / "sound").write_bytes((folder / PACKED_FILE).read_bytes())
    sound = (tmp_path / "sound").read_bytes()
    (folder / PACKED_FILE).write_bytes(sound)
    model = read_packed(folder)
    header_bytes = struct.calcsize("<8sIQ32s") + struct.unpack_from("<Q", sound, 12)[0]
    places = [(0, header_bytes)] + [
        (tensor["start"], tensor["size"]) for entry in model.weights.values() for tensor in entry["tensors"].values()
    ]
    start, size = data.draw(st.sampled_from(places))
    damaged = bytearray(sound)
    damaged[start + data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / PACKED_FILE).write_bytes(damaged)
    assert refusal(folder).startswith("ModelInvalid: ")


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_a_damaged_header_is_refused_in_one_sentence_and_takes_no_memory(
    tiny_model: Path, tmp_path: Path, load_damaged: Callable[[Path, int], dict[str, int]]
) -> None:
    counts = load_damaged(pack(tiny_model, tmp_path / "packed", "int8"), 100 if PROVE else 10)
    assert counts["refused"] > 0


def test_a_file_cut_anywhere_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = pack(tiny_model, tmp_path / "packed", "int8")
    content = (folder / PACKED_FILE).read_bytes()
    for length in (0, 7, 40, 60, 5_000, len(content) // 2, len(content) - 1):
        (folder / PACKED_FILE).write_bytes(content[:length])
        assert "is truncated" in refusal(folder) or "is no packed model" in refusal(folder), length


def test_another_version_says_what_to_do(tiny_model: Path, tmp_path: Path) -> None:
    folder = pack(tiny_model, tmp_path / "packed", "int8")
    content = bytearray((folder / PACKED_FILE).read_bytes())
    content[8] = 9
    (folder / PACKED_FILE).write_bytes(content)
    assert "has the version 9; supported is 1: pack the model again" in refusal(folder)


def test_a_folder_with_something_in_it_is_not_written_to(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.txt").touch()
    assert cli.main(["pack", "--model", str(tiny_model), "--output", str(tmp_path)]) == 2
    assert "is not empty; name a new folder" in capsys.readouterr().err


def test_a_packed_model_is_not_packed_again(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pack(tiny_model, tmp_path / "packed", "int8")
    assert cli.main(["pack", "--model", str(folder), "--output", str(tmp_path / "again")]) == 2
    assert "is packed already; name the model that it was made from" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_inspect_tells_what_a_model_holds_and_what_it_needs(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pack(tiny_model, tmp_path / "packed", "int8")
    capsys.readouterr()
    for path, kind in ((tiny_model, "F32"), (folder, "int8")):
        assert cli.main(["inspect", str(path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["layers"], found["hidden"], found["vocab_size"], found["tied_head"]) == (2, 72, 263, True)
        assert kind in found["stored_bytes_by_type"]
        assert found["kv_bytes_per_token"] == {"float32": 384, "bfloat16": 192, "fp8": 144, "int8": 144}
        needed = found["weight_bytes_by_precision"]
        assert needed["float32"] > 1.9 * needed["bfloat16"] > 2.8 * needed["int8"] > 3 * needed["int4"]
    assert cli.main(["inspect", str(tiny_model)]) == 0
    assert "weights held in" in capsys.readouterr().out
    assert cli.main(["inspect", "/nowhere"]) == 3
