"""Files are written whole or not at all; what is no regular file is written through, never replaced."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headtrace.errors import InputError
from headtrace.writing import check_folder_writable, check_writable, replacing, write_bytes, write_text

as_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


def test_a_link_is_followed_and_stays_a_link(tmp_path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "c.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    (tmp_path / "later.json").symlink_to(tmp_path / "real" / "made.json")
    write_text(tmp_path / "later.json", "made")
    assert (tmp_path / "real" / "made.json").read_text() == "made"


def test_the_mode_of_a_file_stays(tmp_path) -> None:
    path = tmp_path / "private.json"
    path.write_text("old")
    for mode in (0o640, 0o600):
        path.chmod(mode)
        write_text(path, "new")
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert path.read_text() == "new"


def test_a_new_file_has_the_mode_that_any_new_file_has(tmp_path) -> None:
    (tmp_path / "usual").write_text("")
    write_text(tmp_path / "ours", "")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_pipe_is_written_through(tmp_path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_bytes(pipe, b"x" * 200_000)
    reader.join(timeout=60)
    assert read == [b"x" * 200_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_is_written_through(tmp_path) -> None:
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    for target in (os.devnull, link):
        check_writable(target)
        write_text(target, "gone")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert link.is_symlink()


@pytest.mark.parametrize(
    "target", ["-", *filter(os.path.exists, ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"))]
)
@pytest.mark.parametrize("into", ["pipe", "file"])
def test_standard_output_is_written_through_wherever_it_leads(target, into, tmp_path) -> None:
    code = (
        f"from headtrace.writing import *; print('before'); check_writable({target!r}); "
        f"write_text({target!r}, 'x' + chr(10)); print('after')"
    )
    if into == "pipe":
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    else:
        with open(tmp_path / "out", "w", encoding="utf-8") as file:
            subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
        done = (tmp_path / "out").read_text()
    assert done == "before\nx\nafter\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_device_is_an_error_with_advice() -> None:
    with pytest.raises(
        InputError, match=r"'/dev/full' cannot be written: No space left on device. Make room"
    ):
        write_text("/dev/full", "x")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    old = tmp_path / "old.json"
    old.write_text("old")
    before = sorted(each.name for each in tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", full)
    for path in (old, tmp_path / "new.json", tmp_path / "far" / "away" / "new.json"):
        with pytest.raises(InputError, match=r"No space left on device. Make room on the disk"):
            write_text(path, "half")
    assert sorted(each.name for each in tmp_path.iterdir()) == before
    assert old.read_text() == "old"


def test_an_error_while_a_library_writes_leaves_nothing(tmp_path) -> None:
    def write() -> None:
        with replacing(tmp_path / "new" / "figure.svg") as temporary:
            assert temporary.suffix == ".svg"
            temporary.write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(InputError, match=r"figure.svg' cannot be written: No space left"):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is empty"),
        ("folder", "it is a folder"),
        ("folder/", "it is a folder"),
        ("missing/", "it is a folder"),
        ("file/c.json", "Not a directory|is not a folder|A part of the path is a file"),
        ("x" * 300 + ".json", "File name too long"),
        ("null\0byte", "null"),
        ("loop", "symbolic links"),
    ],
)
def test_what_cannot_be_written_is_said_before_and_leaves_nothing(name, message, tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = sorted(each.name for each in tmp_path.iterdir())
    target = f"{tmp_path}/{name}" if name else ""
    for write in (check_writable, lambda target: write_text(target, "x")):
        with pytest.raises(InputError, match=message):
            write(target)
    assert sorted(each.name for each in tmp_path.iterdir()) == before


@as_user
def test_a_file_that_may_not_be_written_is_left_alone(tmp_path) -> None:
    path = tmp_path / "c.json"
    path.write_text("old")
    path.chmod(0o400)
    for write in (check_writable, lambda target: write_text(target, "x")):
        with pytest.raises(InputError, match=r"Permission denied. Choose a place"):
            write(path)


def test_the_check_leaves_no_trace(tmp_path) -> None:
    check_writable(tmp_path / "new.json")
    check_writable(tmp_path / "far" / "away.json")
    check_folder_writable(tmp_path / "folder" / "inner")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_said(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inner"):
        with pytest.raises(InputError, match="cannot be a folder"):
            check_folder_writable(folder)


def test_files_of_one_folder_have_one_mode(tmp_path: Path) -> None:
    """Whatever wrote them: safetensors puts a private file of its own in the place of the temporary one."""
    import torch
    from safetensors.torch import save_file

    write_text(tmp_path / "a.json", "{}")
    with replacing(tmp_path / "b.safetensors") as temporary:
        save_file({"x": torch.zeros(2)}, temporary)
    with replacing(tmp_path / "c.bin") as temporary:
        temporary.unlink()
        os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))
    assert len({stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}) == 1
