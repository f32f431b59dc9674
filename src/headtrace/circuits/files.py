"""Circuit files: JSON, one node or edge per line, the same circuit always the same bytes.

>>> from headtrace.circuits.describe import example
>>> print(*dumps(example()).splitlines()[-4:], sep="\\n")
{"source": 1, "target": 0, "side": "root", "weight": 2.5, "channels": null},
{"source": 2, "target": 1, "side": "query", "weight": 0.3, "channels": [1, 4]}
]
}
>>> loads(dumps(example())) == example()
True
>>> content_id(example()) == content_id(example()) != content_id(example().prune(min_weight=1.0))
True

Circuits are read from wherever they are kept (``read_circuits``): a circuit file, a Parquet table, one circuit of it, a
folder of files, a run.

>>> import tempfile
>>> from headtrace.circuits import write_parquet
>>> from headtrace.circuits.describe import example
>>> with tempfile.TemporaryDirectory() as folder:
...     table = write_parquet([example(), example()], f"{folder}/many.parquet")
...     len(read_circuits(table)), read_circuit(f"{table}#1") == example()
(2, True)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.circuits.circuit import Circuit
from headtrace.errors import InputError, shown
from headtrace.roots import ROOTS
from headtrace.validation import document, fail, file_text, parse, plain, read_object
from headtrace.writing import write_text

if TYPE_CHECKING:
    pass


SCHEMA = "headtrace.circuit/2"


def load_circuit(path: str | Path) -> Circuit:
    """Read a circuit file, of this version or an earlier one. For a damaged file, the error names the field."""
    made = f"{'trace' if Path(path).suffix else 'run'} ... --out {path}"
    text = file_text(path, "a circuit file", f"`headtrace {made}` writes one.")
    try:
        return loads(text)
    except InputError as error:
        other = ""
        if text.lstrip().startswith("<") or ('"schema"' not in text and '"nodes"' in text):
            other = f". Is it another tool's graph? `headtrace import {path} --out circuit.json` reads those"
        raise InputError(f"{path}: {error}{other}") from None


def loads(text: str) -> Circuit:
    """A circuit from the text of a circuit file."""
    return from_json(parse(text))


def from_json(data: Any) -> Circuit:
    """A circuit from the data of a circuit file."""
    return read_object(Circuit, _upgrade(data))


def save_circuit(circuit: Circuit, path: str | Path) -> Path:
    """Write a circuit file in one step, so that a reader never sees half of it."""
    return write_text(path, dumps(circuit))


def dumps(circuit: Circuit) -> str:
    """The text of the circuit file. A circuit was checked when it was made, so that what is written can be loaded."""
    return document(to_json(circuit))


def to_json(circuit: Circuit) -> dict[str, Any]:
    """The circuit as JSON data, in the order in which it is written: what it is about first, then the graph."""
    data = plain(circuit)
    root = {"kind": circuit.root.kind, **data["root"]}
    nodes, edges = data.pop("nodes"), data.pop("edges")
    return {"schema": SCHEMA, **data, "root": root, "nodes": nodes, "edges": edges}


def content_id(circuit: Circuit) -> str:
    """A hash of everything in a circuit, 32 hexadecimal digits: the same on every machine and in every file version."""

    def canonical(value: Any) -> Any:
        """Equal numbers in the same form: 1.0 as 1, -0.0 as 0, up to 2**53, where floats hold every integer."""
        if isinstance(value, float):
            return int(value) if value.is_integer() and abs(value) < 2**53 else value
        if isinstance(value, dict):
            return {key: canonical(item) for key, item in value.items()}
        return [canonical(item) for item in value] if isinstance(value, list) else value

    content = {key: canonical(value) for key, value in to_json(circuit).items() if key != "schema"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# -- files of earlier versions -------------------------------------------------------------------------------------

_FIRST = "headtrace.circuit/1"
_ROOT_OF_FIRST = (
    *("kind", "answer", "wrong", "value", "position"),
    *("layer", "support", "answer_tokens", "wrong_tokens", "label"),
)
_HEADS = "attention of "


def _upgrade(data: Any) -> dict[str, Any]:
    """The data of a circuit file as the present version has it, without the key ``schema``.

    Version 1 had one form of root for all kinds, and kept the names of unexplained firings beside the nodes.
    """
    if not isinstance(data, dict):
        fail("", 'a JSON object with the key "schema"', data)
    schema = data.get("schema")
    if schema not in (SCHEMA, _FIRST):
        raise InputError(
            f"schema: expected {SCHEMA!r} or {_FIRST!r}, got {shown(schema)}. Is it a circuit file, and is headtrace "
            "new enough to read it?"
        )
    rest = {key: value for key, value in data.items() if key != "schema"}
    if schema == SCHEMA:
        return rest
    unexplained = rest.pop("unexplained", None) or []
    if not isinstance(unexplained, list) or not all(isinstance(name, str) for name in unexplained):
        fail("unexplained", "a list of text", unexplained)
    root = rest.get("root")
    return rest | {"root": _upgrade_root(root)} if isinstance(root, dict) else rest


def _upgrade_root(root: dict[str, Any]) -> dict[str, Any]:
    kind, label = root.get("kind"), root.get("label")
    if kind == "linear" and isinstance(label, str) and label.startswith(_HEADS):
        kind = "heads"
        root = root | {"kind": kind, "heads": label.removeprefix(_HEADS).split(", ")}
    if kind == "probability":
        root = root | {"wrong": None}
    if not isinstance(kind, str) or kind not in ROOTS:
        return root
    kept = {field.name for field in fields(ROOTS[kind])}
    return {key: value for key, value in root.items() if key in kept or key not in _ROOT_OF_FIRST}


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
        from headtrace.circuits.rows import read_parquet

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
