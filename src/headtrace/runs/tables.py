"""Circuits as Arrow tables, and back: one of nodes, one of edges, and a row per prompt with everything else.

>>> from headtrace.circuits.describe import example
>>> nodes, edges = node_table([("a", example())]), edge_table([("a", example())])
>>> edges.select(["prompt", "side", "weight", "source_kind", "target_layer"]).to_pylist()[1]
{'prompt': 'a', 'side': 'query', 'weight': 0.3, 'source_kind': 'mlp', 'target_layer': 9}
>>> row = {name: column[0] for name, column in rest_columns([example()]).items()}
>>> row |= {"text": example().prompt.text, "token_ids": [*example().prompt.token_ids]}
>>> row |= {"tokens": [*example().prompt.tokens]}
>>> circuit_of(row, nodes.to_pylist(), edges.to_pylist()) == example()
True

Columns follow from the fields of `Node`, `Edge` and `Circuit`: what is a number, text or a list of ids is a column of
that type, whatever else is nested is JSON text. They are made column by column, without an object for each row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa

from headtrace.circuits import Circuit, Edge, Node
from headtrace.circuits.files import from_json, plain
from headtrace.circuits.versions import SCHEMA

Row = Mapping[str, Any]
Named = Sequence[tuple[str, Circuit]]
"""Circuits, each with the id of its prompt."""

PLACE = ("kind", "layer", "head", "dest", "src")
ENDS = ("source", "target")
REST = "circuit:"
"""Columns of the table of prompts that begin like this hold what a circuit says besides its nodes and edges."""
_GRAPH = ("nodes", "edges")
_PROMPT = ("text", "token_ids", "tokens")
"""Fields of a circuit's prompt that have columns of their own."""
LABEL, ROLE = "label:", "role:"
DONE, FAILED = "done", "failed"
Outcome = Circuit | str
"""What became of a prompt: its circuit, or why there is none."""
_IDS = pa.list_(pa.int64())
_PLANNED = {
    "id": pa.string(),
    "index": pa.int64(),
    "text": pa.string(),
    "token_ids": _IDS,
    "tokens": pa.list_(pa.string()),
    "answer": _IDS,
    "wrong": _IDS,
    "root": pa.string(),
    "problem": pa.string(),
}
_SELDOM = ("evidence",)
"""Columns that are there only where they say something: no trace fills them, and shards of earlier runs are without."""
_PLAIN = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}


def node_table(circuits: Named) -> pa.Table:
    """The nodes of circuits, one row each."""
    nodes = [node for _, circuit in circuits for node in circuit.nodes]
    prompts = [name for name, circuit in circuits for _ in circuit.nodes]
    return pa.table({"prompt": pa.array(prompts, pa.string()), **_columns(Node, nodes)})


def edge_table(circuits: Named) -> pa.Table:
    """The edges of circuits, one row each, with the places of their ends."""
    edges = [edge for _, circuit in circuits for edge in circuit.edges]
    prompts = [name for name, circuit in circuits for _ in circuit.edges]
    columns = {"prompt": pa.array(prompts, pa.string()), **_columns(Edge, edges)}
    types = _types(Node)
    for end in ENDS:
        nodes: list[Node] = []
        for _, circuit in circuits:
            known = {node.id: node for node in circuit.nodes}
            nodes += [known[getattr(edge, end)] for edge in circuit.edges]
        for name in PLACE:
            columns[f"{end}_{name}"] = pa.array([getattr(node, name) for node in nodes], types[name])
    return pa.table(columns)


def rest_columns(circuits: Sequence[Circuit | None]) -> dict[str, list[str | None]]:
    """What circuits say besides their graphs, as JSON text by column; nothing where there is no circuit."""
    columns: dict[str, list[str | None]] = {}
    for name in rest_names():
        parts = [None if circuit is None else getattr(circuit, name) for circuit in circuits]
        columns[REST + name] = [None if part is None else _rest(name, part) for part in parts]
    return columns


def rest_names() -> list[str]:
    """The fields of a circuit that are neither nodes nor edges."""
    return [field.name for field in fields(Circuit) if field.name not in _GRAPH]


def _rest(name: str, part: Any) -> str:
    said = plain(part)
    if name == "prompt":
        said = {key: value for key, value in said.items() if key not in _PROMPT}
    return json.dumps(said)


def reason_of(outcome: Outcome) -> str | None:
    """Why a prompt failed; none for a circuit that explains something."""
    if isinstance(outcome, str):
        return outcome
    return None if outcome.reason is None else f"no circuit: {outcome.reason}"


def prompt_table(plan: pa.Table, shard: int, outcomes: Sequence[Outcome]) -> pa.Table:
    """A shard's prompts: what the plan says, what became of them, and what circuits say besides their graphs."""
    circuits = [found if isinstance(found, Circuit) else None for found in outcomes]
    reasons = [reason_of(found) for found in outcomes]
    own = [name for name in plan.column_names if name.startswith((LABEL, ROLE))]
    columns: dict[str, Any] = {name: plan[name] for name in ("id", "index")}
    columns["shard"] = pa.array([shard] * len(outcomes), pa.int64())
    columns |= {name: plan[name] for name in ("text", "token_ids", "tokens", "answer", "wrong")}
    columns["status"] = pa.array([DONE if reason is None else FAILED for reason in reasons], pa.string())
    columns["reason"] = pa.array(reasons, pa.string())
    columns["root_value"] = pa.array([c.root.value if c else None for c in circuits], pa.float64())
    columns["n_nodes"] = pa.array([len(c.nodes) if c else None for c in circuits], pa.int64())
    columns["n_edges"] = pa.array([len(c.edges) if c else None for c in circuits], pa.int64())
    columns |= {name: plan[name] for name in own}
    columns |= {name: pa.array(texts, pa.string()) for name, texts in rest_columns(circuits).items()}
    return pa.table(columns)


def plan_schema(labels: Sequence[str], roles: Sequence[str]) -> dict[str, pa.DataType]:
    """The columns of a plan whose prompts have these labels and roles."""
    own = {LABEL + name: pa.string() for name in labels} | {ROLE + name: pa.int64() for name in roles}
    return {**_PLANNED, **own}


def signal_table(keys: Sequence[tuple[str, Edge]], vectors: Sequence[Any]) -> pa.Table:
    """Signals, each a vector of d_model numbers, by prompt, source, target and side."""
    columns = {"prompt": pa.array([name for name, _ in keys], pa.string())}
    for field, kind in _kinds(Edge).items():
        if field in ("source", "target", "side"):
            columns[field] = pa.array([getattr(edge, field) for _, edge in keys], kind)
    return pa.table({**columns, "signal": pa.array(vectors, pa.list_(pa.float32()))})


def empty(table: str, labels: Sequence[str], roles: Sequence[str]) -> pa.Table:
    """A table of a shard without rows."""
    if table == "prompts":
        plan = {name: pa.array([], kind) for name, kind in plan_schema(labels, roles).items()}
        return prompt_table(pa.table(plan), 0, [])
    return {"nodes": node_table([]), "edges": edge_table([]), "signals": signal_table([], [])}[table]


# -- and back ----------------------------------------------------------------------------------------------------


def circuit_of(row: Row, nodes: Sequence[Row], edges: Sequence[Row]) -> Circuit:
    """The circuit of a row of the table of prompts and its rows of the others, checked like one from a file."""
    said = {name: row[REST + name] for name in rest_names()}
    data = {name: json.loads(text) for name, text in said.items() if text is not None}
    data["prompt"] |= {name: row[name] for name in _PROMPT}
    data["nodes"] = [_part(Node, each) for each in nodes]
    data["edges"] = [_part(Edge, each) for each in edges]
    return from_json({"schema": SCHEMA, **data})


def _part(shape: type, row: Row) -> dict[str, Any]:
    return {
        name: json.loads(row[name]) if kind is None else row[name]
        for name, kind in _kinds(shape).items()
        if row.get(name) is not None  # earlier tables have fewer columns
    }


# -- columns of a dataclass ----------------------------------------------------------------------------------------


def _columns(shape: type, parts: Sequence[Any]) -> dict[str, pa.Array]:
    columns: dict[str, pa.Array] = {}
    for name, kind in _kinds(shape).items():
        values = [getattr(part, name) for part in parts]
        if name in _SELDOM and not any(values):
            continue
        if kind is None:
            values = [None if value is None else json.dumps(plain(value)) for value in values]
        columns[name] = pa.array(values, pa.string() if kind is None else kind)
    return columns


def _types(shape: type) -> dict[str, pa.DataType]:
    return {name: pa.string() if kind is None else kind for name, kind in _kinds(shape).items()}


@cache
def _kinds(shape: type) -> dict[str, pa.DataType | None]:
    """By field, the type of its column; none for one that is kept as JSON text."""
    hints = get_type_hints(shape)
    return {field.name: _kind(hints[field.name]) for field in fields(shape)}


def _kind(hint: Any) -> pa.DataType | None:
    if get_origin(hint) is Annotated:
        return _kind(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        members = [each for each in get_args(hint) if each is not type(None)]
        return _kind(members[0]) if len(members) == 1 else None
    if get_origin(hint) is Literal:
        return pa.string()
    if get_origin(hint) is tuple and get_args(hint)[1:] == (Ellipsis,):
        inside = _kind(get_args(hint)[0])
        return None if inside is None or pa.types.is_nested(inside) else pa.list_(inside)
    return _PLAIN.get(hint)
