"""Signals: what a component writes into a firing's channels, in the head's own space and as a residual vector.

The signal of component c in channels S is the minimal-norm residual vector that carries exactly those coefficients and
none in the other channels. It is computed here from the component's recorded write, not from the tracer's attributions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.circuits import Circuit, Edge
from headtrace.errors import InputError
from headtrace.models.devices import exact, rounded
from headtrace.vocabulary import (
    ATTENTION_SIDES,
    AttentionSide,
    Component,
    Firing,
    FiringName,
    head_name,
)

if TYPE_CHECKING:
    from headtrace.models import Recording

ABLATE, BOOST = 0.0, 2.0
"""What a signal is multiplied by."""
Scope = Literal["claim", "token"]
"""Where a key signal is changed: at every key that the destination sees, or at the firing's source alone."""


@dataclass(frozen=True)
class Signal:
    """One claim of a circuit: a component writes into channels that a firing reads, on one side."""

    firing: Firing
    side: AttentionSide
    component: Component
    channels: tuple[int, ...]

    @classmethod
    def of(cls, circuit: Circuit, edge: Edge) -> Signal:
        """The signal of an edge on the query or key side; other edges carry none."""
        if edge.side not in ATTENTION_SIDES:
            raise InputError(
                f"The edge from {circuit.node(edge.source).name} goes to the {edge.side} side of "
                f"{circuit.node(edge.target).name}: it is not a signal that decides where a head attends. Choose an "
                "edge on the query or key side."
            )
        target, source = circuit.node(edge.target).site, circuit.node(edge.source).site
        return cls(target.firing, edge.side, source.component, edge.channels or ())

    def with_channels(self, channels: Sequence[int]) -> Signal:
        """The same signal in other channels, such as random ones as a control."""
        return Signal(self.firing, self.side, self.component, tuple(channels))


@dataclass(frozen=True)
class Reader:
    """One side of one firing: how its head reads residuals into channels, with all scales frozen (prompt 0)."""

    recording: Recording
    firing: Firing
    side: AttentionSide

    @property
    def _kv(self) -> int:
        return self.firing.head // self.recording.model.weights.group

    @property
    def W(self) -> Float[Tensor, "d_model d_head"]:
        weights, layer = self.recording.model.weights, self.firing.layer
        return weights.W_Q[layer, self.firing.head] if self.side == "query" else weights.W_K[layer, self._kv]

    @property
    def bias(self) -> Float[Tensor, " d_head"]:
        weights, layer = self.recording.model.weights, self.firing.layer
        return weights.b_Q[layer, self.firing.head] if self.side == "query" else weights.b_K[layer, self._kv]

    @property
    def head_scale(self) -> Float[Tensor, "token 1"]:
        """The frozen QK-norm scale, one where there is none."""
        rec, layer = self.recording, self.firing.layer
        if rec.query_scales is None or rec.key_scales is None:
            return rec.norm_scales.new_ones(rec.lengths[0], 1)
        scales = (
            rec.query_scales[layer, 0, self.firing.head]
            if self.side == "query"
            else rec.key_scales[layer, 0, self._kv]
        )
        return scales[:, None]

    @property
    def norm_scale(self) -> Float[Tensor, "token 1"]:
        return self.recording.norm_scales[self.firing.layer, 0][:, None]

    @property
    def bases(self) -> tuple[Float[Tensor, "d_head channel"], Float[Tensor, "d_head channel"]]:
        """From head space to coefficients, and (transposed) back."""
        channels = self.recording.model.channels.at(self.firing.layer, self.firing.head)
        query, key = channels.to_query, channels.to_key
        return (query, key) if self.side == "query" else (key, query)

    def coefficients(self, component: Component) -> Float[Tensor, "token channel"]:
        """The component's channel coefficients at every token."""
        if component.kind == "rounding" and component.layer == self.firing.layer:
            queries, keys = self.recording.reading_roundings(self.firing.layer)
            own = queries[0, self.firing.head] if self.side == "query" else keys[0, self._kv]
            return own @ self.bases[0]
        if component.kind == "offset":
            return self._read(self.bias.expand(self.recording.lengths[0], -1))
        return self.read(self.recording.write(component))

    def read(self, write: Float[Tensor, "token d_model"]) -> Float[Tensor, "token channel"]:
        """Channel coefficients of what is written into the residual at every token."""
        return self._read((write / self.norm_scale) @ self.W)

    def _read(self, part: Float[Tensor, "token d_head"]) -> Float[Tensor, "token channel"]:
        part = part / self.head_scale
        rotary = self.recording.rotary[self.firing.layer]
        if rotary is not None:
            part = rotary.rotate(part[None, None])[0, 0].to(part.dtype)
        return part @ self.bases[0]

    def in_head(self, coefficients: Float[Tensor, "*n token channel"]) -> Float[Tensor, "*n token d_head"]:
        """Coefficients as a vector in the head's space, where queries and keys meet (after QK-norm and rotary)."""
        return coefficients @ self.bases[1].T

    def in_residual(
        self, coefficients: Float[Tensor, "*n token channel"]
    ) -> Float[Tensor, "*n token d_model"]:
        """Coefficients as the minimal-norm residual vector that carries them."""
        part = self.in_head(coefficients)
        rotary = self.recording.rotary[self.firing.layer]
        if rotary is not None:
            back = rotary.inverse.rotate(part.reshape(1, -1, *part.shape[-2:]))
            part = back.reshape(part.shape).to(part.dtype)
        # The pseudo-inverse of the projection, computed in float64, once per head and side while the weights stay.
        head = self.firing.head if self.side == "query" else self._kv
        inverse = self.recording.model.cached(
            f"inverse of {self.side} {self.firing.layer} {head}",
            lambda: rounded(torch.linalg.pinv(exact(self.W)), like=self.W),
        )
        return (part * self.head_scale @ inverse) * self.norm_scale

    def positions(self, scope: Scope) -> Bool[Tensor, " token"]:
        """Where an intervention acts: the destination; every visible key (claim), or the source alone (token)."""
        rec, firing = self.recording, self.firing
        if self.side == "key" and scope == "claim":
            return rec.visible[firing.layer][0, firing.dest]
        where = torch.zeros(rec.lengths[0], dtype=torch.bool, device=rec.token_ids.device)
        where[firing.dest if self.side == "query" else firing.src] = True
        return where


def channel_mask(channels: Sequence[int], size: int, like: Tensor) -> Float[Tensor, " channel"]:
    mask = like.new_zeros(size)
    mask[list(channels)] = 1.0
    return mask


def random_channels(
    channels: Sequence[int], size: int, draws: int, generator: torch.Generator
) -> list[tuple[int, ...]]:
    """Controls: as many channels, drawn from those that the signal does not use (fewer if there are not enough)."""
    free = torch.tensor([k for k in range(size) if k not in set(channels)])
    count = min(len(channels), free.numel())
    return [
        tuple(sorted(free[torch.randperm(free.numel(), generator=generator)[:count]].tolist()))
        for _ in range(draws)
    ]


def coefficients(
    recording: Recording, signal: Signal, scope: Scope
) -> tuple[Reader, Float[Tensor, "token channel"]]:
    """The signal's channel coefficients where the intervention acts, zero elsewhere."""
    reader = Reader(recording, signal.firing, signal.side)
    every = reader.coefficients(signal.component)
    mask = channel_mask(signal.channels, every.shape[-1], every)
    return reader, every * mask * reader.positions(scope)[:, None]


def signal_vectors(
    recording: Recording, circuit: Circuit
) -> Iterator[tuple[Edge, Signal, Float[Tensor, " d_model"]]]:
    """Each query and key edge with its signal as a residual vector where it is read.

    That is at the firing's destination for queries, and at its source for keys.
    """
    for edge in circuit.edges:
        if edge.side in ATTENTION_SIDES:
            signal = Signal.of(circuit, edge)
            reader, values = coefficients(recording, signal, "token")
            at = signal.firing.dest if signal.side == "query" else signal.firing.src
            yield edge, signal, reader.in_residual(values)[at]


def residual_change(
    recording: Recording, signals: Signal | Sequence[Signal], factor: float = ABLATE
) -> tuple[float, float]:
    """Cosine and norm ratio of the residual that the head reads, before and after changing signals there.

    Several signals must be of one firing and side: they meet in one residual.
    """
    many = [signals] if isinstance(signals, Signal) else list(signals)
    signal = many[0]
    if any((s.firing, s.side) != (signal.firing, signal.side) for s in many):
        raise InputError("Only signals of one firing and side meet in one residual.")
    reader = Reader(recording, signal.firing, signal.side)
    values = torch.stack([coefficients(recording, each, "token")[1] for each in many]).sum(dim=0)
    position = signal.firing.dest if signal.side == "query" else signal.firing.src
    before = recording.model.architecture.centred(recording.residuals[signal.firing.layer, 0, position])
    after = before + (factor - 1) * reader.in_residual(values)[position]
    cosine = torch.nn.functional.cosine_similarity(before, after, dim=0)
    return float(cosine), float(after.norm() / before.norm())


# -- edges by name ---------------------------------------------------------------------------------------------


def find_edge(circuit: Circuit, source: str, target: str, side: str) -> Edge:
    """An edge by the names of its ends (a firing also as ``L9H6:14:3`` or ``L9H6:to:John``); an error lists what there
    is."""
    source, target = node_name(source, circuit), node_name(target, circuit)
    wanted = circuit.node(target)
    for edge in circuit.edges_into(wanted):
        if edge.side == side and circuit.node(edge.source).name == source:
            return edge
    there = (
        ", ".join(f"{circuit.node(e.source).name} ({e.side})" for e in circuit.edges_into(wanted)[:8])
        or "none"
    )
    raise InputError(f"There is no {side} edge from {source!r} to {target!r}. Into {target!r} go: {there}.")


def edge_name(circuit: Circuit, edge: Edge) -> str:
    """An edge in a sentence: ``MLP 3 @5 => query of L9H6 14->3``."""
    return f"{circuit.node(edge.source).name} => {edge.side} of {circuit.node(edge.target).name}"


def node_name(text: str, circuit: Circuit | None = None) -> str:
    """The name of a node as a user may write it: a firing also as ``L9H6:14:3``, a head in small letters; in a circuit,
    a firing by words as well (``L9H6:to:John#2``), or by its head, if no other firing of the circuit is meant."""
    try:
        name = FiringName.parse(text)
    except InputError:
        return text.strip()
    tokens = () if circuit is None else circuit.prompt.tokens
    dests, srcs = (None if place is None else place.positions(tokens) for place in (name.dest, name.src))
    if dests is not None and srcs is not None and len(dests) == len(srcs) == 1:
        return str(Firing(name.layer, name.head, dests[0], srcs[0]))
    if circuit is None:
        return head_name(name.layer, name.head)
    meant = [
        node.name
        for node in circuit.heads()
        if (node.layer, node.head) == (name.layer, name.head)
        and (dests is None or node.dest in dests)
        and (srcs is None or node.src in srcs)
    ]
    if len(meant) > 1:
        raise InputError(
            f"{text.strip()!r} could mean {len(meant)} firings of the circuit: write {', '.join(meant)}."
        )
    return meant[0] if meant else text.strip()
