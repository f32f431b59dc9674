"""What a channel reads through the embedding: the tokens whose own embeddings lie furthest along its directions.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> reads = channel_reads(model, 0, [(1, 3)], most=4)[0]              # L0H1, channel 3
>>> len(reads.query), len(reads.opposite_key)
(4, 4)

The coefficient of a token is its embedding, normalised as the head's layer would, times the head's query (or key)
projection, in the basis of its channels. A pair scores high where the coefficients of both sides have the same sign: so
the tokens at the positive end of the query go with those at the positive end of the key, and the negative ends
(``opposite``) with each other. Positions do not enter: for rotary models this is the score at distance zero; biases,
learned positions and the scales of QK-norm are left out.

The explainer ``vocabulary`` describes a signal by these tokens. It sees only the embedding, not what layers in between
have written, which from the middle of a model on is most of what a head reads: expect its descriptions to fail there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.channels.terms import exact_channels
from headtrace.errors import InputError
from headtrace.interpret.explainers import Description, Explainer, RunContext, register_explainer
from headtrace.interpret.rules import PairCondition, Rule, Rules
from headtrace.interpret.scored_signals import SignalExamples
from headtrace.models.devices import rounded, values_of
from headtrace.models.weights import norm_eps, norm_scale

if TYPE_CHECKING:
    from typing_extensions import Self

    from headtrace.models import Model

TokenCoefficients = tuple[tuple[int, float], ...]
"""Token ids with their coefficients, strongest first."""


@dataclass(frozen=True)
class ChannelReads:
    """The tokens at both ends of both sides of a channel."""

    query: TokenCoefficients
    key: TokenCoefficients
    opposite_query: TokenCoefficients
    opposite_key: TokenCoefficients


@torch.inference_mode()
def channel_reads(
    model: Model, layer: int, channels: Sequence[tuple[int, int]], most: int = 8
) -> list[ChannelReads]:
    """For some channels (head, channel) of a layer, the ``most`` tokens at each of their ends."""
    embedding: Any = model.hf.get_input_embeddings()
    x = values_of(embedding, "weight", embedding.weight).detach().to(model.device, model.dtype)
    facts = model.architecture
    if facts.attention_norm is not None:
        x = facts.centred(x)
        norm = model.layers[layer].get_submodule(facts.attention_norm)
        x = x / norm_scale(x, norm_eps(norm), facts.norm)[:, None]
    query, key = (x @ side for side in channel_directions(model, layer, channels))
    ends: list[list[TokenCoefficients]] = []
    for coefficients in (query, key, -query, -key):
        values, ids = coefficients.topk(min(most, len(coefficients)), dim=0)
        columns = zip(ids.T.tolist(), values.T.tolist(), strict=True)
        ends.append([tuple(zip(tokens, numbers, strict=True)) for tokens, numbers in columns])
    return [ChannelReads(*each) for each in zip(*ends, strict=True)]


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


@dataclass(frozen=True)
class Vocabulary(Explainer):
    """Names the tokens that a signal's strongest channel reads most, on both sides and with both signs."""

    name: ClassVar[str] = "vocabulary"

    tokens: int = 10
    """How many tokens to name on each side."""
    model: Model | None = None
    """The model whose weights are read; a run provides it."""

    def prepare(self, context: RunContext) -> Self:
        return self if context.model is None else replace(self, model=context.model)

    @torch.inference_mode()
    def explain(self, shown: SignalExamples) -> Description | None:
        model, signal = self.model, shown.signal
        if model is None:
            raise InputError("The explainer 'vocabulary' reads weights: give it a model.")
        channel = (signal.head, min(signal.channels, default=0))  # channels are numbered by singular value

        def tokens_are(feature: str, tokens: TokenCoefficients) -> PairCondition:
            ids = tuple(token for token, _ in tokens)
            return PairCondition(feature, ids, tuple(model.token_labels(ids)))

        (reads,) = channel_reads(model, signal.layer, [channel], self.tokens)
        ends = ((reads.query, reads.key), (reads.opposite_query, reads.opposite_key))
        rules = Rules(
            tuple(
                Rule((tokens_are("destination_token", query), tokens_are("source_token", key)))
                for query, key in ends
            )
        )
        # What the channel's source side would add to the output, if it were unembedded at once.
        _, key = channel_directions(model, signal.layer, [channel])
        logits = model.weights.W_U @ (model.weights.final_gain * key[:, 0])
        promoted = model.output_labels(logits.topk(min(5, len(logits))).indices.tolist())
        written = ", ".join(f'"{token}"' for token in promoted)
        return Description(
            f"{rules} Through the unembedding its source side says {written}.", rules.to_dict()
        )


register_explainer(Vocabulary.name, Vocabulary)
