"""A circuit as a set: its components, its edges, or its edges with their channels. Positions do not count.

>>> from headtrace.circuits.describe import example
>>> [component_name(node.site) for node in example().nodes if component_name(node.site)]
['root', 'L9H6', 'MLP 3']

Embeddings, biases, offsets and roundings are left out: every circuit has them. An edge into the root has no channels
and is an item of its own at the finest grain, too.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import polars as pl

from headtrace.circuits import Circuit
from headtrace.errors import InputError
from headtrace.vocabulary import Site, head_name

Grain = Literal["components", "edges", "edge-channel"]
GRAINS: tuple[Grain, ...] = get_args(Grain)
ROOT_NAME = "root"


def component_name(site: Site) -> str | None:
    """The component of a site, wherever it sits; None for what does not count.

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


def edge_item(source: str, target: str, channel: int | None = None) -> str:
    """An edge as an item: ``L0H1 => L2H0``, with a channel ``L0H1 => L2H0 #5``."""
    return f"{source} => {target}" + ("" if channel is None else f" #{channel}")


def named(prefix: str = "") -> pl.Expr:
    """``component_name`` for the columns ``kind``, ``layer`` and ``head`` of a table."""
    kind, layer, head = (pl.col(prefix + name) for name in ("kind", "layer", "head"))
    return (
        pl.when(kind == "head")
        .then(pl.format("L{}H{}", layer, head))
        .when(kind == "mlp")
        .then(pl.format("MLP {}", layer))
        .when(kind == "root")
        .then(pl.lit(ROOT_NAME))
    )


def items_of(nodes: pl.DataFrame, edges: pl.DataFrame, grain: Grain) -> pl.DataFrame:
    """Items of many circuits, each once: ``row`` and ``item``, and for edges ``source``, ``target``, ``channel``."""
    if grain == "components":
        found = nodes.select("row", named().alias("item")).filter(pl.col("item") != ROOT_NAME)
        return found.unique().sort("row", "item")
    ends = edges.select(
        "row", named("source_").alias("source"), named("target_").alias("target"), "channels"
    ).drop_nulls(["source", "target"])
    if grain == "edges":
        ends = ends.with_columns(pl.lit(None, dtype=pl.Int64).alias("channel"))
    else:
        # An edge without channels, into the root, must stay an item: an empty list would be dropped.
        none = pl.lit(None, dtype=pl.List(pl.Int64))
        ends = ends.with_columns(
            pl.when(pl.col("channels").list.len() > 0).then("channels").otherwise(none).alias("channel")
        ).explode("channel")
    plain = pl.format("{} => {}", "source", "target")
    item = pl.when(pl.col("channel").is_null()).then(plain).otherwise(pl.format("{} #{}", plain, "channel"))
    found = ends.select("row", item.alias("item"), "source", "target", "channel")
    return found.unique(["row", "item"]).sort("row", "item")


def tables_of(circuits: list[Circuit]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Nodes and edges of circuits in the form that ``items_of`` reads; ``row`` numbers the circuits."""
    nodes = [(row, n.kind, n.layer, n.head) for row, circuit in enumerate(circuits) for n in circuit.nodes]
    edges = [
        (
            row,
            s.kind,
            s.layer,
            s.head,
            t.kind,
            t.layer,
            t.head,
            None if e.channels is None else list(e.channels),
        )
        for row, circuit in enumerate(circuits)
        for e in circuit.edges
        for s, t in [(circuit.node(e.source), circuit.node(e.target))]
    ]
    return (
        pl.DataFrame(nodes, schema=_schema(""), orient="row"),
        pl.DataFrame(
            edges, schema=_schema("source_", "target_") | {"channels": pl.List(pl.Int64)}, orient="row"
        ),
    )


def _schema(*prefixes: str) -> dict[str, Any]:
    types: dict[str, Any] = {"row": pl.Int64}
    for prefix in prefixes:
        types |= {f"{prefix}kind": pl.String, f"{prefix}layer": pl.Int64, f"{prefix}head": pl.Int64}
    return types


def check_grain(grain: str) -> Grain:
    """Refuse what is no grain."""
    if grain not in GRAINS:
        raise InputError(f"grain={grain!r}: expected one of {', '.join(map(repr, GRAINS))}.")
    return grain  # type: ignore[return-value]
