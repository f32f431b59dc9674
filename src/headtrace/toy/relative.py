"""Relative attention of a toy head, channel by channel, and what low rank alone would show."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.toy.alignment import Channels


def relative_attention(
    found: Channels,
    query: Float[Tensor, "pairs d_model"],
    attended: Float[Tensor, "pairs d_model"],
    others: Float[Tensor, "pairs others d_model"],
) -> Float[Tensor, "pairs channels"]:
    """The terms, channel by channel, of the logit on the attended key less the mean logit on the others."""
    key = (attended - others.mean(1)).to(found.right.dtype)
    return (query.to(found.left.dtype) @ found.left) * found.values * (key @ found.right)


def rotated(found: Channels, generator: torch.Generator) -> Channels:
    """The same spectrum on randomly turned singular vectors: what low rank alone would show."""
    size = found.left.shape[-2]

    def turn(vectors: Tensor) -> Tensor:
        noise = torch.randn(size, size, generator=generator, dtype=vectors.dtype)
        return torch.linalg.qr(noise).Q @ vectors

    return Channels(turn(found.left), found.values, turn(found.right))
