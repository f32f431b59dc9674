"""What flows between the components of a difference circuit, into the root, and through each channel of a head.

The flow between two components is one product: what the first writes differently, along the multiplier with which the
second reads it. All targets of a layer are computed together; channels only for the edges that are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.channels.sparsity import first_of_group, summed
from headtrace.circuits.graph import reachable
from headtrace.vocabulary import ROOT, SIDES, Side, Site

if TYPE_CHECKING:
    from headtrace.tracing.component_flow import DifferenceFlow, ScoreMultipliers
    from headtrace.tracing.difference_circuit import PairFlow

EdgeKey = tuple[Site, Site, Side]
"""Source, target and side of an edge."""


@dataclass(frozen=True)
class EdgeFlows:
    """What flows between components and into the root: the mean over some pairs of runs."""

    sites: Sequence[Site]
    pairs: Sequence[_PairEdges]
    flows: Float[Tensor, "target_or_root side source"]
    """In float64. The last target is the root; sides in the order of `headtrace.vocabulary.SIDES`."""

    def every(self) -> dict[EdgeKey, float]:
        """The flow of every edge through which something flows."""
        return self._where(self.flows != 0)

    def strong(self, least: float) -> dict[EdgeKey, float]:
        """Edges with a flow of at least ``least``, and the strongest out of each node; those that lead to the root."""
        sizes = self.flows.abs()
        strong = self._where((sizes > 0) & ((sizes >= least) | (sizes == sizes.amax((0, 1)))))
        reached = reachable(ROOT, ((target, source) for source, target, _ in strong))
        return {key: flow for key, flow in strong.items() if key[1] in reached}

    def by_channel(self, keys: Iterable[EdgeKey]) -> dict[EdgeKey, Float[Tensor, " channel"]]:
        """The flow through each channel, of those edges that enter a query or a key.

        Channels of equal singular values are one: their sum stands at the first of them.
        """
        wanted = [key for key in keys if key[2] in ("query", "key")]
        found = [pair.by_channel(wanted) for pair in self.pairs]
        return {key: torch.stack([each[key] for each in found]).mean(0) for key in wanted}

    def _where(self, chosen: Bool[Tensor, "target_or_root side source"]) -> dict[EdgeKey, float]:
        """Chosen edges: those of the root, of the MLPs, and of the heads, layer by layer."""
        order = sorted(range(len(self.sites)), key=lambda i: (self.sites[i].kind == "head", self._layer(i)))
        targets = torch.tensor([len(self.sites), *order], device=chosen.device)
        sides = torch.tensor([SIDES.index(side) for side in _IN_ORDER], device=chosen.device)
        chosen, flows = (x[targets][:, sides] for x in (chosen, self.flows))
        ends = [ROOT, *(self.sites[i] for i in order)]
        return {
            (self.sites[source], ends[target], _IN_ORDER[side]): flow
            for (target, side, source), flow in zip(
                chosen.nonzero().tolist(), flows[chosen].tolist(), strict=True
            )
        }

    def _layer(self, number: int) -> int:
        site = self.sites[number]
        return site.layer or 0 if site.kind == "head" else 0


_IN_ORDER: tuple[Side, ...] = ("root", "input", "value", "query", "key")


def mean_edges(flows: Sequence[PairFlow], sites: Sequence[Site]) -> EdgeFlows:
    """What flows between some components, and from them into the root."""
    with torch.inference_mode():
        found = [_PairEdges.of(each.flow, each.prompt, sites) for each in flows]
        return EdgeFlows(sites, found, torch.stack([each.flows for each in found]).mean(0))


@dataclass(frozen=True)
class _IntoHeads:
    """What the head components of one layer read of the components below it."""

    targets: Sequence[Site]
    sources: Int[Tensor, " source"]
    """Their numbers among all components."""
    queries: Float[Tensor, "source head d_head"]
    """What the query and the key of each head take from each component."""
    keys: Float[Tensor, "source kv_head d_head"]
    scores: ScoreMultipliers


@dataclass(frozen=True)
class _PairEdges:
    """The flows of one pair of runs."""

    flow: DifferenceFlow
    sites: Sequence[Site]
    dests: Int[Tensor, " site"]
    flows: Float[Tensor, "target_or_root side source"]
    layers: dict[int, _IntoHeads]

    @classmethod
    def of(cls, flow: DifferenceFlow, prompt: int, sites: Sequence[Site]) -> _PairEdges:
        model, writes = flow.recording.model, flow.differences(prompt, sites)
        parallel = model.architecture.parallel(model.config)
        device, n = writes.device, len(sites)
        dests = torch.tensor([site.dest or 0 for site in sites], device=device)
        height = torch.tensor([-1 if site.layer is None else site.layer for site in sites], device=device)
        heads = torch.tensor([site.kind == "head" for site in sites], device=device)
        flows = torch.zeros(n + 1, len(SIDES), n, dtype=torch.float64, device=device)

        root = flows[n, SIDES.index("root")]
        for read in flow.roots[prompt].residuals:
            below = (dests == read.position) & (height < read.layer)
            root[below] = (writes[below] @ read.multiplier).double()
        numbers = {site: number for number, site in enumerate(sites)}
        for firing in flow.roots[prompt].patterns:
            if firing.site in numbers:
                softmax, _ = flow.layers[firing.layer].row(prompt, firing.head, firing.dest)
                root[numbers[firing.site]] = softmax.difference[firing.src].double()

        mlps = [number for number, site in enumerate(sites) if site.kind == "mlp"]
        if mlps:
            at, layer = dests[mlps], height[mlps]
            below = (height < layer[:, None]) | (heads & (height == layer[:, None]) & (not parallel))
            into = flow.through_mlp[layer, prompt, at] @ writes.T
            reached = below & (dests == at[:, None])
            flows[mlps, SIDES.index("input")] = torch.where(reached, into, 0.0).double()

        layers: dict[int, _IntoHeads] = {}
        for layer in sorted({site.layer or 0 for site in sites if site.kind == "head"}):
            sources = (height < layer).nonzero()[:, 0]
            if len(sources):
                targets = (heads & (height == layer)).nonzero()[:, 0]
                at = dests[sources]
                read = flow.layers[layer].forward_at(writes[sources], (torch.full_like(at, prompt), at))
                into, found = _into_heads(flow, prompt, [sites[i] for i in targets.tolist()], at, read)
                for side, amounts in into.items():
                    flows[targets[:, None], SIDES.index(side), sources] = amounts.double()
                layers[layer] = _IntoHeads(found[0], sources, read[0], read[1], found[1])
        return cls(flow, sites, dests, flows, layers)

    def by_channel(self, keys: Sequence[EdgeKey]) -> dict[EdgeKey, Float[Tensor, " channel"]]:
        """What flows through each channel of the targets of some edges."""
        numbers = {site: number for number, site in enumerate(self.sites)}
        of_layer: dict[int, list[EdgeKey]] = {}
        for key in keys:
            of_layer.setdefault(key[1].layer or 0, []).append(key)
        found: dict[EdgeKey, Tensor] = {}
        group = self.flow.recording.model.weights.group
        for layer, mine in of_layer.items():
            into = self.layers[layer]
            device = into.sources.device
            rows = torch.full((len(self.sites),), -1, device=device)
            rows[into.sources] = torch.arange(len(into.sources), device=device)
            place = {site: number for number, site in enumerate(into.targets)}
            for side in ("query", "key"):
                some = [key for key in mine if key[2] == side]
                if not some:
                    continue
                source = torch.tensor([numbers[key[0]] for key in some], device=device)
                target = torch.tensor([place[key[1]] for key in some], device=device)
                head = torch.tensor([key[1].head or 0 for key in some], device=device)
                # A channel is a product of what query and key have in it: one factor flows in, the other is the
                # multiplier of the side that it flows into.
                to_query, to_key = self.flow.bases(layer, head)
                if side == "query":
                    own, g = into.queries[rows[source], head], into.scores.query[target]
                    own, g = _onto(own, to_query), _onto(g, to_key)
                else:
                    own = into.keys[rows[source], head // group]
                    g = into.scores.logits[target, self.dests[source], None] * into.scores.queries[target]
                    own, g = _onto(own, to_key), _onto(g, to_query)
                first = first_of_group(self.flow.singular_values(layer, head))
                found |= dict(zip(some, summed(own * g, first), strict=True))
        return found


def _into_heads(
    flow: DifferenceFlow,
    prompt: int,
    targets: Sequence[Site],
    at: Int[Tensor, " source"],
    read: Sequence[Tensor],
) -> tuple[dict[Side, Float[Tensor, "target source"]], tuple[Sequence[Site], ScoreMultipliers]]:
    """What enters head components of one layer: through the value, the query, and the key of every token they see.

    ``at``: where each source writes; ``read``: what queries, keys and values take from it.
    """
    layer, group = targets[0].layer or 0, flow.recording.model.weights.group
    head, dest, src = (
        torch.tensor([getattr(site, name) or 0 for site in targets], device=at.device)
        for name in ("head", "dest", "src")
    )
    scores = flow.score_multipliers(prompt, targets)
    number = torch.arange(len(targets), device=at.device)
    onto = flow.onto[layer][prompt, head, dest] * scores.mean[number, src, None]
    value = torch.einsum("str,tr->ts", read[2][:, head // group], onto)
    query = torch.einsum("str,tr->ts", read[0][:, head], scores.query)
    key = torch.einsum("str,tr->ts", read[1][:, head // group], scores.queries) * scores.logits[:, at]
    sides: dict[Side, Tensor] = {
        "value": torch.where(at == src[:, None], value, 0.0),
        "query": torch.where(at == dest[:, None], query, 0.0),
        "key": key,  # the multiplier of a key that is not seen is zero
    }
    return sides, (targets, scores)


def _onto(x: Float[Tensor, "edge d_head"], basis: Float[Tensor, "edge d_head channel"]) -> Tensor:
    """Coefficients in the channels of each edge's own head."""
    return (x[:, None] @ basis)[:, 0]
