"""Devices and number formats: where a model and its weights are, and what its numbers are computed in.

A model is on one device, or spread over several by a device map (accelerate). A module may then run on one device while
its weights wait elsewhere, on the CPU or on disk, and are loaded for each pass: until then its parameters are empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

import psutil
import torch
from jaxtyping import Float
from torch import Tensor, nn

from headtrace.errors import InputError

# -- choosing a device ---------------------------------------------------------------------------------------

EXPECTED = "Expected 'auto', 'cpu', 'cuda', 'cuda:1', 'mps' or another device that this PyTorch can use."
DeviceMap = str | Mapping[str, Any]
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def find_device(name: str, dtype: torch.dtype = torch.float32) -> torch.device:
    """The device of that name, tried with one number; ``"auto"`` is cuda if it is there, else mps, else the CPU.

    >>> find_device("cpu")
    device(type='cpu')
    """
    device = named_device(best_device(dtype) if name == "auto" else name)
    if device.type == "meta":
        raise InputError(f"The device 'meta' holds shapes only, no weights. {EXPECTED}")
    if device.type == "mps" and dtype == torch.float64:
        raise InputError("The device 'mps' has no float64. Use device='cpu', or dtype='float32'.")
    try:
        torch.zeros(1, dtype=dtype, device=device).add_(1)
    except Exception as error:  # each backend raises its own type of error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "aten::" in reason or "INTERNAL ASSERT" in reason:
            reason = "this PyTorch is not built for it"
        raise InputError(
            f"The device {name!r} cannot be used here: {reason.rstrip('.')}. {EXPECTED}"
        ) from error
    return device


def best_device(dtype: torch.dtype) -> str:
    """The fastest kind of device that this machine has for numbers of a dtype (Apple's GPUs have no float64)."""
    mps = torch.backends.mps.is_available() and dtype != torch.float64
    return "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"


def named_device(name: str) -> torch.device:
    """What PyTorch calls that device, whether it is there or not."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError, ValueError):
        raise InputError(f"There is no device {name!r}. {EXPECTED}") from None


def same_device(given: torch.device, found: torch.device) -> bool:
    """Whether a device is the given one; a kind without a number (``cuda``) is any of its kind."""
    return given.type == found.type and given.index in (None, found.index)


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
        for name in {str(value) for value in found.values()} - {"disk"}:
            find_device(f"cuda:{name}" if name.isdigit() else name, dtype)
    elif isinstance(found, str) and found not in STRATEGIES and ":" in found:
        find_device(found, dtype)
    elif found not in (*STRATEGIES, "cpu", "cuda", "mps"):
        raise InputError(
            f"device_map={found!r}: expected {', '.join(map(repr, STRATEGIES))}, a device, or a dictionary from "
            "modules to devices (--device-map: a .json file with one), 'disk' for weights that are read from their "
            "files."
        )


def available_bytes() -> int:
    """Memory of this machine that is free."""
    return psutil.virtual_memory().available


# -- where a module and its weights are ----------------------------------------------------------------------


def every_module(root: nn.Module) -> Iterator[nn.Module]:
    """All modules, each before its parts: faster than ``modules()``, which builds their names."""
    waiting = [root]
    while waiting:
        module = waiting.pop()
        yield module
        waiting.extend(part for part in reversed(vars(module)["_modules"].values()) if part is not None)


def device_of(module: nn.Module) -> torch.device:
    """Where a module runs: the device that it was sent to, else the one that holds its first parameter."""
    for each in every_module(module):
        for hook in _hooks(each):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return torch.device(device)
        for parameter in vars(each)["_parameters"].values():
            if parameter is not None:
                return parameter.device
    return torch.device("cpu")


def first_number(root: nn.Module) -> nn.Parameter:
    """A model's first floating point parameter, whose dtype is the model's.

    >>> first_number(nn.Sequential(nn.ReLU(), nn.Linear(2, 2).double())).dtype
    torch.float64
    """
    parameters = (own for each in every_module(root) for own in vars(each)["_parameters"].values())
    return next(own for own in parameters if own is not None and own.is_floating_point())


def is_spread(root: nn.Module) -> bool:
    """Whether a device map put parts of a model on different devices, or weights aside."""
    return any(_hooks(module) for module in root.modules())


def values_of(root: nn.Module, name: str, parameter: Tensor) -> Tensor:
    """The numbers of a parameter, also of one that is only loaded while its module runs."""
    if parameter.device.type != "meta":
        return parameter
    path, _, own = name.rpartition(".")
    aside = set_aside(root.get_submodule(path))
    if aside is None or own not in aside:
        raise InputError(
            f"The parameter {name!r} has no values (it is on the device 'meta'). Load its weights first."
        )
    return aside[own]


def own_parameters(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters by name, each once: tied ones share their numbers also where these are set aside."""
    seen = set[int]()
    for name, parameter in root.named_parameters():
        if parameter.device.type == "meta":
            path, _, own = name.rpartition(".")
            held = set_aside_in_memory(root.get_submodule(path)).get(own)
            if held is not None and held.data_ptr() in seen:
                continue
            if held is not None:
                seen.add(held.data_ptr())
        yield name, parameter


def with_values(module: nn.Module) -> Any:
    """A module whose parameters can be read: itself, or a copy with those that were set aside. Not to be run."""
    parts = (own for each in every_module(module) for own in vars(each)["_parameters"].values())
    if all(own is None or own.device.type != "meta" for own in parts):
        return module
    twin, device = copy(module), device_of(module)
    parameters = {
        name: None
        if own is None
        else nn.Parameter(values_of(module, name, own).to(device), requires_grad=False)
        for name, own in vars(module)["_parameters"].items()
    }
    children = {
        name: None if child is None else with_values(child)
        for name, child in vars(module)["_modules"].items()
    }
    vars(twin).update(_parameters=parameters, _modules=children)
    return twin


def set_aside(module: nn.Module) -> Any:
    """The weights of a module itself that wait elsewhere, by name; None if none do."""
    return next((hook.weights_map for hook in _hooks(module) if getattr(hook, "offload", False)), None)


def set_aside_in_memory(module: nn.Module) -> dict[str, Tensor]:
    """Those of them that are tensors in memory, not in files: the only ones that a program can change."""
    weights: Any = set_aside(module)
    prefix: str = getattr(weights, "prefix", "")
    dataset: Any = getattr(weights, "dataset", weights)
    held: Mapping[str, Tensor] = getattr(dataset, "state_dict", dataset) or {}
    return {name: held[prefix + name] for name in vars(module)["_parameters"] if prefix + name in held}


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """What accelerate does around a module: one hook or several."""
    hook: Any = vars(module).get("_hf_hook")
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


# -- number formats ------------------------------------------------------------------------------------------

HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32, torch.float64)
WITHOUT_FLOAT64 = {"mps"}
"""Kinds of devices that have no float64."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What headtrace computes in for a model of a dtype: float32 for half precision, itself otherwise.

    >>> compute_dtype(torch.bfloat16), compute_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALF else dtype


def exact_device(device: torch.device) -> torch.device:
    """Where float64 numbers that belong to a device are kept: there, or on the host if it has no float64.

    >>> exact_device(torch.device("cuda", 1)), exact_device(torch.device("mps"))
    (device(type='cuda', index=1), device(type='cpu'))
    """
    return torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device


def exact(x: Tensor) -> Float[Tensor, "..."]:
    """A tensor in float64: where it is, or on the host if there is no float64 where it is.

    Channels are computed in float64 whatever the model computes in: the inverse of an ill-conditioned projection has
    large entries.

    >>> exact(torch.ones(2)).dtype
    torch.float64
    """
    return x.to(exact_device(x.device)).double()


def rounded(x: Tensor, like: Tensor) -> Tensor:
    """Float64 numbers, or integers, in the dtype and on the device of others.

    >>> rounded(torch.ones(2).double(), like=torch.zeros(1)).dtype
    torch.float32
    """
    return x.to(like.dtype).to(
        like.device
    )  # in this order: the device may not have the dtype that it comes in


def on_host(x: Tensor) -> Float[Tensor, "..."]:
    """A tensor in float64 on the CPU, to be counted or shown: for results, not for intermediate steps.

    >>> on_host(torch.ones(2)).dtype
    torch.float64
    """
    return x.cpu().double()
