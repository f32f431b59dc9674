"""What the weights of a firing's edges should be, by the rule of the method that found them.

Nothing is searched for again: the signals are those of the file, and only what they account for is computed anew, so
that a near tie between candidates cannot make a true circuit look false.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.causal.claims import SideClaim
from headtrace.causal.tolerance import Tolerance
from headtrace.models.devices import exact
from headtrace.relative import relative_row
from headtrace.tracing.attribution import IG_STEPS, attribution_vector
from headtrace.vocabulary import Component

if TYPE_CHECKING:
    from headtrace.circuits import MethodInfo

ORDERS = 16
"""Orders of removal that are tried where rounding could have decided the order."""


@dataclass(frozen=True)
class Weighed:
    """The weight of each signal of a side; a range where the order of removal is within rounding."""

    low: Float[Tensor, " signal"]
    high: Float[Tensor, " signal"]
    allowed: float


Weigh = Callable[[SideClaim, "MethodInfo", Tolerance, Float[Tensor, " signal"]], Weighed]


def weigh_removals(
    claim: SideClaim, method: MethodInfo, tolerance: Tolerance, written: Float[Tensor, " signal"]
) -> Weighed:
    """ACC++: the attention that each signal took away when candidates were removed by falling attribution.

    The attributions of two candidates may be closer than rounding. Only where the weights are not what the file has
    (``written``) are other orders tried, each as attributions within the tolerance would give it.
    """
    row, rows = claim.row, claim.rows
    steps = method.ig_steps or IG_STEPS
    visible, src = row.visible[None], torch.tensor([claim.firing.src], device=rows.device)
    cap = claim.recording.softcaps[claim.firing.layer]
    attributions = rows @ attribution_vector(row.logits[None], visible, src, cap, steps)[0]
    allowed = 2 * tolerance.attention(claim.size)  # a weight is a difference of two attentions
    found = _taken(claim, attributions)
    low, high = found, found
    if bool(((found - written).abs() > allowed).any()):
        generator = torch.Generator().manual_seed(0)  # on the host, so that it draws alike on every device
        for _ in range(ORDERS):
            noise = torch.rand(attributions.shape, generator=generator, dtype=rows.dtype).to(rows.device)
            other = _taken(claim, attributions + (noise - 0.5) * allowed)
            low, high = torch.minimum(low, other), torch.maximum(high, other)
    return Weighed(low, high, allowed)


def _taken(claim: SideClaim, attributions: Float[Tensor, " claimed"]) -> Float[Tensor, " signal"]:
    order = attributions.argsort(descending=True, stable=True)
    left = claim.row.logits - torch.cat((torch.zeros_like(claim.rows[:1]), claim.rows[order])).cumsum(0)
    attention = claim.row.attention_with(left)
    taken = torch.empty_like(attributions)
    taken[order] = attention[:-1] - attention[1:]
    return claim.by_signal(taken)


def weigh_relative(
    claim: SideClaim, method: MethodInfo, tolerance: Tolerance, written: Float[Tensor, " signal"]
) -> Weighed:
    """ACC: what each signal adds to relative attention, the logit on the source less the others' mean."""
    src = torch.tensor([claim.firing.src], device=claim.rows.device)
    found = claim.by_signal(claim.rows @ relative_row(claim.row.visible[None], src, claim.rows.dtype)[0])
    return Weighed(found, found, 2 * tolerance.number(claim.size))


def weigh_coefficients(
    claim: SideClaim, method: MethodInfo, tolerance: Tolerance, written: Float[Tensor, " signal"]
) -> Weighed:
    """SVT: what each upstream head as a whole adds to the coefficients, along the token's own signs."""
    f, rec, side = claim.firing, claim.recording, claim.side
    heads = [Component("head", s.component.layer, s.component.head) for s in claim.signals]
    place, read = (f.dest, rec.queries[f.layer, 0, f.head]) if side == "query" else (f.src, claim.keys)
    own = exact(claim.coefficients(heads))[claim.owner, place, claim.channel]
    token = exact(read[place]) @ exact(claim.reader.bases[0])
    root = exact(rec.model.channels.at(f.layer, f.head).singular_values).sqrt()
    stretch = 1 / root.clamp_min(torch.finfo(rec.model.dtype).tiny) if side == "query" else root
    found = claim.by_signal(own * (token.sign() * stretch)[claim.channel])
    size = float((token.abs() * stretch)[claim.channel].sum()) if len(claim.channel) else 0.0
    return Weighed(found, found, 2 * tolerance.number(size))


RULES: dict[str, Weigh] = {"acc++": weigh_removals, "acc": weigh_relative, "svt": weigh_coefficients}
"""How each method weighs a signal, by the method's name."""
