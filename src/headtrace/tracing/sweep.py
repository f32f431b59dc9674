"""The layer-by-layer sweep: from the seeds of a root down to the embeddings, all prompts together.

When a layer's turn comes, everything above it is traced, so the influence of its firings is final. The most influential
are expanded first, until the budget is spent; the others stay as leaves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from headtrace.tracing.firing import Cause, FiringCauses
from headtrace.tracing.roots import RootSeeds
from headtrace.tracing.upstream import LayerFirings
from headtrace.vocabulary import Component, Firing

if TYPE_CHECKING:
    from headtrace.models import Recording


@dataclass(frozen=True)
class Budget:
    """How far a circuit is followed. The share of influence that was kept is always in the result."""

    max_firings: int | None = 200
    """At most this many firings are expanded per prompt."""
    min_influence: float = 0.0
    """Firings with less influence than this are not expanded."""


UNLIMITED = Budget(None, 0.0)


class Method(Protocol):
    """A way to find the causes of firings. ACC++, ACC and SVT differ in nothing else."""

    name: str

    def threshold(self, visible_keys: int) -> float:
        """Attention that a firing needs to be traced at all."""
        ...

    def follows(self, firing: Firing, attention: float, visible_keys: int) -> bool:
        """Whether a firing is traced further."""
        ...

    def trace(self, recording: Recording, firings: LayerFirings) -> list[FiringCauses]:
        """Causes of many firings of one layer."""
        ...


@dataclass
class PromptTrace:
    """What a sweep found for one prompt."""

    root: RootSeeds
    causes: dict[Firing, FiringCauses] = field(default_factory=dict[Firing, FiringCauses])
    attention: dict[Firing, float] = field(default_factory=dict[Firing, float])
    thresholds: dict[Firing, float] = field(default_factory=dict[Firing, float])
    influence: dict[Firing, float] = field(default_factory=lambda: defaultdict[Firing, float](float))
    cut: list[Firing] = field(default_factory=list[Firing])
    """Firings that the budget left unexpanded."""

    @property
    def influence_kept(self) -> float:
        return max(0.0, 1.0 - sum(self.influence[firing] for firing in self.cut))


def upstream_firing(cause: Cause, position: int) -> Firing | None:
    """The firing behind a head component that sits at ``position``, if there is one to follow."""
    c = cause.component
    if c.kind != "head" or c.layer is None or c.head is None or c.src is None or c.src > position:
        return None
    return Firing(c.layer, c.head, position, c.src)


def shares_of(weights: list[float]) -> list[float]:
    """How influence divides: in proportion to positive weights."""
    positive = [max(0.0, weight) for weight in weights]
    total = sum(positive)
    return [weight / total if total > 0 else 0.0 for weight in positive]


def sweep(
    recording: Recording,
    roots: list[RootSeeds],
    method: Method,
    budget: Budget,
    on_layer: Callable[[int], None] | None = None,
) -> list[PromptTrace]:
    """Trace every prompt of a recording from its root down."""
    traces = [PromptTrace(root) for root in roots]
    pending: list[set[tuple[int, Firing]]] = [set() for _ in range(recording.model.n_layers)]
    for prompt, trace in enumerate(traces):
        _seed(trace, prompt, pending)
    for layer in range(recording.model.n_layers - 1, -1, -1):
        if on_layer is not None:
            on_layer(layer)
        chosen = _choose(recording, layer, pending[layer], traces, method, budget)
        if not chosen:
            continue
        rows = torch.tensor([(p, f.head, f.dest, f.src) for p, f in chosen], device=recording.model.device)
        for found in method.trace(recording, LayerFirings(layer, *rows.unbind(dim=1))):
            _spread(found, traces[found.prompt], pending)
    return traces


def _seed(trace: PromptTrace, prompt: int, pending: list[set[tuple[int, Firing]]]) -> None:
    """The root has influence 1 and shares it among its seeds."""
    seeds = trace.root.seeds
    for seed, share in zip(seeds, shares_of([s.weight for s in seeds]), strict=True):
        firing = upstream_firing(Cause(seed.component, (), seed.weight), trace.root.position)
        if firing is not None:
            trace.influence[firing] += share
            pending[firing.layer].add((prompt, firing))


def _choose(
    recording: Recording,
    layer: int,
    waiting: set[tuple[int, Firing]],
    traces: list[PromptTrace],
    method: Method,
    budget: Budget,
) -> list[tuple[int, Firing]]:
    """Firings of this layer to expand: those that the method follows, most influential first, within the budget."""
    order = sorted(waiting, key=lambda item: (item[0], -traces[item[0]].influence[item[1]], item[1]))
    if not order:
        return []
    rows = torch.tensor([(p, f.head, f.dest, f.src) for p, f in order], device=recording.model.device)
    prompt, head, dest, src = rows.unbind(dim=1)
    attention = recording.patterns[layer, prompt, head, dest, src].tolist()
    keys = recording.visible[layer][prompt, dest].sum(-1).tolist()
    chosen: list[tuple[int, Firing]] = []
    counts = [len(trace.causes) for trace in traces]
    for (p, firing), strength, visible in zip(order, attention, keys, strict=True):
        trace = traces[p]
        trace.attention[firing] = strength
        trace.thresholds[firing] = method.threshold(visible)
        if layer == 0 or firing.dest == 0 or not method.follows(firing, strength, visible):
            continue
        full = budget.max_firings is not None and counts[p] >= budget.max_firings
        if full or trace.influence[firing] < budget.min_influence:
            trace.cut.append(firing)
            continue
        counts[p] += 1
        chosen.append((p, firing))
    return chosen


def _spread(found: FiringCauses, trace: PromptTrace, pending: list[set[tuple[int, Firing]]]) -> None:
    """Pass a firing's influence on: half to each side, all to one if the other is empty."""
    trace.causes[found.firing] = found
    influence = trace.influence[found.firing]
    query = (found.firing.dest, in_graph(found.query.causes, found.firing.dest))
    key = (found.firing.src, in_graph(found.key.causes, found.firing.src))
    sides = [side for side in (query, key) if any(cause.weight > 0 for cause in side[1])]
    for position, causes in sides:
        for cause, share in zip(causes, shares_of([c.weight for c in causes]), strict=True):
            firing = upstream_firing(cause, position)
            if firing is not None:
                trace.influence[firing] += influence * share / len(sides)
                pending[firing.layer].add((found.prompt, firing))


def in_graph(causes: tuple[Cause, ...], position: int) -> list[Cause]:
    """Causes that are nodes of the circuit: all but heads that read a token after the position they are asked at."""
    return [c for c in causes if not is_elsewhere(c.component, position)]


def is_elsewhere(component: Component, position: int) -> bool:
    """A head component that, for causality's sake, cannot have written at this position."""
    return component.kind == "head" and component.src is not None and component.src > position
