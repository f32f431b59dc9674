"""Steps put to the test in the running model: their components take what they had in the other run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from headtrace.causal.changes import Intervention, OtherRun, Patch
from headtrace.causal.execute import Copy
from headtrace.causal.metric import require_metric
from headtrace.causal.patching import NEAREST, PatchingCase, drawn_like, measure
from headtrace.mechanism.parts import MechanismTest, Step, StepMeasurement
from headtrace.mechanism.steps import MLPS
from headtrace.progress import Progress
from headtrace.tracing.difference_circuit import PairFlow
from headtrace.vocabulary import Site

if TYPE_CHECKING:
    from headtrace.models import Recording

MOST_PAIRS = 2
"""Prompts to compare with that steps are measured against."""


def measure_steps(
    flows: Sequence[PairFlow], steps: Sequence[Step], seed: int = 0, progress: Progress | None = None
) -> tuple[tuple[Step, ...], MechanismTest | None]:
    """Each step with what the model does without it, and all of them together. All copies run as one batch."""
    # Found counterfactuals come in kinds, one after the other: those that are measured are spread over all of them.
    pairs = [flows[i * len(flows) // MOST_PAIRS] for i in range(min(MOST_PAIRS, len(flows)))]
    generator = torch.Generator().manual_seed(seed)
    heads = [head.site for step in steps for head in step.heads]
    copies: list[Copy] = []
    cases: list[PatchingCase] = []
    for pair in pairs:
        recording = pair.flow.recording[pair.prompt]
        metric = require_metric(pair.root, recording, "what a step does")
        case = PatchingCase(recording, metric, OtherRun.of(pair.flow.other[pair.prompt]))
        cases.append(case)
        for step in steps:
            sites = _sites(step, recording.model.n_layers)
            copies.append(_without(case, sites))
            copies.append(_without(case, _controls(recording, sites, generator)))
        drawn = drawn_like(recording, heads, generator, NEAREST)
        for some in (heads, drawn):
            places = case.places_of(site.firing for site in some)
            copies += [case.without(places), case.keeping(places)]
    values = iter(measure(copies, progress))
    found = [[next(values) for _ in range(2 * len(steps) + 4)] for _ in pairs]
    before = fmean(case.clean for case in cases)
    measured: list[Step] = []
    for place, step in enumerate(steps):
        without, random = (fmean(row[2 * place + i] for row in found) for i in range(2))
        measured.append(replace(step, measured=StepMeasurement(before, without, random)))
    if not heads:
        return tuple(measured), None
    without, kept, random_without, random_kept = (
        fmean(row[2 * len(steps) + i] for row in found) for i in range(4)
    )
    other = fmean(pair.other_value for pair in pairs)
    return tuple(measured), MechanismTest(before, other, without, kept, random_without, random_kept)


def _sites(step: Step, n_layers: int) -> list[Site]:
    if step.role == MLPS:
        return [Site("mlp", layer, dest=step.dest) for layer in range(n_layers)]
    return [head.site for head in step.heads]


def _controls(recording: Recording, sites: Sequence[Site], generator: torch.Generator) -> list[Site]:
    """As many others: head components of the same layers and about the same attention, or the MLPs at another token."""
    if sites and sites[0].kind == "mlp":
        others = [t for t in range(recording.lengths[0]) if t != sites[0].dest] or [sites[0].dest or 0]
        dest = others[int(torch.randint(len(others), (1,), generator=generator))]
        return [replace(site, dest=dest) for site in sites]
    return drawn_like(recording, sites, generator, NEAREST)


def _without(case: PatchingCase, sites: Sequence[Site]) -> Copy:
    return Copy(case.recording, Intervention((Patch(case.source, tuple(sites)),)), case.metric)
