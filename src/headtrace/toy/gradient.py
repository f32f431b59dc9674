"""The loss of the toy model and its gradient, for a stack of models at once.

Tokens meet the weights only through two small matrices: G = W^T W reconstructs (ReLU(f G + b)) and
A = W^T W_Q^T W_K W attends (f_r A f_s). So the large products are with G and A, the gradient with respect to
them is two more products, and the rest of the chain rule happens on matrices of a few hundred numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.toy.data import BatchShape
from headtrace.toy.weights import Weights


@dataclass(frozen=True)
class Losses:
    """Means over tokens and queries. `attention` is a cross-entropy, so `floor` is the least it can be."""

    reconstruction: Float[Tensor, " models"]
    attention: Float[Tensor, " models"]
    floor: Float[Tensor, " models"]


def attention_matrix(weights: Weights) -> Float[Tensor, "models features features"]:
    """A: what feature i in the query and feature j in the key add to the head's logit."""
    return (weights.query @ weights.features).transpose(1, 2) @ (weights.key @ weights.features)


def _scores(
    queries: Float[Tensor, "models queries features"],
    matrix: Float[Tensor, "models features features"],
    keys: Float[Tensor, "models context queries features"],
) -> Float[Tensor, "models context queries"]:
    sought = torch.bmm(queries, matrix).unsqueeze(1)
    # A product with a vector of ones is several times faster than a sum over a short last axis.
    return (keys * sought) @ keys.new_ones(keys.shape[-1])


def _split(strengths: Tensor, shape: BatchShape) -> tuple[Tensor, Tensor]:
    blocks = strengths.view(strengths.shape[0], 1 + shape.context, shape.queries, shape.n_features)
    return blocks[:, 0], blocks[:, 1:]


def losses(
    weights: Weights,
    strengths: Float[Tensor, "models tokens features"],
    target: Float[Tensor, "models features features"],
    shape: BatchShape,
) -> Losses:
    """Squared error summed over features and averaged over tokens; cross-entropy averaged over queries."""
    gram = weights.features.transpose(1, 2) @ weights.features
    restored = torch.baddbmm(weights.bias, strengths, gram).clamp_(min=0)
    queries, keys = _split(strengths, shape)
    log_head = _scores(queries, attention_matrix(weights), keys).log_softmax(1)
    log_wanted = _scores(queries, target, keys).log_softmax(1)
    wanted = log_wanted.exp()
    return Losses(
        reconstruction=(restored - strengths).square().sum(2).mean(1),
        attention=-(wanted * log_head).sum(1).mean(1),
        floor=-(wanted * log_wanted).sum(1).mean(1),
    )


def write_gradient(
    gradient: Weights,
    weights: Weights,
    strengths: Float[Tensor, "models tokens features"],
    target: Float[Tensor, "models features features"],
    attention_weight: Float[Tensor, "models 1 1"],
    shape: BatchShape,
) -> None:
    """Write d(reconstruction + lambda attention)/d(weights) into `gradient`."""
    features = weights.features
    gram = features.transpose(1, 2) @ features
    restored = torch.baddbmm(weights.bias, strengths, gram).clamp_(min=0)
    error = torch.ops.aten.threshold_backward(restored - strengths, restored, 0).mul_(2 / shape.tokens)
    torch.sum(error, 1, keepdim=True, out=gradient.bias)
    to_gram = torch.bmm(strengths.transpose(1, 2), error)

    sought, offered = weights.query @ features, weights.key @ features
    queries, keys = _split(strengths, shape)
    head = _scores(queries, sought.transpose(1, 2) @ offered, keys).softmax(1)
    wanted = _scores(queries, target, keys).softmax(1)
    miss = (head - wanted).mul_(attention_weight / shape.queries)
    to_attention = torch.bmm(queries.transpose(1, 2), (keys * miss.unsqueeze(-1)).sum(1))

    to_sought = offered @ to_attention.transpose(1, 2)
    to_offered = sought @ to_attention
    torch.bmm(to_sought, features.transpose(1, 2), out=gradient.query)
    torch.bmm(to_offered, features.transpose(1, 2), out=gradient.key)
    torch.bmm(features, to_gram + to_gram.transpose(1, 2), out=gradient.features)
    gradient.features.baddbmm_(weights.query.transpose(1, 2), to_sought)
    gradient.features.baddbmm_(weights.key.transpose(1, 2), to_offered)
