"""The head of theorems 1 and 2: its expected loss, exact and minimised, against the closed form.

Tokens hold each feature with probability p. With few features every query and every key can be listed, so
the expectation is a finite sum and the only error left is that of the optimiser.

>>> from headtrace.toy.frames import harmonic_frame
>>> generator = torch.Generator().manual_seed(0)
>>> x, y = harmonic_frame(2, 3, generator), harmonic_frame(2, 3, generator)
>>> best = minimise_expected_loss(x, y, probability=0.4, scale=3.0, generator=generator)
>>> best.relative_error < 1e-9, max(best.sines(x[:, 0], y[:, 0])) < 1e-9       # a tight frame: the features
(True, True)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize
from scipy.special import expit
from torch import Tensor

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
