"""What a channel reads through the embedding: the tokens whose own embeddings lie most along it.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> reads = channel_reads(model, 0, [(1, 3)], most=4)[0]              # L0H1, channel 3
>>> len(reads.query), len(reads.opposite_key)
(4, 4)

A token's embedding, normed as the head's layer would norm it, times the head's query (or key) projection, in the basis
of its channels. Both sides have two ends: a pair scores where the coefficients of both sides have the same sign, so
what the query's high end looks for is at the key's high end, and likewise the low ones (``opposite``). Positions do not
enter: for rotary models this is the score of a token with itself at a distance of zero; biases, learned positions and
the scales of QK-norm are left out. Later layers also read what others have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.channels.terms import exact_channels
from headtrace.models.devices import rounded, values_of
from headtrace.models.weights import norm_eps, norm_scale

if TYPE_CHECKING:
    from headtrace.models import Model

Ends = tuple[tuple[int, float], ...]
"""Tokens with their coefficients, strongest first."""


@dataclass(frozen=True)
class Reads:
    """Token ids and coefficients at both ends of both sides of a channel."""

    query: Ends
    key: Ends
    opposite_query: Ends
    opposite_key: Ends


@torch.inference_mode()
def channel_reads(
    model: Model, layer: int, channels: Sequence[tuple[int, int]], most: int = 8
) -> list[Reads]:
    """For some channels (head, channel) of a layer, the tokens at their ends."""
    tokens = _normed(model, layer)
    query, key = (tokens @ side for side in channel_directions(model, layer, channels))
    ends = [_ends(each * sign, most) for sign in (1, -1) for each in (query, key)]
    return [Reads(*(end[place] for end in ends)) for place in range(len(channels))]


def channel_directions(
    model: Model, layer: int, channels: Sequence[tuple[int, int]]
) -> tuple[Float[Tensor, "d_model channel"], Float[Tensor, "d_model channel"]]:
    """What some channels (head, channel) of a layer read in the residual stream: at the destination, at the source."""
    weights, basis = model.weights, exact_channels(model).layer(layer)
    heads, numbers = (list(each) for each in zip(*channels, strict=True))
    to_query = rounded(basis.to_query[heads, :, numbers], like=weights.W_Q)
    to_key = rounded(basis.to_key[heads, :, numbers], like=weights.W_Q)
    groups = [head // weights.group for head in heads]
    query = torch.einsum("ndr,nr->dn", weights.W_Q[layer, heads], to_query)
    return query, torch.einsum("ndr,nr->dn", weights.W_K[layer, groups], to_key)


def _normed(model: Model, layer: int) -> Float[Tensor, "vocab d_model"]:
    """Every token's embedding as a layer's attention would read it."""
    embeddings: Any = model.hf.get_input_embeddings()
    x = values_of(embeddings, "weight", embeddings.weight).detach().to(model.device, model.dtype)
    facts = model.architecture
    if facts.attention_norm is None:
        return x
    x = facts.centred(x)
    norm = model.layers[layer].get_submodule(facts.attention_norm)
    return x / norm_scale(x, norm_eps(norm), facts.norm)[:, None]


def _ends(coefficients: Float[Tensor, "vocab channel"], most: int) -> list[Ends]:
    values, ids = coefficients.topk(min(most, len(coefficients)), dim=0)
    return [
        tuple(zip(tokens, numbers, strict=True))
        for tokens, numbers in zip(ids.T.tolist(), values.T.tolist(), strict=True)
    ]
