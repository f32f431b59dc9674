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
    from headtrace.causal import verify
    from headtrace.circuits import Circuit, load_circuit
    from headtrace.models import Model, Recording, load
    from headtrace.tracing import Tracer

_HOME = {
    "Component": "headtrace.vocabulary",
    "Firing": "headtrace.vocabulary",
    "Site": "headtrace.vocabulary",
    "Circuit": "headtrace.circuits",
    "load_circuit": "headtrace.circuits",
    "load": "headtrace.models",
    "Tracer": "headtrace.tracing",
    "verify": "headtrace.causal",
    "Model": "headtrace.models",
    "Recording": "headtrace.models",
}

__all__ = ["Circuit", "Model", "Recording", "Tracer", "__version__", "load", "load_circuit", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headtrace' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
