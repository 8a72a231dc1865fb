"""The operator's settings: every variable, its default, and one sentence when it is wrong."""

from pathlib import Path

import pytest

from tidegate_operator.__main__ import main
from tidegate_operator.gpus import Prices
from tidegate_operator.settings import SettingsError, read

GIVEN = {
    "TIDEGATE_NAMESPACE": "tidegate",
    "TIDEGATE_ENGINE_IMAGE": "engine:1",
    "TIDEGATE_ADMIN_KEY_SECRET": "keys",
    "KUBECONFIG": "/k",
}


def test_defaults_are_those_of_the_chart() -> None:
    settings = read(GIVEN)
    assert settings.scopes == (None,)
    assert settings.prometheus_url is None
    assert (settings.metrics_port, settings.health_port, settings.resync_seconds) == (9090, 8080, 300)
    assert settings.engine_run_as_user == 10001


def test_namespaces_are_a_list_without_repetition() -> None:
    settings = read(GIVEN | {"TIDEGATE_WATCH_NAMESPACES": " a, b ,,a"})
    assert settings.scopes == ("a", "b")


def test_gpu_budgets_are_counts_by_name() -> None:
    assert read(GIVEN).gpu_budgets == {}
    settings = read(GIVEN | {"TIDEGATE_GPU_BUDGETS": "nvidia.com/gpu=16, amd.com/gpu=4,"})
    assert settings.gpu_budgets == {"nvidia.com/gpu": 16, "amd.com/gpu": 4}


def test_an_empty_user_id_leaves_the_choice_to_the_cluster() -> None:
    assert read(GIVEN | {"TIDEGATE_ENGINE_RUN_AS_USER": ""}).engine_run_as_user is None


def test_gpu_prices_are_read_as_the_chart_writes_them() -> None:
    assert read(GIVEN).gpu_prices == Prices()
    given = read(GIVEN | {"TIDEGATE_GPU_PRICES": "H100 SXM=2.1,NVIDIA-L4=0.5,"})
    assert given.gpu_prices == Prices({"H100 SXM": 2.1, "L4": 0.5})


def test_decisions_are_recorded_only_where_a_file_is_named() -> None:
    assert read(GIVEN).journal is None
    settings = read(GIVEN | {"TIDEGATE_JOURNAL": "/tmp/j", "TIDEGATE_JOURNAL_MEGABYTES": "8"})
    assert (settings.journal, settings.journal_megabytes) == (Path("/tmp/j"), 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"TIDEGATE_NAMESPACE": " "}, "TIDEGATE_NAMESPACE is not set"),
        ({"TIDEGATE_RESYNC_SECONDS": "soon"}, "not a number"),
        ({"TIDEGATE_METRICS_PORT": "99999"}, "allowed are 0 to 65535"),
        ({"TIDEGATE_JOURNAL_MEGABYTES": "0"}, "allowed are 1 to 100000"),
        ({"TIDEGATE_LOG_LEVEL": "loud"}, "allowed are DEBUG"),
        ({"TIDEGATE_ENGINE_RUN_AS_USER": "root"}, "not a user id"),
        ({"KUBECONFIG": ""}, "KUBECONFIG"),
        ({"TIDEGATE_GPU_BUDGETS": "nvidia.com/gpu"}, "give NAME=COUNT"),
        ({"TIDEGATE_GPU_BUDGETS": "nvidia.com/gpu=many"}, "give NAME=COUNT"),
        ({"TIDEGATE_GPU_PRICES": "L4=cheap"}, "TIDEGATE_GPU_PRICES: .* is not a number of dollars"),
    ],
)
def test_a_wrong_variable_is_named(change: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        read(GIVEN | change)


def test_the_program_says_what_is_missing_and_ends_with_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*GIVEN, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert main(["run"]) == 2
    assert "KUBECONFIG" in capsys.readouterr().err
