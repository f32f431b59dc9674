"""Whether a model's weights are still what they were, found out in a fraction of a millisecond.

What follows from the weights (folded weights, channels, their hash) is kept, so a change must be seen. PyTorch counts
edits in place, also under ``torch.no_grad()`` and by optimisers; modules and parameters that are replaced, moved or
converted are other objects or at other addresses. ``parameter.data``, NumPy views and fused optimisers pass the count
by: a sample of each parameter's numbers sees edits of whole parameters and of most blocks of them (on the CPU), not
those of a few numbers. After such an edit, say so: ``model.forget()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from headtrace.errors import InputError
from headtrace.models.placement import set_aside, set_aside_in_memory

if TYPE_CHECKING:
    from headtrace.models.record import Recording

SAMPLES = 32
"""Numbers that are compared per parameter."""
GOLDEN = 0.618
_edits = attrgetter("_version")


class Stamp:
    """Stands for one state of a model's weights, without holding them: another object after every change."""

    weights_sha256: str | None = None
    """Their hash, once somebody has asked for it."""


class Watcher:
    """What a model's weights look like at one moment, to be held against what they look like later."""

    def __init__(self, hf: nn.Module) -> None:
        # Dictionaries of the modules themselves: they show what is added, replaced or taken away.
        # Parameters of modules whose weights were set aside come and go with every pass: those are watched instead.
        self._aside = [module for module in hf.modules() if set_aside(module) is not None]
        ignored = {id(vars(module)["_parameters"]) for module in self._aside}
        self._dicts: list[dict[str, Any]] = [
            own
            for module in hf.modules()
            for own in (vars(module)["_modules"], vars(module)["_parameters"])
            if id(own) not in ignored
        ]
        self._parts = list(self._now())
        parameters = list({id(part): part for part in self._parts if isinstance(part, Tensor)}.values())
        self._parameters: list[Tensor] = parameters
        self._counted = [
            p for p in self._parameters if not p.is_inference()
        ]  # those made for inference have no count
        # They share memory with the parameters, whose addresses cannot be given to others as long as these are held.
        self._samples = [_sample(p) for p in self._parameters if p.device.type == "cpu"]
        self._seen = self._look()

    def holds(self) -> bool:
        """Whether nothing that can be seen has changed."""
        now = list(self._now())
        return len(now) == len(self._parts) and all(map(is_, now, self._parts)) and self._look() == self._seen

    def _now(self) -> Iterator[Any]:
        yield from chain.from_iterable(map(dict.values, self._dicts))
        yield from chain.from_iterable(set_aside_in_memory(module).values() for module in self._aside)

    def _look(self) -> tuple[list[int], list[int], bytes]:
        addresses = list(map(Tensor.data_ptr, self._parameters))
        return list(map(_edits, self._counted)), addresses, b"".join(map(np.ndarray.tobytes, self._samples))


def require_same_weights(recording: Recording) -> None:
    """A recording belongs to the weights it was made with: with others, nothing would add up."""
    if recording.stamp is not recording.model.stamp:
        raise InputError(
            f"The weights of {recording.model.name!r} were changed after this recording was made, so the two do not "
            "belong together. Record again: model.record(prompt)."
        )


def _sample(parameter: Tensor) -> np.ndarray:
    """Some of a parameter's numbers, spread over rows and columns alike, as a view."""
    held = parameter.detach()
    # NumPy knows no bfloat16: its bits will do.
    values = (held.view(torch.int16) if held.dtype == torch.bfloat16 else held).numpy()
    if not values.flags.c_contiguous:
        return values[tuple(slice(None, None, max(1, size // 6)) for size in values.shape)]
    row = values.shape[-1] if values.ndim > 1 else 1
    # Each step goes some rows down and a golden section of a row across, so that no column is always the one.
    step = values.size // SAMPLES // row * row + (round(GOLDEN * row) if row > 1 else 0)
    return values.reshape(-1)[:: max(1, step)][: 2 * SAMPLES]
