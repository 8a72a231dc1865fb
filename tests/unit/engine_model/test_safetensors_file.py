"""What the reader makes of sound, foreign and damaged safetensors files."""

import json
import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tidegate_engine.safetensors_file import map_files, read_checkpoint, read_file_header
from tidegate_engine.weights import ModelError

PROVE = os.environ.get("TIDEGATE_PROVE") == "1"
TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.arange(4, dtype=np.float16),
    "scalar": np.array(7, dtype=np.int64),
    "empty": np.zeros((0, 3), dtype=np.float32),
}


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        read()
    text = str(caught.value)
    assert re.fullmatch(r"[A-Z][A-Za-z]+: [^\n]+", text), text
    return text


def write_file(path: Path, header: object, data: bytes = b"") -> Path:
    """A file with any header: `header` is written as JSON, or as it is when it is bytes."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)
    return path


def entry(start: int, end: int, *, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def write_sharded(folder: Path, shards: Mapping[str, list[str]], places: Mapping[str, str]) -> Path:
    for file, names in shards.items():
        save_file({name: np.full(3, len(name), dtype=np.float32) for name in names}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_a_file_of_the_reference_writer_is_read_with_its_values(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = read_checkpoint(tmp_path)
    maps = map_files(checkpoint)
    assert checkpoint.tensors.keys() == TENSORS.keys()
    for name, tensor in checkpoint.tensors.items():
        stored = maps[tensor.path][tensor.start : tensor.start + tensor.size_bytes]
        assert (tensor.shape, stored) == (TENSORS[name].shape, TENSORS[name].tobytes())


def test_the_only_file_of_a_folder_is_taken_whatever_its_name(tmp_path: Path) -> None:
    assert "holds no .safetensors file" in refusal(lambda: read_checkpoint(tmp_path))
    save_file(TENSORS, tmp_path / "x.safetensors")
    assert read_checkpoint(tmp_path).tensors.keys() == TENSORS.keys()
    save_file(TENSORS, tmp_path / "y.safetensors")
    assert "several .safetensors files (x.safetensors, y.safetensors) and no" in refusal(
        lambda: read_checkpoint(tmp_path)
    )


def test_an_index_gathers_the_tensors_of_its_files_and_of_no_other(tmp_path: Path) -> None:
    write_sharded(
        tmp_path,
        {"1.safetensors": ["a", "b"], "2.safetensors": ["c"], "stray.safetensors": ["d"]},
        {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"},
    )
    found = read_checkpoint(tmp_path).tensors
    assert {name: tensor.path.name for name, tensor in found.items()} == {
        "a": "1.safetensors",
        "b": "1.safetensors",
        "c": "2.safetensors",
    }


@pytest.mark.parametrize(
    ("shards", "places", "expected"),
    [
        (
            {"1.safetensors": ["a"]},
            {"a": "1.safetensors", "b": "1.safetensors"},
            "names b, which 1.safetensors does not hold",
        ),
        ({"1.safetensors": ["a", "b"]}, {"a": "1.safetensors"}, "does not name b, which 1.safetensors holds"),
        (
            {"1.safetensors": ["a", "b"], "2.safetensors": ["b"]},
            {"a": "1.safetensors", "b": "2.safetensors"},
            "says that 2.safetensors holds b; it is in 1.safetensors",
        ),
        (
            {"1.safetensors": ["a"], "2.safetensors": ["a", "b"]},
            {"a": "1.safetensors", "b": "2.safetensors"},
            "both 1.safetensors and 2.safetensors hold a",
        ),
        ({"1.safetensors": ["a"]}, {"a": "1.safetensors", "b": "2.safetensors"}, "2.safetensors does not exist"),
        ({"1.safetensors": ["a"]}, {"a": "../1.safetensors"}, "which is no .safetensors file in its folder"),
        ({"1.safetensors": ["a"]}, {"a": "model.bin"}, "which is no .safetensors file in its folder"),
        ({"1.safetensors": ["a"]}, {}, "has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, shards: Mapping[str, list[str]], places: Mapping[str, str], expected: str
) -> None:
    write_sharded(tmp_path, shards, places)
    assert expected in refusal(lambda: read_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        ({"a": entry(0, 4)}, b"123", "is truncated: it has"),
        ({"a": entry(0, 4)}, b"12345", "its last 1 bytes belong to no tensor"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"123456", "'b' overlaps another tensor"),
        ({"a": entry(0, 2), "b": entry(3, 6)}, b"123456", "'b' follows bytes of no tensor"),
        ({"a": entry(0, 4, shape=[5])}, b"1234", "'a' takes 5 bytes by its shape"),
        ({"a": entry(0, 4, shape=[1 << 61, 1 << 61])}, b"1234", "bytes by its shape"),
        ({"a": entry(0, 4, shape=[1 << 63])}, b"1234", "'a' has the shape"),
        ({"a": entry(0, 4, shape=[-4])}, b"1234", "'a' has the shape [-4]"),
        ({"a": entry(0, 4, shape=[1] * 9)}, b"1234", "'a' has the shape"),
        ({"a": entry(4, 0, shape=[0])}, b"1234", "lies at [4, 0]"),
        ({"a": {**entry(0, 4), "data_offsets": [0.0, 4.0]}}, b"1234", "has the data_offsets [0.0, 4.0]"),
        ({"a": entry(0, 4, dtype="Q4")}, b"1234", "has 'a' in the type 'Q4'; supported are BOOL, U8"),
        ({"a": 1}, b"", "its entry for 'a' is no object"),
        ([1], b"", "its JSON is no object"),
        (b'{"a": {}, "a": {}}', b"", "names 'a' twice"),
        (b'{"a": ' + b"[" * 100_000, b"", "its JSON cannot be read"),
        (b'{"a": ' + b"9" * 9_000 + b"}", b"", "its JSON cannot be read"),
        (b'{"\xff": 1}', b"", "its JSON is not UTF-8"),
        ({"__metadata__": 3}, b"", "its __metadata__ is no object"),
    ],
)
def test_a_damaged_header_is_refused_with_what_is_wrong(
    tmp_path: Path, header: object, data: bytes, expected: str
) -> None:
    path = write_file(tmp_path / "x.safetensors", header, data)
    assert expected in refusal(lambda: read_file_header(path))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"1234567", "is truncated"),
        (b"GGUF\x03\x00\x00\x00\x00\x00", "claims a header of"),
        (struct.pack("<Q", 50) + b"{}", "is truncated: it has 10 bytes, and its header ends at byte 58"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert expected in refusal(lambda: read_file_header(path))


@pytest.mark.prove
@pytest.mark.timeout(3600)
@settings(
    max_examples=2000 if PROVE else 100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_mutated_file_is_read_or_refused_in_one_sentence(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "mutated.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    content = bytearray(path.read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, header - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "delete"])):
            case "set":
                content[place] = data.draw(st.integers(0, 255))
            case "cut":
                del content[data.draw(st.integers(place, len(content))) :]
            case "insert":
                content[place:place] = data.draw(st.sampled_from([b"9", b"-", b"[", b"{", b'"', b",", b"\x00", b"0e9"]))
            case "delete":
                del content[place : place + data.draw(st.integers(1, 4))]
        header = min(header, max(1, len(content)))
        content = content or bytearray(b"\x00")
    path.write_bytes(content)
    try:
        tensors = read_file_header(path)
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017  # either is right
    else:
        assert all(8 <= tensor.start <= len(content) - tensor.size_bytes for tensor in tensors.values())
