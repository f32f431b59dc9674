"""What a toy model is asked to learn: its sizes, its data and the feature pairs its head should attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import InputError


class Pair(NamedTuple):
    """The head should attend when `query` is in the query token and `key` in the key token."""

    query: int
    key: int
    logit: float


FOUR_PAIRS = (Pair(0, 4, 24.0), Pair(1, 5, 21.0), Pair(2, 6, 18.0), Pair(3, 7, 15.0))


def falling_pairs(count: int, highest: float) -> tuple[Pair, ...]:
    """Pairs (i, i + count) whose target logits fall by one from `highest`.

    >>> falling_pairs(2, 26)
    (Pair(query=0, key=2, logit=26), Pair(query=1, key=3, logit=25))
    """
    return tuple(Pair(i, i + count, highest - i) for i in range(count))


@dataclass(frozen=True)
class Setting:
    """One toy model. The defaults are the paper's defaults for its sweeps, with its four feature pairs."""

    pairs: tuple[Pair, ...] = FOUR_PAIRS
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
    def ordered_pairs(self) -> tuple[Pair, ...]:
        """The pairs by falling target logit: pair number k is the one expected on singular pair k."""
        return tuple(sorted(self.pairs, key=lambda pair: -pair.logit))

    def target(self) -> Float[Tensor, "features features"]:
        """T: what feature i in the query and feature j in the key should add to the logit."""
        target = torch.zeros(self.n_features, self.n_features)
        for pair in self.pairs:
            target[pair.query, pair.key] = pair.logit
        return target
