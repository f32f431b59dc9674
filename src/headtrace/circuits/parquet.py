"""Many circuits in one Parquet file: one row per edge, ready for a query, and still the whole circuits.

>>> import tempfile, polars
>>> from headtrace.circuits.describe import example
>>> with tempfile.TemporaryDirectory() as folder:
...     path = write_parquet([example()], f"{folder}/circuits.parquet")
...     table = polars.read_parquet(path)
...     polars.concat([table, table]).write_parquet(path)
...     circuits = read_parquet(path)
>>> table.filter(polars.col("source_kind") == "head")["source_layer"].to_list(), circuits == [example(), example()]
([9], True)

The column ``circuit`` holds the circuit's content id, so tables can be put together and taken apart by circuit, in any
order of rows. The first row of each circuit carries, in ``circuit_json``, everything of it that is not an edge; a
circuit without edges is one row without an edge. Every row says how many nodes and edges its circuit has, and the id is
computed again when it is read: a part of a circuit is never taken for the whole.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.circuits.files import from_json, parse, to_json
from headtrace.circuits.parts import Edge
from headtrace.errors import InputError
from headtrace.writing import write_bytes

if TYPE_CHECKING:
    from headtrace.circuits.circuit import Circuit

Row = dict[str, Any]
_NEEDED = [each.name for each in fields(Edge) if each.default is MISSING]
_PLACE = ("kind", "layer", "head", "dest", "src")
_COUNTS = ("n_nodes", "n_edges")
_NESTED = ("effect", "evidence")
"""Fields of an edge that are kept as JSON text."""
_INSTEAD = (
    "Read the whole file, then cut circuits down in Python (circuit.prune, circuit.between); or keep all rows of the "
    "circuits you want, by the column 'circuit'."
)


def _columns() -> dict[str, Any]:
    """Every field of an edge, the places of its ends, and the rest of the circuit as JSON."""
    import polars as pl

    types: dict[str, Any] = dict.fromkeys(("weight", "contribution", "left"), pl.Float64)
    types |= dict.fromkeys(("channels", "through"), pl.List(pl.Int64))
    types |= dict.fromkeys(("source", "target"), pl.Int64)
    ends = {
        f"{end}_{key}": pl.String if key == "kind" else pl.Int64
        for end in ("source", "target")
        for key in _PLACE
    }
    edge = {each.name: types.get(each.name, pl.String) for each in fields(Edge)}
    counts = dict.fromkeys(_COUNTS, pl.Int64)
    return {"circuit": pl.String, "model": pl.String, **counts, **edge, **ends, "circuit_json": pl.String}


def write_parquet(circuits: Iterable[Circuit], path: str | Path) -> Path:
    """Write circuits to one Parquet file, in the order given."""
    import polars as pl

    rows = [row for circuit in circuits for row in _rows(circuit)]
    buffer = io.BytesIO()
    pl.DataFrame(rows, schema=_columns()).write_parquet(buffer, compression="zstd")
    return write_bytes(path, buffer.getvalue())


def _rows(circuit: Circuit) -> list[Row]:
    data = to_json(circuit)
    from_json(data)  # what is written can be read
    places = {node["id"]: node for node in data["nodes"]}
    own = {"circuit": circuit.content_id, "model": circuit.model.name}
    own |= dict(zip(_COUNTS, (len(circuit.nodes), len(circuit.edges)), strict=True))
    rows: list[Row] = []
    for edge in data.pop("edges"):
        row = {**own, **edge}
        row |= {name: json.dumps(edge[name]) for name in _NESTED if edge.get(name) is not None}
        for end in ("source", "target"):
            row |= {f"{end}_{key}": places[edge[end]][key] for key in _PLACE}
        rows.append(row)
    rows = rows or [own]
    rows[0]["circuit_json"] = json.dumps(data)
    return rows


# -- reading -----------------------------------------------------------------------------------------------------


def read_parquet(path: str | Path) -> list[Circuit]:
    """The circuits of a file that ``write_parquet`` wrote, or of several put together, validated like any other.

    They come in the order of their first rows. Of a circuit that is there in part, an error says so.
    """
    rows = _table(path)
    kinds = {type(row["circuit"]) for row in rows}
    if not kinds <= {str} and not kinds <= {int}:
        raise InputError(
            f"{path}: the column 'circuit' must hold the id of a circuit in every row; it is damaged."
        )
    kept: dict[str | int, _Kept] = {}
    for row in rows:
        kept.setdefault(row["circuit"], _Kept(path, row["circuit"])).add(row)
    read = _whole if kinds <= {str} else _numbered
    circuits = {name: read(each) for name, each in kept.items()}
    return [circuits[row["circuit"]] for row in rows if row["circuit_json"] is not None]


def _table(path: str | Path) -> list[Row]:
    """The rows of a table that has the columns of one of circuits."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"No Parquet file at {path}.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    try:
        # Not with polars, which ends the whole process on some damaged files; in one thread, for the same reason.
        file = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False)
        missing = {"circuit", "circuit_json", *_NEEDED} - set(file.schema_arrow.names)
        rows: list[Row] = [] if missing else file.read(use_threads=False).to_pylist()
    except (OSError, ValueError, ArithmeticError, MemoryError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path} is not a Parquet file that can be read ({reason}). It is damaged, or cut short: write it again."
        ) from None
    if missing:
        raise InputError(
            f"{path}: the columns {', '.join(sorted(missing))} are missing; it holds no circuits."
        )
    return rows


@dataclass
class _Kept:
    """What a table holds of one circuit: once, or as often as it was written."""

    path: str | Path
    name: str | int
    heads: list[Row] = field(default_factory=list)
    """Rows that carry everything but the edges."""
    edges: dict[str, list[Row]] = field(default_factory=dict)
    """Rows with an edge, by its ends and side."""
    counts: set[tuple[int | None, ...]] = field(default_factory=set)

    def add(self, row: Row) -> None:
        if row["circuit_json"] is not None:
            self.heads.append(row)
        if row["source"] is not None:
            key = repr(
                (row["source"], row["target"], row["side"])
            )  # of whatever type: a column may be damaged
            self.edges.setdefault(key, []).append(row)
        counts = (row.get(name) for name in _COUNTS)
        self.counts.add(tuple(count if type(count) is int else None for count in counts))

    def error(self, problem: str) -> InputError:
        return InputError(f"{self.path}: circuit {self.name}: {problem}")

    def build(self) -> Circuit:
        """The circuit of the first of its heads and all of its edges."""
        try:
            data = parse(str(self.heads[0]["circuit_json"]))
            if not isinstance(data, dict):
                raise InputError("circuit_json: expected a JSON object")
            return from_json(data | {"edges": [_edge(rows[0]) for rows in self.edges.values()]})
        except InputError as error:
            raise self.error(str(error)) from None


def _whole(kept: _Kept) -> Circuit:
    """A circuit whose rows are all there: as many as it says, and with its id."""
    ((n_nodes, n_edges), *others) = kept.counts
    if n_nodes is None or n_edges is None or others:
        raise kept.error("its rows do not agree on how many nodes and edges it has; the table is damaged.")
    if not kept.heads or len(kept.edges) < n_edges:
        first = "" if kept.heads else ", and its first row is not among them"
        raise kept.error(
            f"only a part of it is here ({len(kept.edges)} of {n_edges} edges{first}): rows were filtered or cut "
            f"off. {_INSTEAD}"
        )
    if any(len(rows) != len(kept.heads) for rows in kept.edges.values()):
        raise kept.error(f"some of its rows are here more often than others. {_INSTEAD}")
    circuit = kept.build()
    if len(circuit.nodes) != n_nodes or circuit.content_id != kept.name:
        raise kept.error(
            "what its rows say is not what was written: its content id differs. The table was changed or is damaged; "
            "write it again with write_parquet."
        )
    return circuit


def _numbered(kept: _Kept) -> Circuit:
    """A circuit of a table of an earlier version, which numbered circuits and did not count their rows."""
    if len(kept.heads) != 1:
        what = "has no first row" if not kept.heads else f"is there {len(kept.heads)} times"
        raise kept.error(
            f"it {what}. Tables of an earlier version number their circuits from 0, so that put together they cannot "
            "be told apart. Read each file by itself and write the circuits to one with write_parquet."
        )
    if any(len(rows) != 1 for rows in kept.edges.values()):
        raise kept.error("an edge of it is there more than once. Read the file as it was written.")
    circuit = kept.build()
    named = {end for edge in circuit.edges for end in (edge.source, edge.target)}
    alone = [node.name for node in circuit.nodes if node.id not in named and node.kind != "root"]
    if alone:
        raise kept.error(f"only a part of it is here: no edge names {alone[0]!r}. {_INSTEAD}")
    return circuit


def _edge(row: Row) -> Row:
    # Earlier tables have fewer columns.
    edge = {each.name: row.get(each.name) for each in fields(Edge)}
    nested = {name: parse(str(edge[name])) for name in _NESTED if edge[name] is not None}
    return edge | nested
