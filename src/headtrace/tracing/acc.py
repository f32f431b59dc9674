"""ACC, the earlier method: channels from relative attention, then components inside that subspace.

Relative attention is the logit on the source less the mean logit of the other visible keys. It is linear, so
it divides exactly over channels and components; each step keeps the smallest prefix (largest first) that
reaches the total.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.relative import relative_row
from headtrace.tracing.attribution import attention_on
from headtrace.tracing.candidates import FiringScores, KeyCandidates, QueryCandidates
from headtrace.tracing.causes import Cause, Causes, SideCauses
from headtrace.tracing.methods import Method, register_method
from headtrace.tracing.upstream import Composer, Firings, Upstream, in_chunks

if TYPE_CHECKING:
    from headtrace.models import Recording


def smallest_prefix(
    terms: Float[Tensor, "firing n"], target: Float[Tensor, " firing"]
) -> Bool[Tensor, "firing n"]:
    """Largest terms first, as few as reach the target (all positive ones where rounding keeps them from it)."""
    values, order = terms.sort(dim=-1, descending=True, stable=True)
    before = torch.cat((torch.zeros_like(values[:, :1]), values.cumsum(-1)[:, :-1]), dim=-1)
    keep = (before < target[:, None]) & (values > 0)
    return torch.zeros_like(keep).scatter(1, order, keep)


@dataclass(frozen=True)
class ACC(Method):
    """Components that make up the relative attention inside the head's active channels."""

    name: ClassVar[str] = "acc"

    @torch.inference_mode()
    def trace(self, recording: Recording, firings: Firings, composer: Composer) -> list[Causes]:
        return in_chunks(recording, firings, composer, self._chunk)

    def _chunk(self, firings: Firings, upstream: Upstream) -> list[Causes]:
        scores = FiringScores.of(upstream.recording, firings, upstream.length, 1)
        relative = relative_row(scores.visible, firings.src, scores.logits.dtype)
        scores = replace(scores, w=relative)
        terms = scores.a * (scores.w[:, None] @ scores.b)[:, 0] * scores.scale
        subspace = smallest_prefix(terms, terms.sum(-1))
        clean = attention_on(scores.logits, scores.visible, firings.src, scores.cap)
        candidates = QueryCandidates.of(scores, upstream), KeyCandidates.of(scores, upstream)
        scores.require(*candidates)
        rounding = scores.rounding(*candidates)
        query = self._side(scores, candidates[0], upstream, subspace, clean, firings.dest)
        key = self._side(scores, candidates[1], upstream, subspace, clean, firings.src)
        keys = scores.visible.sum(-1).tolist()
        return [
            Causes(
                prompt,
                site,
                {"query": query[f], "key": key[f]},
                float(clean[f]),
                self.threshold(keys[f]),
                rounding[f],
            )
            for f, (prompt, site) in enumerate(firings.sites)
        ]

    def _side(
        self,
        scores: FiringScores,
        candidates: QueryCandidates | KeyCandidates,
        upstream: Upstream,
        subspace: Bool[Tensor, "firing channel"],
        clean: Float[Tensor, " firing"],
        position: Int[Tensor, " firing"],
    ) -> list[SideCauses]:
        """Smallest prefix of components that reaches the total inside the subspace; nothing for a negative total."""
        inside = (candidates.attributions() * subspace[:, None]).sum(-1)
        total = inside.sum(-1)
        chosen = smallest_prefix(inside, total)
        sides: list[SideCauses] = []
        for f, (_, site) in enumerate(scores.firings.sites):
            channels = tuple(subspace[f].nonzero()[:, 0].tolist())
            numbers = chosen[f].nonzero()[:, 0]
            if float(total[f]) <= 0 or not numbers.numel():
                sides.append(SideCauses((), float(clean[f]), False))
                continue
            weights = inside[f, numbers].tolist()
            causes = [
                Cause(upstream.catalogue.component(number, site).at(int(position[f])), weight, channels)
                for number, weight in zip(numbers.tolist(), weights, strict=True)
            ]
            causes.sort(key=lambda cause: -cause.weight)
            predicted = _without(scores, candidates, f, numbers, subspace[f].nonzero()[:, 0])
            sides.append(SideCauses(tuple(causes), predicted, True))
        return sides


def _without(
    scores: FiringScores,
    candidates: QueryCandidates | KeyCandidates,
    f: int,
    numbers: Tensor,
    channels: Tensor,
) -> float:
    """Attention on the source when some components' signals in some channels are removed."""
    which = torch.tensor([f], device=numbers.device)
    flat = (numbers[:, None] * scores.a.shape[-1] + channels).flatten()
    left = scores.logits[which] - candidates.rows(which, flat[None]).sum(dim=1)
    return float(attention_on(left, scores.visible[which], scores.firings.src[which], scores.cap))


register_method(ACC.name, ACC)
