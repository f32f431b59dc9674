"""Circuits agree with those that an independent implementation found (data in `tests/oracle/data`)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import headtrace
from headtrace.models import ARCHITECTURES
from headtrace.tracing.methods import THRESHOLD_RULES
from tests.oracle.comparison import Agreement, circuit_edges, oracle_edges

MODELS = ("gpt2", "neox", "llama", "qwen2")
OUTPUT_BIAS = (("offset", None, None), "root")
"""The seed that is ours alone: what the output's own bias gives. The reference has no such edge."""
REFERENCE_TAU = THRESHOLD_RULES["min(1, 2.5 / visible keys)"]
"""The reference's threshold; ours differs where a head sees two keys."""


def own_edges(circuit: headtrace.Circuit) -> dict:
    """The circuit's edges, without those that the reference does not have: the output's bias as a seed, and the causes
    of firings in layer 0, which it never expands."""
    edges = circuit_edges(circuit)
    return {
        (source, target, side): value
        for (source, target, side), value in edges.items()
        if (source[:3], side) != OUTPUT_BIAS and target[:2] != ("head", 0)
    }


def trace_case(tracer: headtrace.Tracer, case: dict) -> headtrace.Circuit:
    wrong = case["wrong"] if case["seeding"] == "linear" else None
    root = "linear" if case["seeding"] == "linear" else "probability"
    return tracer.trace(case["tokens"], case["answer"], wrong, root=root)


@pytest.mark.parametrize("name", MODELS)
def test_edges_channels_and_weights_agree_on_every_case(name: str, oracle_folder: Path, monkeypatch) -> None:
    """The reference has one component for what is there before layer 0, so token and position are one here as well."""
    joined = {key: replace(facts, position_embedding=None) for key, facts in ARCHITECTURES.items()}
    monkeypatch.setattr(ARCHITECTURES, "_known", joined)
    tracer = headtrace.Tracer(headtrace.load(oracle_folder / name), max_firings=None, tau=REFERENCE_TAU)
    agreement = Agreement()
    for case in json.loads((oracle_folder / name / "oracle.json").read_text())["cases"]:
        circuit = trace_case(tracer, case)
        agreement.add(own_edges(circuit), oracle_edges(case))
        assert bool(circuit.edges) == bool(case["edges"])
        assert bool(circuit.reason) == (not case["edges"])
    assert agreement.edges >= 0.99, agreement.differing
    assert agreement.pairs >= 0.99
    assert agreement.weight_error < 1e-3


@pytest.mark.smollm2
def test_the_mary_and_john_circuit_of_smollm2_agrees(smollm2, oracle_folder: Path) -> None:
    (case,) = json.loads((oracle_folder / "smollm2.json").read_text())["cases"]
    circuit = trace_case(headtrace.Tracer(smollm2), case)
    assert list(circuit.prompt.token_ids) == case["tokens"]
    agreement = Agreement()
    agreement.add(own_edges(circuit), oracle_edges(case))
    assert agreement.edges >= 0.99, agreement.differing
    assert agreement.pairs >= 0.99
    assert agreement.weight_error < 1e-3
