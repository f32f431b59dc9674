"""The weights of many toy models in one flat tensor, so that one optimiser step moves them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.toy.data import initial_generator
from headtrace.toy.setting import Setting


@dataclass(frozen=True)
class Weights:
    """Stacked weights of models of one shape.

    `vectors` holds, row under row, the features (columns of W), then the rows of W_Q, then those of W_K:
    everything that lives in the model's space, so that one product gives all inner products at once.

    Models with fewer head dimensions are padded with rows of zeros. A zero row of W_Q meets a zero row of
    W_K, so its gradient is zero and it stays zero: padding changes nothing.
    """

    flat: Float[Tensor, "models parameters"]
    n_features: int
    d_model: int

    @classmethod
    def zeros(cls, models: int, n_features: int, d_model: int, d_head: int) -> Weights:
        """Weights of so many models, all zero."""
        rows = n_features + 2 * d_head
        return cls(torch.zeros(models, rows * d_model + n_features), n_features, d_model)

    @classmethod
    def initial(cls, settings: Sequence[Setting], seeds: Sequence[int]) -> Weights:
        """Xavier-normal weights and zero biases; each model's own seed decides them, whatever its company."""
        d_model, n_features = settings[0].d_model, settings[0].n_features
        weights = cls.zeros(len(settings), n_features, d_model, max(s.d_head for s in settings))
        for index, (setting, seed) in enumerate(zip(settings, seeds, strict=True)):
            generator = initial_generator(seed)
            for place, rows in (
                (weights.vectors[index, :n_features], n_features),
                (weights.query[index, : setting.d_head], setting.d_head),
                (weights.key[index, : setting.d_head], setting.d_head),
            ):
                deviation = setting.initial * (2 / (rows + d_model)) ** 0.5
                place.copy_(torch.from_numpy(generator.standard_normal((rows, d_model)) * deviation))
        return weights

    @property
    def d_head(self) -> int:
        """The dimension of the head."""
        return ((self.flat.shape[1] - self.n_features) // self.d_model - self.n_features) // 2

    @property
    def vectors(self) -> Float[Tensor, "models vectors d_model"]:
        """Feature vectors, then the rows of the query and of the key matrix."""
        return self.flat[:, : -self.n_features].unflatten(1, (-1, self.d_model))

    @property
    def bias(self) -> Float[Tensor, "models features"]:
        """The bias of each feature's reconstruction."""
        return self.flat[:, -self.n_features :]

    @property
    def features(self) -> Float[Tensor, "models d_model features"]:
        """W, a feature per column."""
        return self.vectors[:, : self.n_features].transpose(1, 2)

    @property
    def query(self) -> Float[Tensor, "models d_head d_model"]:
        """The query matrix of each model."""
        return self.vectors[:, self.n_features : self.n_features + self.d_head]

    @property
    def key(self) -> Float[Tensor, "models d_head d_model"]:
        """The key matrix of each model."""
        return self.vectors[:, self.n_features + self.d_head :]

    def with_flat(self, flat: Float[Tensor, "some parameters"]) -> Weights:
        """Weights of the same shape over other numbers, for example a part of these."""
        return Weights(flat, self.n_features, self.d_model)
