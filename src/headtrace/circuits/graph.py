"""A circuit as a graph: what each node and edge carries of the root, and how a part of it is cut out.

The root has influence 1. A node passes its influence on in equal parts to each side that has a positive weight, and
within a side in proportion to the positive weights: what opposes the root carries none. In a difference circuit all
edges have one unit, and influence is the size of the flow as a share of the whole difference.

>>> spread([("query", 3.0), ("query", 1.0), ("key", 0.2), ("value", -1.0)])
[0.375, 0.125, 0.5, 0.0]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from headtrace.vocabulary import ATTENTION_SIDES, Side

if TYPE_CHECKING:
    from headtrace.circuits.circuit import Circuit
    from headtrace.circuits.parts import Edge, Node


T = TypeVar("T")


def spread(edges: Sequence[tuple[Side, float]]) -> list[float]:
    """The share of a node's influence that each edge into it carries, given the side and weight of each."""
    totals: dict[Side, float] = {}
    for side, weight in edges:
        if weight > 0:
            totals[side] = totals.get(side, 0.0) + weight
    return [weight / totals[side] / len(totals) if weight > 0 else 0.0 for side, weight in edges]


def influence(circuit: Circuit) -> tuple[dict[int, float], dict[Edge, float]]:
    """The influence of each node, by id, and of each edge, from the weights alone; the tracer stores the same."""

    def height(node: Node) -> tuple[bool, int, bool]:
        """Whatever reads a node is above it: the root, then layer by layer, in each the MLP above the heads."""
        return node.kind == "root", -1 if node.layer is None else node.layer, node.kind == "mlp"

    if circuit.difference is not None:
        whole = abs(circuit.difference.change)
        flows = {node.id: abs(node.flow or 0.0) / whole for node in circuit.nodes}
        return flows, {edge: abs(edge.weight) / whole for edge in circuit.edges}
    nodes = {node.id: 1.0 if node.kind == "root" else 0.0 for node in circuit.nodes}
    edges = dict.fromkeys(circuit.edges, 0.0)
    for node in sorted(circuit.nodes, key=height, reverse=True):
        causes = circuit.edges_into(node.id)
        for edge, share in zip(causes, spread([(e.side, e.weight) for e in causes]), strict=True):
            edges[edge] = nodes[node.id] * share
            nodes[edge.source] += edges[edge]
    return nodes, edges


def edge_influence(circuit: Circuit) -> dict[Edge, float]:
    """The influence that each edge carries from its target down to its source."""
    return influence(circuit)[1]


def node_influence(circuit: Circuit) -> dict[int, float]:
    """The influence of each node, by id."""
    return influence(circuit)[0]


# -- subgraphs ---------------------------------------------------------------------------------------------------


def prune(circuit: Circuit, min_weight: float, min_influence: float) -> Circuit:
    """Keep edges of at least ``min_weight`` and nodes of at least ``min_influence`` that lead to the root.

    ``min_weight`` is attention, so it applies to query and key edges only: the others are in the unit of the root.
    """
    root = circuit.root_node
    if root is None:
        return circuit
    strong = {
        node.id for node in circuit.nodes if node.kind == "root" or (node.influence or 0.0) >= min_influence
    }
    edges = [
        edge
        for edge in circuit.edges
        if edge.source in strong
        and edge.target in strong
        and (edge.side not in ATTENTION_SIDES or abs(edge.weight) >= min_weight)
    ]
    reached = reachable(root.id, ((edge.target, edge.source) for edge in edges))
    return _subgraph(circuit, reached, [edge for edge in edges if edge.target in reached])


def between(circuit: Circuit, a: Node, b: Node) -> Circuit:
    """Everything on a path from ``a`` to ``b`` or from ``b`` to ``a``; without edges if there is none."""
    kept: set[int] = {a.id, b.id}
    for low, high in ((a.id, b.id), (b.id, a.id)):
        above = reachable(low, ((edge.source, edge.target) for edge in circuit.edges))
        if high in above:
            kept |= above & reachable(high, ((edge.target, edge.source) for edge in circuit.edges))
    return _subgraph(circuit, kept, [e for e in circuit.edges if e.source in kept and e.target in kept])


def reachable(start: T, steps: Iterable[tuple[T, T]]) -> set[T]:
    """Everything that steps lead to from one place."""
    following: dict[T, list[T]] = {}
    for first, second in steps:
        following.setdefault(first, []).append(second)
    reached, frontier = {start}, [start]
    while frontier:
        new = [node for node in following.get(frontier.pop(), ()) if node not in reached]
        reached.update(new)
        frontier += new
    return reached


def _subgraph(circuit: Circuit, kept: set[int], edges: list[Edge]) -> Circuit:
    """These nodes and edges, under their ids. A claim about an MLP's input goes if it names nodes that are gone."""
    return replace(
        circuit,
        nodes=tuple(node for node in circuit.nodes if node.id in kept),
        edges=tuple(
            edge if kept.issuperset(edge.through or ()) else replace(edge, through=None, left=None)
            for edge in edges
        ),
    )
