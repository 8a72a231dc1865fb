"""Runs the tests in `interpreted/`, a file a process, with Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_under_the_interpreter_equal_the_reference(file: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=file.parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
