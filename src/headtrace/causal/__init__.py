"""Causal: interventions in the running model, and the verification of circuits.

``signals.py`` says what a signal is, ``edges.py`` turns edges into interventions, ``edits.py`` runs many at once,
``metric.py`` reads the number that a root explains, ``intervene.py`` shows one intervention,
``changes.py`` runs and continues a prompt with many changes at once, ``measuring.py`` ablates
and boosts edges, ``experiments.py`` and ``sets.py`` hold the papers' experiments, ``faithfulness.py`` keeps only the
circuit and ablates the rest.

``sufficiency.py`` keeps only the circuit and gives the rest what it had in a counterfactual run: ``components.py``
patches the run, ``rankings.py`` has the baselines, ``controls.py`` other components to take away, ``curves.py`` areas.

``verify.py`` puts a circuit to the test: ``roles.py`` asks whether the model has what the file names, ``tolerance.py``
how exactly numbers must agree, ``checks.py``, ``graph_checks.py``, ``content_checks.py`` and ``effect_checks.py``
compare them, ``claims.py`` and ``weights.py`` compute what is claimed about a firing, ``ledger.py`` keeps the account,
``report.py`` gives it.
"""

from headtrace.causal.changes import Change, ComponentChange, SignalChange, continued, rerun
from headtrace.causal.edges import claim, edit, find_edge, open_circuit, residual_change
from headtrace.causal.edits import GlobalEdit, Intervention, LocalEdit, Outcome, run
from headtrace.causal.intervene import Intervened, intervene
from headtrace.causal.ledger import Failure, Verdict, overall
from headtrace.causal.metric import Metric, metric_of
from headtrace.causal.report import EdgeEffect, PredictionCheck, Report
from headtrace.causal.signals import Signal
from headtrace.causal.sufficiency import sufficiency
from headtrace.causal.sufficiency_result import Curve, Necessity, Sufficiency
from headtrace.causal.tolerance import Tolerance
from headtrace.causal.verify import verify

__all__ = [
    "Change",
    "ComponentChange",
    "Curve",
    "EdgeEffect",
    "Failure",
    "GlobalEdit",
    "Intervened",
    "Intervention",
    "LocalEdit",
    "Metric",
    "Necessity",
    "Outcome",
    "PredictionCheck",
    "Report",
    "Signal",
    "SignalChange",
    "Sufficiency",
    "Tolerance",
    "Verdict",
    "claim",
    "continued",
    "edit",
    "find_edge",
    "intervene",
    "metric_of",
    "open_circuit",
    "overall",
    "rerun",
    "residual_change",
    "run",
    "sufficiency",
    "verify",
]
