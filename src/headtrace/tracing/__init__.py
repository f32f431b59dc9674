"""Tracing: from the root of a prompt to firings, from firings to their causes, layer by layer.

To read how a firing is explained: ``accpp.py`` (rank the candidates, remove them greedily), ``firing.py`` (candidates
and their contributions), ``components.py`` (what heads read of each component), with ``readings.py`` for the fast part.
``methods.py`` says what a method is; ``earlier_methods.py`` has two more. ``sweep.py`` follows firings down the layers,
``complete.py`` content and MLPs as well (``content.py``, ``signals.py``). ``assemble.py`` makes the Circuit.
``difference.py`` compares two runs: what changed the root, through exact secants (``secants.py``).
"""

from headtrace.tracing.accpp import ACCpp
from headtrace.tracing.causes import Cause, Causes, Explanation, SideCauses
from headtrace.tracing.components import Firings
from headtrace.tracing.content import Moved, moved
from headtrace.tracing.difference import DifferenceFlow, difference_flow
from headtrace.tracing.earlier_methods import ACC, SVT
from headtrace.tracing.methods import METHODS, Method, Option, make_method, method_options, register_method
from headtrace.tracing.readings import Composer
from headtrace.tracing.sweep import Budget
from headtrace.tracing.tracer import Tracer

__all__ = [
    "ACC",
    "METHODS",
    "SVT",
    "ACCpp",
    "Budget",
    "Cause",
    "Causes",
    "Composer",
    "DifferenceFlow",
    "Explanation",
    "Firings",
    "Method",
    "Moved",
    "Option",
    "SideCauses",
    "Tracer",
    "difference_flow",
    "make_method",
    "method_options",
    "moved",
    "register_method",
]
