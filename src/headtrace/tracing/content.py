"""Content: what is moved, and through which MLPs (values and MLP inputs), from a root down to the embeddings.

With patterns, norms and gates frozen, every component has a contribution to the root in the root's own unit
(`headtrace.models.frozen`), and so has every way into it: a head's value reads its source along one direction, an MLP
its own token along another. A node's contribution is the sum of what comes in, and of its own biases.

`Content` has the contributions of a batch of prompts; `add_amounts` fills in those of the edges and hidden units of a
circuit, and `moved` says what one firing moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.circuits import Neuron
from headtrace.errors import IdentityError, InputError
from headtrace.models.frozen import FrozenMLP, Gradients, Level, Units, gradients, levels, mlp_rounding
from headtrace.models.identities import rounding_bound, tolerance_for
from headtrace.roots import Root
from headtrace.tracing.attribute_root import (
    Place,
    ProjectedWrites,
    ReadPoint,
    RootPart,
    attribute_root,
    carries_nothing,
    project_writes,
)
from headtrace.tracing.causes import Cause, PromptSite
from headtrace.tracing.components import ComponentIndex
from headtrace.tracing.methods import IG_STEPS
from headtrace.vocabulary import ROOT, Firing, Site

if TYPE_CHECKING:
    from headtrace.models import Recording
    from headtrace.tracing.sweep import PromptTrace

SHARES_AT_ONCE = 16_000_000
"""Shares of many places are computed together as long as they number at most this many (64 MB in float32)."""
FIRST_LOOK = 128
"""Components that are looked at on each side of zero: no more can have one per cent of anything."""


@dataclass(frozen=True)
class Strongest:
    """The strongest causes of some content, and what opposes it; the largest of each first."""

    shares: tuple[tuple[int | None, float], ...]
    """Numbers of components and what each contributes; None stands for the reader's own biases."""
    total: float
    """The sum of all positive shares, also of those that are not here."""
    index: ComponentIndex
    place: Place

    @property
    def top(self) -> float:
        """What the strongest cause contributes."""
        return max((weight for _, weight in self.shares), default=0.0)

    def causes(self, least: float, top: float) -> list[Cause]:
        """Those of at least the size ``least``, whatever they do, and the strongest one."""
        chosen = [each for each in self.shares if abs(each[1]) >= least or each[1] == top]
        return [Cause(self._site(number), weight) for number, weight in chosen]

    def opposite(self) -> Strongest:
        """The same for what opposes the root: what makes it do so counts as for it, the largest first."""
        total = -sum(weight for _, weight in self.shares if weight < 0)
        return replace(self, shares=tuple(sorted(self.shares, key=lambda each: each[1])), total=total)

    def _site(self, number: int | None) -> Site:
        if number is None:
            return Site("offset", self.place.layer, dest=self.place.position)
        return self.index.component(number).at(self.place.position)


@dataclass(frozen=True)
class Content:
    """Contributions to the roots of a batch of prompts, and the directions that carry them."""

    recording: Recording
    reads: Sequence[Sequence[RootPart]]
    """Where each prompt's root reads."""
    gradients: Gradients
    _known: dict[PromptSite, float] = field(default_factory=dict[PromptSite, float])
    """Contributions that were read before."""

    @classmethod
    def of(
        cls,
        recording: Recording,
        reads: Sequence[Sequence[RootPart]],
    ) -> Content:
        recording.keep_head_writes()
        start = torch.zeros_like(recording.residuals)
        for prompt, places in enumerate(reads):
            for read in places:
                start[read.point.layer, prompt, read.point.position] += read.direction
        content = cls(recording, reads, gradients(recording, start))
        content.require()
        return content

    def require(self) -> None:
        """What tokens, positions and all biases contribute must sum to what the roots read; else stop and say where."""
        g, real = self.gradients, _real(self.recording)
        found = [g.embedding()[None], g.position()[None], g.attention_biases(), g.mlp_constant]
        parts = torch.cat([*found, g.roundings()] if self.recording.model.half else found) * real
        found = parts.sum((0, 2))
        recorded = (self.recording.residuals * g.start).sum((0, 2, 3))
        # Each part is a product of a write and a gradient, both rounded.
        size = torch.maximum(recorded.abs(), parts.abs().sum((0, 2))).clamp_min(1e-30)
        error = torch.nan_to_num((found - recorded).abs() / size, nan=torch.inf)
        allowed, worst = tolerance_for(self.recording.model.dtype), int(error.argmax())
        if float(error[worst]) > allowed:
            raise IdentityError(
                f"The contributions of all tokens and biases of prompt {worst} sum to {float(found[worst]):.6g}, the "
                f"root reads {float(recorded[worst]):.6g}: relative error {float(error[worst]):.1e}, allowed "
                f"{allowed:.0e}."
            )

    def contribution(self, prompt: int, site: Site) -> float:
        """What a site contributes to its prompt's root, in the root's unit."""
        if (prompt, site) not in self._known:
            self.look_at([(prompt, site)])
        return self._known[prompt, site]

    def look_at(self, sites: Iterable[PromptSite]) -> None:
        """Read what many sites contribute: all of them together, so that a device is waited for once."""
        new = [spot for spot in dict.fromkeys(sites) if spot not in self._known]
        if not new:
            return
        kinds: dict[str, list[PromptSite]] = {}
        for prompt, site in new:
            kinds.setdefault(site.kind, []).append((prompt, site))
        found = torch.cat([self._contributions(kind, spots) for kind, spots in kinds.items()]).tolist()
        ordered = [spot for spots in kinds.values() for spot in spots]
        self._known.update(zip(ordered, found, strict=True))

    def _contributions(self, kind: str, spots: list[PromptSite]) -> Float[Tensor, " site"]:
        """What sites of one kind contribute: what each wrote, along its gradient."""
        g, rec = self.gradients, self.recording
        if kind == "root":
            return torch.stack([(rec.residuals[:, p] * g.start[:, p]).sum() for p, _ in spots])
        if kind == "rounding":
            return torch.stack([self._rounding(prompt, site) for prompt, site in spots])
        rows = [(s.layer or 0, p, s.head or 0, s.dest or 0, s.src or 0) for p, s in spots]
        layer, prompt, head, dest, src = torch.tensor(rows, device=g.residual.device).unbind(dim=1)
        if kind == "embedding":
            return (rec.embedding[prompt, dest] * g.residual[prompt, dest]).sum(-1)
        if kind == "position":
            return g.position()[prompt, dest]
        if kind == "mlp":
            return (rec.mlp_writes[layer, prompt, dest] * g.mlp[layer, prompt, dest]).sum(-1)
        if kind == "attention_bias":
            bias = (rec.model.weights.attention_bias[layer] * g.attention[layer, prompt, dest]).sum(-1)
            return bias if rec.post_norm_scales is None else bias / rec.post_norm_scales[layer, prompt, dest]
        moved = (g.values[layer, prompt, head, dest] * rec.bare_values[layer, head, prompt, src]).sum(-1)
        return rec.attention.at(layer, prompt, head, dest, src) * moved

    def _rounding(self, prompt: int, site: Site) -> Float[Tensor, ""]:
        """What rounding added to the residual in a layer contributes; behind the last one, to the logits themselves."""
        layer, dest = site.layer or 0, site.dest or 0
        if layer < self.recording.model.n_layers:
            g = self.gradients.mlp[layer, prompt, dest]
            return self.recording.roundings[layer, prompt, dest] @ g
        reads = [read for read in self.reads[prompt] if read.point.position == dest]
        total = self.gradients.residual.new_zeros(())
        return sum((read.contributions[read.point.index.n_non_head - 1] for read in reads), total)

    def embeddings(self, prompt: int) -> tuple[float, ...]:
        """What each token of a prompt contributes to its root."""
        sites = [Site("embedding", dest=token) for token in range(self.recording.lengths[prompt])]
        self.look_at((prompt, site) for site in sites)
        return tuple(self.contribution(prompt, site) for site in sites)

    def place(self, prompt: int, site: Site) -> Place:
        """Where a head's value or an MLP reads."""
        layer, dest = site.layer or 0, site.dest or 0
        if site.kind == "head":
            return Place(prompt, site.src or 0, layer)
        model = self.recording.model
        return Place(prompt, dest, layer, not model.architecture.parallel(model.config))

    def direction(self, prompt: int, site: Site) -> Float[Tensor, " d_model"]:
        """Along which direction of what it reads a head's value or an MLP carries content to the root."""
        g, layer, dest = self.gradients, site.layer or 0, site.dest or 0
        if site.kind == "mlp":
            return g.through_mlp[layer, prompt, dest]
        return g.value_direction(layer, site.head or 0, prompt, dest, site.src or 0)

    def constants(self, sites: Sequence[PromptSite]) -> Float[Tensor, " site"]:
        """What each node's own biases contribute (a head's are in its layer's attention bias), and in half precision
        what rounding did while it read."""
        g, half, found = self.gradients, self.recording.model.half, list[Tensor]()
        nothing = g.mlp_constant.new_zeros(())
        for prompt, site in sites:
            layer, dest = site.layer or 0, site.dest or 0
            if site.kind == "mlp":
                constant = g.mlp_constant[layer, prompt, dest]
                found.append(constant + g.mlp_roundings[layer, prompt, dest] if half else constant)
            elif half:
                found.append(g.value_rounding(layer, prompt, site.head or 0, dest, site.src or 0))
            else:
                found.append(nothing)
        return torch.stack(found)

    def gradient(self, prompt: int, site: Site) -> Float[Tensor, " d_model"]:
        """The direction of what a head or an MLP writes that carries its contribution."""
        g, layer, dest = self.gradients, site.layer or 0, site.dest or 0
        return (g.mlp if site.kind == "mlp" else g.attention)[layer, prompt, dest]

    def causes(self, sites: Sequence[PromptSite]) -> list[Strongest]:
        """What each site's content comes from: the strongest shares of its contribution, and what opposes them."""
        places = [self.place(prompt, site) for prompt, site in sites]
        directions = [self.direction(prompt, site) for prompt, site in sites]
        return self.strongest_along(places, directions, sites)

    def root_causes(self, prompt: int) -> list[Strongest]:
        """What a root's value comes from directly, for each place that it reads."""
        reads = self.reads[prompt]
        places = [Place(prompt, read.point.position, read.point.layer) for read in reads]
        return self.strongest_along(places, [read.direction for read in reads])

    def strongest_along(
        self,
        places: Sequence[Place],
        directions: Sequence[Tensor],
        sites: Sequence[PromptSite] | None = None,
        constants: Float[Tensor, " place"] | None = None,
    ) -> list[Strongest]:
        """What the residual at each place has along its direction, from the strongest shares.

        ``sites`` are the nodes that read there, if the shares must sum to their contributions. ``constants`` is what
        the biases of the reader hold; without them, that of ``sites``.
        """
        found: list[Strongest] = []
        rec = self.recording
        size = (
            max((p.attention_layers for p in places), default=0) * rec.model.n_heads * rec.token_ids.shape[1]
        )
        step = max(1, SHARES_AT_ONCE // max(size, 1))
        for first in range(0, len(places), step):
            some = slice(first, first + step)
            stacked = torch.stack(list(directions[some]))
            part = project_writes(rec, places[some], stacked)
            held = None if constants is None else constants[some]
            if sites is not None:
                held = self.constants(sites[some])
                self._conserve(part, held, sites[some])
            found += strongest(part, held)
        return found

    def _conserve(
        self, part: ProjectedWrites, constants: Float[Tensor, " place"], sites: Sequence[PromptSite]
    ) -> None:
        """A node's contribution is the sum of the shares that enter it and of its own bias terms."""
        sums = (part.shares.sum(dim=1) + constants, part.shares.abs().sum(dim=1))
        allowed = tolerance_for(self.recording.model.dtype)
        self.look_at(sites)
        for (prompt, site), (made, size) in zip(sites, torch.stack(sums, dim=1).tolist(), strict=True):
            whole = self.contribution(prompt, site)
            error = abs(made - whole) / max(size, abs(whole), 1e-30)
            if not error <= allowed:
                raise IdentityError(
                    f"What enters {site} (prompt {prompt}) sums to {made:.6g}, but it contributes "
                    f"{whole:.6g}: relative error {error:.1e}, allowed {allowed:.0e}."
                )


def strongest(part: ProjectedWrites, constants: Float[Tensor, " place"] | None = None) -> list[Strongest]:
    """The strongest shares of each place: the largest positive ones, then the most negative ones.

    What a reader's own biases hold (``constants``) is an offset among them. Shares of the size of rounding are left
    out: nothing is passed on to them.
    """
    shares = part.shares
    held = shares.new_zeros(len(shares)) if constants is None else constants
    k = min(FIRST_LOOK, shares.shape[1])
    largest, smallest = shares.topk(k, dim=1), shares.topk(k, dim=1, largest=False)
    totals = shares.clamp_min(0).sum(dim=1) + held.clamp_min(0)
    least = carries_nothing(shares.dtype) * (shares.abs().sum(dim=1) + held.abs())
    values = torch.cat((largest.values.clamp_min(0), smallest.values.clamp_max(0)), dim=1)
    numbers = torch.cat((largest.indices, smallest.indices), dim=1).tolist()
    rows = torch.cat((torch.stack((totals, least, held), dim=1), values), dim=1).tolist()
    found: list[Strongest] = []
    for place, mine, (total, nothing, own, *weights) in zip(part.places, numbers, rows, strict=True):
        causes: list[tuple[int | None, float]] = [
            (number, weight) for number, weight in zip(mine, weights, strict=True) if abs(weight) > nothing
        ]
        if abs(own) > nothing:
            causes.insert(sum(weight > own for _, weight in causes if weight > 0), (None, own))
        found.append(Strongest(tuple(causes), total, part.index, place))
    return found


def _real(recording: Recording) -> Bool[Tensor, "batch token"]:
    positions = torch.arange(recording.token_ids.shape[1], device=recording.token_ids.device)
    return positions < torch.tensor(recording.lengths, device=positions.device)[:, None]


# -- amounts of edges and hidden units -----------------------------------------------------------------------


@torch.inference_mode()
def add_amounts(content: Content, traces: Sequence[PromptTrace], neurons: int) -> None:
    """Fill in what passes through each edge into a value or an MLP, and the strongest hidden units of every MLP."""
    for prompt, trace in enumerate(traces):
        if not content.reads[prompt]:
            continue
        edges, passed = list[tuple[Site, Site]](), list[Tensor]()
        for target, found in trace.causes.items():
            sources = [
                c.site
                for side in ("value", "input")
                if side in found.sides
                for c in found.sides[side].in_graph
            ]
            if target != ROOT and sources:
                passed.append(content.recording.writes(sources, prompt) @ content.direction(prompt, target))
                edges += [(source, target) for source in sources]
        if edges:  # all at once: each number by itself would be waited for
            trace.shares |= dict(zip(edges, torch.cat(passed).tolist(), strict=True))
            biased = [edge for edge in edges if edge[0].kind == "offset"]
            if biased:
                held = content.constants([(prompt, target) for _, target in biased]).tolist()
                trace.shares |= dict(zip(biased, held, strict=True))
        if neurons:
            mlps = [site for site in trace.contributions if site.kind == "mlp"]
            units = contributions_of_units(content, prompt, mlps)
            trace.neurons = {site: strongest_units(units[site], neurons) for site in mlps}


def passing(
    content: Content,
    prompt: int,
    sources: Sequence[Site],
    target: Site,
) -> list[float]:
    """What each source contributes to the root by what a head moves of it, by what an MLP makes of it, or directly."""
    writes = content.recording.writes(sources, prompt)
    if target != ROOT:
        return (writes @ content.direction(prompt, target)).tolist()
    reads = [(read.point.position, read.direction) for read in content.reads[prompt]]
    return [
        sum(float(write @ direction) for position, direction in reads if position == source.dest)
        for source, write in zip(sources, writes, strict=True)
    ]


def contributions_of_units(
    content: Content, prompt: int, mlps: Sequence[Site]
) -> dict[Site, Float[Tensor, " d_hidden"]]:
    """What every hidden unit of some MLPs contributes to the root; they must sum to what the MLP contributes."""
    found: dict[Site, Tensor] = {}
    device = content.recording.model.device
    for layer in {site.layer or 0 for site in mlps}:
        here = [site for site in mlps if site.layer == layer]
        positions = torch.tensor([site.dest or 0 for site in here], device=device)
        rows = (torch.full_like(positions, prompt), positions)
        direction = content.gradients.mlp[layer][rows]
        units = FrozenMLP.of(content.recording, layer, rows).by_unit(direction)
        _require_whole(content, prompt, here, units)
        found |= zip(here, units.contributions, strict=True)
    return found


def _require_whole(content: Content, prompt: int, sites: Sequence[Site], units: Units) -> None:
    sums = (units.contributions.sum(dim=-1) + units.constant).tolist()
    sizes = units.contributions.abs().sum(dim=-1).tolist()
    model = content.recording.model
    allowed = rounding_bound(model, "mlp") if model.half else tolerance_for(model.dtype)
    for site, made, size in zip(sites, sums, sizes, strict=True):
        whole = content.contribution(prompt, site)
        error = abs(made - whole) / max(size, abs(whole), 1e-30)
        if not error <= allowed:
            raise IdentityError(
                f"The hidden units of {site} (prompt {prompt}) contribute {made:.6g} in all, but it contributes "
                f"{whole:.6g}: relative error {error:.1e}, allowed {allowed:.0e}."
            )


def strongest_units(contributions: Float[Tensor, " d_hidden"], most: int) -> tuple[Neuron, ...]:
    """The units that contribute most, for the root or against it.

    >>> strongest_units(torch.tensor([0.5, -2.0, 1.0]), 2)
    (Neuron(unit=1, contribution=-2.0), Neuron(unit=2, contribution=1.0))
    """
    units = contributions.abs().topk(min(most, len(contributions))).indices.tolist()
    return tuple(Neuron(unit, float(contributions[unit])) for unit in units)


# -- what one firing moved -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """What a head wrote at the destination of a firing from its source."""

    firing: Firing
    norm: float
    """Its length, relative to that of the residual at the input of the layer, into which it is written."""
    promotes: tuple[tuple[str, float], ...]
    """The tokens that it raises most if it is read straight through the final norm (its scale frozen) and the
    unembedding, with the logits that it adds; strongest first."""
    suppresses: tuple[tuple[str, float], ...]
    """Those that it lowers most."""
    contribution: float | None = None
    """To the root, on all ways through frozen attention, norms and gates, in the unit of the root."""
    measure: str | None = None
    """What the contribution is measured in."""


@torch.inference_mode()
def moved(
    recording: Recording,
    firing: Firing | str,
    root: Root | None = None,
    *,
    prompt: int = 0,
    k: int = 8,
    ig_steps: int = IG_STEPS,
) -> Moved:
    """What a firing moved: the part of a head's write that came from one source, with the ``k`` tokens that it raises
    and lowers most.

    With a root (``tracer.request(...).resolve(model).root``) also what it contributes to it, for which the recording
    must have kept what MLPs read (``keep=headtrace.models.frozen.CONTENT_FIELDS``).

    >>> import headtrace
    >>> from headtrace.models.frozen import CONTENT_FIELDS
    >>> model = headtrace.load("builtin")
    >>> prompt = "When Mary and John went to the store, John gave a drink to"
    >>> recording = model.record(prompt, keep=CONTENT_FIELDS)
    >>> request = headtrace.Tracer(model).request(recording.token_ids[0], answer=" Mary", wrong=" John")
    >>> found = moved(recording, "L1H2:14:2", request.resolve(model).root)
    >>> found.promotes[0][0], found.measure, found.contribution > 1
    ('Mary', 'logit difference', True)
    """
    firing, _ = recording.find_firing(firing, prompt)
    if k < 1:
        raise InputError(f"k={k}: expected at least 1 token.")
    prompt %= len(recording)
    written = recording.write(firing.site.component, prompt, firing.dest)
    residual = recording.residuals[firing.layer, prompt, firing.dest]
    logits = ReadPoint(recording, prompt, firing.dest, recording.model.n_layers).logits_of(written[None])[0]
    contribution = None
    if root is not None:
        onto = attention_gradient(recording, root, firing.layer, prompt, ig_steps, first=firing.dest)
        contribution = float(written @ onto[firing.dest - recording.lengths[prompt]])
    return Moved(
        firing,
        float(written.norm() / residual.norm()),
        _extremes(recording, logits, k),
        tuple((token, -value) for token, value in _extremes(recording, -logits, k)),
        contribution,
        None if root is None else root.measure,
    )


def _extremes(recording: Recording, logits: Float[Tensor, " vocab"], k: int) -> tuple[tuple[str, float], ...]:
    values, ids = logits.topk(min(k, len(logits)))
    return tuple(zip(recording.model.output_labels(ids.tolist()), values.tolist(), strict=True))


@torch.inference_mode()
def attention_gradient(
    recording: Recording,
    root: Root,
    layer: int,
    prompt: int = 0,
    ig_steps: int = IG_STEPS,
    *,
    first: int = 0,
) -> Float[Tensor, "token d_model"]:
    """The direction, at every token from ``first`` on, along which what a layer's attention writes contributes to a
    root.

    The frozen model is swept from the top to that layer and from the last token to the first that is asked for, no
    further; what is read there and what was written behind must sum to what the root reads.
    """
    one = recording if len(recording) == 1 else recording[prompt]
    first = 0 if one.model.half else first  # what rounding did is known of whole layers only
    start = torch.zeros_like(one.residuals)
    for part in attribute_root(root, one, 0, ig_steps).parts:
        start[part.point.layer, 0, part.point.position] += part.direction
    others: list[Tensor] = []
    for level in levels(one, start, first):
        others += _beside(one, level, first)
        if level.layer == layer:
            _require_sum(one, start, layer, first, level.below, others)
            return level.attention[0]
    raise InputError(f"There is no layer {layer}: the model has layers 0 to {recording.model.n_layers - 1}.")


def _beside(recording: Recording, level: Level, first: int) -> list[Float[Tensor, "batch token"]]:
    """What a layer contributes without the residual from ``first`` on: its biases, what heads move from before, and
    what rounding did."""
    layer = level.layer
    bias = (recording.attention_bias(layer)[:, first:] * level.attention).sum(-1)
    values = recording.bare_values[layer].transpose(0, 1)[:, :, :first]
    before = recording.pattern(layer)[:, :, first:, :first] * (level.values @ values.transpose(-1, -2))
    found = [level.pulled.constant, bias, before.sum((1, 3))]
    return [*found, _rounding(recording, level)] if recording.model.half else found


def _rounding(recording: Recording, level: Level) -> Float[Tensor, "batch token"]:
    """What rounding in a layer of a model in half precision contributes."""
    layer, group = level.layer, recording.model.weights.group
    values = recording.value_roundings(layer).repeat_interleave(group, dim=1)
    read = (recording.pattern(layer) * (level.values @ values.transpose(-1, -2))).sum((1, 2))
    written = recording.roundings[layer] + mlp_rounding(recording, layer)
    return read + (written * level.mlp).sum(-1)


def _require_sum(
    recording: Recording, start: Tensor, layer: int, first: int, below: Tensor, others: list[Tensor]
) -> None:
    """The residual below a layer, and all that is not of it from there on, give what the root reads from there on."""
    parts = torch.cat(((recording.residuals[layer, :, first:] * below).sum(-1), *others))
    found, read = float(parts.sum()), recording.residuals[layer:, :, first:] * start[layer:, :, first:]
    recorded, size = float(read.sum()), float(parts.abs().sum())
    error = abs(found - recorded) / max(size, abs(recorded), 1e-30)
    if not error <= tolerance_for(recording.model.dtype):
        raise IdentityError(
            f"What passes layer {layer} contributes {found:.6g} to the root, which reads {recorded:.6g}: relative "
            f"error {error:.1e}, allowed {tolerance_for(recording.model.dtype):.0e}."
        )
