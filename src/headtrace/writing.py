"""How headtrace writes files: whole or not at all, and never over something that is no file.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     path = write_text(f"{folder}/new/c.json", "{}")
...     path.read_text(), [each.name for each in path.parent.iterdir()]
('{}', ['c.json'])

A regular file is written under another name beside it and then moved into place, so that a reader never sees half of
it and a full disk leaves what was there. A link is followed, mode and owner stay. A file with several hard links is
written in place, for a new file would leave the other names behind. Devices, pipes and open descriptors (``/dev/null``,
``/dev/stdout``) are written through; ``-`` is standard output.

``check_writable`` asks beforehand whether all that would work, so that nothing is computed in vain.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from headtrace.errors import InputError

STANDARD_OUTPUT = "-"
Target = str | os.PathLike[str]
"""Where to write: a path, or ``-`` for standard output."""


def write_text(target: Target, text: str) -> Path:
    """Write text as UTF-8, with the line ends it has."""
    return write_bytes(target, text.encode())


def write_bytes(target: Target, content: bytes) -> Path:
    """Write a file in one step; see the module for links, devices and ``-``."""
    with replacing(target) as temporary:
        temporary.write_bytes(content)
    return Path(target)


@contextmanager
def replacing(target: Target) -> Generator[Path]:
    """For what can only write to a path: one to write to in the block, whose content then becomes the target's.

    It ends like the target does, so that a format chosen by extension is the same. After an error nothing has changed.

    >>> with tempfile.TemporaryDirectory() as folder, suppress(KeyError):
    ...     with replacing(f"{folder}/c.json") as temporary:
    ...         _ = temporary.write_text("half of")
    ...         raise KeyError
    >>> os.path.exists(folder)
    False
    """
    place = _place(target)
    made: list[Path] = []
    temporary = None
    try:
        made = _make_folder(place)
        temporary = _temporary(place)
        yield temporary
        _put(temporary, place)
        made = []
    except BrokenPipeError:
        raise  # nobody reads any more: not an error of the file
    except OSError as error:
        raise _unwritable(target, error) from None
    finally:
        _remove(temporary, made)


def check_writable(target: Target) -> None:
    """Raise ``InputError`` if a file cannot be written there; leaves no trace.

    >>> check_writable("/")
    Traceback (most recent call last):
    headtrace.errors.InputError: '/' cannot be written: it is a folder. Give the name of a file.
    """
    place = _place(target)
    try:
        if place.path is None:
            if place.descriptor is not None:
                os.fstat(place.descriptor)
        elif place.before is None:
            _try_folder(place.path.parent)
        elif place.moved:
            with suppress(PermissionError):  # then it is written in place
                _try_folder(place.path.parent)
    except OSError as error:
        raise _unwritable(target, error) from None


def check_folder_writable(folder: Target) -> None:
    """Raise ``InputError`` if files cannot be written into a folder, which need not exist yet; leaves no trace."""
    try:
        _try_folder(Path(os.path.realpath(_text(folder))))
    except InputError:
        raise
    except NotADirectoryError:
        raise InputError(
            f"{os.fspath(folder)!r} cannot be a folder: it, or a part of its path, is a file. Give the name of a "
            "folder, or of one that does not exist yet."
        ) from None
    except (OSError, ValueError) as error:
        raise _unwritable(folder, error) from None


def ends_like_a_folder(text: str) -> bool:
    """Whether a path ends in what separates folders here; where that is a backslash, a slash will do, too.

    >>> ends_like_a_folder("circuits/"), ends_like_a_folder("circuits")
    (True, False)
    """
    return text.endswith(tuple(filter(None, (os.sep, os.altsep))))


class _Place(NamedTuple):
    """Where a target leads: a path with links followed, or the number of an open file, or (neither) standard output."""

    path: Path | None = None
    descriptor: int | None = None
    before: os.stat_result | None = None

    @property
    def moved(self) -> bool:
        """Whether a new file is moved there; else what is there is written to."""
        if self.path is None:
            return False
        return self.before is None or (stat.S_ISREG(self.before.st_mode) and self.before.st_nlink == 1)


def _text(target: Target) -> str:
    text = os.fspath(target)
    if not text:
        raise InputError("The name of the file to write is empty. Give a path, or - for standard output.")
    return text


def _place(target: Target) -> _Place:
    text = _text(target)
    if text == STANDARD_OUTPUT:
        return _Place()
    try:
        descriptor = _descriptor(text)
        if descriptor is not None:
            return _Place(descriptor=descriptor)
        before = _stat(text)
        path = Path(os.path.realpath(text))
    except (OSError, ValueError) as error:
        raise _unwritable(target, error) from None
    if ends_like_a_folder(text) or (before is not None and stat.S_ISDIR(before.st_mode)):
        raise InputError(f"{text!r} cannot be written: it is a folder. Give the name of a file.")
    return _Place(path, before=before)


def _stat(text: str) -> os.stat_result | None:
    """What is there already, if it may be written."""
    try:
        found = os.stat(text)
    except FileNotFoundError:
        return None
    if not os.access(text, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return found


def _descriptor(text: str) -> int | None:
    """The open file that a path like ``/dev/stdout`` or ``/dev/fd/3`` names: a file moved there would not reach it."""
    own = re.compile(rf"/dev/fd|/proc/{os.getpid()}(/task/\d+)?/fd")  # the first where it is no link: macOS
    for _ in range(40):  # as many links as the system follows
        folder, name = os.path.split(os.path.abspath(text))
        folder = os.path.realpath(folder)
        if own.fullmatch(folder) and name.isdigit():
            return int(name)
        text = os.path.join(folder, name)
        if not os.path.islink(text):
            return None
        text = os.path.join(folder, os.readlink(text))
    return None


def _make_folder(place: _Place) -> list[Path]:
    """Make the folders on the way that are missing, and say which."""
    if place.path is None:
        return []
    missing = [folder for folder in place.path.parents if not folder.exists()]
    place.path.parent.mkdir(parents=True, exist_ok=True)
    return missing


def _try_folder(folder: Path) -> None:
    """Make a file without a name in a folder, or where the folder itself would have to be made."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder")
    with tempfile.TemporaryFile(dir=folder):
        pass


def _temporary(place: _Place) -> Path:
    """A new empty file: beside its place if it will be moved there, with the mode that a new file has."""
    name = "" if place.path is None else place.path.name
    ending = Path(name).suffix[:20]
    folder = Path(tempfile.gettempdir())
    if place.path is not None and place.moved:
        folder = place.path.parent
        if place.before is not None and not os.access(folder, os.W_OK):
            folder = Path(tempfile.gettempdir())
    path = folder / f".{Path(name).stem[:40]}.{secrets.token_hex(6)}{ending}"
    # An existing file may be private: then its successor is at no time open to others.
    mode = 0o666 if place.before is None and place.path is not None else 0o600
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    return path


def _put(temporary: Path, place: _Place) -> None:
    """Bring the content of the temporary file to its place."""
    if place.path is None or not (place.before is None or stat.S_ISREG(place.before.st_mode)):
        with temporary.open("rb") as content, _stream(place) as stream:
            shutil.copyfileobj(content, stream)
            stream.flush()
        return
    if place.moved and temporary.parent == place.path.parent and _moved(temporary, place):
        return
    _overwrite(place.path, temporary)


def _moved(temporary: Path, place: _Place) -> bool:
    """Move it; false where that cannot keep what the file was."""
    assert place.path is not None
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    try:
        if place.before is not None:
            _give_to(temporary, place.before)
            os.chmod(temporary, stat.S_IMODE(place.before.st_mode))
        os.replace(temporary, place.path)
    except OSError as error:
        if place.before is None or error.errno not in (errno.EPERM, errno.EACCES, errno.EBUSY):
            raise
        return False
    return True


def _give_to(temporary: Path, before: os.stat_result) -> None:
    """Let it belong to whom the file belonged, where files belong to users by number."""
    if hasattr(os, "chown"):
        made = os.stat(temporary)
        if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
            os.chown(temporary, before.st_uid, before.st_gid)


def _overwrite(path: Path, temporary: Path) -> None:
    """Write over a file in place; if that fails half way, put back what it held."""
    before = path.read_bytes()
    try:
        _fill(path, temporary.read_bytes())
    except BaseException:
        with suppress(OSError):
            _fill(path, before)
        raise


def _fill(path: Path, content: bytes) -> None:
    with path.open("rb+") as file:
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _stream(place: _Place) -> Generator[BinaryIO]:
    """What is written through: a device, a pipe, an open file; standard output stays open."""
    if place.path is not None:
        with open(place.path, "wb", buffering=0) as stream:
            yield stream
    elif place.descriptor is not None:
        sys.stdout.flush()
        with os.fdopen(os.dup(place.descriptor), "wb") as stream:
            yield stream
    elif hasattr(sys.stdout, "buffer"):
        sys.stdout.flush()
        yield sys.stdout.buffer
    else:  # a notebook's standard output takes text only
        content = io.BytesIO()
        yield content
        sys.stdout.write(content.getvalue().decode(errors="replace"))


def _remove(temporary: Path | None, made: list[Path]) -> None:
    if temporary is not None:
        temporary.unlink(missing_ok=True)
    for folder in made:
        with suppress(OSError):  # something else is in it by now
            folder.rmdir()


_ADVICE = {
    errno.ENOSPC: "Make room on the disk, or write somewhere else",
    errno.EDQUOT: "Make room on the disk, or write somewhere else",
    errno.EACCES: "Choose a place where you may write",
    errno.EPERM: "Choose a place where you may write",
    errno.EROFS: "Choose a place where you may write",
    errno.ENOTDIR: "A part of the path is a file: choose another folder",
}


def _unwritable(target: Target, error: OSError | ValueError) -> InputError:
    number = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or str(error)
    advice = _ADVICE.get(number or 0, "Give the name of a file that can be written")
    return InputError(f"{os.fspath(target)!r} cannot be written: {reason}. {advice}.")
