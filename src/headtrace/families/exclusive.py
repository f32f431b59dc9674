"""What one family has and the others do not: items that are frequent inside and rare outside, with intervals.

>>> found = difference_of_shares(np.array([45.0]), 50, np.array([5.0]), 100)
>>> {name: round(float(value[0]), 3) for name, value in found.items()}
{'inside': 0.9, 'outside': 0.05, 'difference': 0.85, 'low': 0.721, 'high': 0.913}
"""

from __future__ import annotations

import numpy as np
import polars as pl
from jaxtyping import Bool, Float

from headtrace.errors import InputError
from headtrace.families.population import Sets
from headtrace.statistics import wilson


def exclusive_items(
    sets: Sets, inside: Bool[np.ndarray, " circuit"], within: float, outside: float
) -> pl.DataFrame:
    """Items that at least a share ``within`` of some circuits have, and at most a share ``outside`` of all others.

    One row each, the largest difference first: the item, its frequency inside and outside, their difference with a 95 %
    interval (Newcombe's, from Wilson's intervals of both shares).
    """
    if not 0 < within <= 1 or not 0 <= outside < within:
        raise InputError(
            f"within={within}, outside={outside}: expected shares of circuits, the first above the second, such as "
            "within=0.5, outside=0.1."
        )
    found = difference_of_shares(
        sets.frequencies(np.flatnonzero(inside)), int(inside.sum()),
        sets.frequencies(np.flatnonzero(~inside)), int((~inside).sum()),
    )  # fmt: skip
    table = sets.names.with_columns(pl.Series(name, values) for name, values in found.items())
    kept = table.filter((pl.col("inside") >= within) & (pl.col("outside") <= outside))
    return kept.sort("difference", "item", descending=[True, False])


def difference_of_shares(
    inside: Float[np.ndarray, " item"], n: int, outside: Float[np.ndarray, " item"], m: int
) -> dict[str, Float[np.ndarray, " item"]]:
    """Shares of n and of m circuits, their difference, and its 95 % interval."""
    p, (p_low, p_high) = inside / max(n, 1), wilson(inside, n)
    q, (q_low, q_high) = outside / max(m, 1), wilson(outside, m)
    low = p - q - np.sqrt((p - p_low) ** 2 + (q_high - q) ** 2)
    high = p - q + np.sqrt((p_high - p) ** 2 + (q - q_low) ** 2)
    return {"inside": p, "outside": q, "difference": p - q, "low": low, "high": high}
