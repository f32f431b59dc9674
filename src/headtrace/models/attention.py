"""The attention function that transformers calls while headtrace runs a model, registered under ``headtrace``.

Every layer's queries, keys and values pass through it after biases, QK-norm and rotary positions, together with
the mask, the scale and the softcap. It computes what transformers' eager attention computes, operation by operation (in
a model of half precision, scores stay in float32, as they do in the fused kernels that such models run with: only what
goes in and what comes out is rounded), and shows each call to the observer of the pass, which may change the scores of
one head at one destination, even where heads share keys. `headtrace.models.forward` is where a pass is begun and ended.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from headtrace.errors import HeadtraceError, UnsupportedModelError
from headtrace.models.architectures.facts import OwnAttention
from headtrace.models.devices import compute_dtype
from headtrace.models.observer import AttentionCall, Observer

if TYPE_CHECKING:
    from headtrace.models.model import Model


NAME = "headtrace"
SCORES_AT_ONCE = 16_000_000
"""Attention scores that are made at once for long prompts (64 MB in float32)."""


@dataclass(frozen=True)
class Watch:
    """Who watches the attention of the pass that runs in this thread."""

    observers: tuple[Observer, ...]
    head_order: Int[Tensor, " d_head"] | None
    """The order in which observers see a head's dimensions, where it is not the model's own."""
    home: torch.device | None = None
    """Where observers have their tensors, and so where attention that they watch is computed."""
    queries: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    keys: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """By layer, what attends in the place of the model's own queries or keys; used once."""

    def device(self, layer: torch.device) -> torch.device:
        """Where a layer attends: where it is, unless somebody watches from elsewhere."""
        watched = any(not observer.takes_rows() or observer.needs_rows() for observer in self.observers)
        return self.home if watched and self.home is not None else layer


@dataclass
class Rereading:
    """Attention that is called only for the queries and keys that it would be called with."""

    query: Tensor | None = None
    key: Tensor | None = None


watching: ContextVar[Watch | None] = ContextVar("headtrace_attention", default=None)
_rereading: ContextVar[Rereading | None] = ContextVar("headtrace_rereading", default=None)


@contextmanager
def rereading() -> Generator[Rereading]:
    """Inside, attention modules attend to nothing: they only show the queries and keys of what they are given."""
    found = Rereading()
    before = _rereading.set(found)
    try:
        yield found
    finally:
        _rereading.reset(before)


def is_rereading() -> bool:
    return _rereading.get() is not None


def softcap(logits: Tensor, cap: float | None) -> Tensor:
    """The cap that some models put on logits: ``cap * tanh(logits / cap)``."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def softcap_slope(logits: Tensor, cap: float | None) -> Tensor | float:
    """The derivative of the cap."""
    return 1.0 if cap is None else 1 - torch.tanh(logits / cap).square()


def per_query_head(
    tensor: Float[Tensor, "batch kv_head token d_head"], n_heads: int
) -> Float[Tensor, "batch head token d_head"]:
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
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Eager attention, with a place to look and to act. The signature is the one transformers calls."""
    if s_aux is not None:
        raise UnsupportedModelError(
            "The model's heads attend to learned sinks that are no tokens, so that attention does not sum to one. That "
            "is not decomposed yet."
        )
    only_read = _rereading.get()
    if only_read is not None:
        only_read.query, only_read.key = query, key
        return torch.zeros_like(query).transpose(1, 2).contiguous(), query
    watch = watching.get() or Watch((), None)
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key = watch.queries.pop(layer, query), watch.keys.pop(layer, key)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    n_heads = query.shape[1]
    own, wide, where = query.dtype, compute_dtype(query.dtype), query.device
    here = watch.device(where)
    query, key, value = (tensor.to(here, wide) for tensor in (query, key, value))
    attention_mask = None if attention_mask is None else attention_mask.to(here)
    order = None if watch.head_order is None else watch.head_order.to(here)
    seen = (query, key) if order is None else (query[..., order], key[..., order])
    call = AttentionCall(layer, *seen, value, attention_mask, scale, softcap)
    needed = any(observer.needs_rows() for observer in watch.observers)
    if needed and not all(o.needs_rows() or o.takes_rows() for o in watch.observers):
        raise HeadtraceError(
            "A pass whose patterns are not kept shows attention some rows at a time, and an observer of this one "
            'changes or reads it as a whole. Record with patterns="keep".'
        )
    if needed or (_many(query, key) and all(observer.takes_rows() for observer in watch.observers)):
        output = _by_rows(call, query, key, value.to(own), watch.observers)
        for observer in watch.observers:
            observer.rows_seen(call)
        return output.transpose(1, 2).contiguous().to(where, own), None
    scores = torch.matmul(query, per_query_head(key, n_heads).transpose(2, 3)).mul_(scale)
    for observer in watch.observers:
        observer.edit_scores(call, scores)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_()
        # The slope of tanh is computed from its value, which must not change where gradients are wanted.
        scores = scores * softcap if scores.requires_grad else scores.mul_(softcap)
    if attention_mask is not None:
        scores = scores.add_(attention_mask)
    buffer = _first(observer.pattern_buffer(call) for observer in watch.observers)
    # transformers computes the softmax in float32 whatever the model's dtype; a float64 model keeps float64 here.
    pattern = torch.softmax(scores, dim=-1) if buffer is None else torch.softmax(scores, dim=-1, out=buffer)
    output = _first(observer.mix(call, pattern) for observer in watch.observers)
    if output is None:
        output = torch.matmul(pattern.to(own), per_query_head(value.to(own), n_heads))
    for observer in watch.observers:
        observer.see(call, pattern)
    return output.transpose(1, 2).contiguous().to(where, own), pattern


def _many(query: Tensor, key: Tensor) -> bool:
    """Whether scores would be so many that they are better made and used some rows at a time."""
    batch, n_heads, length, _ = query.shape
    return not query.requires_grad and batch * n_heads * length * key.shape[2] > 2 * SCORES_AT_ONCE


def _by_rows(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, observers: tuple[Observer, ...]
) -> Float[Tensor, "batch head dest d_head"]:
    """The same attention, some destinations at a time: no tensor has all pairs of tokens."""
    batch, n_heads, length, _ = query.shape
    keys, values = per_query_head(key, n_heads).transpose(2, 3), per_query_head(value, n_heads)
    step = max(1, SCORES_AT_ONCE // (batch * n_heads * key.shape[2]))
    output = values.new_empty(batch, n_heads, length, values.shape[-1])
    for first in range(0, length, step):
        rows = slice(first, first + step)
        logits = softcap(torch.matmul(query[:, :, rows], keys).mul_(call.scale), call.softcap)
        if call.mask is not None:
            logits = logits.add_(call.mask[:, :, rows])
        pattern = torch.softmax(logits, dim=-1)
        output[:, :, rows] = torch.matmul(pattern.to(values.dtype), values)
        for observer in observers:
            observer.see_rows(call, first, logits, pattern)
    return output


def _first(offers: Iterable[Tensor | None]) -> Tensor | None:
    return next((offer for offer in offers if offer is not None), None)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, eager_mask)


Attend = Callable[..., tuple[Tensor, Tensor | None]]


def attend_by_hand(model: Model, own: OwnAttention, stack: ExitStack) -> None:
    """Until the stack is left, the attention modules of a model attend through headtrace's function."""
    for index, layer in enumerate(model.layers):
        module = layer.get_submodule(model.architecture.attention)
        attend = _attend(module, index, own)
        name = own.method or "forward"
        stack.callback(_put_back, module, name, module.__dict__.get(name))
        setattr(module, name, attend if own.method else _calling(module.forward, attend))


def _put_back(module: nn.Module, name: str, before: Any) -> None:
    """What a module had under a name of its own (some libraries wrap forward methods), or nothing."""
    module.__dict__.pop(name, None)
    if before is not None:
        setattr(module, name, before)


class _Layer(nn.Module):
    """Says which layer attends, for modules that do not."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer_idx = layer


def _attend(module: nn.Module, layer: int, own: OwnAttention) -> Attend:
    place = _Layer(layer)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        mask = _additive(mask, query)
        if own.window is not None:
            n, m = query.shape[-2], key.shape[-2]
            window = _additive(own.window(module)[:, :, m - n : m, :m], query)
            mask = window if mask is None else torch.minimum(mask, window)  # type: ignore[arg-type]
        mixed, pattern = attention(place, query, key, value, mask, scaling=own.scale)
        return mixed.transpose(1, 2), pattern

    return attend


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask to add to scores, from one that says which keys are visible."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, torch.finfo(like.dtype).min)


class _Instead(TorchFunctionMode):
    """Inside, PyTorch's attention is headtrace's."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args
        return self.attend(query, key, value, kwargs.get("attn_mask"))[0]


def _calling(forward: Callable[..., Any], attend: Attend) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Instead(attend):
            return forward(*args, **kwargs)

    return run
