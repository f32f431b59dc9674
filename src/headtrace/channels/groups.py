"""Channels whose singular values are nearly equal are one channel.

Within such a group the SVD's basis is arbitrary: any rotation of the singular vectors is as good, and rounding decides
which one comes out. What is determined is the subspace. So groups are ranked, removed, named and counted as wholes:
contributions of a group's channels are summed at its first channel, and a signal in a group lists all its channels,
whose projector is the same whatever the basis.

>>> first_of_group(torch.tensor([3.0, 2.0, 2.0, 1.0]))
tensor([0, 1, 1, 3])
>>> summed(torch.tensor([3.0, 0.5, 1.0, 1.0]), torch.tensor([0, 1, 1, 3]))
tensor([3.0000, 1.5000, 0.0000, 1.0000])
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.channels.svd import RANK_TOLERANCE

NEARLY_EQUAL = 2e-6
"""Neighbouring singular values that differ by less than this share are equal to rounding: float32 weights carry seven
digits, and equal values come out a few 1e-7 apart. In trained heads neighbours differ by 1e-3 to 1e-1."""


def first_of_group(singular_values: Float[Tensor, "*heads channel"]) -> Int[Tensor, "*heads channel"]:
    """The first channel of the group that each channel belongs to: itself, where no neighbour is nearly equal.

    Values must fall; those that count as zero (beyond the head's rank) are in no group.
    """
    larger, smaller = singular_values[..., :-1], singular_values[..., 1:]
    joined = (larger - smaller <= NEARLY_EQUAL * larger) & (
        RANK_TOLERANCE * singular_values[..., :1] < smaller
    )
    number = torch.arange(singular_values.shape[-1], device=singular_values.device)
    starts = torch.nn.functional.pad(~joined, (1, 0), value=True)
    return torch.where(starts, number, 0).cummax(dim=-1).values


def groups_or_none(singular_values: Float[Tensor, "*heads channel"]) -> Int[Tensor, "*heads channel"] | None:
    """`first_of_group`, or None where every channel stands alone, as in nearly all trained heads."""
    first = first_of_group(singular_values)
    return None if bool((first == torch.arange(first.shape[-1], device=first.device)).all()) else first


def summed(
    values: Float[Tensor, "*rest channel"], first: Int[Tensor, "*#rest channel"]
) -> Float[Tensor, "*rest channel"]:
    """Values of channels summed by group at the group's first channel, zero at its others."""
    return torch.zeros_like(values).scatter_add(-1, first.expand_as(values), values)


def equal_channels(singular_values: Float[Tensor, " channel"]) -> tuple[tuple[int, ...], ...]:
    """The groups of one head's channels that have more than one member.

    >>> equal_channels(torch.tensor([3.0, 2.0, 2.0, 1.0]))
    ((1, 2),)
    """
    first = first_of_group(singular_values).tolist()
    groups = (tuple(k for k, leader in enumerate(first) if leader == each) for each in dict.fromkeys(first))
    return tuple(group for group in groups if len(group) > 1)


def along_own(
    values: Float[Tensor, "*rest channel"], first: Int[Tensor, "*rest channel"] | None
) -> Float[Tensor, "*rest channel"]:
    """The direction of some coefficients within each group of channels: their signs, where channels stand alone."""
    if first is None:
        return values.sign()
    size = summed(values.square(), first).gather(-1, first).sqrt()
    return torch.where(size > 0, values / size, values.sign())


def members(first: Int[Tensor, "firing channel"]) -> Int[Tensor, "firing channel most"]:
    """For every channel that is the first of its group the channels of the group, else none; filled up with -1."""
    number = torch.arange(first.shape[-1], device=first.device)
    inside = first[:, None, :] == number[:, None]
    most = int(inside.sum(-1).max())
    order = inside.int().argsort(dim=-1, descending=True, stable=True)[..., :most]
    return order.masked_fill(~inside.gather(-1, order), -1)
