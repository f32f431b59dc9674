"""The circuit of one prompt: nodes are components, edges are signals.

circuit = headtrace.load_circuit("c.json")
print(circuit.summary())
for edge in circuit.top(5):
    print(circuit.node(edge.source), "->", circuit.node(edge.target), edge.side, edge.weight)
circuit.prune(min_weight=0.05).to_html("c.html")
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headtrace.circuits.parts import SIDES, Edge, Method, ModelInfo, Node, Prompt, Root
from headtrace.errors import InputError

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Circuit:
    """A root, the firings that cause it, and the signals that cause those.

    Nodes are kept in order of id, edges in order of target, side and source, so that equal circuits are equal
    objects and equal files.
    """

    model: ModelInfo
    prompt: Prompt
    root: Root
    method: Method
    nodes: tuple[Node, ...] = ()
    edges: tuple[Edge, ...] = ()
    reason: str | None = None
    """Why the circuit is empty, when it is."""
    influence_kept: float | None = None
    """The share of influence that was followed to its end (1 when no budget cut it short)."""
    unexplained: tuple[str, ...] = ()
    """Firings whose attention holds although everything was removed, by name."""

    def __post_init__(self) -> None:
        order = {side: i for i, side in enumerate(SIDES)}
        nodes = sorted(self.nodes, key=lambda node: node.id)
        edges = sorted(self.edges, key=lambda edge: (edge.target, order.get(edge.side, 9), edge.source))
        object.__setattr__(self, "nodes", tuple(nodes))
        object.__setattr__(self, "edges", tuple(edges))
        object.__setattr__(self, "unexplained", tuple(self.unexplained))

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

    def answer_text(self) -> tuple[str, str | None]:
        """The answer and the wrong answer in words, as far as the file or the prompt knows them."""
        known = dict(zip(self.prompt.token_ids, self.prompt.tokens, strict=False))

        def words(ids: tuple[int, ...], tokens: tuple[str, ...] | None) -> str:
            return " / ".join(tokens or [known.get(i, f"token {i}") for i in ids])

        wrong = None if self.root.wrong is None else words(self.root.wrong, self.root.wrong_tokens)
        return words(self.root.answer, self.root.answer_tokens), wrong

    def flows(self) -> dict[Edge, float]:
        """The influence that each edge carries to its target: one scale for all sides."""
        from headtrace.circuits.influence import edge_influence

        return edge_influence(self)

    def top(self, k: int = 10, by: Literal["weight", "influence"] = "weight") -> tuple[Edge, ...]:
        """The ``k`` strongest edges between components, or, by influence, of all edges.

        Weights of edges to the root are in the root's own unit (logits, nats), the others in attention, so
        only influence puts them on one scale.
        """
        if by == "influence":
            flows = edges = self.flows()
            return tuple(sorted(edges, key=lambda edge: -flows[edge])[:k])
        inner = [edge for edge in self.edges if edge.side != "root"]
        return tuple(sorted(inner, key=lambda edge: -edge.weight)[:k])

    # Cutting down

    def prune(self, min_weight: float = 0.0, min_influence: float = 0.0) -> Circuit:
        """Drop weak edges and uninfluential nodes, then whatever no longer leads to the root."""
        from headtrace.circuits.subgraphs import prune

        return prune(self, min_weight, min_influence)

    def between(self, a: int | str | Node, b: int | str | Node) -> Circuit:
        """The part of the circuit that lies on paths between two nodes, in either order."""
        from headtrace.circuits.subgraphs import between

        return between(self, self.node(a), self.node(b))

    def with_edges(self, edges: tuple[Edge, ...]) -> Circuit:
        """The same circuit with other edges (measured effects or descriptions added, say)."""
        return replace(self, edges=edges)

    # Showing and keeping

    def save(self, path: str | Path) -> Path:
        """Write the circuit file: the same circuit gives the same bytes."""
        from headtrace.circuits.files import save_circuit

        return save_circuit(self, path)

    def summary(self) -> str:
        """A few lines of text: what was asked, how large the answer is, its strongest edges."""
        from headtrace.circuits.summary import summary

        return summary(self)

    def to_html(self, path: str | Path) -> Path:
        """Write the circuit page: one HTML file, with everything in it, that opens without a network."""
        from headtrace.explorer.page import write_page

        return write_page(self, path)

    def _repr_html_(self) -> str:
        from headtrace.explorer.page import frame

        return frame(self)

    def to_networkx(self) -> nx.MultiDiGraph:
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
        from headtrace.circuits.neuronpedia import to_neuronpedia

        return to_neuronpedia(self, path, slug)


def _grouped(edges: tuple[Edge, ...], end: Literal["source", "target"]) -> dict[int, tuple[Edge, ...]]:
    groups: dict[int, list[Edge]] = {}
    for edge in edges:
        groups.setdefault(getattr(edge, end), []).append(edge)
    return {key: tuple(group) for key, group in groups.items()}
