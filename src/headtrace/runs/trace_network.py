"""The trace network of the 2024 paper on sparse attention decomposition, and its skeleton.

It has heads, and for each head the tokens it attends between, so that it shows through which token a head is told
something. There are two kinds of edges:

- *communication*, from a head to a token of a later head: it wrote a signal there that the later head reads, as its
  query (the token it attends from) or key (the token it attends to);
- *attention*, from a token to its head: the head attends from it, or to it.

The paper draws the edges that were found at least 65 times on 256 prompts; its skeleton has those of 170 and more. Here
both are shares of the prompts that have a circuit (``DRAWN``, ``SKELETON``).

What is ours, where the paper says nothing or something else: an edge counts once in a prompt, however many firings of
the prompt it is in. Signals are those that the tracing method found from the root it was given (the paper traces by
SVT from three heads: ``method="svt"``, ``heads=[...]``), so weights are those of its edges; the weight of an
attention edge is the mean attention. A head whose causes were looked for has tokens; one that only writes has none.
As in the paper, firings that attend to the first token are left out, and so is everything that is no head.

>>> from headtrace.circuits import Node
>>> from headtrace.circuits.describe import example
>>> from dataclasses import replace
>>> circuit = example()
>>> firing = Node(1, "head", 9, 6, 1, 1, 0.75, expanded=True)
>>> nodes = (circuit.nodes[0], firing, Node(2, "head", 3, 1, 1, 0, 0.9))
>>> found = trace_network([replace(circuit, nodes=nodes)])
>>> for edge in found.edges:
...     print(edge.kind, edge.side, found.node(edge.source), "->", found.node(edge.target))
attention query L9H6 @1 -> L9H6
attention key L9H6 @1 -> L9H6
communication query L3H1 -> L9H6 @1
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from headtrace.errors import InputError
from headtrace.runs.frames import PLACE, Frames, Roles, Source, frames_of
from headtrace.runs.merging import build, grouped
from headtrace.runs.network import Network
from headtrace.runs.roles import AFTER, By, chosen, in_order, named, with_places
from headtrace.vocabulary import ATTENTION_SIDES

DRAWN = 65 / 256
"""Edges of a smaller share of the prompts are not in the paper's figure of the trace network."""
SKELETON = 170 / 256
"""The share of the paper's skeleton."""


def trace_network(
    source: Source,
    *,
    min_frequency: float = DRAWN,
    by: By | None = None,
    roles: Roles | None = None,
    after: Sequence[str] = AFTER,
) -> Network:
    """The trace network of a run, or of circuits; options are those of ``merge``."""
    frames = frames_of(source, roles)
    by = chosen(frames, by)
    names = named(frames, by, after)
    firings = _firings(frames)
    if firings.head(1).collect().is_empty():
        raise InputError("No head that attends past the first token was traced: there is no trace network.")
    told = with_places(_communication(frames, firings), names, by, ("place",))
    attended = with_places(_attention(firings), names, by, ("place",))
    edges = _edges(told, attended)
    nodes = _nodes(told, attended)
    places = in_order(frames, names, by)
    whole = build(frames, by, "trace", places=places, nodes=nodes, edges=edges)
    return whole.prune(min_frequency=min_frequency)


def skeleton(
    source: Source,
    *,
    min_frequency: float = SKELETON,
    by: By | None = None,
    roles: Roles | None = None,
    after: Sequence[str] = AFTER,
) -> Network:
    """The trace network's most frequent edges, and the nodes that they join."""
    return trace_network(source, min_frequency=min_frequency, by=by, roles=roles, after=after)


def _firings(frames: Frames) -> pl.LazyFrame:
    """Heads whose causes were looked for, and that do not attend to the first token."""
    traced = (pl.col("kind") == "head") & pl.col("expanded") & (pl.col("src") != 0)
    return frames.nodes.filter(traced).select("prompt", "id", "layer", "head", "dest", "src", "attention")


def _communication(frames: Frames, firings: pl.LazyFrame) -> pl.LazyFrame:
    """Signals of heads into the query or key of firings, with the position that they were written at."""
    place = pl.when(pl.col("side") == "query").then("target_dest").otherwise("target_src")
    heads = (pl.col("source_kind") == "head") & pl.col("side").is_in(ATTENTION_SIDES)
    return (
        frames.edges.filter(heads)
        .join(firings.select("prompt", target="id"), on=("prompt", "target"), how="semi")
        .with_columns(place=place)
    )


def _attention(firings: pl.LazyFrame) -> pl.LazyFrame:
    """Each firing twice: for the token it attends from, and for the one it attends to."""
    return pl.concat(
        [
            firings.with_columns(place="dest", side=pl.lit("query")),
            firings.with_columns(place="src", side=pl.lit("key")),
        ]
    )


def _edges(told: pl.LazyFrame, attended: pl.LazyFrame) -> pl.LazyFrame:
    keys = ["source_layer", "source_head", "target_layer", "target_head", "place", "side"]
    communication = grouped(told, keys, ("weight", "contribution")).select(
        *_end("source", "head", "source_layer", "source_head"),
        *_end("target", "token", "target_layer", "target_head", "place"),
        *("side", "count", "occurrences", "weight", "contribution"),
        kind=pl.lit("communication"),
    )
    attention = grouped(attended, ["layer", "head", "place", "side"], ("attention",)).select(
        *_end("source", "token", "layer", "head", "place"),
        *_end("target", "head", "layer", "head"),
        *("side", "count", "occurrences", pl.col("attention").fill_null(0.0).alias("weight")),
        contribution=pl.lit(None, pl.Float64),
        kind=pl.lit("attention"),
    )
    return pl.concat([communication, attention])


def _end(end: str, kind: str, layer: str, head: str, place: str | None = None) -> list[pl.Expr]:
    dest = pl.lit(None, pl.String) if place is None else pl.col(place)
    values = (pl.lit(kind), pl.col(layer), pl.col(head), dest, pl.lit(None, pl.String))
    return [value.alias(f"{end}_{key}") for key, value in zip(PLACE, values, strict=True)]


def _nodes(told: pl.LazyFrame, attended: pl.LazyFrame) -> pl.LazyFrame:
    """Heads with the prompts in which they write or attend, and tokens with those in which their head attends."""
    writing = told.select(
        "prompt", layer="source_layer", head="source_head", attention=pl.lit(None, pl.Float64)
    )
    firing = attended.filter(pl.col("side") == "query").select("prompt", "layer", "head", "attention")
    kinds = (("head", pl.concat([writing, firing]), []), ("token", attended, ["place"]))
    tables: list[pl.LazyFrame] = []
    for kind, table, place in kinds:
        found = grouped(table, ["layer", "head", *place], ("attention",))
        dest = pl.col("place") if place else pl.lit(None, pl.String)
        ends = (pl.lit(kind), pl.col("layer"), pl.col("head"), dest, pl.lit(None, pl.String))
        columns = [value.alias(key) for key, value in zip(PLACE, ends, strict=True)]
        tables.append(found.select(*columns, "count", "occurrences", "attention"))
    return pl.concat(tables)
