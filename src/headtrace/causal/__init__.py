"""Causal: changes of the running model, and the verification of circuits.

``changes.py`` has the language of changes, ``execute.py`` runs the model under them, ``signals.py`` says what a signal
is, ``effects.py`` ablates and boosts edges, ``experiments.py`` has the papers' experiments on them.

``patching.py`` patches and ranks head components: ``faithfulness.py`` and ``sufficiency.py`` keep only the circuit.

``importance.py`` measures what matters in a prompt.

``verify.py`` puts every claim of a circuit to the test: ``checks.py`` and ``content_checks.py`` compare its numbers
with the model's, ``difference_checks.py`` those of difference circuits, whose components are patched to the other run,
``claims.py`` computes what is claimed about a firing, ``report.py`` has the result.
"""

from headtrace.causal.changes import (
    Change,
    ComponentChange,
    DirectionRemoval,
    FixedValues,
    GlobalEdit,
    Intervention,
    LocalEdit,
    OtherRun,
    Patch,
    SignalChange,
    edit,
)
from headtrace.causal.claims import claim
from headtrace.causal.difference_checks import PatchedNode, PatchedSet, PatchTest, patch_sets
from headtrace.causal.effects import EdgeEffect, Intervened, intervene
from headtrace.causal.execute import Outcome, continued, rerun, run
from headtrace.causal.importance import Importance, WordImportance, importance
from headtrace.causal.metric import Metric, metric_of
from headtrace.causal.opening import Tolerance, open_circuit
from headtrace.causal.report import Difference, Enough, Mismatch, PredictionCheck, Report, Verdict, overall
from headtrace.causal.signals import Signal, find_edge, residual_change
from headtrace.causal.sufficiency import Curve, Necessity, Sufficiency, sufficiency
from headtrace.causal.verify import verify
from headtrace.errors import renamed

__all__ = [
    "Change",
    "ComponentChange",
    "Curve",
    "Difference",
    "DirectionRemoval",
    "EdgeEffect",
    "Enough",
    "FixedValues",
    "GlobalEdit",
    "Importance",
    "Intervened",
    "Intervention",
    "LocalEdit",
    "Metric",
    "Mismatch",
    "Necessity",
    "OtherRun",
    "Outcome",
    "Patch",
    "PatchTest",
    "PatchedNode",
    "PatchedSet",
    "PredictionCheck",
    "Report",
    "Signal",
    "SignalChange",
    "Sufficiency",
    "Tolerance",
    "Verdict",
    "WordImportance",
    "claim",
    "continued",
    "edit",
    "find_edge",
    "importance",
    "intervene",
    "metric_of",
    "open_circuit",
    "overall",
    "patch_sets",
    "rerun",
    "residual_change",
    "run",
    "sufficiency",
    "verify",
]

__getattr__ = renamed(__name__, {"Failure": "Mismatch"})
