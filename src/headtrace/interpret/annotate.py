"""Words on circuits: each edge gets the description of its signal, the evidence for it, and a few examples.

>>> from headtrace.circuits.describe import example
>>> from headtrace.interpret.explainers import Description
>>> from headtrace.interpret.judging import Counts
>>> from headtrace.interpret.scored_signals import circuit_signals
>>> circuit = example()
>>> signal = circuit_signals(circuit)[0]                                 # of edge 1
>>> counts = Counts(true_positive=19, false_negative=1, false_positive=0, true_negative=40)
>>> words = Description("The source is a name.")
>>> found = Judged(signal, "described", words, counts, in_second=counts, supported=True)
>>> edge = annotate(circuit, [found], judge="lexical").edges[1]
>>> edge.description, edge.evidence.verdict, edge.evidence.accuracy, edge.evidence.judge
('The source is a name.', 'supported, p 0.00025', 0.983..., 'lexical')
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from headtrace.circuits.parts import Evidence, EvidenceExample
from headtrace.interpret.judging import Judged
from headtrace.interpret.scored_signals import Pair

if TYPE_CHECKING:
    from headtrace.circuits import Circuit

EXAMPLES = 4
"""Examples kept per edge: few enough that a file of a thousand edges can still be opened."""
LONGEST_EXAMPLE = 120
"""Characters of an example."""
LONGEST_TOKEN = 40
"""Characters of a marked token in it."""
GAP = "…"


def annotate(
    circuit: Circuit, found: Iterable[Judged], explainer: str | None = None, judge: str | None = None
) -> Circuit:
    """The circuit with descriptions and evidence on the edges whose signals have one.

    ``explainer`` and ``judge`` are the names of those that found and judged the descriptions.
    """
    edges = list(circuit.edges)
    for each in found:
        content_id, number = each.signal.edge or ("", 0)
        if each.description is None or content_id != circuit.content_id or number >= len(edges):
            continue
        evidence = replace(evidence_of(each), explainer=explainer, judge=judge)
        text = _without_surrogates(each.description.text)
        edges[number] = replace(edges[number], description=text, evidence=evidence)
    return circuit.with_edges(tuple(edges))


def evidence_of(found: Judged) -> Evidence:
    """How a description was tested, small enough for a circuit file; without a p-value if it was not judged."""
    both = found.counts + found.in_second
    tested, accuracy = found.status == "described", both.accuracy
    examples: dict[tuple[str, ...], EvidenceExample] = {}
    for pair, label in sorted(found.examples, key=lambda each: -each[0].score):
        if len(examples) < EXAMPLES:
            pieces, dest, src = in_pieces(pair)
            examples.setdefault(pieces, EvidenceExample(pieces, dest, src, pair.score, label))
    return Evidence(
        supported=found.supported,
        p_value=found.p_value if tested else None,
        accuracy=accuracy.value if tested else None,
        interval=accuracy.interval if tested and accuracy.total else None,
        judged=both.labelled,
        examples=tuple(examples.values()) or None,
    )


def in_pieces(pair: Pair, most: int = LONGEST_EXAMPLE) -> tuple[tuple[str, ...], int, int]:
    """The context of a pair in a few pieces, and which of them are the destination and the source.

    Tokens nearest to the two are kept as long as there is room; an ellipsis stands for the others.

    >>> tokens = tuple(f" word{i}" for i in range(40))
    >>> pair = Pair("", dest=30, src=3, score=1.0, token_ids=tuple(range(40)), tokens=tokens)
    >>> in_pieces(pair, most=40)
    (('… word2', ' word3', ' word4 … word29', ' word30', ' …'), 3, 1)
    """
    kept = _nearest(pair, most)
    pieces: list[str] = []
    marked: dict[int, int] = {}

    def append(text: str) -> None:
        """Add to the last piece, unless that is a marked token."""
        if pieces and len(pieces) - 1 not in marked.values():
            pieces[-1] += text
        else:
            pieces.append(text)

    for position in sorted(kept):
        if position and position - 1 not in kept:
            append(f" {GAP}" if pieces else GAP)
        text = _without_surrogates(pair.tokens[position])
        if position not in (pair.src, pair.dest):
            append(text)
        else:
            pieces.append(text if len(text) <= LONGEST_TOKEN else text[: LONGEST_TOKEN - 1] + GAP)
            marked[position] = len(pieces) - 1
    if max(kept) < len(pair.tokens) - 1:
        append(f" {GAP}")
    return tuple(pieces), marked[pair.dest], marked[pair.src]


def _nearest(pair: Pair, most: int) -> set[int]:
    """The positions of the two tokens, and of as many around them as fit into ``most`` characters."""
    kept = {pair.src, pair.dest}
    room = most - sum(min(LONGEST_TOKEN, len(pair.tokens[each])) for each in kept) - 3 * len(f" {GAP}")
    for away in range(1, len(pair.tokens)):
        for position in (pair.dest - away, pair.src - away, pair.src + away, pair.dest + away):
            if position in kept or not 0 <= position < len(pair.tokens):
                continue
            room -= len(pair.tokens[position])
            if room < 0:
                return kept
            kept.add(position)
    return kept


def _without_surrogates(text: str) -> str:
    """Text with lone surrogates replaced, which no file can hold: an endpoint may have sent some."""
    return text.encode(errors="replace").decode()
