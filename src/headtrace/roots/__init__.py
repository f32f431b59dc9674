"""Roots: what a circuit explains. Each case is one class in one file.

A root is made from a request (``LogitDifference(answer=(5,), wrong=(7,))``); tracing fills in what it found: the value,
and the position where it is read.

>>> LogitDifference(answer=(5,), wrong=(7,), answer_tokens=(" Mary",), wrong_tokens=(" John",)).question()
'" Mary" rather than " John"'
"""

from __future__ import annotations

from typing import get_args

from headtrace.roots.direction import Direction
from headtrace.roots.heads import Heads
from headtrace.roots.likelihood import Likelihood
from headtrace.roots.logit_difference import LogitDifference

Root = LogitDifference | Likelihood | Direction | Heads
"""What is explained: one of the four cases."""
ROOTS: dict[str, type[Root]] = {root.kind: root for root in get_args(Root)}
"""The four cases by the name that files and options use."""

__all__ = ["ROOTS", "Direction", "Heads", "Likelihood", "LogitDifference", "Root"]
