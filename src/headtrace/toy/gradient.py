"""The loss of the toy model and its gradient, for a stack of models at once.

Tokens meet the weights only through two small matrices: G = W^T W reconstructs (ReLU(f G + b)) and
A = W^T W_Q^T W_K W attends (f_r A f_s). So the large products are with G and A, the gradient with respect to
them is two more products, and the rest of the chain rule happens on matrices of a few hundred numbers.

Every token has one more strength, which is always 1: it carries the bias through the same products, and it
restores itself exactly, so it adds nothing to the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.toy.data import BatchShape
from headtrace.toy.setting import Setting
from headtrace.toy.weights import Weights


@dataclass(frozen=True)
class Losses:
    """Means over tokens and queries. `attention` is a cross-entropy, so `floor` is the least it can be."""

    reconstruction: Float[Tensor, " models"]
    attention: Float[Tensor, " models"]
    floor: Float[Tensor, " models"]


@dataclass(frozen=True)
class Batch:
    """Strengths of the tokens of one step, and room for what is computed from them.

    The room is kept from step to step: fresh memory costs more than the arithmetic done in it.
    """

    strengths: Float[Tensor, "models tokens strengths"]
    restored: Float[Tensor, "models tokens strengths"]
    error: Float[Tensor, "models tokens strengths"]
    weighted: Float[Tensor, "models context queries strengths"]
    shape: BatchShape

    @classmethod
    def empty(cls, models: int, shape: BatchShape) -> Batch:
        tokens = (models, shape.tokens, shape.strengths)
        keys = (models, shape.context, shape.queries, shape.strengths)
        return cls(torch.ones(tokens), torch.empty(tokens), torch.empty(tokens), torch.empty(keys), shape)

    def first(self, models: int) -> Batch:
        """The same memory for at most this many models."""
        part = slice(models)
        return Batch(
            self.strengths[part], self.restored[part], self.error[part], self.weighted[part], self.shape
        )

    @property
    def queries(self) -> Float[Tensor, "models queries strengths"]:
        return self.strengths[:, : self.shape.queries]

    @property
    def keys(self) -> Float[Tensor, "models context queries strengths"]:
        return self.strengths[:, self.shape.queries :].unflatten(1, (self.shape.context, -1))

    def scores(
        self, attention: Float[Tensor, "models strengths strengths"]
    ) -> Float[Tensor, "models context queries"]:
        """f_r A f_s for each query and each of its keys."""
        sought = torch.bmm(self.queries, attention).unsqueeze(1)
        # A product with a vector of ones is several times faster than a sum over a short last axis.
        return torch.mul(self.keys, sought, out=self.weighted) @ sought.new_ones(sought.shape[-1])


def teacher(settings: Sequence[Setting]) -> Float[Tensor, "models strengths strengths"]:
    """The target logits T of each model, with a row and column of zeros for the strength that is always 1."""
    return torch.nn.functional.pad(torch.stack([setting.target() for setting in settings]), (0, 1, 0, 1))


@dataclass(frozen=True)
class _Products:
    restore: Float[Tensor, "models strengths strengths"]
    sought: Float[Tensor, "models d_head features"]
    offered: Float[Tensor, "models d_head features"]
    attention: Float[Tensor, "models strengths strengths"]

    @classmethod
    def of(cls, weights: Weights) -> _Products:
        """G with the bias as last row, W_Q W, W_K W, and A, from one product of all vectors with W."""
        vectors, n = weights.vectors, weights.n_features
        inner = torch.bmm(vectors, vectors[:, :n].transpose(1, 2))
        sought, offered = inner[:, n : n + weights.d_head], inner[:, n + weights.d_head :]
        restore = torch.zeros(len(inner), n + 1, n + 1)
        restore[:, :n, :n] = inner[:, :n]
        restore[:, n, :n] = weights.bias
        restore[:, n, n] = 1
        attention = torch.zeros_like(restore)
        attention[:, :n, :n] = torch.bmm(sought.transpose(1, 2), offered)
        return cls(restore, sought, offered, attention)


def losses(weights: Weights, batch: Batch, target: Float[Tensor, "models strengths strengths"]) -> Losses:
    """Squared error summed over features and averaged over tokens; cross-entropy averaged over queries."""
    products = _Products.of(weights)
    restored = torch.bmm(batch.strengths, products.restore, out=batch.restored).clamp_(min=0)
    error = torch.sub(restored, batch.strengths, out=batch.error)
    log_head = batch.scores(products.attention).log_softmax(1)
    log_wanted = batch.scores(target).log_softmax(1)
    wanted = log_wanted.exp()
    return Losses(
        reconstruction=error.square().sum(2).mean(1),
        attention=-(wanted * log_head).sum(1).mean(1),
        floor=-(wanted * log_wanted).sum(1).mean(1),
    )


def write_gradient(
    gradient: Weights,
    weights: Weights,
    batch: Batch,
    target: Float[Tensor, "models strengths strengths"],
    attention_weight: Float[Tensor, "models 1 1"],
) -> None:
    """Write d(reconstruction + lambda attention)/d(weights) into `gradient`."""
    n, end, shape = weights.n_features, weights.n_features + weights.d_head, batch.shape
    products = _Products.of(weights)
    restored = torch.bmm(batch.strengths, products.restore, out=batch.restored).clamp_(min=0)
    error = torch.sub(restored, batch.strengths, out=batch.error)
    torch.ops.aten.threshold_backward(error, restored, 0, grad_input=error)
    to_restore = torch.bmm(batch.strengths.transpose(1, 2), error).mul_(2 / shape.tokens)

    miss = batch.scores(products.attention).softmax(1).sub_(batch.scores(target).softmax(1))
    miss.mul_(attention_weight / shape.queries)
    found = torch.mul(batch.keys, miss.unsqueeze(3), out=batch.weighted).sum(1)
    to_attention = torch.bmm(batch.queries.transpose(1, 2), found)[:, :n, :n]

    # The inner products of all vectors have this gradient; the vectors have its symmetric double.
    inner = torch.zeros(len(error), end + weights.d_head, end + weights.d_head)
    inner[:, :n, :n] = to_restore[:, :n, :n]
    inner[:, n:end, :n] = torch.bmm(products.offered, to_attention.transpose(1, 2))
    inner[:, end:, :n] = torch.bmm(products.sought, to_attention)
    gradient.vectors.copy_(torch.bmm(inner + inner.transpose(1, 2), weights.vectors))
    gradient.bias.copy_(to_restore[:, n, :n])
