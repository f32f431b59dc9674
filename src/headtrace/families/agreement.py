"""Do families agree with a label? Adjusted Rand index and normalised mutual information, against shuffled labels.

>>> agreement([1, 1, 1, 2, 2, 2], ["ABBA", "ABBA", "ABBA", "BABA", "BABA", "BABA"]).ari
1.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

PERMUTATIONS = 999


@dataclass(frozen=True)
class Agreement:
    """How well two ways to group the same circuits agree."""

    ari: float
    """Adjusted Rand index: 1 for the same groups, 0 on average for groups made at random."""
    nmi: float
    """Mutual information over the mean of both entropies: 0 to 1. Many small groups raise it by chance."""
    p: float
    """How often shuffled labels have an adjusted Rand index as high: (1 + count) / (1 + permutations)."""
    p_nmi: float
    """The same for mutual information."""
    n: int
    """Circuits that have the label."""
    permutations: int

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        return f"ARI {self.ari:.3f}, NMI {self.nmi:.3f} (p {self.p:.3g}, {self.n} circuits)"


def agreement(
    families: Sequence[Any], labels: Sequence[Any], *, permutations: int = PERMUTATIONS, seed: int = 0
) -> Agreement:
    """Compare families with labels; circuits whose label is None are passed over."""
    pairs = [(family, label) for family, label in zip(families, labels, strict=True) if label is not None]
    if not pairs:
        return Agreement(0.0, 0.0, 1.0, 1.0, 0, permutations)
    a, b = (
        np.unique([str(each) for each in side], return_inverse=True)[1] for side in zip(*pairs, strict=True)
    )
    rng = np.random.default_rng(seed)
    ari, nmi = indices(counts(a, b))
    chance = np.array([indices(counts(a, rng.permutation(b))) for _ in range(permutations)]).reshape(-1, 2)
    # Shuffled labels that give the very same groups must count as such, whatever the last bit says.
    close = 1e-12
    p = [
        (1 + int((chance[:, i] >= value - close).sum())) / (1 + permutations)
        for i, value in enumerate((ari, nmi))
    ]
    return Agreement(ari, nmi, p[0], p[1], len(pairs), permutations)


def counts(a: Int[np.ndarray, " n"], b: Int[np.ndarray, " n"]) -> Float[np.ndarray, "family label"]:
    """How many circuits are in each family with each label."""
    rows, columns = int(a.max()) + 1, int(b.max()) + 1
    return np.bincount(a * columns + b, minlength=rows * columns).reshape(rows, columns).astype(np.float64)


def indices(table: Float[np.ndarray, "family label"]) -> tuple[float, float]:
    """Adjusted Rand index and normalised mutual information (arithmetic mean of the entropies) of a table of counts.

    >>> indices(np.array([[2.0, 0.0], [0.0, 2.0]]))
    (1.0, 1.0)
    """
    rows, columns, n = table.sum(1), table.sum(0), table.sum()

    def pairs(x: np.ndarray) -> float:
        return float((x * (x - 1) / 2).sum())

    expected = pairs(rows) * pairs(columns) / max(pairs(np.array([n])), 1.0)
    most = (pairs(rows) + pairs(columns)) / 2
    # Both groupings trivial, and so the same: nothing can be told apart, and nothing is.
    ari = 1.0 if most == expected else (pairs(table) - expected) / (most - expected)

    def entropy(x: np.ndarray) -> float:
        share = x[x > 0] / n
        return float(-(share * np.log(share)).sum())

    both = (entropy(rows) + entropy(columns)) / 2
    mutual = entropy(rows) + entropy(columns) - entropy(table.ravel())
    return ari, 1.0 if both == 0 else max(0.0, mutual / both)
