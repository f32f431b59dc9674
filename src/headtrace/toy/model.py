"""Toy models: what they are to learn, the tokens that they read, and their weights.

`Setting` has the sizes of a model, its data and the feature pairs that its head should attend to. Feature strengths are
drawn from a stream that only its seed and shape decide: all settings of one seed read the same uniform numbers, so that
between two settings of a sweep nothing changes but the setting, and a model trained alone sees what it sees in an
ensemble. `Weights` has the weights of many models in one flat tensor, so that one optimiser step moves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import InputError


class FeaturePair(NamedTuple):
    """The head should attend when `query` is in the query token and `key` in the key token."""

    query: int
    key: int
    logit: float


FOUR_PAIRS = (
    FeaturePair(0, 4, 24.0),
    FeaturePair(1, 5, 21.0),
    FeaturePair(2, 6, 18.0),
    FeaturePair(3, 7, 15.0),
)


def falling_pairs(count: int, highest: float) -> tuple[FeaturePair, ...]:
    """Pairs (i, i + count) whose target logits fall by one from `highest`.

    >>> falling_pairs(2, 26)
    (FeaturePair(query=0, key=2, logit=26), FeaturePair(query=1, key=3, logit=25))
    """
    return tuple(FeaturePair(i, i + count, highest - i) for i in range(count))


@dataclass(frozen=True)
class Setting:
    """One toy model. The defaults are the paper's defaults for its sweeps, with its four feature pairs."""

    pairs: tuple[FeaturePair, ...] = FOUR_PAIRS
    n_features: int = 20
    d_model: int = 10
    d_head: int = 10
    attention_weight: float = 4.0
    """Lambda: how much the attention loss counts against the reconstruction loss. 0: no head."""
    context: int = 4
    """m, the number of keys that a query chooses among."""
    probability: float = 0.52
    """p, the chance that a feature is present in a token."""
    initial: float = 1.0
    """The size of all first weights, as a multiple of Xavier's."""

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise InputError(f"probability is {self.probability}; give a number in (0, 1].")
        if not 2 <= self.context <= 512:
            raise InputError(f"context is {self.context}; a head needs 2 to 512 keys to choose among.")
        if not 1 <= self.d_head <= self.d_model:
            raise InputError(f"d_head is {self.d_head}; give 1 to d_model = {self.d_model}.")
        for pair in self.pairs:
            if not (0 <= pair.query < self.n_features and 0 <= pair.key < self.n_features):
                raise InputError(f"{pair} names a feature outside 0..{self.n_features - 1}.")

    @property
    def ordered_pairs(self) -> tuple[FeaturePair, ...]:
        """The pairs by falling target logit: pair number k is the one expected on singular pair k."""
        return tuple(sorted(self.pairs, key=lambda pair: -pair.logit))

    def target(self) -> Float[Tensor, "features features"]:
        """T: what feature i in the query and feature j in the key should add to the logit."""
        target = torch.zeros(self.n_features, self.n_features)
        for pair in self.pairs:
            target[pair.query, pair.key] = pair.logit
        return target


KEYS_PER_STEP = 1024

_INITIAL, _TRAINING, _EVALUATION = 0, 1, 2


@dataclass(frozen=True)
class BatchShape:
    """How the tokens of a step are laid out: the queries, then block by block their keys.

    Strengths are stored feature by feature, a row of tokens each: every sum is then over rows, and every row
    is long.
    """

    context: int
    n_features: int
    keys: int = KEYS_PER_STEP

    @property
    def queries(self) -> int:
        """How many queries a step has, each with a context of its own."""
        return self.keys // self.context

    @property
    def strengths(self) -> int:
        """One per feature, and one that is always 1."""
        return self.n_features + 1

    @property
    def tokens(self) -> int:
        """Queries and keys together."""
        return self.queries * (1 + self.context)


class UniformStream:
    """An endless stream of uniform numbers for one seed and one batch shape."""

    def __init__(self, seed: int, shape: BatchShape, *, evaluation: bool = False) -> None:
        key = [seed, _EVALUATION if evaluation else _TRAINING]
        self._generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))
        self._numbers = np.ones((shape.strengths, shape.tokens), np.float32)

    def draw(self) -> Float[Tensor, "strengths tokens"]:
        """The next batch, with a last row of ones; it shares its memory with the batch before.

        The numbers are the same in double precision, where training is compared with its plain form.
        """
        self._generator.random(out=self._numbers[:-1], dtype=np.float32)
        return torch.from_numpy(self._numbers).to(torch.get_default_dtype())


def strengths(
    uniform: Float[Tensor, "strengths tokens"], probability: float, out: Tensor | None = None
) -> Float[Tensor, "strengths tokens"]:
    """Bernoulli(p) times U(0, 1) from one uniform number u: (u - (1 - p)) / p is positive with probability p,
    and uniform where it is."""
    return torch.sub(uniform, 1 - probability, out=out).clamp_(min=0).mul_(1 / probability)


def initial_generator(seed: int) -> np.random.Generator:
    """The numbers that a model's first weights come from."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, _INITIAL])))


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
        """Weights of several models, all zero."""
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
