"""Content: what is moved, and through which MLPs (values and MLP inputs), from a root down to the embeddings.

With patterns, norms and gates frozen, every component has a contribution to the root in the root's own unit
(`headtrace.models.frozen`), and so has every way into it: a head's value reads its source along one direction, an MLP
its own token along another. A node's contribution is the sum of what comes in, and of its own biases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.errors import IdentityError
from headtrace.models.frozen import Gradients, gradients
from headtrace.models.identities import tolerance_for
from headtrace.tracing.along import Along, Place, along
from headtrace.tracing.attribute_root import RootPart
from headtrace.tracing.causes import Cause
from headtrace.vocabulary import Site

if TYPE_CHECKING:
    from headtrace.models import Recording

SHARES_AT_ONCE = 16_000_000
"""Shares of many places are computed together as long as they number at most this many (64 MB in float32)."""
FIRST_LOOK = 128
"""Components that are looked at on each side of zero: no more can have one per cent of anything."""


@dataclass(frozen=True)
class Strongest:
    """The strongest causes of some content, and what opposes it; the largest of each first."""

    causes: tuple[Cause, ...]
    total: float
    """The sum of all positive shares, also of those that are not here."""


@dataclass(frozen=True)
class Content:
    """Contributions to the roots of a batch of prompts, and the directions that carry them."""

    recording: Recording
    reads: Sequence[Sequence[RootPart]]
    """Where each prompt's root reads."""
    gradients: Gradients
    counterfactual: Recording | None = None
    """The counterfactual prompts, recorded alike: then what counts is what is new, a component's write less its write
    there."""
    _known: dict[tuple[int, Site, bool], float] = field(default_factory=dict[tuple[int, Site, bool], float])
    """Contributions that were read before, by prompt, site and whether the counterfactual's."""

    @classmethod
    def of(
        cls,
        recording: Recording,
        reads: Sequence[Sequence[RootPart]],
        counterfactual: Recording | None = None,
    ) -> Content:
        start = torch.zeros_like(recording.residuals)
        for prompt, places in enumerate(reads):
            for read in places:
                start[read.point.layer, prompt, read.point.position] += read.direction
        content = cls(recording, reads, gradients(recording, start), counterfactual)
        content.require()
        return content

    def require(self) -> None:
        """What the tokens and all biases contribute must sum to what the roots read; else stop and say where."""
        g, real = self.gradients, _real(self.recording)
        found = [g.embedding()[None], g.attention_biases(), g.mlp_constant]
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

    def score(self, prompt: int, site: Site) -> float:
        """What a site is followed for: its contribution, or what of it the counterfactual prompt does not have."""
        whole = self.contribution(prompt, site)
        if self.counterfactual is None:
            return whole
        return whole - self.contribution(prompt, site, there=True)

    def contribution(self, prompt: int, site: Site, *, there: bool = False) -> float:
        """What a site contributes to its prompt's root, in the root's unit (``there``: would, with what it wrote in the
        counterfactual prompt)."""
        if (prompt, site, there) not in self._known:
            self.look_at([(prompt, site)], there=there)
        return self._known[prompt, site, there]

    def look_at(self, sites: Iterable[tuple[int, Site]], *, there: bool = False) -> None:
        """Read what many sites contribute: all of them together, so that a device is waited for once."""
        rec = self.counterfactual if there else self.recording
        new = [spot for spot in dict.fromkeys(sites) if (*spot, there) not in self._known]
        if not new or rec is None:
            return
        kinds: dict[str, list[tuple[int, Site]]] = {}
        for prompt, site in new:
            kinds.setdefault(site.kind, []).append((prompt, site))
        found = torch.cat([self._contributions(kind, spots, rec) for kind, spots in kinds.items()]).tolist()
        ordered = [spot for spots in kinds.values() for spot in spots]
        self._known.update({(*spot, there): value for spot, value in zip(ordered, found, strict=True)})

    def _contributions(
        self, kind: str, spots: list[tuple[int, Site]], rec: Recording
    ) -> Float[Tensor, " site"]:
        """What sites of one kind contribute: what each wrote, along its gradient."""
        g = self.gradients
        if kind == "root":
            return torch.stack([(rec.residuals[:, p] * g.start[:, p]).sum() for p, _ in spots])
        if kind == "rounding":
            return torch.stack([self._rounding(prompt, site) for prompt, site in spots])
        rows = [(s.layer or 0, p, s.head or 0, s.dest or 0, s.src or 0) for p, s in spots]
        layer, prompt, head, dest, src = torch.tensor(rows, device=g.residual.device).unbind(dim=1)
        if kind == "embedding":
            return (rec.embedding[prompt, dest] * g.residual[prompt, dest]).sum(-1)
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

    def constants(self, sites: Sequence[tuple[int, Site]]) -> Float[Tensor, " site"]:
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

    def causes(self, sites: Sequence[tuple[int, Site]]) -> list[Strongest]:
        """What each site's content comes from: the strongest shares of its contribution, and what opposes them."""
        places = [self.place(prompt, site) for prompt, site in sites]
        directions = [self.direction(prompt, site) for prompt, site in sites]
        return self.strongest_along(places, directions, sites)

    def root_causes(self, prompt: int) -> Strongest:
        """What a root's value comes from directly."""
        reads = self.reads[prompt]
        places = [Place(prompt, read.point.position, read.point.layer) for read in reads]
        found = self.strongest_along(places, [read.direction for read in reads])
        return Strongest(tuple(c for part in found for c in part.causes), sum(part.total for part in found))

    def strongest_along(
        self,
        places: Sequence[Place],
        directions: Sequence[Tensor],
        sites: Sequence[tuple[int, Site]] | None = None,
    ) -> list[Strongest]:
        """What the residual at each place has along its direction, from the strongest shares.

        ``sites`` are the nodes that read there, if the shares must sum to their contributions.
        """
        found: list[Strongest] = []
        rec, other = self.recording, self.counterfactual
        size = max(p.attention_layers for p in places) * rec.model.n_heads * rec.token_ids.shape[1]
        step = max(1, SHARES_AT_ONCE // max(size, 1))
        for first in range(0, len(places), step):
            some = slice(first, first + step)
            stacked = torch.stack(list(directions[some]))
            part = along(rec, places[some], stacked)
            if sites is not None:
                self._conserve(part, sites[some])
            if other is not None:
                part.shares.sub_(along(other, places[some], stacked).shares)
            found += strongest(part)
        return found

    def _conserve(self, part: Along, sites: Sequence[tuple[int, Site]]) -> None:
        """A node's contribution is the sum of the shares that enter it and of its own bias terms."""
        sums = (part.shares.sum(dim=1) + self.constants(sites), part.shares.abs().sum(dim=1))
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


def strongest(part: Along) -> list[Strongest]:
    """The strongest shares of each place, for and against."""
    shares = part.shares
    k = min(FIRST_LOOK, shares.shape[1])
    speaking, against = shares.topk(k, dim=1), shares.topk(k, dim=1, largest=False)
    totals = shares.clamp_min(0).sum(dim=1, keepdim=True)
    numbers = torch.cat((speaking.indices, against.indices), dim=1).tolist()
    values = torch.cat((speaking.values, against.values, totals), dim=1).tolist()
    return [
        Strongest(_causes(part, row, numbers[row], values[row][:-1]), values[row][-1])
        for row in range(len(part.places))
    ]


def _causes(part: Along, row: int, numbers: list[int], values: list[float]) -> tuple[Cause, ...]:
    """Components with their shares: the first half as far as they speak for something, the second as far as against."""
    position, half = part.places[row].position, len(numbers) // 2
    return tuple(
        Cause(part.index.component(number).at(position), value)
        for place, (number, value) in enumerate(zip(numbers, values, strict=True))
        if (value > 0 if place < half else value < 0)
    )


def _real(recording: Recording) -> Bool[Tensor, "batch token"]:
    positions = torch.arange(recording.token_ids.shape[1], device=recording.token_ids.device)
    return positions < torch.tensor(recording.lengths, device=positions.device)[:, None]
