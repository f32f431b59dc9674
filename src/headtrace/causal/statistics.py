"""Claimed signals against random channels: means with intervals, and a paired test.

Edges of one prompt are not independent, so intervals come from resampling whole prompts, and the test is also made on
one number per prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True)
class Comparison:
    """Changes by claimed signals and by random channels, edge by edge. Intervals are 95 %, over prompts."""

    n: int
    prompts: int
    claimed: float
    claimed_low: float
    claimed_high: float
    random: float
    random_low: float
    random_high: float
    difference: float
    difference_low: float
    difference_high: float
    effect_size: float
    """Mean difference over its standard deviation (Cohen's d of paired values)."""
    further: float
    """Share of edges whose own difference has the sign of the mean difference."""
    p_edges: float
    """Wilcoxon signed-rank test, two-sided, one pair per edge."""
    p_prompts: float
    """The same with one pair per prompt (their means)."""


def compare(
    claimed: Sequence[float], random: Sequence[float], prompt: Sequence[int], seed: int = 0
) -> Comparison:
    """Compare paired values; ``prompt`` says which prompt each pair comes from."""
    own, control, group = np.asarray(claimed, float), np.asarray(random, float), np.asarray(prompt)
    difference = own - control
    means = [means_by_group(values, group) for values in (own, control, difference)]
    intervals = [interval(values, group, seed) for values in (own, control, difference)]
    spread = float(difference.std(ddof=1)) if difference.size > 1 else 0.0
    return Comparison(
        n=difference.size,
        prompts=len(means[0]),
        claimed=float(own.mean()),
        claimed_low=intervals[0][0],
        claimed_high=intervals[0][1],
        random=float(control.mean()),
        random_low=intervals[1][0],
        random_high=intervals[1][1],
        difference=float(difference.mean()),
        difference_low=intervals[2][0],
        difference_high=intervals[2][1],
        effect_size=float(difference.mean()) / spread if spread else 0.0,
        further=float((np.sign(difference) == np.sign(difference.mean())).mean()),
        p_edges=wilcoxon(difference),
        p_prompts=wilcoxon(means[2]),
    )


def means_by_group(values: Any, group: Any) -> Any:
    return np.asarray([values[group == g].mean() for g in np.unique(group)])


def interval(values: Any, group: Any, seed: int = 0) -> tuple[float, float]:
    """A 95 % interval of the mean: prompts are drawn again with replacement, each with all of its edges."""
    names, place = np.unique(group, return_inverse=True)
    sums, counts = np.bincount(place, weights=values), np.bincount(place)
    drawn = np.random.default_rng(seed).integers(0, len(names), (RESAMPLES, len(names)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def intervals(values: Any, seed: int = 0) -> tuple[Any, Any]:
    """95 % intervals of many means at once: ``values`` has the prompts on its first axis, which are drawn again.

    >>> low, high = intervals(np.asarray([[0.0, 3.0], [1.0, 3.0]]))
    >>> low.tolist(), high.tolist()
    ([0.0, 3.0], [1.0, 3.0])
    """
    array = np.asarray(values, float)
    n = len(array)
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    means = (counts @ array.reshape(n, -1) / n).reshape(RESAMPLES, *array.shape[1:])
    low, high = np.quantile(means, (0.025, 0.975), axis=0)
    return low, high


def wilcoxon(differences: Any) -> float:
    """Two-sided p of the signed-rank test; 1 where nothing differs."""
    from scipy import stats

    values = np.asarray(differences, float)
    if not values.any():
        return 1.0
    result: Any = stats.wilcoxon(values)
    return float(result.pvalue)
