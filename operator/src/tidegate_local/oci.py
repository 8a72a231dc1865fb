"""OCI images on disk: a layout folder whose layers turn hollow once imported, archives of it, and one tiny image.

A hollow blob is a sparse file of the right size: it tells buildah that the blob has been written before, and takes no
disk. containerd has the content. Called by `images` only; reads no configuration and starts no process.
"""

import hashlib
import io
import json
import os
import platform
import tarfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
CHUNK_BYTES = 1 << 20
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

Descriptor = Mapping[str, Any]


def blob_path(layout: Path, digest: str) -> Path:
    algorithm, _, hexadecimal = digest.partition(":")
    return layout / "blobs" / algorithm / hexadecimal


def find_manifest(layout: Path, reference: str) -> Descriptor:
    """The descriptor of an image by its reference name in index.json. Raises KeyError."""
    index = json.loads((layout / "index.json").read_text())
    for descriptor in index["manifests"]:
        if descriptor.get("annotations", {}).get("org.opencontainers.image.ref.name") == reference:
            return dict(descriptor)
    raise KeyError(reference)


def layers(layout: Path, manifest: Descriptor) -> list[Descriptor]:
    return list(json.loads(blob_path(layout, manifest["digest"]).read_text())["layers"])


def is_hollow(path: Path) -> bool:
    status = path.stat()
    return status.st_size > 0 and status.st_blocks == 0


def hollow(path: Path) -> None:
    """Free the disk of a blob, keeping its name and size."""
    size_bytes = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size_bytes)


def forget_lost(layout: Path, present: Collection[str]) -> None:
    """Remove hollow blobs whose content containerd no longer has, so that they are written again when needed."""
    for path in (layout / "blobs" / "sha256").glob("*"):
        if is_hollow(path) and f"sha256:{path.name}" not in present:
            path.unlink()


def write_archive(layout: Path, manifest: Descriptor, name: str, *, output: IO[bytes]) -> None:
    """Stream an OCI archive of one image under its full name; layers turn hollow as they go, hollow ones are left out.

    A reader that fails has lost the layers that it was sent: `forget_lost` before the next attempt finds them.
    """
    config = json.loads(blob_path(layout, manifest["digest"]).read_text())["config"]
    to_hollow = {layer["digest"] for layer in layers(layout, manifest)}
    blobs = [manifest, config, *layers(layout, manifest)]
    named = {**manifest, "annotations": {"io.containerd.image.name": name}}
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [named]}
    with tarfile.open(fileobj=output, mode="w|", bufsize=CHUNK_BYTES) as archive:
        _add(archive, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(archive, "index.json", json.dumps(index).encode())
        for digest in dict.fromkeys(blob["digest"] for blob in blobs):
            path = blob_path(layout, digest)
            if not is_hollow(path):
                archive.add(path, arcname=str(path.relative_to(layout)))
                if digest in to_hollow:
                    hollow(path)


def write_program_image(layout: Path, program: Path) -> Descriptor:
    """Put an image into the layout that holds nothing but one static program, its entry point."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        _add(archive, program.name, program.read_bytes(), mode=0o755)
    layer = _write_blob(layout, packed.getvalue(), LAYER_TYPE)
    config = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"]},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    described = _write_blob(layout, json.dumps(config).encode(), CONFIG_TYPE)
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": described, "layers": [layer]}
    return _write_blob(layout, json.dumps(manifest).encode(), MANIFEST_TYPE)


def _write_blob(layout: Path, content: bytes, media_type: str) -> Descriptor:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    path = blob_path(layout, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return {"mediaType": media_type, "digest": digest, "size": len(content)}


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = mode
    archive.addfile(member, io.BytesIO(content))
