"""Circuits as data: what was found, in frozen dataclasses that know nothing of models or tensors.

``parts.py`` and ``circuit.py`` state what a circuit is, field by field, and ``checks.py`` what must hold
between the parts. ``graph.py`` computes influence and cuts out subgraphs, ``summary.py`` describes a circuit in words.
``files.py`` reads and writes circuit files and finds circuits wherever they are kept, ``describe.py`` makes their
documentation, ``rows.py`` keeps many circuits in one table, ``exports.py`` and ``imports.py`` are for
other tools.
"""

from headtrace.circuits.circuit import Circuit
from headtrace.circuits.files import load_circuit, named_circuits, read_circuit, read_circuits
from headtrace.circuits.imports import imported
from headtrace.circuits.parts import (
    ComparedPrompt,
    CompetingKeySignal,
    DifferenceInfo,
    Edge,
    Evidence,
    EvidenceExample,
    MethodInfo,
    ModelInfo,
    Neuron,
    Node,
    PromptInfo,
)
from headtrace.circuits.rows import read_parquet, write_parquet
from headtrace.errors import renamed
from headtrace.roots import Direction, Heads, Likelihood, LogitDifference, Root

__all__ = [
    "Circuit",
    "ComparedPrompt",
    "CompetingKeySignal",
    "DifferenceInfo",
    "Direction",
    "Edge",
    "Evidence",
    "EvidenceExample",
    "Heads",
    "Likelihood",
    "LogitDifference",
    "MethodInfo",
    "ModelInfo",
    "Neuron",
    "Node",
    "PromptInfo",
    "Root",
    "imported",
    "load_circuit",
    "named_circuits",
    "read_circuit",
    "read_circuits",
    "read_parquet",
    "write_parquet",
]

__getattr__ = renamed(__name__, {"Example": "EvidenceExample", "Elsewhere": "CompetingKeySignal"})
