"""ACC++: why does this head attend here? The smallest set of signals, per side, without which it would not.

Candidates are sorted by attribution and removed one by one until the attention on the source falls below the
threshold: a cumulative sum over sorted contribution rows followed by a softmax. Rows are built for the prefix
only, in growing chunks, for all firings of a layer together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.errors import InputError
from headtrace.tracing.attribution import IG_STEPS, attention_on
from headtrace.tracing.candidates import FiringScores, KeyCandidates, QueryCandidates
from headtrace.tracing.causes import Cause, Causes, SideCauses
from headtrace.tracing.methods import Method, register_method
from headtrace.tracing.upstream import Composer, LayerFirings, Upstream, in_chunks

if TYPE_CHECKING:
    from headtrace.models import Recording

FIRST_CHUNK = 16
"""Candidates that are removed at first: more than most firings need."""
CHUNK_GROWTH = 8
FIRST_LOOK = {"query": 96, "key": 256}
"""Head components whose attributions are computed at first: what most firings of short prompts need."""
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
    def trace(self, recording: Recording, firings: LayerFirings, composer: Composer) -> list[Causes]:
        return in_chunks(recording, firings, composer, self._chunk)

    def _chunk(self, firings: LayerFirings, upstream: Upstream) -> Iterator[Causes]:
        scores = FiringScores.of(upstream.recording, firings, upstream.length, self.ig_steps)
        clean = attention_on(scores.logits, scores.visible, firings.src, scores.cap)
        limits = [self.threshold(n) for n in scores.visible.sum(-1).tolist()]
        limit = torch.tensor(limits, dtype=clean.dtype, device=clean.device)
        query = remove_greedily(scores, QueryCandidates.of(scores, upstream), clean, limit)
        key = remove_greedily(scores, KeyCandidates.of(scores, upstream), clean, limit)
        for f, (prompt, site) in enumerate(firings.sites()):
            sides = {
                "query": _collect(query, f, upstream, site.dest or 0, site.head),
                "key": _collect(key, f, upstream, site.src or 0, site.head),
            }
            yield Causes(prompt, site, sides, float(clean[f]), limits[f])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Removal:
    """The greedy prefix of each firing: flat candidate numbers in order of removal, and what each took away."""

    chosen: list[list[int]]
    drops: list[list[float]]
    predicted: list[float]
    explained: list[bool]
def remove_greedily(
    scores: FiringScores,
    candidates: QueryCandidates | KeyCandidates,
    clean: Float[Tensor, " firing"],
    limit: Float[Tensor, " firing"],
) -> Removal:
    """Remove candidates in order of attribution until the attention on the source is below the limit."""
    ranking = Ranking(candidates)
    n = len(scores.firings)
    result = Removal([[] for _ in range(n)], [[] for _ in range(n)], clean.tolist(), [False] * n)
    active = torch.arange(n, device=clean.device)
    left, before = scores.logits, clean
    done, size = 0, FIRST_CHUNK
    while active.numel() and done < ranking.n_candidates:
        end = min(done + size, ranking.n_candidates)
        order = ranking.largest(active, end)[:, done:]
        rows = candidates.rows(active, order)
        remaining = left[:, None] - rows.cumsum(dim=1)
        visible, src = scores.visible[active], scores.firings.src[active]
        attention = attention_on(remaining, visible, src, scores.cap)
        below = attention < limit[active, None]
        stops = below.any(dim=1)
        length = torch.where(stops, below.int().argmax(dim=1) + 1, order.shape[1])
        _note(result, active, order, attention, before, length, stops)
        keep = ~stops
        active, left, before = active[keep], remaining[keep, -1], attention[keep, -1]
        done, size = end, size * CHUNK_GROWTH
    return result


class Ranking:
    """Candidates by falling attribution, as many as are asked for.

    Head components number thousands, and nearly all of them are too weak to matter. Each has a bound on the attribution
    of its channels that costs next to nothing; exact attributions are computed for those with the largest bounds, then
    for every one whose bound reaches the weakest candidate that was asked for.
    """

    def __init__(self, candidates: QueryCandidates | KeyCandidates) -> None:
        self.candidates = candidates
        catalogue, self.n_channels = candidates.catalogue, candidates.scores.a.shape[-1]
        self.n_plain, self.n_heads = catalogue.n_plain, catalogue.n_components - catalogue.n_plain
        self.n_candidates = catalogue.n_components * self.n_channels
        self.bounds = candidates.bounds() * (1 + BOUND_SLACK)
        self.first_look = min(FIRST_LOOK[candidates.side], self.n_heads)

    def largest(self, active: Int[Tensor, " active"], k: int) -> Int[Tensor, "active k"]:
        """Flat numbers of the k largest attributions in descending order, equal ones in order of their numbers."""
        found, enough = self._among(active, k, self.first_look)
        short = (enough > self.first_look).nonzero()[:, 0]
        while short.numel():
            heads = int(enough[short].max())
            found[short], enough[short] = self._among(active[short], k, heads)
            short = short[enough[short] > heads]
        return found

    def _among(
        self, active: Int[Tensor, " active"], k: int, heads: int
    ) -> tuple[Int[Tensor, "active k"], Int[Tensor, " active"]]:
        """The k largest among some head components, and how many of these have bounds that reach the k-th."""
        bounds = self.bounds[active]
        chosen = bounds.topk(heads, dim=1).indices.sort(dim=1).values
        values = self.candidates.plain[active]
        components = torch.arange(self.n_plain, device=active.device).expand(len(active), -1)
        if heads:
            values = torch.cat((values, self.candidates.of_heads(active, chosen)), dim=1)
            components = torch.cat((components, chosen + self.n_plain), dim=1)
        numbers, best = _largest(components, values, k)
        if numbers.shape[1] < k:  # more are asked for than were looked at
            return numbers.new_zeros(len(active), k), torch.full_like(active, min(k, self.n_heads))
        return numbers, (bounds >= best[:, -1:]).sum(dim=1)


def _largest(
    components: Int[Tensor, "firing component"], values: Float[Tensor, "firing component channel"], k: int
) -> tuple[Int[Tensor, "firing k"], Float[Tensor, "firing k"]]:
    """Flat numbers and values of the k largest candidates, descending, equal ones in order of their numbers.

    They all belong to the k components with the largest maxima, so only those are searched.
    """
    n_channels = values.shape[-1]
    if k < values.shape[1]:
        best = values.amax(dim=-1).topk(k, dim=1).indices.sort(dim=1).values
        components, values = components.gather(1, best), values.gather(1, best[..., None].expand(-1, -1, n_channels))
    channels = torch.arange(n_channels, device=values.device)
    numbers, flat = (components[..., None] * n_channels + channels).flatten(1), values.flatten(1)
    if k < flat.shape[1]:
        best = flat.topk(k, dim=1).indices.sort(dim=1).values
        numbers, flat = numbers.gather(1, best), flat.gather(1, best)
    ordered = flat.sort(dim=1, descending=True, stable=True)
    return numbers.gather(1, ordered.indices), ordered.values


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


def _collect(removal: Removal, f: int, upstream: Upstream, position: int, head: int | None) -> SideCauses:
    """Removals of one firing side, summed by component; strongest first, ties by component number."""
    n_channels = upstream.recording.model.d_head
    channels: dict[int, list[int]] = {}
    weight: dict[int, float] = {}
    for number, drop in zip(removal.chosen[f], removal.drops[f], strict=True):
        component, channel = divmod(number, n_channels)
        channels.setdefault(component, []).append(channel)
        weight[component] = weight.get(component, 0.0) + drop
    causes = [
        Cause(upstream.catalogue.component(c, head).at(position), weight[c], tuple(sorted(channels[c])))
        for c in sorted(weight, key=lambda c: (-weight[c], c))
    ]
    return SideCauses(tuple(causes), removal.predicted[f], removal.explained[f])


register_method(ACCpp.name, ACCpp)
