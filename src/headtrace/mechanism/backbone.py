"""The backbone of a circuit: heads, tokens and the answer, with MLPs folded into the flows between them.

`headtrace.mechanism.folding` makes it from two runs, exactly; here it is read from a circuit as it stands in its file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from headtrace.circuits import Circuit, Edge
from headtrace.vocabulary import Side, Site

LEAST_HEAD = 0.03
"""A head component of the backbone has at least this share of the whole change."""
MOST_HEADS = 24

Ends = tuple[Site, Site, Side]
"""Where a flow comes from, where it goes, and on which side it enters."""


@dataclass(frozen=True)
class Folded:
    """What flows from one head component or embedding into another reading, all MLPs between them folded in."""

    flow: float
    direct: float
    """The part that passes through no MLP."""


@dataclass(frozen=True)
class Backbone:
    """Heads by flow, and what flows between them, from the tokens, and into the root. All in the unit of the root."""

    whole: float
    """J - J', or J where a circuit of one run is read."""
    flows: Mapping[Site, float]
    """Head components that carry enough, by site; nodes on one path carry the same flow one after the other."""
    edges: Mapping[Ends, Folded]
    """Between head components, and from embeddings into them."""
    direct: Mapping[Site, float]
    """What head components of the backbone bring straight into the root."""
    into_mlps: Mapping[Site, float]
    """What heads and embeddings bring into the root through MLPs at the position where it is read."""
    mlps_into_root: float
    """What all MLPs bring straight into the root: the sum of ``into_mlps`` over all components, shown or not."""
    rest: float
    """What comes straight into the root from components that are not in the backbone."""
    logits: Mapping[Site, tuple[float, float]]
    """Of ``direct``: the flow into the answer's logit and into the wrong answer's, where the root has both."""


# -- from a circuit ------------------------------------------------------------------------------------------


def fold_circuit(circuit: Circuit) -> Backbone:
    """The backbone of a circuit as it stands in its file: MLPs pass on what enters them in proportion.

    Only what the circuit shows is there: what came in along edges that are not part of it is in ``rest``.
    """
    shares = _edge_amounts(circuit)
    whole = circuit.difference.change if circuit.difference is not None else circuit.root.value or 0.0
    root = circuit.root_node
    heads = {node.id: node.site for node in circuit.heads()}
    sizes = {node.id: _size(node.flow, node.contribution, node.influence, whole) for node in circuit.heads()}
    scale = abs(whole) or 1.0
    kept = sorted(
        (i for i in heads if abs(sizes[i]) >= LEAST_HEAD * scale), key=lambda i: (-abs(sizes[i]), heads[i])
    )[:MOST_HEADS]
    chosen = set(kept)
    edges: dict[Ends, Folded] = {}
    direct: dict[Site, float] = {}
    into_mlps: dict[Site, float] = {}
    mlps = 0.0
    targets = [*kept, *([] if root is None else [root.id])]
    for target in targets:
        for edge in circuit.edges_into(target):
            amount = shares[edge]
            node = circuit.node(edge.source)
            if node.kind == "mlp":
                if root is not None and target == root.id:
                    mlps += amount
                for source, part in _through(circuit, shares, edge.source, amount, chosen).items():
                    if root is not None and target == root.id:
                        into_mlps[source] = into_mlps.get(source, 0.0) + part
                    else:
                        _add(edges, (source, heads[target], edge.side), part, 0.0)
            elif root is not None and target == root.id:
                if node.id in chosen:
                    direct[node.site] = direct.get(node.site, 0.0) + amount
            elif node.id in chosen or node.kind == "embedding":
                _add(edges, (node.site, heads[target], edge.side), amount, amount)
    logits = logits_of(circuit)
    return Backbone(
        whole,
        {heads[i]: sizes[i] for i in kept},
        edges,
        direct,
        into_mlps,
        mlps,
        whole - mlps - sum(direct.values()),
        {heads[i]: logits[heads[i]] for i in kept if heads[i] in logits},
    )


def _add(edges: dict[Ends, Folded], ends: Ends, flow: float, direct: float) -> None:
    before = edges.get(ends, Folded(0.0, 0.0))
    edges[ends] = Folded(before.flow + flow, before.direct + direct)


def _size(flow: float | None, contribution: float | None, influence: float | None, whole: float) -> float:
    """How much of the whole passes through a node: its flow, or its influence as a share of the whole, with the sign of
    what it contributes."""
    if flow is not None:
        return flow
    share = (influence or 0.0) * abs(whole)
    if share:
        return share if (contribution or 0.0) >= 0 else -share
    return contribution or 0.0


def _edge_amounts(circuit: Circuit) -> dict[Edge, float]:
    """What passes along each edge in the unit of the root: its flow, its contribution into the root, or its share of
    the influence."""
    if circuit.difference is not None:
        return {edge: edge.weight for edge in circuit.edges}
    whole = abs(circuit.root.value or 0.0) or 1.0
    influence = circuit.flows()
    return {
        edge: (edge.contribution if edge.contribution is not None else edge.weight)
        if edge.side == "root"
        else influence.get(edge, 0.0) * whole
        for edge in circuit.edges
    }


def _through(
    circuit: Circuit, shares: Mapping[Edge, float], mlp: int, amount: float, heads: set[int]
) -> dict[Site, float]:
    """What passes an MLP on its way, by the heads and embeddings that it came from, in proportion to what enters."""
    found: dict[Site, float] = defaultdict(float)
    waiting = [(mlp, amount)]
    while waiting:
        at, passing = waiting.pop()
        entering = circuit.edges_into(at)
        total = sum(abs(shares[edge]) for edge in entering)
        for edge in entering:
            part = passing * abs(shares[edge]) / total if total else 0.0
            node = circuit.node(edge.source)
            if node.kind == "mlp":
                waiting.append((node.id, part))
            elif node.id in heads or node.kind == "embedding":
                found[node.site] += part
    return found


def logits_of(circuit: Circuit) -> dict[Site, tuple[float, float]]:
    """What components bring into the answer's logit and into the wrong answer's, from the edges into the root."""
    root = circuit.root_node
    if root is None:
        return {}
    return {
        circuit.node(edge.source).site: edge.logits
        for edge in circuit.edges_into(root)
        if edge.logits is not None
    }
