"""Words on circuits: each edge says what its signal looks for, and whether that was found to be right.

>>> from headtrace.circuits.describe import example
>>> from headtrace.interpret.examples import ScoredSignal
>>> circuit = example()
>>> signal = ScoredSignal(signal_id(circuit, 1), 9, 6, "circuit", (1, 4), "query")
>>> counts = Counts(true_positive=9, false_negative=1, false_positive=0, true_negative=10)
>>> found = Judged(signal, "described", Description("The source is a name."), counts, supported=True)
>>> annotate(circuit, [found]).edges[1].description
'The source is a name. (p = 6e-05)'
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from headtrace.interpret.examples import ScoredSignal
from headtrace.interpret.judging import Judged
from headtrace.interpret.protocols import Description
from headtrace.interpret.statistics import Counts
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    from headtrace.circuits import Circuit

__all__ = ["Counts", "Description", "annotate", "edge_of", "edge_text", "signal_id"]

UNSUPPORTED = "Unsupported: "
"""How words begin that were not found to be right."""


def signal_id(circuit: Circuit, edge: int) -> str:
    """The name under which a scan knows an edge of a circuit."""
    found = circuit.edges[edge]
    target = circuit.node(found.target)
    channels = "+".join(map(str, found.channels or ()))
    return f"{head_name(target.layer or 0, target.head or 0)}:{channels} {circuit.content_id}:{edge}"


def edge_of(signal: ScoredSignal) -> tuple[str, int] | None:
    """The circuit (by its content id) and the edge that a signal was taken from."""
    _, _, place = signal.id.partition(" ")
    circuit, _, edge = place.rpartition(":")
    return (circuit, int(edge)) if circuit and edge.isdigit() else None


def annotate(circuit: Circuit, found: Iterable[Judged]) -> Circuit:
    """The circuit with words on its edges; edges whose signals have none stay as they are."""
    edges, own = list(circuit.edges), circuit.content_id
    for each in found:
        place = edge_of(each.signal)
        text = edge_text(each)
        if place is not None and place[0] == own and place[1] < len(edges) and text is not None:
            edges[place[1]] = replace(edges[place[1]], description=text)
    return circuit.with_edges(tuple(edges))


def edge_text(found: Judged) -> str | None:
    """Words, the p-value and an example; words that are not supported say so first."""
    if found.description is None:
        return None
    mark = "" if found.supported else UNSUPPORTED
    p_value = f"p = {found.p_value:.1g}" if found.status == "described" else "not judged"
    example = next((pair.excerpt(around=3).strip() for pair, _ in found.examples), None)
    return f"{mark}{found.description.text} ({p_value})" + ("" if example is None else f" Example: {example}")
