"""Cutting a circuit down to a part of it. Node ids stay, so a part can be laid beside the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from headtrace.vocabulary import ATTENTION_SIDES

if TYPE_CHECKING:
    from headtrace.circuits.circuit import Circuit
    from headtrace.circuits.parts import Edge, Node


def prune(circuit: Circuit, min_weight: float, min_influence: float) -> Circuit:
    """Keep edges of at least ``min_weight`` and nodes of at least ``min_influence`` that lead to the root.

    ``min_weight`` is attention, so it applies to query and key edges only: the others are in the unit of the root.
    """
    strong = {
        node.id for node in circuit.nodes if node.kind == "root" or (node.influence or 0.0) >= min_influence
    }
    edges = [
        edge
        for edge in circuit.edges
        if edge.source in strong
        and edge.target in strong
        and (edge.side not in ATTENTION_SIDES or edge.weight >= min_weight)
    ]
    root = circuit.root_node
    if root is None:
        return circuit
    reached = _reach(root.id, edges, start=lambda edge: edge.target, end=lambda edge: edge.source)
    return _part(circuit, reached, [edge for edge in edges if edge.target in reached])


def between(circuit: Circuit, a: Node, b: Node) -> Circuit:
    """Everything on a path from ``a`` to ``b`` or from ``b`` to ``a``; empty of edges if there is none."""
    kept: set[int] = {a.id, b.id}
    for low, high in ((a.id, b.id), (b.id, a.id)):
        above = _reach(low, circuit.edges, start=lambda edge: edge.source, end=lambda edge: edge.target)
        below = _reach(high, circuit.edges, start=lambda edge: edge.target, end=lambda edge: edge.source)
        if high in above:
            kept |= above & below
    return _part(circuit, kept, [e for e in circuit.edges if e.source in kept and e.target in kept])


def _reach(
    first: int, edges: Iterable[Edge], start: Callable[[Edge], int], end: Callable[[Edge], int]
) -> set[int]:
    steps: dict[int, list[int]] = {}
    for edge in edges:
        steps.setdefault(start(edge), []).append(end(edge))
    reached, frontier = {first}, [first]
    while frontier:
        for following in steps.get(frontier.pop(), ()):
            if following not in reached:
                reached.add(following)
                frontier.append(following)
    return reached


def _part(circuit: Circuit, kept: set[int], edges: list[Edge]) -> Circuit:
    nodes = tuple(node for node in circuit.nodes if node.id in kept)
    return replace(circuit, nodes=nodes, edges=tuple(_within(edge, kept) for edge in edges))


def _within(edge: Edge, kept: set[int]) -> Edge:
    """An edge without its claim about an mlp's input, if that names nodes which are gone."""
    return edge if kept.issuperset(edge.through or ()) else replace(edge, through=None, left=None)
