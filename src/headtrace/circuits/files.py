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
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from headtrace.circuits.circuit import Circuit
from headtrace.errors import InputError, shown
from headtrace.roots import ROOTS
from headtrace.validation import document, fail, file_text, parse, plain, read_object
from headtrace.writing import write_text

SCHEMA = "headtrace.circuit/2"


def load_circuit(path: str | Path) -> Circuit:
    """Read a circuit file, of this version or an earlier one. A damaged one gets an error that names the field."""
    text = file_text(path, "a circuit file", f"`headtrace trace ... --out {path}` writes one.")
    try:
        return loads(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


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
