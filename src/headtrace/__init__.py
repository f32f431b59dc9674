"""headtrace: why does this attention head attend here?

    import headtrace

    model = headtrace.load("smollm2-135m")
    recording = model.record("When Mary and John went to the store, John gave a drink to")

Names are imported on first use, so ``import headtrace`` and ``headtrace --help`` do not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from headtrace import (
        causal,
        channels,
        circuits,
        errors,
        explorer,
        figures,
        models,
        prompts,
        sinks,
        tasks,
        toy,
        tracing,
    )
    from headtrace.causal import sufficiency, verify
    from headtrace.circuits import Circuit, load_circuit
    from headtrace.models import Model, Recording, load
    from headtrace.sinks import Sinks, find_sinks, load_sinks
    from headtrace.tracing import Tracer
    from headtrace.vocabulary import Component, Firing, Site

_HOME = {
    "Circuit": "circuits",
    "Component": "vocabulary",
    "Firing": "vocabulary",
    "Model": "models",
    "Recording": "models",
    "Sinks": "sinks",
    "Site": "vocabulary",
    "Tracer": "tracing",
    "find_sinks": "sinks",
    "load": "models",
    "load_circuit": "circuits",
    "load_sinks": "sinks",
    "sufficiency": "causal",
    "verify": "causal",
}
_ROOMS = (
    "causal",
    "channels",
    "circuits",
    "errors",
    "explorer",
    "figures",
    "models",
    "prompts",
    "sinks",
    "tasks",
    "toy",
    "tracing",
)

__all__ = [
    "Circuit",
    "Component",
    "Firing",
    "Model",
    "Recording",
    "Sinks",
    "Site",
    "Tracer",
    "__version__",
    "causal",
    "channels",
    "circuits",
    "errors",
    "explorer",
    "figures",
    "find_sinks",
    "load",
    "load_circuit",
    "load_sinks",
    "models",
    "prompts",
    "sinks",
    "sufficiency",
    "tasks",
    "toy",
    "tracing",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"headtrace.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'headtrace' has no attribute {name!r}")
    return getattr(import_module(f"headtrace.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
