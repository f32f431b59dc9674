"""Many circuits into one network.

``merge`` joins nodes of circuits that agree in component and places, and edges that agree in both ends, the side and
(with ``channels``) the channel. Prompts are counted: two edges of one prompt that share their roles (``other`` has many
positions) count once, and both go into the mean weight.

>>> from headtrace.circuits.describe import example
>>> network = merge([example()] * 3, channels=True)
>>> [(edge.side, edge.channel, edge.count) for edge in network.edges]
[('root', None, 3), ('query', 1, 3), ('query', 4, 3)]

``trace_network`` makes the trace network of the 2024 paper on sparse attention decomposition, ``skeleton`` its most
frequent edges. It has heads, and for each head the tokens it attends between, so that it shows through which token a
head gets a signal. There are two kinds of edges:

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

from headtrace.circuits.rows import ENDS, PLACE
from headtrace.errors import InputError
from headtrace.runs.frames import (
    AFTER,
    By,
    Frames,
    Roles,
    Source,
    choose_places,
    frames_of,
    place_names,
    places_in_order,
    with_places,
)
from headtrace.runs.network import Form, Network, NetworkEdge, NetworkNode
from headtrace.vocabulary import ATTENTION_SIDES, SIDES

DRAWN = 65 / 256
"""Edges of a smaller share of the prompts are not in the paper's figure of the trace network."""
SKELETON = 170 / 256
"""The share of the paper's skeleton."""


def merge(
    source: Source,
    *,
    by: By | None = None,
    channels: bool = False,
    roles: Roles | None = None,
    after: Sequence[str] = AFTER,
) -> Network:
    """Merge the circuits of a run, or a list, into one network: components at roles, and signals between them.

    ``by`` is ``"roles"`` where there are some, else ``"positions"``. With ``channels``, an edge is counted for each
    channel it was found in, with the weight of the whole edge. ``roles`` are for circuits, which have none of their
    own; ``after`` names the roles whose next token has a name (``S1+1``).
    """
    frames = frames_of(source, roles)
    by = choose_places(frames, by)
    names = place_names(frames, by, after)
    nodes = with_places(frames.nodes, names, by, ("dest", "src"))
    edges = with_places(
        frames.edges, names, by, tuple(name for name in ENDS if name.endswith(("dest", "src")))
    )
    edges = _with_effects(edges)
    if channels:
        edges = edges.with_columns(channel="channels").explode("channel")
    by_edge = [*ENDS, "side", *(["channel"] if channels else [])]
    return _build(
        frames,
        by,
        "merged",
        places=places_in_order(frames, names, by),
        nodes=_grouped(nodes, list(PLACE), ("attention", "influence", "contribution")),
        edges=_grouped(edges, by_edge, ("weight", "contribution", "effect")),
        channels=channels,
    )


def _with_effects(edges: pl.LazyFrame) -> pl.LazyFrame:
    """What was measured of each edge (JSON text in tables of circuits) as a number: the change of the metric."""
    if "effect" not in edges.collect_schema():
        return edges.with_columns(effect=pl.lit(None, pl.Float64))
    return edges.with_columns(effect=pl.col("effect").str.json_path_match("$.metric").cast(pl.Float64))


def _grouped(table: pl.LazyFrame, keys: list[str], means: Sequence[str]) -> pl.LazyFrame:
    """One row for each combination of keys: in how many prompts it is, how often, and means.

    The last digit of a mean depends neither on the order of rows nor on threads: a cumulative sum of sorted values is
    added up one by one; polars would not sort for a mean.
    """
    columns = [
        pl.col("prompt").n_unique().cast(pl.Int64).alias("count"),
        pl.len().cast(pl.Int64).alias("occurrences"),
    ]
    for name in means:
        values = pl.col(name).drop_nulls().sort()
        columns.append((values.cum_sum().last() / values.len()).alias(name))
    return table.group_by(keys).agg(columns)


def _build(
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
    with_edges = frames.edges.select(pl.col("prompt").n_unique()).collect().item()
    if not with_edges:
        raise InputError("There is nothing to merge: none of the prompts has a circuit with edges.")
    # Lowest layer first, places from left to right.
    rank = {place: i for i, place in enumerate(places)}
    by_place = [
        pl.col(name).replace_strict(rank, default=None, return_dtype=pl.Int64) for name in ("dest", "src")
    ]
    numbered = nodes.sort("layer", "head", "kind", *by_place, nulls_last=False).with_row_index("id").collect()
    ids = numbered.select(pl.col("id").cast(pl.Int64), *PLACE).lazy()
    for end in ("source", "target"):
        keys = [f"{end}_{key}" for key in PLACE]
        number = ids.rename(dict(zip(("id", *PLACE), (end, *keys), strict=True)))
        edges = edges.join(number, on=keys, how="left", nulls_equal=True)
    order = [
        "target",
        pl.col("side").cast(pl.Enum(list(SIDES))),
        "source",
        *(["channel"] if channels else []),
    ]
    joined = edges.drop(ENDS).sort(*order).collect()
    whole = Network(
        model=frames.model,
        prompts=with_edges,
        without=frames.prompts.select(pl.len()).collect().item() - with_edges,
        by=by,
        form=form,
        channels=channels,
        places=places,
        nodes=tuple(NetworkNode(**row) for row in numbered.iter_rows(named=True)),
        edges=tuple(
            NetworkEdge(frequency=row["count"] / with_edges, **row) for row in joined.iter_rows(named=True)
        ),
    )
    return whole.keeping(whole.edges)


# -- the trace network of the 2024 paper -----------------------------------------------------------------------------


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
    by = choose_places(frames, by)
    names = place_names(frames, by, after)
    # Heads whose causes were looked for, and that do not attend to the first token.
    traced = (pl.col("kind") == "head") & pl.col("expanded") & (pl.col("src") != 0)
    firings = frames.nodes.filter(traced).select("prompt", "id", "layer", "head", "dest", "src", "attention")
    if firings.head(1).collect().is_empty():
        raise InputError("No head that attends past the first token was traced: there is no trace network.")
    # Signals of heads into the query or key of firings, with the position that they were written at.
    place = pl.when(pl.col("side") == "query").then("target_dest").otherwise("target_src")
    from_heads = (pl.col("source_kind") == "head") & pl.col("side").is_in(ATTENTION_SIDES)
    signals = (
        _with_effects(frames.edges.filter(from_heads))
        .join(firings.select("prompt", target="id"), on=("prompt", "target"), how="semi")
        .with_columns(place=place)
    )
    # Each firing twice: for the token it attends from, and for the one it attends to.
    attended = pl.concat(
        [
            firings.with_columns(place="dest", side=pl.lit("query")),
            firings.with_columns(place="src", side=pl.lit("key")),
        ]
    )
    signals, attended = (with_places(table, names, by, ("place",)) for table in (signals, attended))
    whole = _build(
        frames,
        by,
        "trace",
        places=places_in_order(frames, names, by),
        nodes=_trace_nodes(signals, attended),
        edges=_trace_edges(signals, attended),
    )
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


def _trace_edges(signals: pl.LazyFrame, attended: pl.LazyFrame) -> pl.LazyFrame:
    keys = ["source_layer", "source_head", "target_layer", "target_head", "place", "side"]
    communication = _grouped(signals, keys, ("weight", "contribution", "effect")).select(
        *_placed("head", "source_layer", "source_head", prefix="source_"),
        *_placed("token", "target_layer", "target_head", "place", prefix="target_"),
        *("side", "count", "occurrences", "weight", "contribution", "effect"),
        kind=pl.lit("communication"),
    )
    attention = _grouped(attended, ["layer", "head", "place", "side"], ("attention",)).select(
        *_placed("token", "layer", "head", "place", prefix="source_"),
        *_placed("head", "layer", "head", prefix="target_"),
        *("side", "count", "occurrences", pl.col("attention").fill_null(0.0).alias("weight")),
        contribution=pl.lit(None, pl.Float64),
        effect=pl.lit(None, pl.Float64),
        kind=pl.lit("attention"),
    )
    return pl.concat([communication, attention])


def _trace_nodes(signals: pl.LazyFrame, attended: pl.LazyFrame) -> pl.LazyFrame:
    """Heads with the prompts in which they write or attend, and tokens with those in which their head attends."""
    writing = signals.select(
        "prompt", layer="source_layer", head="source_head", attention=pl.lit(None, pl.Float64)
    )
    firing = attended.filter(pl.col("side") == "query").select("prompt", "layer", "head", "attention")
    heads = _grouped(pl.concat([writing, firing]), ["layer", "head"], ("attention",))
    tokens = _grouped(attended, ["layer", "head", "place"], ("attention",))
    return pl.concat(
        [
            heads.select(*_placed("head", "layer", "head"), "count", "occurrences", "attention"),
            tokens.select(*_placed("token", "layer", "head", "place"), "count", "occurrences", "attention"),
        ]
    )


def _placed(kind: str, layer: str, head: str, place: str | None = None, prefix: str = "") -> list[pl.Expr]:
    """The columns that place a node of a trace network: heads as such, tokens at their place."""
    dest = pl.lit(None, pl.String) if place is None else pl.col(place)
    values = (pl.lit(kind), pl.col(layer), pl.col(head), dest, pl.lit(None, pl.String))
    return [value.alias(prefix + key) for key, value in zip(PLACE, values, strict=True)]
