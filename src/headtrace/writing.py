"""How headtrace writes files (whole or not at all, and never over something that is no file), and where it keeps its
cache.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     path = write_text(f"{folder}/new/c.json", "{}")
...     path.read_text(), [each.name for each in path.parent.iterdir()]
('{}', ['c.json'])

A file is written under a temporary name beside it, synced and renamed, so that a reader never sees half of it and a
full disk leaves what was there. Symbolic links are followed, and an existing file keeps its mode. Devices, pipes and
open descriptors (``/dev/null``, ``/dev/stdout``) are written through; ``-`` is standard output.

``check_writable`` says beforehand whether all that would work, so that nothing is computed in vain.

What headtrace can make again is in ``$HEADTRACE_CACHE``, else ``~/.cache/headtrace``. Where nothing can be written
there, a temporary folder takes its place until the program ends.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from headtrace.errors import InputError

STANDARD_OUTPUT = "-"
Target = str | os.PathLike[str]
"""Where to write: a path, or ``-`` for standard output."""


def write_text(target: Target, text: str) -> Path:
    """Write text as UTF-8, with the line ends it has."""
    return write_bytes(target, text.encode())


def write_report(target: Target, content: Any) -> Path:
    """Write plain values as JSON that people can read as well, for other programs."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: only its escape can be written
        text = json.dumps(content, indent=1)
    return write_text(target, text + "\n")


def write_bytes(target: Target, content: bytes) -> Path:
    """Write a file in one step; see the module for links, devices and ``-``."""
    with replacing(target) as temporary:
        temporary.write_bytes(content)
    return Path(target)


@contextmanager
def replacing(target: Target) -> Generator[Path]:
    """A temporary path to write to in the block, which then takes the place of the target.

    It has the extension of the target, for libraries that choose a format by it. After an error nothing has changed.

    >>> with tempfile.TemporaryDirectory() as folder, suppress(KeyError):
    ...     with replacing(f"{folder}/c.json") as temporary:
    ...         _ = temporary.write_text("half of")
    ...         raise KeyError
    >>> os.path.exists(folder)
    False
    """
    path, mode = _destination(target)
    stream = path is None or (mode is not None and not stat.S_ISREG(mode))
    folder = Path(tempfile.gettempdir()) if path is None or stream else path.parent
    name = Path(os.fspath(target)).name
    temporary = folder / f".{Path(name).stem[:40]}.{secrets.token_hex(6)}{Path(name).suffix[:20]}"
    created = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A new file has the mode that umask gives it; what replaces a private one is at no time open to others.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if mode is None else 0o600))
        own = os.stat(temporary).st_mode if mode is None else mode
        yield temporary
        if path is None or stream:
            _write_through(target, path, temporary)
        else:
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.chmod(
                temporary, stat.S_IMODE(own)
            )  # libraries may put a private file of their own in its place
            os.replace(temporary, path)
        created = []
    except BrokenPipeError:
        raise  # nobody reads any more: not an error of the file
    except OSError as error:
        raise _unwritable(target, error) from None
    finally:
        temporary.unlink(missing_ok=True)
        for each in created:
            with suppress(OSError):  # something else is in it by now
                each.rmdir()


def check_writable(target: Target) -> None:
    """Raise ``InputError`` if a file cannot be written there; leaves no trace.

    >>> check_writable("/")
    Traceback (most recent call last):
    headtrace.errors.InputError: '/' cannot be written: it is a folder. Give the name of a file.
    """
    path, mode = _destination(target)
    try:
        if path is not None and (mode is None or stat.S_ISREG(mode)):
            _try_folder(path.parent)
    except OSError as error:
        raise _unwritable(target, error) from None


def check_folder_writable(folder: Target) -> None:
    """Raise ``InputError`` if files cannot be written into a folder, which need not exist yet; leaves no trace."""
    _require_name(folder)
    try:
        _try_folder(Path(os.path.realpath(folder)))
    except NotADirectoryError:
        raise InputError(
            f"{os.fspath(folder)!r} cannot be a folder: it, or a part of its path, is a file. Give the name of a "
            "folder, or of one that does not exist yet."
        ) from None
    except (OSError, ValueError) as error:
        raise _unwritable(folder, error) from None


def ends_like_a_folder(text: str) -> bool:
    """Whether a path ends in a separator of folders; where that is a backslash, a slash will do, too.

    >>> ends_like_a_folder("circuits/"), ends_like_a_folder("circuits")
    (True, False)
    """
    return text.endswith(tuple(filter(None, (os.sep, os.altsep))))


def _require_name(target: Target) -> None:
    if not os.fspath(target):
        raise InputError("The name of the file to write is empty. Give a path, or - for standard output.")


def _destination(target: Target) -> tuple[Path | None, int | None]:
    """The path to write to, with links followed, and the mode of what is there already; no path for an open file."""
    _require_name(target)
    text = os.fspath(target)
    if text == STANDARD_OUTPUT or _descriptor(text) is not None:
        return None, None
    mode = None
    try:
        path = Path(os.path.realpath(text))
        with suppress(FileNotFoundError):
            mode = os.stat(text).st_mode
            if not os.access(text, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        raise _unwritable(target, error) from None
    if ends_like_a_folder(text) or (mode is not None and stat.S_ISDIR(mode)):
        raise InputError(f"{text!r} cannot be written: it is a folder. Give the name of a file.")
    return path, mode


def _descriptor(text: str) -> int | None:
    """The number of an open file that is named by a path: a file moved there would not reach it."""
    named = {"/dev/stdout": 1, "/dev/stderr": 2}
    numbered = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", text)
    return int(numbered[1]) if numbered else named.get(text)


def _write_through(target: Target, path: Path | None, temporary: Path) -> None:
    """Copy the content to a device, a pipe, an open file or standard output."""
    sys.stdout.flush()
    descriptor = _descriptor(os.fspath(target))
    if path is None and descriptor is None and not hasattr(sys.stdout, "buffer"):
        # A notebook's standard output takes text only.
        sys.stdout.write(temporary.read_bytes().decode(errors="replace"))
        return
    with temporary.open("rb") as content:
        if path is not None:
            with open(path, "wb", buffering=0) as stream:
                shutil.copyfileobj(content, stream)
        elif descriptor is not None:
            with os.fdopen(os.dup(descriptor), "wb") as stream:
                shutil.copyfileobj(content, stream)
        else:
            shutil.copyfileobj(content, sys.stdout.buffer)
            sys.stdout.buffer.flush()


def _try_folder(folder: Path) -> None:
    """Make a file without a name in a folder, or where the folder itself would have to be made."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder")
    with tempfile.TemporaryFile(dir=folder):
        pass


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


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, which is also what the hub knows a large file by."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 22), b""):
            digest.update(block)
    return digest.hexdigest()


def cache_folder(room: str, *, lasting: bool = False) -> Path:
    """The folder for one kind of cached thing, created on first use; if it has to be ``lasting``, no temporary one."""
    try:
        folder = _root() / room
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        reason = f"no permission to write to {str(folder)!r}"
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        reason = str(error)
    if lasting:
        raise InputError(
            f"There is no folder to keep files in: {reason}. Set HEADTRACE_CACHE to a folder that can be written to."
        )
    return _temporary_folder(reason, room)


def _root() -> Path:
    own = os.environ.get("HEADTRACE_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "headtrace"


def _temporary_folder(reason: str, room: str) -> Path:
    try:
        folder = Path(_temporary().name) / room
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(
            f"There is no folder for cached files: {reason}, and no temporary folder either ({error}). Set "
            "HEADTRACE_CACHE to a folder that can be written to."
        ) from error
    _tell(reason)
    return folder


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """One for the whole process, removed when it ends."""
    # Where a file that is mapped into memory cannot be removed (Windows), it stays: no reason to fail at the end.
    return tempfile.TemporaryDirectory(prefix="headtrace-", ignore_cleanup_errors=True)


@cache
def _tell(reason: str) -> None:
    warnings.warn(
        f"headtrace cannot keep its cache ({reason}); it uses a temporary folder until this program ends. Set "
        "HEADTRACE_CACHE to a folder that can be written to.",
        stacklevel=5,
    )
