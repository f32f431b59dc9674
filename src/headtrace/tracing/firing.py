"""A firing taken apart: its logits as a sum over (component, channel), on the query side and on the key side.

The steps that all methods share. `FiringScores` has the recorded logits of each firing's row, the channel coefficients
``a`` (query) and ``b`` (keys) with ``logit = scale * sum over k of a_k b_k[t]``, and the attribution vector ``w``. The
candidates are every (component c, channel k), whose contribution rows over the visible keys t are

    query side:  C[c,k][t] = scale * a^c_k * b_k[t]
    key side:    C[c,k][t] = scale * a_k * b^c_k[t]

and whose attribution is ``C . w``. Head components number thousands, so both sides offer a cheap bound on what they can
contribute, and exact numbers for the few that matter. No tensor here has both a candidate axis and two token axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.channels.sparsity import groups_or_none
from headtrace.errors import IdentityError, InputError
from headtrace.models.attention import softcap, softcap_slope
from headtrace.models.identities import tolerance_for
from headtrace.progress import count
from headtrace.tracing.causes import Causes, PromptSite
from headtrace.tracing.components import ChannelRotary, ComponentIndex, Firings, Upstream
from headtrace.tracing.methods import IG_STEPS
from headtrace.tracing.readings import Composer, Readings

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

"""Intervals of the trapezoid rule for integrated gradients."""
CANDIDATES_AT_ONCE = 3_000_000
"""Firings are traced together as long as their candidates number at most this many (12 MB in float32)."""
SHORT = 128
"""Prompts of at most this many tokens are short: composed weights are larger than attention patterns."""
LONG_GROUP, LONG_CANDIDATES = 3, 48_000_000
"""Firings of long prompts share the reading of attention patterns: up to three at a time, within 192 MB."""


# -- attention and its integrated gradients ------------------------------------------------------------------


@lru_cache(maxsize=8)
def _path(steps: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # kept for any later use
        alphas = torch.linspace(0, 1, steps + 1, dtype=dtype, device=device)
        weights = torch.full_like(alphas, 1 / steps)
        weights[0] = weights[-1] = 0.5 / steps
    return alphas, weights


def path_weights(steps: int, like: Tensor) -> tuple[Float[Tensor, " point"], Float[Tensor, " point"]]:
    """Points of the path of integrated gradients, from 0 to 1, and their trapezoid weights."""
    if not isinstance(steps, int) or steps < 1:
        raise InputError(f"ig_steps={steps!r}: expected a whole number of intervals, at least 1.")
    return _path(steps, like.dtype, like.device)


def attribution_vector(
    logits: Float[Tensor, "firing token"],
    visible: Bool[Tensor, "firing token"],
    src: Int[Tensor, " firing"] | Bool[Tensor, "firing token"],
    cap: float | None = None,
    steps: int = IG_STEPS,
) -> Float[Tensor, "firing token"]:
    """Integrated gradients of the attention on the source, as one vector w per firing (zero for hidden keys); with a
    mask, of the attention on several sources together.

    All candidates follow the same straight path from zero logits to the recorded ones, so the attribution of a
    candidate with contribution row C is ``C . w`` with

        w = integral over alpha in [0, 1] of  p_s (e_s - p),    p = softmax(alpha * logits)

    times the derivative of the softcap, if the model has one.
    """
    alphas, weights = path_weights(steps, logits)
    path = alphas[:, None] * logits[:, None]
    scores = softcap(path, cap).masked_fill_(~visible[:, None], -torch.inf)
    p = scores.softmax(dim=-1)
    if src.ndim == 2:
        on_sources = p * src[:, None]
        gradient = on_sources - on_sources.sum(-1, keepdim=True) * p
    else:
        at_src = p.gather(-1, src[:, None, None].expand(-1, p.shape[1], 1))
        gradient = -(at_src * p)
        gradient.scatter_add_(-1, src[:, None, None].expand_as(at_src), at_src)
    if cap is not None:
        gradient *= softcap_slope(path, cap)
    return torch.einsum("a,fat->ft", weights, gradient)


def attention_on(
    logits: Float[Tensor, "firing *any token"],
    visible: Bool[Tensor, "firing token"],
    src: Int[Tensor, " firing"] | Bool[Tensor, "firing token"],
    cap: float | None,
) -> Float[Tensor, "firing *any"]:
    """Attention on each firing's source (or on all that a mask has), for logits before softcap and mask."""
    extra = [1] * (logits.ndim - 2)
    hidden = ~visible.reshape(visible.shape[0], *extra, -1)
    scores = softcap(logits, cap).masked_fill(hidden, -torch.inf)
    if src.ndim == 2:
        others = ~src.reshape(src.shape[0], *extra, -1)
        return (scores.masked_fill(others, -torch.inf).logsumexp(dim=-1) - scores.logsumexp(dim=-1)).exp()
    at_src = src.reshape(-1, *extra, 1).expand(*logits.shape[:-1], 1)
    return (scores.gather(-1, at_src)[..., 0] - scores.logsumexp(dim=-1)).exp()


def _has_groups(model: Model, layer: int) -> bool:
    """Whether a layer has a head with nearly equal singular values: asked once for each layer."""

    # Not inside `cached`: a thread that makes channels holds their lock and may wait for the model's.
    known = model.cached("layers with equal singular values", dict[int, bool])
    if layer not in known:
        heads = torch.arange(model.n_heads, device=model.device)
        channels = model.channels.at(torch.full_like(heads, layer), heads)
        known[layer] = groups_or_none(channels.singular_values) is not None
    return known[layer]


@dataclass(frozen=True)
class FiringScores:
    """What both sides of some firings share: logits, channel coefficients, the attribution vector."""

    recording: Recording
    firings: Firings
    scale: float
    cap: float | None
    logits: Float[Tensor, "firing token"]
    """Recorded logits of each firing's row, before softcap and mask."""
    visible: Bool[Tensor, "firing token"]
    a: Float[Tensor, "firing channel"]
    b: Float[Tensor, "firing token channel"]
    to_query: Float[Tensor, "firing d_head channel"]
    to_key: Float[Tensor, "firing d_head channel"]
    w: Float[Tensor, "firing token"]
    full_rank: Bool[Tensor, " firing"]
    """Whether a firing's head has as many channels as dimensions."""
    first: Int[Tensor, "firing channel"] | None = None
    """The first channel of each channel's group, where some singular values are nearly equal; None: all stand alone."""

    @classmethod
    def of(cls, recording: Recording, firings: Firings, length: int, ig_steps: int) -> FiringScores:
        layer, model, some = firings.layer, recording.model, firings.sites[0][1].layer or 0
        channels = model.channels.at(layer, firings.head)
        to_query, to_key = channels.to_query, channels.to_key
        q = recording.queries[layer, firings.prompt, firings.head, firings.dest]
        k = recording.keys[:, :, :, :length][layer, firings.prompt, firings.head // model.weights.group]
        scale, cap = recording.scales[some], recording.softcaps[some]  # the same in all layers of a chunk
        logits = (k @ q[..., None])[..., 0] * scale
        visible = recording.visible[some][firings.prompt, firings.dest, :length]
        a, b = (q[:, None] @ to_query)[:, 0], k @ to_key
        w = attribution_vector(logits, visible, firings.sources(length), cap, ig_steps)
        full_rank = channels.rank == a.shape[-1]
        first = None
        if any(_has_groups(model, layer) for layer in {site.layer or 0 for _, site in firings.sites}):
            first = groups_or_none(channels.singular_values)
        return cls(
            recording, firings, scale, cap, logits, visible, a, b, to_query, to_key, w, full_rank, first
        )

    @cached_property
    def rotary(self) -> ChannelRotary:
        layer = self.firings.sites[0][1].layer or 0
        return ChannelRotary.of(self.recording, layer, self.firings.prompt, self.logits.shape[1])

    def attention(self, logits: Float[Tensor, "firing token"]) -> Float[Tensor, " firing"]:
        """Attention on each firing's source (or sources) if its row had these logits."""
        return attention_on(logits, self.visible, self.sources, self.cap)

    @cached_property
    def sources(self) -> Int[Tensor, " firing"] | Bool[Tensor, "firing token"]:
        """What attention is explained on: one source for each firing, or a mask where some have several."""
        return self.firings.sources(self.logits.shape[1])

    def require(self, *sides: Candidates) -> None:
        """Check that the channels, and the contributions of each side, sum to the recorded logits."""
        # A rank-deficient head has a remainder outside its channels, which nothing removes.
        channels = ((self.b @ self.a[..., None])[..., 0] * self.scale - self.logits) * self.visible
        channel_error = channels.abs().amax(-1) * self.full_rank
        size = (self.logits * self.visible).abs().amax(-1).clamp_min(1.0)
        errors = torch.stack([channel_error, *(side.error() for side in sides)]) / size
        allowed = tolerance_for(self.recording.model.dtype)
        if bool((errors <= allowed).all()):
            return
        claims = ["the channels do not sum to the recorded logits", *(side.claim for side in sides)]
        errors = torch.nan_to_num(errors, nan=torch.inf)
        which, f = divmod(int(errors.argmax()), errors.shape[1])
        prompt, site = self.firings.sites[f]
        raise IdentityError(
            f"In {site} (prompt {prompt}) {claims[which]}: relative error {float(errors[which, f]):.1e}, "
            f"allowed {allowed:.0e}. Run recording.check() to see whether the model itself adds up."
        )

    def rounding(self, query: QueryCandidates, key: KeyCandidates) -> list[float] | list[None]:
        """In half precision, by how much the attention of each firing would change without what rounding added to its
        query and keys; else None."""
        if not self.recording.model.half:
            return [None] * len(self.firings)
        rounding = slice(query.index.roundings.start, query.index.n_non_head)
        a = self.a - query.non_head_coefficients[:, rounding].sum(dim=1)
        b = self.b - key.non_head_keys[:, rounding].sum(dim=1) @ self.to_key
        without = (b @ a[..., None])[..., 0] * self.scale
        return (self.attention(self.logits) - self.attention(without)).abs().tolist()


# -- candidates ----------------------------------------------------------------------------------------------


class Candidates(ABC):
    """Every (component, channel) of one side of some firings."""

    claim: ClassVar[str]
    """What it would mean if the contributions did not add up."""
    scores: FiringScores
    index: ComponentIndex
    readings: Readings

    @abstractmethod
    def error(self) -> Float[Tensor, " firing"]:
        """How far the contributions of all components are from the recorded logits."""

    @cached_property
    @abstractmethod
    def non_head(self) -> Float[Tensor, "firing non_head channel"]:
        """Attributions of non-head components: embedding, MLPs, biases, offset, rounding."""

    @abstractmethod
    def bounds(self) -> Float[Tensor, "firing head_component"]:
        """No channel of a head component has a larger attribution than this: |x . g| <= |x| |g|."""

    @abstractmethod
    def of_heads(
        self, which: Int[Tensor, " active"] | None, number: Int[Tensor, "active n"]
    ) -> Float[Tensor, "active n channel"]:
        """Attributions of some head components of some firings (None: of all), in all channels."""

    @abstractmethod
    def rows(
        self, which: Int[Tensor, " active"], chosen: Int[Tensor, "active n"]
    ) -> Float[Tensor, "active n token"]:
        """Contribution rows of chosen candidates (flat numbers: component * channels + channel) of some firings."""

    def attributions(self) -> Float[Tensor, "firing component channel"]:
        """All of them: for methods that look at every candidate."""
        n_heads = self.index.n_components - self.index.n_non_head
        numbers = torch.arange(n_heads, device=self.scores.a.device).expand(len(self.scores.firings), -1)
        return torch.cat((self.non_head, self.of_heads(None, numbers)), dim=1)

    def _split(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Component, its number among head components (0 for others) and channel of flat candidate numbers."""
        component, channel = chosen // self.scores.a.shape[-1], chosen % self.scores.a.shape[-1]
        return component, (component - self.index.n_non_head).clamp_min(0), channel


@dataclass(frozen=True)
class QueryCandidates(Candidates):
    """Contribution rows ``scale * a^c_k * b_k[t]``: one coefficient per candidate."""

    claim: ClassVar[str] = "query contributions do not sum to the recorded logits"
    scores: FiringScores
    index: ComponentIndex
    readings: Readings
    basis: Float[Tensor, "firing d_head channel"]
    """From what a component writes at the destination, as the head reads it, to channel coefficients."""
    strength: Float[Tensor, "firing head_up src"]
    """How strongly a head component writes there: its attention, over the frozen scales."""
    non_head_coefficients: Float[Tensor, "firing non_head channel"]

    @classmethod
    def of(cls, scores: FiringScores, upstream: Upstream) -> QueryCandidates:
        rec, firings, layer = scores.recording, scores.firings, scores.firings.layer
        b, d = firings.prompt, firings.dest
        basis = scores.rotary.basis_at(scores.to_query, d)
        if rec.query_scales is not None:
            basis = basis / rec.query_scales[layer, b, firings.head, d][:, None, None]
        non_head = upstream.non_head_queries(firings) @ basis
        if rec.model.half:  # and what rounding did to the query itself, after its rotation
            own = [rec.reading_roundings(s.layer or 0)[0][p, s.head, s.dest] for p, s in firings.sites]
            non_head = torch.cat((non_head, torch.stack(own)[:, None] @ scores.to_query), dim=1)
        strength = upstream.pattern_rows(firings, d) / rec.norm_scales[layer, b, d][:, None, None]
        read = upstream.readings("query", firings, strength)
        return cls(scores, upstream.index, read, basis, strength, non_head)

    def error(self) -> Float[Tensor, " firing"]:
        s = self.scores
        heads = (self.readings.total[:, None] @ self.basis)[:, 0]
        total = self.non_head_coefficients.sum(dim=1) + heads
        return ((s.b @ (total - s.a)[..., None])[..., 0] * s.visible).abs().amax(-1) * s.scale

    def by_head(self) -> Float[Tensor, "firing head_up channel"]:
        """Every upstream head's whole contribution to the query, by channel."""
        return self.readings.mixed(self.strength) @ self.basis

    @cached_property
    def _slope(self) -> Float[Tensor, "firing channel"]:
        """The attribution of a coefficient of one."""
        s = self.scores
        return s.scale * (s.w[:, None] @ s.b)[:, 0]

    @cached_property
    def non_head(self) -> Float[Tensor, "firing non_head channel"]:
        return self.non_head_coefficients * self._slope[:, None]

    def bounds(self) -> Float[Tensor, "firing head_component"]:
        largest = (self.basis.norm(dim=1) * self._slope.abs()).amax(-1)
        return (self.strength * self.readings.norms * largest[:, None, None]).flatten(1)

    def of_heads(self, which: Tensor | None, number: Tensor) -> Float[Tensor, "active n channel"]:
        strength, basis, slope = self.strength.flatten(1), self.basis, self._slope
        if which is not None:
            strength, basis, slope = strength[which], basis[which], slope[which]
        read = self.readings.at(which, number) * strength.gather(1, number)[..., None]
        return read @ (basis * slope[:, None])

    def rows(self, which: Tensor, chosen: Tensor) -> Float[Tensor, "active n token"]:
        s, f, n_non_head = self.scores, which[:, None], self.index.n_non_head
        component, number, channel = self._split(chosen)
        coefficient = self.non_head_coefficients[f, component.clamp_max(n_non_head - 1), channel]
        if self.index.layer > 0:
            read = (self.readings.at(which, number) * self.basis.mT[f, channel]).sum(-1)
            strength = self.strength.flatten(1)[which].gather(1, number)
            coefficient = torch.where(component < n_non_head, coefficient, read * strength)
        return (coefficient * s.scale)[..., None] * s.b.mT[f, channel]


@dataclass(frozen=True)
class KeyCandidates(Candidates):
    """Contribution rows ``scale * a_k[d] * b^c_k[t]``: a component's part of every visible key."""

    claim: ClassVar[str] = "key contributions do not sum to the recorded logit of the source"
    scores: FiringScores
    index: ComponentIndex
    readings: Readings
    non_head_keys: Float[Tensor, "firing non_head token d_head"]
    """Non-head components' parts of every key, rotated as the model rotates keys."""
    inverse_scale: Float[Tensor, "firing token"]
    """Over the frozen scales of each key."""
    strength: Float[Tensor, "firing head_up src"]
    """How strongly a head component writes at the source: its attention, over the frozen scales."""
    upstream: Upstream

    @classmethod
    def of(cls, scores: FiringScores, upstream: Upstream) -> KeyCandidates:
        rec, firings, n = scores.recording, scores.firings, upstream.length
        layer, kv = firings.layer, firings.head // rec.model.weights.group
        inverse = 1 / rec.norm_scales[layer, firings.prompt, :n]
        if rec.key_scales is not None:
            inverse = inverse / rec.key_scales[layer, firings.prompt, kv, :n]
        non_head = scores.rotary.rotate(upstream.non_head_keys(firings), inverse)
        if rec.model.half:  # and what rounding did to the keys themselves, after their rotation
            readers = zip(firings.sites, kv.tolist(), strict=True)
            own = [
                rec.reading_roundings(site.layer or 0)[1][prompt, head] for (prompt, site), head in readers
            ]
            non_head[:, -1] = torch.stack(own)[:, :n]
        at_src = inverse.gather(1, firings.src[:, None])[..., None]
        strength = upstream.pattern_rows(firings, firings.src) * at_src
        read = upstream.readings("key", firings, strength)
        return cls(scores, upstream.index, read, non_head, inverse, strength, upstream)

    def error(self) -> Float[Tensor, " firing"]:
        s, src = self.scores, self.scores.firings.src
        rows = torch.arange(len(src), device=src.device)
        non_head = (self.non_head_keys[rows, :, src].sum(dim=1)[:, None] @ s.to_key)[:, 0]
        heads = self.readings.total[:, None] @ s.rotary.basis_at(s.to_key, src)
        total = non_head + heads[:, 0]
        return ((total - s.b[rows, src]) * s.a).sum(-1).abs() * s.scale

    def by_head(self) -> Float[Tensor, "firing head_up channel"]:
        """Every upstream head's whole contribution to the key at the source, by channel."""
        s = self.scores
        return self.readings.mixed(self.strength) @ s.rotary.basis_at(s.to_key, s.firings.src)

    @cached_property
    def _weight(self) -> Float[Tensor, "firing token"]:
        """The attribution of a logit of one, for each key."""
        return self.scores.w * self.scores.scale

    @cached_property
    def non_head(self) -> Float[Tensor, "firing non_head channel"]:
        summed = (self._weight[:, None, None] @ self.non_head_keys)[..., 0, :]
        return summed @ (self.scores.to_key * self.scores.a[:, None])

    def bounds(self) -> Float[Tensor, "firing head_component"]:
        # However the keys rotate a vector, the weighted sum of its rotations is no longer than the sum of the weights.
        reach = self.upstream.attended(
            self.scores.firings, (self._weight * self.inverse_scale).abs() * self.scores.rotary.stretch
        )
        largest = (self.scores.to_key.norm(dim=1) * self.scores.a.abs()).amax(-1)
        return (reach * self.readings.norms * largest[:, None, None]).flatten(1)

    def of_heads(self, which: Tensor | None, number: Tensor) -> Float[Tensor, "active n channel"]:
        s, n = self.scores, self.index.length
        rotary, prompt, to_key = s.rotary, s.firings.prompt, s.to_key * s.a[:, None]
        weight = self._weight * self.inverse_scale
        if which is not None:
            rotary, prompt, to_key, weight = rotary[which], prompt[which], to_key[which], weight[which]
        columns = self.upstream.pattern_columns(prompt, number // n, number % n)
        sums = columns @ rotary.weighted_table(weight)
        return rotary.rotate_summed(self.readings.at(which, number), sums) @ to_key

    def rows(self, which: Tensor, chosen: Tensor) -> Float[Tensor, "active n token"]:
        s, n_non_head, f, n = self.scores, self.index.n_non_head, which[:, None], self.index.length
        component, number, channel = self._split(chosen)
        number_non_head = (f * n_non_head + component.clamp_max(n_non_head - 1)).flatten()
        keys = self.non_head_keys.flatten(0, 1).index_select(0, number_non_head).unflatten(0, component.shape)
        to_key = s.to_key.mT[f, channel]
        rows = (keys @ to_key[..., None])[..., 0]
        if self.index.layer > 0:
            columns = self.upstream.pattern_columns(s.firings.prompt[which], number // n, number % n)
            read = s.rotary[which].rotated_dot(self.readings.at(which, number), to_key)
            from_heads = read * columns * self.inverse_scale[which][:, None]
            rows = torch.where((component < n_non_head)[..., None], rows, from_heads)
        return rows * (s.a[f, channel] * s.scale)[..., None]


# -- many firings --------------------------------------------------------------------------------------------


def in_chunks(
    recording: Recording,
    firings: Firings,
    composer: Composer,
    trace_chunk: Callable[[Firings, Upstream], Iterable[Causes]],
) -> list[Causes]:
    """Trace firings in groups whose candidates fit into memory together, reporting progress after each."""
    found: list[Causes] = []
    for chunk, upstream in firing_chunks(recording, firings, composer):
        found.extend(trace_chunk(chunk, upstream))
        count(len(chunk))
    return found


def firing_chunks(
    recording: Recording, firings: Firings, composer: Composer
) -> Iterator[tuple[Firings, Upstream]]:
    """Groups of firings whose candidates fit into memory together, of layers that attend in the same way.

    In short prompts, a head's reading of upstream values costs most: firings of one head go together. In long ones,
    attention patterns do: firings of one prompt go together, by destination.
    """
    model, short = recording.model, recording.token_ids.shape[1] <= SHORT

    def order(item: PromptSite) -> tuple[int, ...]:
        prompt, site = item
        layer, head, dest = site.layer or 0, site.head or 0, site.dest or 0
        return (-layer, head, prompt, dest) if short else (prompt, -layer, head, dest)

    def kind_of_layer(layer: int) -> object:
        """Layers of one kind have the same scale, softcap, rotary positions and window."""
        rotary = recording.rotary[layer]
        table = None if rotary is None else rotary.cos.data_ptr()
        return recording.scales[layer], recording.softcaps[layer], table, recording.visible[layer].data_ptr()

    def at_once(layer: int, length: int) -> int:
        size = ComponentIndex.of(recording, layer, length).n_components * model.d_head
        return max(CANDIDATES_AT_ONCE // size, min(LONG_GROUP, LONG_CANDIDATES // size), 1)

    kinds: dict[object, list[PromptSite]] = {}
    for item in sorted(firings.sites, key=order):
        kinds.setdefault(kind_of_layer(item[1].layer or 0), []).append(item)
    for items in kinds.values():
        start = 0
        while start < len(items):
            end, top, length = start, 0, 0
            while end < len(items):
                site = items[end][1]
                higher, longer = max(top, site.layer or 0), max(length, (site.dest or 0) + 1)
                if end > start and end - start >= at_once(higher, longer):
                    break
                end, top, length = end + 1, higher, longer
            chunk = Firings.of(items[start:end], model.device, firings.groups)
            yield chunk, Upstream(recording, composer, top, length)
            start = end
