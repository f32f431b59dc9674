"""ACC++: the smallest set of signals, on each side, without which a head would not attend where it does.

The steps, for all firings of a chunk together:

1. take the logits of each firing apart into candidates, every (component, channel), and check that they sum up
   (`headtrace.tracing.firing`); channels of nearly equal singular values are one (`headtrace.channels.sparsity`);
2. rank the candidates by their attribution, the integrated gradients of the attention on the source (`Ranking`);
3. remove them one by one, largest first, until that attention falls below the threshold (`remove_greedily`), and
   with the last one those that equal it: a cumulative sum over contribution rows followed by a softmax, for the
   prefix only, in growing chunks;
4. sum what was removed by component (`_collect`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.channels.sparsity import members, summed
from headtrace.tracing.attribute_root import carries_nothing
from headtrace.tracing.causes import Cause, Causes, SideCauses
from headtrace.tracing.components import ComponentIndex, Firings, Upstream
from headtrace.tracing.firing import (
    Candidates,
    FiringScores,
    KeyCandidates,
    QueryCandidates,
    attention_on,
    in_chunks,
)
from headtrace.tracing.readings import Composer

if TYPE_CHECKING:
    from headtrace.models import Recording
    from headtrace.tracing.methods import ACCpp
    from headtrace.vocabulary import Side, Site

FIRST_CHUNK = 32
"""Candidates that are removed at first: more than most firings need."""
CHUNK_GROWTH = 8
NOTHING = -1
"""In the place of a candidate that changes no logit."""
EQUAL_ROWS = 512
"""Contributions to logits are equal if they differ by no more than this many times the rounding of the larger one."""
BOUND_SLACK = 1e-3
"""Bounds are sums of float32 numbers, too: this margin makes them bounds whatever the rounding."""


@torch.inference_mode()
def trace_firings(method: ACCpp, recording: Recording, firings: Firings, composer: Composer) -> list[Causes]:
    """Causes of many firings."""
    return in_chunks(
        recording, firings, composer, lambda some, upstream: _trace_chunk(method, some, upstream)
    )


def _trace_chunk(method: ACCpp, firings: Firings, upstream: Upstream) -> Iterator[Causes]:
    scores = FiringScores.of(upstream.recording, firings, upstream.length, method.ig_steps)
    query, key = QueryCandidates.of(scores, upstream), KeyCandidates.of(scores, upstream)
    scores.require(query, key)
    clean = scores.attention(scores.logits)
    limits = [
        method.threshold(n, len(firings.groups.get(site, (0,))))
        for n, site in zip(scores.visible.sum(-1).tolist(), firings.sites, strict=True)
    ]
    limit = torch.tensor(limits, dtype=clean.dtype, device=clean.device)
    removal = remove_greedily(scores, (query, key), clean, limit)
    attention, n, rounding = clean.tolist(), len(firings), scores.rounding(query, key)
    index, first = upstream.index, [*range(scores.a.shape[-1])]
    grouped = None if scores.first is None else scores.first.tolist()
    for f, (prompt, site) in enumerate(firings.sites):
        first = first if grouped is None else grouped[f]
        sides: dict[Side, SideCauses] = {
            "query": _collect(removal, f, index, site, site.dest or 0, first),
            "key": _collect(removal, n + f, index, site, site.src or 0, first),
        }
        yield Causes(prompt, site, sides, attention[f], limits[f], rounding[f])


class Ranking:
    """The largest candidates of one side by attribution.

    Head components number thousands, and nearly all of them are too weak to matter. Each has a bound on the
    attribution of its channels that costs next to nothing. The k-th largest attribution of all is at least the k-th
    largest of non-head components, so exact attributions are computed only for head components whose bound reaches
    that. A group of channels is one candidate, that of its first channel; the others' numbers stand for nothing.
    """

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        index, self.n_channels = candidates.index, candidates.scores.a.shape[-1]
        self.n_non_head, self.has_heads = index.n_non_head, index.n_components > index.n_non_head
        self.n_candidates = index.n_components * self.n_channels
        self.bounds = candidates.bounds() * (1 + BOUND_SLACK)
        self.first, self.non_head = candidates.scores.first, candidates.non_head
        self.members: Int[Tensor, "firing channel most"] | None = None
        if self.first is not None:
            self.members = members(self.first)
            self.non_head = summed(self.non_head, self.first[:, None])
            # A sum over a group is at most its size times the largest.
            self.bounds = self.bounds * (self.members >= 0).sum(-1).amax(-1)[:, None]

    def largest(self, active: Int[Tensor, " active"], k: int) -> Int[Tensor, "active k"]:
        """Flat numbers of the k largest attributions in descending order, equal ones in order of their numbers."""
        values, bounds, which = self.non_head, self.bounds, None
        if active.numel() < len(self.bounds):
            values, bounds, which = values[active], bounds[active], active
        components = torch.arange(self.n_non_head, device=active.device).expand(len(active), -1)
        real = torch.ones_like(components, dtype=torch.bool)
        if self.has_heads:
            possible = torch.ones_like(bounds, dtype=torch.bool)
            if k <= self.n_non_head * self.n_channels:
                possible = bounds >= values.flatten(1).topk(k, dim=1, sorted=False).values.amin(
                    1, keepdim=True
                )
            heads, real_heads = _padded_places(possible)
            if heads.shape[1]:
                found = self.candidates.of_heads(which, heads)
                if self.first is not None:
                    found = summed(found, self.first[active, None])
                values = torch.cat((values, found), dim=1)
                components = torch.cat((components, heads + self.n_non_head), dim=1)
                real = torch.cat((real, real_heads), dim=1)
        if k < values.shape[1]:  # the k largest all belong to the k components with the largest maxima
            best = values.amax(dim=-1).masked_fill_(~real, -torch.inf).topk(k, dim=1, sorted=False).indices
            components, real = components.gather(1, best), real.gather(1, best)
            values = values.gather(1, best[..., None].expand(-1, -1, self.n_channels))
        flat = values.masked_fill(~real[..., None], -torch.inf).flatten(1)
        best = flat.topk(min(k, flat.shape[1]), dim=1, sorted=False).indices
        numbers = components.gather(1, best // self.n_channels) * self.n_channels + best % self.n_channels
        numbers, order = numbers.sort(dim=1)
        falling = flat.gather(1, best.gather(1, order)).sort(dim=1, descending=True, stable=True).indices
        return numbers.gather(1, falling)

    def rows(
        self, which: Int[Tensor, " active"], chosen: Int[Tensor, "active n"]
    ) -> Float[Tensor, "active n token"]:
        """Contribution rows of chosen candidates: over all channels of a group."""
        if self.members is None:
            return self.candidates.rows(which, chosen)
        component, channel = chosen // self.n_channels, chosen % self.n_channels
        inside = self.members[which[:, None], channel]
        total = None
        for member in inside.unbind(-1):
            rows = self.candidates.rows(which, component * self.n_channels + member.clamp_min(0))
            rows = rows * (member >= 0)[..., None]
            total = rows if total is None else total + rows
        assert total is not None
        return total


def _padded_places(
    mask: Bool[Tensor, "firing component"],
) -> tuple[Int[Tensor, "firing n"], Bool[Tensor, "firing n"]]:
    """The places where each row of a mask is true, padded to the longest row; and which of them are not padding."""
    row, place = mask.nonzero().unbind(dim=1)
    counts = mask.sum(dim=1)
    starts = counts.cumsum(0) - counts
    n = torch.arange(int(counts.max()), device=mask.device)
    places = place.new_zeros(len(mask), len(n))
    places[row, torch.arange(len(row), device=row.device) - starts[row]] = place
    return places, n < counts[:, None]


@dataclass(frozen=True)
class Removal:
    """What was removed from each side of each firing (all query sides, then all key sides)."""

    chosen: list[list[int]]
    """Flat candidate numbers in order of removal."""
    drops: list[list[float]]
    """The attention that each removal took away."""
    predicted: list[float]
    """The attention that is left."""
    explained: list[bool]
    """Whether it is below the threshold."""


def remove_greedily(
    scores: FiringScores,
    sides: Sequence[Candidates],
    clean: Float[Tensor, " firing"],
    limit: Float[Tensor, " firing"],
) -> Removal:
    """Remove candidates in order of attribution until the attention on the source is below the limit, on each side."""
    rankings = [Ranking(side) for side in sides]
    n, n_candidates = len(scores.firings), rankings[0].n_candidates
    before = clean.repeat(len(sides))
    every = range(len(before))
    result = Removal([[] for _ in every], [[] for _ in every], before.tolist(), [False] * len(before))
    active = torch.arange(
        len(before), device=clean.device
    )  # sides of firings that are not below the limit yet
    left, which = scores.logits.repeat(len(sides), 1), active % n
    done, size = 0, FIRST_CHUNK
    while active.numel() and done < n_candidates:
        end = min(done + size, n_candidates)
        orders, rows = list[Tensor](), list[Tensor]()
        for side, ranking in enumerate(rankings):
            mine = which[active // n == side]
            if mine.numel():
                orders.append(ranking.largest(mine, end)[:, done:])
                rows.append(ranking.rows(mine, orders[-1]))
        order, removed = torch.cat(orders), torch.cat(rows)
        # What changes no logit beyond rounding (the offset of a head without biases) is no cause of anything.
        rounding = carries_nothing(removed.dtype) * scores.logits.abs().amax(-1)[which, None]
        nothing = removed.abs().amax(-1) <= rounding
        order, removed = order.masked_fill(nothing, NOTHING), removed.masked_fill(nothing[..., None], 0)
        remaining = left[:, None] - removed.cumsum(dim=1)
        attention = attention_on(remaining, scores.visible[which], scores.sources[which], scores.cap)
        below = attention < limit[which, None]
        stops = below.any(dim=1)
        length = torch.where(stops, below.int().argmax(dim=1) + 1, order.shape[1])
        length = _with_equals(removed, length)
        drops = torch.cat((before[:, None], attention[:, :-1]), dim=1) - attention
        longest = int(length.max())
        # Two reads from the device, one of whole numbers and one of others.
        counted = torch.cat(
            (torch.stack((active, length, stops.to(length)), dim=1), order[:, :longest]), dim=1
        )
        measured = torch.cat((attention.gather(1, length[:, None] - 1), drops[:, :longest]), dim=1)
        for (f, n_removed, stopped, *numbers), (at_end, *taken) in zip(
            counted.tolist(), measured.tolist(), strict=True
        ):
            numbers, taken = numbers[:n_removed], taken[:n_removed]
            pairs = [pair for pair in zip(numbers, taken, strict=True) if pair[0] != NOTHING]
            result.chosen[f].extend(number for number, _ in pairs)
            result.drops[f].extend(drop for _, drop in pairs)
            result.predicted[f], result.explained[f] = at_end, bool(stopped)
        keep = ~stops
        active, left, before = active[keep], remaining[keep, -1], attention[keep, -1]
        which = active % n
        done, size = end, size * CHUNK_GROWTH
    return result


def _with_equals(
    removed: Float[Tensor, "active n token"], length: Int[Tensor, " active"]
) -> Int[Tensor, " active"]:
    """Prefixes with all that directly follows their last row and equals it: what takes the same from every logit is a
    cause as much, and which of them comes first is decided by rounding alone."""
    last = removed.gather(1, (length - 1)[:, None, None].expand(-1, 1, removed.shape[-1]))
    rounding = EQUAL_ROWS * torch.finfo(removed.dtype).eps * last.abs().amax(dim=-1)
    equal = (removed - last).abs().amax(dim=-1) <= rounding
    after = torch.arange(removed.shape[1], device=length.device) >= length[:, None]
    return (equal | ~after).cumprod(dim=1).sum(dim=1)


def _collect(
    removal: Removal, f: int, index: ComponentIndex, site: Site, position: int, first: list[int]
) -> SideCauses:
    """Removals of one side of one firing, summed by component; strongest first, ties by component number. ``first`` has
    the first channel of each channel's group: a group is removed, and listed, as a whole."""
    channels: dict[int, list[int]] = {}
    weight: dict[int, float] = {}
    for number, drop in zip(removal.chosen[f], removal.drops[f], strict=True):
        component, channel = divmod(number, len(first))
        own = range(channel, channel + first.count(channel))
        channels.setdefault(component, []).extend(own)
        weight[component] = weight.get(component, 0.0) + drop
    # If everything was removed, that includes components of the chunk that are not below this firing (all zero).
    causes = tuple(
        Cause(index.component(c, site).at(position), weight[c], tuple(sorted(channels[c])))
        for c in sorted(weight, key=lambda c: (-weight[c], c))
        if index.is_below(c, site.layer or 0)
    )
    return SideCauses(causes, removal.predicted[f], removal.explained[f])
