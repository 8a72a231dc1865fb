"""Which tests may run beside each other: `make test` has two workers, and most of what needs a cluster waits.

A file's tests share fixtures, so they stay on one worker; those of a layer with a cluster share that, too.
"""

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

LAYERS_WITH_A_CLUSTER = ("tests/e2e/", "tests/apiserver/")
"""Longest first: each gets a worker of its own at once, and the rest fills what is left."""


class LayerScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out whole layers where these have a cluster, and whole files elsewhere."""

    def _split_scope(self, nodeid: str) -> str:
        return next((layer for layer in LAYERS_WITH_A_CLUSTER if layer in nodeid), nodeid.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LayerScheduling:
    return LayerScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _rank(item.path.as_posix()))


def _rank(path: str) -> int:
    ranks = (rank for rank, layer in enumerate(LAYERS_WITH_A_CLUSTER) if layer in path)
    return next(ranks, len(LAYERS_WITH_A_CLUSTER))
