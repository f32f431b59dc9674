"""Steps put to the test in the running model: their components take what they had in the other run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool
from torch import Tensor

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
LEAST_DIFFERENCE = 1e-3
"""A token differs between two runs if its residual does by more than this share of its length."""


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
    controlled: list[list[bool]] = []
    for pair in pairs:
        recording, other = pair.flow.recording[pair.prompt], pair.flow.other[pair.prompt]
        metric = require_metric(pair.root, recording, "what a step does")
        case = PatchingCase(recording, metric, OtherRun.of(other))
        cases.append(case)
        differing = _differing(recording, other)
        sets = [_sites(step, recording.model.n_layers) for step in steps]
        controls = [_controls(recording, sites, differing, generator) for sites in sets]
        controlled.append([bool(sites) for sites in controls])
        copies += [_without(case, sites) for both in zip(sets, controls, strict=True) for sites in both]
        drawn = drawn_like(recording, heads, generator, NEAREST, differing)
        for some in (heads, drawn):
            copies += [_without(case, some), case.keeping(case.places_of(site.firing for site in some))]
    values = iter(measure(copies, progress))
    found = [[next(values) for _ in range(2 * len(steps) + 4)] for _ in pairs]
    before = fmean(case.clean for case in cases)
    measured: list[Step] = []
    for place, step in enumerate(steps):
        without = fmean(row[2 * place] for row in found)
        random = [row[2 * place + 1] for row, has in zip(found, controlled, strict=True) if has[place]]
        measured.append(
            replace(step, measured=StepMeasurement(before, without, fmean(random) if random else None))
        )
    if not heads:
        return tuple(measured), None
    without, kept, random_without, random_kept = (
        fmean(row[2 * len(steps) + i] for row in found) for i in range(4)
    )
    other_value = fmean(pair.other_value for pair in pairs)
    return tuple(measured), MechanismTest(before, other_value, without, kept, random_without, random_kept)


def _sites(step: Step, n_layers: int) -> list[Site]:
    """The components that a step names. MLPs: those of its layers, so that the badge tests what the card says."""
    if step.role == MLPS:
        first, last = step.layers or (0, n_layers - 1)
        return [Site("mlp", layer, dest=step.dest) for layer in range(first, last + 1)]
    return [head.site for head in step.heads]


def _differing(recording: Recording, other: Recording) -> Bool[Tensor, "layer token"]:
    """Where the residual before a layer differs between the runs: elsewhere a patch can change next to nothing."""
    ends = [run.residuals[:-1, 0] for run in (recording, other)]
    return (ends[0] - ends[1]).norm(dim=-1) > LEAST_DIFFERENCE * ends[0].norm(dim=-1)


def _controls(
    recording: Recording,
    sites: Sequence[Site],
    differing: Bool[Tensor, "layer token"],
    generator: torch.Generator,
) -> list[Site]:
    """As many others: head components of the same layers and about the same attention that read a token at which the
    runs differ, or the MLPs of the same layers at another such token."""
    if sites and sites[0].kind == "mlp":
        free = differing[-1].clone()
        free[sites[0].dest or 0] = False
        others = free.nonzero()[:, 0].tolist()
        if not others:
            return []
        dest = others[int(torch.randint(len(others), (1,), generator=generator))]
        return [replace(site, dest=dest) for site in sites]
    return drawn_like(recording, sites, generator, NEAREST, differing)


def _without(case: PatchingCase, sites: Sequence[Site]) -> Copy:
    return Copy(case.recording, Intervention((Patch(case.source, tuple(sites)),)), case.metric)
