"""What is known of a circuit, and how much of it a trace found.

>>> mover, brings = head("L1H0", 6, 3), head("L0H0", 3, 2)
>>> truth = [
...     TrueEdge(mover, ROOT, "root"),
...     TrueEdge(embedding(6), mover, "query", channels=1),
...     TrueEdge(brings, mover, "value"),
...     TrueEdge(embedding(2), brings, "value"),
... ]
>>> [str(edge.source) for edge in seen_by("attention", truth)]
['L1H0 6->3', 'Embedding @6']
>>> [str(edge.source) for edge in seen_by("content", truth)]
['L1H0 6->3', 'L0H0 3->2', 'Embedding @2']
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from headtrace.circuits import Circuit
from headtrace.vocabulary import ROOT, Firing, Side, Site, parse_head

Paths = Literal["attention", "content", "complete"]
SIDES_SEEN: dict[Paths, tuple[Side, ...]] = {
    "attention": ("root", "query", "key"),
    "content": ("root", "value", "input"),
    "complete": ("root", "query", "key", "value", "input"),
}

LEAST_INFLUENCE = 0.01
"""An edge that carries less of the root's influence than this was not claimed."""


def head(name: str, dest: int, src: int) -> Site:
    return Firing(*parse_head(name), dest, src).site


def mlp(layer: int, at: int) -> Site:
    return Site("mlp", layer, dest=at)


def embedding(at: int) -> Site:
    return Site("embedding", dest=at)


def position(at: int) -> Site:
    return Site("position", dest=at)


Place = tuple[Site, Site, Side]
"""Source, target and side: what an edge is, whatever its weight."""


class TrueEdge(NamedTuple):
    """An edge that the model has by construction, with its positions."""

    source: Site
    target: Site
    side: Side
    channels: int | None = None
    """How many channels of the target carry it, where that is known."""

    @property
    def place(self) -> Place:
        return self.source, self.target, self.side


class Score(NamedTuple):
    """Shares of the edges found that are true, and of the true edges that were found."""

    precision: float
    recall: float


def seen_by(paths: Paths, truth: Sequence[TrueEdge]) -> list[TrueEdge]:
    """The part of the truth that a trace of this kind can reach from the root."""
    sides, reached, seen = SIDES_SEEN[paths], [ROOT], list[TrueEdge]()
    for target in reached:
        found = [edge for edge in truth if edge.target == target and edge.side in sides]
        seen += found
        reached += [edge.source for edge in found if edge.source not in reached]
    return seen


def from_head(name: str, truth: Sequence[TrueEdge]) -> list[TrueEdge]:
    """The truth where one head is the root, at whatever source it attends to."""
    layer_and_head = parse_head(name)
    firing = next(e.target for e in truth if (e.target.layer, e.target.head) == layer_and_head)
    return [TrueEdge(firing, ROOT, "root"), *(edge for edge in truth if edge.target != ROOT)]


def of_heads(truth: Sequence[TrueEdge]) -> list[TrueEdge]:
    """Edges that come from heads."""
    return [edge for edge in truth if edge.source.kind == "head"]


def found_edges(circuit: Circuit, at: float = LEAST_INFLUENCE) -> dict[Place, int | None]:
    """Edges that carry at least this share of influence, and their numbers of channels."""
    return {
        (circuit.node(edge.source).site, circuit.node(edge.target).site, edge.side): (
            None if edge.channels is None else len(edge.channels)
        )
        for edge, flow in circuit.flows().items()
        if flow >= at
    }


def score(circuit: Circuit, truth: Sequence[TrueEdge], at: float = LEAST_INFLUENCE) -> Score:
    """Precision and recall of edges: source, target and side, with positions. To find nothing is not imprecise."""
    found, true = set(found_edges(circuit, at)), {edge.place for edge in truth}
    right = len(found & true)
    return Score(right / len(found) if found else 1.0, right / len(true) if true else 1.0)
