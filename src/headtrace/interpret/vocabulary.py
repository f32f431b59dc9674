"""What a signal reads and writes, token by token, through the embedding and the unembedding.

A channel multiplies what it reads at the destination with what it reads at the source: a pair scores high where both
are high, or both are low. The tokens whose embeddings lie furthest along each side say what it reads, those whose
unembeddings do say what it would add to the output, if it were read there at once.

Only the embedding is seen: what layers in between have written, and where tokens stand, is not. From the middle of a
model on that is most of what a head reads, so expect these words to fail there; the judge says where.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import InputError
from headtrace.interpret.examples import ScoredSignal, SignalExamples
from headtrace.interpret.protocols import Description, Explainer, Setting, register_explainer
from headtrace.interpret.rules import Condition, Rule, Rules

if TYPE_CHECKING:
    from headtrace.models import Model


@dataclass(frozen=True)
class Vocabulary(Explainer):
    """Names the tokens that a signal's strongest channel reads most, on both sides and in both signs."""

    name: ClassVar[str] = "vocabulary"

    tokens: int = 10
    """How many tokens to name on each side."""
    model: Model | None = None
    """Whose weights are read; a run gives it."""

    def prepare(self, setting: Setting) -> Vocabulary:
        return self if setting.model is None else replace(self, model=setting.model)

    def explain(self, shown: SignalExamples) -> Description | None:
        if self.model is None:
            raise InputError("The explainer 'vocabulary' reads weights: give it a model.")
        reads = read_through_vocabulary(self.model, shown.signal)
        rules: list[Rule] = []
        for sign in (1, -1):
            query, key = (self._strongest(sign * each) for each in (reads.destination, reads.source))
            rules.append(
                Rule((self._condition("destination_token", query), self._condition("source_token", key)))
            )
        written = ", ".join(f'"{t}"' for t in self.model.token_labels(self._strongest(reads.written)[:5]))
        text = f"{Rules(tuple(rules))} Through the unembedding its source side says {written}."
        return Description(text, Rules(tuple(rules)).to_dict())

    def _strongest(self, values: Float[Tensor, " vocab"]) -> list[int]:
        return values.topk(min(self.tokens, len(values))).indices.tolist()

    def _condition(self, feature: str, ids: list[int]) -> Condition:
        assert self.model is not None
        return Condition(feature, tuple(ids), tuple(self.model.token_labels(ids)))


@dataclass(frozen=True)
class Reads:
    """How far each token of the vocabulary lies along a channel."""

    destination: Float[Tensor, " vocab"]
    source: Float[Tensor, " vocab"]
    written: Float[Tensor, " vocab"]
    """Through the unembedding, along the side of the source."""


@torch.inference_mode()
def read_through_vocabulary(model: Model, signal: ScoredSignal) -> Reads:
    """The strongest of a signal's channels, against every token's embedding and unembedding.

    Embeddings are brought to one length, as the norm before a head does, and not turned by positions.
    """
    if not (signal.layer < model.n_layers and signal.head < model.n_heads):
        raise InputError(f"There is no head {signal.name.split()[0]} in {model!r}.")
    channel = min(signal.channels) if signal.channels else 0  # they are numbered by singular value
    weights, channels = model.weights, model.channels
    W_Q = weights.W_Q[signal.layer, signal.head]
    W_K = weights.W_K[signal.layer, signal.head // weights.group]
    query = W_Q @ channels.to_query[signal.layer, signal.head, :, channel]
    key = W_K @ channels.to_key[signal.layer, signal.head, :, channel]
    embeddings: Tensor = model.hf.get_input_embeddings().weight.detach()  # type: ignore[union-attr]
    lengths = embeddings.norm(dim=-1).clamp_min(torch.finfo(embeddings.dtype).tiny)
    return Reads(
        destination=(embeddings @ query) / lengths,
        source=(embeddings @ key) / lengths,
        written=weights.W_U @ (weights.final_gain * key),
    )


register_explainer(Vocabulary.name, Vocabulary)
