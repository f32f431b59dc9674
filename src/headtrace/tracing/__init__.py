"""Tracing: from the root of a prompt to firings, from firings to their causes, layer by layer.

``candidates.py`` and ``firing.py`` are the heart: the signals of one firing. ``roots.py`` says where a trace begins,
``sweep.py`` goes down the layers, ``assemble.py`` makes the Circuit, ``tracer.py`` is the door.
"""

from headtrace.tracing.explanation import Explanation
from headtrace.tracing.firing import Cause, FiringCauses, SideCauses, trace_firings
from headtrace.tracing.roots import RootSeeds, Seed
from headtrace.tracing.sweep import Budget
from headtrace.tracing.tracer import Tracer
from headtrace.tracing.upstream import Composer, LayerFirings

__all__ = [
    "Budget",
    "Cause",
    "Composer",
    "Explanation",
    "FiringCauses",
    "LayerFirings",
    "RootSeeds",
    "Seed",
    "SideCauses",
    "Tracer",
    "trace_firings",
]
