"""Many circuits into one network, by roles.

Nodes of circuits become one where component and places agree, edges where both ends, the side and (if asked) the
channel do. What is counted is prompts: two edges of one prompt that share their roles (``other`` has many positions)
count once, and both go into the mean weight.

>>> from headtrace.circuits.describe import example
>>> network = merge([example()] * 3, channels=True)
>>> [(edge.side, edge.channel, edge.count) for edge in network.edges]
[('root', None, 3), ('query', 1, 3), ('query', 4, 3)]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from headtrace.errors import InputError
from headtrace.runs.frames import PLACE, Frames, Roles, Source, frames_of
from headtrace.runs.network import Form, Network, NetworkEdge, NetworkNode
from headtrace.runs.roles import AFTER, By, chosen, in_order, named, with_places
from headtrace.vocabulary import SIDES

ENDS = tuple(f"{end}_{key}" for end in ("source", "target") for key in PLACE)


def merge(
    source: Source,
    *,
    by: By | None = None,
    channels: bool = False,
    roles: Roles | None = None,
    after: Sequence[str] = AFTER,
) -> Network:
    """The network of a run, or of circuits: components at roles, and signals between them.

    ``by`` is ``"roles"`` where there are some, else ``"positions"``. With ``channels``, an edge is counted for each
    channel it was found in, with the weight of the whole edge. ``roles`` are for circuits, which have none of their
    own; ``after`` names the roles whose next token has a name (``S1+1``).
    """
    frames = frames_of(source, roles)
    by = chosen(frames, by)
    names = named(frames, by, after)
    nodes = with_places(frames.nodes, names, by, ("dest", "src"))
    edges = with_places(
        frames.edges, names, by, tuple(name for name in ENDS if name.endswith(("dest", "src")))
    )
    if channels:
        edges = edges.with_columns(channel="channels").explode("channel")
    by_edge = [*ENDS, "side", *(["channel"] if channels else [])]
    return build(
        frames,
        by,
        "merged",
        places=in_order(frames, names, by),
        nodes=grouped(nodes, list(PLACE), ("attention", "influence", "contribution")),
        edges=grouped(edges, by_edge, ("weight", "contribution")),
        channels=channels,
    )


def grouped(table: pl.LazyFrame, keys: list[str], means: Sequence[str]) -> pl.LazyFrame:
    """One row for each combination of keys: in how many prompts it is, how often, and means."""
    return table.group_by(keys).agg(
        pl.col("prompt").n_unique().cast(pl.Int64).alias("count"),
        pl.len().cast(pl.Int64).alias("occurrences"),
        *(_mean(name) for name in means),
    )


def _mean(name: str) -> pl.Expr:
    """The mean of a column; its last digit depends neither on the order of rows nor on threads.

    A cumulative sum of sorted values is added up one by one; polars would not sort for a mean.
    """
    values = pl.col(name).drop_nulls().sort()
    return (values.cum_sum().last() / values.len()).alias(name)


def build(
    frames: Frames,
    by: By,
    form: Form,
    *,
    places: tuple[str, ...],
    nodes: pl.LazyFrame,
    edges: pl.LazyFrame,
    channels: bool = False,
) -> Network:
    """A network of tables of nodes (by place) and edges (by the places of both ends); nodes get their numbers here."""
    counts = _counts(frames)
    numbered = nodes.sort(*_order(PLACE, places), nulls_last=False).with_row_index("id").collect()
    ids = numbered.select(pl.col("id").cast(pl.Int64), *PLACE).lazy()
    for end in ("source", "target"):
        keys = [f"{end}_{key}" for key in PLACE]
        number = ids.rename(dict(zip(("id", *PLACE), (end, *keys), strict=True)))
        edges = edges.join(number, on=keys, how="left", nulls_equal=True)
    sides = pl.Enum(list(SIDES))
    order = ["target", pl.col("side").cast(sides), "source", *(["channel"] if channels else [])]
    joined = edges.drop(ENDS).sort(*order).collect()
    whole = Network(
        model=frames.model,
        prompts=counts[0],
        without=counts[1],
        by=by,
        form=form,
        channels=channels,
        places=places,
        nodes=tuple(NetworkNode(**row) for row in numbered.iter_rows(named=True)),
        edges=tuple(
            NetworkEdge(frequency=row["count"] / counts[0], **row) for row in joined.iter_rows(named=True)
        ),
    )
    return whole.keeping(whole.edges)


def _counts(frames: Frames) -> tuple[int, int]:
    """How many prompts have a circuit with edges, and how many have not."""
    found = frames.edges.select(pl.col("prompt").n_unique()).collect().item()
    if not found:
        raise InputError("There is nothing to put together: none of the prompts has a circuit with edges.")
    return found, frames.prompts.select(pl.len()).collect().item() - found


def _order(keys: Sequence[str], places: tuple[str, ...]) -> list[Any]:
    """Lowest layer first, places from left to right."""
    rank = {place: i for i, place in enumerate(places)}
    by_place = [
        pl.col(name).replace_strict(rank, default=None, return_dtype=pl.Int64) for name in ("dest", "src")
    ]
    return [*(pl.col(name) for name in ("layer", "head", "kind") if name in keys), *by_place]
