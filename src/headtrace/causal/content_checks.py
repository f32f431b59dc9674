"""What a content or complete circuit says beyond attention, compared with the model.

Contributions are those of tokens, nodes, edges into values and MLPs, and hidden units. Of a query or key signal that an
MLP wrote, the file claims that it falls to a share of itself (``left``) when some components (``through``) are removed
from the MLP's input: that is measured in the running model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headtrace.causal.changes import Intervention, MlpInputEdit
from headtrace.causal.checks import Checking, is_contrast
from headtrace.causal.execute import Changes
from headtrace.causal.opening import as_traced
from headtrace.causal.signals import edge_name
from headtrace.models.forward import forward
from headtrace.models.frozen import CONTENT_FIELDS, FrozenNorm
from headtrace.models.observer import Observer
from headtrace.models.weights import norm_eps, norm_scale
from headtrace.tracing.causes import Cause
from headtrace.tracing.content import Content, contributions_of_units, passing, strongest_units
from headtrace.tracing.signal_directions import signals_of
from headtrace.vocabulary import ATTENTION_SIDES, Site

if TYPE_CHECKING:
    from headtrace.circuits import Circuit, Edge, Node
    from headtrace.models import Recording


def check_content(check: Checking) -> None:
    """Contributions of tokens, nodes, edges and hidden units; what MLPs still write without the causes named."""
    circuit = check.circuit
    through_mlps = [edge for edge in circuit.edges if edge.left is not None and edge.through is not None]
    stated = (
        circuit.prompt.contributions is not None
        or any(part.contribution is not None for part in (*circuit.nodes, *circuit.edges))
        or any(node.neurons for node in circuit.nodes)
        or any(edge.side in ("value", "input") for edge in circuit.edges)
    )
    if not through_mlps and not stated:
        return
    recording = check.recording.model.record([list(circuit.prompt.token_ids)], keep=CONTENT_FIELDS)
    recording = as_traced(circuit, recording)
    if stated and check.root is not None:
        content = Content.of(recording, [check.root.parts])
        with torch.inference_mode(), recording.model.assume_weights_unchanged():
            found = [*_contributions(check, content), *_unit_contributions(check, content)]
        allowed = check.tolerance.number(max([check.root.size, *(abs(each.measured) for each in found)]))
        for field, where, in_file, measured in found:
            check.ledger.compare(field, where, in_file=in_file, measured=measured, allowed=allowed)
    for edge in through_mlps:
        with recording.model.assume_weights_unchanged():
            left = share_left(recording, circuit, edge)
        where = edge_name(circuit, edge)
        # The signal is one by definition; what is removed and what is left are of its size.
        allowed = check.tolerance.number(1.0 + abs(left))
        check.ledger.compare("left", where, in_file=edge.left, measured=left, allowed=allowed)


# -- contributions ---------------------------------------------------------------------------------------------


class _Contribution(NamedTuple):
    """One contribution in the file, and what it is in the model."""

    field: str
    where: str
    in_file: float
    measured: float


def _contributions(check: Checking, content: Content) -> Iterator[_Contribution]:
    """Contributions of tokens, of nodes and of edges of content, as far as the file has them."""
    circuit, ledger = check.circuit, check.ledger
    for token, in_file in enumerate(circuit.prompt.contributions or ()):
        measured = content.contribution(0, Site("embedding", dest=token))
        yield _Contribution("prompt.contributions", f"token {token}", in_file, measured)

    def writes(node: Node) -> bool:
        """Whether a node stands for something that writes by itself, or is the root."""
        if node.kind in ("offset", "rounding"):
            what = "contributions of offsets and roundings, which are biases of their readers"
            ledger.skip(what, unless_traced=True)
        return node.kind not in ("offset", "rounding")

    for node in circuit.nodes:
        if node.contribution is not None and writes(node):
            yield _Contribution(
                "contribution", node.name, node.contribution, content.contribution(0, node.site)
            )

    # In a circuit of content alone, what passes through an edge is its weight, too.
    content_only = (circuit.method.settings or {}).get("paths") == "content"
    if not content_only and any(edge.side in ("value", "input") for edge in circuit.edges):
        what = "weights of edges into values and MLPs that may carry signals: contributions are"
        ledger.skip(what, unless_traced=True)
    for edge in circuit.edges:
        source, target = circuit.node(edge.source), circuit.node(edge.target)
        if edge.side in ATTENTION_SIDES or not writes(source):
            continue
        (measured,) = passing(content, 0, [source.site], target.site)
        where = edge_name(circuit, edge)
        if edge.contribution is not None:
            yield _Contribution("contribution", where, edge.contribution, measured)
        # The root's own are compared with its other seeds, and contrasts with nothing.
        if content_only and edge.side != "root" and not is_contrast(circuit):
            yield _Contribution("weight", where, edge.weight, measured)


def _unit_contributions(check: Checking, content: Content) -> Iterator[_Contribution]:
    """Each hidden unit contributes what the file says, and none that is not listed contributes more."""
    ledger = check.ledger
    for node in (node for node in check.circuit.nodes if node.neurons):
        neurons = node.neurons or ()
        units = contributions_of_units(content, 0, [node.site])[node.site]
        best = strongest_units(units, len(neurons))
        ledger.require("neurons", node.name, in_file=len(neurons), measured=len(best))
        for neuron, strong in zip(neurons, best, strict=False):
            where = f"unit {neuron.unit} of {node.name}"
            if neuron.unit >= len(units):
                ledger.require("neurons", where, in_file=neuron.unit, measured=None)
                continue
            yield _Contribution("neurons", where, neuron.contribution, float(units[neuron.unit]))
            strength = abs(neuron.contribution), abs(strong.contribution)
            yield _Contribution("neurons", f"strength of {where}", *strength)


# -- signals through MLPs --------------------------------------------------------------------------------------


@torch.inference_mode()
def share_left(recording: Recording, circuit: Circuit, edge: Edge) -> float:
    """The share of an edge's signal that the running model's MLP still writes without the causes the file names."""
    mlp, target = circuit.node(edge.source).site, circuit.node(edge.target).site
    assert edge.side in ATTENTION_SIDES
    cause = Cause(mlp, edge.weight, edge.channels)
    (signal,) = signals_of(recording, [(0, target)], [[cause]], edge.side)[0]
    if signal is None or not edge.through:
        return 1.0
    layer, position = mlp.layer or 0, mlp.dest or 0
    removed = recording.writes([circuit.node(i).site for i in edge.through]).sum(dim=0)
    rows = (torch.tensor([0]), torch.tensor([position]))
    model = recording.model
    norm = FrozenNorm.of(model, layer, model.architecture.mlp_norm, recording.mlp_norm_scales, rows)
    removal = MlpInputEdit(layer, position, -norm.forward(removed[None])[0])
    changes = Changes(model, recording.lengths[0], [Intervention((removal,))])
    seen = _MlpWrite(layer, position)
    forward(
        model,
        recording.token_ids,
        changes,
        seen,
        layers=range(layer, layer + 1),
        residual=recording.residuals[layer],
    )
    written = seen.written
    if seen.scale is not None and recording.mlp_post_norm_scales is not None:
        # The norm behind the MLP is frozen in the claim, and live here.
        written = written * seen.scale / recording.mlp_post_norm_scales[layer, 0, position]
    return float(written @ signal.direction)


class _MlpWrite(Observer):
    """What one MLP writes at one token, and the scale of the norm behind it."""

    written: Tensor
    scale: Tensor | None = None

    def __init__(self, layer: int, position: int) -> None:
        self.layer, self.position = layer, position

    def norm_input(self, place: str, layer: int, x: Tensor, norm: torch.nn.Module) -> None:
        if place == "mlp_post_norm" and layer == self.layer:
            self.scale = norm_scale(x[0, self.position], norm_eps(norm), "rms")

    def mlp_write(self, layer: int, write: Tensor) -> None:
        if layer == self.layer:
            self.written = write[0, self.position].clone()
