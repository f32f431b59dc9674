"""Many circuits in one Parquet file: one row per edge, ready for a query, and still the whole circuits.

>>> import tempfile, polars
>>> from headtrace.circuits.describe import example
>>> with tempfile.TemporaryDirectory() as folder:
...     path = write_parquet([example(), example()], f"{folder}/circuits.parquet")
...     heads = polars.read_parquet(path).filter(polars.col("source_kind") == "head")
...     circuits = read_parquet(path)
>>> heads["source_layer"].to_list(), circuits == [example(), example()]
([9, 9], True)

The first row of each circuit carries, in ``circuit_json``, everything of it that is not an edge; a circuit
without edges is one row without an edge.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.circuits.files import from_json, to_json
from headtrace.circuits.parts import Edge
from headtrace.errors import InputError
from headtrace.writing import write_bytes

if TYPE_CHECKING:
    from headtrace.circuits.circuit import Circuit

_NEEDED = [field.name for field in fields(Edge) if field.default is MISSING]
_PLACE = ("kind", "layer", "head", "dest", "src")


def _columns() -> dict[str, Any]:
    """Every field of an edge, the places of its ends, and the rest of the circuit as JSON."""
    import polars as pl

    types = {"weight": pl.Float64, "contribution": pl.Float64, "channels": pl.List(pl.Int64)}
    types |= dict.fromkeys(("source", "target"), pl.Int64)
    ends = {
        f"{end}_{key}": pl.String if key == "kind" else pl.Int64
        for end in ("source", "target")
        for key in _PLACE
    }
    edge = {field.name: types.get(field.name, pl.String) for field in fields(Edge)}
    return {"circuit": pl.Int64, "model": pl.String, **edge, **ends, "circuit_json": pl.String}


def write_parquet(circuits: Iterable[Circuit], path: str | Path) -> Path:
    """Write circuits to one Parquet file, numbered in the order given."""
    import polars as pl

    rows = [row for number, circuit in enumerate(circuits) for row in _rows(number, circuit)]
    buffer = io.BytesIO()
    pl.DataFrame(rows, schema=_columns()).write_parquet(buffer, compression="zstd")
    return write_bytes(path, buffer.getvalue())


def _rows(number: int, circuit: Circuit) -> list[dict[str, Any]]:
    data = to_json(circuit)
    places = {node["id"]: node for node in data["nodes"]}
    rows: list[dict[str, Any]] = []
    for edge in data.pop("edges"):
        row = {"circuit": number, "model": circuit.model.name, **edge}
        row["effect"] = None if edge.get("effect") is None else json.dumps(edge["effect"])
        for end in ("source", "target"):
            row |= {f"{end}_{key}": places[edge[end]][key] for key in _PLACE}
        rows.append(row)
    rows = rows or [{"circuit": number, "model": circuit.model.name}]
    rows[0]["circuit_json"] = json.dumps(data)
    return rows


def read_parquet(path: str | Path) -> list[Circuit]:
    """The circuits of a file that ``write_parquet`` wrote, validated like any other."""
    import polars as pl

    try:
        table = pl.read_parquet(Path(path).read_bytes())
    except FileNotFoundError:
        raise InputError(f"No Parquet file at {path}.") from None
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(f"{path} is not a Parquet file that can be read ({error}).") from None
    missing = {"circuit", "circuit_json", *_NEEDED} - set(table.columns)
    if missing:
        raise InputError(
            f"{path}: the columns {', '.join(sorted(missing))} are missing; it holds no circuits."
        )
    parts: dict[int, dict[str, Any]] = {}
    for row in table.iter_rows(named=True):
        number = row["circuit"]
        if row["circuit_json"] is not None:
            parts[number] = json.loads(row["circuit_json"]) | {"edges": []}
        if row["source"] is not None:
            if number not in parts:
                raise InputError(
                    f"{path}: circuit {number} has an edge before its first row; was the table sorted?"
                )
            parts[number]["edges"].append(_edge(row))
    return [_circuit(path, number, parts[number]) for number in sorted(parts)]


def _circuit(path: str | Path, number: int, data: dict[str, Any]) -> Circuit:
    try:
        return from_json(data)
    except InputError as error:
        raise InputError(f"{path}: circuit {number}: {error}") from None


def _edge(row: dict[str, Any]) -> dict[str, Any]:
    # Tables of version 1 have fewer columns.
    edge = {field.name: row.get(field.name) for field in fields(Edge)}
    edge["effect"] = None if edge["effect"] is None else json.loads(edge["effect"])
    return edge
