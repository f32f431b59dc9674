"""Circuits and the oracle's edges in one form, to compare as sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import headtrace

PLACE = ("kind", "layer", "head", "dest", "src")


def oracle_edges(case: dict[str, Any]) -> dict[tuple, tuple[float, frozenset[int] | None]]:
    """(source, target, side) -> (weight, channels)."""

    def place(component: dict[str, Any]) -> tuple:
        return tuple(component.get(key) for key in PLACE)

    return {
        (place(e["source"]), place(e["target"]), e["side"]): (
            e["weight"],
            None if e["channels"] is None else frozenset(e["channels"]),
        )
        for e in case["edges"]
    }


def circuit_edges(circuit: headtrace.Circuit) -> dict[tuple, tuple[float, frozenset[int] | None]]:
    def place(number: int) -> tuple:
        node = circuit.node(number)
        return tuple(getattr(node, key) for key in PLACE)

    return {
        (place(e.source), place(e.target), e.side): (
            e.weight,
            None if e.channels is None else frozenset(e.channels),
        )
        for e in circuit.edges
    }


@dataclass
class Agreement:
    """Counts over many cases: edges and (edge, channel) pairs in both, in one only; the largest weight error."""

    shared: int = 0
    single: int = 0
    shared_pairs: int = 0
    single_pairs: int = 0
    weight_error: float = 0.0
    differing: list[Any] = field(default_factory=list)

    def add(self, mine: dict, theirs: dict) -> None:
        self.shared += len(mine.keys() & theirs.keys())
        self.single += len(mine.keys() ^ theirs.keys())
        self.differing += sorted(mine.keys() ^ theirs.keys(), key=str)
        pairs = [{(key, k) for key, (_, ks) in edges.items() for k in ks or ()} for edges in (mine, theirs)]
        self.shared_pairs += len(pairs[0] & pairs[1])
        self.single_pairs += len(pairs[0] ^ pairs[1])
        for key in mine.keys() & theirs.keys():
            self.weight_error = max(self.weight_error, abs(mine[key][0] - theirs[key][0]))

    @property
    def edges(self) -> float:
        return self.shared / (self.shared + self.single)

    @property
    def pairs(self) -> float:
        return self.shared_pairs / (self.shared_pairs + self.single_pairs)
