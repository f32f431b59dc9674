"""ACC, the earlier method: channels from relative attention, then components inside that subspace.

Relative attention is the logit on the source less the mean logit of the other visible keys. It is linear, so
it divides exactly over channels and components; each step keeps the smallest prefix (largest first) that
reaches the total.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.tracing.attribution import attention_on
from headtrace.tracing.candidates import FiringScores, KeyCandidates, QueryCandidates
from headtrace.tracing.firing import Cause, FiringCauses, SideCauses, Tau, in_chunks, threshold
from headtrace.tracing.upstream import Composer, LayerFirings, Upstream
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from headtrace.models import Recording


def relative_weights(scores: FiringScores) -> Float[Tensor, "firing token"]:
    """The row that turns logits into relative attention: one at the source, minus the mean over other visible keys."""
    src = scores.firings.src[:, None]
    others = scores.visible.scatter(1, src, False)
    mean = others / others.sum(-1, keepdim=True).clamp_min(1).to(scores.logits.dtype)
    return (-mean).scatter(1, src, 1.0)


def smallest_prefix(
    terms: Float[Tensor, "firing n"], target: Float[Tensor, " firing"]
) -> Bool[Tensor, "firing n"]:
    """Largest terms first, as few as reach the target (all positive ones where rounding keeps them from it)."""
    values, order = terms.sort(dim=-1, descending=True, stable=True)
    before = torch.cat((torch.zeros_like(values[:, :1]), values.cumsum(-1)[:, :-1]), dim=-1)
    keep = (before < target[:, None]) & (values > 0)
    return torch.zeros_like(keep).scatter(1, order, keep)


@dataclass
class ACC:
    """Components that make up the relative attention inside the head's active channels."""

    composer: Composer
    tau: Tau = None
    name: str = "acc"

    def threshold(self, visible_keys: int) -> float:
        return threshold(self.tau, visible_keys)

    def follows(self, firing: Firing, attention: float, visible_keys: int) -> bool:
        return attention >= self.threshold(visible_keys)

    @torch.inference_mode()
    def trace(self, recording: Recording, firings: LayerFirings) -> list[FiringCauses]:
        return in_chunks(recording, firings, self.composer, self._chunk)

    def _chunk(self, firings: LayerFirings, upstream: Upstream) -> list[FiringCauses]:
        recording = upstream.recording
        scores = FiringScores.of(recording, firings, upstream.length, 1)
        scores = replace(scores, w=relative_weights(scores))
        terms = scores.a * (scores.w[:, None] @ scores.b)[:, 0] * scores.scale
        subspace = smallest_prefix(terms, terms.sum(-1))
        clean = attention_on(scores.logits, scores.visible, firings.src, scores.cap)
        sides = [
            self._side(scores, kind.of(scores, upstream), upstream, subspace, clean)
            for kind in (QueryCandidates, KeyCandidates)
        ]
        keys = scores.visible.sum(-1).tolist()
        return [
            FiringCauses(
                prompt,
                firing,
                float(clean[f]),
                self.threshold(keys[f]),
                sides[0][f],
                sides[1][f],
            )
            for f, (prompt, firing) in enumerate(firings.named())
        ]

    def _side(
        self,
        scores: FiringScores,
        candidates: QueryCandidates | KeyCandidates,
        upstream: Upstream,
        subspace: Bool[Tensor, "firing channel"],
        clean: Float[Tensor, " firing"],
    ) -> list[SideCauses]:
        """Smallest prefix of components that reaches the total inside the subspace; nothing for a negative total."""
        inside = (candidates.attributions() * subspace[:, None]).sum(-1)
        total = inside.sum(-1)
        chosen = smallest_prefix(inside, total)
        sides: list[SideCauses] = []
        for f in range(len(scores.firings)):
            channels = tuple(subspace[f].nonzero()[:, 0].tolist())
            numbers = chosen[f].nonzero()[:, 0]
            if float(total[f]) <= 0 or not numbers.numel():
                sides.append(SideCauses((), float(clean[f]), False))
                continue
            head = int(scores.firings.head[f])
            weights = inside[f, numbers].tolist()
            causes = [
                Cause(upstream.catalogue.component(number, head), channels, weight)
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
