"""SVT, singular vector tracing (the 2024 paper): upstream heads by what they write into a firing's signal channels.

A head fires when it puts more than half of its attention on one source; the first token is skipped. With
``channels="all"`` the trace ignores the SVD filter, which is the paper's negative control.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.channels.sparsity import signal_set
from headtrace.tracing.acc import smallest_prefix
from headtrace.tracing.attribution import attention_on
from headtrace.tracing.candidates import FiringScores, KeyCandidates, QueryCandidates
from headtrace.tracing.firing import Cause, FiringCauses, SideCauses, Tau, in_chunks
from headtrace.tracing.upstream import Composer, LayerFirings, Upstream
from headtrace.vocabulary import Component, Firing

if TYPE_CHECKING:
    from headtrace.models import Recording

FIRES_ABOVE = 0.5
SHARE = 0.7
"""Upstream heads are kept until they reach this share of all contributions."""


@dataclass
class SVT:
    """Upstream heads only; each stands for its whole write, shown at the source it attends to most."""

    composer: Composer
    tau: Tau = None
    all_channels: bool = False
    name: str = "svt"

    def threshold(self, visible_keys: int) -> float:
        if self.tau is None:
            return FIRES_ABOVE
        return float(self.tau(visible_keys)) if callable(self.tau) else float(self.tau)

    def follows(self, firing: Firing, attention: float, visible_keys: int) -> bool:
        return attention > self.threshold(visible_keys) and firing.src != 0

    @torch.inference_mode()
    def trace(self, recording: Recording, firings: LayerFirings) -> list[FiringCauses]:
        return in_chunks(recording, firings, self.composer, self._chunk)

    def _chunk(self, firings: LayerFirings, upstream: Upstream) -> list[FiringCauses]:
        recording = upstream.recording
        scores = FiringScores.of(recording, firings, upstream.length, 1)
        n, heads_up = len(firings), firings.layer * recording.model.n_heads
        rows = torch.arange(n, device=firings.head.device)
        b_src = scores.b[rows, firings.src]
        terms = scores.a * b_src * scores.scale
        inside = torch.ones_like(terms, dtype=torch.bool) if self.all_channels else signal_set(terms)
        root = recording.model.channels.singular_values[firings.layer, firings.head].sqrt()
        query = QueryCandidates.of(scores, upstream).coefficients[:, upstream.catalogue.n_plain :]
        query = query.reshape(n, heads_up, -1, query.shape[-1]).sum(dim=2)
        key = KeyCandidates.of(scores, upstream).heads_at(firings.src)
        toward_query = scores.a.sign() / root.clamp_min(torch.finfo(root.dtype).tiny)
        clean = attention_on(scores.logits, scores.visible, firings.src, scores.cap)
        sides = (
            self._side(
                recording,
                firings.prompt,
                firings.dest,
                (query * (toward_query * inside)[:, None]).sum(-1),
                inside,
            ),
            self._side(
                recording,
                firings.prompt,
                firings.src,
                (key * (b_src.sign() * root * inside)[:, None]).sum(-1),
                inside,
            ),
        )
        keys = scores.visible.sum(-1).tolist()
        return [
            FiringCauses(
                prompt,
                firing,
                float(clean[f]),
                self.threshold(keys[f]),
                SideCauses(sides[0][f], None, bool(sides[0][f])),
                SideCauses(sides[1][f], None, bool(sides[1][f])),
            )
            for f, (prompt, firing) in enumerate(firings.named())
        ]

    def _side(
        self,
        recording: Recording,
        prompt: Int[Tensor, " firing"],
        token: Int[Tensor, " firing"],
        contributions: Float[Tensor, "firing head_up"],
        inside: Bool[Tensor, "firing channel"],
    ) -> list[tuple[Cause, ...]]:
        """The smallest set of upstream heads that reaches 70% of the summed contributions."""
        chosen = smallest_prefix(contributions, SHARE * contributions.sum(-1))
        n_heads = recording.model.n_heads
        sides: list[tuple[Cause, ...]] = []
        for f, (p, t) in enumerate(zip(prompt.tolist(), token.tolist(), strict=True)):
            channels = tuple(inside[f].nonzero()[:, 0].tolist())
            causes: list[Cause] = []
            for number in chosen[f].nonzero()[:, 0].tolist():
                layer, head = divmod(number, n_heads)
                src = int(recording.patterns[layer, p, head, t, : t + 1].argmax())
                causes.append(
                    Cause(Component("head", layer, head, src), channels, float(contributions[f, number]))
                )
            sides.append(tuple(sorted(causes, key=lambda cause: -cause.weight)))
        return sides
