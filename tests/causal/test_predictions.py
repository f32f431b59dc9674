"""A trace predicts attention without the signals it names; the running model must show exactly that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headtrace
from headtrace.circuits import Likelihood
from headtrace.errors import InputError
from tests.causal.traced import traced
from tests.rounding import forward_terms, rounding
from tests.tiny import NAMES, prompts, tiny_model, top_two


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


@pytest.mark.ill_typed
@pytest.mark.parametrize("edges", [0, None, [3], "some"])
def test_edges_that_are_none_are_refused_with_what_could_be_given(edges: object) -> None:
    model, circuit = traced("llama")
    with pytest.raises(InputError, match=r"edges=.*expected 'all', 'none', 'top:N' or 'random:N'"):
        headtrace.verify(circuit, model, edges=edges)


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


ROOTS = {
    "linear": {},
    "top_k": {"root": "probability", "top_k": 3},
    "continuation": {"root": Likelihood((9, 4, 30), continuation=True)},
    "direction": {"direction": torch.randn(32, generator=torch.Generator().manual_seed(0)), "layer": 3},
    "direction behind the last layer": {
        "direction": torch.randn(32, generator=torch.Generator().manual_seed(0)),
        "layer": 4,
        "position": 5,
    },
    "heads": {"heads": ["L3H1", "L2H2"]},
}


@pytest.mark.parametrize("name", ["gpt2", "opt", "gemma2", "qwen2"])
@pytest.mark.parametrize("root", ROOTS)
def test_every_root_is_verified_and_its_metric_is_its_value(name: str, root: str, tmp_path) -> None:
    """What a root says it is worth is what the model shows, with and without an intervention."""
    model, ids = tiny_model(name), prompts()[0]
    how = dict(ROOTS[root])
    if root == "linear":
        how = dict(zip(("answer", "wrong"), top_two(model, ids), strict=True))
    circuit = headtrace.Tracer(model, tau=0.08).trace(ids, **how)
    report = headtrace.verify(circuit, model, edges="top:2", controls=1)
    assert report.metric == circuit.root.measure
    size = max(1.0, float(model.record(ids).logits.abs().max()), abs(circuit.root.value))
    allowed = rounding(torch.float32, forward_terms(model), size)
    assert report.clean_metric == pytest.approx(circuit.root.value, abs=allowed)
    # Without any edit the running model shows the same number.
    recording = headtrace.causal.open_circuit(circuit, model)
    metric = headtrace.causal.metric_of(circuit.root, recording)
    outcome = headtrace.causal.run(recording, [headtrace.causal.Intervention(())], metric)
    assert float(outcome.metric[0]) == pytest.approx(circuit.root.value, abs=allowed)
    if circuit.edges:
        assert report.max_prediction_error <= 1e-4
        assert all(effect.ablate_metric is not None for effect in report.effects)
    report.save(tmp_path)
    assert headtrace.load_circuit(tmp_path / "circuit.json").root == circuit.root
    assert report.summary()


def test_a_direction_without_its_vector_is_verified_without_a_metric() -> None:
    """Files of version 1 did not keep the vector."""
    model, ids = tiny_model("opt"), prompts()[0]
    circuit = headtrace.Tracer(model, tau=0.08).trace(ids, **ROOTS["direction"])
    circuit = replace(circuit, root=replace(circuit.root, vector=None))
    report = headtrace.verify(circuit, model, edges="top:2", controls=1)
    assert len(report.predictions) > 6
    assert report.max_prediction_error <= 1e-4
    assert report.metric is None
    assert report.effects[0].ablate_metric is None
    assert report.summary()
