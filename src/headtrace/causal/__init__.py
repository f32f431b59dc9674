"""Causal: interventions in the running model, and the verification of circuits.

``signals.py`` says what a signal is, ``edges.py`` turns edges into interventions, ``intervention.py`` runs many at
once, ``intervene.py`` shows one, ``verify.py`` puts a circuit to the test, ``experiments.py`` and ``sets.py`` hold the
papers' experiments, ``faithfulness.py`` keeps only the circuit.
"""

from headtrace.causal.edges import Signal, claim, edit, find_edge, open_circuit, residual_change
from headtrace.causal.intervene import Intervened, intervene
from headtrace.causal.intervention import GlobalEdit, Intervention, LocalEdit, Outcome, run
from headtrace.causal.report import EdgeEffect, PredictionCheck, Report
from headtrace.causal.verify import verify

__all__ = [
    "EdgeEffect",
    "GlobalEdit",
    "Intervened",
    "Intervention",
    "LocalEdit",
    "Outcome",
    "PredictionCheck",
    "Report",
    "Signal",
    "claim",
    "edit",
    "find_edge",
    "intervene",
    "open_circuit",
    "residual_change",
    "run",
    "verify",
]
