"""What heads read of the values upstream of them, for many firings at once.

All prompts that a head is asked about are read in one product: the weights are fetched once. So a reader's vectors lie
together, upstream head by upstream head, and a firing finds its own by the row of the first and the step between heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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

    def mixed(self, strength: Float[Tensor, "all head_up src"]) -> Float[Tensor, "firing head_up d_head"]:
        """Each upstream head's vectors, added up over sources with the strengths of these firings among all."""
        found = torch.einsum("fkgs,kfsgd->fkgd", self._shared(strength), self.of_firings(self.values))
        return found.flatten(1, 2)

    def total(self, strength: Float[Tensor, "all head_up src"]) -> Float[Tensor, "firing d_head"]:
        """All vectors, added up with the strengths of these firings among all."""
        mine = self._shared(strength).permute(1, 0, 3, 2).flatten(2, 3)
        return (mine[:, :, None] @ self.of_firings(self.values).flatten(2, 3))[:, :, 0].sum(dim=0)

    def _shared(self, strength: Float[Tensor, "all head_up src"]) -> Float[Tensor, "firing kv_up group src"]:
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
        one_prompt = all(len(mine) == 1 for mine in prompts.values())
        for reader in composer.read(side, values, into):
            if not one_prompt:
                for block in blocks[reader]:  # at once, as long as the vectors are at hand
                    norms[block.firings], total[block.firings] = block.norms(), block.total(strength)
        if one_prompt:
            numbers = {reader: number for number, reader in enumerate(prompts)}
            alike = rows.view(len(prompts), heads, length, group, d_head)
            norms, total = _of_one_prompt(alike, [numbers[reader] for reader, _ in asked], strength)
        found = [
            (starts[reader] + prompts[reader][prompt] * of_head, len(prompts[reader]) * of_head)
            for reader, prompt in asked
        ]
        first, step = torch.tensor(found, device=rows.device).unbind(dim=1)
        return cls([block for mine in blocks.values() for block in mine], rows, first, step, norms, total)

    @cached_property
    def _numbers(self) -> Int[Tensor, "firing head_component"]:
        """The row of every head component."""
        heads, _, length, group, _ = self.blocks[0].values.shape
        kv, which, src = (torch.arange(n, device=self.rows.device) for n in (heads, group, length))
        inside = which[:, None] + src * group
        return (
            self.first[:, None, None, None] + self.step[:, None, None, None] * kv[:, None, None] + inside
        ).flatten(1)

    def at(
        self, which: Int[Tensor, " active"] | None, component: Int[Tensor, "active n"]
    ) -> Float[Tensor, "active n d_head"]:
        """The vectors of some head components (numbered by head and source) of some firings (None: of all)."""
        numbers = self._numbers if which is None else self._numbers[which]
        number = numbers.gather(1, component)
        return self.rows.index_select(0, number.flatten()).unflatten(0, number.shape)

    def mixed(self, strength: Float[Tensor, "firing head_up src"]) -> Float[Tensor, "firing head_up d_head"]:
        """Each upstream head's vectors, added up over sources with a strength."""
        out = strength.new_empty(*strength.shape[:2], self.rows.shape[-1])
        for block in self.blocks:
            out[block.firings] = block.mixed(strength)
        return out


def _of_one_prompt(
    values: Float[Tensor, "reader kv_up src group d_head"],
    readers: list[int],
    strength: Float[Tensor, "firing head_up src"],
) -> tuple[Float[Tensor, "firing head_up src"], Float[Tensor, "firing d_head"]]:
    """Lengths and sums where every reader was asked about one prompt: of all readers together."""
    norms = torch.linalg.vector_norm(values, dim=-1)
    _, heads, _, group, _ = values.shape
    shared = strength.unflatten(1, (heads, group)).transpose(2, 3).flatten(1)
    flat = values.flatten(1, 3)
    if readers == list(range(len(values))):
        total = (shared[:, None] @ flat)[:, 0]
    else:  # a reader's firings one after another, so that its vectors are not copied for each
        norms = norms.index_select(0, torch.tensor(readers, device=values.device))
        counts = [(reader, len(list(same))) for reader, same in groupby(readers)]
        parts = shared.split([count for _, count in counts])
        total = torch.cat([part @ flat[reader] for part, (reader, _) in zip(parts, counts, strict=True)])
    return norms.transpose(2, 3).flatten(1, 2), total
