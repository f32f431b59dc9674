"""Channels of nearly equal singular values are one channel: what comes out does not depend on the SVD's basis."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import headtrace
from headtrace.causal.signals import signal_vectors
from headtrace.channels.sparsity import NEARLY_EQUAL, first_of_group, members, summed
from headtrace.channels.svd import heads_svd
from headtrace.circuits import Circuit, Edge
from headtrace.explorer.panels.why import ChannelBar
from tests.truth import blueprint
from tests.truth.blueprint import Blueprint
from tests.truth.compiled import compiled_model, weights
from tests.truth.known import KNOWN, Case, Known
from tests.truth.programs import questions


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


# -- every method, and what is made of circuits ----------------------------------------------------------------


def both_bases(program: str, **options: str) -> tuple[list[Circuit], list[Circuit]]:
    """Circuits of a compiled program and of the same function in random bases, where equal channels come out turned."""
    found: list[list[Circuit]] = []
    for rotated in (False, True):
        model = compiled_model(program, rotated=rotated)
        tracer, paths = headtrace.Tracer(model, method=options.get("method", "acc++")), options.get("paths")
        found.append([])
        for ids, answer, wrong, _ in questions(program, 4, seed=20):
            other = {"counterfactual": [[*ids[:-1], ids[-1] % 3 + 1]]} if paths == "difference" else {}
            found[-1].append(tracer.trace(ids, answer, wrong, root="linear", paths=paths, **other))
    return found[0], found[1]


def signals(circuit: Circuit) -> dict[object, tuple[set[int], float]]:
    """Channels and weight of every query and key edge."""
    return {
        (circuit.node(e.source).site, circuit.node(e.target).site, e.side): (set(e.channels or ()), e.weight)
        for e in circuit.edges
        if e.channels
    }


@pytest.mark.parametrize(
    "options",
    [{"method": "acc++"}, {"method": "acc"}, {"method": "svt"}, {"paths": "difference"}],
    ids=["acc++", "acc", "svt", "difference"],
)
def test_circuits_of_every_method_have_the_same_channels_in_any_basis(options: dict[str, str]) -> None:
    groups = 0
    for plain, rotated in zip(*both_bases("induction", **options), strict=True):
        ours, theirs = signals(plain), signals(rotated)
        assert ours.keys() == theirs.keys()
        for key, (channels, weight) in ours.items():
            assert channels == theirs[key][0], key
            assert weight == pytest.approx(theirs[key][1], abs=1e-6), key
        for circuit in (plain, rotated):
            for edge in circuit.edges:
                for group in circuit.node(edge.target).equal_channels or ():
                    assert set(group) <= set(edge.channels or group) or not set(group) & set(
                        edge.channels or ()
                    )
                    groups += set(group) <= set(edge.channels or ())
    assert groups


@pytest.mark.parametrize("method", ["acc++", "acc", "svt"])
def test_families_do_not_split_by_the_basis_of_equal_channels(method: str) -> None:
    plain, rotated = both_bases("induction", method=method)
    same = [replace(circuit, model=plain[0].model) for circuit in rotated]
    for a, b in zip(plain, same, strict=True):
        families = headtrace.find_families([a, b, a, b], grain="edge-channel", distance=0.01)
        assert families.n == 1


def test_weights_of_svt_in_equal_channels_are_verified() -> None:
    for rotated in (False, True):
        model = compiled_model("induction", rotated=rotated)
        ids, answer, wrong, _ = questions("induction", 1, seed=20)[0]
        circuit = headtrace.Tracer(model, method="svt").trace(ids, answer, wrong, root="linear")
        assert any(edge.channels for edge in circuit.edges)
        assert not headtrace.verify(circuit, model).failures


@pytest.mark.parametrize("rotated", [False, True], ids=["axes", "rotated"])
def test_signals_in_equal_channels_are_the_planted_directions(rotated: bool) -> None:
    """The signal of a previous-token head's query is what the head reads of the position: the same in any basis."""
    model, w = compiled_model("previous token", rotated=rotated), weights("previous token", rotated=rotated)
    ids, answer, wrong, _ = questions("previous token", 1, seed=20)[0]
    for method in ("acc++", "acc"):
        circuit = headtrace.Tracer(model, method=method).trace(ids, answer, wrong, root="linear")
        found = 0
        for edge, _, vector in signal_vectors(model.record(ids), circuit):
            node = circuit.node(edge.source)
            target = circuit.node(edge.target)
            W = w["W_Q" if edge.side == "query" else "W_K"][target.layer or 0, target.head or 0]
            read = torch.tensor(w["position"][node.dest or 0] @ W @ np.linalg.pinv(W))
            assert float(torch.cosine_similarity(vector, read, dim=0)) > 0.999
            found += 1
        assert found == 2


def test_the_explorer_shows_equal_channels_as_one() -> None:
    model = compiled_model("previous token", rotated=True)
    why = model.decompose(model.record([0, 1, 2, 3]), "L1H0:3:2" if model.n_layers > 1 else "L0H0:3:2")
    best = why.top(1)[0]
    bar = ChannelBar.model_validate(best)
    assert bar.channels == best.channels
    assert len(bar.channels) > 1
