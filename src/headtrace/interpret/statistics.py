"""Whether words are right: counts of blind labels, intervals, tests, and the fraction of signals that pass.

A description is right about a signal if a judge who knows only the words labels the signal's highest pairs more often
than random ones. Fisher's exact test says how surprising that is; Benjamini-Hochberg then keeps the share of false
discoveries among all signals at 5 %.

>>> counts = Counts(true_positive=18, false_negative=2, false_positive=3, true_negative=17)
>>> counts.accuracy.value, counts.recall.value, round(counts.p_value, 7)
(0.875, 0.9, 1.7e-06)
>>> print(counts.precision)
0.857 [0.654, 0.950]
>>> discoveries([0.001, 0.02, 0.03, 0.9])
[True, True, True, False]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headtrace.statistics import Proportion

FALSE_DISCOVERY_RATE = 0.05
"""The share of false discoveries among the signals that pass."""


@dataclass(frozen=True)
class Counts:
    """Labels of pairs that are the signal's highest (positive) and of others."""

    true_positive: int = 0
    false_negative: int = 0
    false_positive: int = 0
    true_negative: int = 0
    failed: int = 0
    """Pairs without a label because the judge could not be reached: neither right nor wrong."""

    @classmethod
    def of(cls, top: Sequence[bool | None], others: Sequence[bool | None]) -> Counts:
        """From the labels of the highest pairs and of others; None is a failure."""
        return cls(
            true_positive=sum(label is True for label in top),
            false_negative=sum(label is False for label in top),
            false_positive=sum(label is True for label in others),
            true_negative=sum(label is False for label in others),
            failed=sum(label is None for label in (*top, *others)),
        )

    @property
    def labelled(self) -> int:
        """How many pairs got a label."""
        return self.true_positive + self.false_negative + self.false_positive + self.true_negative

    @property
    def accuracy(self) -> Proportion:
        """How many labels are right."""
        return Proportion(self.true_positive + self.true_negative, self.labelled)

    @property
    def precision(self) -> Proportion:
        """Of the pairs that fit the words, how many are the signal's."""
        return Proportion(self.true_positive, self.true_positive + self.false_positive)

    @property
    def recall(self) -> Proportion:
        """Of the signal's pairs, how many fit the words."""
        return Proportion(self.true_positive, self.true_positive + self.false_negative)

    @property
    def p_value(self) -> float:
        """One-sided Fisher exact test: the chance of so many fitting pairs among the highest if words say nothing."""
        from scipy import stats

        table = [[self.true_positive, self.false_negative], [self.false_positive, self.true_negative]]
        if not all(map(sum, table)):  # nothing to compare with
            return 1.0
        result: Any = stats.fisher_exact(table, alternative="greater")
        return min(1.0, float(result[1]))

    def to_dict(self) -> dict[str, Any]:
        """Counts, proportions with their intervals, and the p-value, as plain values."""
        proportions = {name: getattr(self, name).to_dict() for name in ("accuracy", "precision", "recall")}
        return {**vars(self), **proportions, "p_value": self.p_value}


def q_values(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg: for each test, the least false-discovery rate at which it passes."""
    if not p_values:
        return []
    from scipy import stats

    return [float(q) for q in stats.false_discovery_control(np.asarray(p_values, float), method="bh")]


def discoveries(p_values: Sequence[float], rate: float = FALSE_DISCOVERY_RATE) -> list[bool]:
    """Which tests pass at a false-discovery rate."""
    return [q <= rate for q in q_values(p_values)]


def shuffled_places(texts: Sequence[str], seed: int = 0) -> list[int]:
    """An order of descriptions in which as few signals as possible keep their own words.

    Of a random order, each place that would keep the same words is exchanged for one where both ends change.

    >>> shuffled_places(["a", "b", "c"], seed=3) != [0, 1, 2]
    True
    """
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()
    for place, text in enumerate(texts):
        if texts[order[place]] != text:
            continue
        for other, own in enumerate(texts):
            if texts[order[other]] != text and texts[order[place]] != own:
                order[place], order[other] = order[other], order[place]
                break
    return order
