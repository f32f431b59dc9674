"""A circuit of a large model is there before the model's weights are hashed, and says the same of them afterwards."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch

import headtrace
from headtrace.circuits import ModelInfo
from headtrace.errors import InputError
from headtrace.models import model as models
from headtrace.tracing import unhashed
from tests.tiny import prompts, tiny_hf, tiny_model, top_two

IDS = prompts()[0]


@pytest.fixture
def hashes(monkeypatch) -> list[str]:
    """A model of any size counts as large; the list grows with every hash of all weights."""
    made: list[str] = []
    real = models.weights_sha256
    monkeypatch.setattr(unhashed, "AT_ONCE", 0)
    monkeypatch.setattr(models, "weights_sha256", lambda hf: made.append(real(hf)) or made[-1])
    return made


def trace(model: headtrace.Model) -> headtrace.Circuit:
    return headtrace.Tracer(model).trace(IDS, *top_two(model, IDS))


def test_tracing_and_testing_a_circuit_read_no_weights_and_a_file_reads_them_once(hashes, tmp_path) -> None:
    model = tiny_model("llama")
    first, second = trace(model), trace(model)
    headtrace.verify(first, model, edges="none")
    assert first.prune(min_weight=0.0).model is first.model
    assert hashes == []
    first.save(tmp_path / "first.json")
    second.save(tmp_path / "second.json")
    assert len(hashes) == 1
    said = json.loads((tmp_path / "first.json").read_text())["model"]
    assert said["weights_sha256"] == headtrace.load(tiny_hf("llama")).weights_sha256


def test_a_circuit_is_equal_to_what_is_read_from_its_file_and_copies_are_plain(hashes, tmp_path) -> None:
    model = tiny_model("llama")
    circuit = trace(model)
    circuit.save(tmp_path / "circuit.json")
    loaded = headtrace.load_circuit(tmp_path / "circuit.json")
    assert circuit == loaded
    assert loaded == circuit
    assert hash(circuit.model) == hash(loaded.model)
    assert circuit.content_id == loaded.content_id
    copied = pickle.loads(pickle.dumps(trace(tiny_model("llama")).model))
    assert type(copied) is ModelInfo
    assert copied == circuit.model
    assert replace(circuit.model, name="other").weights_sha256 == circuit.model.weights_sha256
    assert headtrace.verify(loaded, model, edges="none")


@pytest.mark.parametrize("hashed", [True, False])
def test_weights_that_change_after_the_trace_are_not_taken_for_those_that_were_traced(
    hashed: bool, hashes, tmp_path
) -> None:
    model = tiny_model("llama")
    circuit, before = trace(model), headtrace.load(tiny_hf("llama")).weights_sha256
    if hashed:
        assert model.weights_sha256 == before
    with torch.no_grad():
        model.hf.model.layers[1].self_attn.q_proj.weight.mul_(2)
    reason = "only be tested on its own model" if hashed else "changed after the circuit was traced"
    with pytest.raises(InputError, match=reason):
        headtrace.verify(circuit, model)
    if hashed:
        circuit.save(tmp_path / "circuit.json")
        assert headtrace.load_circuit(tmp_path / "circuit.json").model.weights_sha256 == before
    else:
        with pytest.raises(InputError, match="Save a circuit of a large model"):
            circuit.save(tmp_path / "circuit.json")


def test_small_models_are_hashed_with_the_trace() -> None:
    model = tiny_model("llama")
    circuit = trace(model)
    with torch.no_grad():
        model.hf.model.layers[1].self_attn.q_proj.weight.mul_(2)
    assert circuit.model.weights_sha256 == headtrace.load(tiny_hf("llama")).weights_sha256
