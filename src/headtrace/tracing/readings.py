"""What heads read of the values of upstream heads, ``v W_O W``: three factors, multiplied in the cheaper order.

``W_O W`` is the same for all prompts: composed once per model, if that fits into memory, it costs least. In a large
model and a short prompt it is cheaper to write into the residual first, ``v W_O``, once for all the heads that read it.
All prompts of a reader are read in one product, so that its weights are fetched once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.vocabulary import AttentionSide

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.models.weights import FoldedWeights

COMPOSED_BYTES = 1_000_000_000
"""Composed weights are kept up to this size; the least recently used are dropped first.

The full set of SmolLM2-135M takes 0.77 GB, that of GPT-2 small 0.31 GB, that of Llama-3.2-1B 2.5 GB.
"""

Reader: TypeAlias = tuple[int, int]
"""Layer, and query head or key-value head: what reads."""
Output: TypeAlias = tuple[Sequence[int], Float[Tensor, "kv_up mine src group d_head"]]
"""The prompts of a reader, and the tensor that what it reads of them is written to."""


@dataclass
class Composer:
    """Reads head writes, through composed weights (``W_O W``) if those are kept or cheaper."""

    model: Model
    kept: dict[tuple[str, int, int], Tensor] = field(default_factory=dict[tuple[str, int, int], Tensor])
    """Composed weights by side, layer and head, in the order of their last use."""
    held: int = 0
    """Bytes that they take."""
    made_from: FoldedWeights | None = None
    lock: Lock = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        m = self.model
        pairs = m.n_heads * m.n_layers * (m.n_layers - 1) // 2 * (m.n_heads + m.n_kv_heads)
        self.all_fit = pairs * m.d_head**2 * torch.finfo(m.dtype).bits // 8 <= COMPOSED_BYTES

    def read(
        self,
        side: AttentionSide,
        values: Float[Tensor, "kv_up prompt src d_head"],
        into: Mapping[Reader, Output],
    ) -> Iterator[Reader]:
        """Write what each reader reads of all heads upstream of it, in its prompts (zero for heads that are not
        upstream), and yield the readers one by one as they are done. Heads that share values are read together."""
        weights, n_kv = self.model.weights, self.model.n_kv_heads
        if weights is not self.made_from:  # the model's weights were changed
            self.kept, self.held, self.made_from = {}, 0, weights
        for (layer, _), (_, out) in into.items():
            if layer * n_kv < len(values):
                out[layer * n_kv :] = 0.0
        d_model, d_head = weights.W_Q.shape[-2:]
        if not self.all_fit and values.shape[2] * (d_model - d_head) < d_head * d_model:
            for prompt in dict.fromkeys(prompt for prompts, _ in into.values() for prompt in prompts):
                mine = {
                    reader: out[:, list(prompts).index(prompt)]
                    for reader, (prompts, out) in into.items()
                    if prompt in prompts
                }
                self._through_residual(side, values[:, prompt], mine)
            yield from into
            return
        for (layer, head), (prompts, out) in into.items():
            below, first = layer * n_kv, prompts[0]
            if list(prompts) == list(range(first, first + len(prompts))):  # neighbours: without a copy
                own = values[:below, first : first + len(prompts)]
            else:
                own = torch.cat([values[:below, prompt : prompt + 1] for prompt in prompts], dim=1)
            own, composed = own.flatten(1, 2), self._composed(side, layer, head)
            torch.bmm(own, composed, out=out[:below].view(below, own.shape[1], composed.shape[2]))
            yield layer, head

    def _through_residual(
        self,
        side: AttentionSide,
        values: Float[Tensor, "kv_up src d_head"],
        into: dict[Reader, Float[Tensor, "kv_up src group d_head"]],
    ) -> None:
        """``(v W_O) W``, upstream layer by upstream layer: what a layer wrote is computed once for all its readers."""
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


@dataclass(frozen=True)
class Readings:
    """Upstream heads' value vectors as read by some firings' heads; equal prompts and readers are computed once.

    A reader's vectors are stored together, by upstream value head, prompt, source and query head. A firing finds its
    own by the row of the first and the step between value heads.
    """

    rows: Float[Tensor, "row d_head"]
    """The vectors of all readers."""
    numbers: Int[Tensor, "firing head_component"]
    """The row of every head component."""
    norms: Float[Tensor, "firing head_up src"]
    """The length of each vector."""
    total: Float[Tensor, "firing d_head"]
    """The sum of all vectors, times the strengths that they are written with."""

    @classmethod
    def of(
        cls,
        composer: Composer,
        side: AttentionSide,
        values: Float[Tensor, "kv_up prompt src d_head"],
        readers: Sequence[tuple[Reader, int]],
        strength: Float[Tensor, "firing head_up src"],
    ) -> Readings:
        """Read the values upstream of each firing, given its reader and prompt."""
        heads, _, length, d_head = values.shape
        group = composer.model.weights.group
        prompts: dict[Reader, dict[int, int]] = {}  # of each reader, with their places among them
        for reader, prompt in readers:
            mine = prompts.setdefault(reader, {})
            mine.setdefault(prompt, len(mine))
        per_head = length * group
        rows = values.new_empty(sum(map(len, prompts.values())) * heads * per_head, d_head)
        into, starts, end = dict[Reader, Output](), dict[Reader, int](), 0
        for reader, mine in prompts.items():
            start, end = end, end + len(mine) * heads * per_head
            starts[reader] = start
            into[reader] = list(mine), rows[start:end].view(heads, len(mine), length, group, d_head)
        firings: dict[
            Reader, list[tuple[slice, list[int]]]
        ] = {}  # of each reader, with the places of their prompts
        done = 0
        for reader, together in groupby(readers, key=itemgetter(0)):
            places = [prompts[reader][prompt] for _, prompt in together]
            firings.setdefault(reader, []).append((slice(done, done + len(places)), places))
            done += len(places)
        shared = strength.unflatten(1, (heads, group)).transpose(2, 3)
        total = strength.new_empty(len(strength), d_head)
        if all(len(mine) == 1 for mine in prompts.values()):  # one size for all readers: lengths in one go
            for reader in composer.read(side, values, into):
                for some, _ in firings[reader]:
                    total[some] = shared[some].flatten(1) @ into[reader][1].flatten(0, 3)
            norms = torch.linalg.vector_norm(rows.view(len(prompts), heads, length, group, d_head), dim=-1)
            places = {reader: place for place, reader in enumerate(prompts)}
            which = [places[reader] for reader, _ in readers]
            if which != list(range(len(prompts))):
                norms = norms.index_select(0, torch.tensor(which, device=norms.device))
            norms = norms.transpose(2, 3).flatten(1, 2)
        else:
            norms = torch.empty_like(strength)
            for reader in composer.read(side, values, into):
                out = into[reader][1]
                lengths = torch.linalg.vector_norm(out, dim=-1)
                for some, places in firings[reader]:
                    own, n = out, lengths
                    if places != list(range(out.shape[1])):
                        which = torch.tensor(places, device=out.device)
                        own, n = out.index_select(1, which), lengths.index_select(1, which)
                    norms[some] = n.permute(1, 0, 3, 2).flatten(1, 2)
                    times = shared[some].transpose(0, 1).flatten(2, 3)[:, :, None]
                    total[some] = (times @ own.flatten(2, 3))[:, :, 0].sum(dim=0)
        found = [
            (starts[reader] + prompts[reader][prompt] * per_head, len(prompts[reader]) * per_head)
            for reader, prompt in readers
        ]
        first, step = torch.tensor(found, device=rows.device)[..., None, None, None].unbind(dim=1)
        kv, which, src = (torch.arange(n, device=rows.device) for n in (heads, group, length))
        numbers = first + step * kv[:, None, None] + which[:, None] + src * group
        return cls(rows, numbers.flatten(1), norms, total)

    def at(
        self, which: Int[Tensor, " active"] | None, component: Int[Tensor, "active n"]
    ) -> Float[Tensor, "active n d_head"]:
        """The vectors of some head components (numbered by head and source) of some firings (None: of all)."""
        number = (self.numbers if which is None else self.numbers[which]).gather(1, component)
        return self.rows.index_select(0, number.flatten()).unflatten(0, number.shape)

    def mixed(self, strength: Float[Tensor, "firing head_up src"]) -> Float[Tensor, "firing head_up d_head"]:
        """Each upstream head's vectors, summed over sources with a strength."""
        vectors = self.rows.index_select(0, self.numbers.flatten()).unflatten(0, strength.shape)
        return (strength[:, :, None] @ vectors)[:, :, 0]
