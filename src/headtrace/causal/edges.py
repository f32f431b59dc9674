"""Edges of a circuit as interventions: ablate, boost, or any factor; local or global; claim or token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.causal.claims import SideClaim
from headtrace.causal.edits import GlobalEdit, Intervention, LocalEdit
from headtrace.causal.places import require_places
from headtrace.causal.signals import Reader, Scope, Signal, channel_mask
from headtrace.circuits import Circuit, Edge, Node
from headtrace.errors import InputError
from headtrace.tracing.unhashed import same_weights
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, Firing, head_name, parse_head

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

Reach = Literal["local", "global"]
ABLATE, BOOST = 0.0, 2.0


def open_circuit(circuit: Circuit, model: Model) -> Recording:
    """Record a circuit's prompt again, after making sure that the model is the one that was traced.

    Another model's circuit is refused: its numbers say nothing about this one, right or wrong.
    """
    require_own_model(circuit, model)
    require_places(circuit, model)
    return model.record(list(circuit.prompt.token_ids))


def require_own_model(circuit: Circuit, model: Model) -> None:
    """Raise ``InputError`` if a circuit was traced on other weights; one without a hash is taken on trust."""
    if same_weights(circuit.model, model) is False:
        raise InputError(
            f"The circuit was traced on {circuit.model.name!r} with weights {str(circuit.model.weights_sha256)[:12]}"
            f"..., but {model.name!r} has {model.weights_sha256[:12]}.... A circuit can only be tested on its own "
            "model."
        )


def find_edge(circuit: Circuit, source: str, target: str, side: str) -> Edge:
    """An edge by the names of its ends (a firing also as ``L9H6:14:3``); an error lists what there is."""
    source, target = node_name(source), node_name(target)
    wanted = circuit.node(target)
    for edge in circuit.edges_into(wanted):
        if edge.side == side and circuit.node(edge.source).name == source:
            return edge
    there = (
        ", ".join(f"{circuit.node(e.source).name} ({e.side})" for e in circuit.edges_into(wanted)[:8])
        or "none"
    )
    raise InputError(f"There is no {side} edge from {source!r} to {target!r}. Into {target!r} go: {there}.")


def edge_name(circuit: Circuit, edge: Edge) -> str:
    """An edge in a sentence: ``MLP 3 @5 => query of L9H6 14->3``."""
    return f"{circuit.node(edge.source).name} => {edge.side} of {circuit.node(edge.target).name}"


def node_name(text: str) -> str:
    """The name of a node as a user may write it: a firing also as ``L9H6:14:3``, a head in small letters."""
    for read in (lambda: str(Firing.parse(text)), lambda: head_name(*parse_head(text))):
        with suppress(InputError):
            return read()
    return text.strip()


def coefficients(
    recording: Recording, signal: Signal, scope: Scope
) -> tuple[Reader, Float[Tensor, "token channel"]]:
    """The signal's channel coefficients where the intervention acts, zero elsewhere."""
    reader = Reader(recording, signal.firing, signal.side)
    every = reader.coefficients(signal.component)
    mask = channel_mask(signal.channels, every.shape[-1], every)
    return reader, every * mask * reader.positions(scope)[:, None]


def signal_vectors(
    recording: Recording, circuit: Circuit
) -> Iterator[tuple[Edge, Signal, Float[Tensor, " d_model"]]]:
    """Each query and key edge with its signal as a residual vector where it is read.

    That is at the firing's destination for queries, and at its source for keys.
    """
    for edge in circuit.edges:
        if edge.side in ATTENTION_SIDES:
            signal = Signal.of(circuit, edge)
            reader, values = coefficients(recording, signal, "token")
            at = signal.firing.dest if signal.side == "query" else signal.firing.src
            yield edge, signal, reader.in_residual(values)[at]


def edit(
    recording: Recording,
    signal: Signal,
    factor: float = ABLATE,
    reach: Reach = "local",
    scope: Scope = "claim",
) -> LocalEdit | GlobalEdit:
    """Multiply a signal by ``factor`` (0 ablates it, 2 boosts it), for its reader only or for every reader."""
    reader, values = coefficients(recording, signal, scope)
    change = (factor - 1) * values
    if reach == "global":
        if signal.component.kind == "offset":
            raise InputError(
                f"The offset of {signal.firing} is the head's own bias: no component writes it, so a global "
                "intervention has nothing to change. Use a local one."
            )
        return GlobalEdit(signal.component, reader.in_residual(change))
    moved = reader.in_head(change)
    if signal.side == "query":
        return LocalEdit(signal.firing, query=moved[signal.firing.dest])
    return LocalEdit(signal.firing, keys=moved)


def claim(recording: Recording, circuit: Circuit, node: Node, side: AttentionSide) -> Intervention:
    """Remove every signal that the circuit claims for one side of a firing, from every visible key."""
    return SideClaim.of(recording, circuit, node, side).intervention


def residual_change(
    recording: Recording, signals: Signal | Sequence[Signal], factor: float = ABLATE
) -> tuple[float, float]:
    """Cosine and norm ratio of the residual that the head reads, before and after changing signals there.

    Several signals must be of one firing and side: they meet in one residual.
    """
    many = [signals] if isinstance(signals, Signal) else list(signals)
    signal = many[0]
    if any((s.firing, s.side) != (signal.firing, signal.side) for s in many):
        raise InputError("Only signals of one firing and side meet in one residual.")
    reader, values = coefficients(recording, signal, "token")
    for other in many[1:]:
        values = values + coefficients(recording, other, "token")[1]
    position = signal.firing.dest if signal.side == "query" else signal.firing.src
    before = recording.model.architecture.centred(recording.residuals[signal.firing.layer, 0, position])
    after = before + (factor - 1) * reader.in_residual(values)[position]
    cosine = torch.nn.functional.cosine_similarity(before, after, dim=0)
    return float(cosine), float(after.norm() / before.norm())
