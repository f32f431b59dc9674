"""Circuits of any source as three tables, prompts, nodes and edges: those that a run keeps.

>>> from headtrace.circuits.describe import example
>>> frames = frames_of([example(), example()], roles=[{"end": 1}, {"end": 1}])
>>> frames.edges.select("prompt", "source_kind", "source_dest", "side").collect().rows()[:2]
[('0', 'head', 1, 'root'), ('0', 'mlp', 1, 'query')]
>>> frames.prompts.select("id", "role:end").collect().rows()
[('0', 1), ('1', 1)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import polars as pl

from headtrace.circuits import Circuit, ModelInfo, read_circuits
from headtrace.circuits.parts import Edge, Node
from headtrace.errors import InputError, shown

ROLE = "role:"
"""How the columns begin that say where a role is."""
PLACE = ("kind", "layer", "head", "dest", "src")
"""The columns that say where a node is; for the ends of an edge with ``source_`` and ``target_`` before them."""

Roles = Sequence[Any] | Mapping[str, Mapping[str, int]]
"""Where the roles are: for each circuit a mapping of names to positions, or the example of a task it was traced from
(in any order, found by its tokens); or such mappings by the text of the prompt."""


@runtime_checkable
class HasFrames(Protocol):
    """What a run is to this module."""

    @property
    def prompts(self) -> pl.LazyFrame: ...
    @property
    def nodes(self) -> pl.LazyFrame: ...
    @property
    def edges(self) -> pl.LazyFrame: ...


Source = HasFrames | str | Path | Iterable[Circuit]
"""A run, or its folder; circuits in a list, a Parquet table, or a folder of circuit files."""


@dataclass(frozen=True)
class Frames:
    """The circuits of many prompts as tables."""

    prompts: pl.LazyFrame
    """``id``, ``tokens`` and, as ``role:NAME``, the position of each role."""
    nodes: pl.LazyFrame
    """``prompt`` and the fields of a node, of prompts that have edges: an empty circuit may have nodes, too."""
    edges: pl.LazyFrame
    """``prompt``, the fields of an edge, and the places of its ends."""
    model: ModelInfo | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        """The names of the roles, in the order of their columns."""
        names = self.prompts.collect_schema().names()
        return tuple(name.removeprefix(ROLE) for name in names if name.startswith(ROLE))


def frames_of(source: Source, roles: Roles | None = None) -> Frames:
    """The tables of a source. Roles can be given for circuits; a run has its own."""
    if isinstance(source, (str, Path)):
        source = open_source(source)
    if isinstance(source, Frames):
        return source
    if isinstance(getattr(source, "prompts", None), (pl.LazyFrame, pl.DataFrame)):
        if roles is not None:
            raise InputError("A run has its own roles: leave out roles=, or give the circuits in a list.")
        run: Any = source
        prompts, nodes, edges = run.prompts.lazy(), run.nodes.lazy(), run.edges.lazy()
        return Frames(prompts, _in_circuits(nodes, edges), edges, _model_of(run))
    given: Any = [source] if isinstance(source, Circuit) else source
    return _of_circuits(list(given), roles)


def open_source(source: str | Path) -> HasFrames | list[Circuit]:
    """What is kept under a name: a run, or circuits."""
    text = str(source)
    if not (Path(text).is_dir() or "://" in text):
        return read_circuits(source)
    from headtrace.runs.reading import open_run

    try:
        return open_run(text)
    except InputError as not_a_run:
        try:
            return read_circuits(source)
        except InputError:
            raise not_a_run from None


def _model_of(run: Any) -> ModelInfo | None:
    model: Any = getattr(run, "model", None) or getattr(getattr(run, "manifest", None), "model", None)
    said: dict[str, Any] = {each.name: getattr(model, each.name, None) for each in fields(ModelInfo)}
    return ModelInfo(**said) if isinstance(said["name"], str) else None


# -- from circuits -----------------------------------------------------------------------------------------------


def _of_circuits(circuits: list[Circuit], roles: Roles | None) -> Frames:
    if not circuits:
        raise InputError("There are no circuits to put together: give at least one.")
    for circuit in circuits:
        if not isinstance(circuit, Circuit):
            raise InputError(f"expected circuits, got {shown(circuit)}")
    prompts: list[dict[str, Any]] = []
    nodes: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []
    placed = _roles_of(circuits, roles)
    for number, (circuit, where) in enumerate(zip(circuits, placed, strict=True)):
        own = {"prompt": str(number)}
        positions = {f"{ROLE}{name}": position for name, position in where.items()}
        prompts.append({"id": str(number), "tokens": list(circuit.prompt.tokens), **positions})
        places = {node.id: node for node in circuit.nodes}
        nodes += [own | {name: getattr(node, name) for name in _NODE} for node in circuit.nodes]
        edges += [own | _edge(edge, places) for edge in circuit.edges]
    columns = list(dict.fromkeys(name for row in prompts for name in row))
    types = {"id": pl.String, "tokens": pl.List(pl.String)}
    table = pl.LazyFrame(edges, schema={"prompt": pl.String, **_EDGE})
    return Frames(
        pl.LazyFrame(prompts, schema={name: types.get(name, pl.Int64) for name in columns}),
        _in_circuits(pl.LazyFrame(nodes, schema={"prompt": pl.String, **_NODE}), table),
        table,
        _one_model(circuits),
    )


def _in_circuits(nodes: pl.LazyFrame, edges: pl.LazyFrame) -> pl.LazyFrame:
    return nodes.join(edges.select("prompt").unique(), on="prompt", how="semi")


_NODE: dict[str, Any] = {
    **dict.fromkeys(("id", "layer", "head", "dest", "src"), pl.Int64),
    **dict.fromkeys(("attention", "influence", "contribution"), pl.Float64),
    "kind": pl.String,
    "expanded": pl.Boolean,
}
_ENDS: dict[str, Any] = {
    f"{end}_{key}": pl.String if key == "kind" else pl.Int64 for end in ("source", "target") for key in PLACE
}
_EDGE: dict[str, Any] = {
    **dict.fromkeys(("source", "target"), pl.Int64),
    "side": pl.String,
    **dict.fromkeys(("weight", "contribution"), pl.Float64),
    "channels": pl.List(pl.Int64),
    **_ENDS,
}


def _edge(edge: Edge, nodes: Mapping[int, Node]) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(edge, name) for name in _EDGE if name not in _ENDS}
    row["channels"] = None if edge.channels is None else list(edge.channels)
    for end, node in (("source", nodes[edge.source]), ("target", nodes[edge.target])):
        row |= {f"{end}_{key}": getattr(node, key) for key in PLACE}
    return row


def _one_model(circuits: Sequence[Circuit]) -> ModelInfo:
    """The model of all circuits: what two models do is not one structure."""
    first = circuits[0].model
    for number, circuit in enumerate(circuits):
        other = circuit.model
        if (other.weights_sha256 or other.name) != (first.weights_sha256 or first.name):
            raise InputError(
                f"Circuits of two models cannot be put together: the first is of {first.name!r}, number {number} of "
                f"{other.name!r}{' with other weights' if other.name == first.name else ''}. Merge each model's by "
                "themselves."
            )
    return first


def _roles_of(circuits: Sequence[Circuit], roles: Roles | None) -> list[Mapping[str, int]]:
    if roles is None:
        return [{} for _ in circuits]
    if isinstance(roles, Mapping):
        placed = [roles.get(circuit.prompt.text or "", {}) for circuit in circuits]
    else:
        placed = _in_order(circuits, list(roles))
    for number, (circuit, where) in enumerate(zip(circuits, placed, strict=True)):
        for name, position in where.items():
            length = len(circuit.prompt.tokens)
            if not isinstance(position, int) or not 0 <= position < length:
                raise InputError(
                    f"roles[{number}][{name!r}]: expected a position from 0 to {length - 1}, got {shown(position)}"
                )
    return placed


def _in_order(circuits: Sequence[Circuit], roles: list[Any]) -> list[Mapping[str, int]]:
    if roles and all(hasattr(each, "token_ids") for each in roles):
        known = {tuple(each.token_ids): each.roles for each in roles}
        missing = next((c for c in circuits if c.prompt.token_ids not in known), None)
        if missing is not None:
            raise InputError(
                f"No example has the tokens of the circuit of {shown(missing.prompt.text)}: give the examples that "
                "the circuits were traced from."
            )
        return [known[circuit.prompt.token_ids] for circuit in circuits]
    if len(roles) != len(circuits):
        raise InputError(
            f"roles: expected one mapping for each of {len(circuits)} circuits, got {len(roles)}"
        )
    return [dict(each) for each in roles]
