"""Relative attention: what a key has more than the others do. The one place that says how it is measured.

A head chooses among the keys that its destination sees, and softmax only compares them. So what counts of a logit
is how far it lies above the mean of the others. Being linear, this divides over channels and components as the
logit itself does.

>>> import torch
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
