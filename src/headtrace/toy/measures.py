"""How few channels carry a head's attention: relative attention in the SVD basis, and two measures of it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.toy.alignment import Channels


def sparseness(terms: Float[Tensor, "... n"]) -> Float[Tensor, "..."]:
    """(mean |v|)^2 / mean v^2: 1 when all terms are equal in size, 1/n when only one is not zero.

    >>> sparseness(torch.tensor([3.0, 0.0, 0.0, 0.0]))
    tensor(0.2500)
    """
    return terms.abs().mean(-1).square() / terms.square().mean(-1)


def n_recon(terms: Float[Tensor, "... n"]) -> Int[Tensor, "..."]:
    """How many of the largest terms it takes until their sum reaches the sum of all.

    >>> n_recon(torch.tensor([5.0, 1.0, -1.0]))
    tensor(1)
    """
    partial = terms.sort(dim=-1, descending=True).values.cumsum(-1)
    # The sum in another order may differ by a rounding error; that must not ask for one more term.
    slack = 8 * torch.finfo(terms.dtype).eps * terms.abs().sum(-1, keepdim=True)
    return (partial < terms.sum(-1, keepdim=True) - slack).sum(-1) + 1


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
