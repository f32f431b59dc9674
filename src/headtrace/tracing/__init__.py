"""Tracing: from the root of a prompt to firings, from firings to their causes, layer by layer.

To read how a firing is explained: ``accpp.py`` (rank the candidates, remove them greedily), ``firing.py`` (candidates
and their contributions), ``components.py`` (what heads read of each component), with ``readings.py`` for the fast part.
``methods.py`` says what a method is and which there are; ``earlier_methods.py`` has the steps of two more. ``sweep.py``
follows firings down the layers, ``complete.py`` content and MLPs as well (``content.py``, ``signal_directions.py``).
``assemble.py`` makes the Circuit. ``difference.py`` compares two runs: what changed the root
(``root_difference.py``), swept back through exact secants (``secants.py``) to every component
(``component_flow.py``); ``difference_circuit.py`` draws the strongest, with what flows between them
(``edge_flows.py``). ``measured_replacements.py`` finds prompts to compare with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headtrace.lazy import lazy_names
from headtrace.tracing.causes import Cause, Causes, Explanation, SideCauses
from headtrace.tracing.methods import (
    ACC,
    METHODS,
    SVT,
    ACCpp,
    Method,
    Option,
    make_method,
    method_options,
    register_method,
)

if TYPE_CHECKING:
    from headtrace.tracing.component_flow import DifferenceFlow
    from headtrace.tracing.components import Firings
    from headtrace.tracing.content import Moved, moved
    from headtrace.tracing.difference import difference_flow
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

# These need torch, which is loaded on first use only.
__getattr__ = lazy_names(
    __name__,
    {
        "Budget": "sweep",
        "Composer": "readings",
        "DifferenceFlow": "component_flow",
        "Firings": "components",
        "Moved": "content",
        "Tracer": "tracer",
        "difference_flow": "difference",
        "moved": "content",
    },
)
