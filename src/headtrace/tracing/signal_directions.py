"""Signals as directions of the residual.

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

from headtrace.tracing.attribute_root import carries_nothing
from headtrace.tracing.causes import Cause, PromptSite
from headtrace.tracing.components import ChannelRotary, Firings
from headtrace.vocabulary import AttentionSide, Side, Site

if TYPE_CHECKING:
    from headtrace.models import Recording

EQUAL_VALUES = 1e-3
"""Singular values that differ by no more than this share are equal."""


@dataclass(frozen=True)
class SignalDirection:
    """What a site writes into another one, on one side: channels of a firing, or what it moves."""

    prompt: int
    source: Site
    target: Site
    side: Side
    direction: Float[Tensor, " d_model"]
    """Of the source's write: one along it is the whole signal."""


def readings_at(
    recording: Recording, sites: Sequence[PromptSite], side: AttentionSide
) -> Float[Tensor, "firing d_model channel"]:
    """For firings of one layer, what their heads read of a write at the destination (query) or the source (key)."""
    firings = Firings.of(sites, recording.model.device)
    layer, b = firings.layer, firings.prompt
    weights = recording.model.weights
    channels = recording.model.channels.at(layer, firings.head)
    if side == "query":
        at, head, basis, scales = firings.dest, firings.head, channels.to_query, recording.query_scales
        W = weights.W_Q[layer, head]
    else:
        at, head, basis = firings.src, firings.head // weights.group, channels.to_key
        W, scales = weights.W_K[layer, head], recording.key_scales
    scale = recording.norm_scales[layer, b, at]
    if scales is not None:
        scale = scale * scales[layer, b, head, at]
    rotary = ChannelRotary.of(recording, sites[0][1].layer or 0, b, recording.token_ids.shape[1])
    return W @ rotary.basis_at(basis, at) / scale[:, None, None]


def signals_of(
    recording: Recording,
    sites: Sequence[PromptSite],
    causes: Sequence[Sequence[Cause]],
    side: AttentionSide,
) -> list[list[SignalDirection | None]]:
    """The signals of each firing's causes on one side, for firings of one layer; None for causes that are leaves, and
    for those of which the firing reads nothing but rounding."""
    matrices = readings_at(recording, sites, side)
    firings = Firings.of(sites, recording.model.device)
    values = recording.model.channels.at(firings.layer, firings.head).singular_values
    # Within channels of equal singular values any basis is as good: a signal is what it has in all of them.
    alike = (values[:, :, None] - values[:, None]).abs() <= EQUAL_VALUES * values[:, :, None]
    found: list[list[SignalDirection | None]] = [[None] * len(mine) for mine in causes]
    places, directions, heard = list[tuple[int, int]](), list[Tensor](), list[Tensor]()
    for row, (prompt, _) in enumerate(sites):
        for number, cause in enumerate(causes[row]):
            source = cause.site
            if source.kind not in ("head", "mlp") or cause.channels is None or not source.possible:
                continue
            into = matrices[row][:, alike[row][list(cause.channels)].any(dim=0)]
            write = recording.write(source.component, prompt, source.dest)
            coefficients = write @ into
            size = coefficients @ coefficients
            rounding = carries_nothing(write.dtype) * write.norm() * into.norm()
            heard.append(size > rounding**2)
            places.append((row, number))
            directions.append(into @ coefficients / size)
    is_heard = torch.stack(heard).tolist() if heard else []
    for (row, number), direction, more_than_rounding in zip(places, directions, is_heard, strict=True):
        if more_than_rounding:
            prompt, target = sites[row]
            found[row][number] = SignalDirection(prompt, causes[row][number].site, target, side, direction)
    return found
