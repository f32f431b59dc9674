"""Integrated gradients of attention, as one fixed vector per firing.

All candidates follow the same straight path from zero logits to the recorded ones, so the attribution of a candidate
with contribution row C is ``C . w`` with

    w = integral over alpha in [0, 1] of  p_s (e_s - p),    p = softmax(alpha * logits)

times the softcap's derivative where the model has one. Trapezoid rule with 64 intervals.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.models.attention import softcap, softcap_slope

IG_STEPS = 64


@lru_cache(maxsize=8)
def _path(steps: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # kept for any later use
        alphas = torch.linspace(0, 1, steps + 1, dtype=dtype, device=device)
        weights = torch.full_like(alphas, 1 / steps)
        weights[0] = weights[-1] = 0.5 / steps
    return alphas, weights


def path_weights(steps: int, like: Tensor) -> tuple[Float[Tensor, " point"], Float[Tensor, " point"]]:
    """Points of the path and their trapezoid weights."""
    return _path(steps, like.dtype, like.device)


def attribution_vector(
    logits: Float[Tensor, "firing token"],
    visible: Bool[Tensor, "firing token"],
    src: Int[Tensor, " firing"],
    cap: float | None = None,
    steps: int = IG_STEPS,
) -> Float[Tensor, "firing token"]:
    """w of every firing; zero where a key is not visible."""
    alphas, weights = path_weights(steps, logits)
    path = alphas[:, None] * logits[:, None]
    scores = softcap(path, cap).masked_fill_(~visible[:, None], -torch.inf)
    p = scores.softmax(dim=-1)
    at_src = p.gather(-1, src[:, None, None].expand(-1, p.shape[1], 1))
    gradient = -(at_src * p)
    gradient.scatter_add_(-1, src[:, None, None].expand_as(at_src), at_src)
    if cap is not None:
        gradient *= softcap_slope(path, cap)
    return torch.einsum("a,fat->ft", weights, gradient)


def attention_on(
    logits: Float[Tensor, "firing *any token"],
    visible: Bool[Tensor, "firing token"],
    src: Int[Tensor, " firing"],
    cap: float | None,
) -> Float[Tensor, "firing *any"]:
    """Attention on each firing's source, for logits before softcap and mask."""
    extra = [1] * (logits.ndim - 2)
    hidden = ~visible.reshape(visible.shape[0], *extra, -1)
    scores = softcap(logits, cap).masked_fill(hidden, -torch.inf)
    index = src.reshape(-1, *extra, 1).expand(*logits.shape[:-1], 1)
    return (scores.gather(-1, index)[..., 0] - scores.logsumexp(dim=-1)).exp()
