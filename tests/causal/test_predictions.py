"""A trace predicts attention without the signals it names; the running model must show exactly that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headtrace
from headtrace.errors import InputError
from tests.causal.traced import traced
from tests.tiny import NAMES, prompts, tiny_model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.float64, 1e-8)])
def test_the_model_shows_what_the_trace_predicted(name: str, dtype: torch.dtype, limit: float) -> None:
    model, circuit = traced(name, dtype)
    report = headtrace.verify(circuit, model, edges="none")
    expanded = sum(node.expanded for node in circuit.nodes)
    assert len(report.predictions) == 2 * expanded >= 8, "the case is not trivial"
    assert report.max_prediction_error <= limit
    moved = [abs(c.clean - c.predicted) for c in report.predictions]
    assert max(moved) > 0.1, "removing the claimed signals does something"


def test_a_wrong_prediction_is_found() -> None:
    model, circuit = traced("llama")
    node = next(n for n in circuit.nodes if n.expanded)
    assert node.predicted is not None
    lying = replace(node, predicted={**node.predicted, "query": (node.predicted["query"] or 0) + 0.01})
    changed = replace(circuit, nodes=tuple(lying if n is node else n for n in circuit.nodes))
    report = headtrace.verify(changed, model, edges="none")
    assert report.max_prediction_error == pytest.approx(0.01, abs=1e-4)


def test_a_missing_signal_is_found() -> None:
    model, circuit = traced("qwen3", torch.float64)
    heaviest = circuit.top(1)[0]
    changed = circuit.with_edges(tuple(e for e in circuit.edges if e != heaviest))
    assert headtrace.verify(changed, model, edges="none").max_prediction_error > 1e-3


def test_another_models_circuit_is_refused() -> None:
    _, circuit = traced("llama")
    with pytest.raises(InputError, match="only be tested on its own model"):
        headtrace.verify(circuit, tiny_model("llama", seed=5))


def test_an_empty_circuit_has_nothing_to_verify(tmp_path) -> None:
    model, circuit = traced("qwen2")
    empty = replace(circuit, nodes=(), edges=(), reason="nothing to explain")
    report = headtrace.verify(empty, model)
    assert report.max_prediction_error == 0
    assert report.edges.height == 0
    report.save(tmp_path)
    assert (tmp_path / "edges.parquet").exists()


SMOLLM2_PROMPTS = (
    ("When Mary and John went to the store, John gave a drink to", " Mary", " John"),
    ("While Tom and Sarah were working at the office, Tom gave a book to", " Sarah", " Tom"),
)


@pytest.mark.smollm2
def test_predictions_hold_on_a_real_model(smollm2) -> None:
    tracer = headtrace.Tracer(smollm2)
    errors: list[float] = []
    for text, answer, wrong in SMOLLM2_PROMPTS:
        circuit = tracer.trace(text, answer=answer, wrong=wrong)
        report = headtrace.verify(circuit, smollm2, edges="none")
        errors += [check.error for check in report.predictions]
    assert len(errors) >= 20
    assert sorted(errors)[len(errors) // 2] <= 1e-5
    assert max(errors) <= 1e-3


@pytest.mark.parametrize(("name", "root"), [("gpt2", "probability"), ("opt", "direction")])
def test_other_roots_are_verified_too(name: str, root: str) -> None:
    model = tiny_model(name)
    direction = torch.randn(32, generator=torch.Generator().manual_seed(0))
    how = {"top_k": 3} if root == "probability" else {"direction": direction, "layer": 3}
    circuit = headtrace.Tracer(model, tau=0.08).trace(prompts()[0], root=root, **how)
    report = headtrace.verify(circuit, model, edges="top:2", controls=1)
    assert len(report.predictions) > 6
    assert report.max_prediction_error <= 1e-4
    assert report.metric == ("log-likelihood" if root == "probability" else None)
    assert (report.effects[0].ablate_metric is None) == (root == "direction")
    assert report.summary()
