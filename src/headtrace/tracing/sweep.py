"""The layer-by-layer sweep: from the seeds of a root down to the embeddings, all prompts together.

When a layer's turn comes, everything above it is traced, so the influence of its firings is final. The most influential
are expanded first, until the budget is spent; the others stay as leaves.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headtrace.circuits.influence import spread
from headtrace.tracing.causes import Cause, Causes, SideCauses
from headtrace.tracing.methods import Method
from headtrace.tracing.roots import Seeds
from headtrace.tracing.upstream import Composer, LayerFirings
from headtrace.vocabulary import ROOT, Side, Site

if TYPE_CHECKING:
    import torch

    from headtrace.models import Recording


@dataclass(frozen=True)
class Budget:
    """How far a circuit is followed. The share of influence that was kept is always in the result."""

    max_firings: int | None = 200
    """At most this many firings are expanded per prompt."""
    min_influence: float = 0.0
    """Firings with less influence than this are not expanded."""


@dataclass
class PromptTrace:
    """What a sweep found for one prompt."""

    seeds: Seeds
    causes: dict[Site, Causes] = field(default_factory=dict[Site, Causes])
    """The causes of everything that was expanded, the root among them."""
    attention: dict[Site, float] = field(default_factory=dict[Site, float])
    thresholds: dict[Site, float] = field(default_factory=dict[Site, float])
    influence: dict[Site, float] = field(default_factory=lambda: defaultdict[Site, float](float))
    cut: list[Site] = field(default_factory=list[Site])
    """Firings that the budget left unexpanded."""

    @property
    def influence_kept(self) -> float:
        return max(0.0, 1.0 - sum(self.influence[site] for site in self.cut))


Pending = list[set[tuple[int, Site]]]
"""Per layer, the firings that something rests on: prompt and site."""


def sweep(
    recording: Recording, roots: list[Seeds], method: Method, budget: Budget, composer: Composer
) -> list[PromptTrace]:
    """Trace every prompt of a recording from its root down."""
    traces = [PromptTrace(root) for root in roots]
    pending: Pending = [set() for _ in range(recording.model.n_layers)]
    for prompt, trace in enumerate(traces):
        trace.influence[ROOT] = 1.0
        _follow(Causes(prompt, ROOT, {"root": SideCauses(trace.seeds.causes)}), trace, pending)
    for layer in range(recording.model.n_layers - 1, -1, -1):
        chosen = _choose(recording, layer, pending[layer], traces, method, budget)
        if chosen:
            firings = LayerFirings.of(layer, chosen, recording.model.device)
            for found in method.trace(recording, firings, composer):
                _follow(found, traces[found.prompt], pending)
    return traces


def _follow(found: Causes, trace: PromptTrace, pending: Pending) -> None:
    """Pass influence on to the causes of a site; firings among them wait for their layer's turn."""
    trace.causes[found.site] = found
    causes: list[tuple[Side, Cause]] = [
        (side, cause) for side, part in found.sides.items() for cause in part.in_graph
    ]
    shares = spread([(side, cause.weight) for side, cause in causes])
    whole = trace.influence[found.site]
    for (_, cause), share in zip(causes, shares, strict=True):
        trace.influence[cause.site] += whole * share
        if cause.site.kind == "head":
            pending[cause.site.layer or 0].add((found.prompt, cause.site))


def _choose(
    recording: Recording,
    layer: int,
    waiting: set[tuple[int, Site]],
    traces: list[PromptTrace],
    method: Method,
    budget: Budget,
) -> list[tuple[int, Site]]:
    """Firings of this layer to expand: those that the method follows, most influential first, within the budget."""
    if not waiting:
        return []
    order = sorted(waiting, key=lambda item: (item[0], -traces[item[0]].influence[item[1]], item[1]))
    rows = LayerFirings.of(layer, order, recording.model.device)
    attention: torch.Tensor = recording.patterns[layer, rows.prompt, rows.head, rows.dest, rows.src]
    keys = recording.visible[layer][rows.prompt, rows.dest].sum(-1)
    counts = [len(trace.causes) - 1 for trace in traces]
    chosen: list[tuple[int, Site]] = []
    for (p, site), strength, visible in zip(order, attention.tolist(), keys.tolist(), strict=True):
        trace = traces[p]
        trace.attention[site], trace.thresholds[site] = strength, method.threshold(visible)
        if layer == 0 or site.dest == 0 or not method.follows(site.firing, strength, visible):
            continue
        full = budget.max_firings is not None and counts[p] >= budget.max_firings
        if full or trace.influence[site] < budget.min_influence:
            trace.cut.append(site)
            continue
        counts[p] += 1
        chosen.append((p, site))
    return chosen
