"""Feature sets with a known geometry: tight frames, and sets at a chosen distance from one.

A set of N unit vectors in D dimensions is a tight frame (is in isotropic position) when X X^T = (N/D) I.

>>> deviation(harmonic_frame(4, 6, torch.Generator().manual_seed(0))) < 1e-12
True
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def orthogonal(size: int, generator: torch.Generator) -> Float[Tensor, "size size"]:
    """A random rotation or reflection."""
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q


def unit_columns(vectors: Float[Tensor, "d n"]) -> Float[Tensor, "d n"]:
    """The same vectors, each of length 1."""
    return vectors / vectors.norm(dim=0, keepdim=True)


def antipodal_frame(d: int, n: int, generator: torch.Generator) -> Float[Tensor, "d n"]:
    """Orthonormal bases, every second one the opposite of the one before; n must be a multiple of d."""
    bases: list[Tensor] = []
    for index in range(n // d):
        bases.append(-bases[-1] if index % 2 else orthogonal(d, generator))
    return torch.cat(bases, dim=1)


def harmonic_frame(d: int, n: int, generator: torch.Generator) -> Float[Tensor, "d n"]:
    """Cosines and sines of d/2 frequencies at n points of a circle, turned at random; d is even, n > d."""
    points = torch.arange(n, dtype=torch.float64) * (2 * torch.pi / n)
    angles = torch.outer(torch.arange(1, d // 2 + 1, dtype=torch.float64), points)
    return orthogonal(d, generator) @ torch.cat([angles.cos(), angles.sin()]) * (2 / d) ** 0.5


def relaxed_frame(d: int, n: int, generator: torch.Generator, rounds: int = 5000) -> Float[Tensor, "d n"]:
    """Random unit vectors moved, by turns, to the nearest tight set and back to unit length.

    With few rounds the set is only near a tight frame.
    """
    vectors = unit_columns(torch.randn(d, n, generator=generator, dtype=torch.float64))
    for _ in range(rounds):
        left, _, right = torch.linalg.svd(vectors, full_matrices=False)
        vectors = unit_columns(left @ right)
        if deviation(vectors) < 1e-13:
            break
    return vectors


FRAMES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "antipodal": antipodal_frame,
    "harmonic": harmonic_frame,
    "relaxed": relaxed_frame,
}


def pushed_frame(d: int, n: int, noise: float, generator: torch.Generator) -> Float[Tensor, "d n"]:
    """A harmonic frame whose vectors are pushed at random by `noise` and brought back to unit length."""
    push = torch.randn(d, n, generator=generator, dtype=torch.float64) / d**0.5
    return unit_columns(harmonic_frame(d, n, generator) + noise * push)


def deviation(vectors: Float[Tensor, "d n"]) -> float:
    """||E||_2 of X X^T = (N/D)(I + E): 0 for a tight frame."""
    d, n = vectors.shape
    scaled = vectors @ vectors.T * (d / n)
    return float(torch.linalg.matrix_norm(scaled - torch.eye(d, dtype=vectors.dtype), ord=2))
