"""A population without families to compare with: items as frequent, circuits as large, nothing goes together.

>>> rng = np.random.default_rng(0)
>>> matrix = sparse.csr_array(np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]], dtype=np.float32))
>>> mixed = shuffled(matrix, rng)
>>> mixed.sum(axis=0).tolist(), mixed.sum(axis=1).tolist()
([2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from headtrace.families.distances import shape_of

if TYPE_CHECKING:
    from scipy.sparse import csr_array

TRADES = 5
"""Trades per circuit: so many leave no trace of what went together (the curveball algorithm)."""


def shuffled(matrix: csr_array, rng: np.random.Generator) -> csr_array:
    """Circuits trade items pair by pair, each giving only what the other does not have.

    Every circuit keeps its size and every item its frequency, exactly.
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
    ones = np.ones(len(columns), dtype=matrix.dtype)
    return sparse.csr_array(
        (ones, columns, np.concatenate([[0], np.cumsum([len(r) for r in rows])])), matrix.shape
    )
