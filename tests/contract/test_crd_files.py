"""The committed CRD files are what the models say now: run `make generate` after a change of `api`."""

from pathlib import Path

import yaml

from tidegate_operator import crd

ROOT = Path(__file__).parents[2]


def test_the_plain_file_is_generated_from_the_models() -> None:
    assert (ROOT / crd.PLAIN_PATH).read_text(encoding="utf-8") == crd.plain_file()


def test_the_charts_copy_is_generated_from_the_models() -> None:
    assert (ROOT / crd.CHART_PATH).read_text(encoding="utf-8") == crd.chart_file()


def test_a_yaml_reader_finds_the_same_definition() -> None:
    assert yaml.safe_load(crd.plain_file()) == crd.custom_resource_definition()
