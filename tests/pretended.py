"""GPUs that are not there: tensors that say they are on another device and compute on the CPU.

Inside `pretended_devices` there are as many devices as wanted: ``privateuseone:0``, ``privateuseone:1``, ... As on real
ones, an operation on tensors of two devices is an error (a number without axes from the host may go along), and if they
are to be like Apple's, so is float64 on them. What goes to the host or to a device is counted: for each number that the
host asks for, a real GPU would be waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
KIND = "privateuseone"  # what PyTorch calls devices that are not its own
BETWEEN = {aten._to_copy.default, aten.copy_.default}
"""Operations that may read one device and write another."""
PLACES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
"""Indices may be on the host."""


class Elsewhere(Tensor):
    """A tensor that says it is on another device; its numbers are in ``held``, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device, requires_grad: bool = False) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.held!r}, {self.device})"

    def tolist(self) -> Any:  # PyTorch has none for tensors of other classes
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a pretended device, outside of pretended_devices")


class Pretended(TorchDispatchMode):
    """Runs everything on the CPU, and watches over where it would have run."""

    def __init__(self, float64: bool, spoilt: Callable[[Any, Any], Any] | None) -> None:
        super().__init__()
        self.float64, self.spoilt = float64, spoilt
        self.carried: Counter[str] = Counter()
        """How often something went ``to the host``, where it is waited for, and ``to a device``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.is_inference_mode_enabled():  # where operations that are made of others arrive whole
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        flat, _ = tree_flatten((args, kwargs))
        tensors = [each for each in flat if isinstance(each, Tensor)]
        place = self._place(func, tensors, kwargs)
        if func is aten._local_scalar_dense.default and is_device(place):
            self.carried["to the host"] += 1
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = torch.device("cpu")
        with torch.inference_mode(False), torch.no_grad():  # views of tensors that were made outside are none
            found = func(*tree_map(_bare, args), **tree_map(_bare, kwargs))
            if is_device(place) and self.spoilt is not None:
                found = self.spoilt(func, found)
            if (
                is_device(place) and torch.Tag.inplace_view in func.tags
            ):  # the tensor itself has another shape now, too
                with no_dispatch():
                    func(*args, **kwargs)
            return self._dressed(func, found, place, flat)

    def _place(self, func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> torch.device:
        """Where an operation runs, and where its result is."""
        asked = kwargs.get("device")
        where = {each.device for each in tensors}
        if func in BETWEEN:
            goal = tensors[0].device if func is aten.copy_.default else _numbered(asked or tensors[0].device)
            if len(where | {goal}) > 1:
                self.carried["to the host" if not is_device(goal) else "to a device"] += 1
                wide = kwargs.get("dtype") == torch.float64 or any(t.dtype == torch.float64 for t in tensors)
                if wide and not self.float64:
                    raise TypeError(
                        f"{func}: float64 is converted before it goes to a device, and after it left"
                    )
            return goal
        if asked is not None and (not tensors or "like" in str(func) or "new_" in str(func)):
            return _numbered(asked)
        if not tensors:
            return torch.device("cpu")
        if func in PLACES:
            home, value = tensors[0].device, tensors[-1]
            if "put" in str(func) and value.device != home and value.ndim:
                raise RuntimeError(f"{func}: values on {value.device}, the tensor on {home}")
            others = {each.device for each in tensors[1:]} - {home}
            if others - {torch.device("cpu")}:
                raise RuntimeError(f"{func}: indices on {others}, the tensor on {tensors[0].device}")
            if others:
                self.carried["to a device"] += 1
            return tensors[0].device
        big = {each.device for each in tensors if each.ndim or is_device(each.device)} or where
        if len(big) > 1:
            raise RuntimeError(f"{func}: tensors on different devices, {', '.join(sorted(map(str, big)))}")
        return next(iter(big))

    def _dressed(self, func: Any, found: Any, place: torch.device, given: list[Any]) -> Any:
        """Results as tensors of the device; what was changed in place stays the tensor it was."""
        if not is_device(place):
            return found
        known = {id(each.held): each for each in given if isinstance(each, Elsewhere)}

        def dress(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            if each.dtype == torch.float64 and not self.float64:
                raise TypeError(f"{func}: the device {place} has no float64")
            return known.get(id(each)) if id(each) in known else Elsewhere(each, place)

        return tree_map(dress, found)


def _bare(each: Any) -> Any:
    return each.held if isinstance(each, Elsewhere) else each


def _numbered(device: torch.device) -> torch.device:
    device = torch.device(device)
    return torch.device(KIND, 0) if device.type == KIND and device.index is None else device


def is_device(place: torch.device) -> bool:
    return place.type == KIND


@contextmanager
def pretended_devices(
    *, float64: bool = True, spoilt: Callable[[Any, Any], Any] | None = None
) -> Generator[Pretended]:
    """Inside, there are devices. ``spoilt`` may change what an operation on them gives (it gets both)."""
    if not hasattr(torch._C, "_acc"):
        pytest.skip("this PyTorch has no devices that are written in Python")
    global _inside
    _inside = True
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with Pretended(float64, spoilt) as mode:
            yield mode
    finally:
        _inside = False
        torch._C._set_only_lift_cpu_tensors(before)


_inside = False


def _register() -> None:
    """PyTorch's place for the devices of others, with what indexing and autograd ask of it; outside, it says it is not
    there. Autograd counts devices when it first runs in a process, so this is done when the module is read."""
    from torch.utils import backend_registration

    class Module(backend_registration._DummyBackendModule):
        def is_available(self) -> bool:
            return _inside

    class Hook(backend_registration._DummyPrivateUse1Hook):
        def is_available(self) -> bool:
            return _inside

    # Its own name: without one, autograd says that there is no such device.
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, Module())
    torch._C._acc.register_python_privateuseone_hook(Hook())
    torch._C._acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())


if hasattr(torch._C, "_acc"):
    _register()
