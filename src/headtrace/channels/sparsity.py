"""How sparse a decomposition is, the controls that say whether that means anything, and which channels count as one.

>>> import torch
>>> signal_set(torch.tensor([5.0, 1.0, 0.5, -2.0]))          # noise: 0.5 + 1 - 2 <= 0
tensor([ True, False, False, False])

Two controls, since there are two questions.

- ``"basis"``: is the singular basis special among all bases for this very score? The same logit is decomposed
  in randomly rotated bases, ``Omega = (U S^1/2 R)(V S^1/2 R)^T``: the terms change, their sum does not.
- ``"spectrum"``: would any head of this spectrum and rank look sparse? U and V are rotated independently,
  ``Omega' = (U P) S (V Q)^T``, and the same tokens are put to this other head; its logit is another one.

A head of rank one is sparse under ``"spectrum"`` too, but not under ``"basis"``: sparsity that is more than
low rank must stand against both.

Channels whose singular values are nearly equal are one channel: within such a group the SVD's basis is arbitrary: any
rotation of the singular vectors is as good, and rounding decides which one comes out. What is determined is the
subspace. So groups are ranked, removed, named and counted as wholes: contributions of a group's channels are summed at
its first channel, and a signal in a group lists all its channels, whose projector is the same whatever the basis.

>>> first_of_group(torch.tensor([3.0, 2.0, 2.0, 1.0]))
tensor([0, 1, 1, 3])
>>> summed(torch.tensor([3.0, 0.5, 1.0, 1.0]), torch.tensor([0, 1, 1, 3]))
tensor([3.0000, 1.5000, 0.0000, 1.0000])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.channels.svd import RANK_TOLERANCE
from headtrace.measures import n_recon, sparseness
from headtrace.models.devices import on_host

Control = Literal["basis", "spectrum"]
CONTROLS: tuple[Control, ...] = ("basis", "spectrum")

CHUNK_NUMBERS = 20_000_000
"""Rotated terms are made in chunks of firings of about this many numbers."""


def signal_set(terms: Float[Tensor, "*batch n"]) -> Bool[Tensor, "*batch n"]:
    """Which terms are signal: all but the largest set whose sum is <= 0 (smallest terms first).

    For a negative total the signs are mirrored, so the signal is then the few terms that make it negative.
    """
    total = terms.sum(dim=-1, keepdim=True)
    mirrored = torch.where(total < 0, -terms, terms)
    ordered, places = mirrored.sort(dim=-1)
    signal = torch.empty_like(ordered, dtype=torch.bool)
    signal.scatter_(-1, places, (ordered.cumsum(dim=-1) > 0) & (ordered > 0))
    return signal


@dataclass(frozen=True, eq=False)
class RotationControl:
    """Sparseness and ``n_recon`` of some firings under many random rotations."""

    control: Control
    sparseness: Float[Tensor, "rotation firing"]
    n_recon: Int[Tensor, "rotation firing"]

    @property
    def mean_sparseness(self) -> Float[Tensor, " firing"]:
        """By firing, the mean over rotations of the sparseness."""
        return self.sparseness.mean(dim=0)

    @property
    def mean_n_recon(self) -> Float[Tensor, " firing"]:
        """By firing, the mean over rotations of ``n_recon``."""
        return self.n_recon.double().mean(dim=0)

    def interval(self, level: float = 0.95) -> tuple[Float[Tensor, " firing"], Float[Tensor, " firing"]]:
        """Between which values the given share of the rotations' sparseness lies, for each firing."""
        tail = (1 - level) / 2
        low, high = torch.quantile(self.sparseness, self.sparseness.new_tensor([tail, 1 - tail]), dim=0)
        return low, high


def random_rotations(n: int, size: int, generator: torch.Generator) -> Float[Tensor, "n size size"]:
    """Orthogonal matrices, uniform over all of them."""
    Q, R = torch.linalg.qr(torch.randn(n, size, size, generator=generator, dtype=torch.float64))
    return Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None]


def rotated_terms(
    query: Float[Tensor, "firing channel"],
    key: Float[Tensor, "firing channel"],
    singular_values: Float[Tensor, "firing channel"],
    rotations: tuple[Float[Tensor, "rotation channel channel"], Float[Tensor, "rotation channel channel"]],
    control: Control,
) -> Float[Tensor, "rotation firing channel"]:
    """Terms after rotation; ``query`` carries the singular values (as in `ModelChannels`)."""
    P, Q = rotations
    if control == "basis":
        root = singular_values.sqrt()
        return ((query / root) @ P) * ((key * root) @ P)
    return ((query / singular_values) @ P) * singular_values * (key @ Q)


def rotation_control(
    query: Float[Tensor, "firing channel"],
    key: Float[Tensor, "firing channel"],
    singular_values: Float[Tensor, "firing channel"],
    rank: Int[Tensor, " firing"],
    *,
    rotations: int = 100,
    control: Control = "basis",
    seed: int = 0,
) -> RotationControl:
    """Rotate the channels of every firing many times (within the head's rank) and measure again."""
    found = torch.empty(rotations, len(query), dtype=torch.float64)
    counts = torch.empty(rotations, len(query), dtype=torch.long)
    query, key, singular_values = (on_host(t) for t in (query, key, singular_values))
    rank = rank.cpu()
    for r in rank.unique().tolist():
        same = (rank == r).nonzero()[:, 0]
        if r == 0:  # a head without any channel
            found[:, same], counts[:, same] = 1.0, 0
            continue
        generator = torch.Generator().manual_seed(seed)
        draws = random_rotations(rotations, r, generator), random_rotations(rotations, r, generator)
        for rows in same.split(max(1, CHUNK_NUMBERS // max(1, rotations * r))):
            terms = rotated_terms(query[rows, :r], key[rows, :r], singular_values[rows, :r], draws, control)
            if control == "spectrum":  # another logit, of either sign: its size is what counts
                terms = terms * torch.where(terms.sum(dim=-1, keepdim=True) < 0, -1.0, 1.0)
            found[:, rows], counts[:, rows] = sparseness(terms), n_recon(terms)
    return RotationControl(control, found, counts)


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
