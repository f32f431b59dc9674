"""The backbone of a circuit: heads, tokens and the answer, with MLPs folded into the flows between them.

MLPs act on one token at a time. A multiplier of what a head (or the root) reads can therefore be pulled back through
the norms and MLPs below it, but not through attention, and then says what flows from every head and every embedding
straight into that reading, through whatever MLPs lie between. What is pulled back sums to what enters the reading
(`IdentityError` if it does not), so a backbone adds up as the whole circuit does.

>>> import headtrace
>>> from headtrace.tracing import Tracer
>>> model = headtrace.load("builtin")
>>> flows = Tracer(model).difference_flows(
...     "When Mary and John went to the store, John gave a drink to", " Mary", " John",
...     counterfactual="When Mary and John went to the store, Mary gave a drink to")
>>> backbone = fold_flows(flows)
>>> whole = flows[0].value - flows[0].other_value
>>> abs(backbone.mlps_into_root + sum(backbone.direct.values()) + backbone.rest - whole) < 1e-4 * abs(whole)
True
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.circuits import Circuit, Edge
from headtrace.errors import IdentityError
from headtrace.models.identities import tolerance_for
from headtrace.tracing.difference import DifferenceFlow, FlowRead
from headtrace.tracing.difference_circuit import PairFlow
from headtrace.tracing.secants import MlpSecant
from headtrace.vocabulary import ROOT, Side, Site

LEAST_HEAD = 0.03
"""A head component of the backbone has at least this share of the whole change."""
MOST_HEADS = 24
LEAST_READ = 0.1
"""Tokens whose keys bring less than this share of what enters a head through its keys are not followed."""

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


# -- from two runs -------------------------------------------------------------------------------------------


@torch.inference_mode()
def fold_flows(flows: Sequence[PairFlow], circuit: Circuit | None = None) -> Backbone:
    """The backbone of the difference between runs: the mean over several pairs, each exact."""
    whole = fmean(each.value - each.other_value for each in flows)
    heads = _heads(flows, abs(whole))
    folded = [_fold(each, heads) for each in flows]
    n = len(flows)
    edges: dict[Ends, list[Folded]] = defaultdict(list)
    direct: dict[Site, float] = defaultdict(float)
    into_mlps: dict[Site, float] = defaultdict(float)
    for each in folded:
        for ends, flow in each.edges.items():
            edges[ends].append(flow)
        for site, flow in each.direct.items():
            direct[site] += flow / n
        for site, flow in each.into_mlps.items():
            into_mlps[site] += flow / n
    mean = {
        ends: Folded(sum(f.flow for f in some) / n, sum(f.direct for f in some) / n)
        for ends, some in edges.items()
    }
    mlps = fmean(each.mlps_into_root for each in folded)
    logits = {} if circuit is None else _logits_of(circuit)
    return Backbone(
        whole,
        {site: fmean(each.of(site) for each in flows) for site in heads},
        mean,
        dict(direct),
        dict(into_mlps),
        mlps,
        whole - mlps - sum(direct.values()),
        {site: logits[site] for site in heads if site in logits},
    )


def _heads(flows: Sequence[PairFlow], whole: float) -> list[Site]:
    """The head components with the largest mean flow, strongest first."""
    for each in flows:
        each.candidates()
    known = dict.fromkeys(site for each in flows for site in each.known if site.kind == "head")
    bound = {site: sum(abs(each.known.get(site, 0.0)) for each in flows) for site in known}
    strong = sorted(known, key=lambda site: (-bound[site], site))[: 4 * MOST_HEADS]
    mean = {site: fmean(each.of(site) for each in flows) for site in strong}
    kept = sorted((s for s in strong if abs(mean[s]) >= LEAST_HEAD * whole), key=lambda s: (-abs(mean[s]), s))
    return kept[:MOST_HEADS]


@dataclass
class _OfPair:
    edges: dict[Ends, Folded]
    direct: dict[Site, float]
    into_mlps: dict[Site, float]
    mlps_into_root: float


def _fold(pair: PairFlow, heads: Sequence[Site]) -> _OfPair:
    """One pair of runs: readings of the heads and of the root, pulled back to all heads and embeddings."""
    flow, prompt = pair.flow, pair.prompt
    reads: list[tuple[Site, FlowRead]] = [(ROOT, read) for read in flow.reads(prompt, ROOT)]
    for site in heads:
        mine = flow.reads(prompt, site)
        moved = [float(_entering(flow, prompt, read)) if read.side == "key" else 0.0 for read in mine]
        enough = LEAST_READ * max((abs(each) for each in moved), default=0.0)
        reads += [
            (site, read)
            for read, size in zip(mine, moved, strict=True)
            if read.side != "key" or abs(size) >= max(enough, 1e-30)
        ]
    found = _OfPair({}, {}, {}, 0.0)
    if not reads:
        return found
    pulled = _pull_back(flow, prompt, [read for _, read in reads])
    sources = [*heads, *(Site("embedding", dest=t) for t in range(flow.recording.lengths[prompt]))]
    writes = flow.differences(prompt, sources)
    for place, (target, read) in enumerate(reads):
        position, height = read.place.position, read.place.layer
        for number, source in enumerate(sources):
            layer = -1 if source.layer is None else source.layer
            if source.dest != position or layer >= height or source == target:
                continue
            straight = float(writes[number] @ read.multiplier)
            total = float(writes[number] @ pulled[layer][place])
            if target == ROOT:
                if source.kind == "head":
                    found.direct[source] = found.direct.get(source, 0.0) + straight
                found.into_mlps[source] = found.into_mlps.get(source, 0.0) + total - straight
            elif total:
                ends = (source, target, read.side)
                before = found.edges.get(ends, Folded(0.0, 0.0))
                found.edges[ends] = Folded(before.flow + total, before.direct + straight)
    for _, read in reads[: len(flow.roots[prompt].residuals)]:
        t, top = read.place.position, read.place.layer
        run, other = flow.recording.mlp_writes, flow.other.mlp_writes
        found.mlps_into_root += float(((run - other)[:top, prompt, t] @ read.multiplier).sum())
    for firing in flow.roots[
        prompt
    ].patterns:  # a root that reads attention: all of it comes from these heads
        softmax, _ = flow.layers[firing.layer].row(prompt, firing.head, firing.dest)
        if firing.site in heads:
            found.direct[firing.site] = found.direct.get(firing.site, 0.0) + float(
                softmax.difference[firing.src]
            )
    return found


def _entering(flow: DifferenceFlow, prompt: int, read: FlowRead) -> Float[Tensor, ""]:
    """What enters a reading in all: ``D x . g``."""
    at = read.place.layer, prompt, read.place.position
    return (flow.recording.residuals[at] - flow.other.residuals[at]) @ read.multiplier


def _pull_back(
    flow: DifferenceFlow, prompt: int, reads: Sequence[FlowRead]
) -> dict[int, Float[Tensor, "read d_model"]]:
    """By layer, the multipliers of what attention writes there for each reading, through norms and MLPs only; under
    -1, those of the embeddings. Checked: attention writes and embeddings together give what enters each reading."""
    run, other = flow.recording, flow.other
    model = run.model
    parallel = model.architecture.parallel(model.config)
    g = torch.stack([read.multiplier for read in reads]).clone()
    heights = torch.tensor([read.place.layer for read in reads], device=g.device)
    t = torch.tensor([read.place.position for read in reads], device=g.device)
    found: dict[int, Tensor] = {}
    total, size = g.new_zeros(len(reads)), g.new_zeros(len(reads))
    for layer in reversed(range(int(heights.max()))):
        active = (heights > layer).nonzero()[:, 0]
        ends = run.residuals[layer], other.residuals[layer]
        behind = (
            run.residuals[layer + 1] - run.mlp_writes[layer],
            other.residuals[layer + 1] - other.mlp_writes[layer],
        )
        mlp = MlpSecant.of(run, other, layer, ends if parallel else behind)
        through = mlp.at(prompt, t[active]).back(g[active])[0]
        written = g.clone()
        if not parallel:
            written[active] += through
        found[layer] = written
        wrote = (behind[0] - ends[0]) - (behind[1] - ends[1])
        amount = (wrote[prompt, t] * written).sum(-1) * (heights > layer)
        total, size = total + amount, size + amount.abs()
        g[active] += through
    found[-1] = g
    amount = ((run.embedding - other.embedding)[prompt, t] * g).sum(-1)
    total, size = total + amount, size + amount.abs()
    if not model.half:
        whole = torch.stack([_entering(flow, prompt, read) for read in reads])
        error = (total - whole).abs() / torch.maximum(size, whole.abs()).clamp_min(
            1e-3 * abs(flow.roots[prompt].value - flow.roots[prompt].other_value) + 1e-30
        )
        allowed = tolerance_for(model.dtype)
        if not bool((error <= allowed).all()):
            worst = int(error.argmax())
            raise IdentityError(
                f"With MLPs folded, heads and embeddings bring {float(total[worst]):.6g} into a reading that takes "
                f"{float(whole[worst]):.6g}: relative error {float(error[worst]):.1e}, allowed {allowed:.0e}."
            )
    return found


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
    logits = _logits_of(circuit)
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


def _logits_of(circuit: Circuit) -> dict[Site, tuple[float, float]]:
    root = circuit.root_node
    if root is None:
        return {}
    return {
        circuit.node(edge.source).site: edge.logits
        for edge in circuit.edges_into(root)
        if edge.logits is not None
    }
