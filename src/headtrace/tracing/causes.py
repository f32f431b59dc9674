"""What a trace finds: the causes of a site, side by side, each a signal that another site wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from headtrace.vocabulary import AttentionSide, Component, Firing, Side, Site


@dataclass(frozen=True)
class Cause:
    """A site whose signal holds up another one: its channels, and what it accounts for.

    The weight is the attention that removing the signal takes away; for a root, the contribution in its own unit.
    """

    site: Site
    weight: float
    channels: tuple[int, ...] | None = None

    @property
    def component(self) -> Component:
        """The component that wrote the signal."""
        return self.site.component


@dataclass(frozen=True)
class SideCauses:
    """One side: its causes, and the attention that is left when their signals are removed."""

    causes: tuple[Cause, ...]
    predicted: float | None = None
    """None where there is no prediction (SVT, roots)."""
    explained: bool = True
    """False if everything was removed and the attention still held."""

    @cached_property
    def in_graph(self) -> tuple[Cause, ...]:
        """Causes that are nodes of a circuit: all but heads that read a token after the position they are asked at."""
        return tuple(cause for cause in self.causes if cause.site.possible)

    @property
    def elsewhere(self) -> tuple[Cause, ...]:
        """Heads that, for causality's sake, wrote at other keys only: part of the claim, not of the graph."""
        return tuple(cause for cause in self.causes if not cause.site.possible)


@dataclass(frozen=True)
class Causes:
    """Everything found about one site of one prompt."""

    prompt: int
    site: Site
    sides: Mapping[Side, SideCauses]
    attention: float | None = None
    threshold: float | None = None
    rounding: float | None = None
    """In half precision, how far attention would be elsewhere without what rounding added to the query and keys."""

    @property
    def firing(self) -> Firing:
        """The firing whose causes these are."""
        return self.site.firing

    @property
    def explained(self) -> bool:
        """Whether removing the signals changes where the head attends, on both sides."""
        return all(side.explained for side in self.sides.values())

    def side(self, side: AttentionSide) -> SideCauses:
        """The causes on one side."""
        return self.sides[side]

    @property
    def query(self) -> SideCauses:
        """The causes on the query side."""
        return self.sides["query"]

    @property
    def key(self) -> SideCauses:
        """The causes on the key side."""
        return self.sides["key"]
