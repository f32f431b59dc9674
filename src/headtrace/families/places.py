"""Where an edge without positions acts in a prompt: where the prompt's own circuit has it, or at the places of roles.

>>> roles = {"IO": 2, "S1": 4, "end": 14}
>>> role_at(4, roles), role_at(5, roles), role_at(9, roles), position_at("S1+1", roles)
('S1', 'S1+1', None, 5)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headtrace.causal.signals import Signal
from headtrace.circuits import Circuit, Edge
from headtrace.families.items import component_name
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, Component, Firing, Site

NEXT = "+1"
"""The token after one that has a role: heads that look back by one token write there."""


def role_at(position: int | None, roles: Mapping[str, int]) -> str | None:
    """The role of a position, or of the one before it; None where neither has one."""
    if position is None:
        return None
    names = {place: name for name, place in roles.items()}
    before = names.get(position - 1)
    return names.get(position) or (None if before is None else before + NEXT)


def position_at(role: str | None, roles: Mapping[str, int]) -> int | None:
    """The position of a role in a prompt."""
    if role is None:
        return None
    place = roles.get(role)
    if place is None and role.endswith(NEXT) and role.removesuffix(NEXT) in roles:
        place = roles[role.removesuffix(NEXT)] + 1
    return place


@dataclass(frozen=True)
class Wanted:
    """An edge as an item: components, and perhaps one channel."""

    source: str
    target: str
    channel: int | None = None

    def edges(self, circuit: Circuit) -> list[Edge]:
        """The query and key edges of a circuit that are this item."""
        return [edge for edge in circuit.edges if edge.side in ATTENTION_SIDES and self._is(circuit, edge)]

    def _is(self, circuit: Circuit, edge: Edge) -> bool:
        return (
            component_name(circuit.node(edge.source).site) == self.source
            and component_name(circuit.node(edge.target).site) == self.target
            and (self.channel is None or self.channel in (edge.channels or ()))
        )

    def signal(self, circuit: Circuit, edge: Edge) -> Signal:
        """The edge's signal; with a channel, only what is in that one."""
        signal = Signal.of(circuit, edge)
        return signal if self.channel is None else signal.with_channels([self.channel])


@dataclass(frozen=True)
class Place:
    """Where a signal acts, in the words of roles."""

    source: Site
    target: Site
    side: AttentionSide
    dest: str
    src: str
    source_src: str | None
    """What the writing head read; None for an MLP."""

    @classmethod
    def of(cls, circuit: Circuit, edge: Edge, roles: Mapping[str, int]) -> Place | None:
        """None where a position has no role."""
        source, target = circuit.node(edge.source).site, circuit.node(edge.target).site
        dest, src, read = (role_at(at, roles) for at in (target.dest, target.src, source.src))
        if dest is None or src is None or (source.src is not None and read is None):
            return None
        bare = Site(source.kind, source.layer, source.head), Site("head", target.layer, target.head)
        return cls(*bare, edge.side, dest, src, read)  # type: ignore[arg-type]

    def signal(self, roles: Mapping[str, int], channels: tuple[int, ...], length: int) -> Signal | None:
        """The same in another prompt; None where it does not have the roles, or has them in an impossible order."""
        dest, src, read = (position_at(role, roles) for role in (self.dest, self.src, self.source_src))
        if dest is None or src is None or (self.source_src is not None and read is None):
            return None
        at = dest if self.side == "query" else src
        if not src <= dest < length or (read is not None and read > at):
            return None
        firing = Firing(self.target.layer or 0, self.target.head or 0, dest, src)
        return Signal(
            firing,
            self.side,
            Component(self.source.kind, self.source.layer, self.source.head, read),
            channels,
        )


@dataclass(frozen=True)
class Usual:
    """Where most circuits of a family have an edge, and in which channels."""

    place: Place
    channels: tuple[int, ...]


def usual_place(wanted: Wanted, circuits: Iterable[tuple[Circuit, Mapping[str, int]]]) -> Usual | None:
    """The most frequent place of an edge among circuits whose prompts have roles, and the channels that at least half
    of the edges there use."""
    places: dict[Place, list[tuple[int, ...]]] = {}
    for circuit, roles in circuits:
        for edge in wanted.edges(circuit):
            place = Place.of(circuit, edge, roles)
            if place is not None:
                places.setdefault(place, []).append(edge.channels or ())
    if not places:
        return None
    place, seen = max(places.items(), key=lambda each: len(each[1]))
    if wanted.channel is not None:
        return Usual(place, (wanted.channel,))
    counts = Counter(channel for channels in seen for channel in channels)
    return Usual(place, tuple(sorted(channel for channel, count in counts.items() if 2 * count >= len(seen))))
