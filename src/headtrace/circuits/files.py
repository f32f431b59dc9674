"""Circuit files: JSON, one node or edge per line, the same circuit always the same bytes."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from headtrace.circuits.circuit import Circuit
from headtrace.circuits.parts import SCHEMA, Elsewhere
from headtrace.circuits.reading import circuit_from_json
from headtrace.errors import InputError

# Keys that the schema asks for are written even where they are null; others only where they say something.
_REQUIRED = {
    "ModelInfo": ("name", "revision", "architecture", "weights_sha256"),
    "Prompt": ("text", "token_ids", "tokens"),
    "Root": ("kind", "answer", "wrong", "value"),
    "Method": ("name", "tau", "ig_steps", "version"),
    "Node": ("id", "kind", "layer", "head", "dest", "src", "attention", "influence", "expanded", "explained"),
    "Edge": ("source", "target", "side", "weight", "channels"),
    "Elsewhere": ("layer", "head", "src", "channels", "weight"),
}


def load_circuit(path: str | Path) -> Circuit:
    """Read a circuit file. A damaged one gets an error that names the field.

    >>> circuit = load_circuit("c.json")  # doctest: +SKIP
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(
            f"No circuit file at {path}. `headtrace trace ... --out {path}` writes one."
        ) from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; expected a circuit file (JSON).") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text (byte {error.start}); expected a circuit file (JSON)."
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        return loads(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def loads(text: str) -> Circuit:
    """A circuit from the text of a circuit file."""
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise InputError(
            f"not valid JSON at line {error.lineno}, column {error.colno} ({error.msg}); the file is damaged "
            "or is not a circuit file"
        ) from None
    except RecursionError:
        raise InputError("nested too deeply to be a circuit file") from None
    return circuit_from_json(data)


def _no_constant(name: str) -> Any:
    raise InputError(f"{name} is not a number that a circuit file may hold; the file is damaged")


def save_circuit(circuit: Circuit, path: str | Path) -> Path:
    """Write a circuit file in one step, so that a reader never sees half of it."""
    return write_atomically(path, dumps(circuit).encode())


def dumps(circuit: Circuit) -> str:
    """The text of the circuit file. It is read back first: what is written can be loaded."""
    data = to_json(circuit)
    lines = ",\n".join(f"{_line(key)}: {_block(value)}" for key, value in data.items())
    text = "{\n" + lines + "\n}\n"
    loads(text)
    return text


def _block(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(_line(item) for item in value) + "\n]"
    return _line(value)


def _line(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: only its escape can be written
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise InputError(f"a circuit file cannot hold NaN or infinity: {str(value)[:200]}") from None
    return text


def to_json(circuit: Circuit) -> dict[str, Any]:
    """The circuit as JSON data, in the order in which it is written."""
    data: dict[str, Any] = {"schema": SCHEMA}
    for name in ("model", "prompt", "root", "method"):
        data[name] = _object(getattr(circuit, name))
    for name in ("reason", "influence_kept", "unexplained"):
        value = getattr(circuit, name)
        if value not in (None, ()):
            data[name] = _plain(value)
    data["nodes"] = [_object(node) for node in circuit.nodes]
    data["edges"] = [_object(edge) for edge in circuit.edges]
    return data


def _object(item: Any) -> dict[str, Any]:
    required = _REQUIRED[type(item).__name__]
    values = {field.name: getattr(item, field.name) for field in fields(item)}
    return {key: _plain(value) for key, value in values.items() if key in required or value is not None}


def _plain(value: Any) -> Any:
    """Tuples to lists, and NumPy-like scalars to Python's own."""
    if isinstance(value, dict):
        return {str(key): _plain(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Elsewhere):
        return _object(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    return value.item() if hasattr(value, "item") else value


def write_atomically(path: str | Path, content: bytes) -> Path:
    """Write a file under a temporary name beside its place, then move it there."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return path
