"""From what a sweep found to a Circuit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from headtrace.channels.sparsity import equal_channels, groups_or_none
from headtrace.circuits import Circuit, CompetingKeySignal, Edge, MethodInfo, ModelInfo, Node, PromptInfo
from headtrace.tracing.causes import Cause
from headtrace.tracing.sweep import PromptTrace
from headtrace.vocabulary import ATTENTION_SIDES, KINDS, ROOT, Side, Site

if TYPE_CHECKING:
    from headtrace.models import Model

RESTS_ON_ROUNDING = 0.02
"""A firing whose attention would change by more than this without rounding is marked."""


def model_info(model: Model) -> ModelInfo:
    """What a circuit says of its model. The hash of the weights is computed once, and kept by the model."""
    return ModelInfo(
        name=model.name,
        revision=model.revision,
        architecture=model.architecture.model_type,
        weights_sha256=model.weights_sha256,
        computation_sha256=model.computation_sha256,
    )


def assemble(model: ModelInfo, prompt: PromptInfo, trace: PromptTrace, method: MethodInfo) -> Circuit:
    """The circuit of one prompt. Nodes are numbered from the root down, so equal traces give equal files."""
    found: list[tuple[Cause, Site, Side]] = [
        (cause, target, side)
        for target, causes in trace.causes.items()
        for side, part in causes.sides.items()
        for cause in part.in_graph
    ]
    sites = {ROOT} | {cause.site for cause, *_ in found} | {target for _, target, _ in found}
    numbers = {site: i for i, site in enumerate(sorted(sites, key=site_order))}
    edges: list[Edge] = []
    for cause, target, side in found:
        through = trace.mlp_signals.get((cause.site, target, side)) if trace.mlp_signals else None
        edges.append(
            Edge(
                source=numbers[cause.site],
                target=numbers[target],
                side=side,
                weight=cause.weight,
                channels=cause.channels,
                alone=cause.alone or None,
                contribution=None if side in ATTENTION_SIDES else trace.shares.get((cause.site, target)),
                through=None if through is None else tuple(numbers[c.site] for c in through.causes),
                left=None if through is None else through.left,
            )
        )
    reason = trace.seeds.reason
    return Circuit(
        model=model,
        prompt=replace(prompt, contributions=trace.tokens),
        root=trace.seeds.root,
        method=method,
        nodes=tuple(_node(site, number, trace) for site, number in numbers.items()),
        edges=tuple(edges),
        reason=reason,
        influence_kept=None if reason else trace.influence_kept,
    )


def with_equal_channels(circuit: Circuit, model: Model) -> Circuit:
    """The same circuit, whose heads say which of their channels have equal singular values, where some have."""
    heads = [node for node in circuit.nodes if node.kind == "head"]
    if not heads:
        return circuit
    layer, head = torch.tensor([(n.layer, n.head) for n in heads], device=model.device).unbind(dim=1)
    values = model.channels.at(layer, head).singular_values
    if groups_or_none(values) is None:
        return circuit
    found = {node.id: equal_channels(mine) or None for node, mine in zip(heads, values, strict=True)}
    nodes = (replace(node, equal_channels=found.get(node.id)) for node in circuit.nodes)
    return replace(circuit, nodes=tuple(nodes))


def site_order(site: Site) -> tuple[int, ...]:
    """The root first, then layer by layer from the top; within a layer by kind and place."""
    place = (site.head, site.dest, site.src)
    layer = -1 if site.layer is None else site.layer
    return (site.kind != "root", -layer, KINDS.index(site.kind), *(-1 if i is None else i for i in place))


def _node(site: Site, number: int, trace: PromptTrace) -> Node:
    extra: dict[str, Any] = {}
    if site.kind == "head":
        extra = {"attention": trace.attention.get(site), "threshold": trace.thresholds.get(site)}
        extra["group"] = trace.groups.get(site)
        alone = trace.alone.get(site, {})
        held_down = dict.fromkeys(str(source) for (_, source), cause in alone.items() if cause.weight < 0)
        extra["held_down_by"] = tuple(held_down) or None
    found = trace.causes.get(site)
    if found is not None and site != ROOT:
        predicted = {
            side: part.predicted
            for side, part in found.sides.items()
            if side in ATTENTION_SIDES and not (part.causes and all(cause.alone for cause in part.causes))
        }
        elsewhere = tuple(
            CompetingKeySignal(
                c.site.layer,
                c.site.head,
                c.site.src,
                c.channels or (),
                c.weight,
                None if c.site.kind == "head" else c.site.kind,
            )
            for part in found.sides.values()
            for c in part.elsewhere
        )
        extra |= {"expanded": True, "explained": found.explained, "predicted": predicted or None}
        extra["elsewhere"] = elsewhere or None
        if found.rounding is not None and found.rounding > RESTS_ON_ROUNDING:
            extra["rounding"] = found.rounding
    return Node(
        id=number,
        kind=site.kind,
        layer=site.layer,
        head=site.head,
        dest=site.dest,
        src=site.src,
        influence=trace.influence.get(site, 0.0),
        contribution=trace.contributions.get(site),
        neurons=trace.neurons.get(site),
        **extra,
    )
