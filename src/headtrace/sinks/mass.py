"""How much attention goes where: each head's mass on sinks, and on every kind of token.

A destination's attention is a distribution over the tokens it sees, so the masses on all kinds (`tokens.KINDS`, with
the destination itself as one of them) sum to one. A head's mass is the mean over destinations past the first token of
a prompt, then over prompts; intervals draw prompts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.models.devices import on_host
from headtrace.sinks.tokens import ITSELF, KINDS, SINKS
from headtrace.statistics import intervals

if TYPE_CHECKING:
    from headtrace.models import Recording


def kind_masses(recording: Recording, prompt: int, kinds: Sequence[str]) -> Float[Tensor, "layer head kind"]:
    """Where each head's attention goes in one prompt, by kind of source."""
    n = recording.lengths[prompt]
    patterns = recording.patterns[:, prompt, :, 1:n, :n]
    itself = torch.eye(n, dtype=torch.bool, device=patterns.device)[1:]
    of_kind = torch.tensor([KINDS.index(kind) for kind in kinds], device=patterns.device)
    places = torch.where(itself, KINDS.index(ITSELF), of_kind)
    one_hot = torch.nn.functional.one_hot(places, len(KINDS)).to(patterns.dtype)
    return torch.einsum("lhds,dsk->lhk", patterns, one_hot) / (n - 1)


def sink_mass(
    pattern: Float[Tensor, "batch head dest src"],
    sinks: Bool[Tensor, "batch src"],
    lengths: Sequence[int],
) -> Float[Tensor, "batch head"]:
    """Mean attention of destinations past the first token on sinks before them, in one layer."""
    total = pattern.shape[-1]
    before = torch.ones(total, total, dtype=torch.bool, device=pattern.device).tril(-1)
    real = torch.arange(total, device=pattern.device) < torch.tensor(lengths, device=pattern.device)[:, None]
    counted = sinks[:, None, :] & before & real[:, :, None]
    on_sinks = torch.einsum("bhds,bds->bh", pattern, counted.to(pattern.dtype))
    return on_sinks / (torch.tensor(lengths, device=pattern.device)[:, None] - 1)


def mass_table(
    by_kind: Float[Tensor, "prompt layer head kind"],
    on_sinks: Float[Tensor, "prompt layer head"],
    seed: int,
) -> pl.DataFrame:
    """A row per head and kind (``sinks``: all sink positions together), with a 95 % interval over prompts."""
    values = on_host(torch.cat((on_sinks[..., None], by_kind), dim=-1)).numpy()
    mean, (low, high) = values.mean(0), intervals(values, seed)
    rows = [
        (layer, head, kind, *(float(part[layer, head, k]) for part in (mean, low, high)))
        for layer in range(values.shape[1])
        for head in range(values.shape[2])
        for k, kind in enumerate((SINKS, *KINDS))
    ]
    return pl.DataFrame(rows, schema=["layer", "head", "kind", "mass", "low", "high"], orient="row")
