"""Everything that a local cluster needs, made once: packages, binaries, images, the model. Nothing to do is instant.

Owns the order and what may run side by side; each part belongs to its own module. Called by the command line, the
demo and the tests.
"""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from tidegate_local import activity, binaries, cache, cluster, images, machine, model, store

ALL_IMAGES = tuple(image.short for image in images.IMAGES)
GO_PEAK_BYTES = 9e9
"""Module cache, build cache and binaries, while the last of them is built."""
BASE_BYTES = 1.5e9
"""The base image, a cluster's state and logs."""


def everything(progress: activity.Progress, names: Sequence[str] = ALL_IMAGES) -> None:
    """Make what is missing, the images `names` among it.

    A set-up that runs already is waited for: what it makes need not be made again.
    Raises machine.Unsuitable or binaries.MissingBinary before anything is started, cache.Busy, activity.StepFailed.
    """
    machine.check(disk_bytes=0)
    if not missing(names):
        return
    with cache.in_turn("set-up", purpose="a set-up", say=progress.say):
        parts = missing(names)
        if not parts:
            return
        progress.say(f"To make, binaries and images side by side: {', '.join(parts)}.")
        machine.check_disk(needed_bytes(names))
        machine.install_packages(progress)
        _side_by_side(progress, [lambda: binaries.build(progress), lambda: _make_images(names, progress)])


def missing(names: Sequence[str]) -> list[str]:
    """What set-up would make, in words; empty when it would find nothing to do."""
    found = [f"package {name}" for name in machine.missing_packages()]
    found += [] if model.is_here() else ["the model SmolLM2"]
    found += [binary.name for binary in binaries.missing()]
    found += ["image pause"] if images.pause_is_stale() else []
    return found + [f"image {image.short}" for image in images.stale(names)]


def needed_bytes(names: Sequence[str]) -> float:
    """Free disk that the missing parts take at their common peak."""
    go = GO_PEAK_BYTES if binaries.missing() else 0.0
    return BASE_BYTES + go + images.needed_bytes(names)


def clean(*, everything: bool) -> float:
    """Remove what no present key names, or the whole cache; bytes freed. Raises cache.Busy while a cluster uses it."""
    with (
        cache.lock("set-up", purpose="a clean-up"),
        cache.lock("image builder", purpose="a clean-up"),
        store.held("a clean-up"),
    ):
        cluster.sweep()
        free_bytes = shutil.disk_usage(cache.root()).free
        if everything:
            if cluster.names():
                raise cache.Busy(
                    f"The binaries are in use by the clusters {', '.join(cluster.names())}; stop them first."
                )
            doomed = [entry for entry in cache.root().iterdir() if entry.name != cache.LOCKS]
        else:
            doomed = [entry for entry in cache.root().glob("bin/*") if entry != binaries.folder()]
            doomed += [cache.root() / name for name in ("go-build", "go-mod", "buildah", "tmp", "logs")]
        for entry in doomed:
            shutil.rmtree(entry, ignore_errors=True)
        return float(shutil.disk_usage(cache.root()).free - free_bytes)


def _make_images(names: Sequence[str], progress: activity.Progress) -> None:
    if not model.is_here():
        with progress.step("model SmolLM2"):
            model.path()
    images.build(names, progress)


def _side_by_side(progress: activity.Progress, parts: Sequence[Callable[[], None]]) -> None:
    """Run the parts at the same time; the first failure ends the others and is raised."""
    with ThreadPoolExecutor(max_workers=len(parts)) as pool:
        running = [pool.submit(part) for part in parts]
        try:
            finished, _ = wait(running, return_when=FIRST_EXCEPTION)
        except BaseException:
            progress.cancel()
            raise
        failed = [part for part in finished if part.exception() is not None]
        if failed:
            progress.cancel()
    for part in failed or running:
        part.result()
