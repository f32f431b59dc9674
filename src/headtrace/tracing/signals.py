"""Signals as directions: what a head reads of one component, in some channels, as a direction of the residual.

A component's coefficients in the channels of a firing are ``a = o M`` with M the head's reading of a write at that
position. The direction ``n = M a / (a . a)`` measures any write against that signal: one for the component itself, a
half for a write that carries half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.tracing.causes import Cause
from headtrace.tracing.components import Firings, Rotary
from headtrace.vocabulary import AttentionSide, Side, Site

if TYPE_CHECKING:
    from headtrace.models import Recording


@dataclass(frozen=True)
class Signal:
    """What a site writes into another one, on one side: channels of a firing, or what it moves."""

    prompt: int
    source: Site
    target: Site
    side: Side
    direction: Float[Tensor, " d_model"]
    """Of the source's write: one along it is the whole signal."""


def readings_at(
    recording: Recording, sites: Sequence[tuple[int, Site]], side: AttentionSide
) -> Float[Tensor, "firing d_model channel"]:
    """For firings of one layer, what their heads read of a write at the destination (query) or the source (key)."""
    firings = Firings.of(sites, recording.model.device)
    layer, b = firings.layer, firings.prompt
    weights = recording.model.weights
    channels = recording.model.channels.at(layer, firings.head)
    first = sites[0][1].layer or 0
    kv = firings.head // weights.group
    if side == "query":
        at, basis, W = firings.dest, channels.to_query, weights.W_Q[layer, firings.head]
        scales = (
            None if recording.query_scales is None else recording.query_scales[layer, b, firings.head, at]
        )
    else:
        at, basis, W = firings.src, channels.to_key, weights.W_K[layer, kv]
        scales = None if recording.key_scales is None else recording.key_scales[layer, b, kv, at]
    basis = Rotary.of(recording, first, b, recording.token_ids.shape[1]).basis_at(basis, at)
    scale = recording.norm_scales[layer, b, at]
    return W @ basis / (scale if scales is None else scale * scales)[:, None, None]


def write_at(recording: Recording, prompt: int, site: Site) -> Float[Tensor, " d_model"]:
    """What a site writes at its own position."""
    layer, dest = site.layer or 0, site.dest or 0
    weights = recording.model.weights
    if site.kind == "embedding":
        return recording.embedding[prompt, dest]
    if site.kind == "mlp":
        return recording.mlp_writes[layer, prompt, dest]
    if site.kind == "rounding":  # what it did behind the last layer is written nowhere
        beyond = layer >= recording.model.n_layers
        return (
            torch.zeros_like(recording.embedding[prompt, dest])
            if beyond
            else recording.roundings[layer, prompt, dest]
        )
    if site.kind == "attention_bias":
        written = weights.attention_bias[layer]
    else:
        head, src = site.head or 0, site.src or 0
        strength = recording.attention.at(layer, prompt, head, dest, src)
        written = strength * (recording.bare_values[layer, head, prompt, src] @ weights.W_O[layer, head])
    post = recording.post_norm_scales
    return written if post is None else written / post[layer, prompt, dest]


def writes_at(recording: Recording, prompt: int, sites: Sequence[Site]) -> Float[Tensor, "site d_model"]:
    """What some sites of a prompt write, each at its own position."""
    return torch.stack([write_at(recording, prompt, site) for site in sites])


def signals_of(
    recording: Recording,
    sites: Sequence[tuple[int, Site]],
    causes: Sequence[Sequence[Cause]],
    side: AttentionSide,
) -> list[list[Signal | None]]:
    """The signals of each firing's causes on one side, for firings of one layer; None for what is a leaf anyway."""
    matrices = readings_at(recording, sites, side)
    found: list[list[Signal | None]] = [[None] * len(mine) for mine in causes]
    places, directions, sizes = list[tuple[int, int]](), list[Tensor](), list[Tensor]()
    for row, (prompt, _) in enumerate(sites):
        for number, cause in enumerate(causes[row]):
            source = cause.site
            if source.kind not in ("head", "mlp") or cause.channels is None or not source.possible:
                continue
            into = matrices[row][:, list(cause.channels)]
            coefficients = write_at(recording, prompt, source) @ into
            size = coefficients @ coefficients
            places.append((row, number))
            directions.append(into @ coefficients / size)
            sizes.append(size)
    positive = (torch.stack(sizes) > 0).tolist() if sizes else []
    for (row, number), direction, there in zip(places, directions, positive, strict=True):
        if there:
            prompt, target = sites[row]
            found[row][number] = Signal(prompt, causes[row][number].site, target, side, direction)
    return found
