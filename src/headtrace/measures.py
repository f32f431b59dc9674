"""How few terms carry a sum, and what a key has more than the others: measures that a real head and a toy head share.

>>> import torch
>>> sparseness(torch.tensor([4.0, 0.0, 0.0, 0.0]))           # one term does it all: 1/n
tensor(0.2500)
>>> n_recon(torch.tensor([3.0, 2.0, -1.0, -2.0]))            # 3 >= 3 + 2 - 1 - 2
tensor(1)

Relative attention: a head chooses among the keys that its destination sees, and softmax only compares them. So what
counts of a logit is how far it lies above the mean of the others. Being linear, this divides over channels and
components as the logit itself does.

>>> visible = torch.tensor([[True, True, True, False]])
>>> relative_row(visible, torch.tensor([1])).tolist()
[[-0.5, 1.0, -0.5, 0.0]]
>>> logits = torch.tensor([3.0, 7.0, 5.0, 100.0], dtype=torch.float64)
>>> (relative_row(visible, torch.tensor([1])) @ logits).item()
3.0
>>> relative(logits[1], total=logits[:3].sum(), seen=3).item()
3.0
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def sparseness(
    values: Float[Tensor, "*batch n"], count: Int[Tensor, "*batch"] | int | None = None
) -> Float[Tensor, "*batch"]:
    """``(mean |v|)^2 / mean v^2``: 1 when all are equal (or all zero), 1/n when one is nonzero.

    ``count`` is n where the values are padded with zeros (heads of lower rank).
    """
    n = values.shape[-1] if count is None else count
    size = values.abs().amax(dim=-1, keepdim=True)
    scaled = values.abs() / torch.where(size > 0, size, 1.0)  # squares neither overflow nor vanish
    ratio = scaled.sum(dim=-1).square() / scaled.square().sum(dim=-1) / n
    return torch.where(size[..., 0] > 0, ratio, 1.0)


def n_recon(terms: Float[Tensor, "*batch n"]) -> Int[Tensor, "*batch"]:
    """Size of the smallest set of terms whose sum reaches that of all (largest first); 0 for a total <= 0."""
    total = terms.sum(dim=-1, keepdim=True)
    reached = terms.sort(dim=-1, descending=True).values.cumsum(dim=-1) >= total
    first = torch.where(reached.any(dim=-1), reached.int().argmax(dim=-1), terms.shape[-1]) + 1
    # The positive terms always reach the total, also where rounding in another order says otherwise.
    size = torch.minimum(first, (terms > 0).sum(dim=-1))
    return torch.where(total[..., 0] > 0, size, 0)


def relative(
    here: Float[Tensor, "*shape"], total: Float[Tensor, "*shape"], seen: Int[Tensor, "*#shape"] | int
) -> Float[Tensor, "*shape"]:
    """A value at the source less its mean over the other visible keys, from its sum over all ``seen`` of them.

    A destination that sees one key only has nothing to compare it with: the value itself is left.
    """
    others = torch.as_tensor(seen - 1, device=here.device).clamp_min(1)
    return here - (total - here) / others


def relative_row(
    visible: Bool[Tensor, "firing token"], src: Int[Tensor, " firing"], dtype: torch.dtype = torch.float64
) -> Float[Tensor, "firing token"]:
    """The same as weights over keys: one at the source, minus the mean over the other visible keys.

    A row times anything that keys have (logits, coefficients, components) is its relative value.
    """
    here = torch.zeros_like(visible, dtype=dtype).scatter(1, src[:, None], 1)
    return relative(here, visible.to(dtype), visible.sum(dim=-1, keepdim=True))
