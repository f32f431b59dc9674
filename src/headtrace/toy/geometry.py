"""The arrangement of features among themselves: norms, interference, antipodal pairs, isotropy."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.toy.alignment import cosines

LEAST_NORM = 0.1
"""A model may give a feature up. A shorter one than this has no direction worth measuring."""


def kept(features: Float[Tensor, "d_model features"]) -> Bool[Tensor, " features"]:
    """Which features the model has kept."""
    return features.norm(dim=0) > LEAST_NORM


def antipodal_pairs(features: Float[Tensor, "d_model features"]) -> int:
    """Pairs of kept features that are each other's nearest opposite, at a cosine below -0.9."""
    among = cosines(features[:, kept(features)], features[:, kept(features)])
    opposite = among.argmin(1)
    places = torch.arange(len(opposite))
    mutual = (opposite[opposite] == places) & (among.min(1).values < -0.9)
    return int(mutual.sum()) // 2


def isotropy_error(features: Float[Tensor, "d_model features"]) -> float:
    """||W W^T / c - I||_2 with c the mean eigenvalue of W W^T: 0 when it is a multiple of the identity."""
    moment = features.double() @ features.double().T
    size = len(moment)
    identity = torch.eye(size, dtype=moment.dtype)
    return float(torch.linalg.matrix_norm(moment * (size / moment.trace()) - identity, ord=2))


def interference(features: Float[Tensor, "d_model features"], chosen: list[int]) -> Float[Tensor, " chosen"]:
    """The largest absolute cosine of each chosen feature with any other kept feature."""
    among = cosines(features, features).abs().fill_diagonal_(0)
    return (among * kept(features))[chosen].max(1).values
