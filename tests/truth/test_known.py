"""The models do what they were built for, with the parts that they were given and with no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import headtrace
from headtrace.models import Recording
from headtrace.vocabulary import ROOT, Component, Firing, Side, Site, parse_head
from tests.truth.blueprint import ANSWER, BALLAST, Blueprint, Rows
from tests.truth.known import KNOWN, Case, Known
from tests.truth.limits import GATE, TWO_NEEDS, TWO_WRITERS

SHARP = 1e-6
"""Attention elsewhere: heads have logits of 40 on what they look for and of 20 where they rest, so e^-20 per key."""


def right(known: Known, model: headtrace.Model, n: int = 100) -> float:
    """The share of prompts whose answer is the model's first choice."""
    cases = known.cases(n)
    first = model.end_logits([case.ids for case in cases]).argmax(dim=-1).tolist()
    return sum(case.answer == found for case, found in zip(cases, first, strict=True)) / n


def firings(case: Case) -> list[Firing]:
    """The firings of a case's circuit."""
    sites = {site for edge in case.truth for site in (edge.source, edge.target) if site.kind == "head"}
    return [site.firing for site in sorted(sites)]


def test_the_model_gives_the_answer_to_every_prompt_of_its_kind(known: Known) -> None:
    assert right(known, known.model) == 1.0
    assert len({case.answer for case in known.cases(100)}) > 2, "there is something to decide"


def test_heads_attend_where_they_were_built_to(known: Known) -> None:
    cases = known.cases(20, seed=1)
    recording = known.model.record([case.ids for case in cases], last_logits=True)
    for prompt, case in enumerate(cases):
        for firing in firings(case):
            attention = recording.patterns[firing.layer, prompt, firing.head, firing.dest, firing.src]
            assert float(attention) > 1 - SHARP, firing


@pytest.mark.parametrize(
    ("name", "head"), [("induction", "L0H1"), ("marked", "L1H0"), ("before repeat", "L0H0")]
)
def test_a_previous_token_head_attends_to_the_token_before_at_every_position(name: str, head: str) -> None:
    known, (layer, number) = KNOWN[name], parse_head(head)
    pattern = known.model.record(known.cases(1)[0].ids).patterns[layer, 0, number]
    assert float(pattern.diagonal(offset=-1).min()) > 1 - SHARP
    assert float(pattern[0, 0]) == 1.0


def test_norm_scales_are_constant_whatever_is_written(known: Known) -> None:
    """So that a feature is read at its size; features other than the ballast have a length of about 3."""
    scales = known.model.record([case.ids for case in known.cases(20)]).norm_scales
    expected = BALLAST / known.model.d_model**0.5
    assert float((scales / expected - 1).abs().max()) < 0.01


def test_nothing_outside_the_circuit_takes_part(known: Known) -> None:
    """With everything idle silenced, the answer's logit is the same, to the little that norm scales move."""
    alone = headtrace.load(known.build(replace(known.plan(), idle=False)))
    prompts = [case.ids for case in known.cases(20)]
    assert float((alone.end_logits(prompts) - known.model.end_logits(prompts)).abs().max()) < 0.01 * ANSWER
    assert right(known, alone) == 1.0


def test_every_part_of_the_circuit_is_needed(known: Known) -> None:
    blueprint = known.plan()
    for place in blueprint.heads:
        heads = {other: head for other, head in blueprint.heads.items() if other != place}
        without = headtrace.load(known.build(replace(blueprint, heads=heads)))
        assert right(known, without) < 0.7, f"without head {place}"
    for layer in blueprint.mlps:
        without = headtrace.load(known.build(replace(blueprint, mlps={})))
        assert right(known, without) < 0.7, f"without mlp {layer}"


def test_the_sums_of_a_recording_hold_in_models_with_idle_and_rank_deficient_heads(known: Known) -> None:
    assert known.model.channels.deficient, "heads use fewer dimensions than they have"
    known.model.record([case.ids for case in known.cases(3)], last_logits=True).check()


@pytest.mark.parametrize("model", [*KNOWN.values(), TWO_WRITERS, TWO_NEEDS, GATE], ids=str)
def test_what_each_part_reads_was_written_by_the_sources_that_the_truth_names(model: Known) -> None:
    """The truth itself, without any tracing: the feature that a part reads, read in each component's write."""
    plan, cases = model.plan(), model.cases(5)
    recording = model.model.record([case.ids for case in cases])
    directions = plan.directions(model.model.d_model)
    for prompt, case in enumerate(cases):
        for target, side in {(edge.target, edge.side) for edge in case.truth}:
            rows, position, residual = read_by(plan, recording, prompt, target, side)
            read = [*case.truth, *case.beside]
            sources = [edge.source for edge in read if (edge.target, edge.side) == (target, side)]
            writes = sum(recording.write(source.component, prompt)[position] for source in sources)
            assert {source.dest for source in sources} == {position}
            assert torch.allclose(rows @ directions @ writes, rows @ directions @ residual, atol=SHARP), (
                target
            )
            assert float((rows @ directions @ residual).abs().max()) > 0.9


def read_by(
    plan: Blueprint, recording: Recording, prompt: int, target: Site, side: Side
) -> tuple[Rows, int, Float[Tensor, " d_model"]]:
    """The features that a part reads on one side, the position where, and the residual there."""
    last = recording.lengths[prompt] - 1
    if target == ROOT:
        return plan.unembed, last, recording.residuals[plan.n_layers, prompt, last]
    position = target.src if side in ("key", "value") else target.dest
    residual = recording.residuals[target.layer, prompt, position]
    if target.kind == "head":
        return getattr(plan.heads[target.layer, target.head], side), position, residual
    heads = [Component("head", target.layer, head) for head in range(plan.n_heads)]
    attention = sum(recording.write(head, prompt)[position] for head in heads)
    return plan.mlps[target.layer].read, position, residual + attention
