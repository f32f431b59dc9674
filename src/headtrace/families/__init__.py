"""Families: which circuits are alike, who stands for them, which heads change their job.

``items.py`` makes circuits sets at three grains, ``population.py`` holds many of them, ``distances.py`` has Jaccard
distances and average linkage, ``trees.py`` cuts and silhouettes, ``choosing.py`` the number of families, with
``controls.py`` as its control. ``result.py`` is what is found: ``agreement.py`` with labels, ``exclusive.py`` edges,
``stability.py`` over bootstrap samples, ``file.py`` what is kept of it. ``ablation.py`` ablates exclusive edges, at the
places that ``places.py`` finds. ``signals.py`` compares what heads read, ``compare.py`` circuits item by item;
``models.py`` keeps different models apart, ``sources.py`` reads runs, tables and files.
"""

from headtrace.families.ablation import ExclusiveAblation
from headtrace.families.agreement import Agreement
from headtrace.families.compare import CircuitComparison, compare_circuits
from headtrace.families.file import FamiliesFile, load_families
from headtrace.families.population import Population
from headtrace.families.result import Families, find_families
from headtrace.families.signals import SignalComparison, compare_signals
from headtrace.families.stability import Stability

__all__ = [
    "Agreement",
    "CircuitComparison",
    "ExclusiveAblation",
    "Families",
    "FamiliesFile",
    "Population",
    "SignalComparison",
    "Stability",
    "compare_circuits",
    "compare_signals",
    "find_families",
    "load_families",
]
