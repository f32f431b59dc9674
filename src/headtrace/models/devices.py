"""Where a model can run: a device that exists and that holds numbers, or several of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headtrace.errors import InputError

EXPECTED = "Expected 'auto', 'cpu', 'cuda', 'cuda:1', 'mps' or another device that this PyTorch can use."


def find_device(name: str, dtype: torch.dtype = torch.float32) -> torch.device:
    """The device of that name, tried with one number; ``"auto"`` is cuda if it is there, else mps, else the CPU.

    >>> find_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = best_device(dtype)
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


def best_device(dtype: torch.dtype) -> str:
    """The quickest kind of device that this machine has for numbers of a dtype."""
    if torch.cuda.is_available():
        return "cuda"
    has_dtype = dtype != torch.float64  # Apple's GPUs have none
    return "mps" if torch.backends.mps.is_available() and has_dtype else "cpu"


DeviceMap = str | Mapping[str, Any]
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def check_device_map(found: object, dtype: torch.dtype = torch.float32) -> None:
    """Raise ``InputError`` for what cannot be a device map, or names a device that cannot be used.

    >>> check_device_map({"model.embed_tokens": "cpu", "model.layers.0": "disk"})
    >>> check_device_map("everywhere")
    Traceback (most recent call last):
    headtrace.errors.InputError: device_map='everywhere': expected 'auto', 'balanced', 'balanced_low_0', 'sequential', \
a device, or a dictionary from modules to devices (--device-map: a .json file with one), 'disk' for weights that are \
read from their files.
    """
    if isinstance(found, Mapping) and found:
        for name in {str(value) for value in found.values()} - {"disk"}:  # type: ignore[union-attr]
            find_device(f"cuda:{name}" if name.isdigit() else name, dtype)
    elif isinstance(found, str) and found not in STRATEGIES and ":" in found:
        find_device(found, dtype)
    elif found not in (*STRATEGIES, "cpu", "cuda", "mps"):
        raise InputError(
            f"device_map={found!r}: expected {', '.join(map(repr, STRATEGIES))}, a device, or a dictionary from "
            "modules to devices (--device-map: a .json file with one), 'disk' for weights that are read from their "
            "files."
        )


def named_device(name: str) -> torch.device:
    """What PyTorch calls that device, whether it is there or not."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError, ValueError):
        raise InputError(f"There is no device {name!r}. {EXPECTED}") from None


def same_device(asked: torch.device, found: torch.device) -> bool:
    """Whether a device is the one that was asked for; a kind without a number (``cuda``) is any of its kind."""
    return asked.type == found.type and asked.index in (None, found.index)
