"""Where the weights of a model are when it is spread over devices: some may wait on the CPU or on disk (accelerate)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from headtrace.errors import InputError


def values_of(root: nn.Module, name: str, parameter: Tensor) -> Tensor:
    """The numbers of a parameter, also of one that is only brought to its device while its module runs."""
    if parameter.device.type != "meta":
        return parameter
    path, _, own = name.rpartition(".")
    waiting = _waiting(root.get_submodule(path))
    if waiting is None or own not in waiting:
        raise InputError(
            f"The parameter {name!r} has no values (it is on the device 'meta'). Load its weights first."
        )
    return waiting[own]


def _waiting(module: nn.Module) -> Mapping[str, Tensor] | None:
    """What accelerate keeps elsewhere of a module, by name."""
    hook: Any = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        if getattr(each, "offload", False):
            return each.weights_map
    return None
