from pathlib import Path

import pytest

from tidegate_local import machine


@pytest.mark.parametrize(
    ("version", "release"),
    [("go1.26.8", (1, 26)), ("go1.9", (1, 9)), ("go1.27rc1", (0, 0)), ("", (0, 0)), ("devel", (0, 0))],
)
def test_the_release_of_go_is_read_from_its_version(version: str, release: tuple[int, int]) -> None:
    assert machine.go_release(version) == release


def test_too_little_disk_is_one_sentence_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path))
    machine.check_disk(1.0)
    with pytest.raises(machine.Unsuitable, match=r"GB free and this needs 1000000\.0 GB"):
        machine.check_disk(1e15)


def test_without_root_the_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(machine.Unsuitable, match="needs root"):
        machine.check(disk_bytes=0)
