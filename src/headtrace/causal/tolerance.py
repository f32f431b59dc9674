"""How far two correct computations of the same number may lie apart.

A forward pass adds up many numbers, and each sum is rounded. Rounding goes up as often as down, so the errors of n sums
grow like the square root of n (Higham and Mary, 2019, on probabilistic rounding error analysis): a number of size s
computed with n of them may differ by ``2 eps sqrt(n) s`` (eps / 2 is one rounding, so that is four of their standard
deviations at most) on another CPU, with another number of threads or in another order.

The precision is that of the model which is run. What a file says of its own precision changes nothing about it: a file
of coarser numbers cannot be confirmed to the model's rounding, and gets a verdict that says so. Nothing is finer than
the channels themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headtrace.channels.svd import RECONSTRUCTION_TOLERANCE
from headtrace.models.devices import DTYPES, HALF

if TYPE_CHECKING:
    from headtrace.models import Model

WRITTEN = torch.finfo(torch.float32).eps
"""For each number that follows from others in the file, whatever the model."""
ROUNDED_PER_LAYER = 10
"""Tensors that a layer rounds to half precision: norms, queries, keys, values, scores, mixture, writes, residual.
Inside a product, half precision is added up in float32."""


@dataclass(frozen=True)
class Tolerance:
    """What is allowed between a file and the model, and what that follows from."""

    precision: str
    """The precision that the model runs in."""
    terms: int
    """Rounded sums along one path through the model."""
    relative: float
    """``2 eps sqrt(terms)``: allowed for a number of size one."""

    @classmethod
    def of(cls, model: Model, precision: str | None = None) -> Tolerance:
        """The tolerance of a model as it runs, or as it would in another precision."""
        dtype = model.hf.dtype
        if precision is not None:
            dtype = next(each for each in DTYPES if str(each) == f"torch.{precision}")
        terms = rounded_sums(model, dtype)
        relative = max(2 * torch.finfo(dtype).eps * math.sqrt(terms), RECONSTRUCTION_TOLERANCE)
        return cls(str(dtype).removeprefix("torch."), terms, relative)

    def number(self, size: float) -> float:
        """For a number in a computation whose largest numbers have this size."""
        return self.relative * max(1.0, size)

    def attention(self, size: float) -> float:
        """For attention whose logits (and what is removed from them) have this size.

        ``dp = p (1 - p) d(logit - other logits)``, so no change of logits by x moves attention by more than x / 2.
        """
        return min(1.0, self.number(size) / 2)

    def __str__(self) -> str:
        why = f"2 x eps of {self.precision} x sqrt of {self.terms:,} rounded sums"
        if self.relative <= RECONSTRUCTION_TOLERANCE:
            why = f"{self.precision}; the exactness of the channels"
        return f"{self.relative:.1e} x the size of what is added up ({why})"


def rounded_sums(model: Model, precision: torch.dtype) -> int:
    """Sums that are rounded along one path: per layer what is read, mixed and written, and the hidden units."""
    if precision in HALF:
        return ROUNDED_PER_LAYER * model.n_layers
    hidden = getattr(model.config, "intermediate_size", None) or 4 * model.d_model
    return model.n_layers * (2 * model.d_model + model.d_head + hidden) + model.d_model
