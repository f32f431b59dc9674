"""Influence: how much of the root's whole passes through each node and edge.

The root has 1 and shares it among its seeds in proportion to their positive weights; a firing passes half of
its influence to each side, in proportion to the weights there, or all of it to one if the other is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headtrace.circuits.circuit import Circuit
    from headtrace.circuits.parts import Edge, Node


def edge_influence(circuit: Circuit) -> dict[Edge, float]:
    """The influence that each edge carries from its target down to its source."""
    return _sweep(circuit)[1]


def node_influence(circuit: Circuit) -> dict[int, float]:
    """The influence of each node, by id; what the tracer stores, computed from the weights alone."""
    return _sweep(circuit)[0]


def _sweep(circuit: Circuit) -> tuple[dict[int, float], dict[Edge, float]]:
    nodes = dict.fromkeys((node.id for node in circuit.nodes), 0.0)
    flows: dict[Edge, float] = {}
    for node in sorted(circuit.nodes, key=_height, reverse=True):
        if node.kind == "root":
            nodes[node.id] = 1.0
        causes = circuit.edges_into(node.id)
        sides = {
            side: [e for e in causes if e.side == side] for side in dict.fromkeys(e.side for e in causes)
        }
        totals = {side: sum(max(e.weight, 0.0) for e in edges) for side, edges in sides.items()}
        shared = sum(total > 0 for total in totals.values())
        for side, edges in sides.items():
            for edge in edges:
                part = max(edge.weight, 0.0) / totals[side] / shared if totals[side] > 0 else 0.0
                flows[edge] = nodes[node.id] * part
                nodes[edge.source] += flows[edge]
    return nodes, {edge: flows.get(edge, 0.0) for edge in circuit.edges}


def _height(node: Node) -> int:
    """Above everything the root, then heads by layer: an edge always comes from below."""
    if node.kind == "root":
        return 1_000_000
    return node.layer if node.kind == "head" and node.layer is not None else -1
