"""What is known of a circuit, and how much of it a trace found.

>>> truth = [
...     TrueEdge("L1H0 6->3", "Root", "root"),
...     TrueEdge("Embedding @6", "L1H0 6->3", "query", channels=1),
...     TrueEdge("L0H0 3->2", "L1H0 6->3", "value"),
...     TrueEdge("Embedding @2", "L0H0 3->2", "value"),
... ]
>>> [edge.source for edge in seen_by("attention", truth)]
['L1H0 6->3', 'Embedding @6']
>>> [edge.source for edge in seen_by("content", truth)]
['L1H0 6->3', 'L0H0 3->2', 'Embedding @2']
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from headtrace.circuits import Circuit
from headtrace.vocabulary import ROOT, Side

Paths = Literal["attention", "content", "complete"]
SIDES_SEEN: dict[Paths, tuple[Side, ...]] = {
    "attention": ("root", "query", "key"),
    "content": ("root", "value", "input"),
    "complete": ("root", "query", "key", "value", "input"),
}

LEAST_INFLUENCE = 0.01
"""An edge that carries less of the root's influence than this was not claimed."""


class TrueEdge(NamedTuple):
    """An edge that the model has by construction. Nodes are named as circuits name them, positions included."""

    source: str
    target: str
    side: Side
    channels: int | None = None
    """How many channels of the target carry it, where that is known."""

    @property
    def place(self) -> tuple[str, str, Side]:
        return self.source, self.target, self.side


class Score(NamedTuple):
    """Shares of the edges found that are true, and of the true edges that were found."""

    precision: float
    recall: float


def seen_by(paths: Paths, truth: Sequence[TrueEdge]) -> list[TrueEdge]:
    """The part of the truth that a trace of this kind can reach from the root."""
    sides, reached, seen = SIDES_SEEN[paths], [str(ROOT)], list[TrueEdge]()
    for target in reached:
        found = [edge for edge in truth if edge.target == target and edge.side in sides]
        seen += found
        reached += [edge.source for edge in found if edge.source not in reached]
    return seen


def from_head(head: str, truth: Sequence[TrueEdge]) -> list[TrueEdge]:
    """The truth where one head is the root, at whatever source it attends to."""
    firing = next(edge.target for edge in truth if edge.target.startswith(f"{head} "))
    return [TrueEdge(firing, str(ROOT), "root"), *(edge for edge in truth if edge.target != str(ROOT))]


def of_heads(truth: Sequence[TrueEdge]) -> list[TrueEdge]:
    """Edges that come from heads."""
    return [edge for edge in truth if edge.source.startswith("L")]


def found_edges(circuit: Circuit, at: float = LEAST_INFLUENCE) -> dict[tuple[str, str, Side], int | None]:
    """Edges that carry at least this share of influence, and their numbers of channels."""
    return {
        (circuit.node(edge.source).name, circuit.node(edge.target).name, edge.side): (
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
