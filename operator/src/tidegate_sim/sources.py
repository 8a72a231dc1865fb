"""What code a result depends on: a module and all that it imports of ours.

Reads sources, runs none. `evaluation` keeps results by it.
"""

import ast
import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def code_digest(modules: tuple[str, ...], packages: tuple[str, ...]) -> str:
    """Of the sources of all that is reached."""
    digest = hashlib.sha256()
    for name, path in sorted(reached(modules, packages).items()):
        digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def reached(modules: Sequence[str], packages: Sequence[str]) -> dict[str, Path]:
    """`modules` and all that they import, directly or not, out of `packages`, by name with their files."""
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name.partition(".")[0] in packages and name not in found and (path := _source(name)) is not None:
            found[name] = path
            waiting += _imported(path)
    return found


def _imported(path: Path) -> Iterator[str]:
    """Every name that may be a module: `from a import b` may mean a.b."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _source(name: str) -> Path | None:
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:  # what is imported from a module is no module
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
