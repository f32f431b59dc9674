"""SVT, singular vector tracing (the 2024 paper): upstream heads by what they write into a firing's signal channels.

A head fires when it puts more than half of its attention on one source; the first token is skipped. With
``channels="all"`` the trace ignores the SVD filter, which is the paper's negative control.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.channels.sparsity import signal_set
from headtrace.errors import InputError
from headtrace.tracing.acc import smallest_prefix
from headtrace.tracing.attribution import attention_on
from headtrace.tracing.candidates import FiringScores, KeyCandidates, QueryCandidates
from headtrace.tracing.causes import Cause, Causes, SideCauses
from headtrace.tracing.methods import Method, register_method
from headtrace.tracing.upstream import Composer, Firings, Upstream, in_chunks
from headtrace.vocabulary import Firing, Site

if TYPE_CHECKING:
    from headtrace.models import Recording

FIRES_ABOVE = 0.5
SHARE = 0.7
"""Upstream heads are kept until they reach this share of all contributions."""


@dataclass(frozen=True)
class SVT(Method):
    """Upstream heads only; each stands for its whole write, shown at the source it attends to most."""

    name: ClassVar[str] = "svt"
    rule: ClassVar[str | float] = FIRES_ABOVE
    channels: Literal["signal", "all"] = "signal"
    """The firing's signal set, or all channels (the control without the SVD)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels not in ("signal", "all"):
            raise InputError(f"channels={self.channels!r}: expected 'signal' or 'all'.")

    def default_threshold(self, visible_keys: int) -> float:
        return FIRES_ABOVE

    def follows(self, firing: Firing, attention: float, visible_keys: int) -> bool:
        return attention > self.threshold(visible_keys) and firing.src != 0

    @torch.inference_mode()
    def trace(self, recording: Recording, firings: Firings, composer: Composer) -> list[Causes]:
        return in_chunks(recording, firings, composer, self._chunk)

    def _chunk(self, firings: Firings, upstream: Upstream) -> list[Causes]:
        recording = upstream.recording
        scores = FiringScores.of(recording, firings, upstream.length, 1)
        n = len(firings)
        rows = torch.arange(n, device=firings.head.device)
        b_src = scores.b[rows, firings.src]
        terms = scores.a * b_src * scores.scale
        inside = torch.ones_like(terms, dtype=torch.bool) if self.channels == "all" else signal_set(terms)
        root = recording.model.channels.at(firings.layer, firings.head).singular_values.sqrt()
        sides = QueryCandidates.of(scores, upstream), KeyCandidates.of(scores, upstream)
        scores.require(*sides)
        rounding = scores.rounding(*sides)
        query, key = sides[0].by_head(), sides[1].heads_at(firings.src)
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
            Causes(
                prompt,
                site,
                {"query": _heard(sides[0][f]), "key": _heard(sides[1][f])},
                float(clean[f]),
                self.threshold(keys[f]),
                rounding[f],
            )
            for f, (prompt, site) in enumerate(firings.sites)
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
                src = int(recording.attention.row(layer, p, head, t)[: t + 1].argmax())
                causes.append(
                    Cause(Site("head", layer, head, t, src), float(contributions[f, number]), channels)
                )
            sides.append(tuple(sorted(causes, key=lambda cause: -cause.weight)))
        return sides


def _heard(causes: tuple[Cause, ...]) -> SideCauses:
    return SideCauses(causes, None, bool(causes))


register_method(SVT.name, SVT)
