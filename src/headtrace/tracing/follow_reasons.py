"""Why a node of a content or complete circuit is followed, its causes for each such reason, and where they write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.tracing.causes import Cause, Causes, PromptSite
from headtrace.tracing.mlp_causes import HALF, MAIN_READER, MlpReader, RemovedAlone
from headtrace.tracing.signal_directions import SignalDirection
from headtrace.tracing.sweep import attention_at
from headtrace.vocabulary import ATTENTION_SIDES, Component, Site

if TYPE_CHECKING:
    from headtrace.models import Recording


@dataclass
class FollowReason:
    """Why a node is followed, each reason with its influence."""

    content: float = 0.0
    """For its contribution to the root."""
    opposing: float = 0.0
    """For its contribution against the root: as strongly as its share of what speaks for it. It is no influence."""
    attending: float = 0.0
    """For attending, not for what it moved: a head that is the root itself."""
    signals: list[tuple[float, SignalDirection]] = field(default_factory=list[tuple[float, SignalDirection]])
    beside: float = 0.0
    """The part of this that is no influence, but for opposing: it leads to what holds a head down, or opposes."""
    readers: list[tuple[float, MlpReader]] = field(default_factory=list[tuple[float, MlpReader]])
    """MLPs that read what the node wrote, each with the influence that came through it."""

    @property
    def main_readers(self) -> list[MlpReader]:
        """The MLPs through which most of it came."""
        whole = sum(share for share, _ in self.readers)
        return [reader for share, reader in self.readers if share >= MAIN_READER * whole]

    @property
    def strength(self) -> float:
        """What decides whether a node is expanded: its influence, and what it does against the root."""
        return self.content + self.opposing + self.attending + sum(share for share, _ in self.signals)

    def of_attention(self, attention: bool) -> list[tuple[float, SignalDirection]]:
        """The signals of queries and keys, or the others."""
        return [each for each in self.signals if (each[1].side in ATTENTION_SIDES) == attention]


@dataclass(frozen=True)
class Part:
    """The causes of a node for one reason, as shares of what it is followed for."""

    influence: float
    """Of the reason."""
    causes: Sequence[Cause]
    direction: Float[Tensor, " d_model"] | None = None
    """Of what the node reads; None for content, for which every component has its own gradient."""
    written: Float[Tensor, " d_model"] | None = None
    """Of what an MLP writes: that which it is followed for is one along it."""


def with_removals(shown: Part, alone: RemovedAlone) -> list[Part]:
    """Causes of what an MLP wrote, by their shares through frozen gates, put right by what their removal does.

    Causes whose removal alone changes more than half and whose shares do not show it are added, each followed by its
    own secant. What opposes by its share, though nothing grows without it, is left out; of a signal, which is no sum
    that has to be complete, what would not grow by half.
    """
    signal = shown.direction is not None
    kept = tuple(c for c in shown.causes if c.weight >= 0 or not (signal or c.site in alone.not_opposing))
    shares = {cause.site: cause.weight for cause in kept}
    return [replace(shown, causes=kept)] + [
        Part(shown.influence, (one.cause,), one.direction, shown.written)
        for one in alone.causes
        if shares.get(one.cause.site, 0.0) * (1 if one.cause.weight > 0 else -1) < HALF
    ]


def combined(signals: list[tuple[float, SignalDirection]]) -> tuple[Float[Tensor, " d_model"], float]:
    """Several signals as one direction, weighted by influence; and their influence."""
    influence = sum(share for share, _ in signals)
    weighted = torch.stack([signal.direction * (share / influence) for share, signal in signals])
    return weighted.sum(dim=0), influence


NOTHING_WRITTEN = 1e-6
"""Attention, or a write relative to the component's longest one or the longest embedding, that is nothing."""


class KeyWrites:
    """What the components of a recording write at keys."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._sizes: dict[tuple[int, Component], list[float]] = {}

    def mark_elsewhere(self, attended: dict[PromptSite, Causes]) -> None:
        """Mark key-side causes that write nothing at the source: they matter by what they write at other keys. A bias
        of the head itself, and rounding, are in every key."""
        asked = [
            (at, number, cause.site)
            for at, why in attended.items()
            if "key" in why.sides
            for number, cause in enumerate(why.sides["key"].causes)
            if cause.site.possible and cause.at_source and cause.site.kind not in ("offset", "rounding")
        ]
        heads = [(at[0], source) for at, _, source in asked if source.kind == "head"]
        attention = iter(attention_at(self.recording, heads))
        nothing: dict[PromptSite, set[int]] = {}
        for at, number, source in asked:
            if source.kind == "head":
                written = next(attention)[0] > NOTHING_WRITTEN
            else:
                sizes, whole = (
                    self._write_sizes(at[0], part)[: (at[1].dest or 0) + 1]
                    for part in (source.component, Component("embedding"))
                )
                written = sizes[at[1].src or 0] > NOTHING_WRITTEN * max(*sizes, *whole)
            if not written:
                nothing.setdefault(at, set()).add(number)
        for at, numbers in nothing.items():
            side = attended[at].sides["key"]
            causes = tuple(
                replace(cause, at_source=False) if number in numbers else cause
                for number, cause in enumerate(side.causes)
            )
            attended[at] = replace(
                attended[at], sides={**attended[at].sides, "key": replace(side, causes=causes)}
            )

    def _write_sizes(self, number: int, component: Component) -> list[float]:
        """How long a component's write is at every token."""
        if (number, component) not in self._sizes:
            self._sizes[number, component] = self.recording.write(component, number).norm(dim=-1).tolist()
        return self._sizes[number, component]

    def of_heads(
        self, found: Mapping[PromptSite, Causes], groups: Mapping[PromptSite, tuple[int, ...]]
    ) -> dict[tuple[int, Site, Site], list[float]]:
        """How strongly each head that reads one source and is a key-side cause of a group writes at each key of it."""
        asked: list[tuple[int, Site, Site]] = []
        rows: list[tuple[int, int, int, int, int]] = []
        for (prompt, first), causes in found.items():
            for cause in causes.sides["key"].causes:
                c = cause.component
                if c.kind == "head" and c.layer is not None and c.head is not None and c.src is not None:
                    asked.append((prompt, first, cause.site))
                    rows += [(c.layer, prompt, c.head, dest, c.src) for dest in groups[prompt, first]]
        if not rows:
            return {}
        places = torch.tensor(rows, device=self.recording.model.device).unbind(dim=1)
        strengths = iter(self.recording.attention.at(*places).tolist())
        return {each: [next(strengths) for _ in groups[each[:2]]] for each in asked}
