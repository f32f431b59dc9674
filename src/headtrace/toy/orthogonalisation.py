"""The head of theorem 4: attention fixed, one feature pair aligned, the second pair free to move.

With Omega_T = s1 u1 v1^T + s2 u2 v2^T and (x1, y1) = (u1, v1), the unit vectors x2 and y2 minimise the
cross-entropy of two contexts plus lambda/2 (y2 . y1)^2. The teacher asks for the logit gaps gap_a (query x1)
and gap_b (query x2):

    gap_a = s1 (1 - o),   gap_b = s1 (x2 . u1) (1 - o) - s2 (x2 . u2) (y2 . v2),   o = y2 . y1

Only the overlap o needs a search. Once it is chosen, gap_a is, and x2 and the rest of y2 can make gap_b any number
up to hypot(s1 (1 - o), s2 sqrt(1 - o^2)) in size; the best is the one nearest to what the teacher asks for.

>>> best = minimise(FixedHead(first=6.0, second=4.0, gap_a=3.0, gap_b=-4.0), weight=1.0)
>>> round(best.overlap, 4)
0.227
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.optimize import root_scalar
from torch import Tensor

GRID = torch.linspace(-1, 1, 2001, dtype=torch.float64)


@dataclass(frozen=True)
class FixedHead:
    """Its singular values, and the logit gaps that the teacher asks for."""

    first: float
    second: float
    gap_a: float
    gap_b: float


@dataclass(frozen=True)
class Minimum:
    """The global minimum over x2 and y2."""

    objective: float
    cross_entropy: float
    overlap: float
    """y2 . y1"""


def cross_entropy(wanted: float, gap: Float[Tensor, "*overlaps"]) -> Float[Tensor, "*overlaps"]:
    """Cross-entropy of a choice between two keys: the gap between their logits against the one that is wanted."""
    target = torch.full_like(gap, wanted).sigmoid()
    return torch.nn.functional.binary_cross_entropy_with_logits(gap, target, reduction="none")


def attention_loss(head: FixedHead, overlap: Float[Tensor, "*overlaps"]) -> Float[Tensor, "*overlaps"]:
    """The least cross-entropy of both contexts with this overlap."""
    gap_a = head.first * (1 - overlap)
    reach = torch.hypot(gap_a, head.second * (1 - overlap.square()).sqrt())
    gap_b = torch.full_like(overlap, head.gap_b).clamp(-reach, reach)
    return cross_entropy(head.gap_a, gap_a) + cross_entropy(head.gap_b, gap_b)


def minimise(head: FixedHead, weight: float) -> Minimum:
    """The lowest point of a grid of overlaps, then the zero of the slope around it.

    The slope tells the minimum to the last digits; the objective, flat there, only to half of them.
    """

    def objective(overlap: Float[Tensor, "*overlaps"]) -> Float[Tensor, "*overlaps"]:
        return attention_loss(head, overlap) + weight / 2 * overlap.square()

    def slope(overlap: float) -> float:
        return float(torch.func.grad(objective)(torch.tensor(overlap, dtype=torch.float64)))

    lowest = int(objective(GRID)[1:-1].argmin()) + 1
    around = (float(GRID[lowest - 1]), float(GRID[lowest + 1]))
    best = torch.tensor(root_scalar(slope, bracket=around, xtol=1e-15).root, dtype=torch.float64)
    return Minimum(float(objective(best)), float(attention_loss(head, best)), float(best))


def bound(weight: float, comparison: float, least_cross_entropy: float) -> float:
    """sqrt(2/lambda (J(x', y') - inf CE)), the right-hand side of theorem 4."""
    return (2 / weight * max(0.0, comparison - least_cross_entropy)) ** 0.5
