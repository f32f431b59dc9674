"""Network files: JSON, schema ``headtrace.network/1``, one node or edge per line; and GraphML, to be read elsewhere.

>>> from headtrace.circuits.describe import example
>>> from headtrace.runs.merging import merge
>>> network = merge([example()])
>>> loads(dumps(network)) == network
True
>>> loads(dumps(network).replace('"count": 1', '"count": 2', 1))
Traceback (most recent call last):
headtrace.errors.InputError: nodes[0].count: expected at most 1, the number of prompts, got 2
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from headtrace.circuits.exports import graphml
from headtrace.circuits.files import document, file_text, parse, plain
from headtrace.errors import InputError
from headtrace.runs.network import Network
from headtrace.validation import fail, input_error
from headtrace.writing import write_text

SCHEMA = "headtrace.network/1"
T = TypeVar("T")


def save_network(network: Network, path: str | Path) -> Path:
    """Write JSON or GraphML, by the name."""
    match Path(path).suffix.lower():
        case ".graphml":
            return write_text(path, graphml(network.to_networkx()))
        case ".json":
            return write_text(path, dumps(network))
        case _:
            raise InputError(f"{str(path)!r}: a network is saved as .json or .graphml; end its name so.")


def dumps(network: Network) -> str:
    """The text of the network file. Its data is read back first: what is written can be loaded."""
    data = to_json(network)
    from_json(data)
    return document(data)


def to_json(network: Network) -> dict[str, Any]:
    """The network as JSON data: what it is about first, then the graph."""
    data = plain(network)
    nodes, edges = data.pop("nodes"), data.pop("edges")
    return {"schema": SCHEMA, **data, "nodes": nodes, "edges": edges}


def load_network(path: str | Path) -> Network:
    """Read a network file."""
    text = file_text(path, "a network file", "`headtrace merge RUN --out network.json` writes one.")
    try:
        return loads(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def loads(text: str) -> Network:
    """A network from the text of a network file."""
    return from_json(parse(text, "a network file"))


def from_json(data: Any) -> Network:
    """A network from the data of a network file."""
    return checked_data(data, SCHEMA, Network)


def checked_data(data: Any, schema: str, shape: type[T]) -> T:
    """What a file of this schema holds, or an error that names the field."""
    if not isinstance(data, dict):
        fail("", "a JSON object", data)
    if data.get("schema") != schema:
        fail("schema", f'"{schema}"', data.get("schema"))
    try:
        return _adapter(shape).validate_python({key: value for key, value in data.items() if key != "schema"})
    except ValidationError as error:
        raise input_error(error, shape) from None


@cache
def _adapter(shape: type) -> Any:
    return TypeAdapter(shape)
