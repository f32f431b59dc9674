"""The sweep: from the seeds of a root down to the embeddings, layer by layer, all prompts together.

When a layer's turn comes, everything above it is traced, so the influence of its firings is final. The most influential
are expanded first, until the budget is spent; the others stay as leaves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headtrace.circuits.graph import spread
from headtrace.errors import HeadtraceError
from headtrace.progress import Progress, counting
from headtrace.tracing.attribute_root import Seeds
from headtrace.tracing.causes import Cause, Causes, SideCauses
from headtrace.tracing.components import Firings
from headtrace.tracing.methods import Method
from headtrace.tracing.readings import Composer
from headtrace.vocabulary import ROOT, Side, Site

if TYPE_CHECKING:
    from headtrace.circuits import Neuron
    from headtrace.models import Recording
    from headtrace.tracing.through_mlps import Passage


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
    contributions: dict[Site, float] = field(default_factory=dict[Site, float])
    """What sites contribute to the root, where content was followed."""
    tokens: tuple[float, ...] | None = None
    """What each token's embedding contributes, where content was followed."""
    shares: dict[tuple[Site, Site], float] = field(default_factory=dict["tuple[Site, Site]", float])
    """By source and target: what passes through a value or the input of an MLP, in the unit of the root."""
    neurons: dict[Site, tuple[Neuron, ...]] = field(default_factory=dict["Site", "tuple[Neuron, ...]"])
    """The strongest hidden units of MLPs, where they were asked for."""
    passages: dict[tuple[Site, Site, Side], Passage] = field(
        default_factory=dict["tuple[Site, Site, Side]", "Passage"]
    )
    """By the MLP, the firing and the side: what holds up a signal that an MLP wrote."""

    @property
    def expanded(self) -> int:
        """How many firings have been expanded."""
        return len(self.causes) - 1

    @property
    def influence_kept(self) -> float:
        return max(0.0, 1.0 - sum(self.influence[site] for site in self.cut))


Grown = Callable[[list[PromptTrace]], None]
"""Shown what has been found while more is being traced."""

Place = tuple[int, Site]
"""A site of a prompt."""


def attention_at(recording: Recording, places: Sequence[Place]) -> list[tuple[float, int]]:
    """The attention of firings, and how many keys each of them chooses among."""
    if not places:
        return []
    f = Firings.of(places, recording.model.device)
    strength = recording.attention.at(f.layer, f.prompt, f.head, f.dest, f.src).tolist()
    keys = recording.visible_keys[f.layer, f.prompt, f.dest].tolist()
    return list(zip(strength, keys, strict=True))


@dataclass
class Known:
    """What has been traced so far, and what every firing that was met needs to be chosen."""

    causes: dict[Place, Causes] = field(default_factory=dict[Place, Causes])
    attention: dict[Place, tuple[float, int]] = field(default_factory=dict[Place, tuple[float, int]])
    """Attention, and the number of visible keys."""

    def look_at(self, recording: Recording, found: Iterable[Causes]) -> list[Place]:
        """Keep causes, and read the attention of all firings among them at once; those that are met first."""
        new: dict[Place, None] = {}
        for causes in found:
            self.causes[causes.prompt, causes.site] = causes
            heads = (c.site for side in causes.sides.values() for c in side.in_graph if c.site.kind == "head")
            new |= {(causes.prompt, s): None for s in heads if (causes.prompt, s) not in self.attention}
        self.attention |= dict(zip(new, attention_at(recording, list(new)), strict=True))
        return list(new)

    def followed(self, place: Place, method: Method) -> bool:
        """Whether a firing is traced at all, whatever the budget."""
        _, site = place
        return site.layer != 0 and site.dest != 0 and method.follows(site.firing, *self.attention[place])


def sweep(
    recording: Recording,
    roots: list[Seeds],
    method: Method,
    budget: Budget,
    composer: Composer,
    progress: Progress | None = None,
    grown: Grown | None = None,
) -> list[PromptTrace]:
    """Trace every prompt of a recording from its root down.

    Firings are traced in waves: all that are known to be needed, of every layer and prompt, together. As long as the
    budget is not spent, every firing that is met is needed; beyond that, a pass from the top down says which.
    ``progress`` hears of firings, of as many as are known to be needed by then; ``grown`` is shown before every wave
    what is known by then, as if the rest were not followed.
    """
    known = Known()
    seeds = [Causes(p, ROOT, {"root": SideCauses(root.causes)}) for p, root in enumerate(roots)]
    met = known.look_at(recording, seeds)
    free = set(range(len(roots))) if budget.min_influence <= 0 else set[int]()
    while True:
        if grown is not None:
            grown(_so_far(roots, known, method, budget))
        needed = [place for place in met if place[0] in free and known.followed(place, method)]
        if budget.max_firings is not None:
            asked = Counter(prompt for prompt, _ in (*known.causes, *needed))
            free -= {prompt for prompt in free if asked[prompt] - 1 > budget.max_firings}
            needed = [place for place in needed if place[0] in free]
        traces = [PromptTrace(root) for root in roots]
        if not needed:
            needed = [place for p, t in enumerate(traces) for place in _descend(p, t, known, method, budget)]
        if not needed:
            return traces
        firings = Firings.of(needed, recording.model.device)
        done = len(known.causes) - len(roots)
        limit = 0 if len(free) == len(roots) else (budget.max_firings or 0) * len(roots)
        with _told(progress, done, max(done + len(needed), limit)):
            met = known.look_at(recording, method.trace(recording, firings, composer))
        missing = [site for prompt, site in needed if (prompt, site) not in known.causes]
        if missing:  # asked again, it would be left out again
            raise HeadtraceError(
                f"The method {method.name!r} gave nothing for {missing[0]} ({len(missing)} of {len(needed)} firings). "
                "A method must return Causes, if need be empty ones, for every firing that it is asked about."
            )


def _so_far(roots: list[Seeds], known: Known, method: Method, budget: Budget) -> list[PromptTrace]:
    """Every prompt from its root down, as far as it has been traced."""
    traces = [PromptTrace(root) for root in roots]
    for prompt, trace in enumerate(traces):
        _descend(prompt, trace, known, method, budget)
    return traces


@contextmanager
def _told(progress: Progress | None, done: int, of_all: int) -> Generator[None]:
    """Report every chunk of a wave of firings."""
    if progress is None:
        yield
        return
    progress(done, of_all)

    def heard(pieces: int) -> None:
        nonlocal done
        done = min(done + pieces, of_all)
        progress(done, of_all)

    with counting(heard):
        yield


def _descend(prompt: int, trace: PromptTrace, known: Known, method: Method, budget: Budget) -> list[Place]:
    """One pass over one prompt, from the root down; the firings that it would expand and that are not traced yet."""
    trace.influence[ROOT] = 1.0
    waiting: dict[int, set[Site]] = {}
    _follow(known.causes[prompt, ROOT], trace, waiting)
    needed: list[Place] = []
    while waiting:
        layer = max(waiting)
        spent = trace.expanded + len(needed)
        for site in _choose(prompt, waiting.pop(layer), spent, trace, known, method, budget):
            if (prompt, site) in known.causes:
                _follow(known.causes[prompt, site], trace, waiting)
            else:
                needed.append((prompt, site))
    if trace.cut and needed:  # the budget may go to what is not known yet: no further than the highest layer
        highest = needed[0][1].layer
        return [place for place in needed if place[1].layer == highest]
    return needed


def _follow(found: Causes, trace: PromptTrace, waiting: dict[int, set[Site]]) -> None:
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
            waiting.setdefault(cause.site.layer or 0, set()).add(cause.site)


def _choose(
    prompt: int,
    waiting: set[Site],
    spent: int,
    trace: PromptTrace,
    known: Known,
    method: Method,
    budget: Budget,
) -> list[Site]:
    """Firings of this layer to expand: those that the method follows, most influential first, within the budget."""
    chosen: list[Site] = []
    for site in sorted(waiting, key=lambda site: (-trace.influence[site], site)):
        strength, visible = known.attention[prompt, site]
        trace.attention[site], trace.thresholds[site] = strength, method.threshold(visible)
        if not known.followed((prompt, site), method):
            continue
        full = budget.max_firings is not None and spent + len(chosen) >= budget.max_firings
        if full or trace.influence[site] < budget.min_influence:
            trace.cut.append(site)
            continue
        chosen.append(site)
    return chosen
