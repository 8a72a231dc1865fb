"""`make prove` goes on where it was stopped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
from pathlib import Path

def test_one():
    assert not Path("broken").exists()

def test_two():
    pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/conftest.py").write_bytes(CONFTEST.read_bytes())
    (tmp_path / "tests/test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    return tmp_path


def prove(project: Path) -> str:
    command = [sys.executable, "-m", "pytest", "tests"]
    found = subprocess.run(
        command, cwd=project, env=os.environ | {"TIDEGATE_PROVE": "1"}, capture_output=True, text=True
    )
    return found.stdout.splitlines()[-1]


def test_what_has_passed_is_not_run_again_until_all_has(project: Path) -> None:
    (project / "broken").touch()
    assert "1 failed, 1 passed" in prove(project)
    assert "1 failed, 1 deselected" in prove(project)
    (project / "broken").unlink()
    assert "1 passed, 1 deselected" in prove(project)
    assert "2 passed" in prove(project)


def test_another_source_is_proved_as_a_whole(project: Path) -> None:
    (project / "broken").touch()
    assert "1 failed, 1 passed" in prove(project)
    (project / "tests/test_it.py").write_text(TESTS + "# changed")
    assert "1 failed, 1 passed" in prove(project)
