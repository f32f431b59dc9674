"""Sinks: tokens that take most attention everywhere, and the control signals that make heads attend there.

``tokens.py`` says which tokens are sinks and how much attention goes where, ``sink_signals.py`` traces firings on
sinks and compares their signals over prompts and heads, ``collapse.py`` removes what they have in common inside the
running model. ``find.py`` does it all, ``result.py`` holds and saves the result.
"""

from headtrace.errors import renamed
from headtrace.sinks.find import find_sinks
from headtrace.sinks.result import Sinks, SinkSettings, load_sinks

__all__ = ["SinkSettings", "Sinks", "find_sinks", "load_sinks"]

__getattr__ = renamed(__name__, {"Settings": "SinkSettings"})
