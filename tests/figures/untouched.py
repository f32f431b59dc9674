"""Drawing must leave a user's matplotlib as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl


def settings() -> dict[str, object]:
    """All settings and the backend, read without making matplotlib choose a backend."""
    return {name: dict.__getitem__(mpl.rcParams, name) for name in dict.keys(mpl.rcParams)}


@contextmanager
def matplotlib_untouched() -> Iterator[None]:
    before = settings()
    yield
    assert settings() == before
