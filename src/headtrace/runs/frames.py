"""Circuits of any source as three tables, prompts, nodes and edges, like those of a run; and names for positions.

>>> from headtrace.circuits.describe import example
>>> frames = frames_of([example(), example()], roles=[{"end": 1}, {"end": 1}])
>>> frames.edges.select("prompt", "source_kind", "source_dest", "side").collect().rows()[:2]
[('0', 'head', 1, 'root'), ('0', 'mlp', 1, 'query')]
>>> frames.prompts.select("id", "role:end").collect().rows()
[('0', 1), ('1', 1)]

Named positions let circuits of different sentences be laid over each other. A position is called by its role (``IO``,
``S1``, ``S2``, ``end`` in IOI). The token after S1 is ``S1+1``, as in the literature; the first token is ``BOS`` where
it is a special one and ``first`` where it is a word, and everything else is ``other``. Where two names fit, a role
comes before a neighbour, a neighbour before the first token; of two roles at one position, that of the first column.

>>> place_names(frames, "roles").sort("prompt", "position").collect().rows()[:2]
[('0', 0, 'first'), ('0', 1, 'end')]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import polars as pl

from headtrace.circuits import Circuit, ModelInfo, read_circuits
from headtrace.circuits.parts import same_model
from headtrace.circuits.rows import edge_table, node_table
from headtrace.errors import InputError, shown
from headtrace.runs.manifest import LABEL, ROLE

By = Literal["roles", "positions"]
Roles = Sequence[Any] | Mapping[str, Mapping[str, int]]
"""Where the roles are: for each circuit a mapping of names to positions, or the example of a task it was traced from
(in any order, found by its tokens); or such mappings by the text of the prompt."""
AFTER = ("S1",)
"""Roles whose next token has a name of its own."""
OTHER, FIRST, BOS = "other", "first", "BOS"
_SPECIAL = r"^(<.*>|\[.*\])$"
"""How special tokens read: ``<|endoftext|>``, ``<s>``, ``[CLS]``."""


@runtime_checkable
class RunLike(Protocol):
    """What is needed of a run: its tables, and the circuit of a prompt."""

    @property
    def prompts(self) -> pl.LazyFrame: ...
    @property
    def nodes(self) -> pl.LazyFrame: ...
    @property
    def edges(self) -> pl.LazyFrame: ...
    def circuit(self, id: str, /) -> Circuit: ...


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

    def by_label(self, name: str) -> dict[str, Frames]:
        """The tables of the prompts of each value of a label, values in order; prompts without it are left out."""
        column, names = LABEL + name, self.prompts.collect_schema().names()
        if column not in names:
            there = ", ".join(repr(each.removeprefix(LABEL)) for each in names if each.startswith(LABEL))
            raise InputError(
                f"These prompts have no label {name!r}. "
                + (
                    f"There are: {there}."
                    if there
                    else "Labels are given to a run with its prompts, or by a task."
                )
            )
        values = self.prompts.select(pl.col(column).drop_nulls().unique().sort()).collect()[column].to_list()
        found: dict[str, Frames] = {}
        for value in values:
            prompts = self.prompts.filter(pl.col(column) == value)
            ids = prompts.select(prompt="id")
            nodes, edges = (each.join(ids, on="prompt", how="semi") for each in (self.nodes, self.edges))
            found[value] = Frames(prompts, nodes, edges, self.model)
        return found


Source = RunLike | Frames | str | Path | Iterable[Circuit]
"""A run, or its folder; circuits in a list, a Parquet table, or a folder of circuit files."""


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
        model: Any = getattr(run, "model", None) or getattr(getattr(run, "manifest", None), "model", None)
        known: dict[str, Any] = {each.name: getattr(model, each.name, None) for each in fields(ModelInfo)}
        info = ModelInfo(**known) if isinstance(known["name"], str) else None
        prompts, nodes, edges = run.prompts.lazy(), run.nodes.lazy(), run.edges.lazy()
    else:
        given: Any = [source] if isinstance(source, Circuit) else source
        circuits = list(given)
        info = _one_model(circuits)
        prompts = _prompts(circuits, roles)
        named = [(str(number), circuit) for number, circuit in enumerate(circuits)]
        nodes, edges = (pl.LazyFrame(pl.from_arrow(make(named))) for make in (node_table, edge_table))
    with_edges = edges.select("prompt").unique()
    return Frames(prompts, nodes.join(with_edges, on="prompt", how="semi"), edges, info)


def open_source(source: str | Path) -> RunLike | list[Circuit]:
    """The run or the circuits at a path."""
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


class PlacedPrompt(NamedTuple):
    """A prompt of a run: its tokens, and the position of each of its roles."""

    token_ids: tuple[int, ...]
    roles: dict[str, int]


def roles_of_run(folder: str | Path) -> list[PlacedPrompt]:
    """The roles of a run's prompts, for circuits exported from it: a file of circuits keeps no roles."""
    from headtrace.runs.reading import open_run

    prompts = open_run(str(folder)).prompts.collect()
    names = [name for name in prompts.columns if name.startswith(ROLE)]
    if not names:
        raise InputError(
            f"The prompts of {str(folder)!r} have no roles. Give a run of a task, or of prompts with `roles`."
        )
    rows = prompts.select("token_ids", *names).drop_nulls("token_ids").to_dicts()
    return [
        PlacedPrompt(
            tuple(row["token_ids"]),
            {name.removeprefix(ROLE): row[name] for name in names if row[name] is not None},
        )
        for row in rows
    ]


def _one_model(circuits: Sequence[Circuit]) -> ModelInfo:
    """The model of all circuits: those of two models cannot be merged."""
    if not circuits:
        raise InputError("There are no circuits to merge: give at least one.")
    for number, circuit in enumerate(circuits):
        if not isinstance(circuit, Circuit):
            raise InputError(f"expected circuits, got {shown(circuit)}")
        first, other = circuits[0].model, circuit.model
        if not same_model(first, other):
            how = "weights" if other.weights_sha256 != first.weights_sha256 else "settings in its config"
            raise InputError(
                f"Circuits of two models cannot be merged: the first is of {first.name!r}, number {number} of "
                f"{other.name!r}{f' with other {how}' if other.name == first.name else ''}. Merge each model's by "
                "themselves."
            )
    return circuits[0].model


def _prompts(circuits: Sequence[Circuit], roles: Roles | None) -> pl.LazyFrame:
    """``id``, ``tokens`` and the positions of roles."""
    placed = list(map(_own_roles, circuits)) if roles is None else _roles_of(circuits, roles)
    for number, (circuit, where) in enumerate(zip(circuits, placed, strict=True)):
        for name, position in where.items():
            length = len(circuit.prompt.tokens)
            if not isinstance(position, int) or not 0 <= position < length:
                raise InputError(
                    f"roles[{number}][{name!r}]: expected a position from 0 to {length - 1}, got {shown(position)}"
                )
    names = list(dict.fromkeys(name for where in placed for name in where))
    columns: dict[str, pl.Series] = {
        "id": pl.Series([str(number) for number in range(len(circuits))], dtype=pl.String),
        "tokens": pl.Series([list(c.prompt.tokens) for c in circuits], dtype=pl.List(pl.String)),
    }
    columns |= {ROLE + name: pl.Series([w.get(name) for w in placed], dtype=pl.Int64) for name in names}
    return pl.LazyFrame(columns)


def _own_roles(circuit: Circuit) -> Mapping[str, int]:
    """Roles of a circuit of another tool, whose places have names but no tokens (`headtrace.circuits.imports`)."""
    tokens = circuit.prompt.tokens
    named = not circuit.prompt.token_ids and len(set(tokens)) == len(tokens)
    return {token: position for position, token in enumerate(tokens)} if named else {}


def _roles_of(circuits: Sequence[Circuit], roles: Roles) -> list[Mapping[str, int]]:
    """The positions of the roles of each circuit."""
    if isinstance(roles, Mapping):
        return [roles.get(circuit.prompt.text or "", {}) for circuit in circuits]
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


# -- names of positions --------------------------------------------------------------------------------------------


def choose_places(frames: Frames, by: By | None) -> By:
    """How positions are named: by roles wherever there are some."""
    if by not in ("roles", "positions", None):
        raise InputError(f"by={by!r}: expected 'roles' or 'positions'.")
    names = [f"{ROLE}{name}" for name in frames.roles]
    known = (
        bool(names)
        and not frames.prompts.select(pl.all_horizontal(pl.col(names).is_null().all())).collect().item()
    )
    if by == "roles" and not known:
        raise InputError(
            "These circuits have no roles. Merge them by positions, or use a run of a task, or give roles= in Python "
            "(the examples they were traced from)."
        )
    return by or ("roles" if known else "positions")


def place_names(frames: Frames, by: By, after: Sequence[str] = AFTER) -> pl.LazyFrame:
    """The positions that have a name: ``prompt``, ``position``, ``place``. By positions, none has."""
    prompts = frames.prompts
    if by == "positions":
        return prompts.head(0).select(prompt="id", position=pl.lit(0, pl.Int64), place=pl.lit("", pl.String))
    first = pl.lit(FIRST)
    if prompts.collect_schema().get("tokens") == pl.List(pl.String):
        special = pl.col("tokens").list.first().str.contains(_SPECIAL)
        first = pl.when(special).then(pl.lit(BOS)).otherwise(pl.lit(FIRST))
    names = [(pl.col(f"{ROLE}{name}"), pl.lit(name)) for name in frames.roles]
    names += [(pl.col(f"{ROLE}{name}") + 1, pl.lit(f"{name}+1")) for name in frames.roles if name in after]
    names.append((pl.lit(0), first))
    tables = [
        prompts.select(prompt="id", position=position.cast(pl.Int64), place=place, rank=pl.lit(rank))
        for rank, (position, place) in enumerate(names)
    ]
    return (
        pl.concat(tables)
        .drop_nulls("position")
        .sort("rank")
        .unique(("prompt", "position"), keep="first", maintain_order=True)
        .drop("rank")
    )


def with_places(table: pl.LazyFrame, names: pl.LazyFrame, by: By, columns: Sequence[str]) -> pl.LazyFrame:
    """The table with places (text) in the columns that held positions."""
    for column in columns:
        position, place = pl.col(column), pl.col(column).cast(pl.String)
        if by == "roles":
            there = names.select("prompt", pl.col("position").alias(column), name="place")
            table = table.join(there, on=("prompt", column), how="left")
            place = pl.when(position.is_not_null()).then(pl.col("name").fill_null(OTHER))
        table = table.with_columns(place.alias(column)).drop("name", strict=False)
    return table


def places_in_order(frames: Frames, names: pl.LazyFrame, by: By) -> tuple[str, ...]:
    """The places that nodes sit at or read, from the left to the right of a sentence: by their mean position."""
    seen = pl.concat(
        [
            frames.nodes.select("prompt", at=column, where=column).drop_nulls("where")
            for column in ("dest", "src")
        ]
    )
    means = with_places(seen, names, by, ("at",)).group_by("at").agg(pl.col("where").mean())
    return tuple(means.sort("where", "at").collect()["at"])
