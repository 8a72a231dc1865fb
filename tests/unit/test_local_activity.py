import io
import sys
from pathlib import Path

import pytest

from tidegate_local import activity


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path))


def test_a_finished_step_is_one_line_and_its_output_goes_to_a_log(tmp_path: Path) -> None:
    shown = io.StringIO()
    with activity.Progress(shown) as progress, progress.step("a part") as step:
        activity.run([sys.executable, "-c", "print('compiling')"], step)
        assert step.last == "compiling"
    assert shown.getvalue().splitlines()[-1].endswith("a part: done")
    assert "compiling" not in shown.getvalue()
    assert "compiling" in (tmp_path / "logs" / "a-part.log").read_text()


def run_in_a_step(progress: activity.Progress, script: str, *, cancelled: bool = False) -> None:
    with progress.step("a part") as step:
        if cancelled:
            progress.cancel()
        activity.run([sys.executable, "-c", script], step)


def test_a_failed_command_raises_with_the_end_of_its_output() -> None:
    script = "print('no such module'); raise SystemExit(3)"
    with activity.Progress(io.StringIO()) as progress, pytest.raises(activity.StepFailed, match="no such module"):
        run_in_a_step(progress, script)


def test_cancelling_ends_a_running_command() -> None:
    with activity.Progress(io.StringIO()) as progress, pytest.raises(activity.StepFailed):
        run_in_a_step(progress, "import time; time.sleep(600)", cancelled=True)
