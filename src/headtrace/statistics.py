"""Statistics that several packages share: proportions, means over prompts with intervals, paired tests.

>>> print(Proportion(95, 100))
0.950 [0.888, 0.978]

Edges of one prompt are not independent, so intervals of means come from resampling whole prompts (a cluster bootstrap),
and the paired test is also made with one number per prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 4000
"""Bootstrap draws of every interval."""
NORMAL_975 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


def wilson(count: Any, total: int) -> tuple[Any, Any]:
    """Wilson's 95 % score interval of proportions ``count / total``, for a number or an array of counts.

    With ``total`` 0 nothing is known: the interval is from 0 to 1.
    """
    count = np.asarray(count, float)
    if total == 0:
        return np.zeros_like(count), np.ones_like(count)
    share, z = count / total, NORMAL_975
    middle = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * np.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    # Where none or all count, rounding would leave the end a hair away from 0 or 1.
    return np.where(count == 0, 0.0, middle - half), np.where(count == total, 1.0, middle + half)


@dataclass(frozen=True)
class Proportion:
    """A proportion with its Wilson 95 % interval; undefined when ``total`` is 0."""

    count: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.count <= self.total:
            raise ValueError(f"{self.count} of {self.total} is not a proportion.")

    @property
    def value(self) -> float | None:
        """``count / total``; None when ``total`` is 0."""
        return self.count / self.total if self.total else None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % score interval."""
        low, high = wilson(self.count, self.total)
        return float(low), float(high)

    def to_dict(self) -> dict[str, Any]:
        """The proportion and its interval as plain values."""
        low, high = self.interval
        return {"count": self.count, "of": self.total, "value": self.value, "low": low, "high": high}

    def __str__(self) -> str:
        low, high = self.interval
        return f"{'-' if self.value is None else f'{self.value:.3f}'} [{low:.3f}, {high:.3f}]"


def difference_interval(
    one: tuple[int, int], other: tuple[int, int], z: float = NORMAL_975
) -> tuple[float, float]:
    """Newcombe's interval of the difference of two proportions, each as (count, total): 95 % with the default ``z``.

    >>> [round(end, 4) for end in difference_interval((56, 70), (48, 80))]     # Newcombe 1998, table II, (a) 10
    [0.0524, 0.3339]
    """
    (p, low, high), (q, q_low, q_high) = (_wilson_at(*each, z) for each in (one, other))
    return p - q - math.hypot(p - low, q_high - q), p - q + math.hypot(high - p, q - q_low)


def _wilson_at(count: int, total: int, z: float) -> tuple[float, float, float]:
    """A proportion and the ends of its Wilson interval; nothing is known of none."""
    if not total:
        return 0.5, 0.0, 1.0
    share = count / total
    middle = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return share, max(0.0, middle - half), min(1.0, middle + half)


def difference_p_value(one: tuple[int, int], other: tuple[int, int], least: float) -> float:
    """One-sided p that a difference of two proportions is above ``least``: the level of the interval that ends there.

    >>> round(difference_p_value((56, 70), (48, 80), least=0.0524), 3)
    0.025
    """
    from scipy import optimize, stats

    def excess(z: float) -> float:
        # A negative z is the upper end, of the interval on the other side.
        ends = difference_interval(one, other, abs(z))
        return (ends[0] if z >= 0 else ends[1]) - least

    if not one[1] or not other[1]:
        return 1.0
    if excess(-40.0) <= 0 or excess(40.0) >= 0:
        return 1.0 if excess(-40.0) <= 0 else 0.0
    return float(stats.norm.sf(optimize.brentq(excess, -40.0, 40.0)))


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
    """A 95 % interval of the mean: prompts are resampled with replacement, each with all of its edges."""
    names, place = np.unique(group, return_inverse=True)
    sums, counts = np.bincount(place, weights=values), np.bincount(place)
    drawn = np.random.default_rng(seed).integers(0, len(names), (RESAMPLES, len(names)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def intervals(values: Any, seed: int = 0) -> tuple[Any, Any]:
    """95 % intervals of many means at once: ``values`` has the prompts on its first axis, which are resampled.

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


def paired_difference(only_first: Any, only_second: Any, total: int) -> tuple[Any, Any]:
    """95 % intervals of differences of two proportions of the same ``total`` cases, the second less the first.

    ``only_first`` and ``only_second`` count the cases that only one of them has: numbers, or arrays. Half a case is
    added to each cell of the table (Agresti and Min, Statistics in Medicine 24, 2005), so that intervals are honest
    where nothing differs, or everything.

    >>> [round(float(x), 3) for x in paired_difference(0, 8, 20)]
    [0.144, 0.584]
    """
    first, second = (np.asarray(each, float) + 0.5 for each in (only_first, only_second))
    n = total + 2
    middle, spread = (second - first) / n, first + second - (second - first) ** 2 / n
    half = NORMAL_975 * np.sqrt(np.maximum(spread, 0)) / n
    return np.clip(middle - half, -1, 1), np.clip(middle + half, -1, 1)


def mcnemar(only_first: Any, only_second: Any) -> Any:
    """The exact two-sided p of McNemar's test, for numbers or arrays: is each of the two as likely to be alone?

    >>> mcnemar([0, 3], [8, 3]).tolist()
    [0.0078125, 1.0]
    """
    from scipy import stats

    first, second = (np.asarray(each, int) for each in (only_first, only_second))
    fewer: Any = stats.binom.cdf(np.minimum(first, second), first + second, 0.5)
    return np.minimum(1.0, 2 * fewer)


def wilcoxon(differences: Any) -> float:
    """Two-sided p of the signed-rank test; 1 where nothing differs."""
    from scipy import stats

    values = np.asarray(differences, float)
    if not values.any():
        return 1.0
    result: Any = stats.wilcoxon(values)
    return float(result.pvalue)


def q_values(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg: for each test, the lowest false-discovery rate at which it passes."""
    if not len(p_values):
        return []
    from scipy import stats

    return [float(q) for q in stats.false_discovery_control(np.asarray(p_values, float), method="bh")]
