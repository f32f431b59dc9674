"""Circuits as rows of tables, and back: one row per node, one per edge, and everything else as JSON text.

>>> import tempfile, polars
>>> from headtrace.circuits.describe import example
>>> with tempfile.TemporaryDirectory() as folder:
...     path = write_parquet([example()], f"{folder}/circuits.parquet")
...     table = polars.read_parquet(path)
...     polars.concat([table, table]).write_parquet(path)
...     circuits = read_parquet(path)
>>> table.filter(polars.col("source_kind") == "head")["source_layer"].to_list(), circuits == [example(), example()]
([9], True)

Columns follow from the fields of `Node` and `Edge`: what is a number, text or a list of ids is a column of that type,
whatever is nested is JSON text; an edge also has the places of its ends. Tables are built column by column, without an
object per row. Runs (`headtrace.runs`) keep nodes and edges in these columns, named by prompt.

``write_parquet`` keeps many circuits in one file of edges. The column ``circuit`` holds the circuit's content id, so
files can be concatenated and filtered by circuit, in any order of rows. The first row of each circuit has, in
``circuit_json``, everything but its edges; a circuit without edges is one row without an edge. Every row has the number
of nodes and edges of its circuit, and the id is computed again on reading: a part is never taken for the whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from headtrace.circuits.circuit import Circuit
from headtrace.circuits.files import SCHEMA, from_json, to_json
from headtrace.circuits.parts import Edge, Node
from headtrace.errors import InputError
from headtrace.validation import parse, plain
from headtrace.writing import write_bytes

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]
Named = Sequence[tuple[str, Circuit]]
"""Circuits, each with its key: the id of its prompt."""
PLACE = ("kind", "layer", "head", "dest", "src")
"""The columns that place a node; for the ends of an edge with ``source_`` and ``target_`` before them."""
ENDS = tuple(f"{end}_{name}" for end in ("source", "target") for name in PLACE)
REST = "circuit:"
"""Columns that begin like this hold what a circuit has besides its nodes and edges."""
_PROMPT = ("text", "token_ids", "tokens")
"""Fields of a circuit's prompt that have columns of their own."""
_OPTIONAL = ("evidence",)
"""Columns that runs have only where they hold something: no trace fills them."""


def node_table(circuits: Named, key: str = "prompt") -> pa.Table:
    """The nodes of circuits, one row each."""
    import pyarrow as pa

    keys = [name for name, circuit in circuits for _ in circuit.nodes]
    columns = _columns(Node, [node for _, circuit in circuits for node in circuit.nodes])
    return pa.table({key: pa.array(keys, pa.string()), **columns})


def edge_table(circuits: Named, key: str = "prompt") -> pa.Table:
    """The edges of circuits, one row each, with the places of their ends."""
    import pyarrow as pa

    keys = [name for name, circuit in circuits for _ in circuit.edges]
    columns = _edge_columns([(edge, circuit) for _, circuit in circuits for edge in circuit.edges])
    unused = [name for name in _OPTIONAL if columns[name].null_count == len(keys)]
    return pa.table({key: pa.array(keys, pa.string()), **columns}).drop_columns(unused)


def rest_columns(circuits: Sequence[Circuit | None]) -> dict[str, list[str | None]]:
    """What circuits have besides their graphs, as JSON text by column; null where there is no circuit."""
    columns: dict[str, list[str | None]] = {}
    for name in _rest_names():
        columns[REST + name] = texts = []
        for circuit in circuits:
            value = None if circuit is None else plain(getattr(circuit, name))
            if name == "prompt" and value is not None:
                value = {key: item for key, item in value.items() if key not in _PROMPT}
            texts.append(None if value is None else json.dumps(value))
    return columns


def circuit_of(row: Row, nodes: Sequence[Row], edges: Sequence[Row]) -> Circuit:
    """The circuit of its ``rest_columns`` and prompt, and its rows of nodes and edges; checked like one from a file."""
    texts = {name: row[REST + name] for name in _rest_names()}
    data = {name: parse(text) for name, text in texts.items() if text is not None}
    data["prompt"] |= {name: row[name] for name in _PROMPT}
    data["nodes"] = [_part(Node, each) for each in nodes]
    data["edges"] = [_part(Edge, each) for each in edges]
    return from_json({"schema": SCHEMA, **data})


def _rest_names() -> list[str]:
    return [each.name for each in fields(Circuit) if each.name not in ("nodes", "edges")]


def _part(shape: type, row: Row) -> dict[str, Any]:
    """The data of a node or edge; tables of earlier versions have fewer columns."""
    return {
        name: parse(str(row[name])) if kind is None else row[name]
        for name, kind in column_types(shape).items()
        if row.get(name) is not None
    }


def _columns(shape: type, parts: Sequence[Any]) -> dict[str, pa.Array]:
    """The fields of parts as columns; a part may be None, a row of nulls."""
    import pyarrow as pa

    columns: dict[str, pa.Array] = {}
    for name, kind in column_types(shape).items():
        values = [None if part is None else getattr(part, name) for part in parts]
        if kind is None:
            values = [None if value is None else json.dumps(plain(value)) for value in values]
        columns[name] = pa.array(values, pa.string() if kind is None else kind)
    return columns


def _edge_columns(edges: Sequence[tuple[Edge | None, Circuit]]) -> dict[str, pa.Array]:
    import pyarrow as pa

    columns, types = _columns(Edge, [edge for edge, _ in edges]), column_types(Node)
    for end in ("source", "target"):
        nodes = [None if edge is None else circuit.node(getattr(edge, end)) for edge, circuit in edges]
        for name in PLACE:
            places = [None if node is None else getattr(node, name) for node in nodes]
            columns[f"{end}_{name}"] = pa.array(places, types[name])
    return columns


@cache
def column_types(shape: type) -> dict[str, pa.DataType | None]:
    """The type of the column of each field of a dataclass; None for one that is kept as JSON text."""
    import pyarrow as pa

    simple = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}

    def column_type(hint: Any) -> pa.DataType | None:
        origin, inner = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return column_type(inner[0])
        if origin in (Union, UnionType):
            members = [each for each in inner if each is not type(None)]
            return column_type(members[0]) if len(members) == 1 else None
        if origin is Literal:
            return pa.string()
        if origin is tuple and inner[1:] == (Ellipsis,):
            item = column_type(inner[0])
            return None if item is None or pa.types.is_nested(item) else pa.list_(item)
        return simple.get(hint)

    hints = get_type_hints(shape)
    return {each.name: column_type(hints[each.name]) for each in fields(shape)}


# -- many circuits in one file -------------------------------------------------------------------------------------

_COUNTS = ("n_nodes", "n_edges")
_REQUIRED = {"circuit", "circuit_json", *(each.name for each in fields(Edge) if each.default is MISSING)}
_INSTEAD = (
    "Read the whole file, then cut circuits down in Python (circuit.prune, circuit.between); or keep all rows of the "
    "circuits you want, by the column 'circuit'."
)


def write_parquet(circuits: Iterable[Circuit], path: str | Path) -> Path:
    """Write circuits to one Parquet file, in the order given."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[tuple[Edge | None, Circuit]] = []
    texts: list[str | None] = []
    for circuit in circuits:
        edges: Sequence[Edge | None] = circuit.edges or (None,)
        rest = {key: value for key, value in to_json(circuit).items() if key != "edges"}
        rows += [(edge, circuit) for edge in edges]
        texts += [json.dumps(rest), *[None] * (len(edges) - 1)]
    columns: dict[str, Any] = {
        "circuit": pa.array([circuit.content_id for _, circuit in rows], pa.string()),
        "model": pa.array([circuit.model.name for _, circuit in rows], pa.string()),
        "n_nodes": pa.array([len(circuit.nodes) for _, circuit in rows], pa.int64()),
        "n_edges": pa.array([len(circuit.edges) for _, circuit in rows], pa.int64()),
        **_edge_columns(rows),
        "circuit_json": pa.array(texts, pa.string()),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return write_bytes(path, sink.getvalue().to_pybytes())


def read_parquet(path: str | Path) -> list[Circuit]:
    """The circuits of a file that ``write_parquet`` wrote, or of several concatenated, validated like any other.

    They come in the order of their first rows. For a circuit of which only a part is there, an error says so.
    """
    rows = _read_rows(path)
    kinds = {type(row["circuit"]) for row in rows}
    if not kinds <= {str} and not kinds <= {int}:
        raise InputError(
            f"{path}: the column 'circuit' must hold the id of a circuit in every row; it is damaged."
        )
    found: dict[str | int, _CircuitRows] = {}
    for row in rows:
        found.setdefault(row["circuit"], _CircuitRows(path, row["circuit"])).add(row)
    circuits = {
        name: each.circuit() if kinds <= {str} else each.numbered_circuit() for name, each in found.items()
    }
    return [circuits[row["circuit"]] for row in rows if row["circuit_json"] is not None]


def _read_rows(path: str | Path) -> list[Row]:
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
        missing = _REQUIRED - set(file.schema_arrow.names)
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
class _CircuitRows:
    """The rows of one circuit, which may be there several times."""

    path: str | Path
    name: str | int
    first_rows: list[Row] = field(default_factory=list)
    """Rows that have everything but the edges."""
    edges: dict[str, list[Row]] = field(default_factory=dict)
    """Rows with an edge, by its ends and side."""
    counts: set[tuple[int | None, ...]] = field(default_factory=set)

    def add(self, row: Row) -> None:
        if row["circuit_json"] is not None:
            self.first_rows.append(row)
        if row["source"] is not None:
            # A column of a damaged file may have any type, so the key is text.
            key = repr((row["source"], row["target"], row["side"]))
            self.edges.setdefault(key, []).append(row)
        counts = (row.get(name) for name in _COUNTS)
        self.counts.add(tuple(count if type(count) is int else None for count in counts))

    def circuit(self) -> Circuit:
        """The circuit, of which all rows are there, and whose content id is the one that was written."""
        ((n_nodes, n_edges), *others) = self.counts
        if n_nodes is None or n_edges is None or others:
            raise self._error(
                "its rows do not agree on how many nodes and edges it has; the table is damaged."
            )
        if not self.first_rows or len(self.edges) < n_edges:
            first = "" if self.first_rows else ", and its first row is not among them"
            raise self._error(
                f"only part of it is in the table ({len(self.edges)} of {n_edges} edges{first}): rows were filtered "
                f"or cut off. {_INSTEAD}"
            )
        if any(len(rows) != len(self.first_rows) for rows in self.edges.values()):
            raise self._error(f"some of its rows occur more often than others. {_INSTEAD}")
        circuit = self._build()
        if len(circuit.nodes) != n_nodes or circuit.content_id != self.name:
            raise self._error(
                "its rows are not those that were written: its content id differs. The table was changed or is "
                "damaged; write it again with write_parquet."
            )
        return circuit

    def numbered_circuit(self) -> Circuit:
        """A circuit of a table of an earlier version, which numbered circuits and did not count their rows."""
        if len(self.first_rows) != 1:
            what = "has no first row" if not self.first_rows else f"is there {len(self.first_rows)} times"
            raise self._error(
                f"it {what}. Tables of an earlier version number their circuits from 0, so that circuits of several "
                "tables cannot be told apart. Read each file by itself and write the circuits to one with "
                "write_parquet."
            )
        if any(len(rows) != 1 for rows in self.edges.values()):
            raise self._error("one of its edges occurs more than once. Read the file as it was written.")
        circuit = self._build()
        named = {end for edge in circuit.edges for end in (edge.source, edge.target)}
        alone = [node.name for node in circuit.nodes if node.id not in named and node.kind != "root"]
        if alone:
            raise self._error(f"only part of it is in the table: no edge names {alone[0]!r}. {_INSTEAD}")
        return circuit

    def _build(self) -> Circuit:
        try:
            data = parse(str(self.first_rows[0]["circuit_json"]))
            if not isinstance(data, dict):
                raise InputError("circuit_json: expected a JSON object")
            return from_json(data | {"edges": [_part(Edge, rows[0]) for rows in self.edges.values()]})
        except InputError as error:
            raise self._error(str(error)) from None

    def _error(self, problem: str) -> InputError:
        return InputError(f"{self.path}: circuit {self.name}: {problem}")
