"""How far two correct computations of the same number may lie apart.

A forward pass adds up many numbers, and each sum is rounded. Rounding goes up as often as down, so the errors of n sums
grow like the square root of n (Higham and Mary, 2019, on probabilistic rounding error analysis): a number of size s
computed with n of them may differ by ``2 eps sqrt(n) s`` (eps / 2 is one rounding, so that is four of their standard
deviations at most) on another CPU, with another number of threads or in another order. The precision is the coarser
of two: the model's, and the one that the file was made in, which its numbers show (a float32 number written out in full
is still one). Nothing is finer than the channels themselves.

>>> precision_of([0.25, 0.1, 0.7]), precision_of([float(torch.tensor(x)) for x in (0.1, 0.2, 0.7)])
(torch.float64, torch.float32)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headtrace.channels.svd import RECONSTRUCTION_TOLERANCE
from headtrace.models.devices import DTYPES, HALF

if TYPE_CHECKING:
    from headtrace.circuits import Circuit
    from headtrace.models import Model

WRITTEN = torch.finfo(torch.float32).eps
"""For each number that follows from others in the file, whatever the model."""
PRECISIONS = DTYPES
"""From the coarsest to the finest."""
ROUNDED_PER_LAYER = 10
"""Tensors that a layer rounds to half precision: norms, queries, keys, values, scores, mixture, writes, residual.
Inside a product, half precision is added up in float32."""


@dataclass(frozen=True)
class Tolerance:
    """What is allowed between a file and the model, and what that follows from."""

    precision: str
    """The coarser precision of the file and the model."""
    terms: int
    """Rounded sums along one path through the model."""
    relative: float
    """``2 eps sqrt(terms)``: allowed for a number of size one."""

    @classmethod
    def of(cls, circuit: Circuit, model: Model) -> Tolerance:
        """The tolerance for a circuit on a model: that of the coarser of the two precisions."""
        own = precision_of(node.attention for node in circuit.nodes)
        stated = str(
            (circuit.method.settings or {}).get("dtype")
        )  # half precision is computed with in float32
        written = next((dtype for dtype in HALF if stated == str(dtype).removeprefix("torch.")), own)
        coarser = min(own, written, model.hf.dtype, key=PRECISIONS.index)
        terms = rounded_sums(model, coarser)
        relative = max(2 * torch.finfo(coarser).eps * math.sqrt(terms), RECONSTRUCTION_TOLERANCE)
        return cls(str(coarser).removeprefix("torch."), terms, relative)

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


def precision_of(numbers: Iterable[float | None]) -> torch.dtype:
    """The precision that numbers were computed in: the coarsest that holds them exactly.

    Zero and one, which every precision holds, do not count. One wrong number must not make the rest look coarse: half
    precision has to hold all of at least three numbers, float32 most of them.
    """
    known = torch.tensor(
        sorted({x for x in numbers if x is not None and x not in (0.0, 1.0)}), dtype=torch.float64
    )
    for half in HALF:
        if len(known) >= 3 and bool((known.to(half).double() == known).all()):
            return half
    exact = int((known.float().double() == known).sum())
    return torch.float32 if 2 * exact >= len(known) else torch.float64


def rounded_sums(model: Model, precision: torch.dtype) -> int:
    """Sums that are rounded along one path: per layer what is read, mixed and written, and the hidden units."""
    if precision in HALF:
        return ROUNDED_PER_LAYER * model.n_layers
    hidden = getattr(model.config, "intermediate_size", None) or 4 * model.d_model
    return model.n_layers * (2 * model.d_model + model.d_head + hidden) + model.d_model
