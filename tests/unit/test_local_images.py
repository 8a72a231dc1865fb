import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tidegate_local import binaries, images

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def requirements() -> ModuleType:
    spec = importlib.util.spec_from_file_location("requirements", REPOSITORY / "engine-image" / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_extra_that_names_another_extra_brings_its_requirements(requirements: ModuleType) -> None:
    project = {
        "name": "tidegate",
        "dependencies": ["a>=1"],
        "optional-dependencies": {"server": ["b>=2"], "engine": ["tidegate[server]", "c>=3"]},
    }
    assert requirements.of_extra(project, "server") == ["a>=1", "b>=2"]
    assert requirements.of_extra(project, "engine") == ["a>=1", "b>=2", "c>=3"]


def test_only_the_torch_image_needs_torch(requirements: ModuleType) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for extra, wanted in {"server": False, "operator": False, "engine": True}.items():
        assert any(line.startswith("torch") for line in requirements.of_extra(project, extra)) is wanted


def test_all_that_an_image_is_made_of_exists() -> None:
    for image in images.IMAGES:
        for path in image.inputs:
            assert (REPOSITORY / path).exists(), f"{image.short}: {path}"
        assert f"AS {image.target}\n" in (REPOSITORY / image.dockerfile).read_text()


def test_images_are_built_in_one_order_whatever_order_they_are_asked_in() -> None:
    assert [image.short for image in images.by_short_names(["torch", "modelled"])] == ["modelled", "torch"]
    with pytest.raises(KeyError, match="unknown"):
        images.by_short_names(["modelled", "unknown"])


def test_every_binary_is_required_by_the_module_or_lies_in_it() -> None:
    required = (binaries.MODULE / "tools.go").read_text()
    for binary in binaries.BINARIES:
        assert f'"{binary.package}"' in required or (binaries.MODULE / binary.package / "main.go").exists()


def test_the_stamped_version_is_the_one_that_the_module_requires() -> None:
    required = (binaries.MODULE / "go.mod").read_text()
    assert f"\tk8s.io/kubernetes v{binaries.KUBERNETES_VERSION}\n" in required
    assert f"version.gitVersion=v{binaries.KUBERNETES_VERSION}" in binaries.version_flags()
