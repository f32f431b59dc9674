"""What the theorems are about: feature sets of known geometry, and heads whose loss can be minimised exactly.

Feature sets with a known geometry: tight frames, and sets at a chosen distance from one.

A set of N unit vectors in D dimensions is a tight frame (is in isotropic position) when X X^T = (N/D) I.

>>> deviation(harmonic_frame(4, 6, torch.Generator().manual_seed(0))) < 1e-12
True

The head of theorems 1 and 2: its expected loss, exact and minimised, against the closed form.

Tokens hold each feature with probability p. With few features every query and every key can be listed, so
the expectation is a finite sum and the only error left is that of the optimiser.

>>> generator = torch.Generator().manual_seed(0)
>>> x, y = harmonic_frame(2, 3, generator), harmonic_frame(2, 3, generator)
>>> best = minimise_expected_loss(x, y, probability=0.4, scale=3.0, generator=generator)
>>> best.relative_error < 1e-9, max(best.sines(x[:, 0], y[:, 0])) < 1e-9       # a tight frame: the features
(True, True)

The head of theorem 4: attention fixed, one feature pair aligned, the second pair free to move.

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

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize, root_scalar
from scipy.special import expit
from torch import Tensor


def orthogonal(size: int, generator: torch.Generator) -> Float[Tensor, "size size"]:
    """A random rotation or reflection."""
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q


def unit_columns(vectors: Float[Tensor, "d n"]) -> Float[Tensor, "d n"]:
    """The same vectors, each of length 1."""
    return vectors / vectors.norm(dim=0, keepdim=True)


def antipodal_frame(d: int, n: int, generator: torch.Generator) -> Float[Tensor, "d n"]:
    """Orthonormal bases, every second one the opposite of the one before; n must be a multiple of d."""
    bases: list[Tensor] = []
    for index in range(n // d):
        bases.append(-bases[-1] if index % 2 else orthogonal(d, generator))
    return torch.cat(bases, dim=1)


def harmonic_frame(d: int, n: int, generator: torch.Generator) -> Float[Tensor, "d n"]:
    """Cosines and sines of d/2 frequencies at n points of a circle, turned at random; d is even, n > d."""
    points = torch.arange(n, dtype=torch.float64) * (2 * torch.pi / n)
    angles = torch.outer(torch.arange(1, d // 2 + 1, dtype=torch.float64), points)
    return orthogonal(d, generator) @ torch.cat([angles.cos(), angles.sin()]) * (2 / d) ** 0.5


def relaxed_frame(d: int, n: int, generator: torch.Generator, rounds: int = 5000) -> Float[Tensor, "d n"]:
    """Random unit vectors moved, by turns, to the nearest tight set and back to unit length.

    With few rounds the set is only near a tight frame.
    """
    vectors = unit_columns(torch.randn(d, n, generator=generator, dtype=torch.float64))
    for _ in range(rounds):
        left, _, right = torch.linalg.svd(vectors, full_matrices=False)
        vectors = unit_columns(left @ right)
        if deviation(vectors) < 1e-13:
            break
    return vectors


FRAMES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "antipodal": antipodal_frame,
    "harmonic": harmonic_frame,
    "relaxed": relaxed_frame,
}


def pushed_frame(d: int, n: int, noise: float, generator: torch.Generator) -> Float[Tensor, "d n"]:
    """A harmonic frame whose vectors are pushed at random by `noise` and brought back to unit length."""
    push = torch.randn(d, n, generator=generator, dtype=torch.float64) / d**0.5
    return unit_columns(harmonic_frame(d, n, generator) + noise * push)


def deviation(vectors: Float[Tensor, "d n"]) -> float:
    """||E||_2 of X X^T = (N/D)(I + E): 0 for a tight frame."""
    d, n = vectors.shape
    scaled = vectors @ vectors.T * (d / n)
    return float(torch.linalg.matrix_norm(scaled - torch.eye(d, dtype=vectors.dtype), ord=2))


NEWTON_STEPS = 4
"""Each doubles the number of right digits."""


@dataclass(frozen=True)
class Minimiser:
    """What the optimiser found and what the theorem says."""

    found: Float[Tensor, "d d"]
    closed_form: Float[Tensor, "d d"]

    @property
    def relative_error(self) -> float:
        """How far the minimum that was found is from the closed form, relative to its norm."""
        return float((self.found - self.closed_form).norm() / self.closed_form.norm())

    @property
    def second_value(self) -> float:
        """The second singular value as a share of the first: 0 for a matrix of rank one."""
        values = torch.linalg.svdvals(self.found)
        return float(values[1] / values[0])

    def sines(self, x: Float[Tensor, " d"], y: Float[Tensor, " d"]) -> tuple[float, float]:
        """Sines of the angles between the top singular vectors and the features."""
        left, _, right = torch.linalg.svd(self.found)
        return sine(left[:, 0], x), sine(right[0], y)


def sine(a: Float[Tensor, " d"], b: Float[Tensor, " d"]) -> float:
    """The sine of the angle between two lines, exact also for tiny angles."""
    a, b = a / a.norm(), b / b.norm()
    return float((a - (a @ b) * b).norm())


def closed_form(x: Float[Tensor, "d n"], y: Float[Tensor, "d n"], scale: float) -> Float[Tensor, "d d"]:
    """alpha (X X^T)^-1 x_1 y_1^T (Y Y^T)^-1: theorem 1."""
    left = torch.linalg.solve(x @ x.T, x[:, 0])
    right = torch.linalg.solve(y @ y.T, y[:, 0])
    return scale * torch.outer(left, right)


def subsets(
    vectors: Float[Tensor, "d n"], probability: float
) -> tuple[Float[Tensor, "tokens d"], Float[Tensor, " tokens"]]:
    """Every token that can occur, and how often it does."""
    present = torch.tensor(list(product((0.0, 1.0), repeat=vectors.shape[1])), dtype=torch.float64)
    chance = (present * probability + (1 - present) * (1 - probability)).prod(1)
    return present @ vectors.T, chance


def minimise_expected_loss(
    x: Float[Tensor, "d n"],
    y: Float[Tensor, "d n"],
    *,
    probability: float,
    scale: float,
    generator: torch.Generator,
) -> Minimiser:
    """Minimise the expected cross-entropy with two keys per query, from a random start.

    The gap between two keys is linear in Omega, so this is a logistic regression, and convex: a trust region leads to
    the minimum from anywhere, and plain Newton steps go on where the loss is flat to its last digit.
    """
    queries, query_chance = subsets(x, probability)
    keys, key_chance = subsets(y, probability)
    exact = closed_form(x, y, scale)
    chance = (query_chance[:, None, None] * key_chance[:, None] * key_chance).flatten().numpy()
    gaps = torch.einsum("qi,abj->qabij", queries, keys[:, None] - keys).flatten(0, 2).flatten(1).numpy()
    wanted = expit(gaps @ exact.flatten().numpy())

    def loss(omega: np.ndarray) -> float:
        return float(chance @ (np.logaddexp(0, gaps @ omega) - wanted * (gaps @ omega)))

    def slope(omega: np.ndarray) -> np.ndarray:
        return (chance * (expit(gaps @ omega) - wanted)) @ gaps

    def curvature(omega: np.ndarray) -> np.ndarray:
        attention = expit(gaps @ omega)
        return (gaps.T * (chance * attention * (1 - attention))) @ gaps

    start = torch.randn(exact.shape, generator=generator, dtype=torch.float64).flatten().numpy()
    omega = minimize(loss, start, jac=slope, hess=curvature, method="trust-exact").x
    for _ in range(NEWTON_STEPS):
        omega = omega - np.linalg.solve(curvature(omega), slope(omega))
    return Minimiser(torch.from_numpy(omega).view_as(exact), exact)


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
