"""How well the singular vectors of a head and the features of its model point the same way.

Singular pair k of Omega = U S V^T is expected to carry the feature pair with the k-th highest target logit:
its left vector the query feature, its right vector the key feature. Signs are free, so cosines are absolute.

A pair may also lie on another channel than the expected one, or share a channel with a second pair (features
that are opposites of each other do): `nearest` asks for the best channel, whichever it is.

>>> from headtrace.toy.train import train
>>> aligned = alignment(train([Setting()], seeds=[0], steps=20, snapshots=[0]).of(setting=0, seed=0))
>>> aligned.worst.shape                                               # snapshots, pairs by falling logit
torch.Size([2, 4])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.toy.frames import orthogonal
from headtrace.toy.setting import Setting
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
