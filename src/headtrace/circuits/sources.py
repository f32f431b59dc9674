"""Circuits wherever they are kept: a circuit file, a Parquet table, one circuit of it, a folder of files, a run.

>>> import tempfile
>>> from headtrace.circuits import write_parquet
>>> from headtrace.circuits.describe import example
>>> with tempfile.TemporaryDirectory() as folder:
...     table = write_parquet([example(), example()], f"{folder}/many.parquet")
...     len(read_circuits(table)), read_circuit(f"{table}#1") == example()
(2, True)
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from headtrace.circuits.files import load_circuit, loads
from headtrace.circuits.rows import read_parquet
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.circuits.circuit import Circuit

_NUMBERED = re.compile(r"(?P<path>.+)#(?P<number>\d+)")
_NAMED = re.compile(r"(?P<path>.+)#(?P<name>[^#]+)")
RUN, READS_RUNS = "run.json", "headtrace.runs.reading"
"""The file that marks the folder of a run, and the module that reads one: found by name, for data knows no rooms."""
_SCHEMA = b'"headtrace.circuit/'


def read_circuit(source: str | Path) -> Circuit:
    """The one circuit of a source; where it holds several, an error says how to name one."""
    circuits = named_circuits(source)
    if len(circuits) != 1:
        raise InputError(
            f"{str(source)!r} holds {len(circuits)} circuits and one is expected: name it by its number, "
            f"like {str(source) + '#0'!r}."
        )
    return circuits[0][1]


def read_circuits(source: str | Path) -> list[Circuit]:
    """All circuits of a source: ``c.json``, ``many.parquet``, ``many.parquet#3``, a folder, ``-`` (standard input), a
    run, or one prompt of it: ``runs/ioi#3f2a`` (its id, the beginning of one, or its number)."""
    return [circuit for _, circuit in named_circuits(source)]


def named_circuits(source: str | Path) -> list[tuple[str, Circuit]]:
    """The circuits of a source, each with a name under which ``read_circuit`` finds it again."""
    text = os.fspath(source)
    run = _of_run(text)
    if run is not None:
        return run
    numbered = _NUMBERED.fullmatch(text)
    if numbered is None or os.path.lexists(text):  # a file may have such a name
        return _all_of(text)
    circuits, number = _all_of(numbered["path"]), int(numbered["number"])
    if number >= len(circuits):
        raise InputError(
            f"{text!r}: there is no circuit {number} in {numbered['path']!r}, which holds {len(circuits)}, "
            f"numbered from 0."
        )
    return [circuits[number]]


def _of_run(text: str) -> list[tuple[str, Circuit]] | None:
    """The circuits of a run, or the one that is named; none if it is no run."""
    named = None if os.path.lexists(text) else _NAMED.fullmatch(text)
    path, name = (text, None) if named is None else (named["path"], named["name"])
    if "://" not in path and not os.path.isfile(os.path.join(path, RUN)):
        return None
    read: Callable[[str, str | None], list[tuple[str, Circuit]]]
    read = import_module(READS_RUNS).named_circuits_of_run
    return read(path, name)


def _all_of(text: str) -> list[tuple[str, Circuit]]:
    if text == "-":
        return [("-", _from_standard_input())]
    try:
        mode = os.stat(text).st_mode
    except (OSError, ValueError):
        mode = 0  # the reader says what is wrong
    if stat.S_ISCHR(mode):  # which could be read for ever
        raise InputError(
            f"{text!r} is a device; expected a circuit file, a Parquet file or a folder of circuits."
        )
    if stat.S_ISDIR(mode):
        return _of_folder(Path(text))
    if text.lower().endswith(".parquet") or (stat.S_ISREG(mode) and _begins_like_parquet(text)):
        return [(f"{text}#{number}", circuit) for number, circuit in enumerate(read_parquet(text))]
    return [(text, load_circuit(text))]


def _from_standard_input() -> Circuit:
    try:
        return loads(sys.stdin.read())
    except InputError as error:
        raise InputError(f"standard input: {error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text (byte {error.start}).") from None


def _of_folder(folder: Path) -> list[tuple[str, Circuit]]:
    """The circuit files of a folder in the order of their names; other JSON (a report, say) is passed over."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".json" and path.is_file())
        found = [path for path in files if _SCHEMA in path.read_bytes()]
    except OSError as error:
        raise InputError(f"{str(folder)!r} cannot be read: {error.strerror}.") from None
    if not found:
        raise InputError(
            f"The folder {str(folder)!r} holds no circuit files (.json). `headtrace trace ... --out {folder}` "
            "writes some."
        )
    return [(str(path), load_circuit(path)) for path in found]


def _begins_like_parquet(text: str) -> bool:
    try:
        with open(text, "rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False
