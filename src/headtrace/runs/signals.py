"""The signals of a circuit as vectors: for every query or key edge, what is written into the target's channels.

A signal is the minimal-norm residual vector that carries exactly those channel coefficients and none in the other
channels (`headtrace.causal.signals`): on the query side at the firing's destination, on the key side at its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from jaxtyping import Float
from torch import Tensor

from headtrace.causal.signals import signal_vectors
from headtrace.circuits import Circuit, Edge
from headtrace.runs.tables import signal_table
from headtrace.vocabulary import ATTENTION_SIDES

if TYPE_CHECKING:
    from headtrace.models import Model


def signals_of(model: Model, circuit: Circuit) -> Iterator[tuple[Edge, Float[Tensor, " d_model"]]]:
    """Each query and key edge of a circuit with its signal, from one forward pass of the prompt.

    >>> import headtrace
    >>> model = headtrace.load("builtin")
    >>> circuit = headtrace.Tracer(model).trace("When Mary and John went to", answer=" the")
    >>> edge, vector = next(signals_of(model, circuit))
    >>> edge.side in ("query", "key"), vector.shape[0] == model.d_model
    (True, True)
    """
    if not any(edge.side in ATTENTION_SIDES for edge in circuit.edges):
        return
    recording = model.record([list(circuit.prompt.token_ids)], last_logits=1)
    for edge, _, vector in signal_vectors(recording, circuit):
        yield edge, vector


def signals_table(model: Model, circuits: Sequence[tuple[str, Circuit]]) -> pa.Table:
    """The signals of circuits, one row each, by prompt, source, target and side."""
    found = [
        (name, edge, vector.float().cpu().numpy())
        for name, circuit in circuits
        for edge, vector in signals_of(model, circuit)
    ]
    return signal_table([(name, edge) for name, edge, _ in found], [vector for *_, vector in found])
