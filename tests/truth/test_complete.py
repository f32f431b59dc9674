"""Content and complete circuits of models whose circuits are known: what is moved, and through which MLPs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

import headtrace
from headtrace.circuits import Circuit
from tests.truth.known import KNOWN, Case, Known
from tests.truth.scoring import SIDES_SEEN, Paths, embedding, found_edges, score, seen_by

pytestmark = pytest.mark.skipif(
    "paths" not in inspect.signature(headtrace.Tracer.trace).parameters,
    reason="Tracer.trace follows attention only",
)

N = 6
SHARP = 1e-6
"""What heads attend to elsewhere, at the most."""
every_path = pytest.mark.parametrize("paths", ["content", "complete"])
every_root = pytest.mark.parametrize("root", ["linear", "probability"])


def traced(known: Known, paths: Paths, root: str) -> Iterator[tuple[Case, Circuit]]:
    tracer = headtrace.Tracer(known.model)
    for case in known.cases(N, seed=3):
        wrong = case.wrong if root == "linear" else None
        yield case, tracer.trace(list(case.ids), case.answer, wrong, root=root, paths=paths)


@every_root
@every_path
def test_every_edge_is_found_with_its_positions_and_no_other(known: Known, paths: Paths, root: str) -> None:
    for case, circuit in traced(known, paths, root):
        expected = seen_by(paths, case.truth)
        assert set(found_edges(circuit)) == {edge.place for edge in expected}
        assert score(circuit, expected) == (1.0, 1.0)


def test_the_token_that_is_the_answer_is_a_leaf_of_the_content_where_it_stood_in_the_prompt(
    known: Known,
) -> None:
    for case, circuit in traced(known, "content", "linear"):
        if case.answer in case.ids:
            leaf = embedding(case.ids.index(case.answer))
            assert leaf in {source for source, *_ in found_edges(circuit)}


def test_the_contributions_along_the_content_are_the_whole_logit_difference(known: Known) -> None:
    """There is one path of content, and nothing is lost on it but what norms and attention leave out."""
    for _, circuit in traced(known, "content", "linear"):
        flows = circuit.flows()
        strong = [edge for edge in circuit.edges if flows[edge] >= 0.01]
        assert [edge.weight for edge in strong] == pytest.approx(
            [circuit.root.value] * len(strong), rel=SHARP
        )


@every_path
def test_sides_are_those_of_the_path(paths: Paths) -> None:
    for known in KNOWN.values():
        for _, circuit in traced(known, paths, "linear"):
            assert {edge.side for edge in circuit.edges} <= set(SIDES_SEEN[paths])


def test_attention_signals_in_a_complete_circuit_keep_their_one_channel(known: Known) -> None:
    for case, circuit in traced(known, "complete", "linear"):
        found = found_edges(circuit)
        for edge in case.truth:
            if edge.channels is not None:
                assert found[edge.place] == edge.channels, edge
