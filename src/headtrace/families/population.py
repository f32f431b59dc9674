"""A population: many circuits of one model, as sets of items, with the labels and roles of their prompts.

>>> from headtrace.circuits.describe import example
>>> population = Population.of([example()] * 3, labels=[{"order": "ABBA"}] * 3)
>>> sets = population.sets("edges")
>>> sets.matrix.shape, sets.items
((3, 2), ('L9H6 => root', 'MLP 3 => L9H6'))

It is made from a run, of which it reads only the columns that count, or from circuits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from scipy import sparse

from headtrace.circuits import Circuit
from headtrace.circuits.parts import ModelInfo
from headtrace.errors import InputError
from headtrace.families.items import Grain, items_of, tables_of
from headtrace.families.models import require_one_model
from headtrace.runs.frames import RunLike

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Labels = Mapping[str, str | None]
Roles = Mapping[str, int]
LABEL, ROLE = "label:", "role:"
FEWEST = 3


@dataclass(frozen=True)
class Sets:
    """Circuits as sets of items at one grain."""

    grain: Grain
    matrix: csr_array
    """Circuits by items, one where a circuit has an item (float32, so that products are counts)."""
    names: pl.DataFrame
    """``item``, and for edges ``source``, ``target`` and ``channel``, in the order of the columns of the matrix."""

    @property
    def items(self) -> tuple[str, ...]:
        return tuple(self.names["item"].to_list())

    @property
    def sizes(self) -> np.ndarray:
        """How many items each circuit has."""
        return np.diff(self.matrix.indptr).astype(np.float32)

    def rows(self, which: np.ndarray) -> Sets:
        """Some of the circuits."""
        return Sets(self.grain, self.matrix[which], self.names)

    def frequencies(self, which: np.ndarray) -> np.ndarray:
        """How many of some circuits have each item."""
        return np.asarray(self.matrix[which].sum(axis=0), dtype=np.float64).ravel()

    @classmethod
    def of(cls, items: pl.DataFrame, n: int, grain: Grain) -> Sets:
        """The incidence of a table of ``row`` and ``item``."""
        names = items.drop("row").unique("item").sort("item")
        where = items.join(names.select("item").with_row_index("column"), on="item", how="left")
        rows, columns = where["row"].to_numpy(), where["column"].to_numpy()
        ones = np.ones(len(rows), dtype=np.float32)
        return cls(grain, sparse.csr_array((ones, (rows, columns)), shape=(n, names.height)), names)


@dataclass(frozen=True, repr=False)
class Population:
    """Circuits by id. ``labels`` and ``roles`` have one row for each, in the same order."""

    ids: tuple[str, ...]
    labels: pl.DataFrame
    """One column for each label, without the prefix that it has in a run."""
    roles: pl.DataFrame
    """The position of each role in each prompt; null where a prompt does not have it."""
    nodes: pl.DataFrame
    edges: pl.DataFrame
    read: Callable[[str], Circuit]
    """A circuit by its id."""
    left_out: tuple[str, ...] = ()
    """Prompts whose circuits have no edges, and those that failed."""
    _known: dict[Grain, Sets] = field(default_factory=dict[Grain, Sets], compare=False)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        out = f", {len(self.left_out)} left out" if self.left_out else ""
        return f"Population({len(self)} circuits{out}, labels: {', '.join(self.labels.columns) or 'none'})"

    def sets(self, grain: Grain) -> Sets:
        """The circuits as sets of items at this grain."""
        if grain not in self._known:
            self._known[grain] = Sets.of(items_of(self.nodes, self.edges, grain), len(self), grain)
        return self._known[grain]

    @cached_property
    def rows(self) -> dict[str, int]:
        """Where each circuit is."""
        return {id: row for row, id in enumerate(self.ids)}

    def circuit(self, id: str) -> Circuit:
        """A circuit of the population by its id."""
        if id not in self.rows:
            raise InputError(
                f"There is no circuit {id!r} in this population of {len(self)}, such as {self.ids[0]!r}."
            )
        return self.read(id)

    def roles_of(self, id: str) -> dict[str, int]:
        """The positions that have a role in a prompt."""
        if not self.roles.width:
            return {}
        found = self.roles.row(self.rows[id], named=True)
        return {name: place for name, place in found.items() if place is not None}

    def column(self, name: str) -> pl.Series:
        """A column of labels; an error lists those that are there."""
        short = name.removeprefix(LABEL)
        if short not in self.labels.columns:
            there = ", ".join(map(repr, self.labels.columns)) or "none at all"
            raise InputError(f"There is no label column {name!r} in this population; there are: {there}.")
        return self.labels[short]

    # -- making one --------------------------------------------------------------------------------------------------

    @classmethod
    def of(
        cls,
        circuits: Sequence[Circuit],
        labels: Sequence[Labels] | None = None,
        roles: Sequence[Roles] | None = None,
        ids: Sequence[str] | None = None,
    ) -> Population:
        """From circuits, which are numbered from 0 unless they are given ids."""
        many = list(circuits)
        for what, given in (("labels", labels), ("roles", roles), ("ids", ids)):
            if given is not None and len(given) != len(many):
                raise InputError(f"{len(given)} {what} for {len(many)} circuits: give one for each circuit.")
        names = [str(each) for each in (ids or range(len(many)))]
        if len(set(names)) < len(names):
            raise InputError("Two circuits have the same id: give each its own.")
        require_one_model([circuit.model for circuit in many])
        prompts = pl.DataFrame({"id": names}, schema={"id": pl.String}).with_columns(
            *_columns(labels or [], pl.String), *_columns(roles or [], pl.Int64)
        )
        nodes, edges = tables_of(many)
        by_id = dict(zip(names, many, strict=True))
        return cls._kept(prompts, _as(labels, str), _as(roles, int), nodes, edges, by_id.__getitem__, ())

    @classmethod
    def of_run(cls, run: RunLike) -> Population:
        """From a run: prompts that are done, in the order of the run."""
        prompts = run.prompts.sort("index").collect()
        done = prompts.filter(pl.col("status") == "done")
        failed = tuple(prompts.filter(pl.col("status") != "done")["id"].to_list())
        places = (
            done.select(pl.col("id").alias("prompt"))
            .with_row_index("row")
            .with_columns(pl.col("row").cast(pl.Int64))
        )
        ends = [f"{end}_{key}" for end in ("source", "target") for key in ("kind", "layer", "head")]
        nodes = _placed(run.nodes, places, ["kind", "layer", "head"])
        edges = _placed(run.edges, places, [*ends, "channels"])
        names = [[n.removeprefix(p) for n in done.columns if n.startswith(p)] for p in (LABEL, ROLE)]
        return cls._kept(done, names[0], names[1], nodes, edges, run.circuit, failed)

    @classmethod
    def _kept(
        cls,
        prompts: pl.DataFrame,
        labels: Sequence[str],
        roles: Sequence[str],
        nodes: pl.DataFrame,
        edges: pl.DataFrame,
        read: Callable[[str], Circuit],
        failed: tuple[str, ...],
    ) -> Population:
        """Circuits without an edge that counts are left out: nothing says which others they are like."""
        n = prompts.height
        full = set(items_of(nodes, edges, "edges")["row"].unique().to_list())
        keep = [row for row in range(n) if row in full]
        if len(keep) < FEWEST:
            raise InputError(_too_few(n, len(keep), len(failed)))
        renumbered = pl.DataFrame(
            {"row": keep, "new": range(len(keep))}, schema={"row": pl.Int64, "new": pl.Int64}
        )
        nodes, edges = (
            table.join(renumbered, on="row").with_columns(pl.col("new").alias("row")).drop("new")
            for table in (nodes, edges)
        )
        kept = prompts[keep]
        empty = tuple(id for row, id in enumerate(prompts["id"].to_list()) if row not in full)
        return cls(
            ids=tuple(kept["id"].to_list()),
            labels=kept.select(pl.col(LABEL + name).alias(name) for name in labels),
            roles=kept.select(pl.col(ROLE + name).alias(name) for name in roles),
            nodes=nodes,
            edges=edges,
            read=read,
            left_out=(*failed, *empty),
        )


def _too_few(n: int, with_edges: int, failed: int) -> str:
    told = f"{n} circuits" + (f" ({failed} prompts failed)" if failed else "")
    if n >= FEWEST:
        which = "none of them has" if not with_edges else f"only {with_edges} of them have"
        told += f", and {which} edges between heads, MLPs and the root"
    return f"Families need at least {FEWEST} circuits that have edges: there are {told}. Trace more prompts."


def _columns(given: Sequence[Mapping[str, Any]], type: Any) -> list[pl.Series]:
    prefix = LABEL if type == pl.String else ROLE
    make = str if type == pl.String else int
    names = dict.fromkeys(name for each in given for name in each)
    return [
        pl.Series(
            prefix + name, [None if (v := each.get(name)) is None else make(v) for each in given], dtype=type
        )
        for name in names
    ]


def _as(given: Sequence[Mapping[str, Any]] | None, type: type) -> list[str]:
    return list(dict.fromkeys(name for each in given or [] for name in each))


def _placed(table: pl.LazyFrame, places: pl.DataFrame, columns: list[str]) -> pl.DataFrame:
    """The rows of the prompts that are kept, numbered as they are."""
    return table.select("prompt", *columns).collect().join(places, on="prompt").drop("prompt").sort("row")


def model_of(population: Population) -> ModelInfo:
    """The model that was traced."""
    return population.circuit(population.ids[0]).model
