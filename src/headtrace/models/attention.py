"""The one door into the model: an attention function registered with transformers under the name ``headtrace``.

Every layer's queries, keys and values pass through it after biases, QK-norm and rotary positions, together with
the mask, the scale and the softcap. It computes what transformers' eager attention computes, operation by
operation. Inside ``through(observer, hf)`` an observer sees each call, and may change the scores of one head at
one destination, even where heads share keys.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "headtrace"


@dataclass(frozen=True)
class AttentionCall:
    """What one layer's attention was called with."""

    layer: int
    query: Float[Tensor, "batch head dest d_head"]
    key: Float[Tensor, "batch kv_head src d_head"]
    value: Float[Tensor, "batch kv_head src d_head"]
    mask: Float[Tensor, "batch 1 dest src"] | None
    scale: float
    softcap: float | None


class AttentionObserver:
    """Sees every attention call of a forward pass, and may act on it. Subclasses override what they need."""

    def edit_scores(self, call: AttentionCall, scores: Float[Tensor, "batch head dest src"]) -> None:
        """Change scores in place, before softcap and mask: here one head's one destination can see other keys."""

    def mix(self, call: AttentionCall, pattern: Tensor) -> Float[Tensor, "batch head dest d_head"] | None:
        """Another mixture of values than ``pattern @ values``, or None."""
        return None

    def pattern_buffer(self, call: AttentionCall) -> Tensor | None:
        """Where the attention pattern should be written, or None for a new tensor."""
        return None

    def see(self, call: AttentionCall, pattern: Float[Tensor, "batch head dest src"]) -> None:
        """Called with the pattern of the layer."""


_observer: ContextVar[AttentionObserver | None] = ContextVar("headtrace_attention_observer", default=None)


def per_query_head(tensor: Tensor, n_heads: int) -> Tensor:
    """Repeat grouped keys or values so that every query head has its own row."""
    batch, n_kv, length, d_head = tensor.shape
    if n_kv == n_heads:
        return tensor
    groups = n_heads // n_kv
    return (
        tensor[:, :, None].expand(batch, n_kv, groups, length, d_head).reshape(batch, n_heads, length, d_head)
    )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Eager attention, with a place to look and to act. The signature is the one transformers calls."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    call = AttentionCall(layer, query, key, value, attention_mask, scale, softcap)
    observer = _observer.get()
    buffer = None
    n_heads = query.shape[1]
    scores = torch.matmul(query, per_query_head(key, n_heads).transpose(2, 3)).mul_(scale)
    if observer is not None:
        observer.edit_scores(call, scores)
        buffer = observer.pattern_buffer(call)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if attention_mask is not None:
        scores = scores.add_(attention_mask)
    # transformers computes the softmax in float32 whatever the model's dtype; a float64 model keeps float64 here.
    pattern = torch.softmax(scores, dim=-1) if buffer is None else torch.softmax(scores, dim=-1, out=buffer)
    output = None if observer is None else observer.mix(call, pattern)
    if output is None:
        output = torch.matmul(pattern, per_query_head(value, n_heads))
    if observer is not None:
        observer.see(call, pattern)
    return output.transpose(1, 2).contiguous(), pattern


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def through(observer: AttentionObserver, hf: PreTrainedModel) -> Generator[None]:
    """Run the model's attention through ``observer`` inside this block; the model is left as it was."""
    config: Any = hf.config
    before = config._attn_implementation
    token = _observer.set(observer)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _observer.reset(token)
