"""Families: which circuits are alike, which prompts represent them, which heads change their role.

``population.py`` turns circuits into sets of items at three grains, ``clustering.py`` has distances, the
tree, the number of families and their stability, ``result.py`` the families themselves, their
agreement with labels and their exclusive edges, ``ablation.py`` the causal test of those edges. ``head_signals.py``
compares what heads read, ``compare.py`` circuits item by item, ``compare_runs.py`` runs and models, ``mechanisms.py``
the steps that prompts share; ``files.py`` reads and writes.
"""

from headtrace.families.ablation import ExclusiveAblation
from headtrace.families.clustering import Stability
from headtrace.families.compare import CircuitComparison, compare_circuits
from headtrace.families.compare_runs import RunComparison, compare_models, compare_runs
from headtrace.families.files import FamiliesFile, load_families
from headtrace.families.head_signals import SignalComparison, compare_signals
from headtrace.families.mechanisms import SharedSteps, shared_steps
from headtrace.families.population import Population
from headtrace.families.result import Agreement, Families, find_families

__all__ = [
    "Agreement",
    "CircuitComparison",
    "ExclusiveAblation",
    "Families",
    "FamiliesFile",
    "Population",
    "RunComparison",
    "SharedSteps",
    "SignalComparison",
    "Stability",
    "compare_circuits",
    "compare_models",
    "compare_runs",
    "compare_signals",
    "find_families",
    "load_families",
    "shared_steps",
]
