"""Channels of nearly equal singular values are one channel: what comes out does not depend on the SVD's basis."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import headtrace
from headtrace.channels.groups import NEARLY_EQUAL, first_of_group, members, summed
from headtrace.channels.svd import heads_svd
from headtrace.circuits import Circuit, Edge
from tests.truth import blueprint
from tests.truth.blueprint import Blueprint
from tests.truth.compiled import compiled_model
from tests.truth.known import KNOWN, Case, Known


def test_neighbours_to_rounding_are_a_group_and_zeros_are_none() -> None:
    close = 1 - NEARLY_EQUAL / 2
    values = torch.tensor([[4.0, 4 * close, 4 * close**2, 2.0, 1.0, 1.0], [3.0, 2.0, 1.0, 1e-12, 1e-12, 0.0]])
    first = first_of_group(values.double())
    assert first.tolist() == [[0, 0, 0, 3, 4, 4], [0, 1, 2, 3, 4, 5]]
    assert members(first)[0].tolist() == [[0, 1, 2], *[[-1] * 3] * 2, [3, -1, -1], [4, 5, -1], [-1] * 3]
    values = torch.arange(6.0)
    assert summed(values, first[0]).tolist() == [3, 0, 0, 3, 9, 0]
    assert summed(values, first[1]).tolist() == values.tolist()


def test_a_trained_head_has_no_groups() -> None:
    values = headtrace.load("builtin").channels.singular_values
    assert torch.equal(first_of_group(values), torch.arange(values.shape[-1]).expand(values.shape))


def planted(known: Known) -> tuple[Blueprint, headtrace.Model]:
    plan = known.plan()
    return plan, headtrace.load(known.build(plan))


def signal(circuit: Circuit, edge: Edge, recording: headtrace.Recording) -> Float[Tensor, " d_model"]:
    """What a component writes in the channels of its edge: the direction that the head reads."""
    target, source = circuit.node(edge.target), circuit.node(edge.source)
    svd = heads_svd(recording.model, target.layer or 0, [target.head or 0])
    basis = (svd.U if edge.side == "query" else svd.V)[0][:, list(edge.channels or ())]
    write = recording.write(source.site.component, 0)[source.site.dest or 0]
    return basis @ torch.linalg.lstsq(basis, write[:, None]).solution[:, 0]


def cosines(plan: Blueprint, model: headtrace.Model, case: Case) -> list[float]:
    """Of every signal with the one feature that it was planted as."""
    recording = model.record(list(case.ids))
    circuit = headtrace.Tracer(model).trace(**as_asked(case))
    true = {(edge.source, edge.target, edge.side) for edge in case.truth}
    directions, found = plan.directions(model.d_model), list[float]()
    for edge in circuit.edges:
        source, target = circuit.node(edge.source).site, circuit.node(edge.target).site
        if edge.side not in ("query", "key") or (source, target, edge.side) not in true:
            continue
        head = plan.heads[target.layer or 0, target.head or 0]
        rows = (head.query if edge.side == "query" else head.key) @ directions
        write = recording.write(source.component, 0)[source.dest or 0]
        read = rows[(rows @ write).abs().argmax()]
        found.append(abs(float(torch.cosine_similarity(signal(circuit, edge, recording), read, dim=0))))
    return found


def as_asked(case: Case) -> dict[str, object]:
    return {"prompt": list(case.ids), "answer": case.answer, "wrong": case.wrong}


@pytest.mark.parametrize("name", ["induction"])
def test_planted_directions_come_out_of_heads_with_equal_singular_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features lie in random directions, and heads match each of them equally: singular vectors say nothing alone."""
    monkeypatch.setattr(blueprint, "UNLIKE", 0.0)
    plan, model = planted(KNOWN[name])
    found = [cosine for case in KNOWN[name].cases(5) for cosine in cosines(plan, model, case)]
    assert len(found) >= 10
    assert min(found) > 0.999


def test_a_group_is_listed_and_removed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blueprint, "UNLIKE", 0.0)
    _, model = planted(KNOWN["induction"])
    case = KNOWN["induction"].cases(1)[0]
    circuit = headtrace.Tracer(model).trace(**as_asked(case))
    groups = 0
    for edge in circuit.edges:
        if edge.channels:
            head = circuit.node(edge.target)
            first = first_of_group(
                model.channels.at(head.layer or 0, head.head or 0).singular_values
            ).tolist()
            listed = {first[channel] for channel in edge.channels}
            assert sorted(edge.channels) == [c for c, leader in enumerate(first) if leader in listed]
            groups += any(first.count(leader) > 1 for leader in listed)
    assert groups
    report = headtrace.verify(circuit, model)
    assert not report.failures
    assert report.predictions


def test_a_firing_is_decomposed_by_groups_whatever_the_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matched feature is all of the score; the channels of the group share it as the SVD's basis happens to lie."""
    monkeypatch.setattr(blueprint, "UNLIKE", 0.0)
    _, model = planted(KNOWN["induction"])
    case = KNOWN["induction"].cases(1)[0]
    mover = next(edge.source for edge in case.truth if edge.side == "root")
    why = model.decompose(model.record(list(case.ids)), mover.firing)
    best, *others = why.top(len(why.terms))
    assert len(best.channels) > 1
    assert best.term == pytest.approx(why.logit, rel=1e-3)
    assert sum(term.term for term in (best, *others)) == pytest.approx(float(why.terms.sum()))
    assert (why.n_recon, why.is_sparse) == (1, True)
    assert set(best.channels) <= set(why.signal_set)
    assert f"{best.channels[0]}-{best.channels[-1]}" in str(why)


@pytest.mark.parametrize("rotated", [False, True], ids=["axes", "rotated"])
def test_a_head_that_compares_order_has_no_sparse_channels_and_says_so(rotated: bool) -> None:
    """A head that attends to all earlier positions (``<=``), and one that matches tokens one by one."""
    for program, sparse in (("fraction of previous", False), ("induction", True)):
        model = compiled_model(program, rotated=rotated)
        recording = model.record([1, 2, 1, 2, 1])
        firing, _ = next(
            pair for pair in recording.strongest_firings() if (pair[0].layer, pair[0].head) == (1, 0)
        )
        why = model.decompose(recording, firing)
        assert why.is_sparse == sparse, program
        assert ("This score is not sparse" in str(why)) != sparse
