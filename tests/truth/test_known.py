"""The models do what they were built for, with the parts that they were given and with no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

import headtrace
from headtrace.vocabulary import Firing
from tests.truth.blueprint import ANSWER, BALLAST
from tests.truth.known import KNOWN, Case, Known

SHARP = 1e-6
"""Attention elsewhere: heads have logits of 40 on what they look for and of 20 where they rest, so e^-20 per key."""


def right(known: Known, model: headtrace.Model, n: int = 100) -> float:
    """The share of prompts whose answer is the model's first choice."""
    cases = known.cases(n)
    first = model.end_logits([case.ids for case in cases]).argmax(dim=-1).tolist()
    return sum(case.answer == found for case, found in zip(cases, first, strict=True)) / n


def firings(case: Case) -> list[Firing]:
    """The firings of a case's circuit."""
    names = {name for edge in case.truth for name in (edge.source, edge.target) if name.startswith("L")}
    return [Firing.parse(name) for name in sorted(names)]


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


@pytest.mark.parametrize(("name", "head"), [("induction", 1), ("marked", 0), ("before repeat", 0)])
def test_a_previous_token_head_attends_to_the_token_before_at_every_position(name: str, head: int) -> None:
    known = KNOWN[name]
    pattern = known.model.record(known.cases(1)[0].ids).patterns[0, 0, head]
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
