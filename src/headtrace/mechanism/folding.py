"""Fold MLPs into the flows between heads, exactly.

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
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.circuits import Circuit
from headtrace.errors import IdentityError
from headtrace.mechanism.backbone import LEAST_HEAD, MOST_HEADS, Backbone, Ends, Folded, logits_of
from headtrace.models.identities import tolerance_for
from headtrace.tracing.component_flow import DifferenceFlow, FlowRead
from headtrace.tracing.difference_circuit import PairFlow, mean_of_strongest
from headtrace.vocabulary import ROOT, Site

LEAST_READ = 0.1
"""Tokens whose keys bring less than this share of what enters a head through its keys are not followed."""


@torch.inference_mode()
def fold_flows(flows: Sequence[PairFlow], circuit: Circuit | None = None) -> Backbone:
    """The backbone of the difference between runs: the mean over several pairs, each exact."""
    whole = fmean(each.value - each.other_value for each in flows)
    heads = _heads(flows, abs(whole))
    together: dict[int, list[PairFlow]] = defaultdict(list)
    for each in flows:
        together[id(each.flow)].append(each)
    folded = [found for pairs in together.values() for found in _fold(pairs, heads)]
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
    logits = {} if circuit is None else logits_of(circuit)
    return Backbone(
        whole,
        dict(zip(heads, map(fmean, zip(*(each.of(heads) for each in flows), strict=True)), strict=True)),
        mean,
        dict(direct),
        dict(into_mlps),
        mlps,
        whole - mlps - sum(direct.values()),
        {site: logits[site] for site in heads if site in logits},
    )


def _heads(flows: Sequence[PairFlow], whole: float) -> list[Site]:
    """The head components with the largest mean flow, strongest first."""
    mean = mean_of_strongest(flows, 4 * MOST_HEADS, heads=True)
    kept = sorted((s for s in mean if abs(mean[s]) >= LEAST_HEAD * whole), key=lambda s: (-abs(mean[s]), s))
    return kept[:MOST_HEADS]


@dataclass
class _OfPair:
    edges: dict[Ends, Folded]
    direct: dict[Site, float]
    into_mlps: dict[Site, float]
    mlps_into_root: float


def _fold(pairs: Sequence[PairFlow], heads: Sequence[Site]) -> list[_OfPair]:
    """Pairs that were swept together: readings of heads and of the root, pulled back to all heads and embeddings."""
    flow = pairs[0].flow
    reads = [_reads(pair, heads) for pair in pairs]
    every = [read for mine in reads for _, read in mine]
    pulled = _pull_back(flow, every) if every else {}
    found: list[_OfPair] = []
    first = 0
    for pair, mine in zip(pairs, reads, strict=True):
        rows = slice(first, first + len(mine))
        found.append(_fold_pair(pair, heads, mine, {layer: g[rows] for layer, g in pulled.items()}))
        first += len(mine)
    return found


def _reads(pair: PairFlow, heads: Sequence[Site]) -> list[tuple[Site, FlowRead]]:
    """What the root and each head read where the runs differ; of its keys, those that bring enough."""
    flow, prompt = pair.flow, pair.prompt
    ends = [run.residuals[:, prompt] for run in (flow.recording, flow.other)]
    differs = (ends[0] != ends[1]).any(-1).tolist()
    reads: list[tuple[Site, FlowRead]] = [(ROOT, read) for read in flow.reads(prompt, ROOT)]
    for site in heads:
        mine = [read for read in flow.reads(prompt, site) if differs[read.place.layer][read.place.position]]
        keys = [read for read in mine if read.side == "key"]
        moved = _entering(flow, keys).abs().tolist() if keys else []
        enough = max(LEAST_READ * max(moved, default=0.0), 1e-30)
        kept = [read for read, size in zip(keys, moved, strict=True) if size >= enough]
        reads += [(site, read) for read in [*(read for read in mine if read.side != "key"), *kept]]
    return reads


def _fold_pair(
    pair: PairFlow,
    heads: Sequence[Site],
    reads: Sequence[tuple[Site, FlowRead]],
    pulled: Mapping[int, Float[Tensor, "read d_model"]],
) -> _OfPair:
    """What every head and embedding brings into every reading of one pair of runs, straight and through MLPs."""
    flow, prompt = pair.flow, pair.prompt
    found = _OfPair({}, {}, {}, 0.0)
    if not reads:
        return found
    sources = [*heads, *(Site("embedding", dest=t) for t in range(flow.recording.lengths[prompt]))]
    writes = flow.differences(prompt, sources)
    layers = torch.tensor([-1 if site.layer is None else site.layer for site in sources])
    dests = torch.tensor([site.dest or 0 for site in sources])
    heights = torch.tensor([read.place.layer for _, read in reads])
    positions = torch.tensor([read.place.position for _, read in reads])
    straight = writes @ torch.stack([read.multiplier for _, read in reads]).T
    total = torch.zeros_like(straight)
    for layer in set(layers.tolist()):
        if layer in pulled:
            mine = (layers == layer).nonzero()[:, 0].to(writes.device)
            total[mine] = writes[mine] @ pulled[layer].T
    reached = (dests[:, None] == positions) & (layers[:, None] < heights)
    numbers = straight.tolist(), total.tolist()
    for place, number in reached.T.nonzero().tolist():
        (target, read), source = reads[place], sources[number]
        direct, flows = numbers[0][number][place], numbers[1][number][place]
        if target == ROOT:
            if source.kind == "head":
                found.direct[source] = found.direct.get(source, 0.0) + direct
            found.into_mlps[source] = found.into_mlps.get(source, 0.0) + flows - direct
        elif flows and source != target:
            ends = (source, target, read.side)
            before = found.edges.get(ends, Folded(0.0, 0.0))
            found.edges[ends] = Folded(before.flow + flows, before.direct + direct)
    for _, read in reads[: len(flow.roots[prompt].residuals)]:
        t, top = read.place.position, read.place.layer
        run, other = flow.recording.mlp_writes, flow.other.mlp_writes
        found.mlps_into_root += float(
            ((run[:top, prompt, t] - other[:top, prompt, t]) @ read.multiplier).sum()
        )
    for firing in flow.roots[
        prompt
    ].patterns:  # a root that reads attention: all of it comes from these heads
        softmax, _ = flow.layers[firing.layer].row(prompt, firing.head, firing.dest)
        if firing.site in heads:
            moved = float(softmax.difference[firing.src])
            found.direct[firing.site] = found.direct.get(firing.site, 0.0) + moved
    return found


def _places(
    flow: DifferenceFlow, reads: Sequence[FlowRead]
) -> tuple[Int[Tensor, " read"], Int[Tensor, " read"], Int[Tensor, " read"]]:
    """Layer, prompt and position of readings."""
    places = [(read.place.layer, read.place.prompt, read.place.position) for read in reads]
    layers, prompts, positions = torch.tensor(places, device=flow.recording.residuals.device).T
    return layers, prompts, positions


def _entering(flow: DifferenceFlow, reads: Sequence[FlowRead]) -> Float[Tensor, " read"]:
    """What enters readings in all: ``D x . g``."""
    at = _places(flow, reads)
    moved = flow.recording.residuals[at] - flow.other.residuals[at]
    return (moved * torch.stack([read.multiplier for read in reads])).sum(-1)


def _pull_back(flow: DifferenceFlow, reads: Sequence[FlowRead]) -> dict[int, Float[Tensor, "read d_model"]]:
    """By layer, the multipliers of what attention writes there for each reading, through norms and MLPs only; under
    -1, those of the embeddings. Checked: attention writes and embeddings together give what enters each reading."""
    run, other = flow.recording, flow.other
    model = run.model
    parallel = model.architecture.parallel(model.config)
    g = torch.stack([read.multiplier for read in reads]).clone()
    heights, prompts, t = _places(flow, reads)
    found: dict[int, Tensor] = {}
    total, size = g.new_zeros(len(reads)), g.new_zeros(len(reads))
    for layer in reversed(range(int(heights.max()))):
        active = (heights > layer).nonzero()[:, 0]
        through = flow.mlp_at(layer, prompts[active], t[active]).back(g[active])[0]
        written = g.clone()
        if not parallel:
            written[active] += through
        found[layer] = written
        ends = [
            (each.residuals[layer + 1] - each.mlp_writes[layer] - each.residuals[layer])[prompts, t]
            for each in (run, other)
        ]
        amount = (ends[0] - ends[1]) * written * (heights > layer)[:, None]
        total, size = total + amount.sum(-1), size + amount.abs().sum(-1)
        g[active] += through
    found[-1] = g
    amount = (run.embedding - other.embedding)[prompts, t] * g
    total, size = total + amount.sum(-1), size + amount.abs().sum(-1)
    if not model.half:
        # Relative to the size of all numbers that are added up: what is left of them may be as small as their rounding.
        whole = _entering(flow, reads)
        changes = g.new_tensor([root.value - root.other_value for root in flow.roots])[prompts]
        error = (total - whole).abs() / torch.maximum(
            torch.maximum(size, whole.abs()), 1e-3 * changes.abs() + 1e-30
        )
        allowed = tolerance_for(model.dtype)
        if not bool((error <= allowed).all()):
            worst = int(error.argmax())
            raise IdentityError(
                f"With MLPs folded, heads and embeddings bring {float(total[worst]):.6g} into a reading that takes "
                f"{float(whole[worst]):.6g}: relative error {float(error[worst]):.1e}, allowed {allowed:.0e}."
            )
    return found
