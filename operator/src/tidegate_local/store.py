"""containerd's store of imported images: a kept cache that one full-node cluster at a time may use.

Owns its place, its lock, its configuration, imports and the clearing of what killed clusters left. The CRI side of
containerd is started by `cluster`; this module runs containerd only for upkeep, without CRI.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tidegate_local import activity, cache, namespaces, templates

LOCK = "image store"
SOCKET = "/run/tidegate-containerd/containerd.sock"
PAUSE_IMAGE = "tidegate.local/pause:dev"
CTR = ("ctr", "--address", SOCKET, "--namespace", "k8s.io")


class StoreFailed(Exception):
    """containerd did not start or refused a command; the message carries its output."""


def folder() -> Path:
    return cache.root() / "store"


def configuration(state: Path, *, upkeep: bool) -> str:
    """containerd's configuration file; for upkeep without CRI, which would start by adopting what was left behind."""
    values = {
        "store": str(folder() / "containerd"),
        "state": str(state),
        "socket": SOCKET,
        "pause_image": PAUSE_IMAGE,
        "disabled_plugins": '"io.containerd.grpc.v1.cri"' if upkeep else "",
    }
    return templates.render("containerd.toml", values)


@dataclass(frozen=True, slots=True)
class Containerd:
    """A running containerd, reached in the namespaces that it runs in."""

    inside: namespaces.Namespaces

    def import_image(self, write_archive: Callable[[IO[bytes]], None], step: activity.Step) -> None:
        """Import what `write_archive` writes, an OCI archive; layers that the store has may be missing from it."""
        argv = self.inside.enter([*CTR, "images", "import", "-"])
        pipe = subprocess.PIPE
        # Unbuffered: what a dead reader has not taken must not wait here for another attempt.
        with subprocess.Popen(
            argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=namespaces.environment()
        ) as importer:
            step.watch(importer)
            assert importer.stdin is not None
            assert importer.stdout is not None
            with suppress(BrokenPipeError):
                write_archive(importer.stdin)
            importer.stdin.close()
            said = importer.stdout.read().decode(errors="replace").strip()
        if importer.returncode != 0:
            raise StoreFailed(f"An image was not imported: {said or 'containerd was stopped'}. Run this again.")

    def content_digests(self) -> set[str]:
        return set(self._ctr("content", "ls", "--quiet").split())

    def image_names(self) -> list[str]:
        return self._ctr("images", "ls", "-q").split()

    def clear(self) -> None:
        """Remove the containers of clusters that are gone, with their writable layers."""
        left = self._ctr("containers", "ls", "-q").split()
        if left:
            self._ctr("containers", "rm", *left)

    def _ctr(self, *arguments: str) -> str:
        return run_ctr(self.inside, arguments)


def run_ctr(inside: namespaces.Namespaces, arguments: Sequence[str]) -> str:
    argv = inside.enter([*CTR, *arguments])
    done = subprocess.run(argv, capture_output=True, text=True, env=namespaces.environment())
    if done.returncode != 0:
        raise StoreFailed(f"ctr {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def upkeep(lock: int) -> Iterator[Containerd]:
    """Run containerd without CRI on the store, in throw-away namespaces. The caller holds the store's lock."""
    state = folder() / "upkeep"
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(parents=True)
    (state / "containerd.toml").write_text(configuration(state, upkeep=True))
    inside, life = namespaces.create(state, node=False, detached=False, inherited=[lock])
    try:
        log = state / "containerd.log"
        with log.open("w") as output:
            argv = inside.enter(["sh", "-c", 'mount -t tmpfs tmpfs /run && exec "$@"', "sh", *containerd(state)])
            process = subprocess.Popen(argv, stdout=output, stderr=output, env=namespaces.environment())
        _await_ready(inside, process, log)
        yield Containerd(inside)
    finally:
        inside.end(state)
        process.wait()
        if life is not None:
            os.close(life)
        shutil.rmtree(state, ignore_errors=True)


def containerd(state: Path) -> list[str]:
    return ["containerd", "--config", str(state / "containerd.toml"), "--log-level", "warn"]


@contextmanager
def held(purpose: str) -> Iterator[int]:
    """Hold the store while the block runs. Raises cache.Busy."""
    handle = take_lock(purpose)
    try:
        yield handle
    finally:
        os.close(handle)


def take_lock(purpose: str) -> int:
    """The descriptor that holds the store; whoever inherits it keeps holding it. Raises cache.Busy."""
    return cache.take_lock(LOCK, purpose=purpose)


def _await_ready(inside: namespaces.Namespaces, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            run_ctr(inside, ["version"])
            return
        except StoreFailed:
            if process.poll() is not None or time.monotonic() > deadline:
                raise StoreFailed(f"containerd did not start:\n{log.read_text()[-2000:]}") from None
            time.sleep(0.1)
