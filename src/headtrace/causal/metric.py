"""The number that a circuit's root explains, read from output logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from headtrace.circuits import Root


@dataclass(frozen=True)
class Metric:
    """Logit difference for a linear root, log-likelihood of the support for a probability root."""

    name: str
    answer: tuple[int, ...]
    wrong: tuple[int, ...] | None
    weights: Float[Tensor, " answer"] | None = None

    @classmethod
    def of(cls, root: Root, clean: Float[Tensor, " vocab"]) -> Metric | None:
        """None for a direction: its vector is not part of a circuit file."""
        if root.kind == "direction":
            return None
        if root.kind == "linear":
            return cls("logit difference", root.answer, root.wrong)
        support = root.support or root.answer
        return cls("log-likelihood", support, None, clean[list(support)].softmax(-1))

    def __call__(self, logits: Float[Tensor, "*n vocab"]) -> Float[Tensor, "*n"]:
        chosen = logits[..., list(self.answer)]
        if self.weights is not None:
            return (chosen - logits.logsumexp(-1, keepdim=True)) @ self.weights
        against = logits if self.wrong is None else logits[..., list(self.wrong)]
        return chosen.mean(-1) - against.mean(-1)
