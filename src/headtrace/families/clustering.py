"""Clustering circuits: distances, the tree, how many families to cut it into, and how stable each one is.

>>> import numpy as np
>>> from scipy import sparse
>>> matrix = sparse.csr_array(np.array([[1, 1, 0], [1, 1, 0], [0, 1, 1]], dtype=np.float32))
>>> [round(float(each), 3) for each in condensed(matrix)]
[0.0, 0.667, 0.667]

Jaccard distances come from sparse products, a block of rows at a time: the number of items that two circuits share is a
product of their rows. They are kept as float32 in condensed form: half of ``n * n * 4`` bytes. Average linkage (scipy's
nearest-neighbour chain, quadratic in n) makes two copies in float64, so the peak is 20 bytes per pair.

The rule for the number of families, for every n from 2 to ``k_max`` clusters of the tree:

1. the mean silhouette of the cut is above the 95 % quantile of that of populations without families (``shuffled``: each
   item as frequent, each circuit as large; the best of all cuts counts, as in the real population);
2. at least two families are large: a tenth of the circuits or more (with more than ten families, 1/n of them);
3. every family of three circuits or more comes back in bootstrap samples of the prompts: the mean Jaccard similarity of
   its members with those of the best matching family is at least 0.8.

Of the n that pass, the one with the highest silhouette is chosen; where none passes, there is one family. Populations
of more than ``SAMPLE`` circuits are judged by a sample of that size, and the whole tree is then cut into that many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import psutil
from jaxtyping import Bool, Float, Int
from scipy import sparse
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform

from headtrace.errors import InputError, OutOfMemoryError
from headtrace.families.population import Sets
from headtrace.tables import WithTable, frame, human, paragraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from scipy.sparse import csr_array


BYTES_PER_PAIR = 4 + 8 + 8
"""Distances, and scipy's two copies."""
_BLOCK = 1 << 26
"""Bytes of a block of distances."""


def blocks(matrix: csr_array, *, above: bool = False) -> Iterator[tuple[slice, Float[np.ndarray, "block n"]]]:
    """Distances of a block of circuits to all circuits, block by block; ``above``: only to circuits from the block's
    first one on."""
    n, items = shape_of(matrix)
    sizes = np.diff(matrix.indptr).astype(np.float32)
    rows = max(1, min(n, _BLOCK // (4 * max(n, items, 1))))
    for start in range(0, n, rows):
        own = slice(start, min(start + rows, n))
        others = matrix[start:] if above else matrix
        # A sparse matrix times a dense block: no sparse product has to be sorted or counted first.
        shared = np.ascontiguousarray((others @ matrix[own].toarray().T).T)
        union = sizes[own, None] + (sizes[start:] if above else sizes) - shared
        # Two circuits without any item are equal.
        shared[union == 0] = 1
        union[union == 0] = 1
        yield own, np.subtract(np.float32(1), np.divide(shared, union, out=shared), out=shared)


def shape_of(matrix: csr_array) -> tuple[int, int]:
    """Numbers of circuits and items."""
    shape: tuple[int, int] = matrix.shape  # type: ignore[assignment]
    return shape


def condensed(matrix: csr_array) -> Float[np.ndarray, " pairs"]:
    """Distances of all pairs in scipy's order. A population whose distances do not fit in memory is refused."""
    n = shape_of(matrix)[0]
    available, needed = psutil.virtual_memory().available, BYTES_PER_PAIR * n * n // 2
    if needed > available:
        most = int((2 * available / BYTES_PER_PAIR) ** 0.5)
        raise OutOfMemoryError(
            f"The distances between {n} circuits and their tree need about {human(needed)}, and {human(available)} are "
            f"free: that is enough for about {most} circuits. Take a sample of the prompts."
        )
    found = np.empty(n * (n - 1) // 2, dtype=np.float32)
    end = 0
    for own, block in blocks(matrix, above=True):
        for i, row in enumerate(range(own.start, own.stop)):
            count = n - row - 1
            found[end : end + count] = block[i, i + 1 :]
            end += count
    return found


def square(matrix: csr_array) -> Float[np.ndarray, "n n"]:
    """The whole matrix of distances, for populations of up to a few thousand."""
    return np.concatenate([block for _, block in blocks(matrix)])


def sums_to_clusters(
    matrix: csr_array, cluster: Int[np.ndarray, " n"], clusters: int
) -> Float[np.ndarray, "n cluster"]:
    """The summed distance of every circuit to each cluster, without holding all distances."""
    inside = np.eye(clusters, dtype=np.float32)[cluster]
    return np.concatenate([(block @ inside).astype(np.float64) for _, block in blocks(matrix)])


def average_linkage(distances: Float[np.ndarray, " pairs"]) -> Float[np.ndarray, "merge 4"]:
    """The tree of average linkage."""
    return hierarchy.linkage(distances, "average")


def cuts(tree: Float[np.ndarray, "merge 4"], most: int) -> Int[np.ndarray, "cut n"]:
    """The cluster of every circuit when the tree is cut into 1, 2, ... ``most`` clusters: one row per cut.

    Cuts have exactly that many clusters even where merges are at the same height: the last merges are undone one by
    one. Clusters are numbered by their first circuit.

    >>> tree = np.array([[0, 1, 0.1, 2], [2, 3, 0.2, 2], [4, 5, 0.9, 4]])
    >>> cuts(tree, 3).tolist()
    [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 2]]
    """
    n = len(tree) + 1
    most = min(most, n)
    children = tree[:, :2].astype(np.int64)
    finest = 2 * n - 1 - (most - 1)  # nodes from here on are undone in the finest cut
    top = np.arange(2 * n - 1)
    for node in range(min(finest, 2 * n - 1) - 1, n - 1, -1):
        top[children[node - n]] = top[node]
    leaf = top[:n]
    found: list[np.ndarray] = []
    for count in range(most, 0, -1):
        if count < most:  # redo one merge
            merged = 2 * n - 1 - count
            leaf = np.where(np.isin(leaf, children[merged - n]), merged, leaf)
        found.append(_by_first(leaf))
    return np.stack(found[::-1])


def clusters_below(tree: Float[np.ndarray, "merge 4"], distance: float) -> int:
    """The number of clusters when all merges above a distance are undone."""
    return 1 + int((tree[:, 2] > distance).sum())


def _by_first(clusters: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Clusters numbered from 0 by their first member."""
    _, first, place = np.unique(clusters, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[place.ravel()]


def by_size(clusters: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Clusters numbered from 1 by decreasing size; of equal sizes, the one with the first circuit comes first.

    >>> by_size(np.array([0, 1, 1, 0, 1])).tolist()
    [2, 1, 1, 2, 1]
    """
    by_first = _by_first(clusters)
    order = np.argsort(-np.bincount(by_first), kind="stable")
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(1, len(order) + 1)
    return number[by_first]


SAMPLE = 500
STABLE = 0.8
SMALLEST = 3
"""Circuits that make a family; a smaller one is an outlier, which a bootstrap sample may or may not contain."""
LARGE = 0.1
"""At least two families must have this share of the circuits: one large family and a few outliers are one mechanism."""
SHARE = 0.5
"""An edge is one of a family's merged edges if at least this share of its circuits have it."""
TRADES = 5
"""Trades per circuit in ``shuffled``: enough to leave no trace of which items occurred together."""
K_MAX, CONTROLS, RESAMPLES = 10, 40, 50


@dataclass(frozen=True, repr=False)
class Choice(WithTable):
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

    def __repr__(self) -> str:
        return f"Choice({self})"

    def _repr_html_(self) -> str:
        return paragraph(str(self)) + frame(self.table)

    def __str__(self) -> str:
        if self.by != "silhouette":
            return f"{self.n} families ({self.by})"
        if self.n > 1:
            best = self.table.row(by_predicate=pl.col("n") == self.n, named=True)
        else:
            best = self.table.sort("silhouette", descending=True).row(0, named=True)
        return (
            f"{self.n} famil{'y' if self.n == 1 else 'ies'} (silhouette {best['silhouette']:.3f} with {best['n']}, "
            f"{self.control:.3f} by chance, stability {best['stability']:.2f})"
        )


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
    circuits = shape_of(matrix)[0]
    if circuits > SAMPLE:
        matrix = matrix[np.sort(rng.permutation(circuits)[:SAMPLE])]
    distances = square(matrix)
    n = len(distances)
    types = {"n": pl.Int64, "silhouette": pl.Float64, "stability": pl.Float64, "large": pl.Int64}
    most = max(1, min(k_max, n - 1))
    if most < 2 or not distances.any():  # all circuits are the same
        return Choice(1, "silhouette", n, None, None, pl.DataFrame(schema=types))
    cut, values = separation(distances, most)
    chance = np.array([separation(square(shuffled(matrix, rng)), most)[1].max() for _ in range(controls)])
    threshold = float(np.quantile(chance, 0.95))
    large: list[int] = []
    for clusters in cut:
        sizes = np.bincount(clusters)
        large.append(int((sizes >= max(SMALLEST, min(LARGE, 1 / len(sizes)) * n)).sum()))
    columns = {
        "n": range(2, most + 1),
        "silhouette": values.tolist(),
        "stability": least_stable(distances, cut, resamples, rng),
        "large": large,
    }
    table = pl.DataFrame(columns, schema=types).with_columns(
        passes=(pl.col("silhouette") > threshold) & (pl.col("stability") >= STABLE) & (pl.col("large") >= 2)
    )
    passing = table.filter("passes").sort("silhouette", descending=True)
    p = (1 + int((chance >= values.max()).sum())) / (1 + controls)
    return Choice(passing["n"][0] if passing.height else 1, "silhouette", n, threshold, p, table)


def separation(
    distances: Float[np.ndarray, "n n"], most: int
) -> tuple[Int[np.ndarray, "cut n"], Float[np.ndarray, " cut"]]:
    """Cuts of the tree into 2, 3, ... ``most`` clusters, and the mean silhouette of each."""
    cut = _cuts(distances, most)
    # Cuts of one tree are nested: distances summed over the clusters of the finest cut serve all others.
    finest = cut[-1]
    sums = distances.astype(np.float64) @ np.eye(int(finest.max()) + 1)[finest]
    first = np.unique(finest, return_index=True)[1]
    found = [silhouette(sums @ np.eye(int(each.max()) + 1)[each[first]], each) for each in cut]
    return cut, np.array(found)


def silhouette(sums: Float[np.ndarray, "n cluster"], clusters: Int[np.ndarray, " n"]) -> float:
    """The mean silhouette, from the summed distances of every circuit to each of at least two clusters.

    The silhouette of a circuit is (b - a) / max(a, b): a is its mean distance to the rest of its own cluster, b to the
    nearest other cluster. It is 0 for a circuit that is alone in its cluster.
    """
    sizes, every = np.bincount(clusters), np.arange(len(clusters))
    inside = sums[every, clusters] / np.maximum(sizes[clusters] - 1, 1)
    means = sums / sizes
    means[every, clusters] = np.inf
    outside = means.min(axis=1)
    larger = np.maximum(inside, outside)
    values = np.divide(outside - inside, larger, out=np.zeros_like(larger), where=larger > 0)
    return float(np.where(sizes[clusters] > 1, values, 0.0).mean())


def _cuts(distances: Float[np.ndarray, "n n"], most: int) -> Int[np.ndarray, "cut n"]:
    return cuts(average_linkage(squareform(distances, checks=False)), most)[1:]


def shuffled(matrix: csr_array, rng: np.random.Generator) -> csr_array:
    """A population without families: circuits trade items pair by pair, each giving only what the other does not have.

    This is the curveball algorithm. Every circuit keeps its size and every item its frequency, exactly.

    >>> blocks = np.kron(np.eye(2), np.ones((2, 2))).astype(np.float32)
    >>> mixed = shuffled(sparse.csr_array(blocks), np.random.default_rng(0))
    >>> mixed.sum(axis=0).tolist(), mixed.sum(axis=1).tolist()
    ([2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0])
    """
    n = shape_of(matrix)[0]
    rows = [set(matrix.indices[matrix.indptr[i] : matrix.indptr[i + 1]].tolist()) for i in range(n)]
    pairs = rng.integers(0, n, (TRADES * n, 2))
    for one, other in pairs[pairs[:, 0] != pairs[:, 1]].tolist():
        a, b = rows[one], rows[other]
        only_a, only_b = a - b, b - a
        if not only_a or not only_b:
            continue
        pool = [*only_a, *only_b]
        order = rng.permutation(len(pool)).tolist()
        taken = {pool[place] for place in order[: len(only_a)]}
        rows[one] = (a - only_a) | taken
        rows[other] = (b - only_b) | (set(pool) - taken)
    columns = np.fromiter((item for row in rows for item in sorted(row)), dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return sparse.csr_array((np.ones(len(columns), dtype=matrix.dtype), columns, ends), matrix.shape)


# -- bootstrap samples ---------------------------------------------------------------------------------------


def bootstrap_cuts(
    distances: Float[np.ndarray, "n n"], most: int, resamples: int, rng: np.random.Generator
) -> Iterator[tuple[Int[np.ndarray, " drawn"], Int[np.ndarray, "cut drawn"]]]:
    """Bootstrap samples: the distinct circuits that were drawn, and their clusters in cuts of the sample's own tree."""
    n = len(distances)
    for _ in range(resamples):
        rows = np.sort(rng.integers(0, n, n))
        drawn, first = np.unique(rows, return_index=True)
        yield drawn, _cuts(distances[np.ix_(rows, rows)], most)[:, first]


def best_matches(
    own: Int[np.ndarray, " n"], other: Int[np.ndarray, " n"]
) -> tuple[Int[np.ndarray, " cluster"], Float[np.ndarray, " cluster"]]:
    """For each cluster of one partition, the most similar cluster of another and their Jaccard similarity.

    The similarity is NaN for a cluster that has no members here.

    >>> best_matches(np.array([0, 0, 1]), np.array([0, 1, 1]))[1].tolist()
    [0.5, 0.5]
    """
    rows, columns = int(own.max()) + 1, int(other.max()) + 1
    shared = np.bincount(own * columns + other, minlength=rows * columns).reshape(rows, columns)
    sizes = shared.sum(1, keepdims=True)
    similar = shared / np.maximum(sizes + shared.sum(0) - shared, 1)
    best = similar.argmax(1)
    return best, np.where(sizes[:, 0] > 0, similar[np.arange(rows), best], np.nan)


def least_stable(
    distances: Float[np.ndarray, "n n"],
    cut: Int[np.ndarray, "cut n"],
    resamples: int,
    rng: np.random.Generator,
) -> list[float]:
    """For every cut, the mean similarity of its least stable family with its matches in bootstrap samples."""
    similar: list[list[np.ndarray]] = [[] for _ in cut]
    for drawn, again in bootstrap_cuts(distances, len(cut) + 1, resamples, rng):
        for i, clusters in enumerate(cut):
            found = np.full(int(clusters.max()) + 1, np.nan)
            matches = best_matches(clusters[drawn], again[i])[1]
            found[: len(matches)] = matches
            similar[i].append(found)
    least: list[float] = []
    for samples, clusters in zip(similar, cut, strict=True):
        families = np.stack(samples, axis=1)[np.bincount(clusters) >= SMALLEST]
        means = [float(row[~np.isnan(row)].mean()) for row in families if not np.isnan(row).all()]
        least.append(min(means, default=0.0))
    return least


@dataclass(frozen=True, repr=False)
class Stability(WithTable):
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
        return {
            "mean": self.mean,
            "resamples": self.resamples,
            "share": self.share,
            "circuits": self.circuits,
            "families": self.table.to_dicts(),
        }

    def plot(self, path: str | Path | None = None) -> Figure:
        """A bar for each family; written where a path is given."""
        from headtrace.figures.families import stability_bars

        return stability_bars(self, path)


def stability_of(
    sets: Sets, edges: Sets, family: Int[np.ndarray, " circuit"], *, resamples: int, share: float, seed: int
) -> Stability:
    """Cluster bootstrap samples into as many families, match them with the given ones, compare merged edge sets.

    A family is matched with the one of the sample that is most similar in members. Each circuit of a sample counts
    once in merged sets, however often it was drawn.
    """
    if resamples < 2 or not 0 < share <= 1:
        raise InputError(
            f"resamples={resamples}, share={share}: expected at least 2 samples and a share of circuits up to 1."
        )

    def merged(circuits: Int[np.ndarray, " some"]) -> Bool[np.ndarray, " item"]:
        """The edges that at least a share of these circuits have."""
        return edges.counts(circuits) >= share * len(circuits)

    rng = np.random.default_rng(seed)
    rows = np.arange(len(family)) if len(family) <= SAMPLE else np.sort(rng.permutation(len(family))[:SAMPLE])
    names, own = np.unique(family[rows], return_inverse=True)
    distances = square(sets.matrix[rows])
    whole = [merged(rows[own == f]) for f in range(len(names))]
    members: list[list[float]] = [[] for _ in names]
    similar: list[list[float]] = [[] for _ in names]
    for drawn, cut in bootstrap_cuts(distances, max(2, len(names)), resamples, rng):
        again = cut[-1] if len(names) > 1 else np.zeros(len(drawn), dtype=np.int64)
        best, overlap = best_matches(own[drawn], again)
        for f in np.unique(own[drawn]):
            members[f].append(float(overlap[f]))
            similar[f].append(jaccard(whole[f], merged(rows[drawn[again == best[f]]])))
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


def jaccard(a: Bool[np.ndarray, " item"], b: Bool[np.ndarray, " item"]) -> float:
    """The Jaccard similarity of two sets; 1 if both are empty."""
    union = int((a | b).sum())
    return int((a & b).sum()) / union if union else 1.0
