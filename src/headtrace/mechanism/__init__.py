"""Mechanisms: a circuit that a person can read. Steps made by rules, a ledger that closes, a measurement on each.

``why.py`` goes from a prompt to its mechanism. ``backbone.py`` folds MLPs into the flows between heads, ``rules.py`` is
the table of names, ``steps.py`` gathers, orders and adds up, ``evidence.py`` puts steps to the test, ``mechanism.py``
shows and keeps them.
"""

from headtrace.mechanism.backbone import Backbone, Folded, fold_circuit, fold_flows
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
from headtrace.mechanism.rules import RULES, Facts, Rule
from headtrace.mechanism.why import tell, why

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
    "Rule",
    "Step",
    "StepHead",
    "StepMeasurement",
    "fold_circuit",
    "fold_flows",
    "load_mechanism",
    "tell",
    "why",
]
