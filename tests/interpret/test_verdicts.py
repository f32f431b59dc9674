"""Statistics of words against known values, and what must hold for any counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headtrace.interpret import Counts, Proportion
from headtrace.interpret.verdicts import discoveries, shuffled_places
from headtrace.statistics import q_values

small = st.integers(0, 30)


def test_wilson_interval_has_its_known_values():
    # 8 of 10, from the closed form with z = 1.959964.
    low, high = Proportion(8, 10).interval
    z, n, p = 1.959963984540054, 10, 0.8
    middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert low == pytest.approx((middle - half) / (1 + z**2 / n), rel=1e-12)
    assert high == pytest.approx((middle + half) / (1 + z**2 / n), rel=1e-12)


def test_fisher_of_the_lady_tasting_tea():
    assert Counts(3, 1, 1, 3).p_value == pytest.approx(17 / 70)
    assert Counts(4, 0, 0, 4).p_value == pytest.approx(1 / 70)


def test_benjamini_hochberg_by_hand():
    # Thresholds 0.0125, 0.025, 0.0375, 0.05: the third passes and takes the first two with it.
    assert discoveries([0.02, 0.9, 0.001, 0.037]) == [True, False, True, True]
    assert discoveries([0.04, 0.9, 0.001, 0.05]) == [False, False, True, False]
    assert discoveries([]) == []


def test_statsmodels_says_the_same():
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    p_values = np.random.default_rng(0).random(50) ** 3
    assert q_values(p_values.tolist()) == pytest.approx(multitest.multipletests(p_values, method="fdr_bh")[1])
    assert Proportion(7, 31).interval == pytest.approx(proportion.proportion_confint(7, 31, method="wilson"))


@given(small, small, small, small)
def test_p_value_is_the_hypergeometric_tail(a, b, c, d):
    p_value = Counts(a, b, c, d).p_value
    assert 0 <= p_value <= 1
    if a + b and c + d:
        total = math.comb(a + b + c + d, a + c)
        tail = sum(math.comb(a + b, k) * math.comb(c + d, a + c - k) for k in range(a, min(a + b, a + c) + 1))
        assert p_value == pytest.approx(tail / total, rel=1e-9)


@given(small, small)
def test_wilson_interval_holds_the_value_and_narrows(count, more):
    few, many = Proportion(count, count + more), Proportion(10 * count, 10 * (count + more))
    (low, high), (lower, higher) = few.interval, many.interval
    assert 0 <= low <= (few.value if few.value is not None else 0.5) <= high <= 1
    assert higher - lower <= high - low + 1e-12


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_q_values_keep_the_order_and_never_fall_below_p(p_values):
    found = q_values(p_values)
    assert all(q >= p - 1e-12 for p, q in zip(p_values, found, strict=True))
    order = np.argsort(p_values, kind="stable")
    assert all(np.diff(np.asarray(found)[order]) >= -1e-12)


def test_failures_are_in_no_rate():
    counts = Counts.of([True, None, None], [False, None])
    assert counts.failed == 3
    assert (counts.accuracy.total, counts.recall.value, counts.precision.value) == (2, 1.0, 1.0)


def test_false_discoveries_stay_near_their_rate():
    """Where no words are right, almost nothing passes."""
    random = np.random.default_rng(0)
    runs = [
        discoveries([Counts(h, 20 - h, g, 20 - g).p_value for h, g in random.binomial(20, 0.4, (100, 2))])
        for _ in range(20)
    ]
    assert np.mean([any(run) for run in runs]) <= 0.25
    assert np.mean(runs) < 0.01


@given(st.lists(st.sampled_from("abcdef"), max_size=12), st.integers(0, 5))
def test_shuffled_words_are_all_there_and_change_places(texts, seed):
    order = shuffled_places(texts, seed)
    assert sorted(order) == list(range(len(texts)))
    most = max((texts.count(each) for each in texts), default=0)
    if most <= len(texts) // 2:
        assert sum(texts[i] == own for i, own in zip(order, texts, strict=True)) <= 1
