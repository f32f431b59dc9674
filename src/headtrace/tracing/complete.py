"""Content and complete circuits: from the root down, level by level, all prompts together.

A level is one layer's MLPs, or one layer's heads. When a level is expanded, everything above it has been, so the
influence of its nodes is final. A node is followed for what it contributes to the root (content), and for signals: what
it wrote into the query or key of a head above it (``paths="complete"``), or into something that such a signal came
from. Each reason is a direction of what the node writes, and has its own causes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.circuits.graph import spread
from headtrace.progress import Progress, counting
from headtrace.tracing.attention_alone import attention_causes_alone
from headtrace.tracing.attribute_root import Place, Seeds
from headtrace.tracing.causes import Cause, Causes, PromptSite, SideCauses
from headtrace.tracing.components import Firings
from headtrace.tracing.content import Content, Strongest
from headtrace.tracing.follow_reasons import FollowReason, KeyWrites, Part, combined, with_removals
from headtrace.tracing.methods import Method
from headtrace.tracing.mlp_causes import (
    IDLE,
    MlpReader,
    SingleRemovals,
    causes_alone,
    mlp_signal_causes,
)
from headtrace.tracing.readings import Composer
from headtrace.tracing.signal_directions import SignalDirection, signals_of
from headtrace.tracing.sweep import Budget, OnPartial, PromptTrace, attention_at
from headtrace.vocabulary import ATTENTION_SIDES, ROOT, AttentionSide, Side, Site

if TYPE_CHECKING:
    from headtrace.models import Recording

from headtrace.request import Paths

HELD_DOWN, ATTENDS_FULLY = 2.5, 0.9
"""What keeps a head from attending is looked for where it has so many times the least influence, and attends with less
than this."""
EQUAL = 0.1
"""Sources whose attention differs by no more than this share of it are attended to alike."""
OPPOSES = 5.0
"""In complete circuits, what opposes the root is expanded if it does so with this many times the least influence."""
WEAKENS = 15.0
"""The same for what opposes a signal: one run has many of these, and they matter less."""
CONTENT_INFLUENCE = 0.02
"""By default a node of a content or complete circuit has at least this share of the root's influence."""
SMALL, WHOLE_INFLUENCE = 40, 0.001
"""A complete circuit of which fewer nodes than this are expanded when it is followed down to this influence is
followed so far: the least influence is there to keep large circuits readable."""


Expanded = tuple[Causes, dict[Side, list[Part]], dict[tuple[Side, Site], SignalDirection]]
"""The causes of a site, the parts that they are made of, and the signals that some of them wrote."""


class CompleteSweep:
    """Traces the prompts of a recording (or only some of them) from their roots down, through values, MLPs and
    (complete) attention."""

    def __init__(
        self,
        recording: Recording,
        roots: Sequence[Seeds],
        content: Content,
        method: Method,
        budget: Budget,
        composer: Composer,
        paths: Paths,
        only: Collection[int] | None = None,
    ) -> None:
        self.recording, self.content = recording, content
        self.method, self.budget, self.composer = method, budget, composer
        self.attention = paths == "complete"
        self.traces = [PromptTrace(root) for root in roots]
        self.only = range(len(roots)) if only is None else only
        self.reasons = [defaultdict[Site, FollowReason](FollowReason) for _ in roots]
        self.key_writes = KeyWrites(recording)
        self._scores: dict[PromptSite, float] = {}
        self._visible: dict[PromptSite, int] = {}

    @torch.inference_mode()
    def run(self, progress: Progress | None = None, on_partial: OnPartial | None = None) -> list[PromptTrace]:
        """Trace all layers.

        ``progress`` counts layers, and is called again while one is traced, so that a callback can cancel.
        ``on_partial`` is called with what was found so far before the first layer and after each.
        """
        n_layers = self.recording.model.n_layers
        for number in self.only:
            self._begin(number)
        for layer in reversed(range(-1, n_layers)):
            if on_partial is not None:
                self._read_attention(range(layer + 1))
                on_partial(self.traces)
            if layer < 0:
                break
            done = n_layers - layer - 1
            again = None if progress is None else lambda _, done=done: progress(done, n_layers)
            with counting(again):
                self._expand_mlps(layer)
                self._expand_heads(layer)
            if progress is not None:
                progress(done + 1, n_layers)
        return self.traces

    def _reason(self, site: PromptSite) -> FollowReason:
        return self.reasons[site[0]][site[1]]

    def _score(self, site: PromptSite) -> float:
        """What a site contributes to the root."""
        if site not in self._scores:
            self._scores[site] = self.content.contribution(*site) if self.content.reads[site[0]] else 0.0
        return self._scores[site]

    # -- passing influence on --------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        """Expand the root of a prompt."""
        trace = self.traces[number]
        trace.influence[ROOT] = 1.0
        causes = trace.seeds.causes
        if self.content.reads[number]:
            causes = self._strong(self.content.root_causes(number), 1.0)
            trace.seeds = replace(trace.seeds, reason=None)
            trace.contributions[ROOT] = self.content.contribution(number, ROOT)
            trace.tokens = self.content.embeddings(number)
        found = Causes(number, ROOT, {"root": SideCauses(tuple(causes))})
        self._follow([(found, {"root": [Part(1.0, causes)]}, {})])

    def _follow(self, expanded: Sequence[Expanded]) -> None:
        """Pass the influence of sites on to their causes, each with the reason for following it."""
        causes = [
            (found.prompt, cause.site)
            for found, *_ in expanded
            for side in found.sides.values()
            for cause in side.in_graph
            if self.content.reads[found.prompt] and cause.site.kind != "offset"
        ]
        self.content.look_at(causes)
        for found, parts, signals in expanded:
            number, trace = found.prompt, self.traces[found.prompt]
            against = self._against(found)
            for (side, cause, passed), opposed in zip(trace.follow(found), against, strict=True):
                has_content = self.content.reads[number] and cause.site.kind != "offset"
                if has_content and cause.site not in trace.contributions:
                    trace.contributions[cause.site] = self.content.contribution(number, cause.site)
                strength = passed + opposed
                if strength <= 0 or cause.site.kind not in ("head", "mlp"):
                    continue
                at = number, cause.site
                if side not in ATTENTION_SIDES:
                    self._pass(at, passed, opposed, found.site, side, parts[side])
                elif (side, cause.site) in signals:
                    self._reason(at).signals.append((strength, signals[side, cause.site]))
                    self._reason(at).beside += opposed

    def _against(self, found: Causes) -> list[float]:
        """How strongly each cause of a site is followed for what it does against the root, in the order of
        ``PromptTrace.follow``: it opposes what the site contributes, it holds down the attention of the site (or
        carries it, though its group does not need it), or it causes a site that is followed for such a reason."""
        causes: list[tuple[Side, float]] = [
            (side, cause.weight) for side, part in found.sides.items() for cause in part.in_graph
        ]
        sites = [cause.site for part in found.sides.values() for cause in part.in_graph]
        influence = self.traces[found.prompt].influence[found.site]
        reason = self._reason((found.prompt, found.site))
        alone = self._alone((found.prompt, found.site))
        whole = max(influence, reason.strength)
        totals: dict[Side, float] = {}
        for side, weight in causes:
            totals[side] = totals.get(side, 0.0) + max(weight, 0.0)
        n_sides = sum(total > 0 for total in totals.values())
        beside = reason.opposing + reason.beside
        sign = -1 if reason.opposing > 0 else 1  # what opposes has causes with negative contributions
        shares = spread([(s, w if s in ATTENTION_SIDES else sign * w) for s, w in causes]) if beside else None
        content = found.site == ROOT or reason.content + reason.opposing > 0
        followed = influence if content else influence + reason.beside
        least = (OPPOSES if content else WEAKENS) * self.budget.min_influence
        strengths: list[float] = []
        for place, (side, weight) in enumerate(causes):
            opposed = side not in ATTENTION_SIDES and weight < 0 < totals[side]
            strength = followed * -weight / totals[side] / n_sides if opposed else 0.0
            strength = strength if self.attention and strength >= least else 0.0
            if (shown := alone.get((side, sites[place]))) is not None:
                strength += whole * abs(shown.weight)
            strengths.append(strength + (0.0 if shares is None else beside * shares[place]))
        return strengths

    def _pass(
        self, at: PromptSite, passed: float, opposed: float, target: Site, side: Side, parts: list[Part]
    ) -> None:
        """Divide what reaches a site through a value, an MLP's input or the root, influence and what is beside it, by
        the target's reasons."""
        number, site = at
        reason = self._reason(at)
        every = [(part, cause) for part in parts for cause in part.causes if cause.site == site]
        chosen = [each for each in every if each[1].weight > 0 or each[0].direction is None]
        # What only weakens signals is followed where it does so strongly enough.
        mine = [
            (part.influence * abs(cause.weight), part)
            for part, cause in chosen or (every if opposed > passed else [])
        ]
        total = sum(share for share, _ in mine)
        for share, part in mine:
            flow = (passed + opposed) * share / total
            if part.written is not None and site.kind == "mlp":
                reason.readers.append((flow, MlpReader(self.content.place(number, target), part.written)))
            if target == ROOT and not self.content.reads[number]:
                reason.attending += flow
            elif part.direction is None:
                if self._score(at) > 0:
                    reason.content += flow
                    reason.beside += opposed * share / total
                elif self._score(at) < 0:
                    reason.opposing += flow
            elif flow > 0:
                written = self.recording.write(site.component, number, site.dest)
                direction = part.direction / (written @ part.direction)
                reason.signals.append((flow, SignalDirection(number, site, target, side, direction)))
                reason.beside += opposed * share / total

    def _strong(self, found: Sequence[Strongest], whole: float) -> tuple[Cause, ...]:
        """Causes, and what opposes them, that carry as much influence as a node needs to be expanded.

        ``whole`` is the influence that they share. The strongest cause stays in any case.
        """
        total = sum(part.total for part in found)
        least = self.budget.min_influence / whole * total if whole > 0 else 0.0
        top = max((part.top for part in found), default=0.0)
        return tuple(cause for part in found for cause in part.causes(least, top))

    def _chosen(self, layer: int, kind: str) -> list[PromptSite]:
        """Sites of a level that are expanded: the most influential of each prompt, within the budget."""
        chosen: list[PromptSite] = []
        for number, (trace, reasons) in enumerate(zip(self.traces, self.reasons, strict=True)):
            level = [
                site
                for site, reason in reasons.items()
                if site.layer == layer and site.kind == kind and reason.strength > 0
            ]
            strengths = {site: self._strength((number, site)) for site in level}
            chosen += [(number, s) for s in trace.choose(level, self.budget, trace.expanded, strengths)]
        return chosen

    def _merged(self, site: PromptSite, parts: list[Part]) -> SideCauses:
        """Causes for several reasons as one list: shares by influence, in the root's unit if the node has content."""
        total = sum(part.influence for part in parts)
        reason = self._reason(site)
        unit = self._score(site) if reason.content + reason.opposing > 0 else 1.0
        shares: dict[Site, float] = {}
        for part in parts:
            for cause in part.causes:
                shares[cause.site] = shares.get(cause.site, 0.0) + part.influence / total * cause.weight
        ordered = sorted(shares.items(), key=lambda item: -item[1])
        return SideCauses(tuple(Cause(source, weight * unit) for source, weight in ordered))

    # -- heads -----------------------------------------------------------------------------------------------

    def _expand_heads(self, layer: int) -> None:
        """Heads of a layer: why they attend (complete), and what they moved."""
        self._read_attention(range(layer, layer + 1))
        chosen = self._chosen(layer, "head")
        if not chosen:
            return
        attended: dict[PromptSite, Causes] = {}
        followed = [site for site in chosen if self._followed(*site)]
        groups = self._groups(layer, [site for site in chosen if site not in followed])
        followed += groups
        if followed:
            firings = Firings.of(followed, self.recording.model.device, groups)
            found = self.method.trace(self.recording, firings, self.composer)
            attended = {(causes.prompt, causes.site): causes for causes in found}
            self._share_causes(chosen, groups, attended)
            self.key_writes.mark_elsewhere(attended)
        self._add_alone(chosen, attended)
        signals = self._signals(attended)
        moved = self._moved(layer, chosen, attended)
        expanded: list[Expanded] = []
        for number, site in chosen:
            why, parts = attended.get((number, site)), moved[number, site]
            sides: dict[Side, SideCauses] = {} if why is None else dict(why.sides)
            if parts:
                sides["value"] = self._merged((number, site), parts)
            if not sides:  # neither followed for attending nor for anything that it moved: a leaf
                continue
            causes = replace(
                why or Causes(number, site, {}), sides=sides, attention=self.traces[number].attention[site]
            )
            expanded.append((causes, {"value": parts}, signals.get((number, site), {})))
        self._follow(expanded)

    def _add_alone(self, chosen: list[PromptSite], attended: dict[PromptSite, Causes]) -> None:
        """Causes of heads that matter, and attend in part, which removing one signal alone shows: what keeps them from
        attending far more and, for those whose attention has no causes yet, what it depends on."""
        partly = [
            (number, site)
            for number, site in chosen
            if self.attention
            and self._visible[number, site] > 1
            and self._strength((number, site)) >= HELD_DOWN * self.budget.min_influence
            and self.traces[number].attention[site] < ATTENDS_FULLY
        ]
        if not partly:
            return
        # What carries a group as a whole need not be what carries each of its firings.
        asked = [at not in attended or at[1] in self.traces[at[0]].groups for at in partly]
        found = attention_causes_alone(self.recording, partly, asked)
        for at, by_side in zip(partly, found, strict=True):
            number, site = at
            why = attended.get(at, Causes(number, site, {}))
            sides = dict(why.sides)
            for side, causes in by_side.items():
                own = sides.get(side, SideCauses(()))
                known = {cause.site: cause.weight for cause in own.causes}
                new = tuple(cause for cause in causes if cause.site not in known)
                hidden: dict[tuple[Side, Site], Cause] = {
                    (side, cause.site): cause
                    for cause in causes
                    if cause.weight < 0 or known.get(cause.site, cause.weight) < IDLE * cause.weight
                }
                if hidden:
                    self.traces[number].alone.setdefault(site, {}).update(hidden)
                if new:
                    sides[side] = replace(own, causes=(*own.causes, *new))
            if sides:
                attended[at] = replace(why, sides=sides)

    def _alone(self, at: PromptSite) -> Mapping[tuple[Side, Site], Cause]:
        """The signals that hold a firing down, or carry it in a group whose prediction does not need them: they are
        followed in the channels that show it."""
        return self.traces[at[0]].alone.get(at[1], {})

    def _strength(self, at: PromptSite) -> float:
        """How strongly a site is followed."""
        return max(self._reason(at).strength, self.traces[at[0]].influence[at[1]])

    def _read_attention(self, layers: range) -> None:
        """Read the attention of the heads of some layers that have been reached."""
        new = [
            (number, site)
            for number, trace in enumerate(self.traces)
            for site in trace.influence
            if site.kind == "head" and site.layer in layers and site not in trace.attention
        ]
        for (number, site), (strength, visible) in zip(new, attention_at(self.recording, new), strict=True):
            self.traces[number].attention[site] = strength
            self.traces[number].thresholds[site] = self.method.threshold(visible)
            self._visible[number, site] = visible

    def _followed(self, number: int, site: Site) -> bool:
        strength, visible = self.traces[number].attention[site], self._visible[number, site]
        return self.attention and visible > 1 and self.method.follows(site.firing, strength, visible)

    def _groups(self, layer: int, sites: list[PromptSite]) -> dict[PromptSite, tuple[int, ...]]:
        """Sources with nearly equal attention, none of which a head attends to enough by itself, and all together it
        does: by one firing of each group, the positions in it."""
        groups: dict[PromptSite, tuple[int, ...]] = {}
        if not self.attention or not self.method.explains_groups or not sites:
            return groups
        device = self.recording.model.device
        rows = [(number, site.head or 0, site.dest or 0) for number, site in sites]
        prompt, head, dest = torch.tensor(rows, device=device)[..., None].unbind(dim=1)
        src = torch.arange(self.recording.token_ids.shape[1], device=device)
        attention = self.recording.attention.at(layer, prompt, head, dest, src)
        seen = self.recording.visible[layer][prompt, dest, src]
        own = attention.new_tensor([self.traces[number].attention[site] for number, site in sites])[:, None]
        alike = ((attention - own).abs() <= EQUAL * own) & seen
        held = torch.cat((alike.to(attention), (attention * alike).sum(dim=1, keepdim=True)), dim=1)
        for (number, site), (*mask, together) in zip(sites, held.tolist(), strict=True):
            group = tuple(position for position, in_it in enumerate(mask) if in_it)
            visible = self._visible[number, site]
            if 1 < len(group) < visible and together >= self.method.threshold(visible, len(group)):
                groups[number, replace(site, src=group[0])] = group
        return groups

    def _share_causes(
        self,
        chosen: Sequence[PromptSite],
        groups: Mapping[PromptSite, tuple[int, ...]],
        attended: dict[PromptSite, Causes],
    ) -> None:
        """Give the causes of a group to those of its firings that are in the circuit.

        On the key side a head that reads one source writes at some of the group's keys more than at others: it is a
        cause of the firings at those keys.
        """
        found = {first: attended.pop(first) for first in groups}
        writes = self.key_writes.of_heads(found, groups)
        for number, site in chosen:
            for (prompt, first), group in groups.items():
                if (number, replace(site, src=first.src)) != (prompt, first) or site.src not in group:
                    continue
                causes = found[prompt, first]
                key = tuple(
                    replace(
                        cause,
                        site=cause.component.at(site.src or 0),
                        at_source=(strength := writes.get((prompt, first, cause.site))) is None
                        or strength[group.index(site.src or 0)] >= EQUAL * max(strength),
                    )
                    for cause in causes.sides["key"].causes
                )
                sides = {**causes.sides, "key": replace(causes.sides["key"], causes=key)}
                attended[number, site] = replace(causes, site=site, sides=sides)
                self.traces[number].groups[site] = group
                self.traces[number].thresholds[site] = causes.threshold or 0.0

    def _signals(
        self, attended: dict[PromptSite, Causes]
    ) -> dict[PromptSite, dict[tuple[Side, Site], SignalDirection]]:
        """What the causes of some firings wrote into them, as directions."""
        signals: dict[PromptSite, dict[tuple[Side, Site], SignalDirection]] = {site: {} for site in attended}
        for side in ATTENTION_SIDES:
            sites = [site for site in attended if side in attended[site].sides]
            causes = [
                [
                    self._alone(site).get((side, cause.site), cause)
                    for cause in attended[site].sides[side].in_graph
                ]
                for site in sites
            ]
            found = signals_of(self.recording, sites, causes, side) if sites else []
            for site, asked, mine in zip(sites, causes, found, strict=True):
                alone = self._alone(site)
                for cause, signal in zip(asked, mine, strict=True):
                    if signal is None and (side, cause.site) in alone and cause.site.kind in ("head", "mlp"):
                        signal = self._whole_write(site, side, cause.site)
                    if signal is not None:
                        signals[site][side, cause.site] = signal
        return signals

    def _whole_write(self, at: PromptSite, side: AttentionSide, source: Site) -> SignalDirection | None:
        """All that a component writes, as a signal: of one that matters to a head by what it writes at other keys, and
        at this one by not writing the same."""
        written = self.recording.write(source.component, at[0], source.dest)
        size = written @ written
        return SignalDirection(at[0], source, at[1], side, written / size) if float(size) > 0 else None

    def _moved(
        self, layer: int, sites: list[PromptSite], attended: dict[PromptSite, Causes]
    ) -> dict[PromptSite, list[Part]]:
        """What each head moved, for the root and for the signals that it is followed for."""
        rows: list[tuple[PromptSite, float, bool, Tensor]] = []
        for site in sites:
            reason = self._reason(site)
            if (strength := reason.content + reason.opposing) > 0:
                gradient = self.content.gradient(*site) / self._score(site)
                rows.append((site, strength, True, self._value_direction(layer, site, gradient)))
            if reason.signals:
                direction, influence = combined(reason.signals)
                rows.append((site, influence, False, self._value_direction(layer, site, direction)))
        parts: dict[PromptSite, list[Part]] = {site: [] for site in sites}
        places = [Place(number, site.src or 0, layer) for (number, site), *_ in rows]
        found = self.content.strongest_along(places, [direction for *_, direction in rows])
        for (site, influence, content, direction), strongest in zip(rows, found, strict=True):
            n_sides = 1 + (len(attended[site].sides) if site in attended else 0)
            if strongest.total > 0:
                causes = self._strong([strongest], influence / n_sides)
                parts[site].append(Part(influence, causes, None if content else direction))
        return parts

    def _value_direction(self, layer: int, at: PromptSite, direction: Float[Tensor, " d_model"]) -> Tensor:
        """A direction of what a head component writes, as a direction of the residual at its source."""
        rec, weights, (number, site) = self.recording, self.recording.model.weights, at
        head, src, dest = site.head or 0, site.src or 0, site.dest or 0
        if rec.post_norm_scales is not None:
            direction = direction / rec.post_norm_scales[layer, number, dest]
        strength = rec.attention.at(layer, number, head, dest, src) / rec.norm_scales[layer, number, src]
        return strength * (weights.W_V[layer, head // weights.group] @ (weights.W_O[layer, head] @ direction))

    # -- MLPs ------------------------------------------------------------------------------------------------

    def _expand_mlps(self, layer: int) -> None:
        """MLPs of a layer: where their content came from, and the causes of the signals that they wrote."""
        chosen = self._chosen(layer, "mlp")
        if not chosen:
            return
        parts: dict[PromptSite, list[Part]] = {site: [] for site in chosen}
        frozen = self._content_of_mlps(chosen)
        if self.attention:
            places = [self.content.place(*site) for site in chosen]
            removals = SingleRemovals.of(self.recording, layer, places)
            frozen += self._moved_by_mlps(chosen, removals)
            self._add_hidden(chosen, removals, frozen, parts)
            self._attention_signals_of_mlps(layer, chosen, removals, parts)
        else:
            for row, part in frozen:
                parts[chosen[row]].append(part)
        expanded: list[Expanded] = []
        for number, site in chosen:
            mine = parts[number, site]
            causes = Causes(number, site, {"input": self._merged((number, site), mine)})
            expanded.append((causes, {"input": mine}, {}))
        self._follow(expanded)

    def _content_of_mlps(self, chosen: list[PromptSite]) -> list[tuple[int, Part]]:
        """What the content of some of the MLPs comes from, through frozen gates, by their rows."""
        strengths = [self._reason(site).content + self._reason(site).opposing for site in chosen]
        rows = [row for row, strength in enumerate(strengths) if strength > 0]
        parts: list[tuple[int, Part]] = []
        for row, found in zip(rows, self.content.causes([chosen[row] for row in rows]), strict=True):
            influence, unit = strengths[row], self._score(chosen[row])
            found = found if unit > 0 else found.opposite()
            causes = [replace(c, weight=c.weight / unit) for c in self._strong([found], influence)]
            written = self.content.gradient(*chosen[row]) / unit
            parts.append((row, Part(influence, causes, written=written)))
        return parts

    def _moved_by_mlps(self, chosen: list[PromptSite], removals: SingleRemovals) -> list[tuple[int, Part]]:
        """What the signals that some of the MLPs moved come from: as for the root, through frozen gates."""
        flows = {
            row: combined(signals)
            for row, site in enumerate(chosen)
            if (signals := self._reason(site).of_attention(False))
        }
        if not flows:
            return []
        moving = removals.at(list(flows))
        pulled = moving.mlp.back(torch.stack([direction for direction, _ in flows.values()]))
        found = self.content.strongest_along(moving.places, list(pulled.direction), constants=pulled.constant)
        return [
            (row, Part(influence, self._strong([strongest], influence), into, written))
            for (row, (written, influence)), strongest, into in zip(
                flows.items(), found, pulled.direction, strict=True
            )
        ]

    def _add_hidden(
        self,
        chosen: list[PromptSite],
        removals: SingleRemovals,
        frozen: list[tuple[int, Part]],
        parts: dict[PromptSite, list[Part]],
    ) -> None:
        """Add parts of MLPs with the components without which they would do less than half: those of saturated units
        have no share."""
        if not frozen:
            return
        rows = [row for row, _ in frozen]
        readers = [self._reason(site).main_readers if row in rows else [] for row, site in enumerate(chosen)]
        directions = torch.stack([part.written for _, part in frozen if part.written is not None])
        hidden = causes_alone(self.recording, removals, rows, directions, readers=readers)
        for (row, part), alone in zip(frozen, hidden, strict=True):
            parts[chosen[row]] += with_removals(part, alone)

    def _attention_signals_of_mlps(
        self,
        layer: int,
        chosen: list[PromptSite],
        removals: SingleRemovals,
        parts: dict[PromptSite, list[Part]],
    ) -> None:
        """Query and key signals that an MLP wrote: removed from the real MLP's input until half is gone.

        An MLP that writes into many firings is followed for the signals that have enough influence by themselves, or
        for its strongest one.
        """
        wanted: list[tuple[int, float, SignalDirection]] = []
        for row, site in enumerate(chosen):
            signals = sorted(self._reason(site).of_attention(True), key=lambda each: -each[0])
            enough = [each for each in signals if each[0] >= self.budget.min_influence]
            wanted += [(row, *each) for each in enough or (signals[:1] if not parts[site] else [])]
        if not wanted:
            return
        rows, signals = [row for row, *_ in wanted], [signal for *_, signal in wanted]
        found = mlp_signal_causes(self.recording, layer, removals, rows, signals)
        for (row, influence, signal), causes in zip(wanted, found, strict=True):
            site = chosen[row]
            offset = Cause(Site("offset", layer, dest=site[1].dest), causes.held)
            own = (*causes.causes, offset) if causes.held else causes.causes
            parts[site].append(Part(influence, own, causes.direction, signal.direction))
            parts[site][-1:] = with_removals(parts[site][-1], causes.alone)
            if (signal.side, signal.source) not in self._alone((site[0], signal.target)):
                self.traces[site[0]].mlp_signals[signal.source, signal.target, signal.side] = causes
