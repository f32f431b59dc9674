"""What heads do over a corpus, as running sums: where they look, and which of their channels make them.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> sums = HeadSums.empty(model)
>>> sums.add(model.record(["When Mary and John went to the store, John gave a drink to"], keep=KEPT))
>>> sorted(sums.measures())
['distance', 'duplicate', 'entropy', 'induction', 'previous', 'self', 'sink']
>>> sums.shares().shape, float(sums.shares()[0, 0].sum().round(decimals=6))
(torch.Size([3, 4, 32]), 1.0)

All are means of attention over destinations after the first token, in [0, 1] but for ``entropy`` (nats) and
``distance`` (tokens, of what is not given to the first token):

- ``sink``: to the first token;
- ``previous``, ``self``: to the token before, to itself;
- ``duplicate``: to earlier occurrences of the same token, where there are any;
- ``induction``: to tokens that come right after an earlier occurrence of it, where there are any.

The first token is never a duplicate, nor before one: it is a sink. These are taken on text;
`headtrace.tasks.head_scores` has scores on random tokens said twice.

A channel's **share** is its part of what the head attends by: its terms at the pairs, weighted by attention (first
token left out), less their mean over the sources that are seen; what is positive of it, as a share of all channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.channels.terms import exact_channels
from headtrace.models.devices import exact, on_host

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

KEPT = ("queries", "keys", "patterns")
"""What has to be recorded."""
TENSORS = ("sums", "weights", "parts")
MEASURES = ("sink", "previous", "self", "duplicate", "induction", "entropy", "distance")


@dataclass(eq=False)
class HeadSums:
    """Sums of each measure and what to divide them by; and of the channels' parts."""

    sums: Float[Tensor, "*batch measure layer head"]
    weights: Float[Tensor, "*batch measure layer head"]
    parts: Float[Tensor, "*batch layer head channel"]

    @classmethod
    def empty(cls, model: Model) -> HeadSums:
        shape = (model.n_layers, model.n_heads)
        return cls(
            torch.zeros(len(MEASURES), *shape, dtype=torch.float64),
            torch.zeros(len(MEASURES), *shape, dtype=torch.float64),
            torch.zeros(*shape, model.d_head, dtype=torch.float64),
        )

    @classmethod
    def stacked(cls, several: Sequence[HeadSums]) -> HeadSums:
        """Sums of several batches, side by side: added up in their order, they are the same wherever they were made."""
        return cls(*(torch.stack([getattr(each, name) for each in several]) for name in TENSORS))

    def add_stacked(self, several: HeadSums) -> None:
        """Add up sums of several batches, one after the other."""
        for name in TENSORS:
            for batch in getattr(several, name):
                getattr(self, name).add_(batch)

    def measures(self) -> dict[str, Float[Tensor, "layer head"]]:
        """Each measure by name; not a number where the corpus had no occasion for it."""
        return dict(zip(MEASURES, self.sums / self.weights, strict=True))

    def shares(self) -> Float[Tensor, "layer head channel"]:
        """Of every head, the share of each channel; they sum to one."""
        positive = self.parts.clamp_min(0)
        return positive / positive.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)

    @torch.inference_mode()
    def add(self, recording: Recording) -> None:
        """Count the prompts of a recording."""
        lengths = recording.lengths
        prompts = [
            (prompt, _Places.of(recording.token_ids[prompt, :length]))
            for prompt, length in enumerate(lengths)
            if length > 1
        ]
        for layer in range(recording.model.n_layers):
            patterns = recording.patterns[layer]
            for prompt, places in prompts:
                pattern = patterns[prompt, :, : lengths[prompt], : lengths[prompt]]
                self._add_layer(layer, pattern, places)
                self.parts[layer] += channel_parts(recording, layer, prompt, pattern).cpu()

    def _add_layer(self, layer: int, pattern: Float[Tensor, "head dest src"], places: _Places) -> None:
        """Means over destinations; each mean is weighted by how many of them there are."""
        rest = pattern[:, 1:]
        n = rest.shape[1]
        beyond = rest[..., 1:].sum((-2, -1))
        entropy = -torch.special.xlogy(rest, rest).sum((-2, -1))
        found: dict[str, tuple[Tensor, int]] = {
            "sink": (rest[..., 0].sum(-1), n),
            "previous": (pattern.diagonal(-1, -2, -1)[:, 1:].sum(-1), max(n - 1, 0)),
            "self": (pattern.diagonal(0, -2, -1)[:, 1:].sum(-1), n),
            "duplicate": ((pattern * places.same).sum((-2, -1)), places.n_same),
            "induction": ((pattern * places.after).sum((-2, -1)), places.n_after),
            "entropy": (entropy, n),
            "distance": ((rest * places.distance[1:]).sum((-2, -1)), 0),  # weighted by the attention beyond
        }
        totals = on_host(torch.stack([found[name][0] for name in MEASURES] + [beyond]))
        self.sums[:, layer] += totals[:-1]
        for row, name in enumerate(MEASURES):
            self.weights[row, layer] += totals[-1] if name == "distance" else found[name][1]


@dataclass(frozen=True)
class _Places:
    """Relations between the tokens of a prompt; none to the first token."""

    same: Bool[Tensor, "dest src"]
    after: Bool[Tensor, "dest src"]
    distance: Float[Tensor, "dest src"]
    n_same: int
    n_after: int
    """How many destinations have any."""

    @classmethod
    def of(cls, ids: Int[Tensor, " token"]) -> _Places:
        positions = torch.arange(len(ids), device=ids.device)
        distance = (positions[:, None] - positions).clamp_min(0).float()
        same = (ids[:, None] == ids) & (distance > 0)
        same[:, 0] = False
        after = torch.zeros_like(same)
        after[:, 1:] = same[:, :-1]
        distance[:, 0] = 0
        counts = torch.stack((same, after)).any(-1).sum(-1).tolist()
        return cls(same, after, distance, *counts)


@torch.inference_mode()
def channel_parts(
    recording: Recording, layer: int, prompt: int, pattern: Float[Tensor, "head dest src"]
) -> Float[Tensor, "head channel"]:
    """What each channel does for the attention of a prompt: its terms where the head attends, less their mean."""
    length = recording.lengths[prompt]
    channels = exact_channels(recording.model).layer(layer)
    group = recording.model.weights.group
    queries = exact(recording.queries[layer, prompt, :, :length]) * recording.scales[layer]
    keys = exact(recording.keys[layer, prompt, :, :length]).repeat_interleave(group, dim=0)
    a, b = queries @ channels.to_query, keys @ channels.to_key
    seen = exact(recording.visible[layer][prompt, :length, :length])
    seen[:, 0] = 0
    attended = exact(pattern) * seen
    even = seen / seen.sum(-1, keepdim=True).clamp_min(1)
    return (a * ((attended - attended.sum(-1, keepdim=True) * even) @ b)).sum(1)
