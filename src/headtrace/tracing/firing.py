"""Why does this head attend here? The smallest set of signals, per side, without which it would not.

Candidates are sorted by attribution and removed one by one until the attention on the source falls below the
threshold: a cumulative sum over sorted contribution rows followed by a softmax. Rows are built for the prefix
only, in growing chunks, for all firings of a layer together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.tracing.attribution import IG_STEPS, attention_on
from headtrace.tracing.candidates import FiringScores, KeyCandidates, QueryCandidates
from headtrace.tracing.upstream import Catalogue, Composer, LayerFirings, Upstream
from headtrace.vocabulary import Component, Firing

if TYPE_CHECKING:
    from headtrace.models import Recording

CANDIDATES_AT_ONCE = 3_000_000
"""Firings are traced together as long as their candidates number at most this many (12 MB in float32)."""
LONG_GROUP, LONG_CANDIDATES = 3, 48_000_000
"""Firings of long prompts share the reading of attention patterns: up to three at a time, within 192 MB."""

FIRST_CHUNK = 32
CHUNK_GROWTH = 8

Tau = float | Callable[[int], float] | None


def threshold(tau: Tau, visible_keys: int) -> float:
    """Attention below which a head no longer counts as attending: by default ``min(1, 2.5 / visible keys)``."""
    if tau is None:
        return min(1.0, 2.5 / visible_keys)
    return float(tau(visible_keys)) if callable(tau) else float(tau)


@dataclass(frozen=True)
class Cause:
    """A component whose signal holds up a firing, its channels, and the attention it accounts for."""

    component: Component
    channels: tuple[int, ...]
    weight: float


@dataclass(frozen=True)
class SideCauses:
    """One side of a firing: its causes, and the attention that is left when their signals are removed."""

    causes: tuple[Cause, ...]
    predicted: float | None
    """None where the method makes no prediction (SVT)."""
    explained: bool
    """False if everything was removed and the attention still held."""


@dataclass(frozen=True)
class FiringCauses:
    """A firing and the causes of its query and key side."""

    prompt: int
    firing: Firing
    attention: float
    threshold: float
    query: SideCauses
    key: SideCauses

    @property
    def explained(self) -> bool:
        return self.query.explained and self.key.explained

    def side(self, side: Literal["query", "key"]) -> SideCauses:
        return self.query if side == "query" else self.key


@dataclass(frozen=True)
class _Removal:
    """The greedy prefix of each firing: flat candidate numbers in order of removal, and what each took away."""

    chosen: list[list[int]]
    drops: list[list[float]]
    predicted: list[float]
    explained: list[bool]


@torch.inference_mode()
def trace_firings(
    recording: Recording, firings: LayerFirings, composer: Composer, tau: Tau = None, ig_steps: int = IG_STEPS
) -> list[FiringCauses]:
    """Causes of many firings of one layer."""

    def trace_chunk(chunk: LayerFirings, upstream: Upstream) -> Iterator[FiringCauses]:
        return _trace_chunk(recording, chunk, upstream, tau, ig_steps)

    return in_chunks(recording, firings, composer, trace_chunk)


def in_chunks(
    recording: Recording,
    firings: LayerFirings,
    composer: Composer,
    trace_chunk: Callable[[LayerFirings, Upstream], Iterable[FiringCauses]],
) -> list[FiringCauses]:
    """Trace firings in groups whose candidates fit into memory together."""
    chunks = firing_chunks(recording, firings, composer)
    return [found for chunk, upstream in chunks for found in trace_chunk(chunk, upstream)]


def firing_chunks(
    recording: Recording, firings: LayerFirings, composer: Composer
) -> Iterator[tuple[LayerFirings, Upstream]]:
    """Firings in groups, prompt by prompt and by destination, whose candidates fit into memory together."""
    order = torch.argsort(firings.prompt * recording.token_ids.shape[1] + firings.dest, stable=True)
    dests = firings.dest[order].tolist()
    start = 0
    while start < len(dests):
        end, length = start + 1, dests[start] + 1
        while end < len(dests) and end - start < _at_once(
            recording, firings.layer, max(length, dests[end] + 1)
        ):
            length = max(length, dests[end] + 1)
            end += 1
        yield firings[order[start:end]], Upstream(recording, composer, firings.layer, length)
        start = end


def _at_once(recording: Recording, layer: int, length: int) -> int:
    """How many firings that see ``length`` tokens are traced together."""
    size = Catalogue(layer, recording.model.n_heads, length).n_components * recording.model.d_head
    return max(CANDIDATES_AT_ONCE // size, min(LONG_GROUP, LONG_CANDIDATES // size), 1)


def _trace_chunk(
    recording: Recording, firings: LayerFirings, upstream: Upstream, tau: Tau, ig_steps: int
) -> Iterator[FiringCauses]:
    scores = FiringScores.of(recording, firings, upstream.length, ig_steps)
    clean = attention_on(scores.logits, scores.visible, firings.src, scores.cap)
    limits = [threshold(tau, n) for n in scores.visible.sum(-1).tolist()]
    limit = torch.tensor(limits, dtype=clean.dtype, device=clean.device)
    query = remove_greedily(scores, QueryCandidates.of(scores, upstream), clean, limit)
    key = remove_greedily(scores, KeyCandidates.of(scores, upstream), clean, limit)
    for f, (prompt, firing) in enumerate(firings.named()):
        sides = (_collect(removal, f, upstream, firing.head) for removal in (query, key))
        yield FiringCauses(
            prompt,
            firing,
            float(clean[f]),
            limits[f],
            *sides,  # type: ignore[arg-type]
        )


def remove_greedily(
    scores: FiringScores,
    candidates: QueryCandidates | KeyCandidates,
    clean: Float[Tensor, " firing"],
    limit: Float[Tensor, " firing"],
) -> _Removal:
    """Remove candidates in order of attribution until the attention on the source is below the limit."""
    attributions = candidates.attributions()
    n_candidates = attributions[0].numel()
    n = len(scores.firings)
    result = _Removal([[] for _ in range(n)], [[] for _ in range(n)], clean.tolist(), [False] * n)
    active = torch.arange(n, device=clean.device)
    left, before = scores.logits, clean
    done, size = 0, FIRST_CHUNK
    while active.numel() and done < n_candidates:
        end = min(done + size, n_candidates)
        order = _largest(attributions if active.numel() == n else attributions[active], end)[:, done:]
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


def _largest(attributions: Float[Tensor, "firing component channel"], k: int) -> Int[Tensor, "firing k"]:
    """Flat numbers of the k largest attributions in descending order, equal ones in order of their numbers.

    The k largest candidates all belong to the k components with the largest maxima, so only those are searched.
    """
    n_components, n_channels = attributions.shape[1:]
    if k < n_components:
        components = attributions.amax(dim=-1).topk(k, dim=1).indices.sort(dim=1).values
        among = attributions.gather(1, components[..., None].expand(-1, -1, n_channels)).flatten(1)
        numbers = (
            components[..., None] * n_channels + torch.arange(n_channels, device=components.device)
        ).flatten(1)
    else:
        among = attributions.flatten(1)
        numbers = torch.arange(among.shape[1], device=among.device).expand_as(among)
    if k < among.shape[1]:
        best = among.topk(k, dim=1).indices.sort(dim=1).values
        among, numbers = among.gather(1, best), numbers.gather(1, best)
    return numbers.gather(1, among.sort(dim=1, descending=True, stable=True).indices)


def _note(
    result: _Removal,
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


def _collect(removal: _Removal, f: int, upstream: Upstream, head: int) -> SideCauses:
    """Removals of one firing side, summed by component; strongest first, ties by component number."""
    n_channels = upstream.recording.model.d_head
    channels: dict[int, list[int]] = {}
    weight: dict[int, float] = {}
    for number, drop in zip(removal.chosen[f], removal.drops[f], strict=True):
        component, channel = divmod(number, n_channels)
        channels.setdefault(component, []).append(channel)
        weight[component] = weight.get(component, 0.0) + drop
    causes = [
        Cause(upstream.catalogue.component(c, head), tuple(sorted(channels[c])), weight[c])
        for c in sorted(weight, key=lambda c: (-weight[c], c))
    ]
    return SideCauses(tuple(causes), removal.predicted[f], removal.explained[f])
