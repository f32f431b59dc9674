"""The attention function that transformers calls while headtrace runs a model, registered under ``headtrace``.

Every layer's queries, keys and values pass through it after biases, QK-norm and rotary positions, together with the
mask, the scale and the softcap. It computes what transformers' eager attention computes, operation by operation (in a
model of half precision, scores stay in float32, as in the fused kernels that such models run with: only inputs and
outputs are rounded), and shows each call to the observers of the pass, which may change the scores of one head at one
destination, even where heads share keys. Modules that do not use transformers' ``AttentionInterface`` are brought to
the same function. `headtrace.models.forward` begins and ends a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from headtrace.errors import HeadtraceError, UnsupportedModelError
from headtrace.models.architectures.facts import OwnAttention
from headtrace.models.devices import compute_dtype
from headtrace.models.observer import AttentionCall, Observer, in_this_thread

if TYPE_CHECKING:
    from headtrace.models.model import Model

NAME = "headtrace"
SCORES_AT_ONCE = 16_000_000
"""Attention scores that are computed at once for long prompts (64 MB in float32)."""


@dataclass(frozen=True)
class Watch:
    """The observers of the pass that runs in this thread."""

    observers: tuple[Observer, ...] = ()
    head_order: Int[Tensor, " d_head"] | None = None
    """The order in which observers see a head's dimensions, where it is not the model's own."""
    home: torch.device | None = None
    """Where observers have their tensors, and so where attention that they watch is computed."""
    d_head: int | None = None
    """How many dimensions observers see of every head: those of smaller ones are filled up with zeros."""
    queries: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    keys: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """By layer, queries or keys to use instead of the model's own; each is used once."""

    def device(self, layer: torch.device) -> torch.device:
        """Where a layer attends: on its own device, unless an observer watches from another one."""
        watched = any(not observer.takes_rows() or observer.needs_rows() for observer in self.observers)
        return self.home if watched and self.home is not None else layer

    def shown(self, x: Float[Tensor, "batch head token own"]) -> Float[Tensor, "batch head token d_head"]:
        """Queries, keys or values as observers see them."""
        missing = 0 if self.d_head is None else self.d_head - x.shape[-1]
        return pad(x, (0, missing)) if missing else x

    def by_rows(self, n_scores: int) -> bool:
        """Whether attention is computed some rows at a time: an observer needs it, or there are many scores."""
        if any(observer.needs_rows() for observer in self.observers):
            if not all(observer.needs_rows() or observer.takes_rows() for observer in self.observers):
                raise HeadtraceError(
                    "A pass whose patterns are not kept shows attention some rows at a time, and an observer of this "
                    'one changes or reads it as a whole. Record with patterns="keep".'
                )
            return True
        return n_scores > 2 * SCORES_AT_ONCE and all(observer.takes_rows() for observer in self.observers)


@dataclass
class Rereading:
    """The queries and keys of an attention module that was called only to read them."""

    query: Tensor | None = None
    key: Tensor | None = None


watching: ContextVar[Watch | None] = ContextVar("headtrace_attention", default=None)
_rereading: ContextVar[Rereading | None] = ContextVar("headtrace_rereading", default=None)


@contextmanager
def rereading() -> Generator[Rereading]:
    """Inside, attention modules do not attend: they only report the queries and keys of what they are given."""
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
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Eager attention that observers can watch and change. The signature is the one transformers calls."""
    if s_aux is not None:
        raise UnsupportedModelError(
            "The model's heads attend to learned sinks that are no tokens, so that attention does not sum to one. That "
            "is not decomposed yet."
        )
    only_read = _rereading.get()
    if only_read is not None:
        only_read.query, only_read.key = query, key
        return torch.zeros_like(query).transpose(1, 2).contiguous(), query

    watch, layer = watching.get() or Watch(), module.layer_idx
    query, key = watch.queries.pop(layer, query), watch.keys.pop(layer, key)
    own_dtype, own_device = query.dtype, query.device
    device, wide = watch.device(own_device), compute_dtype(own_dtype)
    query, key, value = (tensor.to(device, wide) for tensor in (query, key, value))
    mask = None if attention_mask is None else attention_mask.to(device)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    order = slice(None) if watch.head_order is None else watch.head_order.to(device)
    q, k, v = (watch.shown(tensor) for tensor in (query[..., order], key[..., order], value))
    call = AttentionCall(layer, q, k, v, mask, scale, softcap)

    n_heads = query.shape[1]
    keys, values = per_query_head(key, n_heads).transpose(2, 3), per_query_head(value.to(own_dtype), n_heads)
    n_scores = 0 if query.requires_grad else query.shape[:3].numel() * key.shape[2]
    if watch.by_rows(n_scores):
        output, pattern = _attend_by_rows(call, query, keys, values, watch.observers), None
    else:
        output, pattern = _attend_at_once(call, query, keys, values, watch.observers)
    return output.transpose(1, 2).contiguous().to(own_device, own_dtype), pattern


def _attend_at_once(
    call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor, observers: tuple[Observer, ...]
) -> tuple[Float[Tensor, "batch head dest d_head"], Float[Tensor, "batch head dest src"]]:
    """Attention with every observer's changes: of the scores, and of what is made of the pattern."""
    scores = torch.matmul(query, keys).mul_(call.scale)
    for observer in observers:
        observer.edit_scores(call, scores)
    if call.softcap is not None:
        scores = scores.div_(call.softcap).tanh_()
        # The slope of tanh is computed from its value, which must not change where gradients are wanted.
        scores = scores * call.softcap if scores.requires_grad else scores.mul_(call.softcap)
    if call.mask is not None:
        scores = scores.add_(call.mask)
    buffer = _first(observer.pattern_buffer(call) for observer in observers)
    # transformers computes the softmax in float32 whatever the model's dtype; a float64 model keeps float64 here.
    pattern = torch.softmax(scores, dim=-1) if buffer is None else torch.softmax(scores, dim=-1, out=buffer)
    output = _first(observer.mix(call, pattern) for observer in observers)
    if output is None:
        output = torch.matmul(pattern.to(values.dtype), values)
    output = output[..., : values.shape[-1]]
    for observer in observers:
        observer.see(call, pattern)
    return output, pattern


def _attend_by_rows(
    call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor, observers: tuple[Observer, ...]
) -> Float[Tensor, "batch head dest d_head"]:
    """The same attention, some destinations at a time: no tensor has all pairs of tokens."""
    batch, n_heads, length, _ = query.shape
    step = max(1, SCORES_AT_ONCE // (batch * n_heads * keys.shape[-1]))
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
    for observer in observers:
        observer.rows_seen(call)
    return output


def _first(offers: Iterable[Tensor | None]) -> Tensor | None:
    return next((offer for offer in offers if offer is not None), None)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, eager_mask)

# -- modules that attend by themselves -----------------------------------------------------------------------

Attend = Callable[..., tuple[Tensor, Tensor | None]]


def replace_own_attention(model: Model, own: OwnAttention, stack: ExitStack) -> None:
    """Until the stack is left, attention modules that do not use ``AttentionInterface`` attend through `attention`.

    The module's own projections, rotary positions and output stay; only the step from queries, keys and values to a
    mixture of values is replaced.
    """
    for index, layer in enumerate(model.layers):
        module = layer.get_submodule(model.architecture.attention)
        attend, name = _attend_as(module, index, own), own.method or "forward"
        before: Callable[..., Any] = getattr(module, name)
        stack.callback(_restore, module, name, module.__dict__.get(name))
        attends = attend if own.method else _with_attention(before, attend)
        setattr(module, name, in_this_thread(attends, otherwise=before))


def _restore(module: nn.Module, name: str, before: Any) -> None:
    """Undo what was set on a module: what it had under that name (some libraries wrap ``forward``), or nothing."""
    module.__dict__.pop(name, None)
    if before is not None:
        setattr(module, name, before)


def _attend_as(module: nn.Module, layer: int, own: OwnAttention) -> Attend:
    """A method for an attention module that calls `attention` as that layer."""

    def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if mask is None or mask.dtype != torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        mask = additive(mask, query.dtype)
        if own.window is not None:
            n, m = query.shape[-2], key.shape[-2]
            window = additive(own.window(module)[:, :, m - n : m, :m], query.dtype)
            mask = window if mask is None else torch.minimum(mask, window)  # type: ignore[arg-type]
        place = SimpleNamespace(layer_idx=layer)
        mixed, pattern = attention(place, query, key, value, mask, scaling=own.scale)
        return mixed.transpose(1, 2), pattern

    return attend


class _ReplaceScaledDotProduct(TorchFunctionMode):
    """Inside, PyTorch's ``scaled_dot_product_attention`` is headtrace's."""

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


def _with_attention(forward: Callable[..., Any], attend: Attend) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _ReplaceScaledDotProduct(attend):
            return forward(*args, **kwargs)

    return run
