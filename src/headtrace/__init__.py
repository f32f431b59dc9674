"""headtrace: why does this attention head attend here?

    import headtrace

    model = headtrace.load("smollm2-135m")
    recording = model.record("When Mary and John went to the store, John gave a drink to")

Names are imported on first use, so ``import headtrace`` and ``headtrace --help`` do not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from headtrace import (
        causal,
        channels,
        circuits,
        errors,
        explorer,
        families,
        figures,
        interpret,
        mechanism,
        models,
        prompts,
        runs,
        sinks,
        tasks,
        toy,
        tracing,
    )
    from headtrace.causal import Importance, importance, sufficiency, verify
    from headtrace.circuits import Circuit, load_circuit
    from headtrace.families import compare_signals, find_families
    from headtrace.mechanism import Mechanism, load_mechanism, why
    from headtrace.models import Model, Recording, load
    from headtrace.runs import Network, Run, load_network, merge, open_run, run
    from headtrace.sinks import Sinks, find_sinks, load_sinks
    from headtrace.tracing import Tracer
    from headtrace.vocabulary import Component, Firing, Site

_HOME = {
    "Circuit": "circuits",
    "Component": "vocabulary",
    "Firing": "vocabulary",
    "Importance": "causal",
    "Mechanism": "mechanism",
    "Model": "models",
    "Network": "runs",
    "Recording": "models",
    "Run": "runs",
    "Sinks": "sinks",
    "Site": "vocabulary",
    "Tracer": "tracing",
    "compare_signals": "families",
    "find_families": "families",
    "find_sinks": "sinks",
    "importance": "causal",
    "load": "models",
    "load_circuit": "circuits",
    "load_mechanism": "mechanism",
    "load_network": "runs",
    "load_sinks": "sinks",
    "merge": "runs",
    "open_run": "runs",
    "run": "runs",
    "sufficiency": "causal",
    "verify": "causal",
    "why": "mechanism",
}
_ROOMS = (
    "causal",
    "channels",
    "circuits",
    "errors",
    "explorer",
    "families",
    "figures",
    "interpret",
    "mechanism",
    "models",
    "prompts",
    "runs",
    "sinks",
    "tasks",
    "toy",
    "tracing",
)

__all__ = [
    "Circuit",
    "Component",
    "Firing",
    "Importance",
    "Mechanism",
    "Model",
    "Network",
    "Recording",
    "Run",
    "Sinks",
    "Site",
    "Tracer",
    "__version__",
    "causal",
    "channels",
    "circuits",
    "compare_signals",
    "errors",
    "explorer",
    "families",
    "figures",
    "find_families",
    "find_sinks",
    "importance",
    "interpret",
    "load",
    "load_circuit",
    "load_mechanism",
    "load_network",
    "load_sinks",
    "mechanism",
    "merge",
    "models",
    "open_run",
    "prompts",
    "run",
    "runs",
    "sinks",
    "sufficiency",
    "tasks",
    "toy",
    "tracing",
    "verify",
    "why",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"headtrace.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'headtrace' has no attribute {name!r}")
    return getattr(import_module(f"headtrace.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
