"""Whether a run can be kept somewhere, found out before anything is computed."""

from __future__ import annotations

import re

from headtrace.errors import InputError
from headtrace.runs.lock import LEASE, LOCK
from headtrace.runs.manifest import MANIFEST, PLAN, Manifest, read_manifest
from headtrace.runs.store import Store

_TEMPORARY = re.compile(r"(.*/)?\.[^/]+")


def is_temporary(name: str) -> bool:
    """Whether a killed run left it: a file under another name, beside its place.

    >>> is_temporary("shards/.00003.edges.8f3e21.parquet"), is_temporary("shards/00003.edges.parquet")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def check_place(store: Store) -> Manifest | None:
    """The manifest of a run that is there; ``InputError`` for a place that holds other things or cannot be written."""
    if store.folder is not None and store.folder.exists() and not store.folder.is_dir():
        raise InputError(f"{store.url!r} is a file; a run is a folder. Give the name of a new one.")
    sizes = store.sizes()
    store.check_writable()
    if MANIFEST in sizes:
        return read_manifest(store.read(MANIFEST), store.url)
    others = sorted(name for name in sizes if name not in (LOCK, LEASE, PLAN) and not is_temporary(name))
    if others:
        raise InputError(
            f"{store.url!r} holds other files ({', '.join(others[:3])}{' ...' if others[3:] else ''}) and is not a "
            f"run: it has no {MANIFEST}. Give a folder that is empty, or new."
        )
    return None
