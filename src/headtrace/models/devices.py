"""Devices and number formats: where a model and its weights are, and what its numbers are computed in.

A model may be on one device or spread over several by a device map (accelerate). A module may then run on one device
while its weights wait elsewhere, on the CPU or on disk, and are loaded for each pass: meanwhile its parameters have no
values. Channels are computed in float64 whatever the model computes in, since the inverse of an ill-conditioned
projection has large entries; Apple's GPUs have no float64, so such numbers are kept on the host there.
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


def device_of(module: nn.Module) -> torch.device:
    """Where a module runs: the device that it was sent to, else the one that holds its first parameter."""
    for each in every_module(module):
        for hook in _hooks(each):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return torch.device(device)
        own = next(_own_parameters(each), None)
        if own is not None:
            return own.device
    return torch.device("cpu")


def first_number(root: nn.Module) -> nn.Parameter:
    """A model's first floating point parameter, whose dtype is the model's.

    >>> first_number(nn.Sequential(nn.ReLU(), nn.Linear(2, 2).double())).dtype
    torch.float64
    """
    parameters = (parameter for each in every_module(root) for parameter in _own_parameters(each))
    return next(parameter for parameter in parameters if parameter.is_floating_point())


def every_module(root: nn.Module) -> Iterator[nn.Module]:
    """All modules, each before its parts, without the names that ``modules()`` would put together."""
    waiting = [root]
    while waiting:
        module = waiting.pop()
        yield module
        waiting.extend(part for part in reversed(vars(module)["_modules"].values()) if part is not None)


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in vars(module)["_parameters"].values() if parameter is not None)


def is_spread(root: nn.Module) -> bool:
    """Whether a device map put parts of a model into different places, or weights aside."""
    return any(_hooks(module) for module in root.modules())


def values_of(root: nn.Module, name: str, parameter: Tensor) -> Tensor:
    """The numbers of a parameter, also of one that is only brought to its device while its module runs."""
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
    """All parameters by name, each once: those that are tied share their numbers also where these are set aside."""
    seen = set[int]()
    for name, parameter in root.named_parameters():
        path, _, own = name.rpartition(".")
        held = (
            set_aside_in_memory(root.get_submodule(path)).get(own)
            if parameter.device.type == "meta"
            else None
        )
        if held is None:
            yield name, parameter
        elif held.data_ptr() not in seen:
            seen.add(held.data_ptr())
            yield name, parameter


def with_values(module: nn.Module) -> Any:
    """A module whose parameters can be read: itself, or a twin of it with those that were set aside. Not to be run."""
    if all(parameter.device.type != "meta" for parameter in module.parameters()):
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


HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32, torch.float64)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What numbers of a dtype are computed with: float32 for half precision, itself otherwise.

    >>> compute_dtype(torch.bfloat16), compute_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALF else dtype


def available_bytes() -> int:
    """Memory of this machine that can still be had."""
    return psutil.virtual_memory().available
