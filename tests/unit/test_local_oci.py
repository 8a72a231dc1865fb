import io
import json
import tarfile
from pathlib import Path

import pytest

from tidegate_local import oci


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return tmp_path / "layout"


@pytest.fixture
def manifest(layout: Path, tmp_path: Path) -> oci.Descriptor:
    program = tmp_path / "pause"
    program.write_bytes(b"\x7fELF" + b"code" * 2000)
    return oci.write_program_image(layout, program)


def archived(layout: Path, manifest: oci.Descriptor) -> dict[str, bytes]:
    written = io.BytesIO()
    oci.write_archive(layout, manifest, "example.test/pause:1", output=written)
    with tarfile.open(fileobj=io.BytesIO(written.getvalue())) as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
    return {name: file.read() for name, file in files.items() if file is not None}


def layer_path(layout: Path, manifest: oci.Descriptor) -> Path:
    return oci.blob_path(layout, oci.layers(layout, manifest)[0]["digest"])


def test_an_archive_names_the_image_and_holds_all_its_blobs(layout: Path, manifest: oci.Descriptor) -> None:
    files = archived(layout, manifest)
    index = json.loads(files["index.json"])
    assert index["manifests"][0]["annotations"] == {"io.containerd.image.name": "example.test/pause:1"}
    assert f"blobs/sha256/{layer_path(layout, manifest).name}" in files
    assert len(files) == 5


def test_the_layer_of_a_program_image_holds_an_executable(layout: Path, manifest: oci.Descriptor) -> None:
    with tarfile.open(layer_path(layout, manifest)) as layer:
        (member,) = layer.getmembers()
    assert (member.name, member.mode) == ("pause", 0o755)


def test_a_layer_turns_hollow_when_archived_and_is_left_out_from_then_on(
    layout: Path, manifest: oci.Descriptor
) -> None:
    path = layer_path(layout, manifest)
    size_bytes = path.stat().st_size
    archived(layout, manifest)
    assert path.stat().st_size == size_bytes
    assert path.stat().st_blocks == 0
    assert f"blobs/sha256/{path.name}" not in archived(layout, manifest)


def test_a_hollow_layer_that_containerd_lost_is_forgotten(layout: Path, manifest: oci.Descriptor) -> None:
    path = layer_path(layout, manifest)
    archived(layout, manifest)
    oci.forget_lost(layout, {f"sha256:{path.name}"})
    assert path.exists()
    oci.forget_lost(layout, set())
    assert not path.exists()


def test_an_image_is_found_by_its_reference(layout: Path, manifest: oci.Descriptor) -> None:
    named = {**manifest, "annotations": {"org.opencontainers.image.ref.name": "torch"}}
    (layout / "index.json").write_text(json.dumps({"manifests": [named]}))
    assert oci.find_manifest(layout, "torch")["digest"] == manifest["digest"]
    with pytest.raises(KeyError):
        oci.find_manifest(layout, "modelled")
