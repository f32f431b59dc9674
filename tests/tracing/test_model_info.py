"""A circuit names its model by the hash of the weights that were traced, and holds nothing of the model itself."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import headtrace
from headtrace.circuits import ModelInfo
from headtrace.errors import InputError
from headtrace.models import model as models
from tests.tiny import prompts, tiny_hf, tiny_model, top_two

IDS = prompts()[0]


def trace(model: headtrace.Model) -> headtrace.Circuit:
    return headtrace.Tracer(model).trace(IDS, *top_two(model, IDS))


def test_weights_are_hashed_once_for_all_circuits_of_a_model(monkeypatch, tmp_path) -> None:
    hashes: list[str] = []
    real = models.weights_sha256
    monkeypatch.setattr(models, "weights_sha256", lambda hf: hashes.append(real(hf)) or hashes[-1])
    model = tiny_model("llama")
    circuit = trace(model)
    trace(model).save(tmp_path / "circuit.json")
    headtrace.verify(circuit, model, edges="none")
    assert len(hashes) == 1
    said = json.loads((tmp_path / "circuit.json").read_text())["model"]
    assert said["weights_sha256"] == headtrace.load(tiny_hf("llama")).weights_sha256


def test_a_circuit_is_plain_data_and_equal_to_what_is_read_from_its_file(tmp_path) -> None:
    circuit = trace(tiny_model("llama"))
    assert type(circuit.model) is ModelInfo
    circuit.save(tmp_path / "circuit.json")
    loaded = headtrace.load_circuit(tmp_path / "circuit.json")
    assert circuit == loaded
    assert hash(circuit.model) == hash(loaded.model)
    assert circuit.content_id == loaded.content_id
    assert copy.deepcopy(circuit.model) == circuit.model


def test_weights_that_change_after_the_trace_are_not_taken_for_those_that_were_traced(tmp_path) -> None:
    model = tiny_model("llama")
    circuit, before = trace(model), headtrace.load(tiny_hf("llama")).weights_sha256
    with torch.no_grad():
        model.hf.model.layers[1].self_attn.q_proj.weight.mul_(2)
    with pytest.raises(InputError, match="only be tested on its own model"):
        headtrace.verify(circuit, model)
    circuit.save(tmp_path / "circuit.json")
    assert headtrace.load_circuit(tmp_path / "circuit.json").model.weights_sha256 == before
    assert trace(model).model.weights_sha256 == model.weights_sha256 != before
