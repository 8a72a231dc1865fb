import subprocess
import sys

import pytest

from tidegate_local import cli


@pytest.mark.parametrize(
    ("words", "own", "passed"),
    [
        (["up", "--gpus", "4"], ["up", "--gpus", "4"], []),
        (["kubectl", "-n", "x", "get", "pods", "-A"], ["kubectl"], ["-n", "x", "get", "pods", "-A"]),
        (["kubectl", "--name", "demo", "get", "--name"], ["kubectl", "--name", "demo"], ["get", "--name"]),
        (["exec", "--", "ls", "--", "-l"], ["exec"], ["ls", "--", "-l"]),
        (["helm", "--help"], ["helm"], ["--help"]),
    ],
)
def test_a_tools_own_words_reach_it_unchanged(words: list[str], own: list[str], passed: list[str]) -> None:
    assert cli.split(words) == (own, passed)


@pytest.mark.parametrize("command", ["kubectl", "down", "kubeconfig", "fake-gpus"])
def test_without_a_cluster_the_message_says_so(
    command: str, tmp_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path))
    assert cli.main([command, "2"] if command == "fake-gpus" else [command]) == 1
    assert capsys.readouterr().err.startswith("There is no cluster called tidegate; ")


def test_the_command_answers_without_the_demos_dependencies() -> None:
    script = "import sys; from tidegate_local import cli; print({'rich', 'openai', 'kubernetes'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed == "set()\n"
