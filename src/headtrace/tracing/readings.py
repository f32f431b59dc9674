"""What heads read of the values upstream of them, for many firings at once.

All prompts that a head is asked about are read in one product: the weights are fetched once. So a reader's vectors lie
together, upstream head by upstream head, and a firing finds its own by the row of the first and the step between heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.tracing.composing import Asked, Composer, Reader
from headtrace.vocabulary import AttentionSide


@dataclass(frozen=True)
class Block:
    """The vectors of one reader, and which firings look at them."""

    values: Float[Tensor, "kv_up mine src group d_head"]
    firings: slice
    places: list[int]
    """The prompt of each firing, as a place among the reader's."""

    def of_firings(self, values: Float[Tensor, "kv_up mine *rest"]) -> Float[Tensor, "kv_up firing *rest"]:
        """What belongs to each firing's prompt."""
        own = self.places == list(range(values.shape[1]))
        return values if own else values.index_select(1, torch.tensor(self.places, device=values.device))

    def norms(self) -> Float[Tensor, "firing head_up src"]:
        """The length of each vector."""
        norms = self.of_firings(torch.linalg.vector_norm(self.values, dim=-1))
        return norms.permute(1, 0, 3, 2).flatten(1, 2)

    def mixed(self, strength: Float[Tensor, "firing head_up src"]) -> Float[Tensor, "firing head_up d_head"]:
        """Each upstream head's vectors, added up over sources with the strengths of these firings."""
        found = torch.einsum("fkgs,kfsgd->fkgd", self._shared(strength), self.of_firings(self.values))
        return found.flatten(1, 2)

    def total(self, strength: Float[Tensor, "firing head_up src"]) -> Float[Tensor, "firing d_head"]:
        """All vectors, added up with the strengths of these firings."""
        mine = self._shared(strength).permute(1, 0, 3, 2).flatten(2, 3)
        return (mine[:, :, None] @ self.of_firings(self.values).flatten(2, 3))[:, :, 0].sum(dim=0)

    def _shared(
        self, strength: Float[Tensor, "firing head_up src"]
    ) -> Float[Tensor, "firing kv_up group src"]:
        heads, _, _, group, _ = self.values.shape
        return strength[self.firings].unflatten(1, (heads, group))


@dataclass(frozen=True)
class Readings:
    """Upstream heads' value vectors as read by some firings' heads; equal prompts and readers are computed once."""

    blocks: Sequence[Block]
    rows: Float[Tensor, "row d_head"]
    """The vectors of all blocks."""
    first: Int[Tensor, " firing"]
    """The row of a firing's first upstream head and source."""
    step: Int[Tensor, " firing"]
    """Rows from one upstream value head to the next."""
    norms: Float[Tensor, "firing head_up src"]
    """The length of each vector."""
    total: Float[Tensor, "firing d_head"]
    """All vectors, added up with the strengths that they are written with."""

    @classmethod
    def of(
        cls,
        composer: Composer,
        side: AttentionSide,
        values: Float[Tensor, "kv_up prompt src d_head"],
        asked: Sequence[tuple[Reader, int]],
        strength: Float[Tensor, "firing head_up src"],
    ) -> Readings:
        """What is asked for, a reader and a prompt for each firing."""
        heads, _, length, d_head = values.shape
        group = composer.model.weights.group
        prompts: dict[Reader, dict[int, int]] = {}
        for reader, prompt in asked:
            mine = prompts.setdefault(reader, {})
            mine.setdefault(prompt, len(mine))
        of_head = length * group
        rows = values.new_empty(sum(map(len, prompts.values())) * heads * of_head, d_head)
        start, starts = 0, dict[Reader, int]()
        into: dict[Reader, Asked] = {}
        for reader, mine in prompts.items():
            starts[reader], end = start, start + len(mine) * heads * of_head
            into[reader] = Asked(tuple(mine), rows[start:end].view(heads, len(mine), length, group, d_head))
            start = end
        blocks: dict[Reader, list[Block]] = {}
        done = 0
        for reader, together in groupby(asked, key=itemgetter(0)):
            places = [prompts[reader][prompt] for _, prompt in together]
            firings = slice(done, done + len(places))
            blocks.setdefault(reader, []).append(Block(into[reader].out, firings, places))
            done = firings.stop
        norms, total = torch.empty_like(strength), strength.new_empty(len(strength), d_head)
        for reader in composer.read(side, values, into):
            for block in blocks[reader]:  # at once, as long as the vectors are at hand
                norms[block.firings], total[block.firings] = block.norms(), block.total(strength)
        found = [
            (starts[reader] + prompts[reader][prompt] * of_head, len(prompts[reader]) * of_head)
            for reader, prompt in asked
        ]
        first, step = torch.tensor(found, device=rows.device).unbind(dim=1)
        return cls([block for mine in blocks.values() for block in mine], rows, first, step, norms, total)

    def at(
        self,
        which: Int[Tensor, " active"] | None,
        head_up: Int[Tensor, "active n"],
        src: Int[Tensor, "active n"],
    ) -> Float[Tensor, "active n d_head"]:
        """The vectors of some head components of some firings (None: of all)."""
        first, step = (self.first, self.step) if which is None else (self.first[which], self.step[which])
        group = self.blocks[0].values.shape[3]
        if group > 1:
            head_up, src = head_up // group, src * group + head_up % group
        number = (step[:, None] * head_up).add_(src).add_(first[:, None])
        return self.rows.index_select(0, number.flatten()).view(*number.shape, -1)

    def mixed(self, strength: Float[Tensor, "firing head_up src"]) -> Float[Tensor, "firing head_up d_head"]:
        """Each upstream head's vectors, added up over sources with a strength."""
        out = strength.new_empty(*strength.shape[:2], self.rows.shape[-1])
        for block in self.blocks:
            out[block.firings] = block.mixed(strength)
        return out
