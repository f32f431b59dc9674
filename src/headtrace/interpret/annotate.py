"""Words on circuits: each edge says what its signal looks for, with the test of the words and a few examples.

>>> from headtrace.circuits.describe import example
>>> from headtrace.interpret.examples import ScoredSignal
>>> circuit = example()
>>> signal = ScoredSignal(signal_id(circuit, 1), 9, 6, "circuit", (1, 4), "query")
>>> counts = Counts(true_positive=9, false_negative=1, false_positive=0, true_negative=10)
>>> found = Judged(signal, "described", Description("The source is a name."), counts, supported=True)
>>> edge = annotate(circuit, [found], judge="lexical").edges[1]
>>> edge.description, edge.evidence.verdict, edge.evidence.accuracy, edge.evidence.judge
('The source is a name.', 'supported, p 6e-05', 0.95, 'lexical')
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from headtrace.circuits.parts import Evidence, Example
from headtrace.interpret.examples import Pair, ScoredSignal
from headtrace.interpret.judging import Judged
from headtrace.interpret.protocols import Description
from headtrace.interpret.statistics import Counts
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    from headtrace.circuits import Circuit

__all__ = ["Counts", "Description", "annotate", "edge_of", "evidence_of", "signal_id"]

EXAMPLES = 4
"""How many examples an edge keeps: a file of a thousand edges is still one that can be opened."""
LETTERS = 120
"""How long an example is, at most."""
TOKEN = 40
"""How long a marked token of it is, at most."""
GAP = "…"


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


def annotate(
    circuit: Circuit, found: Iterable[Judged], explainer: str | None = None, judge: str | None = None
) -> Circuit:
    """The circuit with words on its edges, and the evidence for them; edges whose signals have none stay as they are.

    ``explainer`` and ``judge`` are the names of those who found and judged the words.
    """
    edges, own = list(circuit.edges), circuit.content_id
    for each in found:
        place, words = edge_of(each.signal), each.description
        if place is None or words is None or place[0] != own or place[1] >= len(edges):
            continue
        evidence = replace(evidence_of(each), explainer=explainer, judge=judge)
        edges[place[1]] = replace(edges[place[1]], description=_whole(words.text), evidence=evidence)
    return circuit.with_edges(tuple(edges))


def evidence_of(found: Judged) -> Evidence:
    """How words were tested, small enough for a file; words that nobody judged have no p-value."""
    tested, accuracy = found.status == "described", found.counts.accuracy
    return Evidence(
        supported=found.supported,
        p_value=found.p_value if tested else None,
        accuracy=accuracy.value if tested else None,
        interval=accuracy.interval if tested and accuracy.total else None,
        judged=found.counts.labelled,
        examples=_examples(found) or None,
    )


def _examples(found: Judged) -> tuple[Example, ...]:
    """The highest pairs that read differently."""
    shown: dict[tuple[str, ...], Example] = {}
    for pair, label in sorted(found.examples, key=lambda each: -each[0].score):
        if len(shown) < EXAMPLES:
            pieces, dest, src = in_pieces(pair)
            shown.setdefault(pieces, Example(pieces, dest, src, pair.score, label))
    return tuple(shown.values())


def in_pieces(pair: Pair, most: int = LETTERS) -> tuple[tuple[str, ...], int, int]:
    """The context of a pair in a few pieces, and which of them are the destination and the source.

    As much as there is room for, nearest tokens first; what is left out is an ellipsis.

    >>> tokens = tuple(f" word{i}" for i in range(40))
    >>> pair = Pair("", dest=30, src=3, score=1.0, token_ids=tuple(range(40)), tokens=tokens)
    >>> in_pieces(pair, most=40)
    (('… word2', ' word3', ' word4 … word29', ' word30', ' …'), 3, 1)
    """
    kept = _around(pair, most)
    pieces: list[str] = []
    places: dict[int, int] = {}
    for text, place in _parts(pair, kept):
        joined = place is None and pieces and len(pieces) - 1 not in places.values()
        if joined:
            pieces[-1] += text
        else:
            pieces.append(text)
        if place is not None:
            places[place] = len(pieces) - 1
    return tuple(pieces), places[pair.dest], places[pair.src]


def _around(pair: Pair, most: int) -> set[int]:
    """The two tokens, and as many around them as there is room for, nearest first."""
    kept = {pair.src, pair.dest}
    room = most - sum(min(TOKEN, len(pair.tokens[place])) for place in kept) - 3 * len(f" {GAP}")
    for away in range(1, len(pair.tokens)):
        for place in (pair.dest - away, pair.src - away, pair.src + away, pair.dest + away):
            if place in kept or not 0 <= place < len(pair.tokens):
                continue
            room -= len(pair.tokens[place])
            if room < 0:
                return kept
            kept.add(place)
    return kept


def _parts(pair: Pair, kept: set[int]) -> Iterator[tuple[str, int | None]]:
    """Tokens in their order, with the places of the two that are marked, and what stands for those left out."""
    for number, place in enumerate(sorted(kept)):
        if place and place - 1 not in kept:
            yield (f" {GAP}" if number else GAP), None
        text = _whole(pair.tokens[place])
        if place in (pair.src, pair.dest):
            yield (text if len(text) <= TOKEN else text[: TOKEN - 1] + GAP), place
        else:
            yield text, None
    if max(kept) < len(pair.tokens) - 1:
        yield f" {GAP}", None


def _whole(text: str) -> str:
    """Text without half characters, which no file can hold: an endpoint may have sent some."""
    return text.encode(errors="replace").decode()
