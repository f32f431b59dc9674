"""Difference circuits: the nodes and edges that carry most of what changed the root between two prompts.

Every component has an exact flow (`headtrace.tracing.difference`). Kept are the components with the largest flows; the
flow between any two of them is one product: what the first writes differently, along the multiplier with which the
second reads it. What flows into a node but comes from nothing that is shown is the rest of its flow.

Several other prompts: the mean of the flows, each of which is exact, and the range over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headtrace.channels.groups import first_of_group, summed
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
from headtrace.circuits.graph import reachable
from headtrace.models.identities import tolerance_for
from headtrace.roots import LogitDifference, Root
from headtrace.tracing.assemble import site_order, with_equal_channels
from headtrace.tracing.difference import DIFFERENCE_FIELDS, DifferenceFlow, difference_flow, logit_multiplier
from headtrace.vocabulary import ROOT, Side, Site

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


EdgeKey = tuple[Site, Site, Side]
"""Source, target and side of an edge."""
EdgeFlow = tuple[float, Tensor | None]
"""What flows through an edge; into a query or key also by channel."""


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
    known: dict[Site, float] = field(default_factory=dict[Site, float])

    @property
    def value(self) -> float:
        return self.flow.roots[self.prompt].value

    @property
    def other_value(self) -> float:
        return self.flow.roots[self.prompt].other_value

    def candidates(self) -> list[Site]:
        """Embeddings and MLPs at every token, and the head components with the largest flows of each layer."""
        n, layers = self.flow.recording.lengths[self.prompt], self.flow.recording.model.n_layers
        found = [Site("embedding", dest=t) for t in range(n)]
        flows = self.flow.embedding()[self.prompt].tolist()
        mlps = [Site("mlp", layer, dest=t) for layer in range(layers) for t in range(n)]
        flows = flows[:n] + self.flow.mlps()[:, self.prompt, :n].flatten().tolist()
        self.known |= dict(zip(found + mlps, flows, strict=True))
        strongest = self.flow.strongest[self.prompt]
        self.known |= {site: moved + attends for site, (moved, attends) in strongest.items()}
        return list(self.known)

    def of(self, site: Site) -> float:
        """The flow of one component."""
        if site not in self.known:
            is_head = site.kind == "head"
            found = (
                self.flow.head_flow(self.prompt, site) if is_head else (self.flow.flow(self.prompt, site),)
            )
            self.known[site] = sum(found)
        return self.known[site]

    @torch.inference_mode()
    def edges(self, sites: Sequence[Site]) -> dict[EdgeKey, EdgeFlow]:
        """What flows between components and into the root; through queries and keys, by channel as well."""
        flow, prompt = self.flow, self.prompt
        model, writes = flow.recording.model, flow.differences(prompt, sites)
        parallel = model.architecture.parallel(model.config)
        dests = torch.tensor([site.dest or 0 for site in sites], device=writes.device)
        height = torch.tensor(
            [-1 if site.layer is None else site.layer for site in sites], device=writes.device
        )
        heads = torch.tensor([site.kind == "head" for site in sites], device=writes.device)
        found: dict[EdgeKey, EdgeFlow] = {}

        def keep(
            rows: Tensor, target: Site, side: Side, flows: Tensor, channels: Tensor | None = None
        ) -> None:
            by_channel = [None] * len(rows) if channels is None else channels.unbind()
            for row, value, parts in zip(rows.tolist(), flows.tolist(), by_channel, strict=True):
                if value != 0:
                    found[sites[row], target, side] = value, parts

        for read in flow.roots[prompt].residuals:
            rows = ((dests == read.position) & (height < read.layer)).nonzero()[:, 0]
            keep(rows, ROOT, "root", writes[rows] @ read.multiplier)
        for firing in flow.roots[prompt].patterns:
            if firing.site in sites:
                softmax, _ = flow.layers[firing.layer].row(prompt, firing.head, firing.dest)
                found[firing.site, ROOT, "root"] = float(softmax.difference[firing.src]), None
        for target in (site for site in sites if site.kind == "mlp"):
            layer = target.layer or 0
            below = (height < layer) | (heads & (height == layer) & (not parallel))
            rows = ((dests == target.dest) & below).nonzero()[:, 0]
            keep(rows, target, "input", writes[rows] @ flow.through_mlp[layer, prompt, target.dest or 0])
        for layer in sorted({site.layer or 0 for site in sites if site.kind == "head"}):
            rows = (height < layer).nonzero()[:, 0]
            if not len(rows):
                continue
            at = dests[rows]
            read = flow.layers[layer].forward_at(writes[rows], (torch.full_like(at, prompt), at))
            for target in (site for site in sites if site.kind == "head" and site.layer == layer):
                self._into_head(target, rows, at, read, keep)
        return found

    def _into_head(self, target: Site, rows: Tensor, at: Tensor, read: list[Tensor], keep: object) -> None:
        """What enters one head component: through its value, its query, and the key of every token that it sees."""
        assert callable(keep)
        flow, prompt = self.flow, self.prompt
        layer, head, dest, src = target.layer or 0, target.head or 0, target.dest or 0, target.src or 0
        kv = head // flow.recording.model.weights.group
        query, keys, seen = flow.of_scores(prompt, target)
        to_query, to_key = flow.bases(layer, head)
        mine = (at == src).nonzero()[:, 0]
        strength = flow.layers[layer].row(prompt, head, dest)[0].mean[src]
        keep(
            rows[mine], target, "value", strength * (read[2][mine, kv] @ flow.onto[layer][prompt, head, dest])
        )
        mine = (at == dest).nonzero()[:, 0]
        own = read[0][mine, head]
        first = first_of_group(flow.singular_values(layer, head))
        by_channel = summed((query @ to_key) * (own @ to_query), first[None])
        keep(rows[mine], target, "query", own @ query, by_channel)
        place = torch.full((flow.recording.token_ids.shape[1],), -1, device=at.device)
        place[seen] = torch.arange(len(seen), device=at.device)
        mine = (place[at] >= 0).nonzero()[:, 0]
        own, there = read[1][mine, kv], keys[place[at[mine]]]
        by_channel = summed((there @ to_query) * (own @ to_key), first[None])
        keep(rows[mine], target, "key", (own * there).sum(-1), by_channel)


# -- from flows to a circuit ---------------------------------------------------------------------------------


def trace_pairs(model: Model, pairs: Sequence[PromptPair], patterns: PatternsKept = "auto") -> list[PairFlow]:
    """Record pairs of prompts together, and sweep them."""
    last = max(len(pair.root.answer_prefix) for pair in pairs) + 1
    record: dict[str, Any] = {"last_logits": last, "keep": DIFFERENCE_FIELDS, "patterns": patterns}
    with model.assume_weights_unchanged():
        # The prompt of several pairs is recorded once, if it is one prompt.
        same = len({tuple(pair.ids) for pair in pairs}) == 1
        others = model.record([pair.other for pair in pairs], **record)
        clean = model.record([pair.ids for pair in pairs[: 1 if same else None]], **record)
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
    between = _strong(mean_edges(flows, kept) if kept else {}, least)
    if (
        kept and not between and len(kept) == budget.nodes
    ):  # too few for a path from the strongest to the root
        direct = mean_edges(flows, strong[:MOST_NODES])
        near = sorted((key for key in direct if key[1] == ROOT), key=lambda key: -abs(direct[key][0]))
        kept = [source for source, _, _ in near[: budget.nodes]]
        between = _strong(mean_edges(flows, kept) if kept else {}, least)
    sites = [ROOT, *(site for site in kept if any(site in key[:2] for key in between))]
    sites.sort(key=site_order)
    numbers = {site: i for i, site in enumerate(sites)}
    of_logits = edge_logits(flows, [source for source, target, _ in between if target == ROOT])
    channels = _channels(flows[0].flow, between)
    edges = tuple(
        Edge(
            numbers[source],
            numbers[target],
            side,
            flow,
            *channels.get((source, target, side), (None, None)),
            logits=of_logits.get(source) if side == "root" else None,
        )
        for (source, target, side), (flow, _) in between.items()
    )
    shown = sum(edge.weight for edge in edges if edge.side == "root") / change
    nodes = tuple(_node(site, number, flows, change, bool(edges)) for site, number in numbers.items())
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
    candidates = dict.fromkeys(site for each in flows for site in each.candidates())
    if len(flows) == 1:
        return {site: flows[0].of(site) for site in candidates}
    # Head components that are among the strongest of one pair only are looked up in the others if that can matter.
    known = {site: [each.known.get(site) for each in flows] for site in candidates}
    bound = {site: sum(abs(flow) for flow in some if flow is not None) for site, some in known.items()}
    strong = sorted(bound, key=lambda site: -bound[site])[: 4 * MOST_NODES]
    return {site: fmean(each.of(site) for each in flows) for site in strong}


def mean_edges(flows: Sequence[PairFlow], sites: Sequence[Site]) -> dict[EdgeKey, EdgeFlow]:
    """What flows between components and into the root, by channel as well: the mean over the pairs."""
    found = [each.edges(sites) for each in flows]
    if len(found) == 1:
        return found[0]
    between: dict[EdgeKey, EdgeFlow] = {}
    for key in dict.fromkeys(key for edges in found for key in edges):
        parts = [edges[key] for edges in found if key in edges]
        channels = [part for _, part in parts if part is not None]
        by_channel = torch.stack(channels).sum(0) / len(flows) if channels else None
        between[key] = sum(part for part, _ in parts) / len(flows), by_channel
    return between


def _strong(between: dict[EdgeKey, EdgeFlow], least: float) -> dict[EdgeKey, EdgeFlow]:
    """Edges of enough flow, and the strongest out of each node; those that lead to the root."""
    best: dict[Site, float] = {}
    for (source, _, _), (flow, _) in between.items():
        best[source] = max(best.get(source, 0.0), abs(flow))
    strong = {
        key: part for key, part in between.items() if abs(part[0]) >= least or abs(part[0]) == best[key[0]]
    }
    reached = reachable(ROOT, ((target, source) for source, target, _ in strong))
    return {key: part for key, part in strong.items() if key[1] in reached}


def _channels(
    whole: DifferenceFlow, between: Mapping[EdgeKey, EdgeFlow]
) -> dict[EdgeKey, tuple[tuple[int, ...], tuple[float, ...]]]:
    """Of each edge into a query or key: the channels that carry most of its flow, the largest first, and their flows.

    A channel stands for its group of equal ones, all of which are listed.
    """
    by_size: dict[int, list[EdgeKey]] = {}
    for key, (_, by_channel) in between.items():
        if by_channel is not None:
            by_size.setdefault(len(by_channel), []).append(key)
    first: dict[tuple[int, int], list[int]] = {}
    found: dict[EdgeKey, tuple[tuple[int, ...], tuple[float, ...]]] = {}
    for keys in by_size.values():
        flows = torch.stack([part for key in keys if (part := between[key][1]) is not None])
        sizes, order = flows.abs().sort(dim=1, descending=True, stable=True)
        running = sizes.cumsum(1)
        enough = ((running < CARRIED * running[:, -1:]).sum(1) + 1).clamp_max(MOST_CHANNELS)
        for key, best, n, mine in zip(keys, order.tolist(), enough.tolist(), flows.tolist(), strict=True):
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


def _node(site: Site, number: int, flows: Sequence[PairFlow], change: float, expanded: bool) -> Node:
    place = Node(number, site.kind, site.layer, site.head, site.dest, site.src)
    if site == ROOT:
        return replace(place, flow=change, influence=1.0, expanded=expanded)
    found = [each.of(site) for each in flows]
    flow = fmean(found)
    node = replace(
        place,
        flow=flow,
        influence=abs(flow / change),
        expanded=site.kind != "embedding",
        spread=None if len(found) == 1 else (min(found), max(found)),
    )
    if site.kind != "head":
        return node
    parts = [each.flow.head_flow(each.prompt, site) for each in flows]
    layer, head, dest, src = site.layer or 0, site.head or 0, site.dest or 0, site.src or 0
    attention, there = (
        fmean(float(run.attention.at(layer, each.prompt, head, dest, src)) for each, run in runs)
        for runs in (
            [(each, each.flow.recording) for each in flows],
            [(each, each.flow.other) for each in flows],
        )
    )
    return replace(
        node,
        moves=fmean(moved for moved, _ in parts),
        attends=fmean(attends for _, attends in parts),
        attention=attention,
        other_attention=there,
    )
