"""What may be counted when terms are known only up to rounding.

Which terms a signal set has, and how many reach a sum, is decided by comparing sums. Where two sums are equal up to
``within``, both answers are right.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def assert_reaches(n: int, terms: Tensor, within: float) -> None:
    """``n`` largest terms reach the sum of all, and one fewer does not: what ``n_recon`` says."""
    total, reached = float(terms.sum()), terms.sort(descending=True).values.cumsum(0).tolist()
    if n == 0:
        assert total <= within
        return
    assert reached[n - 1] >= total - within
    assert ([0.0, *reached])[n - 1] < total + within


def assert_signal(signal: Iterable[int], terms: Tensor, within: float) -> None:
    """All but the largest set of terms whose sum is at most zero; signs mirrored for a negative total."""
    chosen = torch.zeros(len(terms), dtype=torch.bool)
    chosen[list(signal)] = True
    total = float(terms.sum())
    signs = [sign for sign in (1.0, -1.0) if sign * total >= -within]
    assert any(_splits(terms * sign, chosen, within) for sign in signs)


def _splits(terms: Tensor, chosen: Tensor, within: float) -> bool:
    kept, noise = terms[chosen].tolist(), terms[~chosen].tolist()
    if not kept:
        return sum(noise) <= within
    return (
        sum(noise) <= within
        and sum(noise) + min(kept) > -within
        and min(kept) > -within
        and min(kept) >= max(noise, default=-torch.inf) - within
    )
