"""From what a sweep found to a Circuit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headtrace.circuits import Circuit, CompetingKeySignal, Edge, MethodInfo, ModelInfo, Node, PromptInfo
from headtrace.tracing.causes import Cause
from headtrace.tracing.sweep import PromptTrace
from headtrace.vocabulary import ATTENTION_SIDES, KINDS, ROOT, Side, Site

RESTS_ON_ROUNDING = 0.02
"""A firing whose attention would move by more than this without rounding says so."""


def assemble(model: ModelInfo, prompt: PromptInfo, trace: PromptTrace, method: MethodInfo) -> Circuit:
    """The circuit of one prompt. Nodes are numbered from the root down, so equal traces give equal files."""
    edges: list[tuple[Cause, Site, Side]] = [
        (cause, target, side)
        for target, found in trace.causes.items()
        for side, part in found.sides.items()
        for cause in part.in_graph
    ]
    sites = {ROOT} | {cause.site for cause, *_ in edges} | {target for _, target, _ in edges}
    numbers = {site: i for i, site in enumerate(sorted(sites, key=_order))}
    reason = trace.seeds.reason
    return Circuit(
        model=model,
        prompt=replace(prompt, contributions=trace.tokens),
        root=trace.seeds.root,
        method=method,
        nodes=tuple(_node(site, number, trace) for site, number in numbers.items()),
        edges=tuple(_edge(cause, target, side, numbers, trace) for cause, target, side in edges),
        reason=reason,
        influence_kept=None if reason else trace.influence_kept,
    )


def _edge(cause: Cause, target: Site, side: Side, numbers: dict[Site, int], trace: PromptTrace) -> Edge:
    passage = trace.passages.get((cause.site, target, side)) if trace.passages else None
    through = None if passage is None else tuple(numbers[found.site] for found in passage.causes)
    return Edge(
        source=numbers[cause.site],
        target=numbers[target],
        side=side,
        weight=cause.weight,
        channels=cause.channels,
        contribution=None if side in ATTENTION_SIDES else trace.shares.get((cause.site, target)),
        through=through,
        left=None if passage is None else passage.left,
    )


def _order(site: Site) -> tuple[int, ...]:
    """The root first, then layer by layer from the top; within a layer by kind and place."""
    place = (site.head, site.dest, site.src)
    layer = -1 if site.layer is None else site.layer
    return (site.kind != "root", -layer, KINDS.index(site.kind), *(-1 if i is None else i for i in place))


def _node(site: Site, number: int, trace: PromptTrace) -> Node:
    extra: dict[str, Any] = {}
    if site.kind == "head":
        extra = {"attention": trace.attention.get(site), "threshold": trace.thresholds.get(site)}
    found = trace.causes.get(site)
    if found is not None and site != ROOT:
        predicted = {s: part.predicted for s, part in found.sides.items() if s in ATTENTION_SIDES}
        elsewhere = [c for part in found.sides.values() for c in part.elsewhere]
        extra |= {"expanded": True, "explained": found.explained, "predicted": predicted or None}
        if found.rounding is not None and found.rounding > RESTS_ON_ROUNDING:
            extra["rounding"] = found.rounding
        extra["elsewhere"] = (
            tuple(
                CompetingKeySignal(c.site.layer, c.site.head, c.site.src, c.channels, c.weight)  # type: ignore[arg-type]
                for c in elsewhere
            )
            or None
        )
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
