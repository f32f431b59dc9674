"""The circuit of one prompt: nodes are components, edges are signals.

>>> from headtrace.circuits import *
>>> circuit = Circuit(
...     ModelInfo("made-up"),
...     PromptInfo("Mary told", (101, 102), ("Mary", " told")),
...     LogitDifference(answer=(101,), wrong=(103,), value=2.5),
...     MethodInfo("acc++"),
...     nodes=(Node(0, "root"), Node(1, "head", 9, 6, 1, 0, attention=0.75), Node(2, "mlp", 3, None, 1)),
...     edges=(Edge(1, 0, "root", 2.5), Edge(2, 1, "query", 0.3, channels=(1, 4))),
... )
>>> for edge in circuit.top(5):
...     print(circuit.node(edge.source), "->", edge.side, "of", circuit.node(edge.target), edge.weight)
MLP 3 @1 -> query of L9H6 1->0 0.3
>>> [(edge.source, edge.target, edge.side) for edge in circuit.prune(min_weight=0.5).edges]
[(1, 0, 'root')]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from headtrace.circuits.checks import check
from headtrace.circuits.parts import DifferenceInfo, Edge, MethodInfo, ModelInfo, Node, PromptInfo
from headtrace.errors import InputError
from headtrace.roots import Root
from headtrace.validation import Number, Text, checked
from headtrace.vocabulary import ATTENTION_SIDES, SIDES

if TYPE_CHECKING:
    import networkx as nx
    import polars as pl

    from headtrace.mechanism import Mechanism


@checked
class Circuit:
    """A root, the firings that cause it, and the signals that cause those.

    The constructor checks all parts, so every circuit can be saved, and loaded again. Nodes are kept in order of id,
    edges in order of target, side and source, so that equal circuits are equal objects and equal files.
    """

    model: ModelInfo
    """The model that was traced."""
    prompt: PromptInfo
    """The prompt, token by token."""
    root: Annotated[Root, Field(discriminator="kind")]
    """What is explained."""
    method: MethodInfo
    """How the circuit was found."""
    nodes: tuple[Node, ...]
    """Components at their positions."""
    edges: tuple[Edge, ...]
    """Signals between them."""
    reason: Text | None = None
    """Why the circuit is empty, if it is."""
    influence_kept: Number | None = None
    """The share of influence that was followed to its end (1 if no budget cut it short)."""
    difference: DifferenceInfo | None = None
    """For a difference circuit: what was compared, and how much of the difference is shown."""

    def __post_init__(self) -> None:
        check(self)
        order = {side: i for i, side in enumerate(SIDES)}
        nodes = sorted(self.nodes, key=lambda node: node.id)
        edges = sorted(self.edges, key=lambda edge: (edge.target, order[edge.side], edge.source))
        object.__setattr__(self, "nodes", tuple(nodes))
        object.__setattr__(self, "edges", tuple(edges))

    def __repr__(self) -> str:
        from headtrace.circuits.summary import question

        return (
            f"Circuit({question(self, repr)}, {self.model.name!r}, {len(self.prompt.tokens)} tokens, "
            f"{len(self.nodes)} nodes, {len(self.edges)} edges)"
        )

    @cached_property
    def content_id(self) -> str:
        """A hash of everything that the circuit says: equal circuits have equal ids, wherever they are kept."""
        from headtrace.circuits.files import content_id

        return content_id(self)

    # Finding one's way

    @cached_property
    def _by_id(self) -> dict[int, Node]:
        return {node.id: node for node in self.nodes}

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _into(self) -> dict[int, tuple[Edge, ...]]:
        return _grouped(self.edges, "target")

    @cached_property
    def _from(self) -> dict[int, tuple[Edge, ...]]:
        return _grouped(self.edges, "source")

    def node(self, which: int | str | Node) -> Node:
        """A node by id, by name (``"L9H6 14->3"``), or itself."""
        found = self._by_name.get(which) if isinstance(which, str) else None
        if found is None and not isinstance(which, str):
            found = self._by_id.get(which.id if isinstance(which, Node) else which)
        if found is None:
            some = ", ".join(repr(node.name) for node in self.nodes[:5]) or "none"
            raise InputError(
                f"No node {which!r} in this circuit of {len(self.nodes)} nodes; there are: {some} ..."
            )
        return found

    @property
    def root_node(self) -> Node | None:
        """The node of the root; ``None`` in an empty circuit that has none."""
        return next((node for node in self.nodes if node.kind == "root"), None)

    def heads(self) -> tuple[Node, ...]:
        """All firings, whether expanded or not."""
        return tuple(node for node in self.nodes if node.kind == "head")

    def edges_into(self, node: int | str | Node) -> tuple[Edge, ...]:
        """The causes of a node."""
        return self._into.get(self.node(node).id, ())

    def edges_from(self, node: int | str | Node) -> tuple[Edge, ...]:
        """What a node causes."""
        return self._from.get(self.node(node).id, ())

    def token(self, position: int | None) -> str:
        """How the token at a position reads; empty where there is none."""
        return self.prompt.tokens[position] if position is not None else ""

    @property
    def unexplained(self) -> tuple[str, ...]:
        """The names of the firings whose attention holds although everything was removed."""
        return tuple(node.name for node in self.nodes if node.expanded and not node.explained)

    @property
    def not_told(self) -> tuple[str, ...]:
        """What this circuit cannot say by its nature, a sentence each: attention that is needed though no signal makes
        it, causes that do nothing by themselves, what biases of MLPs hold. Empty where there is nothing of the kind."""
        from headtrace.circuits.summary import not_told

        return not_told(self)

    def flows(self) -> dict[Edge, float]:
        """The influence that each edge carries to its target: one scale for all sides."""
        from headtrace.circuits.graph import edge_influence

        return edge_influence(self)

    def top(self, k: int = 10, by: Literal["weight", "influence"] = "weight") -> Edges:
        """The ``k`` heaviest query and key edges, or, by influence, the strongest of all edges.

        The weight of a query or key edge is attention, that of any other is in the unit of the root (logits, nats):
        only influence puts them on one scale. All edges of a difference circuit have one unit, and go by flow.
        """
        if self.difference is not None:
            return Edges(self, sorted(self.edges, key=lambda edge: -abs(edge.weight))[:k])
        if by == "influence":
            flows = self.flows()
            return Edges(self, sorted(flows, key=lambda edge: -flows[edge])[:k])
        signals = [edge for edge in self.edges if edge.side in ATTENTION_SIDES]
        return Edges(self, sorted(signals, key=lambda edge: -edge.weight)[:k])

    def frame(self, of: Literal["edges", "nodes"] = "edges") -> pl.DataFrame:
        """A table with readable names: a row per edge (source, target, side, weight, unit, contribution, channels), or
        per node (node, kind, layer, head, dest, src, from and to, attention, influence, contribution, flow)."""
        import polars as pl

        from headtrace.circuits.summary import place

        if of == "edges":
            return Edges(self, self.edges).frame()
        if of != "nodes":
            raise InputError(f"frame({of!r}): a circuit has 'edges' and 'nodes'.")
        rows = [
            {
                "id": n.id,
                "node": place(self, n),
                "kind": n.kind,
                "layer": n.layer,
                "head": n.head,
                "dest": n.dest,
            }
            | {"src": n.src, "from": self.token(n.dest), "to": self.token(n.src), "attention": n.attention}
            | {"influence": n.influence, "contribution": n.contribution, "flow": n.flow}
            for n in self.nodes
        ]
        whole = dict.fromkeys(("id", "layer", "head", "dest", "src"), pl.Int64)
        words = dict.fromkeys(("node", "kind", "from", "to"), pl.String)
        order = ("id", "node", "kind", "layer", "head", "dest", "src", "from", "to")
        kinds: Any = {name: {**whole, **words}[name] for name in order}
        numbers = dict.fromkeys(("attention", "influence", "contribution", "flow"), pl.Float64)
        return pl.DataFrame(rows, schema={**kinds, **numbers})

    # Cutting down

    def prune(self, min_weight: float = 0.0, min_influence: float = 0.0) -> Circuit:
        """Drop weak edges and uninfluential nodes, then whatever no longer leads to the root."""
        from headtrace.circuits.graph import prune

        return prune(self, min_weight, min_influence)

    def between(self, a: int | str | Node, b: int | str | Node) -> Circuit:
        """The part of the circuit that lies on paths between two nodes, in either order."""
        from headtrace.circuits.graph import between

        return between(self, self.node(a), self.node(b))

    def with_importance(self, importance: Sequence[float | None]) -> Circuit:
        """The same circuit with measured importance by token (``headtrace.importance(...).by_token()``)."""
        return replace(self, prompt=replace(self.prompt, importance=tuple(importance)))

    def with_edges(self, edges: tuple[Edge, ...]) -> Circuit:
        """The same circuit with other edges (measured effects or descriptions added, say)."""
        return replace(self, edges=edges)

    def mechanism(self) -> Mechanism:
        """What the circuit does, in at most seven steps, from what the circuit itself holds.

        ``headtrace.why`` does more with the model at hand: exact flows between heads, and a measurement of each step.
        """
        from headtrace.mechanism.mechanism import of_circuit

        return of_circuit(self)

    # Showing and keeping

    def save(self, path: str | Path) -> Path:
        """Write the circuit file: the same circuit gives the same bytes."""
        from headtrace.circuits.files import save_circuit

        return save_circuit(self, path)

    def summary(self) -> str:
        """A few lines of text: the question, the size of the circuit, its strongest edges."""
        from headtrace.circuits.summary import summary

        return summary(self)

    def to_html(self, path: str | Path) -> Path:
        """Write the circuit page: one HTML file, with everything in it, that opens without a network."""
        from headtrace.explorer.page import write_page

        return write_page(self, path)

    def _repr_html_(self) -> str:
        from headtrace.explorer.page import frame

        return frame(self)

    def to_networkx(self) -> nx.MultiDiGraph[int]:
        """A directed multigraph: node ids as in the circuit, edge keys are the sides."""
        from headtrace.circuits.exports import to_networkx

        return to_networkx(self)

    def to_graphml(self, path: str | Path) -> Path:
        """Write GraphML, for Gephi, yEd and Cytoscape."""
        from headtrace.circuits.exports import to_graphml

        return to_graphml(self, path)

    def to_dot(self, path: str | Path | None = None) -> str:
        """The circuit for Graphviz; written to ``path`` if one is given."""
        from headtrace.circuits.exports import to_dot

        return to_dot(self, path)

    def to_neuronpedia(
        self, path: str | Path | None = None, slug: str = "headtrace-circuit"
    ) -> dict[str, Any]:
        """Neuronpedia's attribution-graph JSON; written to ``path`` if one is given."""
        from headtrace.circuits.exports import to_neuronpedia

        return to_neuronpedia(self, path, slug)


class Edges(tuple[Edge, ...]):
    """Some edges of a circuit, as a tuple that prints with the names of their ends."""

    circuit: Circuit

    def __new__(cls, circuit: Circuit, edges: Iterable[Edge]) -> Edges:
        made = super().__new__(cls, edges)
        made.circuit = circuit
        return made

    def frame(self) -> pl.DataFrame:
        """A row per edge: source, target, side, weight, unit (of the weight), contribution, channels."""
        import polars as pl

        from headtrace.circuits.summary import place

        c = self.circuit
        rows = [
            {"source": place(c, c.node(e.source)), "target": place(c, c.node(e.target)), "side": e.side}
            | {"weight": e.weight, "unit": self._unit(e), "contribution": e.contribution}
            | {"channels": None if e.channels is None else list(e.channels)}
            for e in self
        ]
        words: Any = dict.fromkeys(("source", "target", "side"), pl.String)
        numbers = {"weight": pl.Float64, "unit": pl.String, "contribution": pl.Float64}
        return pl.DataFrame(rows, schema={**words, **numbers, "channels": pl.List(pl.Int64)})

    def _unit(self, edge: Edge) -> str:
        """What the weight of an edge is: attention, or the measure of the root."""
        if self.circuit.difference is None and edge.side in ATTENTION_SIDES:
            return "attention"
        known = self.circuit.difference is not None or edge.side == "root"
        return self.circuit.root.measure if known else "share"

    def __repr__(self) -> str:
        from headtrace.circuits.summary import channel_text, place

        c = self.circuit
        return "\n".join(
            f"{e.weight:+.4f} {self._unit(e)}: {place(c, c.node(e.source))} => "
            f"{e.side} of {place(c, c.node(e.target))}{', ' if e.channels else ''}{channel_text(e)}"
            for e in self
        )

    def _repr_html_(self) -> str:
        from headtrace.tables import frame

        return frame(self.frame())


def _grouped(edges: tuple[Edge, ...], end: Literal["source", "target"]) -> dict[int, tuple[Edge, ...]]:
    groups: dict[int, list[Edge]] = {}
    for edge in edges:
        groups.setdefault(getattr(edge, end), []).append(edge)
    return {key: tuple(group) for key, group in groups.items()}
