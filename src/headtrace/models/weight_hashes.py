"""The hash of all weights, which names a model in files.

Reading billions of numbers takes longer than a first answer, so it is made when somebody asks, and kept with the state
of the weights that it is of (`headtrace.models.stamp`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from headtrace.models.placement import own_parameters, values_of

BLOCK = 1 << 24
"""Numbers that are converted at a time, so that no second copy of a large matrix is made."""


@torch.no_grad()
def weights_sha256(hf: nn.Module) -> str:
    """Names, shapes and float32 values of all parameters: the same whatever the dtype they are kept in."""
    digest = hashlib.sha256()
    for name, parameter in sorted(own_parameters(hf)):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        for block in _blocks(values_of(hf, name, parameter)):
            digest.update(block.float().cpu().numpy().data)
    return digest.hexdigest()


def _blocks(parameter: Tensor) -> Iterable[Tensor]:
    return parameter.detach().contiguous().flatten().split(BLOCK)
