"""Which tests may run beside each other: `make test` has two workers, and most of what needs a cluster waits.

A file's tests share fixtures, so they stay on one worker; those of a layer with a cluster share that, too.
"""

from pathlib import Path

import pytest

LAYERS_WITH_A_CLUSTER = ("e2e", "apiserver")
"""Longest first: each gets a worker of its own at once, and the rest fills what is left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item.path)))
    items.sort(key=lambda item: _rank(item.path))


def _layer(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).parts[0]


def _group(path: Path) -> str:
    layer = _layer(path)
    return layer if layer in LAYERS_WITH_A_CLUSTER else str(path)


def _rank(path: Path) -> int:
    layer = _layer(path)
    return LAYERS_WITH_A_CLUSTER.index(layer) if layer in LAYERS_WITH_A_CLUSTER else len(LAYERS_WITH_A_CLUSTER)
