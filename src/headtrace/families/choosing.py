"""How many families there are: as many as separate better than chance and come back when prompts are drawn again.

The rule, for every n from 2 to ``k_max`` cuts of the tree:

1. the mean silhouette of the cut is above the 95 % quantile of that of populations without families (``controls.py``:
   each item as frequent, each circuit as large; of each of them the best of all cuts is taken, as it is of ours);
2. at least two families are large: a tenth of the circuits or more (with more than ten families, 1/n of them);
3. every family of three circuits or more comes back in bootstrap samples of the prompts: the mean Jaccard similarity of
   its members with those of the family that matches it best is at least 0.8.

Of the n that pass, the one with the highest silhouette; where none does, there is one family. Populations of more than
``SAMPLE`` circuits are judged by a sample of so many, which the whole tree is then cut like.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from jaxtyping import Float, Int
from scipy.spatial.distance import squareform

from headtrace.families.controls import shuffled
from headtrace.families.distances import average_linkage, shape_of, square
from headtrace.families.trees import cuts, silhouettes

if TYPE_CHECKING:
    from scipy.sparse import csr_array

SAMPLE = 500
STABLE = 0.8
SMALLEST = 3
"""Circuits that make a family; what is smaller is an outlier, which may or may not be drawn."""
LARGE = 0.1
"""Two families must have this share of the circuits: one large one and some crumbs are no two mechanisms."""
K_MAX, CONTROLS, RESAMPLES = 10, 40, 50


@dataclass(frozen=True)
class Choice:
    """How the number of families was chosen."""

    n: int
    by: str
    """``silhouette``, ``given`` or ``distance``."""
    circuits: int
    """How many circuits were judged: all, or a sample."""
    control: float | None
    """The 95 % quantile of the best silhouettes of populations without families."""
    p: float | None
    """How often a population without families separates as well: (1 + count) / (1 + controls)."""
    table: pl.DataFrame
    """n, silhouette, stability (of the least stable family of three circuits or more), large (families), passes."""

    def __str__(self) -> str:
        if self.by != "silhouette":
            return f"{self.n} families ({self.by})"
        best = self.table.sort("silhouette", descending=True).row(0, named=True)
        if self.n > 1:
            best = self.table.row(by_predicate=pl.col("n") == self.n, named=True)
        told = (
            f"silhouette {best['silhouette']:.3f} with {best['n']}, {self.control:.3f} by chance, stability "
        )
        return f"{self.n} famil{'y' if self.n == 1 else 'ies'} ({told}{best['stability']:.2f})"


def choose(
    matrix: csr_array,
    *,
    k_max: int = K_MAX,
    controls: int = CONTROLS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Choice:
    """The number of families of a population, by the rule of this module."""
    rng = np.random.default_rng(seed)
    matrix = sample(matrix, rng)
    distances = square(matrix)
    n = len(distances)
    most = max(1, min(k_max, n - 1))
    if most < 2 or not distances.any():  # all circuits are the same
        return Choice(1, "silhouette", n, None, None, _table([], [], []))
    cut, values = separation(distances, most)
    chance = np.array([separation(square(shuffled(matrix, rng)), most)[1].max() for _ in range(controls)])
    threshold = float(np.quantile(chance, 0.95))
    stability = returned(distances, cut, resamples, rng)
    table = _table(values.tolist(), stability, [_large(row) for row in cut]).with_columns(
        passes=(pl.col("silhouette") > threshold) & (pl.col("stability") >= STABLE) & (pl.col("large") >= 2)
    )
    passing = table.filter("passes").sort("silhouette", descending=True)
    p = (1 + int((chance >= values.max()).sum())) / (1 + controls)
    return Choice(passing["n"][0] if passing.height else 1, "silhouette", n, threshold, p, table)


def sample(matrix: csr_array, rng: np.random.Generator) -> csr_array:
    """All circuits, or as many as are judged."""
    n = shape_of(matrix)[0]
    return matrix if n <= SAMPLE else matrix[np.sort(rng.permutation(n)[:SAMPLE])]


def separation(
    distances: Float[np.ndarray, "n n"], most: int
) -> tuple[Int[np.ndarray, "cut n"], Float[np.ndarray, " cut"]]:
    """Cuts of the tree into 2, 3, ... ``most``, and the mean silhouette of each."""
    cut = _cuts(distances, most)
    finest = cut[-1]
    sums = distances.astype(np.float64) @ np.eye(int(finest.max()) + 1)[finest]
    return cut, silhouettes(sums, finest, cut)


def returned(
    distances: Float[np.ndarray, "n n"],
    cut: Int[np.ndarray, "cut n"],
    resamples: int,
    rng: np.random.Generator,
) -> list[float]:
    """For every cut, how well its least stable family comes back in bootstrap samples of the circuits."""
    found = [[[] for _ in range(int(clusters.max()) + 1)] for clusters in cut]
    for drawn, again in redrawn(distances, len(cut) + 1, resamples, rng):
        for place, clusters in enumerate(cut):
            for family, similarity in enumerate(matched(clusters[drawn], again[place])[1]):
                if not np.isnan(similarity):
                    found[place][family].append(similarity)
    return [_least(families, clusters) for families, clusters in zip(found, cut, strict=True)]


def redrawn(
    distances: Float[np.ndarray, "n n"], most: int, resamples: int, rng: np.random.Generator
) -> Iterator[tuple[Int[np.ndarray, " drawn"], Int[np.ndarray, "cut drawn"]]]:
    """Bootstrap samples: which circuits were drawn (each once), and the cuts of the tree of all that were drawn."""
    n = len(distances)
    for _ in range(resamples):
        places = np.sort(rng.integers(0, n, n))
        drawn, first = np.unique(places, return_index=True)
        yield drawn, _cuts(distances[np.ix_(places, places)], most)[:, first]


def matched(
    own: Int[np.ndarray, " n"], other: Int[np.ndarray, " n"]
) -> tuple[Int[np.ndarray, " cluster"], Float[np.ndarray, " cluster"]]:
    """For each cluster of one partition, the cluster of another that shares most of its members, and the similarity.

    Similarity is the Jaccard index of the members; NaN for a cluster of which nobody is here.

    >>> matched(np.array([0, 0, 1]), np.array([0, 1, 1]))[1].tolist()
    [0.5, 0.5]
    """
    rows, columns = int(own.max()) + 1, int(other.max()) + 1
    shared = np.bincount(own * columns + other, minlength=rows * columns).reshape(rows, columns)
    sizes = shared.sum(1, keepdims=True)
    similar = shared / np.maximum(sizes + shared.sum(0) - shared, 1)
    best = similar.argmax(1)
    return best, np.where(sizes[:, 0] > 0, similar[np.arange(rows), best], np.nan)


def _cuts(distances: Float[np.ndarray, "n n"], most: int) -> Int[np.ndarray, "cut n"]:
    return cuts(average_linkage(squareform(distances, checks=False)), most)[1:]


def _large(clusters: Int[np.ndarray, " n"]) -> int:
    sizes = np.bincount(clusters)
    enough = max(SMALLEST, min(LARGE, 1 / len(sizes)) * len(clusters))
    return int((sizes >= enough).sum())


def _least(families: list[list[float]], clusters: Int[np.ndarray, " n"]) -> float:
    sizes = np.bincount(clusters)
    means = [float(np.mean(f)) for f, size in zip(families, sizes, strict=True) if f and size >= SMALLEST]
    return min(means, default=0.0)


def _table(silhouette: list[float], stability: list[float], large: list[int]) -> pl.DataFrame:
    columns = {
        "n": range(2, 2 + len(silhouette)),
        "silhouette": silhouette,
        "stability": stability,
        "large": large,
    }
    types = {"n": pl.Int64, "silhouette": pl.Float64, "stability": pl.Float64, "large": pl.Int64}
    return pl.DataFrame(columns, schema=types)
