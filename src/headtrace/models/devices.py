"""Where a model can run: a device that exists and that holds numbers."""

from __future__ import annotations

import torch

from headtrace.errors import InputError

EXPECTED = "Expected 'auto', 'cpu', 'cuda', 'cuda:1', 'mps' or another device that this PyTorch can use."


def find_device(name: str, dtype: torch.dtype = torch.float32) -> torch.device:
    """The device of that name, tried with one number; ``"auto"`` is the GPU if there is one.

    >>> find_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = named_device(name)
    if device.type == "meta":
        raise InputError(f"The device 'meta' holds shapes only, no weights. {EXPECTED}")
    if device.type == "mps" and dtype == torch.float64:
        raise InputError("The device 'mps' has no float64. Use device='cpu', or dtype='float32'.")
    try:
        torch.zeros(1, dtype=dtype, device=device).add_(1)
    except Exception as error:  # each backend has its own way of saying that it is not there
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "aten::" in reason or "INTERNAL ASSERT" in reason:
            reason = "this PyTorch is not built for it"
        raise InputError(
            f"The device {name!r} cannot be used here: {reason.rstrip('.')}. {EXPECTED}"
        ) from error
    return device


def named_device(name: str) -> torch.device:
    """What PyTorch calls that device, whether it is there or not."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError, ValueError):
        raise InputError(f"There is no device {name!r}. {EXPECTED}") from None


def same_device(asked: torch.device, found: torch.device) -> bool:
    """Whether a device is the one that was asked for; a kind without a number (``cuda``) is any of its kind."""
    return asked.type == found.type and asked.index in (None, found.index)
