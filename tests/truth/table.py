"""How much of each known circuit each method finds: `python -m tests.truth.table`, from the repository's root.

Precision and recall of edges that carry at least 1% of the influence, mean over prompts. The last column counts only
edges that come from heads, which is all that SVT looks for. The second table has the compiled programs: edges that
complete circuits found, of the true ones on each side: first of those that matter along a path to the root, then of all
that change what their own reader does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean
from typing import NamedTuple

import headtrace
from headtrace.vocabulary import SIDES, Side
from tests.truth.compiled import ABOUT, compiled_model, edges_by_reader, true_edges, weights
from tests.truth.known import KNOWN, Known
from tests.truth.limits import TWO_NEEDS, TWO_WRITERS
from tests.truth.programs import questions
from tests.truth.scoring import Place, Score, TrueEdge, found_edges, from_head, of_heads, score, seen_by

METHODS = ("acc++", "acc", "svt")
N = 50
COMPILED_N = 8
"""Prompts per compiled program."""
SEED = 20
"""Of prompts that include some in which the heads of "induction" and "sort" attend to several tokens."""


def mean_scores(known: Known, method: str, n: int = N) -> tuple[Score, Score]:
    """Scores on all attention edges, and on those that come from heads; traced from the head that attends last."""
    tracer, cases = headtrace.Tracer(known.model, method=method), known.cases(n)
    circuits = tracer.trace_batch([case.ids for case in cases], root="heads", heads=[known.head])
    truths = [seen_by("attention", from_head(known.head, case.truth)) for case in cases]
    beside = [[*truth, *case.beside] for truth, case in zip(truths, cases, strict=True)]

    def mean(part: Callable[[Sequence[TrueEdge]], Sequence[TrueEdge]]) -> Score:
        precise = [
            score(circuit, part(truth)).precision for circuit, truth in zip(circuits, beside, strict=True)
        ]
        recalled = [
            score(circuit, part(truth)).recall for circuit, truth in zip(circuits, truths, strict=True)
        ]
        return Score(fmean(precise), fmean(recalled))

    return mean(list), mean(of_heads)


def rows(n: int = N) -> list[str]:
    """The table in Markdown."""
    lines = ["| circuit | method | precision | recall | recall, heads |", "|---|---|---|---|---|"]
    for known in (*KNOWN.values(), TWO_WRITERS, TWO_NEEDS):
        for method in METHODS:
            every, heads = mean_scores(known, method, n)
            numbers = f"{every.precision:.2f} | {every.recall:.2f} | {heads.recall:.2f}"
            lines.append(f"| {known.name} | {method} | {numbers} |")
    return lines


class Tally(NamedTuple):
    """Edges of a compiled program over all its prompts: those that matter along a path, and those that change what
    their own reader does. ``extra`` are those found that are neither. ``missed`` are those that matter along a path and
    were not found, although the circuit does not say that there is something that it cannot tell."""

    true: Counter[Side]
    found: Counter[Side]
    by_reader: Counter[Side]
    found_by_reader: Counter[Side]
    extra: list[Place]
    missed: list[Place]


@cache
def tally(program: str, *, rotated: bool) -> Tally:
    """Complete circuits of a logit difference, with all their edges, against the edges of the weights."""
    tracer, w = headtrace.Tracer(compiled_model(program, rotated=rotated)), weights(program)
    result = Tally(Counter(), Counter(), Counter(), Counter(), [], [])
    for ids, answer, wrong, _ in questions(program, COMPILED_N, SEED):
        circuit = tracer.trace(ids, answer, wrong, root="linear", paths="complete")
        found, true = set(found_edges(circuit, at=0.0)), true_edges(w, ids, answer, wrong)
        by_reader = edges_by_reader(w, ids, answer, wrong)
        result.true.update(side for *_, side in true)
        result.found.update(side for *_, side in found & true)
        result.by_reader.update(side for *_, side in by_reader)
        result.found_by_reader.update(side for *_, side in found & by_reader)
        if surplus := found - true - by_reader:
            result.extra.extend(surplus - true_edges(w, ids, answer, wrong, together=2))
        if not circuit.not_told:
            result.missed.extend(true - found)
    return result


def compiled_rows() -> list[str]:
    """Found and true edges of every compiled program on each side, in Markdown: along paths ; by their readers."""
    lines = [f"| program | {' | '.join(SIDES)} | extra |", "|---" * (len(SIDES) + 2) + "|"]
    for program in ABOUT:
        for rotated in (False, True):
            t = tally(program, rotated=rotated)
            numbers = [
                " ; ".join(
                    f"{found[side]}/{true[side]}"
                    for found, true in ((t.found, t.true), (t.found_by_reader, t.by_reader))
                    if true[side]
                )
                or "-"
                for side in SIDES
            ]
            lines.append(f"| {program}{', rotated' * rotated} | {' | '.join(numbers)} | {len(t.extra)} |")
    return lines


if __name__ == "__main__":
    print("\n".join([*rows(), "", *compiled_rows()]))
