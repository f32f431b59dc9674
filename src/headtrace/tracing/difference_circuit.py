"""Difference circuits: the nodes and edges that carry most of what changed the root between two prompts.

Every component has an exact flow (`headtrace.tracing.difference`). Kept are the components with the largest flows; the
flow between any two of them is one product: what the first writes differently, along the multiplier with which the
second reads it. What flows into a node but comes from nothing that is shown is the rest of its flow.

Several other prompts: the mean of the flows, each of which is exact, and the range over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headtrace.channels.sparsity import first_of_group
from headtrace.circuits import (
    Circuit,
    ComparedPrompt,
    DifferenceInfo,
    Edge,
    MethodInfo,
    ModelInfo,
    Node,
    PromptInfo,
)
from headtrace.models.identities import tolerance_for
from headtrace.roots import LogitDifference, Root
from headtrace.tracing.assemble import site_order, with_equal_channels
from headtrace.tracing.component_flow import DifferenceFlow
from headtrace.tracing.difference import DIFFERENCE_FIELDS, difference_flow
from headtrace.tracing.edge_flows import EdgeKey, mean_edges
from headtrace.tracing.root_difference import logit_multiplier
from headtrace.vocabulary import ROOT, Site

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.models.record import PatternsKept

MOST_NODES = 100
"""Components that a difference circuit keeps, unless another number is given."""
CARRIED = 0.9
"""The components that carry this share of all flow are enough."""
LEAST = 0.01
"""Edges and nodes with less than this share of the whole difference are left out."""
SWEPT_TOKENS = 512
"""Pairs of one prompt are swept together up to so many tokens in all, longer ones one after the other."""
MOST_CHANNELS = 8
"""Channels that an edge names, at most; as many as carry nine tenths of its flow."""


@dataclass(frozen=True)
class PromptPair:
    """A prompt and another one to compare it with, as token ids of the same length."""

    ids: list[int]
    other: list[int]
    root: Root
    compared: ComparedPrompt
    """The other prompt for the file; its value is filled in."""


@dataclass(frozen=True)
class FlowBudget:
    """How much of the flow a circuit shows."""

    nodes: int | None = MOST_NODES
    least: float = LEAST
    """Of a node or an edge, as a share of the whole difference."""
    carried: float = CARRIED
    """The share of all flow that is enough."""


@dataclass
class PairFlow:
    """One pair of runs after its sweep: flows of components, and between them."""

    flow: DifferenceFlow
    prompt: int
    root: Root
    compared: ComparedPrompt

    @property
    def value(self) -> float:
        return self.flow.roots[self.prompt].value

    @property
    def other_value(self) -> float:
        return self.flow.roots[self.prompt].other_value

    @cached_property
    def candidates(self) -> dict[Site, float]:
        """The flows of embeddings and MLPs at every token, and of the strongest head components of each layer."""
        n, layers = self.flow.recording.lengths[self.prompt], self.flow.recording.model.n_layers
        found = [Site("embedding", dest=t) for t in range(n)]
        flows = self.flow.embedding()[self.prompt].tolist()
        found += [Site("mlp", layer, dest=t) for layer in range(layers) for t in range(n)]
        flows = flows[:n] + self.flow.mlps()[:, self.prompt, :n].flatten().tolist()
        strongest = self.flow.strongest[self.prompt]
        heads = {site: moved + attends for site, (moved, attends) in strongest.items()}
        return dict(zip(found, flows, strict=True)) | heads

    def of(self, sites: Sequence[Site]) -> list[float]:
        """The flows of some components."""
        heads = [site for site in sites if site.kind == "head"]
        known = dict(zip(heads, map(sum, self.flow.head_flows(self.prompt, heads)), strict=True))
        for site in sites:
            if site not in known:
                flow = self.candidates.get(site)
                known[site] = self.flow.flow(self.prompt, site) if flow is None else flow
        return [known[site] for site in sites]


# -- from flows to a circuit ---------------------------------------------------------------------------------


def trace_pairs(model: Model, pairs: Sequence[PromptPair], patterns: PatternsKept = "auto") -> list[PairFlow]:
    """Record pairs of prompts together, and sweep them."""
    last = max(len(pair.root.answer_prefix) for pair in pairs) + 1
    record: dict[str, Any] = {"last_logits": last, "keep": DIFFERENCE_FIELDS, "patterns": patterns}
    with model.assume_weights_unchanged():
        # The prompt of several pairs is recorded once, if it is one prompt.
        same = len({tuple(pair.ids) for pair in pairs}) == 1
        prompts = [pair.ids for pair in pairs[: 1 if same else None]]
        clean, others = model.record([*prompts, *(pair.other for pair in pairs)], **record).split(
            len(prompts)
        )
        if same and len(pairs) > 1 and len(pairs) * clean.lengths[0] > SWEPT_TOKENS:
            flows = [difference_flow(clean, others[i], pair.root) for i, pair in enumerate(pairs)]
            places = [(flow, 0) for flow in flows]
        else:
            clean = clean.repeated(len(pairs)) if same and len(pairs) > 1 else clean
            flow = difference_flow(clean, others, [pair.root for pair in pairs])
            places = [(flow, i) for i in range(len(pairs))]
    return [
        PairFlow(flow, at, pair.root, replace(pair.compared, value=flow.roots[at].other_value))
        for (flow, at), pair in zip(places, pairs, strict=True)
    ]


def difference_circuit(
    info: ModelInfo,
    prompt: PromptInfo,
    method: MethodInfo,
    flows: Sequence[PairFlow],
    budget: FlowBudget,
    *,
    automatic: bool = False,
    note: str | None = None,
) -> Circuit:
    """The circuit of one prompt from its flows against one other prompt or several."""
    first = flows[0]
    value, other = first.value, fmean(each.other_value for each in flows)
    change, n = value - other, len(prompt.tokens)
    error = max(each.flow.error for each in flows)
    position = min((read.position for read in first.flow.roots[first.prompt].residuals), default=None)
    root = replace(first.root, value=value, **({} if position is None else {"position": position}))
    tokens = torch.stack([each.flow.embedding()[each.prompt, :n] for each in flows]).mean(0).tolist()
    said = DifferenceInfo(
        value, other, 0.0, tuple(tokens), tuple(each.compared for each in flows), automatic, note, error
    )
    size = max(each.flow.roots[each.prompt].size for each in flows)
    if abs(change) <= size * tolerance_for(first.flow.recording.model.dtype):
        reason = (
            f"the {root.measure} is the same on both prompts ({value:.4g} and {other:.4g}), so no difference flows "
            'through anything: choose a counterfactual that changes the answer, or counterfactual="auto"'
        )
        return Circuit(info, prompt, root, method, (Node(0, "root"),), (), reason, difference=said)

    # The components with the largest flows, and what flows between them.
    mean = _mean_flows(flows)
    least, total = budget.least * abs(change), sum(abs(flow) for flow in mean.values())
    kept, carried = list[Site](), 0.0
    strong = [site for site, flow in mean.items() if flow != 0 and abs(flow) >= least]
    strong.sort(key=lambda site: (-abs(mean[site]), site_order(site)))
    for site in strong:
        if len(kept) == budget.nodes or carried >= budget.carried * total:
            break
        kept.append(site)
        carried += abs(mean[site])
    found = mean_edges(flows, kept) if kept else None
    between = {} if found is None else found.strong(least)
    if (
        found and not between and len(kept) == budget.nodes
    ):  # too few for a path from the strongest to the root
        direct = mean_edges(flows, strong[:MOST_NODES]).every()
        near = sorted((key for key in direct if key[1] == ROOT), key=lambda key: -abs(direct[key]))
        kept = [source for source, _, _ in near[: budget.nodes]]
        found = mean_edges(flows, kept) if kept else None
        between = {} if found is None else found.strong(least)
    ends = {site for key in between for site in key[:2]}
    sites = [ROOT, *(site for site in kept if site in ends)]
    sites.sort(key=site_order)
    numbers = {site: i for i, site in enumerate(sites)}
    of_logits = edge_logits(flows, [source for source, target, _ in between if target == ROOT])
    channels = {} if found is None else _channels(flows[0].flow, found.by_channel(between))
    edges = tuple(
        Edge(
            numbers[source],
            numbers[target],
            side,
            flow,
            *channels.get((source, target, side), (None, None)),
            logits=of_logits.get(source) if side == "root" else None,
        )
        for (source, target, side), flow in between.items()
    )
    shown = sum(edge.weight for edge in edges if edge.side == "root") / change
    nodes = _nodes(sites, flows, change, bool(edges))
    reason = None
    if not edges and not strong:
        reason = f"no component carries {budget.least:g} of the difference, the least that counts: lower min_influence"
    elif not edges:
        reason = (
            f"nothing flows straight into the root from the {len(strong)} components that carry at least "
            f"{budget.least:g} of the difference: lower min_influence, so that what lies between is kept as well"
        )
    said = replace(said, shown=shown)
    circuit = Circuit(info, prompt, root, method, nodes, edges, reason, difference=said)
    return with_equal_channels(circuit, flows[0].flow.recording.model)


def _mean_flows(flows: Sequence[PairFlow]) -> dict[Site, float]:
    """The mean flow of every component that is among the strongest of some pair."""
    if len(flows) == 1:
        return dict(flows[0].candidates)
    return mean_of_strongest(flows, 4 * MOST_NODES)


def mean_of_strongest(flows: Sequence[PairFlow], most: int, *, heads: bool = False) -> dict[Site, float]:
    """The mean flows of the components that may have the largest ones, of ``heads`` only or of all kinds.

    Head components that are among the strongest of one pair only are looked up in the others if that can matter.
    """
    bound: dict[Site, float] = {}
    for each in flows:
        for site, flow in each.candidates.items():
            if not heads or site.kind == "head":
                bound[site] = bound.get(site, 0.0) + abs(flow)
    strong = sorted(bound, key=lambda site: -bound[site])[:most]
    means = map(fmean, zip(*(each.of(strong) for each in flows), strict=True))
    return dict(zip(strong, means, strict=True))


def _channels(
    whole: DifferenceFlow, by_channel: Mapping[EdgeKey, Tensor]
) -> dict[EdgeKey, tuple[tuple[int, ...], tuple[float, ...]]]:
    """Of each edge into a query or key: the channels that carry most of its flow, the largest first, and their flows.

    A channel stands for its group of equal ones, all of which are listed.
    """
    if not by_channel:
        return {}
    first: dict[tuple[int, int], list[int]] = {}
    found: dict[EdgeKey, tuple[tuple[int, ...], tuple[float, ...]]] = {}
    flows = torch.stack(list(by_channel.values()))
    sizes, order = flows.abs().sort(dim=1, descending=True, stable=True)
    running = sizes.cumsum(1)
    enough = ((running < CARRIED * running[:, -1:]).sum(1) + 1).clamp_max(MOST_CHANNELS)
    rows = zip(order.tolist(), enough.tolist(), flows.tolist(), strict=True)
    for key, (best, n, mine) in zip(by_channel, rows, strict=True):
        head = key[1].layer or 0, key[1].head or 0
        if head not in first:
            first[head] = first_of_group(whole.singular_values(*head)).tolist()
        every = [member for k in best[:n] for member in range(k, k + first[head].count(k))]
        found[key] = tuple(every), tuple(mine[k] for k in every)
    return found


def edge_logits(flows: Sequence[PairFlow], sources: Sequence[Site]) -> dict[Site, tuple[float, float]]:
    """What flows from components into the logit of the answer and into that of the wrong answer, apart."""
    root = flows[0].root
    if not isinstance(root, LogitDifference) or root.wrong is None or not sources:
        return {}
    parts = [
        [
            each.flow.differences(each.prompt, sources) @ logit_multiplier(each.flow, each.prompt, ids)
            for ids in (root.answer, root.wrong)
        ]
        for each in flows
    ]
    answer, wrong = (torch.stack(some).mean(0).tolist() for some in zip(*parts, strict=True))
    return dict(zip(sources, zip(answer, wrong, strict=True), strict=True))


def _nodes(
    sites: Sequence[Site], flows: Sequence[PairFlow], change: float, expanded: bool
) -> tuple[Node, ...]:
    """The nodes of the root (first) and of some components, each with its mean flow and the range over the pairs."""
    others = sites[1:]
    found = zip(*(each.of(others) for each in flows), strict=True)
    of_heads = _head_parts([site for site in others if site.kind == "head"], flows)
    nodes = [Node(0, "root", flow=change, influence=1.0, expanded=expanded)]
    for number, (site, mine) in enumerate(zip(others, found, strict=True), start=1):
        flow = fmean(mine)
        nodes.append(
            Node(
                number,
                site.kind,
                site.layer,
                site.head,
                site.dest,
                site.src,
                flow=flow,
                influence=abs(flow / change),
                expanded=site.kind != "embedding",
                spread=None if len(mine) == 1 else (min(mine), max(mine)),
            )
        )
        if site in of_heads:
            moves, attends, attention, there = of_heads[site]
            nodes[-1] = replace(
                nodes[-1], moves=moves, attends=attends, attention=attention, other_attention=there
            )
    return tuple(nodes)


def _head_parts(
    heads: Sequence[Site], flows: Sequence[PairFlow]
) -> dict[Site, tuple[float, float, float, float]]:
    """What heads move differently, what they give by attending differently, and their attention in both runs."""
    if not heads:
        return {}
    rows = [(site.layer or 0, site.head or 0, site.dest or 0, site.src or 0) for site in heads]
    found: list[list[tuple[float, float, float, float]]] = []
    for each in flows:
        layer, *place = torch.tensor(rows, device=each.flow.residual.device).unbind(1)
        at = layer, torch.full_like(layer, each.prompt), *place
        now, there = (run.attention.at(*at).tolist() for run in (each.flow.recording, each.flow.other))
        parts = each.flow.head_flows(each.prompt, heads)
        found.append([(*both, *more) for both, *more in zip(parts, now, there, strict=True)])
    means: list[Any] = [tuple(map(fmean, zip(*mine, strict=True))) for mine in zip(*found, strict=True)]
    return dict(zip(heads, means, strict=True))
