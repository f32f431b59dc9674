"""The cache: where it is, and what happens where nothing can be written."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headtrace import writing
from headtrace.errors import InputError
from headtrace.writing import cache_folder


@pytest.fixture(autouse=True)
def _own_places(monkeypatch, tmp_path):
    monkeypatch.delenv("HEADTRACE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    writing._tell.cache_clear()


def test_it_is_where_it_was_asked_for(monkeypatch, tmp_path) -> None:
    assert cache_folder("channels") == tmp_path / "xdg" / "headtrace" / "channels"
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path / "own"))
    assert cache_folder("gguf") == tmp_path / "own" / "gguf"
    assert cache_folder("gguf").is_dir()


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HEADTRACE_CACHE"])
def test_a_file_in_its_place_makes_it_temporary_with_one_note(variable: str, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(variable, str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"cannot keep its cache \(.*file.*HEADTRACE_CACHE") as told:
        folder = cache_folder("channels")
    assert len(told) == 1
    assert cache_folder("channels") == folder
    (folder / "kept").write_text("until the end")


def test_a_folder_without_permission_makes_it_temporary(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("headtrace.writing.os.access", lambda *_: False)
    with pytest.warns(UserWarning, match="no permission to write"):
        assert tmp_path not in cache_folder("channels").parents


def test_a_home_that_is_nowhere_makes_it_temporary(monkeypatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("headtrace.writing.Path.home", _no_home)
    with pytest.warns(UserWarning, match="no home"):
        assert cache_folder("channels").is_dir()


def _no_home():
    raise RuntimeError("no home")


def test_no_place_at_all_is_an_error(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("headtrace.writing._temporary", _full_disk)
    with pytest.raises(InputError, match=r"no folder for cached files.*HEADTRACE_CACHE"):
        cache_folder("channels")


def _full_disk():
    raise OSError("No space left on device")


def test_the_temporary_folder_goes_with_the_program(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    code = "from headtrace.writing import cache_folder; print(cache_folder('gguf'))"
    environment = {"HEADTRACE_CACHE": str(tmp_path / "file"), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "temporary folder" in done.stderr
    assert done.stdout.strip().endswith("gguf")
    assert not (tmp_path.__class__(done.stdout.strip())).exists()
