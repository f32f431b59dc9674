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
        interpret,
        models,
        prompts,
        tasks,
        toy,
        tracing,
    )
    from headtrace.causal import sufficiency, verify
    from headtrace.circuits import Circuit, load_circuit
    from headtrace.models import Model, Recording, load
    from headtrace.tracing import Tracer
    from headtrace.vocabulary import Component, Firing, Site

_HOME = {
    "Circuit": "circuits",
    "Component": "vocabulary",
    "Firing": "vocabulary",
    "Model": "models",
    "Recording": "models",
    "Site": "vocabulary",
    "Tracer": "tracing",
    "load": "models",
    "load_circuit": "circuits",
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
    "interpret",
    "models",
    "prompts",
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
    "Site",
    "Tracer",
    "__version__",
    "causal",
    "channels",
    "circuits",
    "errors",
    "explorer",
    "figures",
    "interpret",
    "load",
    "load_circuit",
    "models",
    "prompts",
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
