"""Where the weights of a model are when it is spread over devices by a device map (accelerate).

A module may run on one device while its weights wait elsewhere, on the CPU or on disk, to be brought in for each pass:
meanwhile its parameters have no values. Here they are found without running, or touching, the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from headtrace.errors import InputError


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
