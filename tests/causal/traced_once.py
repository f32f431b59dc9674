"""Verifying a thousand versions of one circuit traces its prompt once.

``verify`` traces the prompt of a file again. Where a test changes one number of the file after another, request and
model stay the same, and so does what tracing gives: it is kept. A change that reaches the request is traced anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

from headtrace.causal import retrace
from headtrace.tracing import Tracer


@pytest.fixture(autouse=True, scope="module")
def traced_once() -> Iterator[None]:
    """What tracing gives, by everything that is asked; what cannot be written down is traced each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tracer, "trace_resolved", _kept(Tracer.trace_resolved, _asked_of_a_tracer))
        patch.setattr(
            retrace, "trace_pairs", _kept(retrace.trace_pairs, lambda model, *asked: (model, asked))
        )
        yield


def _asked_of_a_tracer(tracer: Tracer, *asked: Any) -> tuple[Any, Any]:
    own = {name: value for name, value in vars(tracer).items() if name not in ("model", "composer")}
    return tracer.model, (own, asked)


def _kept(traced: Callable[..., Any], asked: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    known: dict[Hashable, Any] = {}

    def once(*given: Any) -> Any:
        model, request = asked(*given)
        key = (id(model), _written(request))
        try:
            if key not in known:
                known[key] = (model, traced(*given))  # a model that is kept shares its id with no other
        except TypeError as error:
            if "unhashable" not in str(error):
                raise
            return traced(*given)
        return known[key][1]

    return once


def _written(value: Any) -> Hashable:
    """A request as what can be compared to the last bit; other objects are equal to themselves alone."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, str(value.dtype), tuple(value.shape), value.cpu().contiguous().numpy().tobytes()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_written(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, Mapping):
        return type(value), tuple((_written(name), _written(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_written, value))
    return (float, repr(value)) if isinstance(value, float) else (type(value), value)
