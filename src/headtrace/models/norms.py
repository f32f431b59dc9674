"""Norms as facts: epsilon, gain and the scale that a norm divides by."""

from __future__ import annotations

from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn

from headtrace.models.architectures import Architecture
from headtrace.models.placement import with_values
from headtrace.models.sound import raised


def norm_eps(norm: nn.Module) -> float:
    """The epsilon of a LayerNorm or RMSNorm, whatever the model calls it."""
    for name in ("eps", "variance_epsilon"):
        value: Any = getattr(norm, name, None)
        if value is not None:
            return float(value)
    raise AttributeError(f"{type(norm).__name__} has no epsilon under a known name")


def norm_gain(norm: nn.Module, architecture: Architecture) -> Tensor:
    weight: Tensor | None = with_values(norm).weight
    if weight is None:
        raise AttributeError(f"{type(norm).__name__} has no gain")
    return weight.to(raised(weight.dtype)) + architecture.gain_offset


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
