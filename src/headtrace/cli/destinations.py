"""Where circuits are written with ``--out``: what its extension says, known and checked before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headtrace.cli.output import is_folder, is_stream
from headtrace.errors import InputError
from headtrace.writing import (
    STANDARD_OUTPUT,
    check_folder_writable,
    check_writable,
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
        ending = next((end for end, name in EXTENSIONS.items() if name == self.format), ".json")
        if self.folder:
            places = {f"{self.path}/circuit-{i:05d}{ending}": [each] for i, each in enumerate(circuits)}
        else:
            places = {self.path: circuits}
        for path, inside in places.items():
            replaced = path != STANDARD_OUTPUT and os.path.isfile(path) and os.path.getsize(path)
            if replaced and not force and not any(circuit.edges for circuit in inside):
                raise InputError(
                    f"The circuit is empty, and {path!r} exists and was not replaced. Give --force to replace it, or "
                    "another --out."
                )
        for path, inside in places.items():
            if self.format == "parquet":
                from headtrace.circuits import write_parquet

                write_parquet(inside, path)
            elif self.format == "html":
                from headtrace.explorer import write_page

                write_page(inside, path, compare=len(inside) == 2)
            else:
                from headtrace.circuits.exports import TEXTS

                write_text(path, TEXTS[self.format](inside[0]))
        if self.folder:
            return f"Wrote {len(circuits)} files to {self.path}"
        return "" if self.path == STANDARD_OUTPUT else f"Wrote {self.path}"


def destination(out: str, *, many: bool, to: str | None = None) -> Destination:
    """Where ``out`` leads, by its extension, or in the format ``to``.

    >>> destination("c.parquet", many=True).format, destination("circuits", many=True).folder
    ('parquet', True)
    """
    if to is not None and to not in FORMATS:
        raise InputError(f"There is no format {to!r}: choose {', '.join(FORMATS)}.")
    ending = Path(out).suffix.lower()
    folder = is_folder(out)
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
