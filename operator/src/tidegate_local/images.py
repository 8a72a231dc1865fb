"""The images that pods run: which there are, when they are stale, and the way from Dockerfile to containerd's store.

Owns the list and the records of what has been imported. Called by `setup`, and by the command line for names.
"""

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate_local import activity, builder, cache, oci, store

REPOSITORY = Path(__file__).parents[3]
PAUSE_SOURCE = Path(__file__).parent / "pause.c"
PAUSE = "pause"


class NoSources(Exception):
    """This installation has no repository around it to build images from."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image of ours: its short name on the command line, its full name, and what it is built from."""

    short: str
    name: str
    dockerfile: str
    target: str
    inputs: tuple[str, ...]
    peak_disk_bytes: float


_PROJECT = ("pyproject.toml", "constraints.txt", "engine-image/requirements.py", "engine-image/src")
ENGINE = ("engine-image/Dockerfile", *_PROJECT, "kernels/src")
OPERATOR = ("operator/Dockerfile", *_PROJECT, "operator/src/tidegate_operator")
IMAGES = (
    Image("modelled", "tidegate.local/engine:modelled", "engine-image/Dockerfile", "modelled", ENGINE, 1e9),
    Image("operator", "tidegate.local/operator:dev", "operator/Dockerfile", "operator", OPERATOR, 2e9),
    Image("smollm2", "tidegate.local/smollm2:dev", "engine-image/Dockerfile", "smollm2", ENGINE[:1], 1e9),
    Image("torch", "tidegate.local/engine:torch", "engine-image/Dockerfile", "torch", ENGINE, 22e9),
)


def by_short_names(names: Sequence[str]) -> list[Image]:
    """Images in build order. Raises KeyError for a name that there is not."""
    unknown = set(names) - {image.short for image in IMAGES}
    if unknown:
        raise KeyError(", ".join(sorted(unknown)))
    return [image for image in IMAGES if image.short in names]


def key(image: Image) -> str:
    """Content key of an image: equal keys, equal image."""
    if not (REPOSITORY / image.dockerfile).exists():
        raise NoSources(
            "Images are built from a checkout of the repository: install Tidegate from one with pip install -e."
        )
    files = cache.key_of_files([REPOSITORY / path for path in image.inputs], below=REPOSITORY)
    return cache.key([files, builder.base_image()])


def stale(names: Sequence[str]) -> list[Image]:
    return [image for image in by_short_names(names) if _recorded(image.short) != key(image)]


def pause_is_stale() -> bool:
    return _recorded(PAUSE) != _pause_key()


def build(names: Sequence[str], progress: activity.Progress) -> None:
    """Build and import what is stale, one image after the other. Raises cache.Busy when a cluster uses the store."""
    pending = stale(names)
    if not pending and not pause_is_stale():
        return
    with cache.lock("image builder", purpose="an image build"):
        if pause_is_stale():
            with progress.step("pause image") as step:
                _import(PAUSE, store.PAUSE_IMAGE, _pause_key(), make=lambda layout: _make_pause(layout, step))
        if pending:
            with progress.step("base image") as step:
                builder.build_base(step)
        for image in pending:
            with progress.step(f"image {image.short}") as step:
                _build_one(image, step)


def _build_one(image: Image, step: activity.Step) -> None:
    wanted = key(image)
    dockerfile = REPOSITORY / image.dockerfile
    builder.build(dockerfile, target=image.target, tag=image.name, context=REPOSITORY, step=step)

    def push(layout: Path) -> oci.Descriptor:
        step.saw("writing layers")
        builder.push_to_layout(image.name, layout, reference=image.short, step=step)
        return oci.find_manifest(layout, image.short)

    step.saw("importing")
    _import(image.short, image.name, wanted, make=push)


def _import(short: str, name: str, wanted: str, *, make: Callable[[Path], oci.Descriptor]) -> None:
    """Put an image into the layout, stream it to containerd, and leave only hollow layers behind."""
    layout = cache.folder("store/layout")
    with store.held(f"an import of {name}") as lock, store.upkeep(lock) as upkeep:
        present = upkeep.content_digests()
        oci.forget_lost(layout, present)
        manifest = make(layout)
        upkeep.import_image(lambda output: oci.write_archive(layout, manifest, name, output=output))
        oci.hollow(layout, manifest)
    record = cache.folder("store/records") / f"{short}.json"
    record.write_text(json.dumps({"name": name, "key": wanted}))


def _make_pause(layout: Path, step: activity.Step) -> oci.Descriptor:
    program = cache.folder("tmp") / "pause"
    activity.run(["gcc", "-Os", "-static", "-s", "-o", program, PAUSE_SOURCE], step)
    return oci.write_program_image(layout, program)


def _pause_key() -> str:
    return cache.key([PAUSE_SOURCE.read_text(), platform.machine()])


def _recorded(short: str) -> str | None:
    path = cache.root() / "store" / "records" / f"{short}.json"
    return str(json.loads(path.read_text())["key"]) if path.exists() else None
