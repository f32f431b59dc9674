"""The steps of a mechanism are the program's: on every compiled model no head is named that the program does not use,
every head that gives its output is, and what they are called is what they were compiled to do."""

from __future__ import annotations

import pytest

import headtrace
from headtrace.vocabulary import ROOT, Site
from tests.truth.compiled import ABOUT, compiled_model, true_edges, weights
from tests.truth.programs import Question, questions

pytestmark = pytest.mark.slow

HELD_DOWN = ("times behind", "count of previous")
"""A head attends to BOS where it finds nothing else: other prompts find other tokens there."""
SPEAKS = {"copies", "raises", "lowers"}
ROLES: dict[str, dict[str, set[str]]] = {
    "previous token": {"L0H0": SPEAKS},
    "shift by two": {"L0H0": {"previous"}, "L1H0": SPEAKS},
    "induction": {"L0H0": {"previous", "finds"}, "L1H0": SPEAKS},
    "after pair": {"L0H0": {"previous", "finds"}, "L1H0": {"previous", "finds"}, "L2H0": SPEAKS},
    "fraction of previous": {"L1H0": SPEAKS},
    "from length": {"L2H0": SPEAKS},
}
"""What heads may be called: one that looks one token back finds the same token where that is repeated."""


def heads_of(program: str, ids: list[int], question: Question) -> tuple[set[Site], set[Site]]:
    """The head components of the program on a prompt: all, also those that matter only together with others (as for
    complete circuits), and those that speak to the output."""
    w = weights(program, rotated=True)
    edges = true_edges(w, ids, question.answer, question.wrong, together=2)
    every = {end for source, target, _ in edges for end in (source, target) if end.kind == "head"}
    return every, {source for source, target, _ in edges if target == ROOT and source.kind == "head"}


@pytest.mark.parametrize("program", ABOUT)
def test_the_steps_are_the_programs(program: str) -> None:
    model = compiled_model(program, rotated=True)
    for question in questions(program, 2):
        found = headtrace.why(model, question.ids, question.answer, question.wrong, measure=False, budget=60)
        compared = found.circuit.difference
        assert compared is not None
        assert sum(line.amount for line in found.ledger) == pytest.approx(found.whole, rel=1e-6)
        named = {head.site: step for step in found.steps for head in step.heads}
        true, speaking = heads_of(program, question.ids, question)
        # A difference has the components of both runs: a head may have read another token in the other one.
        for other in compared.prompts:
            true |= heads_of(program, list(other.token_ids), question)[0]
        # Of these programs the true edges of a run do not have every head that a difference passes through.
        assert program in HELD_DOWN or set(named) <= true
        assert speaking <= set(named)
        for site, step in named.items():
            allowed = ROLES.get(program, {}).get(f"L{site.layer}H{site.head}")
            role = step.role
            if role == "induction" and "and before this one" in step.text:
                role = "previous"  # where the token after an earlier one is the token before, both are said
            assert allowed is None or role in allowed, (site, step.role)
        order = [step.stage for _, step in sorted(named.items(), key=lambda item: item[0].layer or 0)]
        assert order == sorted(order), "what is computed first stands below"
