"""Amounts in the unit of the root, for what a content or complete circuit holds: edges, and hidden units of MLPs.

Which nodes and edges are kept is decided before, and by weights; these numbers only say how much they come to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.circuits import Neuron
from headtrace.errors import IdentityError
from headtrace.models.frozen import FrozenMLP, Units
from headtrace.models.identities import rounding_bound, tolerance_for
from headtrace.tracing.content import Content
from headtrace.tracing.signals import writes_at
from headtrace.tracing.sweep import PromptTrace
from headtrace.vocabulary import ROOT, Site

if TYPE_CHECKING:
    from headtrace.models import Recording


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
                passed.append(
                    writes_at(content.recording, prompt, sources) @ content.direction(prompt, target)
                )
                edges += [(source, target) for source in sources]
        if edges:  # all at once: each number by itself would be waited for
            trace.shares |= dict(zip(edges, torch.cat(passed).tolist(), strict=True))
        if neurons:
            mlps = [site for site in trace.contributions if site.kind == "mlp"]
            units = contributions_of_units(content, prompt, mlps)
            trace.neurons = {site: strongest_units(units[site], neurons) for site in mlps}


def passing(
    content: Content,
    prompt: int,
    sources: Sequence[Site],
    target: Site,
    recording: Recording | None = None,
) -> list[float]:
    """What each source contributes to the root by what a head moves of it, by what an MLP makes of it, or directly.

    With another ``recording``, what its writes would contribute on the same way.
    """
    writes = writes_at(recording or content.recording, prompt, sources)
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
