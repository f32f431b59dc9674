"""What every component upstream of a place writes along a direction: the shares of anything linear.

A root reads the final residual along a direction, a head's value reads its source's residual, an MLP its own token's,
a probe any of them. In all cases a component's share is its write at that position, times the direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.tracing.components import ComponentIndex

if TYPE_CHECKING:
    from headtrace.models import Recording


@dataclass(frozen=True)
class Place:
    """A residual that is read: of one prompt, at one position, before a layer's attention, or behind it."""

    prompt: int
    position: int
    layer: int
    behind_attention: bool = False
    """Whether that layer's attention has written already: an MLP reads there, unless its block is parallel."""

    @property
    def attention_layers(self) -> int:
        """How many layers' attention has written."""
        return self.layer + self.behind_attention


@dataclass(frozen=True)
class Along:
    """Shares of some places' directions, component by component (`ComponentIndex`)."""

    places: Sequence[Place]
    index: ComponentIndex
    shares: Float[Tensor, "place component"]


@torch.inference_mode()
def along(recording: Recording, places: Sequence[Place], directions: Float[Tensor, "place d_model"]) -> Along:
    """Every component's write along each place's direction. What is not upstream of a place has a share of zero."""
    top = max(place.attention_layers for place in places)
    length = max(place.position for place in places) + 1
    index = ComponentIndex.of(recording.model, top, length)
    b = torch.tensor([place.prompt for place in places], device=directions.device)
    t = torch.tensor([place.position for place in places], device=directions.device)
    layers = torch.arange(top, device=directions.device)
    mlps = layers < layers.new_tensor([place.layer for place in places])[:, None]
    attention = layers < layers.new_tensor([place.attention_layers for place in places])[:, None]
    weights = recording.model.weights
    shares = directions.new_zeros(len(places), index.n_components)
    plain = (recording.plain_writes[b, : top + 1, t] @ directions[..., None])[..., 0]
    shares[:, 0], shares[:, 1 : top + 1] = plain[:, 0], plain[:, 1:] * mlps
    strength = attention.to(directions.dtype)
    if recording.post_norm_scales is not None:
        strength = strength / recording.post_norm_scales[:top, b, t].T
    if index.biased:
        shares[:, index.biases] = directions @ weights.attention_bias[:top].T * strength
    if recording.model.half:
        rounding = (recording.roundings[:top, b, t].transpose(0, 1) @ directions[..., None])[..., 0]
        shares[:, index.roundings] = rounding * mlps
    if top:
        heads = shares[:, index.n_non_head :].unflatten(1, (top, recording.model.n_heads, length))
        _head_shares(recording, places, directions, heads)
        heads *= strength[..., None, None]
    return Along(places, index, shares)


def _head_shares(
    recording: Recording,
    places: Sequence[Place],
    directions: Float[Tensor, "place d_model"],
    out: Float[Tensor, "place layer head src"],
) -> None:
    """``A[t, j] v[j] W_O . direction`` for every head component; one product per prompt."""
    _, top, _, length = out.shape
    model = recording.model
    W_O = model.weights.W_O[:top].flatten(0, 2)
    # A product with a single column runs on one core, and takes longer than one with two.
    columns = directions if len(directions) > 1 else directions.repeat(2, 1)
    read = (W_O @ columns.T)[:, : len(directions)].contiguous()
    # Heads that share values stand side by side.
    shared = read.unflatten(0, (top, model.n_kv_heads, -1, model.d_head)).transpose(2, 3)
    rows_of: dict[int, list[int]] = {}
    for row, place in enumerate(places):
        rows_of.setdefault(place.prompt, []).append(row)
    for prompt, rows in rows_of.items():
        values = recording.shared_values[:top, :, prompt, :length]
        mine = shared if len(rows) == len(places) else shared[..., rows]
        moved = (values @ mine.flatten(3)).unflatten(3, mine.shape[3:])
        at = torch.tensor([places[row].position for row in rows], device=values.device)
        patterns = recording.attention.rows(top, torch.full_like(at, prompt), at, length)
        out[rows] = moved.permute(4, 0, 1, 3, 2).flatten(2, 3) * patterns
