"""Mechanisms: a circuit that a person can read. Steps made by rules, a ledger that closes, a measurement on each.

``asking.py`` goes from a prompt to its mechanism. ``folding.py`` folds MLPs into the flows between heads,
``backbone.py`` holds what it finds, ``rules.py`` is the table of names, ``steps.py`` gathers, orders and adds up,
``evidence.py`` puts steps to the test, ``mechanism.py`` shows and keeps them, ``drawing.py`` draws them. What a file
holds is read and shown without PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headtrace.mechanism.backbone import Backbone, Folded, fold_circuit
from headtrace.mechanism.mechanism import Mechanism, load_mechanism
from headtrace.mechanism.parts import (
    Arrow,
    Clause,
    LedgerLine,
    MechanismTest,
    Step,
    StepHead,
    StepMeasurement,
)
from headtrace.mechanism.rules import RULES, Facts, StepRule

if TYPE_CHECKING:
    from headtrace.mechanism.asking import tell, why
    from headtrace.mechanism.folding import fold_flows

__all__ = [
    "RULES",
    "Arrow",
    "Backbone",
    "Clause",
    "Facts",
    "Folded",
    "LedgerLine",
    "Mechanism",
    "MechanismTest",
    "Step",
    "StepHead",
    "StepMeasurement",
    "StepRule",
    "fold_circuit",
    "fold_flows",
    "load_mechanism",
    "tell",
    "why",
]


def __getattr__(name: str) -> Any:
    if name == "fold_flows":
        from headtrace.mechanism.folding import fold_flows

        return fold_flows
    if name in ("tell", "why"):
        from headtrace.mechanism import asking as module

        return getattr(module, name)
    raise AttributeError(f"module 'headtrace.mechanism' has no attribute {name!r}")
