"""Content and complete circuits under verification: contributions, and signals that MLPs wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest

import headtrace
from tests.tiny import NAMES, prompts, tiny_model, top_two

PROMPT = "When Mary and John went to the store, John gave a drink to"


@pytest.mark.parametrize("name", NAMES)
def test_signals_through_mlps_are_what_the_running_model_shows(name: str) -> None:
    """On every architecture, what is left of a signal is measured in the model itself: predicted = measured."""
    model = tiny_model(name)
    for ids in prompts():
        answer, wrong = top_two(model, ids)
        circuit = headtrace.Tracer(model).trace(ids, answer=answer, wrong=wrong, paths="complete", neurons=3)
        report = headtrace.verify(circuit, model, edges="none")
        assert not report.failures
        assert report.checked.get("prompt.contributions", 0) == (0 if circuit.reason else len(ids))
        assert report.checked.get("left", 0) == sum(edge.left is not None for edge in circuit.edges)


@pytest.mark.parametrize("paths", ["content", "complete"])
def test_a_circuit_of_content_passes(paths: str) -> None:
    model = headtrace.load("builtin")
    circuit = headtrace.Tracer(model).trace(PROMPT, " Mary", " John", paths=paths)
    report = headtrace.verify(circuit, model, edges="none")
    assert report.verdict == "PASS", report.failures
    assert report.checked["contribution"] > 5


def test_false_contributions_and_false_passages_fail() -> None:
    model = headtrace.load("builtin")
    circuit = headtrace.Tracer(model).trace(PROMPT, " Mary", " John", paths="complete")
    nodes = [
        replace(node, contribution=node.contribution + 0.1) if node.kind == "embedding" else node
        for node in circuit.nodes
    ]
    assert headtrace.verify(replace(circuit, nodes=tuple(nodes)), model, edges="none").verdict == "FAIL"
    edges = [replace(edge, left=0.9 - edge.left) if edge.left is not None else edge for edge in circuit.edges]
    assert headtrace.verify(circuit.with_edges(tuple(edges)), model, edges="none").verdict == "FAIL"


def test_false_weights_of_content_fail() -> None:
    """A single edge of content with another number."""
    model = headtrace.load("builtin")
    circuit = headtrace.Tracer(model).trace(PROMPT, " Mary", " John", paths="content")
    for side in ("value", "input"):
        chosen = next(edge for edge in circuit.edges if edge.side == side)
        for field in ("weight", "contribution"):
            false = replace(chosen, **{field: getattr(chosen, field) + 0.01})
            edges = tuple(false if edge is chosen else edge for edge in circuit.edges)
            report = headtrace.verify(circuit.with_edges(edges), model, edges="none")
            assert report.verdict == "FAIL"
            assert {failure.field for failure in report.failures} >= {field}


def test_a_false_contribution_of_a_token_fails_and_names_it() -> None:
    model = headtrace.load("builtin")
    circuit = headtrace.Tracer(model).trace(PROMPT, " Mary", " John", paths="content")
    numbers = list(circuit.prompt.contributions)
    numbers[3] += 0.1
    prompt = replace(circuit.prompt, contributions=tuple(numbers))
    report = headtrace.verify(replace(circuit, prompt=prompt), model, edges="none")
    assert [(each.field, each.where) for each in report.failures] == [("prompt.contributions", "token 3")]


def test_a_false_contribution_of_an_edge_fails_and_names_it() -> None:
    model = headtrace.load("builtin")
    circuit = headtrace.Tracer(model).trace(PROMPT, " Mary", " John", paths="complete")
    wrong = next(edge for edge in circuit.edges if edge.side == "value")
    edges = [replace(e, contribution=e.contribution - 0.1) if e is wrong else e for e in circuit.edges]
    report = headtrace.verify(circuit.with_edges(tuple(edges)), model, edges="none")
    assert [each.field for each in report.failures] == ["contribution"]
    assert "=> value of" in report.failures[0].where


@pytest.mark.parametrize("change", ["amount", "another unit", "no such unit", "the strongest left out"])
def test_false_hidden_units_fail(change: str) -> None:
    model = headtrace.load("builtin")
    circuit = headtrace.Tracer(model).trace(PROMPT, " Mary", " John", paths="complete", neurons=4)
    assert headtrace.verify(circuit, model, edges="none").verdict == "PASS"
    which = next(node for node in circuit.nodes if node.neurons)
    first, *others = which.neurons
    unlisted = next(u for u in range(10) if u not in {neuron.unit for neuron in which.neurons})
    neurons = {
        "amount": (replace(first, contribution=first.contribution + 0.1), *others),
        "another unit": (replace(first, unit=unlisted), *others),
        "no such unit": (replace(first, unit=10**6), *others),
        "the strongest left out": tuple(others),
    }[change]
    nodes = tuple(replace(node, neurons=neurons) if node is which else node for node in circuit.nodes)
    report = headtrace.verify(replace(circuit, nodes=nodes), model, edges="none")
    assert report.verdict == "FAIL"
    assert {each.field for each in report.failures} == {"neurons"}


def test_contributions_of_biases_of_readers_are_told_as_not_checked() -> None:
    """An offset writes nothing by itself; it must not be taken for the first head."""
    model = headtrace.load("builtin")
    circuit = headtrace.Tracer(model).trace(PROMPT, " Mary", " John", paths="complete")
    assert any(node.kind == "offset" for node in circuit.nodes)
    nodes = [replace(n, contribution=0.5) if n.kind == "offset" else n for n in circuit.nodes]
    lying = replace(circuit, nodes=tuple(nodes))
    report = headtrace.verify(lying, model, edges="none")
    assert report.verdict == "FAIL", "tracing again gives no such contribution"
    older = replace(lying, method=replace(lying.method, version="0.1.9"))
    report = headtrace.verify(older, model, edges="none")
    assert not [each for each in report.failures if each.field == "contribution"]
    assert any("offsets" in what for what in report.not_checked)
