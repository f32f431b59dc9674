"""The network of many circuits: components at roles, signals between them, each with how often it was found.

>>> from headtrace.circuits.describe import example
>>> from headtrace.runs.merging import merge
>>> network = merge([example(), example()], roles=[{"end": 1}, {"end": 1}])
>>> for edge in network.top(5):
...     print(network.node(edge.source), "->", edge.side, "of", network.node(edge.target), edge.count, edge.frequency)
L9H6 end->first -> root of Root 2 1.0
MLP 3 @end -> query of L9H6 end->first 2 1.0
>>> network.prune(min_weight=0.5).heads()
((9, 6),)

Network files are JSON, schema ``headtrace.network/1``, one node or edge per line:

>>> loads(dumps(network)) == network
True
>>> loads(dumps(network).replace('"count": 2', '"count": 3', 1))
Traceback (most recent call last):
headtrace.errors.InputError: nodes[0].count: expected at most 2, the number of prompts, got 3
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headtrace.circuits.exports import graphml
from headtrace.circuits.parts import ModelInfo
from headtrace.errors import InputError
from headtrace.validation import (
    Flag,
    Index,
    Number,
    Text,
    Words,
    Written,
    document,
    fail,
    file_text,
    parse,
    plain,
    read_document,
    stored,
)
from headtrace.vocabulary import ATTENTION_SIDES, Kind, Side, head_name, site_name
from headtrace.writing import write_text

if TYPE_CHECKING:
    import networkx as nx
    import polars as pl
    from matplotlib.figure import Figure

SCHEMA = "headtrace.network/1"
EdgeKind = Literal["communication", "attention"]
Form = Literal["merged", "trace"]
Head = tuple[int, int]


@stored
class NetworkNode:
    """A component at its roles. In a trace network: a head without positions, or a token it attends from or to."""

    id: Index
    """The number by which edges name the node."""
    kind: Kind | Literal["token"]
    """The kind of component. `token`, in a trace network only, is a token that a head attends from or to."""
    layer: Written[Index | None] = None
    """The layer of the component."""
    head: Written[Index | None] = None
    """The head within its layer."""
    dest: Written[Text | None] = None
    """The role or position that the component writes to; for a `token`, its own."""
    src: Written[Text | None] = None
    """The role or position that a head reads."""
    count: Written[Index] = 0
    """The number of prompts it occurs in."""
    occurrences: Written[Index] = 0
    """How many circuit nodes were merged into it; one prompt can have several with the same roles."""
    attention: Number | None = None
    """The mean attention of a head."""
    influence: Number | None = None
    """The mean influence: the share of the root that passes through it."""
    contribution: Number | None = None
    """The mean contribution to the root, if the circuits have contributions."""

    @property
    def name(self) -> str:
        """The node in one word: ``L9H6 end->IO``, ``MLP 5 @S2``; of a trace network ``L9H6``, ``L9H6 @IO``."""
        if self.kind == "token":
            return f"{head_name(self.layer or 0, self.head or 0)} @{self.dest}"
        return site_name(self.kind, self.layer, self.head, self.dest, self.src)

    def __str__(self) -> str:
        return self.name


@stored
class NetworkEdge:
    """Signals between the same components at the same roles, on the same side."""

    source: Index
    """The id of the node that writes it."""
    target: Index
    """The id of the node that reads it."""
    side: Side
    """Where the signal enters, as in a circuit. Between a token and its head: whether the head attends from the token
    (query) or to it (key)."""
    count: Index
    """In how many prompts it was found."""
    frequency: Number
    """The share of prompts in which it was found, from 0 to 1."""
    occurrences: Index
    """How many circuit edges were merged into it."""
    weight: Number
    """The mean weight of these edges: attention on the query and key side, otherwise in the unit of the root."""
    contribution: Number | None = None
    """The mean contribution to the root that passes through it, if the circuits have contributions."""
    effect: Number | None = None
    """The mean measured change of the root's number when its signals are ablated, over the edges that were measured
    (`headtrace verify --update`): negative for edges that support the answer."""
    channel: Index | None = None
    """The target's channel, in a network that counts channels one by one."""
    kind: Written[EdgeKind] = "communication"
    """`communication`, from a component to what reads it; `attention`, in a trace network, from a token to its head."""


@stored
class Network:
    """One weighted graph made of many circuits. Nodes are numbered; edges come in order of target, side and source."""

    model: ModelInfo | None
    """The model that was traced, if known."""
    prompts: Index
    """How many prompts have a circuit. Frequencies are shares of this number."""
    without: Index
    """How many other prompts have no circuit, or an empty one."""
    by: Literal["roles", "positions"]
    """What nodes are placed by: named roles, or positions."""
    form: Form
    """`merged`: components at roles; `trace`: heads, and the tokens they attend between, as in the 2024 paper."""
    channels: Flag
    """Whether an edge is counted for each channel by itself."""
    places: Words
    """The roles or positions, from left to right."""
    nodes: tuple[NetworkNode, ...]
    """Components at their places."""
    edges: tuple[NetworkEdge, ...]
    """Signals between them."""
    min_frequency: Number = 0.0
    """Edges found in a smaller share of prompts are left out."""
    min_weight: Number = 0.0
    """Query and key edges of a smaller mean weight are left out."""
    min_count: Index = 0
    """Edges found in fewer prompts are left out."""
    min_effect: Number = 0.0
    """Query and key edges of a smaller measured effect, or of none that was measured, are left out."""

    def __post_init__(self) -> None:
        _check(self)

    def __repr__(self) -> str:
        name = "unknown" if self.model is None else self.model.name
        return (
            f"Network({self.form}, {name!r}, by {self.by}, {self.prompts} prompts, {len(self.nodes)} nodes, "
            f"{len(self.edges)} edges)"
        )

    def _repr_html_(self) -> str:
        from headtrace.tables import frame, paragraph

        return paragraph(repr(self)) + frame(self.frame().head(20))

    # Finding one's way

    @cached_property
    def _by_id(self) -> dict[int, NetworkNode]:
        return {node.id: node for node in self.nodes}

    def node(self, which: int | str) -> NetworkNode:
        """A node by id or by name (``"L9H6 end->IO"``)."""
        found = self._by_id.get(which) if isinstance(which, int) else None
        if isinstance(which, str):
            found = next((node for node in self.nodes if node.name == which), None)
        if found is None:
            some = ", ".join(repr(node.name) for node in self.nodes[:5]) or "none"
            raise InputError(f"No node {which!r} in this network of {len(self.nodes)}; there are: {some} ...")
        return found

    def heads(self) -> tuple[Head, ...]:
        """Layer and head of every head in it, whatever its roles."""
        found = {(node.layer or 0, node.head or 0) for node in self.nodes if node.kind == "head"}
        return tuple(sorted(found))

    def head_edges(self) -> tuple[tuple[Head, Head], ...]:
        """The pairs of heads of which the first writes into what the second reads, whatever the roles and side."""
        pairs: set[tuple[Head, Head]] = set()
        for edge in self.edges:
            source, target = self._by_id[edge.source], self._by_id[edge.target]
            if edge.kind == "communication" and source.kind == "head" and target.kind in ("head", "token"):
                pairs.add(((source.layer or 0, source.head or 0), (target.layer or 0, target.head or 0)))
        return tuple(sorted(pairs))

    def top(self, k: int = 10) -> tuple[NetworkEdge, ...]:
        """The ``k`` edges found most often; of equally frequent ones, those of most weight first."""
        return tuple(sorted(self.edges, key=lambda edge: (-edge.count, -edge.weight))[:k])

    def frame(self) -> pl.DataFrame:
        """The edges as a table, with the names of their ends, most frequent first."""
        import polars as pl

        columns = ("side", "kind", "count", "frequency", "occurrences", "weight", "contribution")
        columns += ("effect", "channel")
        rows = [
            {"source": self._by_id[edge.source].name, "target": self._by_id[edge.target].name}
            | {name: getattr(edge, name) for name in columns}
            for edge in self.top(len(self.edges))
        ]
        types: dict[str, Any] = dict.fromkeys(("source", "target", "side", "kind"), pl.String)
        types |= dict.fromkeys(("count", "occurrences", "channel"), pl.Int64)
        order = ("source", "target", *columns)
        return pl.DataFrame(rows, schema={name: types.get(name, pl.Float64) for name in order})

    # Cutting down

    def prune(
        self,
        min_frequency: float = 0.0,
        min_weight: float = 0.0,
        min_count: int = 0,
        min_effect: float = 0.0,
    ) -> Network:
        """The edges found in at least this share, or number, of prompts, and the nodes that they join.

        ``min_weight`` is attention, so it applies to query and key edges only, as in ``Circuit.prune``: other weights
        are in the unit of the root. ``min_effect`` is how far ablating them moved the root's number, in either
        direction, in the mean: query and key edges that moved it less, or that were not measured, are left out.
        """
        for name, value in (
            ("min_frequency", min_frequency),
            ("min_weight", min_weight),
            ("min_count", min_count),
            ("min_effect", min_effect),
        ):
            if not isfinite(value):
                raise InputError(f"{name}={value}: expected a finite number.")
        if min_frequency > 1:
            raise InputError(f"min_frequency={min_frequency}: a share of prompts is at most 1.")
        if min_effect > 0 and all(edge.effect is None for edge in self.edges):
            raise InputError(
                f"min_effect={min_effect}: no edge of these circuits was measured. `headtrace verify FILE --update` "
                "writes measured effects into a file of circuits (of a run: `headtrace export RUN --out FILE.parquet` "
                "first). Then merge that file."
            )

        def strong(edge: NetworkEdge) -> bool:
            if edge.side not in ATTENTION_SIDES:
                return True
            moved = 0.0 if edge.effect is None else abs(edge.effect)
            return (min_weight <= 0 or edge.weight >= min_weight) and (min_effect <= 0 or moved >= min_effect)

        kept = [
            edge
            for edge in self.edges
            if edge.frequency >= min_frequency and edge.count >= min_count and strong(edge)
        ]
        cut = replace(
            self,
            min_frequency=max(self.min_frequency, float(min_frequency)),
            min_weight=max(self.min_weight, float(min_weight)),
            min_count=max(self.min_count, int(min_count)),
            min_effect=max(self.min_effect, float(min_effect)),
        )
        return cut.keeping(kept)

    def keeping(self, edges: Collection[NetworkEdge]) -> Network:
        """These edges, and the nodes that they join."""
        ends = {end for edge in edges for end in (edge.source, edge.target)}
        return replace(self, nodes=tuple(node for node in self.nodes if node.id in ends), edges=tuple(edges))

    # Showing and keeping

    def to_networkx(self) -> nx.MultiDiGraph[int]:
        """A directed multigraph: node ids as here, edge keys are the sides (and channels)."""
        import networkx as nx

        graph: nx.MultiDiGraph[int] = nx.MultiDiGraph(
            model=None if self.model is None else self.model.name,
            prompts=self.prompts,
            by=self.by,
            form=self.form,
        )
        for node in self.nodes:
            graph.add_node(node.id, name=node.name, **{k: v for k, v in asdict(node).items() if k != "id"})
        for edge in self.edges:
            key = edge.side if edge.channel is None else f"{edge.side} {edge.channel}"
            values = {k: v for k, v in asdict(edge).items() if k not in ("source", "target")}
            graph.add_edge(edge.source, edge.target, key=key, **values)
        return graph

    def save(self, path: str | Path) -> Path:
        """Write the network by the name's extension: ``.json`` (``load_network`` reads it) or ``.graphml``."""
        match Path(path).suffix.lower():
            case ".graphml":
                return write_text(path, graphml(self.to_networkx()))
            case ".json":
                return write_text(path, dumps(self))
            case _:
                raise InputError(f"{str(path)!r}: a network is saved as .json or .graphml; end its name so.")

    def plot(self, path: str | Path | None = None, k: int = 40) -> Figure:
        """A drawing of the ``k`` most frequent edges, layer over layer, role beside role."""
        from headtrace.figures.network import plot_network

        return plot_network(self, path, k)

    def to_html(self, path: str | Path) -> Path:
        """Write a page with the drawing and all edges as a table: one file that loads nothing else."""
        from headtrace.explorer.page import write_network_page

        return write_network_page(self, path)


# -- files -------------------------------------------------------------------------------------------------------


def load_network(path: str | Path) -> Network:
    """Read a network file. For a damaged file, the error names the field."""
    text = file_text(path, "a network file", "`headtrace merge RUN --out network.json` writes one.")
    try:
        return loads(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def loads(text: str) -> Network:
    """A network from the text of a network file."""
    return from_json(parse(text, "a network file"))


def from_json(data: Any) -> Network:
    """A network from the data of a network file."""
    return read_document(Network, data, SCHEMA)


def dumps(network: Network) -> str:
    """The text of the network file."""
    return document(to_json(network))


def to_json(network: Network) -> dict[str, Any]:
    """The network as JSON data: what it is about first, then the graph."""
    data = plain(network)
    nodes, edges = data.pop("nodes"), data.pop("edges")
    return {"schema": SCHEMA, **data, "nodes": nodes, "edges": edges}


# -- what must hold ----------------------------------------------------------------------------------------------


def _check(network: Network) -> None:
    """Ids exist once, edges join nodes that exist, counts are bounded by prompts, frequencies follow from counts."""
    known: dict[int, NetworkNode] = {}
    for i, node in enumerate(network.nodes):
        if node.id in known:
            raise InputError(f"nodes[{i}].id: {node.id} is already taken by another node")
        known[node.id] = node
        if node.count > network.prompts:
            fail(f"nodes[{i}].count", f"at most {network.prompts}, the number of prompts", node.count)
        if node.kind == "token" and network.form != "trace":
            fail(f"nodes[{i}].kind", "a component, since only a trace network has tokens", node.kind)
    taken: set[tuple[int, int, str, int | None]] = set()
    for i, edge in enumerate(network.edges):
        for end in ("source", "target"):
            if getattr(edge, end) not in known:
                fail(f"edges[{i}].{end}", "the id of a node", getattr(edge, end))
        if not 1 <= edge.count <= network.prompts:
            fail(f"edges[{i}].count", f"1 to {network.prompts}, the number of prompts", edge.count)
        if edge.frequency != edge.count / network.prompts:
            fail(f"edges[{i}].frequency", f"{edge.count}/{network.prompts}, count by prompts", edge.frequency)
        if edge.occurrences < edge.count:
            fail(f"edges[{i}].occurrences", f"at least its count ({edge.count})", edge.occurrences)
        identity = (edge.source, edge.target, edge.side, edge.channel)
        if identity in taken:
            raise InputError(f"edges[{i}]: a second {edge.side} edge from {edge.source} to {edge.target}")
        taken.add(identity)
