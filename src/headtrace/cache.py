"""Where headtrace keeps what it can make again: ``$HEADTRACE_CACHE``, else ``~/.cache/headtrace``."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(room: str) -> Path:
    """The folder for one kind of cached thing, created on first use."""
    base = os.environ.get("HEADTRACE_CACHE")
    root = (
        Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headtrace"
    )
    folder = root / room
    folder.mkdir(parents=True, exist_ok=True)
    return folder
