"""The sweep: from the seeds of a root down to the embeddings, layer by layer, all prompts together.

Once everything above a layer has been traced, the influence of its firings is final. The most influential are expanded
first, until the budget is spent; the others stay as leaves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from headtrace.circuits.graph import spread
from headtrace.errors import HeadtraceError
from headtrace.progress import Progress, counting
from headtrace.tracing.attribute_root import Seeds
from headtrace.tracing.causes import Cause, Causes, PromptSite, SideCauses
from headtrace.tracing.components import Firings
from headtrace.tracing.methods import Method
from headtrace.tracing.readings import Composer
from headtrace.vocabulary import ROOT, Side, Site

if TYPE_CHECKING:
    from headtrace.circuits import Neuron
    from headtrace.models import Recording
    from headtrace.tracing.mlp_causes import MlpSignalCauses


@dataclass(frozen=True)
class Budget:
    """The limits of a trace: how many firings are expanded, and the least influence followed. The share of
    influence that was kept is always in the result."""

    max_firings: int | None = 200
    """At most this many firings are expanded per prompt."""
    min_influence: float = 0.0
    """Firings with less influence than this are not expanded."""


@dataclass
class PromptTrace:
    """What a sweep found for one prompt."""

    seeds: Seeds
    causes: dict[Site, Causes] = field(default_factory=dict[Site, Causes])
    """The causes of everything that was expanded, including the root."""
    attention: dict[Site, float] = field(default_factory=dict[Site, float])
    thresholds: dict[Site, float] = field(default_factory=dict[Site, float])
    groups: dict[Site, tuple[int, ...]] = field(default_factory=dict[Site, tuple[int, ...]])
    """The sources of firings that were explained together with others."""
    alone: dict[Site, dict[tuple[Side, Site], Cause]] = field(
        default_factory=dict["Site", "dict[tuple[Side, Site], Cause]"]
    )
    """By side and site, signals that matter to firings by themselves though the prediction does not show it: what keeps
    them from attending far more (with a negative weight), and what carries one firing of a group."""
    influence: dict[Site, float] = field(default_factory=lambda: defaultdict[Site, float](float))
    cut: list[Site] = field(default_factory=list[Site])
    """Firings that the budget left unexpanded."""
    contributions: dict[Site, float] = field(default_factory=dict[Site, float])
    """What sites contribute to the root, if content was followed."""
    tokens: tuple[float, ...] | None = None
    """What each token's embedding contributes, if content was followed."""
    shares: dict[tuple[Site, Site], float] = field(default_factory=dict["tuple[Site, Site]", float])
    """By source and target: what passes through a value or the input of an MLP, in the unit of the root."""
    neurons: dict[Site, tuple[Neuron, ...]] = field(default_factory=dict["Site", "tuple[Neuron, ...]"])
    """The strongest hidden units of MLPs, if they were requested."""
    mlp_signals: dict[tuple[Site, Site, Side], MlpSignalCauses] = field(
        default_factory=dict["tuple[Site, Site, Side]", "MlpSignalCauses"]
    )
    """By the MLP, the firing and the side: the causes of a signal that an MLP wrote."""

    @property
    def expanded(self) -> int:
        """How many firings have been expanded."""
        return len(self.causes) - 1

    @property
    def influence_kept(self) -> float:
        """The share of influence that was followed to its end: not what the budget cut off, nor what the biases of
        MLPs hold."""
        held = [s for s in self.influence if s.kind == "offset" and s.layer is not None and s.head is None]
        return max(0.0, 1.0 - sum(self.influence[site] for site in (*self.cut, *held)))

    def follow(self, found: Causes) -> list[tuple[Side, Cause, float]]:
        """Pass the influence of a site on to its causes: side, cause and influence of each that is in the graph."""
        self.causes[found.site] = found
        causes: list[tuple[Side, Cause]] = [
            (side, cause) for side, part in found.sides.items() for cause in part.in_graph
        ]
        shares = spread([(side, cause.weight) for side, cause in causes])
        whole = self.influence[found.site]
        passed: list[tuple[Side, Cause, float]] = [
            (side, cause, whole * share) for (side, cause), share in zip(causes, shares, strict=True)
        ]
        for _, cause, influence in passed:
            self.influence[cause.site] += influence
        return passed

    def choose(
        self,
        sites: Iterable[Site],
        budget: Budget,
        expanded: int,
        strengths: Mapping[Site, float] | None = None,
    ) -> list[Site]:
        """Sites to expand after ``expanded`` others: the strongest within the budget, by influence unless another
        strength is given; the others are cut."""
        by = self.influence if strengths is None else strengths
        chosen: list[Site] = []
        for site in sorted(sites, key=lambda site: (-by[site], site)):
            full = budget.max_firings is not None and expanded + len(chosen) >= budget.max_firings
            cut = full or by[site] < budget.min_influence
            (self.cut if cut else chosen).append(site)
        return chosen


OnPartial = Callable[[list[PromptTrace]], None]
"""Called with what has been found so far while more is being traced."""


def attention_at(recording: Recording, sites: Sequence[PromptSite]) -> list[tuple[float, int]]:
    """The attention of firings, and the number of keys visible to each."""
    if not sites:
        return []
    f = Firings.of(sites, recording.model.device)
    strength = recording.attention.at(f.layer, f.prompt, f.head, f.dest, f.src)
    keys = recording.visible_keys[f.layer, f.prompt, f.dest]
    strengths, counts = torch.stack((strength, keys.to(strength))).tolist()  # one request for both
    return list(zip(strengths, map(int, counts), strict=True))


def sweep(
    recording: Recording,
    roots: list[Seeds],
    method: Method,
    budget: Budget,
    composer: Composer,
    progress: Progress | None = None,
    on_partial: OnPartial | None = None,
) -> list[PromptTrace]:
    """Trace every prompt of a recording from its root down.

    ``progress`` counts firings, out of as many as are known to be needed so far. ``on_partial`` is called before every
    wave of firings with what is known, as if the rest were not followed.
    """
    return AttentionSweep(recording, roots, method, budget, composer).run(progress, on_partial)


@dataclass
class AttentionSweep:
    """Traces firings in waves: all that are known to be needed, of every layer and prompt, together.

    As long as a prompt's budget is not spent, every firing that is reached is needed. After that, a pass from the top
    down decides which.
    """

    recording: Recording
    roots: list[Seeds]
    method: Method
    budget: Budget
    composer: Composer
    causes: dict[PromptSite, Causes] = field(default_factory=dict[PromptSite, Causes])
    """What has been traced so far."""
    attention: dict[PromptSite, tuple[float, int]] = field(
        default_factory=dict[PromptSite, tuple[float, int]]
    )
    """Of every firing that was reached: its attention, and the number of visible keys."""

    def run(self, progress: Progress | None, on_partial: OnPartial | None) -> list[PromptTrace]:
        seeds = [Causes(p, ROOT, {"root": SideCauses(root.causes)}) for p, root in enumerate(self.roots)]
        new = self._add(seeds)
        # Prompts of which every firing is needed, whatever its influence.
        free = set(range(len(self.roots))) if self.budget.min_influence <= 0 else set[int]()
        while True:
            if on_partial is not None:
                on_partial(self._descend_all()[0])
            needed = [site for site in new if site[0] in free and self._followed(site)]
            if self.budget.max_firings is not None:
                counts = Counter(prompt for prompt, _ in (*self.causes, *needed))
                free -= {prompt for prompt in free if counts[prompt] - 1 > self.budget.max_firings}
                needed = [site for site in needed if site[0] in free]
            if not needed:
                traces, needed = self._descend_all()
                if not needed:
                    return traces
            new = self._trace(needed, progress, all_free=len(free) == len(self.roots))

    def _add(self, found: Iterable[Causes]) -> list[PromptSite]:
        """Keep causes, and read the attention of all firings among them at once; those that are new."""
        new: dict[PromptSite, None] = {}
        for causes in found:
            self.causes[causes.prompt, causes.site] = causes
            heads = (c.site for side in causes.sides.values() for c in side.in_graph if c.site.kind == "head")
            new |= {(causes.prompt, s): None for s in heads if (causes.prompt, s) not in self.attention}
        self.attention |= dict(zip(new, attention_at(self.recording, list(new)), strict=True))
        return list(new)

    def _followed(self, firing: PromptSite) -> bool:
        """Whether a firing is traced at all, whatever the budget."""
        site, (attention, visible) = firing[1], self.attention[firing]
        return visible > 1 and self.method.follows(site.firing, attention, visible)

    def _trace(self, needed: list[PromptSite], progress: Progress | None, all_free: bool) -> list[PromptSite]:
        """Trace a wave of firings; the firings that it reaches for the first time."""
        done = len(self.causes) - len(self.roots)
        limit = 0 if all_free else (self.budget.max_firings or 0) * len(self.roots)
        firings = Firings.of(needed, self.recording.model.device)
        with _reported(progress, done, max(done + len(needed), limit)):
            new = self._add(self.method.trace(self.recording, firings, self.composer))
        missing = [site for prompt, site in needed if (prompt, site) not in self.causes]
        if missing:  # tracing it again would never end
            raise HeadtraceError(
                f"The method {self.method.name!r} gave nothing for {missing[0]} ({len(missing)} of {len(needed)} "
                "firings). A method must return Causes, if need be empty ones, for every firing that it is given."
            )
        return new

    def _descend_all(self) -> tuple[list[PromptTrace], list[PromptSite]]:
        """Every prompt from its root down as far as it has been traced; the firings that are needed next."""
        traces = [PromptTrace(root) for root in self.roots]
        return traces, [site for prompt, trace in enumerate(traces) for site in self._descend(prompt, trace)]

    def _descend(self, prompt: int, trace: PromptTrace) -> list[PromptSite]:
        """One pass over one prompt; the firings that it would expand and that are not traced yet."""
        trace.influence[ROOT] = 1.0
        waiting: dict[int, set[Site]] = {}  # firings by layer
        needed: list[PromptSite] = []

        def follow(found: Causes) -> None:
            for _, cause, _ in trace.follow(found):
                if cause.site.kind == "head":
                    waiting.setdefault(cause.site.layer or 0, set()).add(cause.site)

        follow(self.causes[prompt, ROOT])
        while waiting:
            sites = waiting.pop(max(waiting))
            for site in sites:
                attention, keys = self.attention[prompt, site]
                trace.attention[site], trace.thresholds[site] = attention, self.method.threshold(keys)
            followed = [site for site in sites if self._followed((prompt, site))]
            for site in trace.choose(followed, self.budget, trace.expanded + len(needed)):
                if (prompt, site) in self.causes:
                    follow(self.causes[prompt, site])
                else:
                    needed.append((prompt, site))
        if (
            trace.cut and needed
        ):  # the rest of the budget depends on what these lead to: the highest layer first
            highest = needed[0][1].layer
            return [site for site in needed if site[1].layer == highest]
        return needed


@contextmanager
def _reported(progress: Progress | None, done: int, total: int) -> Generator[None]:
    """Report the firings of a wave as they are traced."""
    if progress is None:
        yield
        return
    progress(done, total)

    def traced(firings: int) -> None:
        nonlocal done
        done = min(done + firings, total)
        progress(done, total)

    with counting(traced):
        yield
