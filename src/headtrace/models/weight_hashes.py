"""Hashes of weights: of all of them, which names a model in files, and of one layer's attention, a key for caches.

Reading billions of numbers takes longer than a first answer, so both are made when somebody asks, and kept with the
state of the weights that they are of (`headtrace.models.stamp`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headtrace.models.placement import values_of

if TYPE_CHECKING:
    from headtrace.models.model import Model

BLOCK = 1 << 24
"""Numbers that are converted at a time, so that no second copy of a large matrix is made."""


@torch.no_grad()
def weights_sha256(hf: nn.Module) -> str:
    """Names, shapes and float32 values of all parameters: the same whatever the dtype they are kept in."""
    digest = hashlib.sha256()
    for name, parameter in sorted(hf.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        for block in _blocks(values_of(hf, name, parameter)):
            digest.update(block.float().cpu().numpy().data)
    return digest.hexdigest()


@torch.no_grad()
def layer_sha256(model: Model, layer: int) -> str:
    """What the heads of one layer follow from: its attention with the norms around it, and how heads are cut out of it.

    Two models with the same hash of a layer have the same heads there, whatever their other layers and MLPs are.
    """
    facts, block = model.architecture, model.layers[layer]
    order = None if model.head_order is None else model.head_order.tolist()
    shape: list[Any] = [facts.model_type, model.n_heads, model.n_kv_heads, model.d_head, order]
    digest = hashlib.sha256(repr(shape).encode())
    for path in (facts.attention_norm, facts.attention, facts.attention_post_norm):
        module = None if path is None else block.get_submodule(path)
        for name, parameter in sorted([] if module is None else module.named_parameters()):
            digest.update(f"{path} {name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
            assert module is not None
            for numbers in _blocks(values_of(module, name, parameter)):
                digest.update(numbers.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _blocks(parameter: Tensor) -> Iterable[Tensor]:
    return parameter.detach().contiguous().flatten().split(BLOCK)
