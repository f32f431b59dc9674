"""Scores of many signals at every token pair of a prompt, as products of channel coefficients.

>>> import headtrace
>>> from headtrace.interpret.signals import find_signals
>>> model = headtrace.load("builtin")
>>> recording = model.record("When Mary and John went to the store, John gave a drink to")
>>> every = "+".join(map(str, range(32)))
>>> (block,) = Scorer(model, find_signals(model, f"L1H2:{every}")).blocks(15)
>>> scores = block.scores(recording, 0)                               # all channels together: the attention logit
>>> torch.allclose(scores[0], recording.raw_logits(1)[0, 2], atol=1e-3)
True

Queries and keys are taken as attention uses them: after biases, QK-norm and rotary positions. So a score is exact for
any of them, and the scores of all channels sum to the attention logit before any softcap (of a rank-deficient head: to
what its channels carry of it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.channels.terms import exact_channels
from headtrace.models.devices import exact, rounded

if TYPE_CHECKING:
    from headtrace.interpret.examples import ScoredSignal
    from headtrace.models import Model, Recording

NUMBERS_AT_ONCE = 1 << 21
"""Scores that are held at once: few enough to stay in a processor's cache."""


@dataclass(frozen=True, eq=False)
class Block:
    """Some signals of one layer, which are scored together."""

    layer: int
    rows: Int[Tensor, " signal"]
    """Their places among all signals, on the host."""
    head: Int[Tensor, " signal"]
    to_query: Float[Tensor, "signal d_head channel"]
    to_key: Float[Tensor, "signal d_head channel"]
    """Directions of the channels of each signal; zero where it has fewer than another one."""

    @torch.inference_mode()
    def scores(self, recording: Recording, prompt: int) -> Float[Tensor, "signal dest src"]:
        """At every pair of a prompt, seen or not. Coefficients are made in float64, where the inverse of an
        ill-conditioned W_K is exact; their products in the model's dtype."""
        length, group = recording.lengths[prompt], recording.model.weights.group
        queries = exact(recording.queries[self.layer, prompt, :, :length])[self.head]
        keys = exact(recording.keys[self.layer, prompt, :, :length])[self.head // group]
        a = (queries @ self.to_query) * recording.scales[self.layer]
        b = keys @ self.to_key
        return rounded(a, like=recording.queries) @ rounded(b, like=recording.queries).mT


@dataclass(frozen=True, eq=False)
class Scorer:
    """All signals, in layers."""

    model: Model
    signals: Sequence[ScoredSignal]

    def blocks(self, length: int) -> list[Block]:
        """The signals in blocks of bounded size for prompts of a length; within a layer those of a size together."""
        at_once = max(1, NUMBERS_AT_ONCE // length**2)
        order = sorted(
            range(len(self.signals)),
            key=lambda row: (self.signals[row].layer, len(self.signals[row].channels), row),
        )
        blocks: list[list[int]] = []
        for row in order:
            last = self.signals[blocks[-1][-1]] if blocks else None
            if last is None or last.layer != self.signals[row].layer or len(blocks[-1]) >= at_once:
                blocks.append([])
            blocks[-1].append(row)
        return [self._block(rows) for rows in blocks]

    def _block(self, rows: list[int]) -> Block:
        chosen = [self.signals[row] for row in rows]
        layer, width = chosen[0].layer, max(len(signal.channels) for signal in chosen)
        channels = exact_channels(self.model).layer(layer)
        shape = (len(rows), self.model.d_head, width)
        to_query, to_key = (channels.to_query.new_zeros(shape) for _ in range(2))
        for place, signal in enumerate(chosen):
            mine = list(signal.channels)
            to_query[place, :, : len(mine)] = channels.to_query[signal.head][:, mine]
            to_key[place, :, : len(mine)] = channels.to_key[signal.head][:, mine]
        device = channels.to_query.device
        heads = torch.tensor([signal.head for signal in chosen], device=device)
        return Block(layer, torch.tensor(rows), heads, to_query, to_key)
