"""Content and complete circuits: from the root down, level by level, all prompts together.

A level is one layer's MLPs, or one layer's heads. When its turn comes, everything above it has been expanded, so the
influence of its nodes is final. A node is wanted for what it contributes to the root (content), and for the signals
that it writes into the queries and keys of heads above it (``paths="complete"``); each want is a direction of what it
writes. Their sum, weighted by influence, is what the node's own causes are asked about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from headtrace.circuits.influence import spread
from headtrace.models.frozen import FrozenMLP
from headtrace.tracing.along import Place
from headtrace.tracing.causes import Cause, Causes, SideCauses
from headtrace.tracing.content import Content, Strongest
from headtrace.tracing.methods import Method
from headtrace.tracing.roots import Seeds
from headtrace.tracing.signals import Signal, signals_of
from headtrace.tracing.sweep import Budget, PromptTrace
from headtrace.tracing.through_mlps import Passage, through_mlps
from headtrace.tracing.upstream import Composer, Firings
from headtrace.vocabulary import ATTENTION_SIDES, ROOT, Side, Site

if TYPE_CHECKING:
    from headtrace.models import Recording

Paths = Literal["attention", "content", "complete"]
CONTENT_INFLUENCE = 0.02
"""By default a node of a content or complete circuit has at least this share of the root's whole."""


@dataclass
class _Want:
    """What a node is wanted for: its share of the root's content, and signals, each with its influence."""

    content: float = 0.0
    attending: float = 0.0
    """For nothing that it moved: a head that is the root itself."""
    signals: list[tuple[float, Signal]] = field(default_factory=list[tuple[float, Signal]])

    @property
    def moved(self) -> float:
        """The influence of all that it moved."""
        return self.influence - self.attending

    @property
    def influence(self) -> float:
        return self.content + self.attending + sum(share for share, _ in self.signals)


@dataclass
class _Prompt:
    """The state of one prompt's sweep."""

    trace: PromptTrace
    wants: dict[Site, _Want] = field(default_factory=lambda: defaultdict[Site, _Want](_Want))
    scores: dict[Site, float] = field(default_factory=dict[Site, float])

    def level(self, layer: int, kind: str) -> list[Site]:
        return [site for site in self.wants if site.layer == layer and site.kind == kind]


class CompleteSweep:
    """Traces the prompts of a recording from their roots down, through values, MLPs and (complete) attention."""

    def __init__(
        self,
        recording: Recording,
        roots: Sequence[Seeds],
        content: Content,
        method: Method,
        budget: Budget,
        composer: Composer,
        paths: Paths,
    ) -> None:
        self.recording, self.content = recording, content
        self.method, self.budget, self.composer = method, budget, composer
        self.attention = paths == "complete"
        model = recording.model
        self.behind = not model.architecture.parallel(model.hf.config)
        self.prompts = [_Prompt(PromptTrace(root)) for root in roots]

    @torch.inference_mode()
    def run(self) -> list[PromptTrace]:
        for number, prompt in enumerate(self.prompts):
            self._begin(number, prompt)
        for layer in reversed(range(self.recording.model.n_layers)):
            self._mlps(layer)
            self._heads(layer)
        return [prompt.trace for prompt in self.prompts]

    # -- passing influence on --------------------------------------------------------------------------------

    def _begin(self, number: int, prompt: _Prompt) -> None:
        trace = prompt.trace
        trace.influence[ROOT] = 1.0
        causes = trace.seeds.causes
        if self.content.reads[number]:
            causes = self._readable(self.content.root_causes(number), 1.0) if self._score(number, ROOT) > 0 else ()
            trace.contributions[ROOT] = self.content.contribution(number, ROOT)
            reason = None if causes else self._nothing_new(number)
            trace.seeds = replace(trace.seeds, reason=reason)
        self._follow(prompt, Causes(number, ROOT, {"root": SideCauses(causes)}), {})

    def _nothing_new(self, number: int) -> str:
        total = self.content.score(number, ROOT)
        return (
            f"the counterfactual prompt speaks for the answer as much as this one does (difference {total:.4g}), so there is "
            "nothing new to explain"
        )

    def _follow(
        self, prompt: _Prompt, found: Causes, signals: dict[tuple[Side, Site], Signal]
    ) -> None:
        """Pass a site's influence on to its causes, each with what it is wanted for."""
        trace = prompt.trace
        trace.causes[found.site] = found
        causes = [(side, cause) for side, part in found.sides.items() for cause in part.in_graph]
        shares = spread([(side, cause.weight) for side, cause in causes])
        whole = trace.influence[found.site]
        for (side, cause), share in zip(causes, shares, strict=True):
            site = cause.site
            trace.influence[site] += whole * share
            if self.content.reads[found.prompt] and site not in trace.contributions and site.kind != "offset":
                trace.contributions[site] = self.content.contribution(found.prompt, site)
            if site.kind not in ("head", "mlp"):
                continue
            want = prompt.wants[site]
            signal = signals.get((side, site))
            if signal is not None:
                want.signals.append((whole * share, signal))
            elif side == "root" and not self.content.reads[found.prompt]:
                want.attending += whole * share
            elif side not in ATTENTION_SIDES and self._score(found.prompt, site) > 0:
                want.content += whole * share

    def _score(self, number: int, site: Site) -> float:
        """What a site contributes to the root (or contributes more than in the counterfactual prompt)."""
        scores = self.prompts[number].scores
        if site not in scores:
            scores[site] = self.content.score(number, site) if self.content.reads[number] else 0.0
        return scores[site]

    def _readable(self, found: Strongest, whole: float) -> tuple[Cause, ...]:
        """Causes, and what opposes them, that carry as much influence as a node needs to be expanded.

        ``whole`` is the influence that they share. The strongest cause stays in any case.
        """
        least = self.budget.min_influence / whole * found.total if whole > 0 else 0.0
        top = max((cause.weight for cause in found.causes), default=0.0)
        return tuple(c for c in found.causes if abs(c.weight) >= least or c.weight == top)

    def _chosen(self, layer: int, kind: str) -> list[tuple[int, Site]]:
        """Sites of a level that are expanded: the most influential of each prompt, within the budget."""
        chosen: list[tuple[int, Site]] = []
        for number, prompt in enumerate(self.prompts):
            trace = prompt.trace
            for site in sorted(prompt.level(layer, kind), key=lambda s: (-trace.influence[s], s)):
                if kind == "head":
                    self._look_at(number, trace, site)
                if prompt.wants[site].influence <= 0:
                    continue
                mine = sum(1 for p, _ in chosen if p == number)
                full = self.budget.max_firings is not None and trace.expanded + mine >= self.budget.max_firings
                if full or trace.influence[site] < self.budget.min_influence:
                    trace.cut.append(site)
                else:
                    chosen.append((number, site))
        return chosen

    def _look_at(self, number: int, trace: PromptTrace, site: Site) -> None:
        rec, f = self.recording, site.firing
        trace.attention[site] = float(rec.patterns[f.layer, number, f.head, f.dest, f.src])
        visible = int(rec.visible_keys[f.layer, number, f.dest])
        trace.thresholds[site] = self.method.threshold(visible)

    # -- levels ----------------------------------------------------------------------------------------------

    def _heads(self, layer: int) -> None:
        """Heads of a layer: why they attend (complete), and what they moved."""
        chosen = self._chosen(layer, "head")
        if not chosen:
            return
        sides: dict[tuple[int, Site], dict[Side, SideCauses]] = {place: {} for place in chosen}
        signals: dict[tuple[int, Site], dict[tuple[Side, Site], Signal]] = {place: {} for place in chosen}
        attended: dict[tuple[int, Site], Causes] = {}
        if self.attention:
            for causes in self._attention([place for place in chosen if self._followed(*place)]):
                place = (causes.prompt, causes.site)
                attended[place] = causes
                sides[place] |= causes.sides
            for side in ATTENTION_SIDES:
                self._signals(list(attended), attended, side, signals)
        moved = [place for place in chosen if self.prompts[place[0]].wants[place[1]].moved > 0]
        for place, causes in zip(moved, self._moved(layer, moved), strict=True):
            whole = self.prompts[place[0]].trace.influence[place[1]] / (len(sides[place]) + 1)
            if causes.total > 0:
                sides[place]["value"] = SideCauses(self._readable(causes, whole))
        for number, site in chosen:
            found = attended.get((number, site))
            whole = Causes(
                number,
                site,
                sides[number, site],
                self.prompts[number].trace.attention[site],
                None if found is None else found.threshold,
            )
            self._follow(self.prompts[number], whole, signals[number, site])

    def _followed(self, number: int, site: Site) -> bool:
        trace = self.prompts[number].trace
        visible = int(self.recording.visible_keys[site.layer or 0, number, site.dest or 0])
        return (
            site.layer != 0
            and site.dest != 0
            and self.method.follows(site.firing, trace.attention[site], visible)
        )

    def _attention(self, places: list[tuple[int, Site]]) -> list[Causes]:
        if not places:
            return []
        firings = Firings.of(places, self.recording.model.device)
        return self.method.trace(self.recording, firings, self.composer)

    def _signals(
        self,
        places: list[tuple[int, Site]],
        attended: dict[tuple[int, Site], Causes],
        side: Literal["query", "key"],
        out: dict[tuple[int, Site], dict[tuple[Side, Site], Signal]],
    ) -> None:
        if not places:
            return
        causes = [attended[place].sides[side].in_graph for place in places]
        for place, found in zip(places, signals_of(self.recording, places, causes, side), strict=True):
            out[place] |= {(side, signal.source): signal for signal in found if signal is not None}

    def _moved(self, layer: int, places: list[tuple[int, Site]]) -> list[Strongest]:
        """What each head moved, along all that it is wanted for."""
        if not places:
            return []
        rec, weights = self.recording, self.recording.model.weights
        read: list[Place] = []
        directions: list[Tensor] = []
        units: list[float] = []
        for number, site in places:
            want, head = self.prompts[number].wants[site], site.head or 0
            wanted, unit = self._wanted(number, site, want)
            if rec.post_norm_scales is not None:
                wanted = wanted / rec.post_norm_scales[layer, number, site.dest]
            strength = rec.patterns[layer, number, head, site.dest, site.src] / rec.norm_scales[layer, number, site.src]
            onto = weights.W_O[layer, head] @ wanted
            directions.append(strength * (weights.W_V[layer, head // weights.group] @ onto) * unit)
            read.append(Place(number, site.src or 0, layer))
            units.append(unit)
        return self.content.strongest_along(read, directions)

    def _wanted(self, number: int, site: Site, want: _Want) -> tuple[Tensor, float]:
        """All that a node is wanted for as one direction of its write, in shares of one; and the unit of a share."""
        total = want.moved
        wanted = self.recording.embedding.new_zeros(self.recording.model.d_model)
        unit = 1.0
        if want.content > 0:
            unit = self._score(number, site)
            wanted += self.content.gradient(number, site) * (want.content / unit)
        for share, signal in want.signals:
            wanted += signal.direction * share
        return wanted / total, unit

    def _mlps(self, layer: int) -> None:
        """MLPs of a layer: what their content came from, and what holds up the signals that they wrote."""
        chosen = self._chosen(layer, "mlp")
        if not chosen:
            return
        asked = [(place, share, s) for place in chosen for share, s in self.prompts[place[0]].wants[place[1]].signals]
        passages = (
            through_mlps(self.recording, layer, [s for *_, s in asked], behind_attention=self.behind) if asked else []
        )
        moved = [place for place in chosen if self.prompts[place[0]].wants[place[1]].content > 0]
        content = self.content.causes(moved) if moved else []
        parts: dict[tuple[int, Site], list[tuple[float, Sequence[Cause]]]] = {place: [] for place in chosen}
        for place, causes in zip(moved, content, strict=True):
            number, site = place
            unit = self._score(number, site)
            want = self.prompts[number].wants[site].content
            shares = [replace(c, weight=c.weight / unit) for c in self._readable(causes, want)]
            parts[place].append((want, shares))
        for (place, share, signal), passage in zip(asked, passages, strict=True):
            parts[place].append((share, passage.causes))
            self.prompts[place[0]].trace.passages[signal.source, signal.target, signal.side] = passage
        for number, site in chosen:
            unit = self._score(number, site) if self.prompts[number].wants[site].content > 0 else 1.0
            causes = _merged(parts[number, site], unit)
            self._follow(self.prompts[number], Causes(number, site, {"input": SideCauses(causes)}), {})


def _merged(parts: list[tuple[float, Sequence[Cause]]], unit: float) -> tuple[Cause, ...]:
    """Causes of several wants as one list: shares weighted by influence, in the unit of the node."""
    total = sum(share for share, _ in parts)
    shares: dict[Site, float] = {}
    for share, causes in parts:
        for cause in causes:
            shares[cause.site] = shares.get(cause.site, 0.0) + share / total * cause.weight
    return tuple(Cause(site, weight * unit) for site, weight in sorted(shares.items(), key=lambda item: -item[1]))
