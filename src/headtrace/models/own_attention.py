"""Attention of modules that do not ask transformers' ``AttentionInterface``, brought to headtrace's function.

The module's own forward pass stays as it is: its projections, its rotary positions, its output. Only the step in the
middle, queries, keys and values to a mixture of values, is computed by `headtrace.models.attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from headtrace.models.architectures.facts import OwnAttention
from headtrace.models.attention import attention

if TYPE_CHECKING:
    from headtrace.models.model import Model

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
