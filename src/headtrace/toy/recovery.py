"""Reading the feature pairs off a head: from Omega and a dictionary of features, without the targets.

>>> features = torch.eye(4)                                           # four of them, along the axes
>>> omega = 5 * torch.outer(features[:, 0], features[:, 2]) + 3 * torch.outer(features[:, 3], features[:, 1])
>>> found = recover(omega, features)
>>> found.pairs                                                       # one per channel in use, query and key feature
[(0, 2), (3, 1)]
>>> [round(ahead, 3) for ahead in found.margin]                       # how far each is ahead of the second best
[1.0, 1.0]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from headtrace.toy.alignment import cosines


@dataclass(frozen=True)
class Recovered:
    """A feature pair for each channel that the spectrum says is in use."""

    pairs: list[tuple[int, int]]
    cosine: list[float]
    """The smaller of the two absolute cosines of a match."""
    margin: list[float]
    """How far it is ahead of the best other feature, on the side where that is less."""

    def share_of(self, true: set[tuple[int, int]]) -> float:
        """The share of the true pairs that were found."""
        return len(true & set(self.pairs)) / len(true)

    def precision(self, true: set[tuple[int, int]]) -> float:
        """The share of the pairs found that are true."""
        return len(true & set(self.pairs)) / max(1, len(self.pairs))


def channels_in_use(values: Float[Tensor, " channels"]) -> int:
    """Where the spectrum falls most steeply: the number of singular values before its largest ratio.

    >>> channels_in_use(torch.tensor([24.0, 21.0, 0.1, 0.05]))
    2
    """
    if len(values) < 2:
        return len(values)
    # Below a millionth of the largest value, ratios are rounding noise.
    level = values.clamp(min=float(values[0]) * 1e-6)
    return int((level[:-1] / level[1:]).argmax()) + 1


def recover(
    omega: Float[Tensor, "d_model d_model"], features: Float[Tensor, "d_model features"]
) -> Recovered:
    """Match left singular vectors with features, and right ones, each by the best assignment overall."""
    left, values, right = torch.linalg.svd(omega.double())
    used = channels_in_use(values)
    sides: list[tuple[list[int], Tensor, Tensor]] = []
    for vectors in (left[:, :used], right.T[:, :used]):
        likeness = cosines(vectors, features).abs().T
        matched = linear_sum_assignment(-likeness.numpy())[1].tolist()
        places = torch.arange(used)
        best = likeness[places, matched]
        rest = likeness.clone()
        rest[places, matched] = 0
        sides.append((matched, best, best - rest.max(1).values))
    (query, query_best, query_margin), (key, key_best, key_margin) = sides
    return Recovered(
        list(zip(query, key, strict=True)),
        torch.minimum(query_best, key_best).tolist(),
        torch.minimum(query_margin, key_margin).tolist(),
    )


def ideal_omega(
    features: Float[Tensor, "d_model features"], target: Float[Tensor, "features features"]
) -> Float[Tensor, "d_model d_model"]:
    """The head closest to the target logits with these features: W^T Omega W = T by least squares."""
    inverse = torch.linalg.pinv(features.double())
    return inverse.T @ target.double() @ inverse
