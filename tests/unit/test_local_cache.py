import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_local import cache


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.root() == tmp_path / "cache"
    monkeypatch.delenv("TIDEGATE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache.root() == Path("/elsewhere/tidegate")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.root() == Path.home() / ".cache" / "tidegate"


@given(parts=st.lists(st.text(max_size=4), min_size=2, max_size=4))
@settings(max_examples=30)
def test_a_key_tells_apart_what_only_differs_in_where_parts_end(parts: list[str]) -> None:
    joined = [parts[0] + parts[1], *parts[2:]]
    assert cache.key(parts) != cache.key(joined)


def test_a_key_of_files_follows_content_and_names_but_not_compiled_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text("one")
    before = cache.key_of_files([source], below=tmp_path)
    (source / "a.pyc").write_text("compiled")
    assert cache.key_of_files([source], below=tmp_path) == before
    (source / "a.py").write_text("two")
    changed = cache.key_of_files([source], below=tmp_path)
    (source / "a.py").rename(source / "b.py")
    assert len({before, changed, cache.key_of_files([source], below=tmp_path)}) == 3


def test_a_lock_that_is_held_names_its_holder() -> None:
    with (
        cache.lock("store", purpose="the cluster demo"),
        pytest.raises(cache.Busy, match="in use by the cluster demo"),
        cache.lock("store", purpose="a test"),
    ):
        pass


def test_a_lock_is_free_again_after_its_block() -> None:
    with cache.lock("store", purpose="first"):
        pass
    with cache.lock("store", purpose="second"):
        pass


def test_a_turn_comes_after_its_holder_who_is_named() -> None:
    said: list[str] = []
    told = threading.Event()

    def hear(line: str) -> None:
        said.append(line)
        told.set()

    def take_my_turn() -> None:
        with cache.in_turn("store", purpose="second", say=hear):
            said.append("second has it")

    second = threading.Thread(target=take_my_turn)
    with cache.lock("store", purpose="the cluster demo"):
        second.start()
        assert told.wait(10)
        assert "in use by the cluster demo" in said[0]
        assert said[1:] == []
    second.join(10)
    assert said[1:] == ["second has it"]
