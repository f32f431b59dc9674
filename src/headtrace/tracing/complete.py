"""Content and complete circuits: from the root down, level by level, all prompts together.

A level is one layer's MLPs, or one layer's heads. When its turn comes, everything above it has been expanded, so the
influence of its nodes is final. A node is wanted for what it contributes to the root (content), and for signals: what
it wrote into the query or key of a head above it (``paths="complete"``), or into something that such a signal came
from. Each want is a direction of what the node writes, and asks about the node's own causes in its own way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.circuits.graph import spread
from headtrace.models.frozen import FrozenMLP
from headtrace.progress import Progress, counting
from headtrace.tracing.along import Place
from headtrace.tracing.attribute_root import Seeds
from headtrace.tracing.causes import Cause, Causes, SideCauses
from headtrace.tracing.components import Firings
from headtrace.tracing.content import Content, Strongest
from headtrace.tracing.methods import Method
from headtrace.tracing.readings import Composer
from headtrace.tracing.signals import Signal, signals_of, write_at
from headtrace.tracing.sweep import Budget, Grown, PromptTrace, attention_at
from headtrace.tracing.through_mlps import through_mlps
from headtrace.vocabulary import ATTENTION_SIDES, ROOT, AttentionSide, Side, Site

if TYPE_CHECKING:
    from headtrace.models import Recording

Paths = Literal["attention", "content", "complete"]
CONTENT_INFLUENCE = 0.02
"""By default a node of a content or complete circuit has at least this share of the root's whole."""

Spot = tuple[int, Site]
"""A site of a prompt."""


@dataclass
class Want:
    """What a node is wanted for, each with its influence."""

    content: float = 0.0
    """For its contribution to the root."""
    attending: float = 0.0
    """For nothing that it moved: a head that is the root itself."""
    signals: list[tuple[float, Signal]] = field(default_factory=list[tuple[float, Signal]])

    @property
    def influence(self) -> float:
        return self.content + self.attending + sum(share for share, _ in self.signals)


@dataclass(frozen=True)
class Part:
    """One way in which a node's causes were asked for: the influence of the want, and shares of what is wanted."""

    influence: float
    causes: Sequence[Cause]
    direction: Float[Tensor, " d_model"] | None = None
    """Of what the node reads; None for content, which every component has its own gradient for."""


Expanded = tuple[Causes, dict[Side, list[Part]], dict[tuple[Side, Site], Signal]]
"""What a site's causes are, in which parts they were asked for, and the signals that some of them wrote."""


@dataclass
class PromptSweep:
    """The state of one prompt."""

    trace: PromptTrace
    wants: dict[Site, Want] = field(default_factory=lambda: defaultdict[Site, Want](Want))
    scores: dict[Site, float] = field(default_factory=dict[Site, float])


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
        self.prompts = [PromptSweep(PromptTrace(root)) for root in roots]
        self._visible: dict[Spot, int] = {}

    @torch.inference_mode()
    def run(self, progress: Progress | None = None, grown: Grown | None = None) -> list[PromptTrace]:
        """``progress`` hears of layers, again and again while one is traced; ``grown`` is shown what was found so far
        before the first layer and after each."""
        n_layers = self.recording.model.n_layers
        for number in range(len(self.prompts)):
            self._begin(number)
        self._show(n_layers, grown)
        for layer in reversed(range(n_layers)):
            with counting(_again(progress, n_layers - layer - 1, n_layers)):
                self._expand_mlps(layer)
                self._expand_heads(layer)
            if progress is not None:
                progress(n_layers - layer, n_layers)
            self._show(layer, grown)
        return [prompt.trace for prompt in self.prompts]

    def _show(self, layer: int, grown: Grown | None) -> None:
        """What is known when all layers from this one on are done: of heads below it, that they attend."""
        if grown is None:
            return
        self._look_at(range(layer))
        grown([prompt.trace for prompt in self.prompts])

    def _want(self, spot: Spot) -> Want:
        return self.prompts[spot[0]].wants[spot[1]]

    def _score(self, spot: Spot) -> float:
        """What a site contributes to the root (with a counterfactual: contributes more than there)."""
        number, site = spot
        scores = self.prompts[number].scores
        if site not in scores:
            scores[site] = self.content.score(number, site) if self.content.reads[number] else 0.0
        return scores[site]

    # -- passing influence on --------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        trace = self.prompts[number].trace
        trace.influence[ROOT] = 1.0
        causes = trace.seeds.causes
        if self.content.reads[number]:
            total = self._score((number, ROOT))
            causes = self._readable(self.content.root_causes(number), 1.0) if total > 0 else ()
            reason = None if causes else _nothing_new(total)
            trace.seeds = replace(trace.seeds, reason=reason)
            trace.contributions[ROOT] = self.content.contribution(number, ROOT)
            trace.tokens = self.content.embeddings(number)
        parts: dict[Side, list[Part]] = {"root": [Part(1.0, causes)]}
        self._follow([(Causes(number, ROOT, {"root": SideCauses(tuple(causes))}), parts, {})])

    def _follow(self, expanded: Sequence[Expanded]) -> None:
        """Pass the influence of sites on to their causes, each with what it is wanted for."""
        met = [
            (found.prompt, cause.site)
            for found, *_ in expanded
            for side in found.sides.values()
            for cause in side.in_graph
            if self.content.reads[found.prompt] and cause.site.kind != "offset"
        ]
        self.content.look_at(met)
        self.content.look_at(met, there=True)
        for each in expanded:
            self._follow_one(*each)

    def _follow_one(
        self,
        found: Causes,
        parts: dict[Side, list[Part]],
        signals: dict[tuple[Side, Site], Signal],
    ) -> None:
        number, trace = found.prompt, self.prompts[found.prompt].trace
        trace.causes[found.site] = found
        causes: list[tuple[Side, Cause]] = [
            (side, cause) for side, part in found.sides.items() for cause in part.in_graph
        ]
        shares = spread([(side, cause.weight) for side, cause in causes])
        whole = trace.influence[found.site]
        for (side, cause), share in zip(causes, shares, strict=True):
            spot, passed = (number, cause.site), whole * share
            trace.influence[cause.site] += passed
            has_one = self.content.reads[number] and cause.site.kind != "offset"
            if has_one and cause.site not in trace.contributions:
                trace.contributions[cause.site] = self.content.contribution(*spot)
            if cause.site.kind not in ("head", "mlp"):
                continue
            if side in ATTENTION_SIDES:
                signal = signals.get((side, cause.site))
                if signal is not None and passed > 0:  # a weight below zero passes nothing on
                    self._want(spot).signals.append((passed, signal))
            elif passed > 0:
                self._pass(spot, passed, found.site, side, parts[side])

    def _pass(self, spot: Spot, passed: float, target: Site, side: Side, parts: list[Part]) -> None:
        """Influence that reaches a site through values, an MLP's input or the root, by the wants that ask for it."""
        number, site = spot
        want = self._want(spot)
        mine = [
            (part.influence * max(cause.weight, 0.0), part)
            for part in parts
            for cause in part.causes
            if cause.site == site
        ]
        total = sum(share for share, _ in mine)
        for share, part in mine:
            flow = passed * share / total
            if target == ROOT and not self.content.reads[number]:
                want.attending += flow
            elif part.direction is None:
                want.content += flow if self._score(spot) > 0 else 0.0
            elif flow > 0:
                written = write_at(self.recording, number, site)
                direction = part.direction / (written @ part.direction)
                want.signals.append((flow, Signal(number, site, target, side, direction)))

    def _readable(self, found: Strongest, whole: float) -> tuple[Cause, ...]:
        """Causes, and what opposes them, that carry as much influence as a node needs to be expanded.

        ``whole`` is the influence that they share. The strongest cause stays in any case.
        """
        least = self.budget.min_influence / whole * found.total if whole > 0 else 0.0
        top = max((cause.weight for cause in found.causes), default=0.0)
        return tuple(c for c in found.causes if abs(c.weight) >= least or c.weight == top)

    def _chosen(self, layer: int, kind: str) -> list[Spot]:
        """Sites of a level that are expanded: the most influential of each prompt, within the budget."""
        chosen: list[Spot] = []
        for number, prompt in enumerate(self.prompts):
            trace, mine = prompt.trace, 0
            level = [site for site in prompt.wants if site.layer == layer and site.kind == kind]
            for site in sorted(level, key=lambda s: (-trace.influence[s], s)):
                if prompt.wants[site].influence <= 0:
                    continue
                full = self.budget.max_firings is not None
                full = full and trace.expanded + mine >= (self.budget.max_firings or 0)
                if full or trace.influence[site] < self.budget.min_influence:
                    trace.cut.append(site)
                else:
                    chosen.append((number, site))
                    mine += 1
        return chosen

    # -- heads -----------------------------------------------------------------------------------------------

    def _expand_heads(self, layer: int) -> None:
        """Heads of a layer: why they attend (complete), and what they moved."""
        self._look_at(range(layer, layer + 1))
        chosen = self._chosen(layer, "head")
        if not chosen:
            return
        attended = self._attention([spot for spot in chosen if self._followed(*spot)])
        signals = self._signals(attended)
        moved = self._moved(layer, chosen, attended)
        expanded: list[Expanded] = []
        for number, site in chosen:
            spot = number, site
            why = attended.get(spot)
            sides: dict[Side, SideCauses] = {} if why is None else dict(why.sides)
            if moved[spot]:
                sides["value"] = SideCauses(self._merged(spot, moved[spot]))
            if not sides:  # wanted, but for nothing that it moved and not for attending: a leaf
                continue
            attention = self.prompts[number].trace.attention[site]
            if why is None:
                found = Causes(number, site, sides, attention)
            else:
                found = replace(why, sides=sides, attention=attention)
            expanded.append((found, {"value": moved[spot]}, signals.get(spot, {})))
        self._follow(expanded)

    def _look_at(self, layers: range) -> None:
        """Read the attention of the heads of some layers that have been met."""
        met = [
            (number, site)
            for number, prompt in enumerate(self.prompts)
            for site in prompt.trace.influence
            if site.kind == "head" and site.layer in layers and site not in prompt.trace.attention
        ]
        for (number, site), (strength, visible) in zip(met, attention_at(self.recording, met), strict=True):
            self.prompts[number].trace.attention[site] = strength
            self.prompts[number].trace.thresholds[site] = self.method.threshold(visible)
            self._visible[number, site] = visible

    def _followed(self, number: int, site: Site) -> bool:
        if not self.attention or site.layer == 0 or site.dest == 0:
            return False
        strength = self.prompts[number].trace.attention[site]
        return self.method.follows(site.firing, strength, self._visible[number, site])

    def _attention(self, spots: list[Spot]) -> dict[Spot, Causes]:
        if not spots:
            return {}
        firings = Firings.of(spots, self.recording.model.device)
        found = self.method.trace(self.recording, firings, self.composer)
        return {(causes.prompt, causes.site): causes for causes in found}

    def _signals(self, attended: dict[Spot, Causes]) -> dict[Spot, dict[tuple[Side, Site], Signal]]:
        """What the causes of some firings wrote into them, as directions."""
        signals: dict[Spot, dict[tuple[Side, Site], Signal]] = {spot: {} for spot in attended}
        sides: tuple[AttentionSide, ...] = ATTENTION_SIDES if attended else ()
        for side in sides:
            spots = [spot for spot in attended if side in attended[spot].sides]
            causes = [attended[spot].sides[side].in_graph for spot in spots]
            for spot, found in zip(spots, signals_of(self.recording, spots, causes, side), strict=True):
                signals[spot] |= {(side, signal.source): signal for signal in found if signal is not None}
        return signals

    def _moved(self, layer: int, spots: list[Spot], attended: dict[Spot, Causes]) -> dict[Spot, list[Part]]:
        """What each head moved, for the root and for the signals that it is wanted for."""
        rows: list[tuple[Spot, float, bool, Tensor]] = []
        for spot in spots:
            want = self._want(spot)
            if want.content > 0:
                gradient = self.content.gradient(*spot) / self._score(spot)
                rows.append((spot, want.content, True, self._value_direction(layer, spot, gradient)))
            if want.signals:
                wanted, influence = _together(want.signals)
                rows.append((spot, influence, False, self._value_direction(layer, spot, wanted)))
        parts: dict[Spot, list[Part]] = {spot: [] for spot in spots}
        if not rows:
            return parts
        places = [Place(number, site.src or 0, layer) for (number, site), *_ in rows]
        found = self.content.strongest_along(places, [direction for *_, direction in rows])
        for (spot, influence, content, direction), strongest in zip(rows, found, strict=True):
            n_sides = 1 + (len(attended[spot].sides) if spot in attended else 0)
            causes = self._readable(strongest, influence / n_sides)
            if strongest.total > 0:
                parts[spot].append(Part(influence, causes, None if content else direction))
        return parts

    def _value_direction(self, layer: int, spot: Spot, wanted: Float[Tensor, " d_model"]) -> Tensor:
        """A direction of what a head component writes, as a direction of the residual at its source."""
        rec, weights, (number, site) = self.recording, self.recording.model.weights, spot
        head, src = site.head or 0, site.src or 0
        if rec.post_norm_scales is not None:
            wanted = wanted / rec.post_norm_scales[layer, number, site.dest]
        strength = (
            rec.attention.at(layer, number, head, site.dest or 0, src) / rec.norm_scales[layer, number, src]
        )
        return strength * (weights.W_V[layer, head // weights.group] @ (weights.W_O[layer, head] @ wanted))

    # -- MLPs ------------------------------------------------------------------------------------------------

    def _expand_mlps(self, layer: int) -> None:
        """MLPs of a layer: what their content came from, and what holds up the signals that they wrote."""
        chosen = self._chosen(layer, "mlp")
        if not chosen:
            return
        parts: dict[Spot, list[Part]] = {spot: [] for spot in chosen}
        self._content_of_mlps(chosen, parts)
        self._flows_of_mlps(layer, chosen, parts)
        self._passages(layer, chosen, parts)
        expanded: list[Expanded] = []
        for number, site in chosen:
            mine = parts[number, site]
            causes = Causes(number, site, {"input": SideCauses(self._merged((number, site), mine))})
            expanded.append((causes, {"input": mine}, {}))
        self._follow(expanded)

    def _content_of_mlps(self, chosen: list[Spot], parts: dict[Spot, list[Part]]) -> None:
        spots = [spot for spot in chosen if self._want(spot).content > 0]
        for spot, found in zip(spots, self.content.causes(spots) if spots else (), strict=True):
            influence, unit = self._want(spot).content, self._score(spot)
            causes = [replace(c, weight=c.weight / unit) for c in self._readable(found, influence)]
            parts[spot].append(Part(influence, causes))

    def _flows_of_mlps(self, layer: int, chosen: list[Spot], parts: dict[Spot, list[Part]]) -> None:
        """Content of signals: as for the root, through frozen gates."""
        wanted = {
            spot: _together(flows) for spot in chosen if (flows := self._of_sides(spot, attention=False))
        }
        if not wanted:
            return
        device = self.recording.model.device
        prompts = torch.tensor([number for number, _ in wanted], device=device)
        positions = torch.tensor([site.dest or 0 for _, site in wanted], device=device)
        mlp = FrozenMLP.of(self.recording, layer, (prompts, positions))
        pulled = mlp.back(torch.stack([direction for direction, _ in wanted.values()])).direction
        places = [self.content.place(*spot) for spot in wanted]
        found = self.content.strongest_along(places, list(pulled))
        for (spot, (_, influence)), strongest, direction in zip(wanted.items(), found, pulled, strict=True):
            parts[spot].append(Part(influence, self._readable(strongest, influence), direction))

    def _passages(self, layer: int, chosen: list[Spot], parts: dict[Spot, list[Part]]) -> None:
        """Query and key signals that an MLP wrote: removed from the real MLP's input until half is gone.

        An MLP that writes into many firings is asked about the signals that matter by themselves, or its strongest one.
        """
        asked: list[tuple[Spot, float, Signal]] = []
        for spot in chosen:
            signals = sorted(self._of_sides(spot, attention=True), key=lambda each: -each[0])
            enough = [each for each in signals if each[0] >= self.budget.min_influence]
            asked += [(spot, *each) for each in enough or (signals[:1] if not parts[spot] else [])]
        if not asked:
            return
        places = [self.content.place(*spot) for spot, *_ in asked]
        passages = through_mlps(self.recording, layer, [signal for *_, signal in asked], places)
        for (spot, influence, signal), passage in zip(asked, passages, strict=True):
            parts[spot].append(Part(influence, passage.causes, passage.direction))
            key = (signal.source, signal.target, signal.side)
            self.prompts[spot[0]].trace.passages[key] = passage

    def _of_sides(self, spot: Spot, *, attention: bool) -> list[tuple[float, Signal]]:
        """The signals that a node is wanted for: those of queries and keys, or the others."""
        return [each for each in self._want(spot).signals if (each[1].side in ATTENTION_SIDES) == attention]

    def _merged(self, spot: Spot, parts: list[Part]) -> tuple[Cause, ...]:
        """Causes of several wants as one list: shares by influence, in the root's unit if the node has content."""
        total = sum(part.influence for part in parts)
        unit = self._score(spot) if self._want(spot).content > 0 else 1.0
        shares: dict[Site, float] = {}
        for part in parts:
            for cause in part.causes:
                shares[cause.site] = shares.get(cause.site, 0.0) + part.influence / total * cause.weight
        ordered = sorted(shares.items(), key=lambda item: -item[1])
        return tuple(Cause(site, weight * unit) for site, weight in ordered)


def _again(progress: Progress | None, done: int, of_all: int) -> Callable[[int], None] | None:
    """While a layer is traced, what was done before it is told again: who listens may end it there."""
    return None if progress is None else lambda _: progress(done, of_all)


def _together(signals: list[tuple[float, Signal]]) -> tuple[Float[Tensor, " d_model"], float]:
    """Several signals as one direction, weighted by influence; and their influence."""
    influence = sum(share for share, _ in signals)
    weighted = torch.stack([signal.direction * (share / influence) for share, signal in signals])
    return weighted.sum(dim=0), influence


def _nothing_new(total: float) -> str:
    return (
        f"the counterfactual prompt speaks for the answer as much as this one does (difference {total:.4g}), so there "
        "is nothing new to explain"
    )
