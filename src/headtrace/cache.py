"""Where headtrace keeps what it can make again: ``$HEADTRACE_CACHE``, else ``~/.cache/headtrace``.

Where nothing can be written there, a temporary folder takes its place until the program ends.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from functools import cache
from pathlib import Path

from headtrace.errors import InputError


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
            f"There is no place to keep files: {reason}. Set HEADTRACE_CACHE to a folder that can be written to."
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
            f"There is no place for cached files: {reason}, and no temporary folder either ({error}). Set "
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
