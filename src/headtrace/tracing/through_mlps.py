"""Through an MLP: which of the components that it reads hold up a signal that it wrote.

Components are sorted by their frozen-gate contribution to the signal and removed one by one from the real MLP's input
(norm scales frozen, gates live) until the signal is below half of what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import IdentityError
from headtrace.models.frozen import FrozenMLP, mlp_rounding
from headtrace.models.identities import tolerance_for
from headtrace.tracing.along import Along, Place, along
from headtrace.tracing.causes import Cause
from headtrace.tracing.signals import Signal, writes_at

if TYPE_CHECKING:
    from headtrace.models import Recording

HALF = 0.5
"""A signal is gone when less than this share of it is left."""
FIRST_PREFIX, PREFIX_GROWTH = 16, 4
"""Components that are removed at first, more than most signals need; then four times as many, and so on."""


@dataclass(frozen=True)
class Passage:
    """What holds up a signal that an MLP wrote, and what is left of the signal without it."""

    signal: Signal
    causes: tuple[Cause, ...]
    """With their frozen-gate shares of the signal, in order of removal."""
    left: float
    """The share of the signal that the MLP still writes when they are removed from its input."""
    explained: bool
    """False if everything that holds the signal up was removed and half of it is still there."""
    direction: Float[Tensor, " d_model"]
    """Along which direction of what the MLP reads the signal comes in, through frozen gates."""


@torch.inference_mode()
def through_mlps(
    recording: Recording, layer: int, signals: Sequence[Signal], places: Sequence[Place]
) -> list[Passage]:
    """The causes of signals that one layer's MLP wrote, each at the place that it read."""
    device = recording.model.device
    rows = (
        torch.tensor([place.prompt for place in places], device=device),
        torch.tensor([place.position for place in places], device=device),
    )
    mlp = FrozenMLP.of(recording, layer, rows)
    directions = torch.stack([s.direction for s in signals])
    pulled = mlp.back(directions)
    part = along(recording, places, pulled.direction)
    constant = pulled.constant
    if recording.model.half:
        constant = constant + (mlp_rounding(recording, layer, rows) * directions).sum(-1)
    _require(part, constant, signals, recording)
    return _remove(recording, mlp, part, signals, directions, pulled.direction)


def _require(
    part: Along, constant: Float[Tensor, " signal"], signals: Sequence[Signal], recording: Recording
) -> None:
    """Frozen shares and the MLP's own biases sum to the whole signal, which is one by definition."""
    size = part.shares.abs().sum(1).clamp_min(1.0)
    error = torch.nan_to_num((part.shares.sum(1) + constant - 1).abs() / size, nan=torch.inf)
    worst, allowed = int(error.argmax()), tolerance_for(recording.model.dtype)
    if float(error[worst]) > allowed:
        signal = signals[worst]
        raise IdentityError(
            f"The frozen shares of the {signal.side} signal from {signal.source} to {signal.target} (prompt "
            f"{signal.prompt}) sum to {float(part.shares[worst].sum() + constant[worst]):.6g}, not to 1: relative "
            f"error {float(error[worst]):.1e}, allowed {allowed:.0e}."
        )


def _remove(
    recording: Recording,
    mlp: FrozenMLP,
    part: Along,
    signals: Sequence[Signal],
    directions: Float[Tensor, "signal d_model"],
    pulled: Float[Tensor, "signal d_model"],
) -> list[Passage]:
    """Remove components in order of their shares, in growing prefixes, for all signals together."""
    found: dict[int, Passage] = {}
    size, active = FIRST_PREFIX, list(range(len(signals)))
    while active:
        k = min(size, part.shares.shape[1])
        values, order = part.shares[active].topk(k, dim=1)
        sites = [
            [part.index.component(number).at(part.places[row].position) for number in numbers]
            for row, numbers in zip(active, order.tolist(), strict=True)
        ]
        prompts = [signals[row].prompt for row in active]
        writes = torch.stack([writes_at(recording, p, mine) for p, mine in zip(prompts, sites, strict=True)])
        chosen = mlp.at(active)
        removed = chosen.before.forward(writes.cumsum(dim=1))
        left = (chosen.write(chosen.inputs[:, None] - removed) @ directions[active][..., None])[..., 0]
        rows = torch.stack((values, left), dim=1).tolist()
        for i, (row, (shares, still)) in enumerate(zip(active, rows, strict=True)):
            positive = sum(share > 0 for share in shares)  # they fall, so these are the first ones
            end = next((n for n in range(positive) if still[n] < HALF), None)
            if end is None and k < part.shares.shape[1] and positive == k:
                continue
            n = positive if end is None else end + 1
            causes = tuple(Cause(s, v) for s, v in zip(sites[i][:n], shares[:n], strict=True))
            found[row] = Passage(
                signals[row], causes, still[n - 1] if n else 1.0, end is not None, pulled[row]
            )
        active = [row for row in active if row not in found]
        size *= PREFIX_GROWTH
    return [found[row] for row in range(len(signals))]
