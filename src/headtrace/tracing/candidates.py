"""Candidates of a firing: every (component, channel), on the query side and on the key side.

Both sides offer the same things: the attributions of plain components, a bound on those of every head component, the
exact attributions of the few that matter, and contribution rows (over keys) of the fewer that are removed. No tensor
here has both a candidate axis and two token axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.errors import IdentityError
from headtrace.models.identities import tolerance_for
from headtrace.tracing.attribution import attention_on, attribution_vector
from headtrace.tracing.readings import Readings
from headtrace.tracing.rotation import Turns
from headtrace.tracing.upstream import Catalogue, Firings, Upstream

if TYPE_CHECKING:
    from headtrace.models import Recording


@dataclass(frozen=True)
class FiringScores:
    """What firings have in common on both sides: logits, channel coefficients, the attribution vector."""

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
    full: Bool[Tensor, " firing"]
    """Whether a firing's head has as many channels as dimensions."""

    @classmethod
    def of(cls, recording: Recording, firings: Firings, length: int, ig_steps: int) -> FiringScores:
        layer, model, some = firings.layer, recording.model, firings.sites[0][1].layer or 0
        channels = model.channels.at(layer, firings.head)
        to_query, to_key = channels.to_query, channels.to_key
        q = recording.queries[layer, firings.prompt, firings.head, firings.dest]
        k = recording.keys[:, :, :, :length][layer, firings.prompt, firings.head // model.weights.group]
        scale, cap = recording.scales[some], recording.softcaps[some]  # layers of one kind go together
        logits = (k @ q[..., None])[..., 0] * scale
        visible = recording.visible[some][firings.prompt, firings.dest, :length]
        a, b = (q[:, None] @ to_query)[:, 0], k @ to_key
        w = attribution_vector(logits, visible, firings.src, cap, ig_steps)
        full = channels.rank == a.shape[-1]
        return cls(recording, firings, scale, cap, logits, visible, a, b, to_query, to_key, w, full)

    @cached_property
    def turns(self) -> Turns:
        layer = self.firings.sites[0][1].layer or 0
        return Turns.of(self.recording, layer, self.firings.prompt, self.logits.shape[1])

    @cached_property
    def size(self) -> Float[Tensor, " firing"]:
        """The largest logit of each row, and at least one: what errors are measured against."""
        return (self.logits * self.visible).abs().amax(-1).clamp_min(1.0)

    def _channel_error(self) -> Float[Tensor, " firing"]:
        """Channels sum to the recorded logits (a rank-deficient head keeps a remainder, which nothing removes)."""
        made = (self.b @ self.a[..., None])[..., 0] * self.scale
        return ((made - self.logits) * self.visible).abs().amax(-1) * self.full

    def require(self, *sides: Candidates) -> None:
        """The channels, and the contributions of each side, sum to the recorded logits; else stop and say where."""
        errors = torch.stack([self._channel_error(), *(side.error() for side in sides)]) / self.size
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
        """In half precision, how far the attention of each firing would be elsewhere without what rounding added to its
        query and keys; else None."""
        if not self.recording.model.half:
            return [None] * len(self.firings)
        rounding = slice(query.catalogue.roundings.start, query.catalogue.n_plain)
        a = self.a - query.plain_coefficients[:, rounding].sum(dim=1)
        b = self.b - key.plain_keys[:, rounding].sum(dim=1) @ self.to_key
        without = (b @ a[..., None])[..., 0] * self.scale
        src = self.firings.src
        clean, left = (attention_on(z, self.visible, src, self.cap) for z in (self.logits, without))
        return (clean - left).abs().tolist()


class Candidates(ABC):
    """What the query and the key side of some firings have in common."""

    claim: ClassVar[str]
    """What it would mean if the contributions did not add up."""
    scores: FiringScores
    catalogue: Catalogue
    readings: Readings

    @abstractmethod
    def error(self) -> Float[Tensor, " firing"]:
        """How far the contributions of all components are from the recorded logits."""

    @cached_property
    @abstractmethod
    def plain(self) -> Float[Tensor, "firing plain channel"]:
        """Attributions of embedding, MLPs, biases and offset."""

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
        n_heads = self.catalogue.n_components - self.catalogue.n_plain
        numbers = torch.arange(n_heads, device=self.scores.a.device).expand(len(self.scores.firings), -1)
        return torch.cat((self.plain, self.of_heads(None, numbers)), dim=1)

    def _place(self, number: Int[Tensor, "active n"]) -> tuple[Tensor, Tensor]:
        """The upstream head (of all layers, counted through) and the source of head components."""
        return number // self.catalogue.length, number % self.catalogue.length

    def _split(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Component, its number among heads (0 for a plain one) and channel of flat candidate numbers."""
        component, channel = chosen // self.scores.a.shape[-1], chosen % self.scores.a.shape[-1]
        return component, (component - self.catalogue.n_plain).clamp_min(0), channel


@dataclass(frozen=True)
class QueryCandidates(Candidates):
    """Contribution rows ``scale * a^c_k * b_k[t]``: one coefficient per candidate."""

    claim: ClassVar[str] = "query contributions do not sum to the recorded logits"
    scores: FiringScores
    catalogue: Catalogue
    readings: Readings
    basis: Float[Tensor, "firing d_head channel"]
    """From what a component writes at the destination, as the head reads it, to channel coefficients."""
    strength: Float[Tensor, "firing head_up src"]
    """How strongly a head component writes there: its attention, over the frozen scales."""
    plain_coefficients: Float[Tensor, "firing plain channel"]

    @classmethod
    def of(cls, scores: FiringScores, upstream: Upstream) -> QueryCandidates:
        rec, firings, layer = scores.recording, scores.firings, scores.firings.layer
        b, d = firings.prompt, firings.dest
        basis = scores.turns.basis_at(scores.to_query, d)
        if rec.query_scales is not None:
            basis = basis / rec.query_scales[layer, b, firings.head, d][:, None, None]
        plain = upstream.plain_queries(firings) @ basis
        if rec.model.half:
            own = upstream.reading_queries(firings)[:, None] @ scores.to_query
            plain = torch.cat((plain, own), dim=1)
        strength = upstream.pattern_rows(firings, d) / rec.norm_scales[layer, b, d][:, None, None]
        read = upstream.readings("query", firings, strength)
        return cls(scores, upstream.catalogue, read, basis, strength, plain)

    def error(self) -> Float[Tensor, " firing"]:
        s = self.scores
        heads = (self.readings.total[:, None] @ self.basis)[:, 0]
        total = self.plain_coefficients.sum(dim=1) + heads
        return ((s.b @ (total - s.a)[..., None])[..., 0] * s.visible).abs().amax(-1) * s.scale

    def by_head(self) -> Float[Tensor, "firing head_up channel"]:
        """Every upstream head's whole contribution to the query, by channel."""
        return self.readings.mixed(self.strength) @ self.basis

    @cached_property
    def _toward(self) -> Float[Tensor, "firing channel"]:
        """What a coefficient of one contributes to the attribution."""
        s = self.scores
        return s.scale * (s.w[:, None] @ s.b)[:, 0]

    @cached_property
    def plain(self) -> Float[Tensor, "firing plain channel"]:
        return self.plain_coefficients * self._toward[:, None]

    def bounds(self) -> Float[Tensor, "firing head_component"]:
        largest = (self.basis.norm(dim=1) * self._toward.abs()).amax(-1)
        return (self.strength * self.readings.norms * largest[:, None, None]).flatten(1)

    def of_heads(self, which: Tensor | None, number: Tensor) -> Float[Tensor, "active n channel"]:
        strength = self.strength.flatten(1)
        basis, toward = self.basis, self._toward
        if which is not None:
            strength, basis, toward = strength[which], basis[which], toward[which]
        read = self.readings.at(which, number) * strength.gather(1, number)[..., None]
        return read @ (basis * toward[:, None])

    def rows(self, which: Tensor, chosen: Tensor) -> Float[Tensor, "active n token"]:
        s, f = self.scores, which[:, None]
        component, number, channel = self._split(chosen)
        n_plain = self.catalogue.n_plain
        coefficient = self.plain_coefficients[f, component.clamp_max(n_plain - 1), channel]
        if self.catalogue.layer > 0:
            read = (self.readings.at(which, number) * self.basis.mT[f, channel]).sum(-1)
            strength = self.strength.flatten(1)[which].gather(1, number)
            coefficient = torch.where(component < n_plain, coefficient, read * strength)
        return (coefficient * s.scale)[..., None] * s.b.mT[f, channel]


@dataclass(frozen=True)
class KeyCandidates(Candidates):
    """Contribution rows ``scale * a_k[d] * b^c_k[t]``: a component's part of every visible key."""

    claim: ClassVar[str] = "key contributions do not sum to the recorded logit of the source"
    scores: FiringScores
    catalogue: Catalogue
    readings: Readings
    plain_keys: Float[Tensor, "firing plain token d_head"]
    """Plain components' parts of every key, turned as the model turns keys."""
    inverse_scale: Float[Tensor, "firing token"]
    upstream: Upstream

    @classmethod
    def of(cls, scores: FiringScores, upstream: Upstream) -> KeyCandidates:
        rec, firings, layer = scores.recording, scores.firings, scores.firings.layer
        inverse = 1 / rec.norm_scales[layer, firings.prompt, : upstream.length]
        if rec.key_scales is not None:
            kv = firings.head // rec.model.weights.group
            inverse = inverse / rec.key_scales[layer, firings.prompt, kv, : upstream.length]
        plain = scores.turns.turn(upstream.plain_keys(firings), inverse)
        if rec.model.half:
            plain[:, -1] = upstream.reading_keys(firings)
        strength = _strength_at(firings.src, firings, upstream, inverse)
        read = upstream.readings("key", firings, strength)
        return cls(scores, upstream.catalogue, read, plain, inverse, upstream)

    def error(self) -> Float[Tensor, " firing"]:
        s, src = self.scores, self.scores.firings.src
        rows = torch.arange(len(src), device=src.device)
        plain = (self.plain_keys[rows, :, src].sum(dim=1)[:, None] @ s.to_key)[:, 0]
        heads = self.readings.total[:, None] @ s.turns.basis_at(s.to_key, src)
        total = plain + heads[:, 0]
        return ((total - s.b[rows, src]) * s.a).sum(-1).abs() * s.scale

    def heads_at(self, token: Int[Tensor, " firing"]) -> Float[Tensor, "firing head_up channel"]:
        """Every upstream head's whole contribution to the key at one token per firing, by channel."""
        strength = _strength_at(token, self.scores.firings, self.upstream, self.inverse_scale)
        mixed = self.readings.mixed(strength)
        return mixed @ self.scores.turns.basis_at(self.scores.to_key, token)

    @cached_property
    def _weight(self) -> Float[Tensor, "firing token"]:
        """What a key's logit contributes to the attribution."""
        return self.scores.w * self.scores.scale

    @cached_property
    def plain(self) -> Float[Tensor, "firing plain channel"]:
        summed = (self._weight[:, None, None] @ self.plain_keys)[..., 0, :]
        return summed @ (self.scores.to_key * self.scores.a[:, None])

    def bounds(self) -> Float[Tensor, "firing head_component"]:
        # However the keys turn a vector, the weighted sum of its turns is no longer than the sum of the weights.
        reach = self.upstream.attended(
            self.scores.firings, (self._weight * self.inverse_scale).abs() * self.scores.turns.stretch
        )
        largest = (self.scores.to_key.norm(dim=1) * self.scores.a.abs()).amax(-1)
        return (reach * self.readings.norms * largest[:, None, None]).flatten(1)

    def of_heads(self, which: Tensor | None, number: Tensor) -> Float[Tensor, "active n channel"]:
        s, (head_up, src) = self.scores, self._place(number)
        turns, prompt, to_key = s.turns, s.firings.prompt, s.to_key * s.a[:, None]
        weight = self._weight * self.inverse_scale
        if which is not None:
            turns, prompt, to_key, weight = turns[which], prompt[which], to_key[which], weight[which]
        columns = self.upstream.pattern_columns(prompt, head_up, src)
        sums = columns @ turns.weighted_table(weight)
        return turns.turn_summed(self.readings.at(which, number), sums) @ to_key

    def rows(self, which: Tensor, chosen: Tensor) -> Float[Tensor, "active n token"]:
        s, n_plain, f = self.scores, self.catalogue.n_plain, which[:, None]
        component, number, channel = self._split(chosen)
        number_plain = (f * n_plain + component.clamp_max(n_plain - 1)).flatten()
        plain = self.plain_keys.flatten(0, 1).index_select(0, number_plain).unflatten(0, component.shape)
        rows = (plain @ s.to_key.mT[f, channel][..., None])[..., 0]
        if self.catalogue.layer > 0:
            from_heads = self._head_rows(which, number, channel)
            rows = torch.where((component < n_plain)[..., None], rows, from_heads)
        return rows * (s.a[f, channel] * s.scale)[..., None]

    def _head_rows(self, which: Tensor, number: Tensor, channel: Tensor) -> Float[Tensor, "active n token"]:
        s, (head_up, src) = self.scores, self._place(number)
        columns = self.upstream.pattern_columns(s.firings.prompt[which], head_up, src)
        m, g = self.readings.at(which, number), s.to_key.mT[which[:, None], channel]
        return s.turns[which].turned_dot(m, g) * columns * self.inverse_scale[which][:, None]


def _strength_at(
    token: Int[Tensor, " firing"],
    firings: Firings,
    upstream: Upstream,
    inverse_scale: Float[Tensor, "firing token"],
) -> Float[Tensor, "firing head_up src"]:
    """How strongly every head component writes at one token per firing, over the frozen scales of its key."""
    rows = torch.arange(token.shape[0], device=token.device)
    return upstream.pattern_rows(firings, token) * inverse_scale[rows, token][:, None, None]
