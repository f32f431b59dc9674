"""Complete circuits of compiled programs: what is in the weights, and nothing else."""

from __future__ import annotations

import pytest

from headtrace.vocabulary import SIDES, Side
from tests.truth.compiled import ABOUT, compiled_model, true_edges, weights
from tests.truth.programs import questions
from tests.truth.table import COMPILED_N, SEED, tally

RECALL = 0.95
every_program = pytest.mark.parametrize("program", ABOUT)
both_bases = pytest.mark.parametrize("rotated", [False, True], ids=["axes", "rotated"])


@every_program
@both_bases
def test_the_model_computes_the_program(program: str, rotated: bool) -> None:
    model, asked = compiled_model(program, rotated=rotated), questions(program, 40, seed=1)
    logits = model.end_logits([question.ids for question in asked])
    if ABOUT[program]["outputs"] is None:
        assert logits[:, 0].tolist() == pytest.approx([question.expected for question in asked], abs=1e-5)
    else:
        assert logits.argmax(dim=-1).tolist() == [question.answer for question in asked]
        assert len({question.answer for question in asked}) > 1, "there is something to decide"


@every_program
def test_the_truth_is_the_same_in_any_basis(program: str) -> None:
    for ids, answer, wrong, _ in questions(program, COMPILED_N, SEED):
        plain, rotated = (true_edges(weights(program, rotated=r), ids, answer, wrong) for r in (False, True))
        assert plain == rotated
        assert any(side == "root" for *_, side in plain)


@every_program
@both_bases
def test_the_sums_of_a_recording_hold_at_every_position(program: str, rotated: bool) -> None:
    model = compiled_model(program, rotated=rotated)
    model.record([question.ids for question in questions(program, COMPILED_N, SEED)]).check()


@every_program
@both_bases
def test_every_edge_found_is_true(program: str, rotated: bool) -> None:
    assert tally(program, rotated=rotated).extra == []


@every_program
@both_bases
@pytest.mark.parametrize("side", SIDES)
def test_true_edges_are_found(program: str, side: Side, rotated: bool) -> None:
    counts = tally(program, rotated=rotated)
    assert counts.found[side] >= RECALL * counts.true[side]


@both_bases
@pytest.mark.parametrize("side", SIDES)
def test_edges_that_change_only_their_reader_are_found_over_all_programs(side: Side, rotated: bool) -> None:
    counts = [tally(program, rotated=rotated) for program in ABOUT]
    found, true = (
        sum(each.found_by_reader[side] for each in counts),
        sum(each.by_reader[side] for each in counts),
    )
    assert found >= RECALL * true > 0


@every_program
@both_bases
def test_a_circuit_that_misses_an_edge_says_so(program: str, rotated: bool) -> None:
    assert tally(program, rotated=rotated).missed == []
