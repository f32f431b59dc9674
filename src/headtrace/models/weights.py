"""Folded weights: every architecture's heads in one canonical shape.

With the norm's scale frozen, attention reads ``xhat = x / s``. Gain, bias, centring and the QK-norm gain are folded
into the head, so that for every model

    q = (xhat W_Q + b_Q) / s_q,    k = (xhat W_K + b_K) / s_k,    write = A v W_O / s_post

where ``s``, ``s_q``, ``s_k`` and ``s_post`` are recorded scales (one where the model has no such norm).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from headtrace.errors import UnsupportedModelError
from headtrace.models.architectures import Architecture
from headtrace.models.devices import compute_dtype, device_of, with_values

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
    return weight.to(compute_dtype(weight.dtype)) + architecture.gain_offset


def _by_head(norm: nn.Module) -> list[nn.Module]:
    """One norm, or those of StableLM's heads."""
    norms = getattr(norm, "norms", None)
    return list(norms) if isinstance(norms, nn.ModuleList) else [norm]


def norm_bias(norm: nn.Module) -> Tensor | None:
    """The bias of a LayerNorm, in float32 at least; None for a norm without one."""
    bias: Tensor | None = getattr(with_values(norm), "bias", None)
    return None if bias is None else bias.to(compute_dtype(bias.dtype))


def norm_scale(
    x: Float[Tensor, "*rest d"], eps: float | Tensor, kind: Literal["layer", "rms"]
) -> Float[Tensor, "*rest"]:
    """What a norm divides by: standard deviation (LayerNorm) or root mean square, epsilon included."""
    square = x.var(dim=-1, unbiased=False) if kind == "layer" else x.square().mean(dim=-1)
    return (square + eps).sqrt()


Parts = TypeVar("Parts", bound=Any)


def in_compute_dtype(parts: Parts) -> Parts:
    """A dataclass of weights with every tensor raised; the weights themselves where there is nothing to raise."""
    tensors = {f.name: value for f in fields(parts) if isinstance(value := getattr(parts, f.name), Tensor)}
    return replace(
        parts, **{name: tensor.to(compute_dtype(tensor.dtype)) for name, tensor in tensors.items()}
    )


@dataclass(frozen=True)
class FoldedWeights:
    """What reads from and writes to the residual, for all heads of a model."""

    W_Q: Float[Tensor, "layer head d_model d_head"]
    b_Q: Float[Tensor, "layer head d_head"]
    W_K: Float[Tensor, "layer kv_head d_model d_head"]
    b_K: Float[Tensor, "layer kv_head d_head"]
    W_V: Float[Tensor, "layer kv_head d_model d_head"]
    b_V: Float[Tensor, "layer kv_head d_head"]
    W_O: Float[Tensor, "layer head d_head d_model"]
    attention_bias: Float[Tensor, "layer d_model"]
    final_gain: Float[Tensor, " d_model"]
    final_bias: Float[Tensor, " d_model"]
    W_U: Float[Tensor, "vocab d_model"]
    b_U: Float[Tensor, " vocab"] | None
    output_bias: Float[Tensor, " vocab"]
    """Output logits without any residual: the final norm's bias through W_U, and the unembedding's own."""

    @cached_property
    def has_attention_bias(self) -> bool:
        """Whether any layer's attention writes a constant."""
        return bool(self.attention_bias.any())

    @property
    def group(self) -> int:
        """Query heads per key-value head: query head h reads key-value head ``h // group``."""
        return self.W_Q.shape[1] // self.W_K.shape[1]


def _fold_read(
    W: Tensor,
    b: Tensor | None,
    norm: nn.Module | None,
    architecture: Architecture,
    head_norm: nn.Module | None,
) -> tuple[Tensor, Tensor]:
    """Fold the norm before (gain, bias, centring) and the QK-norm's gain into one projection of one layer."""
    bias = torch.zeros(W.shape[0], W.shape[2], dtype=W.dtype, device=W.device) if b is None else b
    if norm is not None:
        shift = norm_bias(norm)
        if shift is not None:
            bias = bias + shift @ W
        W = norm_gain(norm, architecture, like=W[0, :, 0])[:, None] * W
        W = architecture.centred(W, dim=1)
    if head_norm is not None:
        if architecture.query_key_norm_kind == "layer":
            W, bias = W - W.mean(dim=-1, keepdim=True), bias - bias.mean(dim=-1, keepdim=True)
        gain = _head_gain(head_norm, W, architecture)
        W, bias = W * gain[:, None, :], bias * gain
    return W, bias


def _head_gain(
    norm: nn.Module, W: Float[Tensor, "head d_model d_head"], architecture: Architecture
) -> Float[Tensor, "head d_head"]:
    """The QK-norm's gain, one row per head (a norm over the whole projection has one gain for all heads)."""
    if getattr(norm, "bias", None) is not None:
        raise UnsupportedModelError(
            f"The {type(norm).__name__} of queries and keys has a bias of its own, which cannot be folded into the "
            "head. Use a variant without it."
        )
    whole = architecture.query_key_norm_axes == "token projection"
    gain = norm_gain(norm, architecture, like=W[:, 0].flatten() if whole else W[0, 0])
    return gain.reshape(len(W), -1) if whole or gain.ndim == 2 else gain.expand(len(W), -1)


@torch.no_grad()
def fold_weights(
    hf: nn.Module, architecture: Architecture, d_head: int, head_order: Int[Tensor, " d_head"] | None = None
) -> FoldedWeights:
    """Read every head of the model into canonical shape. Copies; the model is not changed.

    Heads of layers with fewer dimensions than others are filled up with zeros, which changes nothing that they compute.
    """
    sizes = architecture.head_sizes
    order = slice(None) if head_order is None else head_order
    reads: dict[str, list[Tensor]] = {
        name: [] for name in ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "W_O", "attention_bias")
    }
    unembedding = with_values(hf.get_output_embeddings())  # type: ignore[operator]
    home = device_of(hf.get_input_embeddings())  # type: ignore[operator]
    for index, layer in enumerate(map(with_values, hf.get_submodule(architecture.layers).children())):
        attention = layer.get_submodule(architecture.attention)
        own = d_head if sizes is None else sizes[index]
        heads = in_compute_dtype(architecture.projections(attention, own))
        norm = (
            None if architecture.attention_norm is None else layer.get_submodule(architecture.attention_norm)
        )
        norm_q = norm_k = None
        if architecture.query_key_norm is not None:
            norm_q, norm_k = (attention.get_submodule(path) for path in architecture.query_key_norm)
        W_Q, b_Q = _fold_read(heads.W_Q, heads.b_Q, norm, architecture, norm_q)
        W_K, b_K = _fold_read(heads.W_K, heads.b_K, norm, architecture, norm_k)
        # A value's bias (the norm's included) leaves through W_O as a constant, since attention sums to one.
        W_V, b_V = _fold_read(heads.W_V, heads.b_V, norm, architecture, None)
        W_O, bias = _fold_write(heads.W_O, heads.b_O, b_V, layer, architecture)
        if own < d_head:
            W_Q, b_Q, W_K, b_K, W_V, b_V = (pad(x, (0, d_head - own)) for x in (W_Q, b_Q, W_K, b_K, W_V, b_V))
            W_O = pad(W_O, (0, 0, 0, d_head - own))
        ordered = (tensor.to(home)[..., order] for tensor in (W_Q, b_Q, W_K, b_K))
        for name, tensor in zip(reads, (*ordered, W_V, b_V, W_O, bias), strict=True):
            reads[name].append(tensor.to(home))
    stacked = {
        name: _stacked(tensors, turned=name in ("W_Q", "W_K", "W_V")) for name, tensors in reads.items()
    }
    final = None if architecture.final_norm is None else hf.get_submodule(architecture.final_norm)
    times = architecture.logit_multiplier
    bias: Tensor | None = getattr(unembedding, "bias", None)
    W_U, b_U = unembedding.weight.detach(), None if bias is None else bias.detach()
    W_U = W_U.to(home, compute_dtype(W_U.dtype))
    b_U = None if b_U is None else b_U.to(W_U) * times
    gain = torch.ones_like(W_U[0]) if final is None else norm_gain(final, architecture, like=W_U[0])
    gain = gain.detach().to(W_U) * times
    final_bias = None if final is None else norm_bias(final)
    final_bias = torch.zeros_like(gain) if final_bias is None else final_bias.detach().to(gain) * times
    output_bias = W_U @ final_bias
    return FoldedWeights(
        **stacked,
        final_gain=gain,
        final_bias=final_bias,
        W_U=W_U,
        b_U=b_U,
        output_bias=output_bias if b_U is None else output_bias + b_U,
    )


def _stacked(layers: list[Tensor], *, turned: bool) -> Tensor:
    """All layers in one tensor. What reads is laid out as models have it, turned around: copying it otherwise would
    cost more than a forward pass of a short prompt."""
    whole = layers[0].new_empty(len(layers), *(layers[0].mT if turned else layers[0]).shape)
    whole = whole.mT if turned else whole
    for into, layer in zip(whole, layers, strict=True):
        into.copy_(layer)
    return whole


def _fold_write(
    W_O: Tensor, b_O: Tensor | None, b_V: Tensor, layer: nn.Module, architecture: Architecture
) -> tuple[Tensor, Tensor]:
    """W_O with all that follows it, and the constant write of the layer: b_O + sum over heads of b_V W_O."""
    per_head = b_V.repeat_interleave(W_O.shape[0] // b_V.shape[0], dim=0)
    bias = torch.einsum("hr,hrd->d", per_head, W_O)
    if b_O is not None:
        bias = bias + b_O
    if architecture.attention_post_norm is not None:
        norm = layer.get_submodule(architecture.attention_post_norm)
        gain = norm_gain(norm, architecture, like=W_O[0])
        W_O, bias = W_O * gain, bias * gain
    times = architecture.write_multiplier
    return (W_O, bias) if times == 1 else (W_O * times, bias * times)
