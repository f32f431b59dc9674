"""Circuit files: JSON, one node or edge per line, the same circuit always the same bytes.

>>> from headtrace.circuits.describe import example
>>> print(*dumps(example()).splitlines()[-4:], sep="\\n")
{"source": 1, "target": 0, "side": "root", "weight": 2.5, "channels": null},
{"source": 2, "target": 1, "side": "query", "weight": 0.3, "channels": [1, 4]}
]
}
>>> loads(dumps(example())) == example()
True
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from headtrace.circuits.circuit import Circuit
from headtrace.circuits.versions import SCHEMA, upgrade
from headtrace.errors import InputError, shown
from headtrace.validation import ALWAYS, input_error
from headtrace.writing import write_text

_CIRCUIT = TypeAdapter(Circuit)


def load_circuit(path: str | Path) -> Circuit:
    """Read a circuit file, of this version or an earlier one. A damaged one gets an error that names the field."""
    text = file_text(path, "a circuit file", f"`headtrace trace ... --out {path}` writes one.")
    try:
        return loads(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def file_text(path: str | Path, what: str, advice: str) -> str:
    """The text of a JSON file; where it cannot be read, an error says so, and what to do if there is none."""
    path = Path(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"No {what.removeprefix('a ')} at {path}. {advice}") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; expected {what} (JSON).") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); expected {what} (JSON).") from None
    except (OSError, ValueError) as error:  # a name with a null byte is a value error
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def loads(text: str) -> Circuit:
    """A circuit from the text of a circuit file."""
    return from_json(parse(text))


def parse(text: str, what: str = "a circuit file") -> Any:
    """JSON data, or an error that says what is wrong with the text."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise InputError(
            f"not valid JSON at line {error.lineno}, column {error.colno} ({error.msg}); the file is damaged "
            f"or is not {what}"
        ) from None
    except RecursionError:
        raise InputError(f"nested too deeply to be {what}") from None
    except InputError:
        raise
    except ValueError as error:  # Python refuses to read integers of thousands of digits
        raise InputError(f"holds a number that cannot be read ({error}); the file is damaged") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys occur once: of two lists of edges, neither is the circuit's."""
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"the key {shown(twice)} occurs more than once in one object; the file is damaged")
    return made


def from_json(data: Any) -> Circuit:
    """A circuit from the data of a circuit file."""
    try:
        return _CIRCUIT.validate_python(upgrade(data))
    except ValidationError as error:
        raise input_error(error, Circuit) from None
    except RecursionError:
        raise InputError("nested too deeply to be a circuit file") from None


def save_circuit(circuit: Circuit, path: str | Path) -> Path:
    """Write a circuit file in one step, so that a reader never sees half of it."""
    return write_text(path, dumps(circuit))


def dumps(circuit: Circuit) -> str:
    """The text of the circuit file. Its data is read back first: what is written can be loaded."""
    data = to_json(circuit)
    from_json(data)
    return document(data)


def document(data: Mapping[str, Any]) -> str:
    """JSON data as a file that can be compared line by line: one line for each key, and for each item of its lists."""
    lines = ",\n".join(f"{_line(key)}: {_block(value)}" for key, value in data.items())
    return "{\n" + lines + "\n}\n"


def _block(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(_line(item) for item in value) + "\n]"
    return _line(value)


def _line(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: only its escape can be written
        return json.dumps(value)
    return text


def to_json(circuit: Circuit) -> dict[str, Any]:
    """The circuit as JSON data, in the order in which it is written: what it is about first, then the graph."""
    data = plain(circuit)
    root = {"kind": circuit.root.kind, **data["root"]}
    nodes, edges = data.pop("nodes"), data.pop("edges")
    return {"schema": SCHEMA, **data, "root": root, "nodes": nodes, "edges": edges}


def plain(value: Any) -> Any:
    """Dataclasses to what they say, tuples to lists, mappings in the order of their keys."""
    if is_dataclass(value):
        said = ((name, getattr(value, name), unsaid) for name, unsaid in unwritten(type(value)).items())
        return {name: plain(item) for name, item, unsaid in said if item != unsaid}
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in sorted(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


@cache
def unwritten(shape: type) -> dict[str, Any]:
    """By field of a part, the value that says nothing: its default, or ``MISSING`` where it is in every file."""
    hints = get_type_hints(shape, include_extras=True)
    always = {name for name, hint in hints.items() if ALWAYS in getattr(hint, "__metadata__", ())}
    return {each.name: MISSING if each.name in always else each.default for each in fields(shape)}
