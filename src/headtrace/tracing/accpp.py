"""ACC++: why does this head attend here? The smallest set of signals, per side, without which it would not.

Candidates are sorted by attribution and removed one by one until the attention on the source falls below the
threshold: a cumulative sum over sorted contribution rows followed by a softmax. Rows are built for the prefix
only, in growing chunks, for all firings of a layer together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.errors import InputError
from headtrace.tracing.attribution import IG_STEPS, attention_on
from headtrace.tracing.candidates import Candidates, FiringScores, KeyCandidates, QueryCandidates
from headtrace.tracing.causes import Cause, Causes, SideCauses
from headtrace.tracing.methods import Method, register_method
from headtrace.tracing.upstream import Catalogue, Composer, Firings, Upstream, in_chunks

if TYPE_CHECKING:
    from headtrace.models import Recording
    from headtrace.vocabulary import Side, Site

FIRST_CHUNK = 32
"""Candidates that are removed at first: more than most firings need."""
CHUNK_GROWTH = 8
BOUND_SLACK = 1e-3
"""Bounds are sums of float32 numbers, too: this much more makes them bounds whatever the rounding."""


@dataclass(frozen=True)
class ACCpp(Method):
    """Signals by integrated gradients and greedy removal: the default."""

    name: ClassVar[str] = "acc++"
    ig_steps: int = IG_STEPS
    """Intervals of the integrated gradients."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ig_steps < 1:
            raise InputError(f"ig_steps={self.ig_steps}: expected at least 1.")

    @torch.inference_mode()
    def trace(self, recording: Recording, firings: Firings, composer: Composer) -> list[Causes]:
        return in_chunks(recording, firings, composer, self._chunk)

    def _chunk(self, firings: Firings, upstream: Upstream) -> Iterator[Causes]:
        scores = FiringScores.of(upstream.recording, firings, upstream.length, self.ig_steps)
        clean = attention_on(scores.logits, scores.visible, firings.src, scores.cap)
        limits = [self.threshold(n) for n in scores.visible.sum(-1).tolist()]
        limit = torch.tensor(limits, dtype=clean.dtype, device=clean.device)
        query, key = QueryCandidates.of(scores, upstream), KeyCandidates.of(scores, upstream)
        scores.require(query, key)
        removal = remove_greedily(scores, (query, key), clean, limit)
        attention, n, rounding = clean.tolist(), len(firings), scores.rounding(query, key)
        catalogue, channels = upstream.catalogue, scores.a.shape[-1]
        for f, (prompt, site) in enumerate(firings.sites):
            sides: dict[Side, SideCauses] = {
                "query": _collect(removal, f, catalogue, site, site.dest or 0, channels),
                "key": _collect(removal, n + f, catalogue, site, site.src or 0, channels),
            }
            yield Causes(prompt, site, sides, attention[f], limits[f], rounding[f])


@dataclass(frozen=True)
class Removal:
    """The greedy prefix of each side of each firing (all query sides, then all key sides).

    Flat candidate numbers in order of removal, and what each took away.
    """

    chosen: list[list[int]]
    drops: list[list[float]]
    predicted: list[float]
    explained: list[bool]


def remove_greedily(
    scores: FiringScores,
    sides: Sequence[Candidates],
    clean: Float[Tensor, " firing"],
    limit: Float[Tensor, " firing"],
) -> Removal:
    """Remove candidates in order of attribution until the attention on the source is below the limit, on each side."""
    rankings = [Ranking(side) for side in sides]
    n, n_candidates = len(scores.firings), rankings[0].n_candidates
    both = clean.repeat(len(sides))
    every = range(len(both))
    result = Removal([[] for _ in every], [[] for _ in every], both.tolist(), [False] * len(both))
    active = torch.arange(len(both), device=clean.device)
    left, before, which = scores.logits.repeat(len(sides), 1), both, active % n
    done, size = 0, FIRST_CHUNK
    while active.numel() and done < n_candidates:
        end = min(done + size, n_candidates)
        parts = [(ranking, which[active // n == i]) for i, ranking in enumerate(rankings)]
        parts = [(ranking, mine) for ranking, mine in parts if mine.numel()]
        orders = [ranking.largest(mine, end)[:, done:] for ranking, mine in parts]
        rows = [ranking.candidates.rows(mine, o) for (ranking, mine), o in zip(parts, orders, strict=True)]
        order, remaining = torch.cat(orders), left[:, None] - torch.cat(rows).cumsum(dim=1)
        attention = attention_on(remaining, scores.visible[which], scores.firings.src[which], scores.cap)
        below = attention < limit[which, None]
        stops = below.any(dim=1)
        length = torch.where(stops, below.int().argmax(dim=1) + 1, order.shape[1])
        _note(result, active, order, attention, before, length, stops)
        keep = ~stops
        active, left, before = active[keep], remaining[keep, -1], attention[keep, -1]
        which = active % n
        done, size = end, size * CHUNK_GROWTH
    return result


class Ranking:
    """Candidates by falling attribution, as many as are asked for.

    Head components number thousands, and nearly all of them are too weak to matter. Each has a bound on the
    attribution of its channels that costs next to nothing. The k-th largest attribution of all is at least the k-th
    largest of plain components, so exact attributions are computed only for head components whose bound reaches that.
    """

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        catalogue, self.n_channels = candidates.catalogue, candidates.scores.a.shape[-1]
        self.n_plain, self.n_heads = catalogue.n_plain, catalogue.n_components - catalogue.n_plain
        self.n_candidates = catalogue.n_components * self.n_channels
        self.bounds = candidates.bounds() * (1 + BOUND_SLACK)

    def largest(self, active: Int[Tensor, " active"], k: int) -> Int[Tensor, "active k"]:
        """Flat numbers of the k largest attributions in descending order, equal ones in order of their numbers."""
        plain, bounds, which = self.candidates.plain, self.bounds, None
        if active.numel() < len(self.bounds):
            plain, bounds, which = plain[active], bounds[active], active
        components = torch.arange(self.n_plain, device=active.device).expand(len(active), -1)
        there = torch.ones_like(components, dtype=torch.bool)
        if self.n_heads:
            if k <= self.n_plain * self.n_channels:
                at_least = plain.flatten(1).topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
                wanted = bounds >= at_least
            else:
                wanted = torch.ones_like(bounds, dtype=torch.bool)
            chosen, real = _places(wanted)
            if chosen.shape[1]:
                plain = torch.cat((plain, self.candidates.of_heads(which, chosen)), dim=1)
                components = torch.cat((components, chosen + self.n_plain), dim=1)
                there = torch.cat((there, real), dim=1)
        return _largest(components, plain, there, k)


def _places(
    wanted: Bool[Tensor, "firing component"],
) -> tuple[Int[Tensor, "firing n"], Bool[Tensor, "firing n"]]:
    """The places of what is wanted in each row, as many for each row as the fullest has; which of them are real."""
    row, place = wanted.nonzero().unbind(dim=1)
    counts = wanted.sum(dim=1)
    starts = counts.cumsum(0) - counts
    n = torch.arange(int(counts.max()), device=wanted.device)
    chosen = place.new_zeros(len(wanted), len(n))
    chosen[row, torch.arange(len(row), device=row.device) - starts[row]] = place
    return chosen, n < counts[:, None]


def _largest(
    components: Int[Tensor, "firing component"],
    values: Float[Tensor, "firing component channel"],
    there: Bool[Tensor, "firing component"],
    k: int,
) -> Int[Tensor, "firing k"]:
    """Flat numbers of the k largest candidates that are there, descending, equal ones in order of their numbers.

    They all belong to the k components with the largest maxima, so only those are searched.
    """
    n_channels = values.shape[-1]
    if k < values.shape[1]:
        best = values.amax(dim=-1).masked_fill_(~there, -torch.inf).topk(k, dim=1, sorted=False).indices
        components, there = components.gather(1, best), there.gather(1, best)
        values = values.gather(1, best[..., None].expand(-1, -1, n_channels))
    flat = values.masked_fill(~there[..., None], -torch.inf).flatten(1)
    best = flat.topk(min(k, flat.shape[1]), dim=1, sorted=False).indices
    numbers = components.gather(1, best // n_channels) * n_channels + best % n_channels
    numbers, order = numbers.sort(dim=1)
    falling = flat.gather(1, best.gather(1, order)).sort(dim=1, descending=True, stable=True).indices
    return numbers.gather(1, falling)


def _note(
    result: Removal,
    active: Tensor,
    order: Tensor,
    attention: Tensor,
    before: Tensor,
    length: Tensor,
    stops: Tensor,
) -> None:
    """Append this chunk's removals to each firing's prefix."""
    drops = torch.cat((before[:, None], attention[:, :-1]), dim=1) - attention
    order, drops = order[:, : int(length.max())], drops[:, : int(length.max())]
    at_end = attention.gather(1, length[:, None] - 1)[:, 0]
    columns = (
        active.tolist(),
        order.tolist(),
        drops.tolist(),
        length.tolist(),
        at_end.tolist(),
        stops.tolist(),
    )
    for f, numbers, taken, n, left, stopped in zip(*columns, strict=True):
        result.chosen[f].extend(numbers[:n])
        result.drops[f].extend(taken[:n])
        result.predicted[f] = left
        result.explained[f] = stopped


def _collect(
    removal: Removal, f: int, catalogue: Catalogue, site: Site, position: int, n_channels: int
) -> SideCauses:
    """Removals of one firing side, summed by component; strongest first, ties by component number."""
    channels: dict[int, list[int]] = {}
    weight: dict[int, float] = {}
    for number, drop in zip(removal.chosen[f], removal.drops[f], strict=True):
        component, channel = divmod(number, n_channels)
        channels.setdefault(component, []).append(channel)
        weight[component] = weight.get(component, 0.0) + drop
    # Where everything was removed, components that are not below this firing are among it: they are nothing to it.
    causes = tuple(
        Cause(catalogue.component(c, site).at(position), weight[c], tuple(sorted(channels[c])))
        for c in sorted(weight, key=lambda c: (-weight[c], c))
        if catalogue.is_below(c, site.layer or 0)
    )
    return SideCauses(causes, removal.predicted[f], removal.explained[f])


register_method(ACCpp.name, ACCpp)
