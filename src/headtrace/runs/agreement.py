"""How far a network agrees with a published circuit: precision, recall and F1, at every threshold.

Heads: those that an edge of the network joins, whatever their roles, against those of the reference. Edges: pairs of
heads, whatever the roles and side, against all pairs that the reference's edges stand for. An edge between two groups
of heads stands for many pairs, which its source need not claim one by one; ``links`` therefore counts the reference's
own edges of which the network has at least one pair.

By frequency, edges found in a smaller share of prompts are left out; by weight, query and key edges of a smaller mean
weight, and all edges of other sides, whose weights are in another unit.

>>> score(found=10, right=4, of=16)
(0.4, 0.25, 0.3076923076923077)
>>> score(found=0, right=0, of=16)
(None, 0.0, 0.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from headtrace.errors import InputError
from headtrace.runs.network import Head, Network
from headtrace.runs.references import Reference, require_same_model
from headtrace.vocabulary import ATTENTION_SIDES

Threshold = Literal["frequency", "weight"]
SHARES = tuple(step / 20 for step in range(21))
"""From every edge to those of all prompts."""
_MOST = 21
"""So many weights are tried."""


@dataclass(frozen=True)
class Agreement:
    """A network against a reference at a sweep of thresholds."""

    reference: Reference
    network: Network
    table: pl.DataFrame
    """One row for each threshold: how many heads and edges are left, how many of them are in the reference, precision,
    recall and F1 of both, and the share of the reference's own edges that are there (``links``)."""

    def best(self, by: Threshold = "frequency", what: Literal["heads", "edges"] = "heads") -> dict[str, Any]:
        """The row with the highest F1; of equals, that of the highest threshold."""
        rows = self.table.filter((pl.col("by") == by) & pl.col(f"{what}_f1").is_not_null())
        if rows.is_empty():
            raise InputError(f"The reference {self.reference.name!r} says nothing of {what}.")
        return rows.sort(f"{what}_f1", "threshold", descending=True).row(0, named=True)

    def groups(self, min_frequency: float = 0.0) -> pl.DataFrame:
        """Which heads of each group are in the network, and which are not."""
        there = set(self.network.prune(min_frequency=min_frequency).heads())
        rows = [
            {
                "group": group or "without a group",
                "heads": len(heads),
                "found": sum(head in there for head in heads),
                "missing": [f"L{layer}H{head}" for layer, head in heads if (layer, head) not in there],
            }
            for group, heads in self.reference.groups().items()
        ]
        return pl.DataFrame(rows, schema_overrides={"missing": pl.List(pl.String)})


def agreement(
    network: Network,
    reference: Reference,
    *,
    frequencies: Sequence[float] = SHARES,
    weights: Sequence[float] | None = None,
) -> Agreement:
    """Compare a network with a reference of its model; ``weights`` are by default quantiles of those it has."""
    require_same_model(network, reference)
    signals = network.keeping([edge for edge in network.edges if edge.side in ATTENTION_SIDES])
    rows = [_row(network.prune(min_frequency=each), reference, "frequency", each) for each in frequencies]
    tried = _quantiles(signals) if weights is None else weights
    rows += [_row(signals.prune(min_weight=each), reference, "weight", each) for each in tried]
    return Agreement(reference, network, pl.DataFrame(rows, schema=_SCHEMA))


_SCHEMA: dict[str, Any] = {
    "by": pl.String,
    "threshold": pl.Float64,
    **{
        f"{what}{each}": pl.Float64 if each in ("_precision", "_recall", "_f1") else pl.Int64
        for what in ("heads", "edges")
        for each in ("", "_right", "_precision", "_recall", "_f1")
    },
    "links": pl.Int64,
    "links_recall": pl.Float64,
}


def _row(network: Network, reference: Reference, by: Threshold, threshold: float) -> dict[str, Any]:
    known: set[Head] = {(each.layer, each.head) for each in reference.heads}
    groups = [reference.pairs(edge) for edge in reference.edges]
    pairs = set(network.head_edges())
    row: dict[str, Any] = {"by": by, "threshold": float(threshold)}
    row |= _scores("heads", set(network.heads()), known)
    row |= _scores("edges", pairs, set().union(*groups)) if groups else {"edges": len(pairs)}
    there = sum(bool(group & pairs) for group in groups)
    return row | ({"links": there, "links_recall": there / len(groups)} if groups else {})


def _scores(what: str, found: set[Any], known: set[Any]) -> dict[str, Any]:
    right = len(found & known)
    precision, recall, f1 = score(len(found), right, len(known))
    return {
        what: len(found),
        f"{what}_right": right,
        f"{what}_precision": precision,
        f"{what}_recall": recall,
        f"{what}_f1": f1,
    }


def score(found: int, right: int, of: int) -> tuple[float | None, float, float]:
    """Precision, recall and F1 of ``right`` among ``found``, where there are ``of`` to be found.

    Nothing found has no precision, and finds nothing.
    """
    precision = right / found if found else None
    return precision, right / of, 2 * right / (found + of)


def _quantiles(network: Network) -> list[float]:
    """Thresholds that leave out about a twentieth of the edges each."""
    weights = sorted({edge.weight for edge in network.edges})
    step = max(1, -(-len(weights) // (_MOST - 1)))
    return [0.0, *(each for each in weights[::step] if each > 0)]
