"""Where circuits are written with ``--out``: what its extension says, known and checked before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headtrace.cli.output import is_stream
from headtrace.errors import InputError
from headtrace.writing import (
    STANDARD_OUTPUT,
    check_folder_writable,
    check_writable,
    ends_like_a_folder,
    write_text,
)

if TYPE_CHECKING:
    from headtrace.circuits import Circuit

EXTENSIONS = {
    ".json": "json",
    ".parquet": "parquet",
    ".html": "html",
    ".graphml": "graphml",
    ".dot": "dot",
}
FORMATS = ("json", "graphml", "networkx", "neuronpedia", "dot", "parquet", "html")
"""By name, so that help needs no circuits: those that are text are ``circuits.exports.TEXTS``."""
_TOGETHER = ("parquet", "html")
"""Formats of which one file holds many circuits."""


class Destination(NamedTuple):
    """A file, or a folder of one file per circuit, and the format."""

    path: str
    format: str
    folder: bool = False

    def check(self) -> None:
        """Raise ``InputError`` if it cannot be written."""
        (check_folder_writable if self.folder else check_writable)(self.path)

    def write(self, circuits: Sequence[Circuit], *, force: bool = False) -> str:
        """Write the circuits; what was written, in words. Only with ``force`` does an empty one replace a file."""
        if self.folder:
            return self._write_folder(circuits, force)
        if not force and not any(circuit.edges for circuit in circuits):
            _keep(self.path)
        if self.format == "parquet":
            from headtrace.circuits import write_parquet

            write_parquet(circuits, self.path)
        elif self.format == "html":
            from headtrace.explorer import write_page

            write_page(circuits, self.path, compare=len(circuits) == 2)
        else:
            write_text(self.path, self._text(circuits[0]))
        return "" if self.path == STANDARD_OUTPUT else f"Wrote {self.path}"

    def _write_folder(self, circuits: Sequence[Circuit], force: bool) -> str:
        ending = next((end for end, name in EXTENSIONS.items() if name == self.format), ".json")
        paths = [Path(self.path) / f"circuit-{number:05d}{ending}" for number in range(len(circuits))]
        for path, circuit in zip(paths, circuits, strict=True):
            if not force and not circuit.edges:
                _keep(str(path))
        for path, circuit in zip(paths, circuits, strict=True):
            write_text(path, self._text(circuit))
        return f"Wrote {len(circuits)} files to {self.path}"

    def _text(self, circuit: Circuit) -> str:
        from headtrace.circuits.exports import TEXTS

        return TEXTS[self.format](circuit)


def destination(out: str, *, many: bool, to: str | None = None) -> Destination:
    """Where ``out`` leads, by its extension, or in the format ``to``.

    >>> destination("c.parquet", many=True).format, destination("circuits", many=True).folder
    ('parquet', True)
    """
    if to is not None and to not in FORMATS:
        raise InputError(f"There is no format {to!r}: choose {', '.join(FORMATS)}.")
    ending = Path(out).suffix.lower()
    folder = os.path.isdir(out) or ends_like_a_folder(out) or (not ending and not is_stream(out))
    form = to or ("json" if folder or is_stream(out) else EXTENSIONS.get(ending))
    if form is None:
        raise InputError(
            f"--out {out!r}: {ending} is not a format of circuits. End it in {', '.join(EXTENSIONS)}, or give a folder."
        )
    if folder and form in _TOGETHER:
        raise InputError(
            f"--out {out!r} is a folder, but {form} is one file: give a name that ends in .{form}."
        )
    if many and not folder and form not in _TOGETHER:
        raise InputError(
            f"--out {out!r} holds one circuit, and there are many: end it in .parquet or .html, or give a folder."
        )
    return Destination(out, form, folder)


def _keep(path: str) -> None:
    """Raise ``InputError`` if an empty circuit would replace a file."""
    if path != STANDARD_OUTPUT and os.path.isfile(path) and os.path.getsize(path):
        raise InputError(
            f"The circuit is empty, and {path!r} exists and was not replaced. Give --force to replace it, or another "
            "--out."
        )
