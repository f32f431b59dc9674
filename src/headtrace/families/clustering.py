"""Clustering circuits: Jaccard distances, average linkage, and cuts of the tree.

>>> import numpy as np
>>> from scipy import sparse
>>> matrix = sparse.csr_array(np.array([[1, 1, 0], [1, 1, 0], [0, 1, 1]], dtype=np.float32))
>>> [round(float(each), 3) for each in condensed(matrix)]
[0.0, 0.667, 0.667]

The number of items that two circuits share is a product of their rows, so distances come from sparse products, a block
of rows at a time. They are kept as float32 in condensed form: half of ``n * n * 4`` bytes. Average linkage (scipy's
nearest-neighbour chain, quadratic in n) makes two copies in float64, so the peak is 20 bytes per pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import psutil
from jaxtyping import Float, Int
from scipy.cluster import hierarchy

from headtrace.errors import OutOfMemoryError
from headtrace.tables import human

if TYPE_CHECKING:
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
