"""The kept cache: where it lies, content keys, and the locks that keep two runs apart.

Owns paths and locks only; what is put there belongs to `binaries`, `base`, `images`, `store` and `model`.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCKS = "locks"


class Busy(Exception):
    """Somebody else holds a lock; the message says who, and what to do."""


def root() -> Path:
    """The cache folder: $TIDEGATE_CACHE, or $XDG_CACHE_HOME/tidegate, or ~/.cache/tidegate."""
    explicit = os.environ.get("TIDEGATE_CACHE")
    if explicit:
        return Path(explicit).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate"


def folder(name: str) -> Path:
    path = root() / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def key(parts: Iterable[str | bytes]) -> str:
    """Twelve hex digits of the parts; each is delimited, so that moving a byte between two changes the key."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big"))
        digest.update(content)
    return digest.hexdigest()[:12]


def key_of_files(paths: Iterable[Path], *, below: Path) -> str:
    """Key of files by relative name and content; folders are walked, what was compiled and hidden files left out."""
    files: set[Path] = set()
    for path in paths:
        files.update([path] if path.is_file() else (found for found in path.rglob("*") if found.is_file()))
    kept = sorted(file for file in files if file.suffix not in (".pyc", ".so") and not file.name.startswith("."))
    return key(part for file in kept for part in (str(file.relative_to(below)), file.read_bytes()))


@contextmanager
def lock(name: str, *, purpose: str, wait: bool = False) -> Iterator[None]:
    """Hold the lock `name` until the block ends or this process dies. Raises Busy, naming the holder, unless `wait`."""
    handle = take_lock(name, purpose=purpose, wait=wait)
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def in_turn(name: str, *, purpose: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock `name` like `lock`, after its present holder; `say` is told whom this waits for."""
    try:
        handle = take_lock(name, purpose=purpose)
    except Busy as busy:
        say(f"{busy} Waiting for that.")
        handle = take_lock(name, purpose=purpose, wait=True)
    try:
        yield
    finally:
        os.close(handle)


def take_lock(name: str, *, purpose: str, wait: bool = False) -> int:
    """Take the lock and return its file descriptor: whoever holds (or inherited) it holds the lock."""
    path = folder(LOCKS) / name
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        holder = os.read(handle, 500).decode().strip() or "another process"
        os.close(handle)
        raise Busy(f"The {name} is in use by {holder}; it must end first.") from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{purpose} (process {os.getpid()})".encode(), 0)
    return handle
