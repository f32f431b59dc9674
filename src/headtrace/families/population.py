"""A population: many circuits of one model as sets of items, with the labels and roles of their prompts.

>>> from headtrace.circuits.describe import example
>>> population = Population.of([example()] * 3, labels=[{"order": "ABBA"}] * 3)
>>> sets = population.sets("edges")
>>> sets.matrix.shape, sets.items
((3, 2), ('L9H6 => root', 'MLP 3 => L9H6'))

The items of a circuit are its components, its edges, or its edges with their channels (the grain). Token positions do
not count. Embeddings, biases, offsets and rounding terms are left out, because every circuit has them. An edge into
the root has no channels and is one item even at the finest grain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import polars as pl
from jaxtyping import Bool, Float, Int
from scipy import sparse

from headtrace.circuits import Circuit
from headtrace.circuits.parts import ModelInfo, same_model
from headtrace.circuits.rows import edge_table, node_table
from headtrace.errors import InputError
from headtrace.runs.frames import RunLike
from headtrace.runs.manifest import DONE, LABEL, ROLE
from headtrace.vocabulary import Site, head_name

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Grain = Literal["components", "edges", "edge-channel"]
GRAINS: tuple[Grain, ...] = get_args(Grain)
ROOT_NAME = "root"
Labels = Mapping[str, str | None]
Roles = Mapping[str, int]
NEXT = "+1"
"""The token after one that has a role: previous-token heads write there."""
FEWEST = 3
_NODE_COLUMNS = ("kind", "layer", "head")
_EDGE_COLUMNS = (*(f"{end}_{name}" for end in ("source", "target") for name in _NODE_COLUMNS), "channels")


def check_grain(grain: str) -> Grain:
    if grain not in GRAINS:
        raise InputError(f"grain={grain!r}: expected one of {', '.join(map(repr, GRAINS))}.")
    return grain


# -- items ---------------------------------------------------------------------------------------------------


def component_name(site: Site) -> str | None:
    """The name of a site's component, without positions; None for components that are left out.

    >>> [component_name(site) for site in (Site("head", 9, 6, 14, 3), Site("mlp", 3, dest=2), Site("embedding"))]
    ['L9H6', 'MLP 3', None]
    """
    match site.kind:
        case "head":
            return head_name(site.layer or 0, site.head or 0)
        case "mlp":
            return f"MLP {site.layer}"
        case "root":
            return ROOT_NAME
        case _:
            return None


def component_names(prefix: str = "") -> pl.Expr:
    """``component_name`` for the columns ``kind``, ``layer`` and ``head`` of a table."""
    kind, layer, head = (pl.col(prefix + name) for name in _NODE_COLUMNS)
    return (
        pl.when(kind == "head")
        .then(pl.format("L{}H{}", layer, head))
        .when(kind == "mlp")
        .then(pl.format("MLP {}", layer))
        .when(kind == "root")
        .then(pl.lit(ROOT_NAME))
    )


def edge_item(source: str, target: str, channel: int | None = None) -> str:
    """An edge as an item: ``L0H1 => L2H0``, with a channel ``L0H1 => L2H0 #5``."""
    return f"{source} => {target}" + ("" if channel is None else f" #{channel}")


def items_of(nodes: pl.DataFrame, edges: pl.DataFrame, grain: Grain) -> pl.DataFrame:
    """The distinct items of many circuits: ``row`` and ``item``, and for edges ``source``, ``target``, ``channel``."""
    if grain == "components":
        found = nodes.select("row", component_names().alias("item")).filter(pl.col("item") != ROOT_NAME)
        return found.unique().sort("row", "item")
    ends = edges.select(
        "row",
        component_names("source_").alias("source"),
        component_names("target_").alias("target"),
        "channels",
    ).drop_nulls(["source", "target"])
    if grain == "edges":
        ends = ends.with_columns(pl.lit(None, dtype=pl.Int64).alias("channel"))
    else:
        # An edge into the root has no channels and must stay an item: explode would drop an empty list.
        none = pl.lit(None, dtype=pl.List(pl.Int64))
        ends = ends.with_columns(
            pl.when(pl.col("channels").list.len() > 0).then("channels").otherwise(none).alias("channel")
        ).explode("channel")
    whole = pl.format("{} => {}", "source", "target")
    item = pl.when(pl.col("channel").is_null()).then(whole).otherwise(pl.format("{} #{}", whole, "channel"))
    found = ends.select("row", item.alias("item"), "source", "target", "channel")
    return found.unique(["row", "item"]).sort("row", "item")


@dataclass(frozen=True)
class Sets:
    """Circuits as sets of items at one grain."""

    grain: Grain
    matrix: csr_array
    """Circuits by items: 1 where a circuit has an item (float32, so that products are counts)."""
    names: pl.DataFrame
    """``item``, and for edges ``source``, ``target`` and ``channel``, in the order of the columns of the matrix."""

    @property
    def items(self) -> tuple[str, ...]:
        return tuple(self.names["item"].to_list())

    def counts(
        self, rows: Int[np.ndarray, " some"] | Bool[np.ndarray, " circuit"]
    ) -> Float[np.ndarray, " item"]:
        """In how many of the selected circuits each item occurs."""
        return np.asarray(self.matrix[rows].sum(axis=0), dtype=np.float64).ravel()

    @classmethod
    def of(cls, items: pl.DataFrame, n: int, grain: Grain) -> Sets:
        """The incidence matrix of a table of ``row`` and ``item``."""
        names = items.drop("row").unique("item").sort("item")
        where = items.join(names.select("item").with_row_index("column"), on="item", how="left")
        rows, columns = where["row"].to_numpy(), where["column"].to_numpy()
        ones = np.ones(len(rows), dtype=np.float32)
        return cls(grain, sparse.csr_array((ones, (rows, columns)), shape=(n, names.height)), names)


# -- roles: names of positions -------------------------------------------------------------------------------


def role_at(position: int | None, roles: Roles) -> str | None:
    """The role of a position, or of the one before it with "+1"; None where neither has a role.

    >>> roles = {"IO": 2, "S1": 4, "end": 14}
    >>> role_at(4, roles), role_at(5, roles), role_at(9, roles), position_of("S1+1", roles)
    ('S1', 'S1+1', None, 5)
    """
    if position is None:
        return None
    names = {at: name for name, at in roles.items()}
    before = names.get(position - 1)
    return names.get(position) or (None if before is None else before + NEXT)


def position_of(role: str | None, roles: Roles) -> int | None:
    """The position of a role in a prompt; the inverse of ``role_at``."""
    if role is None:
        return None
    position = roles.get(role)
    if position is None and role.endswith(NEXT) and role.removesuffix(NEXT) in roles:
        position = roles[role.removesuffix(NEXT)] + 1
    return position


# -- circuits of one model -----------------------------------------------------------------------------------


def describe_model(model: ModelInfo) -> str:
    """A model in an error message: its name and its hashes."""
    revision = "" if model.revision is None else f" at {model.revision}"
    hashed = (
        "weights without a hash" if model.weights_sha256 is None else f"weights {model.weights_sha256[:12]}"
    )
    computing = "" if model.computation_sha256 is None else f", config {model.computation_sha256[:12]}"
    return f"{model.name!r}{revision} ({hashed}{computing})"


def require_one_model(models: Iterable[ModelInfo]) -> None:
    """Refuse circuits of two models: their heads and channels have nothing to do with each other."""
    first, *others = [*models] or [None]
    for other in others:
        if first is not None and other is not None and not same_model(first, other):
            raise InputError(
                f"Circuits of different models cannot be compared: {describe_model(first)} and "
                f"{describe_model(other)}. Their heads and channels have nothing to do with each other; give circuits "
                "of one model."
            )


@dataclass(frozen=True, repr=False)
class Population:
    """Circuits by id. ``labels`` and ``roles`` have one row per circuit, in the same order."""

    ids: tuple[str, ...]
    labels: pl.DataFrame
    """One column per label, without the prefix that it has in a run."""
    roles: pl.DataFrame
    """The position of each role in each prompt; null where a prompt does not have it."""
    nodes: pl.DataFrame
    edges: pl.DataFrame
    read: Callable[[str], Circuit]
    """Reads a circuit by its id."""
    left_out: tuple[str, ...] = ()
    """Prompts that failed, and those whose circuits have no edges."""
    _sets: dict[Grain, Sets] = field(default_factory=dict[Grain, Sets], compare=False)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        out = f", {len(self.left_out)} left out" if self.left_out else ""
        return f"Population({len(self)} circuits{out}, labels: {', '.join(self.labels.columns) or 'none'})"

    def sets(self, grain: Grain) -> Sets:
        """The circuits as sets of items at a grain."""
        if grain not in self._sets:
            self._sets[grain] = Sets.of(items_of(self.nodes, self.edges, grain), len(self), grain)
        return self._sets[grain]

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of each circuit, by id."""
        return {id: row for row, id in enumerate(self.ids)}

    @property
    def model(self) -> ModelInfo:
        """The model that was traced."""
        return self.circuit(self.ids[0]).model

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
        return {name: position for name, position in found.items() if position is not None}

    def column(self, name: str) -> pl.Series:
        """A column of labels; an unknown name is an error that lists the existing ones."""
        short = name.removeprefix(LABEL)
        if short not in self.labels.columns:
            there = ", ".join(map(repr, self.labels.columns)) or "none at all"
            raise InputError(f"There is no label column {name!r} in this population; there are: {there}.")
        return self.labels[short]

    @classmethod
    def of(
        cls,
        circuits: Sequence[Circuit],
        labels: Sequence[Labels] | None = None,
        roles: Sequence[Roles] | None = None,
        ids: Sequence[str] | None = None,
    ) -> Population:
        """A population of circuits, numbered from 0 unless ``ids`` are given."""
        many = list(circuits)
        for what, given in (("labels", labels), ("roles", roles), ("ids", ids)):
            if given is not None and len(given) != len(many):
                raise InputError(f"{len(given)} {what} for {len(many)} circuits: give one for each circuit.")
        names = [str(each) for each in (ids or range(len(many)))]
        if len(set(names)) < len(names):
            raise InputError("Two circuits have the same id: give each its own.")
        require_one_model(circuit.model for circuit in many)
        prompts = pl.DataFrame({"id": names}, schema={"id": pl.String}).with_columns(
            *_series(labels or (), LABEL, str, pl.String), *_series(roles or (), ROLE, int, pl.Int64)
        )
        named = list(zip(names, many, strict=True))
        nodes, edges = (pl.LazyFrame(pl.from_arrow(make(named))) for make in (node_table, edge_table))
        return cls._of_tables(prompts, nodes, edges, dict(named).__getitem__)

    @classmethod
    def of_run(cls, run: RunLike) -> Population:
        """The population of a run: the prompts that are done, in the order of the run."""
        prompts = run.prompts.sort("index").collect()
        done, failed = (prompts.filter(each) for each in (pl.col("status") == DONE, pl.col("status") != DONE))
        return cls._of_tables(done, run.nodes, run.edges, run.circuit, failed["id"].to_list())

    @classmethod
    def _of_tables(
        cls,
        prompts: pl.DataFrame,
        nodes: pl.LazyFrame,
        edges: pl.LazyFrame,
        read: Callable[[str], Circuit],
        failed: Sequence[str] = (),
    ) -> Population:
        """Prompts with the nodes and edges of their circuits, as a run has them.

        Circuits without an edge between heads, MLPs and the root are left out: nothing says which others they are like.
        """
        counted = component_names("source_").is_not_null() & component_names("target_").is_not_null()
        with_edges = set(
            edges.filter(counted).select(pl.col("prompt").unique()).collect()["prompt"].to_list()
        )
        kept = prompts.filter([id in with_edges for id in prompts["id"].to_list()])
        if kept.height < FEWEST:
            there = f"{prompts.height} circuits" + (f" ({len(failed)} prompts failed)" if failed else "")
            if prompts.height >= FEWEST:
                which = "none of them has" if not kept.height else f"only {kept.height} of them have"
                there += f", and {which} edges between heads, MLPs and the root"
            raise InputError(
                f"Families need at least {FEWEST} circuits that have edges: there are {there}. Trace more prompts."
            )
        rows = kept.lazy().select(pl.col("id").alias("prompt"), pl.int_range(pl.len()).alias("row"))
        numbered_nodes, numbered_edges = (
            table.select("prompt", *columns).join(rows, on="prompt").drop("prompt").sort("row").collect()
            for table, columns in ((nodes, _NODE_COLUMNS), (edges, _EDGE_COLUMNS))
        )
        labels, roles = (
            kept.select(pl.col(n).alias(n.removeprefix(prefix)) for n in kept.columns if n.startswith(prefix))
            for prefix in (LABEL, ROLE)
        )
        empty = [id for id in prompts["id"].to_list() if id not in with_edges]
        return cls(
            ids=tuple(kept["id"].to_list()),
            labels=labels,
            roles=roles,
            nodes=numbered_nodes,
            edges=numbered_edges,
            read=read,
            left_out=(*failed, *empty),
        )


def _series(
    given: Sequence[Mapping[str, Any]], prefix: str, cast: Callable[[Any], Any], dtype: Any
) -> list[pl.Series]:
    """One column per name that occurs in any of the mappings; null where a mapping does not have it."""
    return [
        pl.Series(
            prefix + name,
            [None if (value := each.get(name)) is None else cast(value) for each in given],
            dtype=dtype,
        )
        for name in dict.fromkeys(name for each in given for name in each)
    ]
