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
    """Stacked weights: features W, bias b, W_Q and W_K; all are views of `flat`.

    Models with fewer head dimensions are padded with rows of zeros. A zero row of W_Q meets a zero row of
    W_K, so its gradient is zero and it stays zero: padding changes nothing.
    """

    flat: Float[Tensor, "models parameters"]
    features: Float[Tensor, "models d_model features"]
    bias: Float[Tensor, "models 1 features"]
    query: Float[Tensor, "models d_head d_model"]
    key: Float[Tensor, "models d_head d_model"]

    @classmethod
    def zeros(cls, models: int, d_model: int, d_head: int, n_features: int) -> Weights:
        sizes = (d_model * n_features, n_features, d_head * d_model, d_head * d_model)
        return cls.view(torch.zeros(models, sum(sizes)), d_model, d_head, n_features)

    @classmethod
    def view(cls, flat: Tensor, d_model: int, d_head: int, n_features: int) -> Weights:
        models = flat.shape[0]
        sizes = (d_model * n_features, n_features, d_head * d_model, d_head * d_model)
        features, bias, query, key = flat.split(sizes, dim=1)
        return cls(
            flat,
            features.view(models, d_model, n_features),
            bias.view(models, 1, n_features),
            query.view(models, d_head, d_model),
            key.view(models, d_head, d_model),
        )

    @classmethod
    def initial(cls, settings: Sequence[Setting], seeds: Sequence[int]) -> Weights:
        """Xavier-normal weights and zero biases; each model's own seed decides them, whatever its company."""
        d_model, n_features = settings[0].d_model, settings[0].n_features
        weights = cls.zeros(len(settings), d_model, max(s.d_head for s in settings), n_features)
        for index, (setting, seed) in enumerate(zip(settings, seeds, strict=True)):
            generator = initial_generator(seed)
            for matrix, rows in (
                (weights.features, d_model),
                (weights.query, setting.d_head),
                (weights.key, setting.d_head),
            ):
                columns = matrix.shape[2]
                values = generator.standard_normal((rows, columns)) * (2 / (rows + columns)) ** 0.5
                matrix[index, :rows] = torch.from_numpy(values)
        return weights

    def part(self, start: int, stop: int) -> Weights:
        """The models start..stop, still sharing memory."""
        return Weights(
            self.flat[start:stop],
            self.features[start:stop],
            self.bias[start:stop],
            self.query[start:stop],
            self.key[start:stop],
        )

    @property
    def omega(self) -> Float[Tensor, "models d_model d_model"]:
        """W_Q^T W_K, the bilinear form of each head."""
        return self.query.transpose(1, 2) @ self.key
