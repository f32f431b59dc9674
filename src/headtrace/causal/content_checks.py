"""What a content or complete circuit says beyond attention, compared with the model: contributions, and passages.

A passage is the claim that a query or key signal, which an MLP wrote, falls to a share of itself when some components
are removed from the MLP's input. It is measured in the running model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headtrace.causal.checks import Checking
from headtrace.causal.edges import edge_name
from headtrace.errors import InputError, shown
from headtrace.models import door
from headtrace.models.frozen import NEEDED, FrozenNorm
from headtrace.models.observer import Observer
from headtrace.tracing.causes import Cause
from headtrace.tracing.content import Content
from headtrace.tracing.signals import signals_of, writes_at
from headtrace.vocabulary import ATTENTION_SIDES, CONTENT_SIDES

if TYPE_CHECKING:
    from headtrace.circuits import Circuit, Edge
    from headtrace.models import Recording


def paths_of(circuit: Circuit) -> str:
    """Which paths were followed: attention, unless the file says otherwise."""
    return str((circuit.method.settings or {}).get("paths", "attention"))


def check_content(check: Checking) -> None:
    """Contributions of nodes and edges, weights of edges of content, and passages through MLPs."""
    circuit = check.circuit
    passing = [edge for edge in circuit.edges if edge.left is not None and edge.through is not None]
    moved = [
        edge for edge in circuit.edges if edge.side in ("value", "input") or edge.contribution is not None
    ]
    stated = [node for node in circuit.nodes if node.contribution is not None]
    if not passing and not stated and not moved:
        return
    recording = check.recording.model.record([list(circuit.prompt.token_ids)], keep=NEEDED)
    if check.root is not None and check.root.parts:
        content = Content.of(recording, [check.root.parts])
        _check_nodes(check, content, check.root.size)
        _check_edges(check, content, check.root.size)
    elif moved:
        check.ledger.skip(
            "weights of edges into values and MLPs: the root has no number that content is a part of"
        )
    for edge, left in zip(passing, measured_passages(recording, circuit, passing), strict=True):
        # The signal is one by definition; what is removed and what is left are of its size.
        size = 1.0 + abs(left)
        check.ledger.compare(
            "left",
            edge_name(circuit, edge),
            in_file=edge.left,
            measured=left,
            allowed=check.tolerance.number(size),
        )


def _check_nodes(check: Checking, content: Content, size: float) -> None:
    stated = [node for node in check.circuit.nodes if node.contribution is not None]
    found = [content.contribution(0, node.site) for node in stated]
    allowed = check.tolerance.number(max(size, *(abs(each) for each in found), 0.0))
    for node, value in zip(stated, found, strict=True):
        check.ledger.compare(
            "contribution", node.name, in_file=node.contribution, measured=value, allowed=allowed
        )


def _check_edges(check: Checking, content: Content, size: float) -> None:
    """What passes through each edge of content; in a circuit of content alone that is its weight, too."""
    circuit, settings = check.circuit, check.circuit.method.settings or {}
    try:
        against = _counterfactual(check, settings.get("counterfactual"))
    except InputError as error:
        check.ledger.require("counterfactual", "method.settings", in_file=str(error), measured="a prompt")
        return
    if paths_of(circuit) == "complete":
        check.ledger.skip(
            "weights of edges into values and MLPs that carry signals as well as content: their contributions are"
        )
    for edge, value, there in _carried(circuit, content, against):
        allowed = check.tolerance.number(max(size, abs(value), abs(there)))
        where = edge_name(circuit, edge)
        if edge.contribution is not None:
            check.ledger.compare(
                "contribution", where, in_file=edge.contribution, measured=value, allowed=allowed
            )
        if paths_of(circuit) == "content" or (edge.side == "root" and against is not None):
            check.ledger.compare(
                "weight", where, in_file=edge.weight, measured=value - there, allowed=allowed
            )


def _carried(
    circuit: Circuit, content: Content, against: Recording | None
) -> Iterator[tuple[Edge, float, float]]:
    """Edges of content with what they carry, and what they would carry with the counterfactual's writes."""
    for target in circuit.nodes:
        edges = [
            edge
            for edge in circuit.edges_into(target)
            if edge.side in CONTENT_SIDES and circuit.node(edge.source).kind not in ("offset", "root")
        ]
        sources = [circuit.node(edge.source).site for edge in edges]
        here = content.carried(0, sources, target.site)
        there = [0.0] * len(edges) if against is None else content.carried(0, sources, target.site, against)
        yield from zip(edges, here, there, strict=True)


def _counterfactual(check: Checking, written: object) -> Recording | None:
    """The counterfactual prompt that the file names by its token ids, recorded."""
    if written is None:
        return None
    words, expected = str(written).split(), len(check.circuit.prompt.token_ids)
    if len(words) != expected or not all(word.isascii() and word.isdigit() for word in words):
        raise InputError(f"{shown(written, 60)}: expected {expected} token ids")
    return check.recording.model.record([[int(word) for word in words]], keep=NEEDED)


@torch.inference_mode()
def measured_passages(recording: Recording, circuit: Circuit, edges: Sequence[Edge]) -> list[float]:
    """The share of each signal that the running model's MLP still writes without what the file says holds it up."""
    return [_measured(recording, circuit, edge) for edge in edges]


def _measured(recording: Recording, circuit: Circuit, edge: Edge) -> float:
    mlp, target = circuit.node(edge.source).site, circuit.node(edge.target).site
    assert edge.side in ATTENTION_SIDES
    cause = Cause(mlp, edge.weight, edge.channels)
    (signal,) = signals_of(recording, [(0, target)], [[cause]], edge.side)[0]
    if signal is None or not edge.through:
        return 1.0
    layer, position = mlp.layer or 0, mlp.dest or 0
    removed = writes_at(recording, 0, [circuit.node(i).site for i in edge.through]).sum(dim=0)
    rows = (torch.tensor([0]), torch.tensor([position]))
    model = recording.model
    norm = FrozenNorm.of(model, layer, model.architecture.mlp_norm, recording.mlp_norm_scales, rows)
    watch = _Without(layer, position, norm.forward(removed[None])[0])
    door.run(
        model, recording.token_ids, watch, layers=range(layer, layer + 1), residual=recording.residuals[layer]
    )
    written = watch.written
    if (
        recording.mlp_post_norm_scales is not None
    ):  # the norm behind the MLP is frozen in the claim, and live here
        written = written * watch.scale / recording.mlp_post_norm_scales[layer, 0, position]
    return float(written @ signal.direction)


class _Without(Observer):
    """Takes a part of what one MLP reads at one token away, and keeps what it then writes there."""

    def __init__(self, layer: int, position: int, removed: Tensor) -> None:
        self.layer, self.position, self.removed = layer, position, removed
        self.written, self.scale = removed, removed.new_ones(())

    def mlp_input(self, layer: int, read: Tensor) -> Tensor | None:
        if layer != self.layer:
            return None
        changed = read.clone()
        changed[:, self.position] -= self.removed
        return changed

    def norm_input(self, place: str, layer: int, x: Tensor, norm: torch.nn.Module) -> None:
        if place == "mlp_post_norm" and layer == self.layer:
            from headtrace.models.norms import norm_eps, norm_scale

            self.scale = norm_scale(x[0, self.position], norm_eps(norm), "rms")

    def mlp_write(self, layer: int, write: Tensor) -> None:
        if layer == self.layer:
            self.written = write[0, self.position].clone()
