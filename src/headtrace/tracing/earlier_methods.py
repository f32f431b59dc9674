"""ACC and SVT, the two earlier methods.

ACC divides relative attention: the logit on the source less the mean logit of the other visible keys. It is linear, so
it divides exactly over channels and components; each step keeps the smallest prefix (largest first) that reaches the
total.

SVT, singular vector tracing (the 2024 paper), finds upstream heads by what they write into a firing's signal channels.
A head fires when it puts more than half of its attention on one source; the first token is skipped. With
``channels="all"`` the trace ignores the SVD filter, which is the paper's negative control.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.channels import signal_set
from headtrace.relative import relative_row
from headtrace.tracing.causes import Cause, Causes, SideCauses
from headtrace.tracing.components import Firings, Upstream
from headtrace.tracing.firing import (
    Candidates,
    FiringScores,
    KeyCandidates,
    QueryCandidates,
    attention_on,
    in_chunks,
)
from headtrace.tracing.methods import Method, register_method
from headtrace.tracing.readings import Composer
from headtrace.vocabulary import Firing, Site

if TYPE_CHECKING:
    from headtrace.models import Recording

FIRES_ABOVE = 0.5
"""SVT: attention above which a head fires."""
SHARE = 0.7
"""SVT: upstream heads are kept until they reach this share of all contributions."""


def smallest_prefix(
    terms: Float[Tensor, "firing n"], target: Float[Tensor, " firing"]
) -> Bool[Tensor, "firing n"]:
    """Largest terms first, as few as reach the target (all positive ones if rounding keeps them from it)."""
    values, order = terms.sort(dim=-1, descending=True, stable=True)
    before = torch.cat((torch.zeros_like(values[:, :1]), values.cumsum(-1)[:, :-1]), dim=-1)
    keep = (before < target[:, None]) & (values > 0)
    return torch.zeros_like(keep).scatter(1, order, keep)


def _causes(
    method: Method,
    scores: FiringScores,
    query: list[SideCauses],
    key: list[SideCauses],
    rounding: list[float] | list[None],
) -> list[Causes]:
    """Both sides of each firing put together."""
    clean, keys = scores.attention(scores.logits).tolist(), scores.visible.sum(-1).tolist()
    return [
        Causes(
            prompt,
            site,
            {"query": query[f], "key": key[f]},
            clean[f],
            method.threshold(keys[f]),
            rounding[f],
        )
        for f, (prompt, site) in enumerate(scores.firings.sites)
    ]


@dataclass(frozen=True)
class ACC(Method):
    """Components that make up the relative attention inside the head's active channels."""

    name: ClassVar[str] = "acc"
    edge_weight: ClassVar = "relative attention"
    explained_when: ClassVar = "causes on both sides"

    @torch.inference_mode()
    def trace(self, recording: Recording, firings: Firings, composer: Composer) -> list[Causes]:
        return in_chunks(recording, firings, composer, self._chunk)

    def _chunk(self, firings: Firings, upstream: Upstream) -> list[Causes]:
        scores = FiringScores.of(upstream.recording, firings, upstream.length, 1)
        scores = replace(scores, w=relative_row(scores.visible, firings.src, scores.logits.dtype))
        terms = scores.a * (scores.w[:, None] @ scores.b)[:, 0] * scores.scale
        subspace = smallest_prefix(terms, terms.sum(-1))
        query, key = QueryCandidates.of(scores, upstream), KeyCandidates.of(scores, upstream)
        scores.require(query, key)
        return _causes(
            self,
            scores,
            self._side(query, subspace, firings.dest),
            self._side(key, subspace, firings.src),
            scores.rounding(query, key),
        )

    def _side(
        self,
        candidates: Candidates,
        subspace: Bool[Tensor, "firing channel"],
        position: Int[Tensor, " firing"],
    ) -> list[SideCauses]:
        """Smallest prefix of components that reaches the total inside the subspace; nothing for a negative total."""
        scores, index = candidates.scores, candidates.index
        inside = (candidates.attributions() * subspace[:, None]).sum(-1)
        total, clean = inside.sum(-1), scores.attention(scores.logits).tolist()
        chosen = smallest_prefix(inside, total)
        sides: list[SideCauses] = []
        for f, (_, site) in enumerate(scores.firings.sites):
            channels, numbers = subspace[f].nonzero()[:, 0], chosen[f].nonzero()[:, 0]
            if float(total[f]) <= 0 or not numbers.numel():
                sides.append(SideCauses((), clean[f], False))
                continue
            causes = [
                Cause(index.component(number, site).at(int(position[f])), weight, tuple(channels.tolist()))
                for number, weight in zip(numbers.tolist(), inside[f, numbers].tolist(), strict=True)
            ]
            causes.sort(key=lambda cause: -cause.weight)
            # The attention that is left without these components' signals in these channels.
            which = torch.tensor([f], device=numbers.device)
            flat = (numbers[:, None] * scores.a.shape[-1] + channels).flatten()
            left = scores.logits[which] - candidates.rows(which, flat[None]).sum(dim=1)
            predicted = attention_on(left, scores.visible[which], scores.firings.src[which], scores.cap)
            sides.append(SideCauses(tuple(causes), float(predicted), True))
        return sides


@dataclass(frozen=True)
class SVT(Method):
    """Upstream heads only; each stands for its whole write, shown at the source it attends to most."""

    name: ClassVar[str] = "svt"
    rule: ClassVar[str | float] = FIRES_ABOVE
    edge_weight: ClassVar = "coefficients"
    explained_when: ClassVar = "causes on both sides"
    whole_heads: ClassVar[bool] = True
    channels: Literal["signal", "all"] = field(
        default="signal",
        metadata={
            "help": "Channels to follow: signal (the head's signal set) or all (the control without the SVD)."
        },
    )

    def default_threshold(self, visible_keys: int) -> float:
        return FIRES_ABOVE

    def follows(self, firing: Firing, attention: float, visible_keys: int) -> bool:
        # It looks for upstream heads, and layer 0 has none.
        return attention > self.threshold(visible_keys) and firing.src != 0 and firing.layer > 0

    @torch.inference_mode()
    def trace(self, recording: Recording, firings: Firings, composer: Composer) -> list[Causes]:
        return in_chunks(recording, firings, composer, self._chunk)

    def _chunk(self, firings: Firings, upstream: Upstream) -> list[Causes]:
        recording = upstream.recording
        scores = FiringScores.of(recording, firings, upstream.length, 1)
        b = scores.b[torch.arange(len(firings), device=firings.src.device), firings.src]
        terms = scores.a * b * scores.scale
        inside = torch.ones_like(terms, dtype=torch.bool) if self.channels == "all" else signal_set(terms)
        query, key = QueryCandidates.of(scores, upstream), KeyCandidates.of(scores, upstream)
        scores.require(query, key)
        # The papers' sqrt(sigma_k) u_k . o and sqrt(sigma_k) v_k . o, signed so that the token's own are positive.
        root = recording.model.channels.at(firings.layer, firings.head).singular_values.sqrt()
        for_query = scores.a.sign() / root.clamp_min(torch.finfo(root.dtype).tiny) * inside
        for_key = b.sign() * root * inside
        by_query, by_key = query.by_head() @ for_query[..., None], key.by_head() @ for_key[..., None]
        return _causes(
            self,
            scores,
            self._side(recording, firings, firings.dest, by_query[..., 0], inside),
            self._side(recording, firings, firings.src, by_key[..., 0], inside),
            scores.rounding(query, key),
        )

    def _side(
        self,
        recording: Recording,
        firings: Firings,
        position: Int[Tensor, " firing"],
        contributions: Float[Tensor, "firing head_up"],
        inside: Bool[Tensor, "firing channel"],
    ) -> list[SideCauses]:
        """The smallest set of upstream heads that reaches 70% of the summed contributions."""
        chosen = smallest_prefix(contributions, SHARE * contributions.sum(-1))
        sides: list[SideCauses] = []
        for f, ((prompt, _), t) in enumerate(zip(firings.sites, position.tolist(), strict=True)):
            channels = tuple(inside[f].nonzero()[:, 0].tolist())
            causes: list[Cause] = []
            for number in chosen[f].nonzero()[:, 0].tolist():
                layer, head = divmod(number, recording.model.n_heads)
                src = int(recording.attention.row(layer, prompt, head, t)[: t + 1].argmax())
                weight = float(contributions[f, number])
                causes.append(Cause(Site("head", layer, head, t, src), weight, channels))
            causes.sort(key=lambda cause: -cause.weight)
            sides.append(SideCauses(tuple(causes), None, bool(causes)))
        return sides


register_method(ACC.name, ACC)
register_method(SVT.name, SVT)
