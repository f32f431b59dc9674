"""Running only some layers of the model, from a recorded residual: what is unchanged need not run again.

The model's own forward pass runs; layers outside the range hand their input on, and the first layer inside starts from
the residual that is given.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from headtrace.models.model import Model


def _hand_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


@contextmanager
def only_layers(
    model: Model, start: int, stop: int, residual: Float[Tensor, "batch token d_model"]
) -> Generator[None]:
    """Inside this block the model runs layers ``start`` to ``stop - 1``, beginning with ``residual``."""
    layers = list(model.hf.get_submodule(model.architecture.layers).children())

    def begin(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (residual, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": residual}

    skipped = [layer for i, layer in enumerate(layers) if not start <= i < stop]
    for layer in skipped:
        layer.forward = _hand_on
    handle = layers[start].register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()
        for layer in skipped:
            del layer.forward
