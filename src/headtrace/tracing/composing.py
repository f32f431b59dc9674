"""What heads read of upstream heads' values: ``v W_O W``, three factors that can be multiplied in two orders.

``W_O W`` is the same for all prompts: composed once per model where that fits into memory, it costs least. In a large
model and a short prompt it is cheaper to write into the residual first, ``v W_O``, once for all the heads that read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.vocabulary import AttentionSide

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.models.weights import FoldedWeights

COMPOSED_BYTES = 1_000_000_000
"""Composed weights are kept up to this much; what was not used for longest goes first.

The full set of SmolLM2-135M takes 0.77 GB, that of GPT-2 small 0.31 GB, that of Llama-3.2-1B 2.5 GB.
"""

Reader: TypeAlias = tuple[int, int]
"""Layer, and query head or key-value head: what reads."""


@dataclass(frozen=True)
class Asked:
    """The prompts that a reader is asked about, and where what it reads goes."""

    prompts: tuple[int, ...]
    out: Float[Tensor, "kv_up mine src group d_head"]

    def among(self, values: Float[Tensor, "kv_up prompt src d_head"]) -> Tensor:
        """The values of these prompts, without a copy where they are neighbours."""
        first, n = self.prompts[0], len(self.prompts)
        if self.prompts == tuple(range(first, first + n)):
            return values[:, first : first + n]
        return torch.cat([values[:, prompt : prompt + 1] for prompt in self.prompts], dim=1)


def _of_prompt(into: Mapping[Reader, Asked], prompt: int) -> dict[Reader, Tensor]:
    """Where what is read of one prompt goes."""
    return {
        reader: asked.out[:, asked.prompts.index(prompt)]
        for reader, asked in into.items()
        if prompt in asked.prompts
    }


@dataclass
class Composer:
    """Readings of head writes, through composed weights (``W_O W``) where those are kept or cheaper."""

    model: Model
    kept: dict[tuple[str, int, int], Tensor] = field(default_factory=dict[tuple[str, int, int], Tensor])
    """In the order of their last use."""
    held: int = 0
    """Bytes that they take."""
    made_from: FoldedWeights | None = None
    lock: Lock = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        m = self.model
        pairs = m.n_heads * m.n_layers * (m.n_layers - 1) // 2 * (m.n_heads + m.n_kv_heads)
        width = torch.finfo(m.dtype).bits // 8
        self.all_fit = pairs * m.d_head**2 * width <= COMPOSED_BYTES

    def read(
        self,
        side: AttentionSide,
        values: Float[Tensor, "kv_up prompt src d_head"],
        into: Mapping[Reader, Asked],
    ) -> Iterator[Reader]:
        """What each reader reads of all heads upstream of it, in its prompts; zero of those that are not.

        Heads that share values are read together. Readers are given as they are done.
        """
        weights = self.model.weights
        if weights is not self.made_from:  # the model's weights were changed
            self.kept, self.held, self.made_from = {}, 0, weights
        for (layer, _), asked in into.items():
            if layer * self.model.n_kv_heads < len(values):
                asked.out[layer * self.model.n_kv_heads :] = 0.0
        d_model, d_head = weights.W_Q.shape[-2:]
        tokens = values.shape[2]
        if not self.all_fit and tokens * (d_model - d_head) < d_head * d_model:
            for prompt in dict.fromkeys(prompt for asked in into.values() for prompt in asked.prompts):
                self._through_residual(side, values[:, prompt], _of_prompt(into, prompt))
            yield from into
            return
        for (layer, head), asked in into.items():
            below = layer * self.model.n_kv_heads
            mine, composed = asked.among(values[:below]).flatten(1, 2), self._composed(side, layer, head)
            torch.bmm(mine, composed, out=asked.out[:below].view(below, mine.shape[1], composed.shape[2]))
            yield layer, head

    def _through_residual(
        self,
        side: AttentionSide,
        values: Float[Tensor, "kv_up src d_head"],
        into: dict[Reader, Float[Tensor, "kv_up src group d_head"]],
    ) -> None:
        """``(v W_O) W``, upstream layer by upstream layer: what a layer wrote is there once for all its readers."""
        weights, n_kv = self.model.weights, self.model.n_kv_heads
        readers = sorted(into, reverse=True)
        W = torch.cat([self._reading(side, *reader) for reader in readers], dim=1)
        for layer in range(readers[0][0]):
            heads = slice(layer * n_kv, (layer + 1) * n_kv)
            above = [reader for reader in readers if reader[0] > layer]
            writes = values[heads, None] @ weights.W_O[layer].unflatten(0, (n_kv, -1))
            read = writes @ W[:, : len(above) * values.shape[-1]]
            for reader, part in zip(above, read.chunk(len(above), dim=-1), strict=True):
                into[reader][heads] = part.transpose(1, 2)

    def _reading(self, side: str, layer: int, head: int) -> Float[Tensor, "d_model d_head"]:
        weights = self.model.weights
        return weights.W_Q[layer, head] if side == "query" else weights.W_K[layer, head]

    def _composed(self, side: str, layer: int, head: int) -> Float[Tensor, "kv_up d_head_up group_d_head"]:
        """For every upstream value head, what is read through each of the query heads that share it, side by side."""
        key = (side, layer, head)
        with self.lock:
            composed = self.kept.pop(key, None)
            if composed is not None:
                self.kept[key] = composed
                return composed
        each = self.model.weights.W_O[:layer].flatten(0, 1) @ self._reading(side, layer, head)
        shared = each.unflatten(0, (layer * self.model.n_kv_heads, self.model.weights.group))
        composed = shared.transpose(1, 2).flatten(2, 3)
        with self.lock:
            if key not in self.kept:
                self.held += composed.nbytes
            self.kept[key] = composed
            while self.held > COMPOSED_BYTES and len(self.kept) > 1:
                self.held -= self.kept.pop(next(iter(self.kept))).nbytes
        return composed
