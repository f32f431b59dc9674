"""How much of each known circuit each method finds: `python -m tests.truth.table`, from the repository's root.

Precision and recall of edges that carry at least 1% of the influence, mean over prompts. The last column counts only
edges that come from heads, which is all that SVT looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import headtrace
from tests.truth.known import KNOWN, Known
from tests.truth.limits import TWO_NEEDS, TWO_WRITERS
from tests.truth.scoring import Score, TrueEdge, from_head, of_heads, score, seen_by

METHODS = ("acc++", "acc", "svt")
N = 50


def mean_scores(known: Known, method: str, n: int = N) -> tuple[Score, Score]:
    """Scores on all attention edges, and on those that come from heads; traced from the head that attends last."""
    tracer, cases = headtrace.Tracer(known.model, method=method), known.cases(n)
    circuits = tracer.trace_batch([case.ids for case in cases], root="heads", heads=[known.head])
    truths = [seen_by("attention", from_head(known.head, case.truth)) for case in cases]

    def mean(part: Callable[[Sequence[TrueEdge]], Sequence[TrueEdge]]) -> Score:
        scores = [score(circuit, part(truth)) for circuit, truth in zip(circuits, truths, strict=True)]
        return Score(fmean(s.precision for s in scores), fmean(s.recall for s in scores))

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


if __name__ == "__main__":
    print("\n".join(rows()))
