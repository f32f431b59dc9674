"""The head of theorems 1 and 2: its expected loss, exact and minimised, against the closed form.

Tokens hold each feature with probability p. With few features every query and every key can be listed, so
the expectation is a finite sum and the only error left is that of the optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Minimiser:
    """What the optimiser found and what the theorem says."""

    found: Float[Tensor, "d d"]
    closed_form: Float[Tensor, "d d"]
    gradient_norm: float

    @property
    def relative_error(self) -> float:
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
    chance = torch.where(present > 0, probability, 1 - probability).prod(1)
    return present @ vectors.T, chance


def minimise_expected_loss(
    x: Float[Tensor, "d n"],
    y: Float[Tensor, "d n"],
    probability: float,
    scale: float,
    generator: torch.Generator,
) -> Minimiser:
    """Minimise the expected cross-entropy with two keys per query, from a random start."""
    queries, query_chance = subsets(x, probability)
    keys, key_chance = subsets(y, probability)
    exact = closed_form(x, y, scale)
    chance = query_chance[:, None, None] * key_chance[:, None] * key_chance

    def gaps(omega: Tensor) -> Tensor:
        logits = queries @ omega @ keys.T
        return logits[:, :, None] - logits[:, None, :]

    wanted = gaps(exact).sigmoid()
    omega = torch.randn(exact.shape, generator=generator, dtype=torch.float64).requires_grad_()
    optimiser = torch.optim.LBFGS(
        [omega],
        max_iter=2000,
        tolerance_grad=1e-13,
        tolerance_change=0,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = (
            chance
            * torch.nn.functional.binary_cross_entropy_with_logits(gaps(omega), wanted, reduction="none")
        ).sum()
        loss.backward()
        return loss

    optimiser.step(closure)  # type: ignore[arg-type]
    closure()
    assert omega.grad is not None
    return Minimiser(omega.detach(), exact, float(omega.grad.norm()))
