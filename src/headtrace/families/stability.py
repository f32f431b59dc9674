"""Do families come back when prompts are drawn again? Their members, and the edges that most of their circuits have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from jaxtyping import Bool, Int

from headtrace.errors import InputError
from headtrace.families.choosing import SAMPLE, STABLE, matched, redrawn
from headtrace.families.distances import square
from headtrace.families.population import Sets
from headtrace.notebook import frame, paragraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARE = 0.5
"""An edge is one of a family's merged edges if at least this share of its circuits have it."""


@dataclass(frozen=True, repr=False)
class Stability:
    """Mean Jaccard similarity of families with those of bootstrap samples of the prompts. 0.8 counts as stable."""

    table: pl.DataFrame
    """family, circuits, edges (similarity of merged edge sets, with 2.5 % and 97.5 % quantiles), members, stable."""
    resamples: int
    share: float
    circuits: int
    """How many circuits were drawn from: all, or a sample."""

    @property
    def mean(self) -> float:
        """The mean similarity of merged edge sets over all families."""
        return float(np.mean(self.table["edges"].to_numpy()))

    def __repr__(self) -> str:
        return f"Stability({self.mean:.3f} over {self.table.height} families and {self.resamples} bootstrap samples)"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + frame(self.table)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, as ``families.json`` keeps it."""
        about = {
            "mean": self.mean,
            "resamples": self.resamples,
            "share": self.share,
            "circuits": self.circuits,
        }
        return about | {"families": self.table.to_dicts()}

    def plot(self, path: str | Path | None = None) -> Figure:
        """A bar for each family; written where a path is given."""
        from headtrace.figures.families import stability_bars

        return stability_bars(self, path)


def stability_of(
    sets: Sets, edges: Sets, family: Int[np.ndarray, " circuit"], *, resamples: int, share: float, seed: int
) -> Stability:
    """Cluster bootstrap samples into as many families, match them with the given ones, compare merged edge sets.

    A family is matched with the one of the sample that shares most members with it. Each circuit of a sample counts
    once in merged sets, however often it was drawn.
    """
    if resamples < 2 or not 0 < share <= 1:
        raise InputError(
            f"resamples={resamples}, share={share}: expected at least 2 samples and a share of circuits up to 1."
        )
    rng = np.random.default_rng(seed)
    rows = np.arange(len(family)) if len(family) <= SAMPLE else np.sort(rng.permutation(len(family))[:SAMPLE])
    names, own = np.unique(family[rows], return_inverse=True)
    distances = square(sets.matrix[rows])
    whole = [merged(edges, rows[own == f], share) for f in range(len(names))]
    members: list[list[float]] = [[] for _ in names]
    similar: list[list[float]] = [[] for _ in names]
    for drawn, cut in redrawn(distances, max(2, len(names)), resamples, rng):
        again = cut[-1] if len(names) > 1 else np.zeros(len(drawn), dtype=np.int64)
        best, overlap = matched(own[drawn], again)
        for f in np.unique(own[drawn]):
            members[f].append(float(overlap[f]))
            similar[f].append(jaccard(whole[f], merged(edges, rows[drawn[again == best[f]]], share)))
    table = pl.DataFrame(
        [
            {
                "family": int(name),
                "circuits": int((family == name).sum()),
                "edges": float(np.mean(similar[f])),
                "edges_low": float(np.quantile(similar[f], 0.025)),
                "edges_high": float(np.quantile(similar[f], 0.975)),
                "members": float(np.mean(members[f])),
                "stable": bool(np.mean(similar[f]) >= STABLE),
            }
            for f, name in enumerate(names)
            if similar[f]
        ]
    )
    return Stability(table, resamples, share, len(rows))


def merged(edges: Sets, circuits: Int[np.ndarray, " some"], share: float) -> Bool[np.ndarray, " item"]:
    """The edges that at least a share of some circuits have."""
    return edges.frequencies(circuits) >= share * len(circuits)


def jaccard(a: Bool[np.ndarray, " item"], b: Bool[np.ndarray, " item"]) -> float:
    """Shared edges over all edges of two sets; of two empty ones, 1."""
    union = int((a | b).sum())
    return int((a & b).sum()) / union if union else 1.0
