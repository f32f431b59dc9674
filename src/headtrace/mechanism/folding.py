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
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.circuits import Circuit
from headtrace.errors import IdentityError
from headtrace.mechanism.backbone import LEAST_HEAD, MOST_HEADS, Backbone, Ends, Folded, logits_of
from headtrace.models.identities import tolerance_for
from headtrace.tracing.difference import DifferenceFlow, FlowRead
from headtrace.tracing.difference_circuit import PairFlow
from headtrace.tracing.secants import MlpSecant
from headtrace.vocabulary import ROOT, Site

LEAST_READ = 0.1
"""Tokens whose keys bring less than this share of what enters a head through its keys are not followed."""


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
    logits = {} if circuit is None else logits_of(circuit)
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
    some, place = t.unique(return_inverse=True)  # MLPs are looked at where something is read
    found: dict[int, Tensor] = {}
    total, size = g.new_zeros(len(reads)), g.new_zeros(len(reads))
    for layer in reversed(range(int(heights.max()))):
        active = (heights > layer).nonzero()[:, 0]
        ends = [each.residuals[layer][:, some] for each in (run, other)]
        behind = [(each.residuals[layer + 1] - each.mlp_writes[layer])[:, some] for each in (run, other)]
        read = ends if parallel else behind
        mlp = MlpSecant.of(run, other, layer, (read[0], read[1]), some)
        through = mlp.at(prompt, place[active]).back(g[active])[0]
        written = g.clone()
        if not parallel:
            written[active] += through
        found[layer] = written
        wrote = (behind[0] - ends[0]) - (behind[1] - ends[1])
        amount = (wrote[prompt, place] * written).sum(-1) * (heights > layer)
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
