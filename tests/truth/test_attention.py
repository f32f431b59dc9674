"""Attention circuits of models whose circuits are known: all of what is there, and nothing else.

"Nothing else" is measured at 1% of influence. Idle heads and MLPs write nothing that is read, but "nothing" is 1e-16 in
floating point, and a method that takes whatever has the largest share finds it all the same.
"""

from __future__ import annotations

import math

import pytest
import torch

import headtrace
from headtrace.circuits import Circuit
from headtrace.vocabulary import parse_head
from tests.rounding import forward_terms, rounding
from tests.truth.blueprint import SHARPNESS
from tests.truth.known import KNOWN, Case, Known
from tests.truth.scoring import Score, TrueEdge, embedding, found_edges, from_head, of_heads, score, seen_by

N = 12
ROOTS = ("linear", "probability", "heads")
PERFECT = Score(1.0, 1.0)

every_root = pytest.mark.parametrize("root", ROOTS)


def traced(known: Known, root: str, method: str = "acc++") -> list[tuple[Case, Circuit]]:
    """The attention circuits of a few prompts."""
    cases = known.cases(N, seed=2)
    prompts = [case.as_prompt for case in cases]
    if root == "probability":
        prompts = [{"tokens": prompt["tokens"], "answer": prompt["answer"]} for prompt in prompts]
    if root == "heads":
        prompts = [prompt["tokens"] for prompt in prompts]
    tracer = headtrace.Tracer(known.model, method=method)
    circuits = tracer.trace_batch(prompts, root=root, heads=[known.head] if root == "heads" else None)
    return list(zip(cases, circuits, strict=True))


def expected(known: Known, case: Case, root: str) -> list[TrueEdge]:
    return seen_by("attention", from_head(known.head, case.truth) if root == "heads" else case.truth)


def begins_with_a_head(known: Known, root: str) -> bool:
    return root == "heads" or known.attends_for_the_answer


@every_root
def test_accpp_finds_every_edge_with_its_positions_and_no_other(known: Known, root: str) -> None:
    for case, circuit in traced(known, root):
        if begins_with_a_head(known, root):
            assert set(found_edges(circuit)) == {edge.place for edge in expected(known, case, root)}
            assert score(circuit, expected(known, case, root)) == PERFECT


@every_root
def test_accpp_finds_the_one_channel_that_carries_each_signal(known: Known, root: str) -> None:
    for case, circuit in traced(known, root):
        found = found_edges(circuit)
        for edge in expected(known, case, root):
            if edge.channels is not None:
                assert found[edge.place] == edge.channels, edge


def test_without_its_signal_a_head_attends_evenly_or_rests_and_accpp_says_so(known: Known) -> None:
    """Nothing but the signal tells one key from another, so what is left is one over the number of keys; of a head that
    looks for a duplicate, nothing: it rests on the first token."""
    leak = math.exp(-SHARPNESS / 2)  # where the heads below rest
    rests = {"indirect object": parse_head("L0H2"), "before repeat": parse_head("L0H1")}.get(known.name)
    for _, circuit in traced(known, "heads"):
        for node in circuit.nodes:
            if node.expanded and node.kind == "head":
                left = 0.0 if (node.layer, node.head) == rests else 1 / (node.dest + 1)
                for side in ("query", "key"):
                    assert node.predicted[side] == pytest.approx(left, abs=SHARPNESS * leak)
                weights = [edge.weight for edge in circuit.edges_into(node)]
                assert weights == pytest.approx([node.attention - left] * 2, abs=SHARPNESS * leak)


def test_the_running_model_attends_as_accpp_predicts_without_each_signal(known: Known) -> None:
    for _, circuit in traced(known, "heads")[:2]:
        report = headtrace.verify(circuit, known.model)
        assert report.max_prediction_error < SHARPNESS * rounding(torch.float64, forward_terms(known.model))


@every_root
def test_acc_finds_every_edge_and_no_other(known: Known, root: str) -> None:
    """It divides all that makes up the attention, what keeps it from going elsewhere as well."""
    for case, circuit in traced(known, root, "acc"):
        if begins_with_a_head(known, root):
            assert score(circuit, expected(known, case, root)).recall == 1.0
            assert score(circuit, [*expected(known, case, root), *case.beside]).precision == 1.0


@every_root
def test_svt_finds_every_head_of_the_circuit(known: Known, root: str) -> None:
    """It looks at heads only. On a side that no head writes to, it shares out rounding errors: so recall alone."""
    for case, circuit in traced(known, root, "svt"):
        if begins_with_a_head(known, root):
            assert score(circuit, of_heads(expected(known, case, root))).recall == 1.0


@pytest.mark.parametrize("root", ["linear", "probability"])
def test_where_an_mlp_makes_the_answer_attention_has_no_circuit(root: str) -> None:
    """At most the MLP itself: there is no head to begin with."""
    known = KNOWN["fact"]
    for case, circuit in traced(known, root):
        assert set(found_edges(circuit)) <= {edge.place for edge in expected(known, case, root)}


def test_a_likelihood_that_rests_on_an_mlp_alone_gives_an_empty_circuit_with_the_reason() -> None:
    for _, circuit in traced(KNOWN["fact"], "probability"):
        assert circuit.edges == ()
        assert "no head" in circuit.reason


def test_a_logit_difference_rests_on_nothing_of_the_size_of_rounding(known: Known) -> None:
    for _, circuit in traced(known, "linear"):
        seeds = [edge for edge in circuit.edges if edge.side == "root"]
        assert all(edge.weight > 1e-9 * circuit.root.value for edge in seeds)
        assert len(seeds) == known.attends_for_the_answer


def test_what_decides_the_attention_is_told_from_what_is_moved() -> None:
    """The head that brings the answer is no cause of the attention, and so is not in a circuit of attention."""
    known = KNOWN["before repeat"]
    for case, circuit in traced(known, "linear"):
        carries = next(
            edge.source for edge in case.truth if edge.side == "value" and edge.source.kind == "head"
        )
        assert carries not in {site for edge in found_edges(circuit) for site in edge[:2]}
        assert embedding(case.ids.index(case.answer)) not in {source for source, *_ in found_edges(circuit)}
