"""The circuit of one prompt: nodes are components, edges are signals.

    circuit = headtrace.load_circuit("c.json")
    print(circuit.summary())
    for edge in circuit.top(5):
        print(circuit.node(edge.source), "->", circuit.node(edge.target), edge.side, edge.weight)
    circuit.prune(min_weight=0.05).to_html("c.html")

Positions are integers; token text is a label, never a key. Everything here is plain Python data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headtrace.errors import InputError

if TYPE_CHECKING:
    import networkx as nx

SCHEMA = "headtrace.circuit/1"
Kind = Literal["head", "mlp", "embedding", "attention_bias", "offset", "root"]
Side = Literal["query", "key", "root"]
KINDS: tuple[Kind, ...] = ("root", "head", "mlp", "embedding", "attention_bias", "offset")
SIDES: tuple[Side, ...] = ("query", "key", "root")


@dataclass(frozen=True)
class ModelInfo:
    """The model that was traced, and the hash that tells it from every other."""

    name: str
    revision: str | None = None
    architecture: str | None = None
    weights_sha256: str | None = None


@dataclass(frozen=True)
class Prompt:
    """The prompt: its text (``None`` for bare token ids), its token ids, and how each token reads."""

    text: str | None
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Root:
    """What is being explained: an answer (against a wrong one), a distribution, or a direction."""

    kind: Literal["linear", "probability", "direction"]
    answer: tuple[int, ...] = ()
    wrong: tuple[int, ...] | None = None
    value: float | None = None
    """The whole quantity: a logit difference, a log-likelihood or a projection."""
    position: int | None = None
    layer: int | None = None
    """Of a direction: the layer at whose input it is read."""
    support: tuple[int, ...] | None = None
    """Of a probability: the token ids whose distribution is explained."""
    answer_tokens: tuple[str, ...] | None = None
    wrong_tokens: tuple[str, ...] | None = None
    label: str | None = None


@dataclass(frozen=True)
class Method:
    """How the circuit was found."""

    name: str = "acc++"
    tau: float | str | None = None
    """The threshold: a number, or the rule in words where it depends on the firing."""
    ig_steps: int | None = None
    version: str | None = None
    settings: Mapping[str, Any] | None = field(default=None, hash=False)
    """Further settings, such as the budget: names to numbers, strings, booleans or null."""


@dataclass(frozen=True)
class Elsewhere:
    """A key-side signal that a head wrote only at other keys than the firing's source.

    What the head read from ``src`` comes after the firing's own source, so there is no firing behind it to follow;
    removing it raises the competing keys. It belongs to the claim, not to the graph.
    """

    layer: int
    head: int
    src: int
    channels: tuple[int, ...]
    weight: float


@dataclass(frozen=True)
class Node:
    """A component at its place.

    A head sits at the position it writes to (``dest``) and reads one source (``src``). What does not apply is
    ``None``: an mlp and an attention bias have a layer and a position, an embedding a position only, an
    offset the layer and head whose bias it is and the position where it sits, the root nothing.
    """

    id: int
    kind: Kind
    layer: int | None = None
    head: int | None = None
    dest: int | None = None
    src: int | None = None
    attention: float | None = None
    influence: float | None = None
    expanded: bool = False
    explained: bool = True
    predicted: Mapping[str, float | None] | None = field(default=None, hash=False)
    """Per side, the attention that the trace predicts when the selected signals of that side are removed."""
    threshold: float | None = None
    label: str | None = None
    elsewhere: tuple[Elsewhere, ...] | None = None
    """Key-side signals of this firing that act on competing keys only."""

    @property
    def name(self) -> str:
        """The node in one word: ``L9H6 14->3``, ``MLP 5 @13``, ``Embedding @2``.

        >>> Node(1, "head", layer=9, head=6, dest=14, src=3).name
        'L9H6 14->3'
        """
        if self.kind == "head":
            return f"L{self.layer}H{self.head} {self.dest}->{self.src}"
        if self.kind == "mlp":
            return f"MLP {self.layer} @{self.dest}"
        if self.kind == "embedding":
            return f"Embedding @{self.dest}"
        if self.kind == "attention_bias":
            return f"Attention bias {self.layer} @{self.dest}"
        if self.kind == "offset":
            return f"Offset L{self.layer}H{self.head} @{self.dest}"
        return "Root"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Edge:
    """A signal: what ``source`` writes into ``channels`` of ``target``, on one side.

    ``weight`` is the attention that the signal's removal takes away; on edges to the root it is the
    contribution to what the root measures. ``effect`` holds measured effects, once the circuit is verified.
    """

    source: int
    target: int
    side: Side
    weight: float
    channels: tuple[int, ...] | None = None
    effect: Mapping[str, Any] | None = field(default=None, hash=False)
    description: str | None = None


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
