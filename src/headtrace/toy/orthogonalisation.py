"""The head of theorem 4: attention fixed, one feature pair aligned, the second pair free to move.

With Omega_T = s1 u1 v1^T + s2 u2 v2^T and (x1, y1) = (u1, v1), the unit vectors x2 and y2 minimise the
cross-entropy of two contexts plus lambda/2 (y2 . y1)^2. The teacher asks for the logit gaps gap_a (query x1)
and gap_b (query x2). Only the parts of x2 and y2 in the two singular planes, and how much is left outside,
matter, so the minimum is found over unit vectors in a few dimensions, from many starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

REFINED = 4


@dataclass(frozen=True)
class FixedHead:
    """Its singular values, and the logit gaps that the teacher asks for."""

    first: float
    second: float
    gap_a: float
    gap_b: float


@dataclass(frozen=True)
class Minimum:
    """The best of all starts."""

    objective: float
    cross_entropy: float
    overlap: float
    """y2 . y1"""


def cross_entropy(wanted: float, gap: Float[Tensor, " starts"]) -> Float[Tensor, " starts"]:
    target = torch.full_like(gap, wanted).sigmoid()
    return torch.nn.functional.binary_cross_entropy_with_logits(gap, target, reduction="none")


def attention_loss(
    head: FixedHead, x: Float[Tensor, "starts d"], y: Float[Tensor, "starts d"]
) -> Float[Tensor, " starts"]:
    """Coordinates are along u1, u2, ... for x2 and along v1, v2, ... for y2."""
    gap_a = head.first * (1 - y[:, 0])
    gap_b = head.first * x[:, 0] * (1 - y[:, 0]) - head.second * x[:, 1] * y[:, 1]
    return cross_entropy(head.gap_a, gap_a) + cross_entropy(head.gap_b, gap_b)


def minimise(
    head: FixedHead, weight: float, generator: torch.Generator, starts: int = 64, d: int = 4
) -> Minimum:
    """The global minimum over unit x2 and y2: the best of many local ones, then refined on its own."""

    def evaluate(free: Float[Tensor, "2 starts d"]) -> tuple[Tensor, Tensor, Tensor]:
        x, y = free / free.norm(dim=2, keepdim=True)
        loss = attention_loss(head, x, y)
        return loss + weight / 2 * y[:, 0].square(), loss, y[:, 0]

    def total(free: Float[Tensor, "2 starts d"]) -> Tensor:
        return evaluate(free)[0].sum()

    free = torch.randn(2, starts, d, generator=generator, dtype=torch.float64)
    _descend(total, free)
    # Several of them: the best before refinement may lie at the edge of another valley.
    promising = evaluate(free)[0].argsort()[:REFINED].tolist()
    objective, loss, overlap = evaluate(
        torch.cat([_newton(total, free[:, i : i + 1]) for i in promising], dim=1)
    )
    best = int(objective.argmin())
    return Minimum(float(objective[best]), float(loss[best]), float(overlap[best]))


def _descend(total: Callable[[Tensor], Tensor], free: Float[Tensor, "2 starts d"]) -> None:
    """Move every start downhill, in place."""
    optimiser = torch.optim.LBFGS([free.requires_grad_()], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = total(free)
        value.backward()
        return value

    optimiser.step(closure)  # type: ignore[arg-type]
    free.requires_grad_(False)


def _newton(total: Callable[[Tensor], Tensor], free: Float[Tensor, "2 1 d"]) -> Float[Tensor, "2 1 d"]:
    """A few Newton steps: a gradient method alone stalls where the loss is flat to its last digit.

    Lengths, and directions that the head does not read, do not change the loss: the pseudo-inverse leaves
    them alone.
    """
    for _ in range(12):
        slope = torch.func.grad(total)(free).flatten()
        curvature = torch.func.hessian(total)(free).reshape(len(slope), len(slope))
        free = free - (torch.linalg.pinv(curvature, rtol=1e-9) @ slope).view_as(free)
    return free


def bound(weight: float, comparison: float, least_cross_entropy: float) -> float:
    """sqrt(2/lambda (J(x', y') - inf CE)), the right-hand side of theorem 4."""
    return (2 / weight * max(0.0, comparison - least_cross_entropy)) ** 0.5
