"""Which writer met which writer, and why here rather than there, where it is known; and in a real model."""

from __future__ import annotations

import pytest

import headtrace
from headtrace.vocabulary import Component, Firing
from tests.conftest import IOI
from tests.truth.blueprint import SHARPNESS
from tests.truth.known import KNOWN


def test_an_induction_head_is_the_previous_token_head_met_by_the_same_token() -> None:
    """Query: the embedding of the last token. Key: what the previous-token head wrote at the token after its earlier
    occurrence. Nothing else meets, and all other tokens lack exactly that."""
    known = KNOWN["induction"]
    tracer = headtrace.Tracer(known.model)
    for case in known.cases(8, seed=3):
        last, at = len(case.ids) - 1, case.ids.index(case.answer)
        why = tracer.explain(list(case.ids), Firing(1, 0, last, at))
        pair, *others = why.pairs(5).pairs
        assert (pair.query, pair.key) == (Component("embedding"), Component("head", 0, 1, at - 1))
        assert pair.value == pytest.approx(why.pairs(1).total, rel=1e-4)
        assert all(abs(other.value) < 1e-3 * pair.value for other in others)
        other = next(i for i in range(2, last) if i != at)
        than = tracer.explain(list(case.ids), Firing(1, 0, last, at), rather_than=other)
        assert than.rather_than is not None
        key = than.rather_than.top(1, "key")[0]
        assert key.component == Component("head", 0, 1, at - 1)
        assert key.value == pytest.approx(than.rather_than.log_ratio, rel=1e-4)
        query = than.rather_than.top(1, "query")[0]
        assert query.component == Component("embedding")
        assert query.value == pytest.approx(key.value, rel=1e-4)


def test_why_not_names_the_token_that_is_attended_to_and_its_writer() -> None:
    known = KNOWN["induction"]
    case = known.cases(1)[0]
    last, at = len(case.ids) - 1, case.ids.index(case.answer)
    other = next(i for i in range(2, last) if i != at)
    why = headtrace.Tracer(known.model).explain(list(case.ids), Firing(1, 0, last, other))
    assert why.instead is not None
    assert why.instead.other.src == at
    assert why.instead.log_ratio == pytest.approx(-SHARPNESS, rel=0.1)
    assert why.instead.lowest(1, "key")[0].component == Component("head", 0, 1, at - 1)
    assert not why.instead.lowest(1, "key")[0].lowers_here, "nothing is held down: the other token is raised"


@pytest.mark.smollm2
def test_the_name_mover_of_smollm2_prefers_mary_because_of_what_heads_read_at_john(smollm2) -> None:
    """S-inhibition: what L20H0 and L19H2 read at the second John, in the query of L23H0."""
    why = headtrace.Tracer(smollm2).explain(IOI, "L23H0:to#2:Mary", rather_than="John#2")
    than = why.rather_than
    assert than is not None
    assert than.log_ratio > 1.5
    from_john = {
        (term.component.layer, term.component.head)
        for term in than.top(6, "query")
        if term.component.kind == "head" and term.component.src == 9 and term.value > 0.4
    }
    assert from_john == {(20, 0), (19, 2)}
    pairs = why.pairs(20)
    assert sum(p.value for p in pairs.pairs) + pairs.remainder == pytest.approx(than.log_ratio, abs=1e-4)
    assert {Component("head", 20, 0, 9), Component("head", 19, 2, 9)} <= set(pairs.queries)
