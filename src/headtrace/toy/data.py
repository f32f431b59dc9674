"""Feature strengths: what is in each token, drawn from a stream that only its seed and shape decide.

All settings of one seed read the same uniform numbers, so that between two settings of a sweep nothing
changes but the setting, and a model trained alone sees what it sees in an ensemble.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

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
