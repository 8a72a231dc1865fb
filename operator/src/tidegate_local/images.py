"""The images that pods run: which there are, when they are stale, and the way from Dockerfile to containerd's store.

Owns the list and the records of what has been imported. Called by `setup`, and by the command line for names.
"""

import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidegate_local import activity, builder, cache, cluster, oci, store

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


REBUILD_BYTES = 1e9
"""Disk that an image takes whose dependencies have been built before: only the sources are new."""
_DEPENDENCIES = ("pyproject.toml", "constraints.txt", "engine-image/requirements.py")
_PROJECT = (*_DEPENDENCIES, "engine-image/src")
COMPILE_KERNELS = "kernels/build_native.py"
ENGINE = ("engine-image/Dockerfile", *_PROJECT, COMPILE_KERNELS, "kernels/src")
OPERATOR = ("operator/Dockerfile", *_PROJECT, COMPILE_KERNELS, "operator/src/tidegate_operator")
IMAGES = (
    Image("modelled", "tidegate.local/engine:modelled", "engine-image/Dockerfile", "modelled", ENGINE, 1e9),
    Image("operator", "tidegate.local/operator:dev", "operator/Dockerfile", "operator", OPERATOR, 2e9),
    Image("smollm2", "tidegate.local/smollm2:dev", "engine-image/Dockerfile", "smollm2", ENGINE[:1], 1e9),
    Image("torch", "tidegate.local/engine:torch", "engine-image/Dockerfile", "torch", ENGINE, 24e9),
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
    return _key_of(image.inputs)


def needed_bytes(names: Sequence[str]) -> float:
    """Free disk that building what is stale takes at its peak; less where the dependencies' layers are still there."""

    def of(image: Image) -> float:
        known = builder.folder().exists() and _recorded(image.short, "dependencies") == _dependencies_key(image)
        return REBUILD_BYTES if known else image.peak_disk_bytes

    return sum(of(image) for image in stale(names))


def stale(names: Sequence[str]) -> list[Image]:
    return [image for image in by_short_names(names) if _recorded(image.short, "key") != key(image)]


def pause_is_stale() -> bool:
    return _recorded(PAUSE, "key") != _pause_key()


def build(names: Sequence[str], progress: activity.Progress) -> None:
    """Build and import what is stale, one image after the other. Raises cache.Busy during another build or import."""
    pending = stale(names)
    if not pending and not pause_is_stale():
        return
    with cache.lock("image builder", purpose="an image build"):
        builder.clear_leftovers(cache.folder("store/layout"))
        if pause_is_stale():
            with progress.step("pause image") as step:
                record = {"name": store.PAUSE_IMAGE, "key": _pause_key()}
                _import(PAUSE, record, make=lambda layout: _make_pause(layout, step), step=step)
        if pending and not builder.has_image(builder.base_image()):
            with progress.step("base image") as step:
                builder.build_base(step)
        if pending:
            with progress.step("compiled kernels") as step:
                # Here, and not in the images: their base has no compiler.
                activity.run([sys.executable, REPOSITORY / COMPILE_KERNELS], step)
        for image in pending:
            with progress.step(f"image {image.short}") as step:
                _build_one(image, step)


def _build_one(image: Image, step: activity.Step) -> None:
    record = {"name": image.name, "key": key(image), "dependencies": _dependencies_key(image)}
    dockerfile = REPOSITORY / image.dockerfile
    builder.build(dockerfile, target=image.target, tag=image.name, context=REPOSITORY, step=step)

    def push(layout: Path) -> oci.Descriptor:
        builder.push_to_layout(image.name, layout, reference=image.short, step=step)
        step.saw("importing into containerd")
        return oci.find_manifest(layout, image.short)

    _import(image.short, record, make=push, step=step)


def _import(
    short: str, record: Mapping[str, str], *, make: Callable[[Path], oci.Descriptor], step: activity.Step
) -> None:
    """Put an image into the layout, stream it to containerd, leave only hollow layers behind, and record it."""
    name = record["name"]
    layout = cache.folder("store/layout")
    with _open_store(f"an import of {name}") as upkeep:
        present = upkeep.content_digests()
        oci.forget_lost(layout, present)
        manifest = make(layout)
        upkeep.import_image(lambda output: oci.write_archive(layout, manifest, name, output=output), step)
    (cache.folder("store/records") / f"{short}.json").write_text(json.dumps(record))


@contextmanager
def _open_store(purpose: str) -> Iterator[store.Containerd]:
    """The store by a containerd of our own, or by that of the cluster that uses it: its new pods get the new image."""
    user = cluster.running_node()
    if user is not None:
        yield user.image_store
    else:
        with store.held(purpose) as lock, store.upkeep(lock) as upkeep:
            yield upkeep


def _make_pause(layout: Path, step: activity.Step) -> oci.Descriptor:
    program = cache.folder("tmp") / "pause"
    activity.run(["gcc", "-Os", "-static", "-s", "-o", program, PAUSE_SOURCE], step)
    return oci.write_program_image(layout, program)


def _pause_key() -> str:
    return cache.key([PAUSE_SOURCE.read_text(), platform.machine()])


def _dependencies_key(image: Image) -> str:
    return _key_of((image.dockerfile, *_DEPENDENCIES))


def _key_of(inputs: Sequence[str]) -> str:
    files = cache.key_of_files([REPOSITORY / path for path in inputs], below=REPOSITORY)
    return cache.key([files, builder.base_image()])


def _recorded(short: str, what: str) -> str | None:
    path = store.folder() / "records" / f"{short}.json"
    found: str | None = json.loads(path.read_text()).get(what) if path.exists() else None
    return found
