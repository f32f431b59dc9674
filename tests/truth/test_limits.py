"""What the methods do not tell, by their own definitions, on models where it is known to be there.

An expected failure here is a limit, not a slip: where a method outgrows it, the test says so.
"""

from __future__ import annotations

import pytest

import headtrace
from headtrace.circuits import Circuit
from tests.truth.known import Case, Known
from tests.truth.limits import GATE, TWO_NEEDS, TWO_WRITERS
from tests.truth.scoring import found_edges, score, seen_by


def traced(known: Known, method: str = "acc++", **options) -> list[tuple[Case, Circuit]]:
    tracer = headtrace.Tracer(known.model, method=method)
    return [
        (case, tracer.trace(list(case.ids), case.answer, case.wrong, **options)) for case in known.cases(8)
    ]


@pytest.mark.parametrize("known", [TWO_WRITERS, TWO_NEEDS, GATE], ids=str)
def test_the_model_gives_the_answer_to_every_prompt_of_its_kind(known: Known) -> None:
    cases = known.cases(100)
    first = known.model.end_logits([case.ids for case in cases]).argmax(dim=-1).tolist()
    assert first == [case.answer for case in cases]


@pytest.mark.parametrize("known", [TWO_WRITERS, TWO_NEEDS], ids=str)
def test_what_accpp_finds_is_true_also_where_it_is_not_the_whole(known: Known) -> None:
    for case, circuit in traced(known):
        assert score(circuit, seen_by("attention", case.truth)).precision == 1.0


@pytest.mark.parametrize("known", [TWO_WRITERS, TWO_NEEDS], ids=str)
def test_acc_which_divides_logits_finds_the_whole(known: Known) -> None:
    for case, circuit in traced(known, "acc"):
        assert score(circuit, seen_by("attention", case.truth)).recall == 1.0
        assert score(circuit, [*case.truth, *case.beside]).precision == 1.0


def test_accpp_removes_all_heads_that_write_one_signal() -> None:
    """While one of them is left, the head attends as before: the claim needs both."""
    for case, circuit in traced(TWO_WRITERS):
        assert {edge.place for edge in seen_by("attention", case.truth)} <= set(found_edges(circuit, at=0.0))


def test_of_two_writers_each_of_which_suffices_one_is_followed_and_the_other_is_named() -> None:
    """Either alone leaves the attention as it was, so that the first to be removed takes nothing away."""
    for case, circuit in traced(TWO_WRITERS, paths="complete"):
        missed = {edge.place for edge in case.truth} - set(found_edges(circuit, at=0.0))
        (reader,) = {target for _, target, _ in missed}
        (sentence,) = circuit.not_told
        assert (
            f"together with others, so that their own causes are not told: {reader}. A difference" in sentence
        )
        assert sentence in circuit.summary()


def test_a_difference_circuit_has_what_differs_of_what_one_run_does_not_tell() -> None:
    """A compared prompt has another token there; that the head reads the token before is the same in both."""
    for case, circuit in traced(TWO_WRITERS, paths="complete")[:2]:
        missed = {edge.place for edge in case.truth} - set(found_edges(circuit, at=0.0))
        tracer = headtrace.Tracer(TWO_WRITERS.model, max_firings=None, min_influence=0.0)
        differs = tracer.trace(
            list(case.ids), case.answer, case.wrong, paths="difference", counterfactual="auto"
        )
        found = {edge for edge in missed if edge in found_edges(differs, at=0.0)}
        assert {side for _, _, side in found} == {"value"}
        assert {side for _, _, side in missed - found} == {"query", "key"}


@pytest.mark.xfail(reason="weight goes to the removal that tips the attention, the last one")
def test_heads_that_write_equal_parts_of_one_signal_have_equal_weights() -> None:
    for case, circuit in traced(TWO_WRITERS):
        assert score(circuit, seen_by("attention", case.truth)).recall == 1.0


@pytest.mark.xfail(reason="the smallest set whose removal suffices has one of two needs")
def test_accpp_finds_all_signals_that_an_attention_needs() -> None:
    for case, circuit in traced(TWO_NEEDS):
        assert score(circuit, seen_by("attention", case.truth)).recall == 1.0


def test_what_opens_the_gates_of_an_mlp_is_found() -> None:
    for case, circuit in traced(GATE, paths="complete"):
        assert {edge.place for edge in case.truth} <= set(found_edges(circuit))
