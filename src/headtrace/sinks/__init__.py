"""Sinks: tokens that take most attention everywhere, and the control signals that make heads attend there.

``cases.py`` takes prompts in, ``tokens.py`` says which tokens are sinks, ``mass.py`` how much attention they take,
``signals.py`` traces firings on them, ``directions.py`` compares their signals over prompts and heads, ``collapse.py``
removes what they have in common inside the running model. ``find.py`` does it all, ``result.py`` and ``files.py``
keep it.
"""

from headtrace.sinks.files import load_sinks
from headtrace.sinks.find import find_sinks
from headtrace.sinks.result import Settings, Sinks

__all__ = ["Settings", "Sinks", "find_sinks", "load_sinks"]
