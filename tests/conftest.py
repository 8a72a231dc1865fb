"""Which tests may run beside each other, which `make prove` need not run again, and what chance is in all of them.

There are two workers, and most of what needs a cluster waits. A file's tests share fixtures, so they stay on one
worker; those of a layer with a cluster share that, too.
"""

import hashlib
import os
import random
import sys
from pathlib import Path
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


@pytest.fixture(autouse=True)
def the_same_chance_each_time() -> None:
    """What a test draws without a generator of its own is the same in every run, whatever ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


PROVED = "tidegate/proved"


class Proofs:
    """What has passed with the full numbers: not run again until all has passed, or any source has changed."""

    def __init__(self, config: pytest.Config) -> None:
        self._cache = getattr(config, "cache", None)
        self._is_worker = hasattr(config, "workerinput")
        self._sources = _digest(config.rootpath)
        stored = self._cache.get(PROVED, {}) if self._cache else {}
        self._passed: set[str] = set(stored["passed"]) if stored.get("sources") == self._sources else set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left = [item for item in items if item.nodeid not in self._passed]
        if left and len(left) < len(items):
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._passed])
            items[:] = left

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and not self._is_worker:
            self._passed.add(report.nodeid)
            self._save()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and not self._is_worker:
            self._passed = set()
            self._save()

    def _save(self) -> None:
        if self._cache:
            self._cache.set(PROVED, {"sources": self._sources, "passed": sorted(self._passed)})


def _digest(root: Path) -> str:
    """Of all that a proof depends on."""
    digest = hashlib.sha256()
    for folder in ("engine-image", "kernels", "operator", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TIDEGATE_PROVE"):
        config.pluginmanager.register(Proofs(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _rank(item.path.as_posix()))


def _rank(path: str) -> int:
    ranks = (rank for rank, layer in enumerate(LAYERS_WITH_A_CLUSTER) if layer in path)
    return next(ranks, len(LAYERS_WITH_A_CLUSTER))
