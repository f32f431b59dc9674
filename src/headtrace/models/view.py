"""Folded weights: every architecture's heads in one canonical shape.

With the norm's scale frozen, attention reads ``xhat = x / s``. Gain, bias, centring and the QK-norm gain are folded
into the head, so that for every model

    q = (xhat W_Q + b_Q) / s_q,    k = (xhat W_K + b_K) / s_k,    write = A v W_O / s_post

where ``s``, ``s_q``, ``s_k`` and ``s_post`` are recorded scales (one where the model has no such norm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headtrace.models.architectures import Architecture


@dataclass(frozen=True)
class FoldedWeights:
    """What reads from and writes to the residual, for all heads of a model."""

    W_Q: Float[Tensor, "layer head d_model d_head"]
    b_Q: Float[Tensor, "layer head d_head"]
    W_K: Float[Tensor, "layer kv_head d_model d_head"]
    b_K: Float[Tensor, "layer kv_head d_head"]
    b_V: Float[Tensor, "layer kv_head d_head"]
    W_O: Float[Tensor, "layer head d_head d_model"]
    attention_bias: Float[Tensor, "layer d_model"]
    final_gain: Float[Tensor, " d_model"]
    final_bias: Float[Tensor, " d_model"]
    W_U: Float[Tensor, "vocab d_model"]
    b_U: Float[Tensor, " vocab"] | None

    @property
    def group(self) -> int:
        """Query heads per key-value head: query head h reads key-value head ``h // group``."""
        return self.W_Q.shape[1] // self.W_K.shape[1]


def norm_eps(norm: nn.Module) -> float:
    """The epsilon of a LayerNorm or RMSNorm, whatever the model calls it."""
    for name in ("eps", "variance_epsilon"):
        value: Any = getattr(norm, name, None)
        if value is not None:
            return float(value)
    raise AttributeError(f"{type(norm).__name__} has no epsilon under a known name")


def norm_gain(norm: nn.Module, architecture: Architecture) -> Tensor:
    weight: Tensor | None = norm.weight  # type: ignore[assignment]
    if weight is None:
        raise AttributeError(f"{type(norm).__name__} has no gain")
    return weight + architecture.gain_offset


def norm_scale(
    x: Float[Tensor, "*rest d"], norm: nn.Module, architecture: Architecture
) -> Float[Tensor, "*rest"]:
    """The scale that a norm divides by: standard deviation (LayerNorm) or root mean square, epsilon included."""
    eps = norm_eps(norm)
    if architecture.norm == "layer":
        return (x.var(dim=-1, unbiased=False) + eps).sqrt()
    return rms_scale(x, eps)


def rms_scale(x: Float[Tensor, "*rest d"], eps: float) -> Float[Tensor, "*rest"]:
    return (x.square().mean(dim=-1) + eps).sqrt()


def _fold_read(
    W: Tensor, b: Tensor | None, norm: nn.Module | None, architecture: Architecture, head_gain: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Fold the norm before (gain, bias, centring) and the QK-norm's gain into one projection of one layer."""
    bias = torch.zeros(W.shape[0], W.shape[2], dtype=W.dtype, device=W.device) if b is None else b
    if norm is not None:
        norm_bias: Tensor | None = getattr(norm, "bias", None)
        if norm_bias is not None:
            bias = bias + norm_bias @ W
        W = norm_gain(norm, architecture)[:, None] * W
        if architecture.norm == "layer":
            W = W - W.mean(dim=1, keepdim=True)
    if head_gain is not None:
        W, bias = W * head_gain[:, None, :], bias * head_gain
    return W, bias


def _head_gain(attention: nn.Module, path: str, n_heads: int, architecture: Architecture) -> Tensor:
    """The QK-norm's gain, one row per head (a norm over the whole projection has one gain for all heads)."""
    gain = norm_gain(attention.get_submodule(path), architecture)
    per_head = architecture.query_key_norm_axes == "token projection"
    return gain.reshape(n_heads, -1) if per_head else gain.expand(n_heads, -1)


@torch.no_grad()
def fold_weights(hf: nn.Module, architecture: Architecture, d_head: int) -> FoldedWeights:
    """Read every head of the model into canonical shape. Copies; the model is not changed."""
    reads: dict[str, list[Tensor]] = {name: [] for name in ("W_Q", "b_Q", "W_K", "b_K", "b_V", "W_O", "bias")}
    for layer in hf.get_submodule(architecture.layers).children():
        attention = layer.get_submodule(architecture.attention)
        heads = architecture.projections(attention, d_head)
        norm = (
            None if architecture.attention_norm is None else layer.get_submodule(architecture.attention_norm)
        )
        gain_q = gain_k = None
        if architecture.query_key_norm is not None:
            gain_q = _head_gain(attention, architecture.query_key_norm[0], heads.W_Q.shape[0], architecture)
            gain_k = _head_gain(attention, architecture.query_key_norm[1], heads.W_K.shape[0], architecture)
        W_Q, b_Q = _fold_read(heads.W_Q, heads.b_Q, norm, architecture, gain_q)
        W_K, b_K = _fold_read(heads.W_K, heads.b_K, norm, architecture, gain_k)
        # A value's bias (the norm's included) leaves through W_O as a constant, since attention sums to one.
        _, b_V = _fold_read(heads.W_V, heads.b_V, norm, architecture, None)
        W_O, bias = _fold_write(heads.W_O, heads.b_O, b_V, layer, architecture)
        for name, tensor in zip(reads, (W_Q, b_Q, W_K, b_K, b_V, W_O, bias), strict=True):
            reads[name].append(tensor)
    stacked = {name: torch.stack(tensors) for name, tensors in reads.items()}
    final = hf.get_submodule(architecture.final_norm)
    unembedding: Any = hf.get_output_embeddings()  # type: ignore[operator]
    gain = norm_gain(final, architecture).detach().clone()
    final_bias: Tensor | None = getattr(final, "bias", None)
    return FoldedWeights(
        stacked["W_Q"],
        stacked["b_Q"],
        stacked["W_K"],
        stacked["b_K"],
        stacked["b_V"],
        stacked["W_O"],
        stacked["bias"],
        gain,
        torch.zeros_like(gain) if final_bias is None else final_bias.detach().clone(),
        unembedding.weight.detach(),
        None if unembedding.bias is None else unembedding.bias.detach(),
    )


def _fold_write(
    W_O: Tensor, b_O: Tensor | None, b_V: Tensor, layer: nn.Module, architecture: Architecture
) -> tuple[Tensor, Tensor]:
    """W_O with the post-norm's gain, and the constant write of the layer: b_O + sum over heads of b_V W_O."""
    per_head = b_V.repeat_interleave(W_O.shape[0] // b_V.shape[0], dim=0)
    bias = torch.einsum("hr,hrd->d", per_head, W_O)
    if b_O is not None:
        bias = bias + b_O
    if architecture.attention_post_norm is not None:
        gain = norm_gain(layer.get_submodule(architecture.attention_post_norm), architecture)
        W_O, bias = W_O * gain, bias * gain
    return W_O, bias
