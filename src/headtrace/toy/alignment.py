"""How well the singular vectors of a head and the features of its model point the same way.

Singular pair k of Omega = U S V^T is expected to carry the feature pair with the k-th highest target logit:
its left vector the query feature, its right vector the key feature. Signs are free, so cosines are absolute.

A pair may also lie on another channel than the expected one, or share a channel with a second pair (features
that are opposites of each other do): `nearest` asks for the best channel, whichever it is.

>>> from headtrace.toy.train import train
>>> aligned = alignment(train([Setting()], seeds=[0], steps=20, snapshots=[0]).of(setting=0, seed=0))
>>> aligned.worst.shape                                               # snapshots, pairs by falling logit
torch.Size([2, 4])

`interference`, `antipodal_pairs` and `isotropy_error` measure how features are arranged among themselves. `recover`
reads the feature pairs off a head, from Omega and a dictionary of features, without the targets:

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
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from headtrace.toy.model import Setting
from headtrace.toy.theory import orthogonal
from headtrace.toy.train import ToyModel


@dataclass(frozen=True)
class Channels:
    """The singular pairs of one head, or of a stack of heads; vectors are columns."""

    left: Float[Tensor, "... d_model channels"]
    values: Float[Tensor, "... channels"]
    right: Float[Tensor, "... d_model channels"]

    def __getitem__(self, head: int) -> Channels:
        """One head of a stack."""
        return Channels(self.left[head], self.values[head], self.right[head])

    def terms(
        self, query: Float[Tensor, "pairs d_model"], key: Float[Tensor, "pairs d_model"]
    ) -> Float[Tensor, "pairs channels"]:
        """What each channel of one head adds to the logit of a query and a key."""
        return (query.double() @ self.left) * self.values * (key.double() @ self.right)

    def rotated(self, generator: torch.Generator) -> Channels:
        """The same spectrum on randomly turned singular vectors: what low rank alone would show."""
        size = self.left.shape[-2]
        return Channels(
            orthogonal(size, generator) @ self.left, self.values, orthogonal(size, generator) @ self.right
        )


@dataclass(frozen=True)
class Alignment:
    """Cosines and singular values of the expected matches, over pairs by falling logit."""

    query: Float[Tensor, "... pairs"]
    key: Float[Tensor, "... pairs"]
    values: Float[Tensor, "... pairs"]
    logits: Float[Tensor, " pairs"]
    nearest: Float[Tensor, "... pairs"]
    """The smaller of a pair's two cosines on the channel where it is largest."""
    channel: Int[Tensor, "... pairs"]
    """That channel."""

    @property
    def worst(self) -> Float[Tensor, "... pairs"]:
        """The smaller of a pair's two cosines."""
        return torch.minimum(self.query, self.key)

    @property
    def value_error(self) -> Float[Tensor, "... pairs"]:
        """How far each singular value is from its target logit, as a share of the target."""
        return (self.values / self.logits - 1).abs()


def channels(
    query: Float[Tensor, "... d_head d_model"], key: Float[Tensor, "... d_head d_model"]
) -> Channels:
    """The singular pairs of W_Q^T W_K, largest first, in double precision."""
    query, key = query.double(), key.double()
    left, values, right = torch.linalg.svd(query.transpose(-1, -2) @ key)
    keep = query.shape[-2]
    return Channels(left[..., :keep], values[..., :keep], right.transpose(-1, -2)[..., :keep])


def cosines(
    vectors: Float[Tensor, "... d_model channels"], features: Float[Tensor, "... d_model features"]
) -> Float[Tensor, "... features channels"]:
    """Signed cosines of every feature with every vector."""
    vectors, features = vectors.double(), features.double()
    vectors = vectors / vectors.norm(dim=-2, keepdim=True)
    # A feature that was given up has no direction: its cosines are 0, not undefined.
    features = features / features.norm(dim=-2, keepdim=True).clamp(min=1e-12)
    return features.transpose(-1, -2) @ vectors


def align(setting: Setting, features: Float[Tensor, "... d_model features"], found: Channels) -> Alignment:
    """Feature pair k (by falling logit) against singular pair k."""
    pairs = setting.ordered_pairs[: found.values.shape[-1]]
    places = list(range(len(pairs)))
    query = cosines(found.left, features)[..., [pair.query for pair in pairs], :].abs()
    key = cosines(found.right, features)[..., [pair.key for pair in pairs], :].abs()
    best = torch.minimum(query, key).max(-1)
    return Alignment(
        query[..., places, places],
        key[..., places, places],
        found.values[..., : len(pairs)],
        torch.tensor([pair.logit for pair in pairs], dtype=torch.float64),
        best.values,
        best.indices,
    )


def alignment(model: ToyModel) -> Alignment:
    """The alignment of a model at each of its snapshots; the last row is the trained model."""
    return align(model.setting, model.features, channels(model.query, model.key))


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
