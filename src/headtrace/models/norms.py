"""Norms as facts: epsilon, gain and the scale that a norm divides by."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headtrace.models.architectures import Architecture
from headtrace.models.placement import with_values
from headtrace.models.sound import raised

_EPS_IN_CODE = {"OlmoLayerNorm": 1e-5}
"""Norms that carry no epsilon: it stands in their code."""


def norm_eps(norm: nn.Module) -> float:
    """The epsilon of a LayerNorm or RMSNorm, whatever the model calls it."""
    one = _by_head(norm)[0]
    for name in ("eps", "variance_epsilon"):
        value: Any = getattr(one, name, None)
        if value is not None:
            return float(value)
    if type(one).__name__ in _EPS_IN_CODE:
        return _EPS_IN_CODE[type(one).__name__]
    raise AttributeError(f"{type(norm).__name__} has no epsilon under a known name")


def norm_gain(norm: nn.Module, architecture: Architecture, like: Float[Tensor, "*rest d"]) -> Tensor:
    """The gain of a norm of what is shaped ``like`` (ones if it has none); a row for each head that has its own."""
    if len(_by_head(norm)) > 1:
        return torch.stack([norm_gain(one, architecture, like) for one in _by_head(norm)])
    weight: Tensor | None = getattr(with_values(_by_head(norm)[0]), "weight", None)
    if weight is None:
        return like.new_ones(like.shape[-1])
    return weight.to(raised(weight.dtype)) + architecture.gain_offset


def _by_head(norm: nn.Module) -> list[nn.Module]:
    """One norm, or those of StableLM's heads."""
    norms = getattr(norm, "norms", None)
    return list(norms) if isinstance(norms, nn.ModuleList) else [norm]


def norm_bias(norm: nn.Module) -> Tensor | None:
    """The bias of a LayerNorm, in float32 at least; None for a norm without one."""
    bias: Tensor | None = getattr(with_values(norm), "bias", None)
    return None if bias is None else bias.to(raised(bias.dtype))


def norm_scale(
    x: Float[Tensor, "*rest d"], eps: float | Tensor, kind: Literal["layer", "rms"]
) -> Float[Tensor, "*rest"]:
    """What a norm divides by: standard deviation (LayerNorm) or root mean square, epsilon included."""
    square = x.var(dim=-1, unbiased=False) if kind == "layer" else x.square().mean(dim=-1)
    return (square + eps).sqrt()
