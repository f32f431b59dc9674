"""What a circuit claims about one side of a firing: its signals, their removal, and the weights of their edges.

Everything is computed from the components' recorded writes, not from the tracer's candidates: the two must agree.
Nothing is searched for again: the signals are those of the file, and only what they account for is computed anew, so
that a near tie between candidates cannot make a true circuit look false.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.causal.changes import Intervention, LocalEdit
from headtrace.causal.opening import Tolerance
from headtrace.causal.signals import Reader, Signal
from headtrace.channels.sparsity import along_own, first_of_group
from headtrace.circuits import Circuit, CompetingKeySignal, Edge, Node
from headtrace.measures import relative_row
from headtrace.models.attention import softcap
from headtrace.models.devices import exact, exact_device
from headtrace.tracing.firing import attribution_vector
from headtrace.tracing.methods import IG_STEPS, EdgeWeight
from headtrace.vocabulary import AttentionSide, Component, Firing

if TYPE_CHECKING:
    from headtrace.models import Recording

ORDERS = 16
"""Orders of removal that are tried where rounding could have decided the order."""


@dataclass(frozen=True)
class Row:
    """One firing's row of attention as it was recorded, in float64 (prompt 0)."""

    recording: Recording
    firing: Firing
    group: tuple[int, ...] | None = None
    """Where the firing is explained together with others: the positions of all."""

    @cached_property
    def logits(self) -> Float[Tensor, " token"]:
        """Before softcap and mask."""
        rec, f = self.recording, self.firing
        keys = exact(rec.keys[f.layer, 0, f.head // rec.model.weights.group])
        return (keys @ exact(rec.queries[f.layer, 0, f.head, f.dest])) * rec.scales[f.layer]

    @cached_property
    def visible(self) -> Bool[Tensor, " token"]:
        return self.recording.visible[self.firing.layer][0, self.firing.dest].to(self.logits.device)

    @cached_property
    def n_visible(self) -> int:
        """How many keys the destination sees."""
        return int(self.recording.visible_keys[self.firing.layer, 0, self.firing.dest])

    @cached_property
    def size(self) -> float:
        """The largest logit that counts."""
        return float(self.logits.masked_fill(~self.visible, 0.0).abs().max())

    @cached_property
    def attention(self) -> float:
        f = self.firing
        return float(self.recording.attention.at(f.layer, 0, f.head, f.dest, f.src))

    def attention_with(self, logits: Float[Tensor, "*n token"]) -> Float[Tensor, "*n"]:
        """Attention on the source, or on all of its group, with other logits."""
        scores = softcap(logits, self.recording.softcaps[self.firing.layer])
        attention = scores.masked_fill(~self.visible, -torch.inf).softmax(dim=-1)
        return attention[..., list(self.group or (self.firing.src,))].sum(dim=-1)

    @cached_property
    def sources(self) -> Bool[Tensor, " token"]:
        """The source, or all of its group, as a mask."""
        mask = torch.zeros_like(self.visible)
        mask[list(self.group or (self.firing.src,))] = True
        return mask


@dataclass(frozen=True)
class SideClaim:
    """The signals that hold up one side of a firing, as a circuit has them: its edges, and what is `elsewhere`."""

    recording: Recording
    node: Node
    side: AttentionSide
    parts: tuple[Edge | CompetingKeySignal, ...]
    """Where the file says so, one for each signal."""
    signals: tuple[Signal, ...]
    ig_steps: int = IG_STEPS
    """Steps of the integrated gradients that the candidates were ordered by."""

    @classmethod
    def of(cls, recording: Recording, circuit: Circuit, node: Node, side: AttentionSide) -> SideClaim:
        edges = [edge for edge in circuit.edges_into(node) if edge.side == side and not edge.alone]
        signals = [Signal.of(circuit, edge) for edge in edges]
        others = (node.elsewhere or ()) if side == "key" else ()
        firing = node.site.firing
        signals += [Signal(firing, side, e.component, e.channels) for e in others]
        steps = circuit.method.ig_steps or IG_STEPS
        return cls(recording, node, side, (*edges, *others), tuple(signals), steps)

    @property
    def firing(self) -> Firing:
        return self.node.site.firing

    @cached_property
    def row(self) -> Row:
        return Row(self.recording, self.firing, self.node.group)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.recording, self.firing, self.side)

    @property
    def keys(self) -> Float[Tensor, "token d_head"]:
        """The keys that the firing's head reads."""
        rec, f = self.recording, self.firing
        return rec.keys[f.layer, 0, f.head // rec.model.weights.group]

    def coefficients(self, components: Sequence[Component]) -> Float[Tensor, "component token channel"]:
        """Channel coefficients of components at every token."""
        return torch.stack([self.reader.coefficients(component) for component in components])

    @cached_property
    def _own(self) -> Float[Tensor, "signal token channel"]:
        return self.coefficients([signal.component for signal in self.signals])

    @cached_property
    def claimed(self) -> Int[Tensor, "2 claimed"]:
        """The signal (its number) and the channel of each claimed (component, channel)."""
        pairs = [(i, k) for i, signal in enumerate(self.signals) for k in sorted(set(signal.channels))]
        device = exact_device(self.recording.token_ids.device)
        return torch.tensor(pairs, dtype=torch.long, device=device).reshape(-1, 2).T

    @cached_property
    def rows(self) -> Float[Tensor, "claimed token"]:
        """What each claimed (component, channel) adds to the logits: ``scale a^c b`` or ``scale a b^c``; float64."""
        f, rec, (signal, channel) = self.firing, self.recording, self.claimed
        channels, scale = rec.model.channels.at(f.layer, f.head), rec.scales[f.layer]
        if self.side == "query":
            other = (exact(self.keys) @ exact(channels.to_key))[:, channel].T
            own = self._own[signal, f.dest, channel][:, None]
        else:
            query = exact(rec.queries[f.layer, 0, f.head, f.dest])
            other = (query @ exact(channels.to_query))[channel][:, None]
            own = self._own[signal, :, channel]
        return exact(own) * other * scale

    @cached_property
    def candidates(self) -> tuple[Int[Tensor, " candidate"], Float[Tensor, "candidate token"]]:
        """The signal of each candidate, and what it adds to the logits. A signal's channels of equal singular values
        are one candidate: their basis is arbitrary, so the tracer ranks and removes them as a whole."""
        f, (signal, channel) = self.firing, self.claimed
        values = self.recording.model.channels.at(f.layer, f.head).singular_values
        group = first_of_group(values).to(channel.device)[channel]
        pairs, own = torch.stack((signal, group)).unique(dim=1, return_inverse=True)
        rows = self.rows.new_zeros(pairs.shape[1], self.rows.shape[1])
        return pairs[0], rows.index_add_(0, own, self.rows)

    @cached_property
    def size(self) -> float:
        """The largest number that a removal computes with: a logit, or what is taken from one."""
        if not self.claimed.numel():
            return self.row.size
        return max(self.row.size, float((self.rows * self.row.visible).abs().max()))

    def by_signal(self, values: Float[Tensor, " claimed"]) -> Float[Tensor, " signal"]:
        """Numbers of every claimed (component, channel), added up by signal."""
        return values.new_zeros(len(self.signals)).index_add_(0, self.claimed[0], values)

    @property
    def intervention(self) -> Intervention:
        """Every claimed signal removed at once; on the key side from every visible key."""
        if not self.signals:
            return Intervention((), self.firing, self.node.group)
        mask = self._own.new_zeros(len(self.signals), self._own.shape[-1])
        mask[self.claimed.unbind()] = 1.0
        claimed = (self._own * mask[:, None]).sum(0) * self.reader.positions("claim")[:, None]
        moved = self.reader.in_head(-claimed)
        query, keys = (moved[self.firing.dest], None) if self.side == "query" else (None, moved)
        return Intervention((LocalEdit(self.firing, query, keys),), self.firing, self.node.group)


def claim(recording: Recording, circuit: Circuit, node: Node, side: AttentionSide) -> Intervention:
    """Remove every signal that the circuit claims for one side of a firing, from every visible key."""
    return SideClaim.of(recording, circuit, node, side).intervention


# -- weights ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightRange:
    """The weight of each signal of a side; a range where the order of removal is within rounding."""

    low: Float[Tensor, " signal"]
    high: Float[Tensor, " signal"]
    allowed: float


WeightRule = Callable[[SideClaim, Tolerance], WeightRange]


def removal_weights(claim: SideClaim, tolerance: Tolerance) -> WeightRange:
    """ACC++: the attention that each signal took away when candidates were removed by falling attribution.

    The attributions of two candidates may be closer than rounding. Only where the weights are not what the file has
    are other orders tried, each as attributions within the tolerance would give it.
    """
    row, (_, rows) = claim.row, claim.candidates
    visible, src = row.visible[None], row.sources[None]
    cap = claim.recording.softcaps[claim.firing.layer]
    attributions = rows @ attribution_vector(row.logits[None], visible, src, cap, claim.ig_steps)[0]
    allowed = 2 * tolerance.attention(claim.size)  # a weight is a difference of two attentions
    found = _removed_in_order(claim, attributions)
    low = high = found
    written = found.new_tensor([part.weight for part in claim.parts])
    if bool(((found - written).abs() > allowed).any()):
        generator = torch.Generator().manual_seed(0)  # on the host, so that it draws alike on every device
        for _ in range(ORDERS):
            noise = torch.rand(attributions.shape, generator=generator, dtype=rows.dtype).to(rows.device)
            other = _removed_in_order(claim, attributions + (noise - 0.5) * allowed)
            low, high = torch.minimum(low, other), torch.maximum(high, other)
    return WeightRange(low, high, allowed)


def _removed_in_order(
    claim: SideClaim, attributions: Float[Tensor, " candidate"]
) -> Float[Tensor, " signal"]:
    """The attention that each signal takes away when its candidates are removed by falling attribution."""
    order = attributions.argsort(descending=True, stable=True)
    signal, rows = claim.candidates
    left = claim.row.logits - torch.cat((torch.zeros_like(rows[:1]), rows[order])).cumsum(0)
    attention = claim.row.attention_with(left)
    taken = attention[:-1] - attention[1:]
    return taken.new_zeros(len(claim.signals)).index_add_(0, signal[order], taken)


def relative_weights(claim: SideClaim, tolerance: Tolerance) -> WeightRange:
    """ACC: what each signal adds to relative attention, the logit on the source less the others' mean."""
    src = torch.tensor([claim.firing.src], device=claim.rows.device)
    found = claim.by_signal(claim.rows @ relative_row(claim.row.visible[None], src, claim.rows.dtype)[0])
    return WeightRange(found, found, 2 * tolerance.number(claim.size))


def coefficient_weights(claim: SideClaim, tolerance: Tolerance) -> WeightRange:
    """SVT: what each upstream head as a whole adds to the coefficients, along the token's own signs."""
    f, rec, side, (signal, channel) = claim.firing, claim.recording, claim.side, claim.claimed
    heads = [Component("head", s.component.layer, s.component.head) for s in claim.signals]
    place, read = (f.dest, rec.queries[f.layer, 0, f.head]) if side == "query" else (f.src, claim.keys)
    own = exact(claim.coefficients(heads))[signal, place, channel]
    token = exact(read[place]) @ exact(claim.reader.bases[0])
    values = rec.model.channels.at(f.layer, f.head).singular_values
    root, own_direction = exact(values).sqrt(), along_own(token, first_of_group(values).to(token.device))
    stretch = 1 / root.clamp_min(torch.finfo(rec.model.dtype).tiny) if side == "query" else root
    found = claim.by_signal(own * (own_direction * stretch)[channel])
    size = float((token.abs() * stretch)[channel].sum())
    return WeightRange(found, found, 2 * tolerance.number(size))


RULES: dict[EdgeWeight, WeightRule] = {
    "attention removed": removal_weights,
    "relative attention": relative_weights,
    "coefficients": coefficient_weights,
}
"""How a signal's weight is computed again, by what the method says that it measures."""
