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

from headtrace.errors import InputError
from headtrace.interpret.embedding_reads import Ends, channel_directions, channel_reads
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
        signal = shown.signal
        channel = min(signal.channels) if signal.channels else 0  # they are numbered by singular value
        reads = channel_reads(self.model, signal.layer, [(signal.head, channel)], self.tokens)[0]
        sides = ((reads.query, reads.key), (reads.opposite_query, reads.opposite_key))
        rules = Rules(
            tuple(
                Rule((self._condition("destination_token", query), self._condition("source_token", key)))
                for query, key in sides
            )
        )
        ids = written_tokens(self.model, signal, channel, most=5)
        written = ", ".join(f'"{token}"' for token in self.model.token_labels(ids))
        text = f"{rules} Through the unembedding its source side says {written}."
        return Description(text, rules.to_dict())

    def _condition(self, feature: str, tokens: Ends) -> Condition:
        assert self.model is not None
        ids = tuple(token for token, _ in tokens)
        return Condition(feature, ids, tuple(self.model.token_labels(ids)))


@torch.inference_mode()
def written_tokens(model: Model, signal: ScoredSignal, channel: int, most: int) -> list[int]:
    """The tokens whose unembeddings lie most along what a channel reads at the source."""
    _, key = channel_directions(model, signal.layer, [(signal.head, channel)])
    along = model.weights.W_U @ (model.weights.final_gain * key[:, 0])
    return along.topk(min(most, len(along))).indices.tolist()


register_explainer(Vocabulary.name, Vocabulary)
