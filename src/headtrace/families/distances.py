"""Jaccard distances between circuits by sparse products, a block of rows at a time.

>>> import numpy as np
>>> from scipy import sparse
>>> matrix = sparse.csr_array(np.array([[1, 1, 0], [1, 1, 0], [0, 1, 1]], dtype=np.float32))
>>> [round(float(each), 3) for each in condensed(matrix)]
[0.0, 0.667, 0.667]

The count of shared items of two circuits is a product of their rows, so no pair is ever looked at alone. Distances are
kept as float32 in condensed form: half of ``n * n * 4`` bytes. Average linkage (scipy's nearest-neighbour chain, which
takes time in n squared) makes two copies in float64, so that 20 bytes per pair are needed at the most.
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
    """Distances of some circuits to all others, until every circuit had its turn; ``above``: only to those from the
    block's first circuit on."""
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
    """Circuits and items."""
    shape: tuple[int, int] = matrix.shape  # type: ignore[assignment]
    return shape


def condensed(matrix: csr_array) -> Float[np.ndarray, " pairs"]:
    """Distances of all pairs in the order that scipy has them."""
    n = shape_of(matrix)[0]
    require_memory(n)
    found = np.empty(n * (n - 1) // 2, dtype=np.float32)
    end = 0
    for own, block in blocks(matrix, above=True):
        for place, row in enumerate(range(own.start, own.stop)):
            count = n - row - 1
            found[end : end + count] = block[place, place + 1 :]
            end += count
    return found


def square(matrix: csr_array) -> Float[np.ndarray, "n n"]:
    """All distances, for populations of a few thousand."""
    return np.concatenate([block for _, block in blocks(matrix)])


def average_linkage(distances: Float[np.ndarray, " pairs"]) -> Float[np.ndarray, "merge 4"]:
    """The tree of average linkage."""
    return hierarchy.linkage(distances, "average")


def sums_to_clusters(
    matrix: csr_array, cluster: Int[np.ndarray, " n"], clusters: int
) -> Float[np.ndarray, "n cluster"]:
    """The summed distance of every circuit to each cluster, without holding all distances."""
    inside = np.eye(clusters, dtype=np.float32)[cluster]
    return np.concatenate([(block @ inside).astype(np.float64) for _, block in blocks(matrix)])


def require_memory(n: int) -> None:
    """Refuse a population whose distances do not fit, and say how many would."""
    available = psutil.virtual_memory().available
    needed = BYTES_PER_PAIR * n * n // 2
    if needed > available:
        most = int((2 * available / BYTES_PER_PAIR) ** 0.5)
        raise OutOfMemoryError(
            f"The distances between {n} circuits and their tree need about {human(needed)}, and {human(available)} are "
            f"free: that is enough for about {most} circuits. Take a sample of the prompts."
        )
