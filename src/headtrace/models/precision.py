"""float64 on devices that have none: there, exact numbers are kept on the host.

Channels are made in float64 whatever the model computes in: the inverse of an ill-conditioned projection has large
entries. Apple's GPUs have no float64, so what needs it is carried to the CPU, some rows and small matrices at a time;
everywhere else it stays where it is. Nothing else says `float64` of a tensor that may be on a device.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}
"""Kinds of devices that have no float64."""


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64.

    >>> has_float64(torch.device("cuda", 1)), has_float64(torch.device("mps"))
    (True, False)
    """
    return device.type not in WITHOUT_FLOAT64


def exact_device(device: torch.device) -> torch.device:
    """Where float64 numbers that belong to a device are kept: there, or on the host.

    >>> exact_device(torch.device("mps"))
    device(type='cpu')
    """
    return device if has_float64(device) else torch.device("cpu")


def exact(x: Tensor) -> Float[Tensor, "..."]:
    """A tensor in float64: where it is, or on the host if there is no float64 where it is.

    >>> exact(torch.ones(2)).dtype
    torch.float64
    """
    return x.to(exact_device(x.device)).double()


def rounded(x: Tensor, like: Tensor) -> Tensor:
    """Exact numbers, or whole ones, in the dtype and on the device of others.

    >>> rounded(torch.ones(2).double(), like=torch.zeros(1)).dtype
    torch.float32
    """
    return x.to(like.dtype).to(like.device)  # in this order: the device may not have what it comes in


def on_host(x: Tensor) -> Float[Tensor, "..."]:
    """A tensor in float64 on the CPU, to be counted or shown: for results, not on the way to them.

    >>> on_host(torch.ones(2)).dtype
    torch.float64
    """
    return x.cpu().double()
