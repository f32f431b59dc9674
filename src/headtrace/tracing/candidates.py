"""Candidates of a firing: every (component, channel), on the query side and on the key side.

Both sides offer the same two things: the attributions of all candidates, and the contribution rows (over
keys) of a chosen few. No tensor here has both a candidate axis and two token axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.errors import IdentityError
from headtrace.models.identities import tolerance_for
from headtrace.tracing.attribution import attribution_vector
from headtrace.tracing.rotation import Turns
from headtrace.tracing.upstream import Catalogue, LayerFirings, Upstream
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    from headtrace.models import Recording


@dataclass(frozen=True)
class FiringScores:
    """What firings have in common on both sides: logits, channel coefficients, the attribution vector."""

    recording: Recording
    firings: LayerFirings
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

    @classmethod
    def of(cls, recording: Recording, firings: LayerFirings, length: int, ig_steps: int) -> FiringScores:
        layer, model = firings.layer, recording.model
        channels = model.channels
        to_query, to_key = channels.to_query[layer, firings.head], channels.to_key[layer, firings.head]
        q = recording.queries[layer, firings.prompt, firings.head, firings.dest]
        k = recording.keys[layer, :, :, :length][firings.prompt, firings.head // model.weights.group]
        scale, cap = recording.scales[layer], recording.softcaps[layer]
        logits = (k @ q[..., None])[..., 0] * scale
        visible = recording.visible[layer][firings.prompt, firings.dest, :length]
        a, b = (q[:, None] @ to_query)[:, 0], k @ to_key
        w = attribution_vector(logits, visible, firings.src, cap, ig_steps)
        scores = cls(recording, firings, scale, cap, logits, visible, a, b, to_query, to_key, w)
        scores._check_channels()
        return scores

    def _check_channels(self) -> None:
        """Channels sum to the recorded logits (a rank-deficient head keeps a remainder, which nothing removes)."""
        layer, rank = self.firings.layer, self.recording.model.channels.rank
        full = rank[layer, self.firings.head] == self.a.shape[-1]
        made = (self.b @ self.a[..., None])[..., 0] * self.scale
        error = ((made - self.logits) * self.visible).abs().amax(-1) * full
        self.require(error, self.size, "the channels do not sum to the recorded logits")

    @property
    def size(self) -> Float[Tensor, " firing"]:
        """The largest logit of each row, and at least one: what errors are measured against."""
        return (self.logits * self.visible).abs().amax(-1).clamp_min(1.0)

    def require(self, error: Float[Tensor, " firing"], size: Float[Tensor, " firing"], what: str) -> None:
        """Stop with layer, head, position and error if an identity fails."""
        allowed = tolerance_for(self.recording.model.dtype)
        relative = error / size
        if bool((relative <= allowed).all()):
            return
        f = int(torch.nan_to_num(relative, nan=torch.inf).argmax())
        firings = self.firings
        raise IdentityError(
            f"In {head_name(firings.layer, int(firings.head[f]))} {int(firings.dest[f])}->{int(firings.src[f])} "
            f"(prompt {int(firings.prompt[f])}) {what}: relative error {float(relative[f]):.1e}, "
            f"allowed {allowed:.0e}. Run recording.check() to see whether the model itself adds up."
        )


@dataclass(frozen=True)
class QueryCandidates:
    """Contribution rows ``scale * a^c_k * b_k[t]``: one coefficient per candidate."""

    scores: FiringScores
    coefficients: Float[Tensor, "firing component channel"]

    @classmethod
    def of(cls, scores: FiringScores, upstream: Upstream) -> QueryCandidates:
        rec, firings, layer = scores.recording, scores.firings, scores.firings.layer
        b, d = firings.prompt, firings.dest
        turns = Turns.of(rec, layer, b, upstream.length)
        basis = turns.basis_at(scores.to_query, d)
        if rec.query_scales is not None:
            basis = basis / rec.query_scales[layer, b, firings.head, d][:, None, None]
        plain = upstream.plain_queries(firings) @ basis
        # A head component's write at the destination: its attention there, over the frozen scales.
        strength = rec.patterns[:layer, :, :, :, : upstream.length][:, b, :, d]
        strength = strength / rec.norm_scales[layer, b, d][:, None, None, None]
        if rec.post_norm_scales is not None:
            strength = strength / rec.post_norm_scales[:layer, b, d].T[:, :, None, None]
        read = upstream.head_readings("query", firings)
        coefficients = plain.new_empty(len(firings), upstream.catalogue.n_components, plain.shape[-1])
        coefficients[:, : plain.shape[1]] = plain
        # One large product per firing, written in place, then weighted by attention.
        torch.bmm(read.flatten(1, 2), basis, out=coefficients[:, plain.shape[1] :])
        coefficients[:, plain.shape[1] :].mul_(strength.flatten(1)[..., None])
        candidates = cls(scores, coefficients)
        total = coefficients.sum(dim=1)
        error = ((scores.b @ (total - scores.a)[..., None])[..., 0] * scores.visible).abs().amax(
            -1
        ) * scores.scale
        scores.require(error, scores.size, "query contributions do not sum to the recorded logits")
        return candidates

    def attributions(self) -> Float[Tensor, "firing component channel"]:
        s = self.scores
        return self.coefficients * (s.scale * (s.w[:, None] @ s.b))

    def rows(
        self, which: Int[Tensor, " active"], chosen: Int[Tensor, "active n"]
    ) -> Float[Tensor, "active n token"]:
        """Contribution rows of chosen candidates (flat numbers: component * channels + channel) of some firings."""
        s, f = self.scores, which[:, None]
        coefficient = self.coefficients.flatten(1)[f, chosen]
        return (coefficient * s.scale)[..., None] * s.b.mT[f, chosen % s.b.shape[-1]]


@dataclass(frozen=True)
class KeyCandidates:
    """Contribution rows ``scale * a_k[d] * b^c_k[t]``: a component's part of every visible key."""

    scores: FiringScores
    catalogue: Catalogue
    turns: Turns
    plain: Float[Tensor, "firing plain token channel"]
    readings: Float[Tensor, "firing head_up src d_head"]
    inverse_scale: Float[Tensor, "firing token"]

    @classmethod
    def of(cls, scores: FiringScores, upstream: Upstream) -> KeyCandidates:
        rec, firings, layer = scores.recording, scores.firings, scores.firings.layer
        turns = Turns.of(rec, layer, firings.prompt, upstream.length)
        plain = turns.turn(upstream.plain_keys(firings)) @ scores.to_key[:, None]
        inverse = 1 / rec.norm_scales[layer, firings.prompt, : upstream.length]
        if rec.key_scales is not None:
            kv = firings.head // rec.model.weights.group
            key_scale = rec.key_scales[layer, firings.prompt, kv, : upstream.length]
            plain, inverse = plain / key_scale[:, None, :, None], inverse / key_scale
        read = upstream.head_readings("key", firings)
        candidates = cls(scores, upstream.catalogue, turns, plain, read, inverse)
        candidates._check_source()
        return candidates

    def _check_source(self) -> None:
        """All contributions to the source's key sum to the recorded logit there."""
        s, firings = self.scores, self.scores.firings
        rows, src = torch.arange(len(firings), device=firings.src.device), firings.src
        total = self.plain[rows, :, src].sum(dim=1) + self.heads_at(src).sum(dim=1)
        error = ((total - s.b[rows, src]) * s.a).sum(-1).abs() * s.scale
        s.require(error, s.size, "key contributions do not sum to the recorded logit of the source")

    def heads_at(self, token: Int[Tensor, " firing"]) -> Float[Tensor, "firing head_up channel"]:
        """Every upstream head's whole contribution to the key at one token per firing, by channel."""
        rows = torch.arange(token.shape[0], device=token.device)
        strength = self._pattern_rows(token) * self.inverse_scale[rows, token][:, None, None]
        mixed = (strength[..., None, :] @ self.readings)[..., 0, :]
        return mixed @ self.turns.basis_at(self.scores.to_key, token)

    def _pattern_rows(self, token: Int[Tensor, " firing"]) -> Float[Tensor, "firing head_up src"]:
        """Upstream attention (over post-norm scales) at one token per firing."""
        rec, layer, b = self.scores.recording, self.scores.firings.layer, self.scores.firings.prompt
        rows = rec.patterns[:layer, :, :, :, : self.catalogue.length][:, b, :, token]
        if rec.post_norm_scales is not None:
            rows = rows / rec.post_norm_scales[:layer, b, token].T[:, :, None, None]
        return rows.flatten(1, 2)

    def attributions(self) -> Float[Tensor, "firing component channel"]:
        s = self.scores
        weight = s.w * s.scale
        plain = (weight[:, None, None] @ self.plain)[..., 0, :]
        table = self.turns.weighted_table(weight * self.inverse_scale)
        out = plain.new_empty(plain.shape[0], self.catalogue.n_components, plain.shape[-1])
        out[:, : plain.shape[1]] = plain
        turned = self.turns.turn_summed(self.readings.flatten(1, 2), self._sum_over_tokens(table))
        torch.bmm(turned, s.to_key, out=out[:, plain.shape[1] :])
        return out.mul_(s.a[:, None])

    def _sum_over_tokens(self, table: Float[Tensor, "firing token table"]) -> Float[Tensor, "firing n table"]:
        """``sum over t of A_h[t, j] table[t]`` for every upstream head h and source j; one product per prompt."""
        rec, firings, layer = self.scores.recording, self.scores.firings, self.scores.firings.layer
        length, width = self.catalogue.length, table.shape[-1]
        sums = table.new_empty(len(firings), layer * self.catalogue.n_heads * length, width)
        prompts, counts = torch.unique_consecutive(firings.prompt, return_counts=True)
        end = 0
        for prompt, count in zip(
            prompts.tolist(), counts.tolist(), strict=True
        ):  # firings come sorted by prompt
            mine = slice(end, end := end + count)
            columns = table[mine].mT.flatten(0, 1)
            if rec.post_norm_scales is not None:
                columns = (columns / rec.post_norm_scales[:layer, prompt, None, :length])[:, None]
            # Tables first: the product reads each pattern in the order in which it lies in memory.
            product = columns @ rec.patterns[:layer, prompt, :, :length, :length]
            parts = product.reshape(layer * self.catalogue.n_heads, -1, width, length)
            sums[mine] = parts.permute(1, 0, 3, 2).flatten(1, 2)
        return sums

    def rows(
        self, which: Int[Tensor, " active"], chosen: Int[Tensor, "active n"]
    ) -> Float[Tensor, "active n token"]:
        """Contribution rows of chosen candidates (flat numbers: component * channels + channel) of some firings."""
        s, n_plain, f = self.scores, self.catalogue.n_plain, which[:, None]
        component, channel = chosen // s.a.shape[-1], chosen % s.a.shape[-1]
        rows = self.plain[f, component.clamp_max(n_plain - 1), :, channel]
        if self.catalogue.layer > 0:
            from_heads = self._head_rows(which, (component - n_plain).clamp_min(0), channel)
            rows = torch.where((component < n_plain)[..., None], rows, from_heads)
        return rows * (s.a[f, channel] * s.scale)[..., None]

    def _head_rows(self, which: Tensor, number: Tensor, channel: Tensor) -> Float[Tensor, "active n token"]:
        s, rec, cat, f = self.scores, self.scores.recording, self.catalogue, which[:, None]
        head_up, src = number // cat.length, number % cat.length
        upstream, head, prompt = head_up // cat.n_heads, head_up % cat.n_heads, s.firings.prompt[f]
        strength = rec.patterns[:, :, :, : cat.length][upstream, prompt, head, :, src] * self.inverse_scale[f]
        if rec.post_norm_scales is not None:
            strength = strength / rec.post_norm_scales[upstream, prompt, : cat.length]
        m, g = self.readings[f, head_up, src], s.to_key.mT[f, channel]
        return self.turns[which].turned_dot(m, g) * strength
