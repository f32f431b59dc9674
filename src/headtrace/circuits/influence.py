"""Influence: how much of the root's whole passes through each node and edge.

The root has 1. A node passes its influence on in equal parts to each side that has a positive weight, and within a side
in proportion to the positive weights: what opposes the root carries none.

>>> spread([("query", 3.0), ("query", 1.0), ("key", 0.2), ("value", -1.0)])
[0.375, 0.125, 0.5, 0.0]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headtrace.vocabulary import Side

if TYPE_CHECKING:
    from headtrace.circuits.circuit import Circuit
    from headtrace.circuits.parts import Edge, Node


def spread(edges: Sequence[tuple[Side, float]]) -> list[float]:
    """The share of a node's influence that each edge into it carries, given the side and weight of each."""
    totals: dict[Side, float] = {}
    for side, weight in edges:
        if weight > 0:
            totals[side] = totals.get(side, 0.0) + weight
    return [weight / totals[side] / len(totals) if weight > 0 else 0.0 for side, weight in edges]


def edge_influence(circuit: Circuit) -> dict[Edge, float]:
    """The influence that each edge carries from its target down to its source."""
    return _sweep(circuit)[1]


def node_influence(circuit: Circuit) -> dict[int, float]:
    """The influence of each node, by id; what the tracer stores, computed from the weights alone."""
    return _sweep(circuit)[0]


def _sweep(circuit: Circuit) -> tuple[dict[int, float], dict[Edge, float]]:
    nodes = {node.id: 1.0 if node.kind == "root" else 0.0 for node in circuit.nodes}
    flows = dict.fromkeys(circuit.edges, 0.0)
    for node in sorted(circuit.nodes, key=_height, reverse=True):
        causes = circuit.edges_into(node.id)
        for edge, share in zip(causes, spread([(e.side, e.weight) for e in causes]), strict=True):
            flows[edge] = nodes[node.id] * share
            nodes[edge.source] += flows[edge]
    return nodes, flows


def _height(node: Node) -> tuple[bool, int, bool]:
    """Whatever reads a node is above it: the root, then layer by layer, in each the mlp above the heads."""
    return node.kind == "root", -1 if node.layer is None else node.layer, node.kind == "mlp"
