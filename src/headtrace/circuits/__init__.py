"""Circuits as data: what was found, in frozen dataclasses that know nothing of models or tensors.

``parts.py`` and ``circuit.py`` hold the dataclasses, ``reading.py`` turns JSON into them and names the field
that is wrong, ``files.py`` reads and writes circuit files, ``parquet.py`` keeps many circuits in one table,
``subgraphs.py`` cuts a circuit down, ``influence.py`` says what each edge carries, ``exports.py`` and
``neuronpedia.py`` speak to other tools.
"""

from headtrace.circuits.circuit import Circuit
from headtrace.circuits.files import load_circuit
from headtrace.circuits.parquet import read_parquet, write_parquet
from headtrace.circuits.parts import Edge, Elsewhere, Method, ModelInfo, Node, Prompt, Root

__all__ = [
    "Circuit",
    "Edge",
    "Elsewhere",
    "Method",
    "ModelInfo",
    "Node",
    "Prompt",
    "Root",
    "load_circuit",
    "read_parquet",
    "write_parquet",
]
