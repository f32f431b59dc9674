"""Circuits as data: what was found, in frozen dataclasses that know nothing of models or tensors.

``parts.py``, ``evidence.py``, ``roots.py`` and ``circuit.py`` state what a circuit is, field by field; ``checks.py``
says what must hold between them and ``messages.py`` how an error reads. ``files.py`` reads and writes circuit files,
``versions.py`` those of earlier versions, ``describe.py`` makes their documentation, ``content.py`` gives a circuit
its id, ``parquet.py`` keeps many circuits in one table, ``sources.py`` finds circuits wherever they are kept.
``influence.py`` says what each edge carries, ``subgraphs.py`` cuts a circuit down, ``summary.py`` puts it into words,
``exports.py`` and ``neuronpedia.py`` speak to other tools.
"""

from headtrace.circuits.circuit import Circuit
from headtrace.circuits.evidence import Evidence, Example
from headtrace.circuits.files import load_circuit
from headtrace.circuits.parquet import read_parquet, write_parquet
from headtrace.circuits.parts import Edge, Elsewhere, MethodInfo, ModelInfo, Neuron, Node, PromptInfo
from headtrace.circuits.sources import named_circuits, read_circuit, read_circuits
from headtrace.roots import Direction, Heads, Likelihood, LogitDifference, Root

__all__ = [
    "Circuit",
    "Direction",
    "Edge",
    "Elsewhere",
    "Evidence",
    "Example",
    "Heads",
    "Likelihood",
    "LogitDifference",
    "MethodInfo",
    "ModelInfo",
    "Neuron",
    "Node",
    "PromptInfo",
    "Root",
    "load_circuit",
    "named_circuits",
    "read_circuit",
    "read_circuits",
    "read_parquet",
    "write_parquet",
]
