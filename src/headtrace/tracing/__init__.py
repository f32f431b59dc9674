"""Tracing: from the root of a prompt to firings, from firings to their causes, layer by layer.

``questions.py`` reads what is asked, ``roots.py`` says where a trace begins, ``sweep.py`` goes down the layers with a
method (``methods.py``; ``accpp.py``, ``acc.py`` and ``svt.py`` are three), ``candidates.py`` and ``upstream.py`` are
the heart: the signals of a firing; ``moved.py`` says what one moved. ``assemble.py`` makes the Circuit, ``tracer.py``
is the door.
"""

from headtrace.tracing.acc import ACC
from headtrace.tracing.accpp import ACCpp
from headtrace.tracing.causes import Cause, Causes, SideCauses
from headtrace.tracing.explanation import Explanation
from headtrace.tracing.methods import METHODS, Method, make_method, register_method
from headtrace.tracing.moved import Moved, moved
from headtrace.tracing.svt import SVT
from headtrace.tracing.sweep import Budget
from headtrace.tracing.tracer import Tracer
from headtrace.tracing.upstream import Composer, Firings

__all__ = [
    "ACC",
    "METHODS",
    "SVT",
    "ACCpp",
    "Budget",
    "Cause",
    "Causes",
    "Composer",
    "Explanation",
    "Firings",
    "Method",
    "Moved",
    "SideCauses",
    "Tracer",
    "make_method",
    "moved",
    "register_method",
]
