"""Steps put to the test in the running model: their components take what they had in the other run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.causal.changes import Intervention, OtherRun, Patch
from headtrace.causal.execute import Copy
from headtrace.causal.metric import require_metric
from headtrace.causal.patching import NEAREST, PatchingCase, drawn_like, measure
from headtrace.mechanism.parts import MechanismTest, Step, StepMeasurement
from headtrace.mechanism.rules import MLPS
from headtrace.progress import Progress, part_of
from headtrace.tracing.difference_circuit import PairFlow
from headtrace.vocabulary import Site

if TYPE_CHECKING:
    from headtrace.models import Recording

MOST_PAIRS = 2
"""Prompts to compare with that steps are measured against."""
TOKENS_AT_ONCE = 1024
"""Tokens of changed prompts after which the steps measured so far are handed out: shorter batches would cost more."""
LEAST_DIFFERENCE = 1e-3
"""A token differs between two runs if its residual does by more than this share of its length."""
NEAREST_TOKENS = 4
"""How many tokens, at which an MLP's write differs about as much, its control is drawn from."""


def measure_steps(
    flows: Sequence[PairFlow],
    steps: Sequence[Step],
    seed: int = 0,
    progress: Progress | None = None,
    partial: Callable[[tuple[Step, ...]], None] | None = None,
) -> tuple[tuple[Step, ...], MechanismTest | None]:
    """Each step with what the model does without it, and all of them together. All copies run as one batch.

    With ``partial`` the steps of a long prompt run one after the other, and it gets all steps, those measured so far
    with their numbers, after each of them.
    """
    pairs = measured_pairs(flows)
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
        differing, changes = _differing(recording, other), _changes(recording, other)
        sets = [_sites(step, recording.model.n_layers) for step in steps]
        controls = [
            _other_mlps(changes, sites, generator)
            if step.role == MLPS
            else drawn_like(recording, sites, generator, NEAREST, differing)
            for step, sites in zip(steps, sets, strict=True)
        ]
        controlled.append([bool(sites) for sites in controls])
        copies += [_without(case, sites) for both in zip(sets, controls, strict=True) for sites in both]
        drawn = drawn_like(recording, heads, generator, NEAREST, differing)
        for some in (heads, drawn):
            copies += [_without(case, some), case.keeping(case.places_of(site.firing for site in some))]
    own = 2 * len(steps) + 4  # copies of one pair
    parts = [range(own)] if partial is None else _parts(len(steps), 2 * len(pairs) * cases[0].length)
    found: list[dict[int, float]] = [{} for _ in pairs]
    before, measured, done = fmean(case.clean for case in cases), list(steps), 0
    for part in parts:
        some = [copies[pair * own + copy] for pair in range(len(pairs)) for copy in part]
        values = iter(measure(some, part_of(progress, done, len(copies))))
        done += len(some)
        for known in found:
            known.update((copy, next(values)) for copy in part)
        for place in range(part.start // 2, min(part.stop // 2, len(steps))):
            without = fmean(known[2 * place] for known in found)
            random = [
                known[2 * place + 1] for known, has in zip(found, controlled, strict=True) if has[place]
            ]
            measurement = StepMeasurement(before, without, fmean(random) if random else None)
            measured[place] = replace(steps[place], measured=measurement)
        if partial is not None and part.stop < own:
            partial(tuple(measured))
    if not heads:
        return tuple(measured), None
    without, kept, random_without, random_kept = (
        fmean(known[copy] for known in found) for copy in range(own - 4, own)
    )
    other_value = fmean(pair.other_value for pair in pairs)
    return tuple(measured), MechanismTest(
        before, other_value, without, kept, random_without, random_kept, len(pairs)
    )


def measured_pairs(flows: Sequence[PairFlow]) -> list[PairFlow]:
    """The pairs that steps are measured with. Found counterfactuals come in kinds, one after the other, and in each the
    words take turns: so spread over all of them, and no word twice as long as there is another."""
    chosen: list[PairFlow] = []
    for turn in range(min(MOST_PAIRS, len(flows))):
        seen = {_changed_places(pair) for pair in chosen}
        start = turn * len(flows) // MOST_PAIRS
        order = [
            flow for flow in (*flows[start:], *flows[:start]) if not any(flow is each for each in chosen)
        ]
        chosen.append(next((pair for pair in order if _changed_places(pair) not in seen), order[0]))
    return chosen


def _changed_places(pair: PairFlow) -> frozenset[int]:
    """The positions at which the two prompts of a pair have other tokens."""
    one, other = (run.token_ids[pair.prompt] for run in (pair.flow.recording, pair.flow.other))
    return frozenset((one != other).nonzero()[:, 0].tolist())


def _parts(n_steps: int, tokens: int) -> list[range]:
    """Which copies of a pair run together, where a step and its control take so many tokens in all: as many steps as
    make a full batch, in turn. The test of all steps is part of the last."""
    at_once = max(1, TOKENS_AT_ONCE // tokens)
    starts = [*range(0, n_steps, at_once)] or [0]
    ends = [2 * start for start in starts[1:]] + [2 * n_steps + 4]
    return [range(2 * start, end) for start, end in zip(starts, ends, strict=True)]


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


def _changes(recording: Recording, other: Recording) -> Float[Tensor, "layer token"]:
    """How far each MLP's write is from its write in the other run; 0 where the two are the same but for rounding."""
    writes = [run.mlp_writes[:, 0] for run in (recording, other)]
    found = (writes[0] - writes[1]).norm(dim=-1)
    return found.where(found > LEAST_DIFFERENCE * writes[0].norm(dim=-1), 0.0)


def _other_mlps(
    changes: Float[Tensor, "layer token"], sites: Sequence[Site], generator: torch.Generator
) -> list[Site]:
    """For each MLP another one of its layer, at a token where its write differs about as much between the runs."""
    found: list[Site] = []
    for site in sites:
        sizes = changes[site.layer or 0]
        gap = (sizes - sizes[site.dest or 0]).abs().masked_fill(sizes == 0, float("inf"))
        gap[site.dest or 0] = float("inf")
        count = int(gap.isfinite().sum())
        if count:
            near = gap.topk(min(NEAREST_TOKENS, count), largest=False).indices
            place = near[int(torch.randint(len(near), (1,), generator=generator))]
            found.append(replace(site, dest=int(place)))
    return found


def _without(case: PatchingCase, sites: Sequence[Site]) -> Copy:
    return Copy(case.recording, Intervention((Patch(case.source, tuple(sites)),)), case.metric)
