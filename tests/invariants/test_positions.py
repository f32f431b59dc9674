"""What tokens and what positions write before the first layer: two components where the model adds two embeddings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headtrace
from headtrace.causal.changes import ComponentChange
from headtrace.causal.execute import rerun
from headtrace.errors import IdentityError, InputError
from headtrace.models import ARCHITECTURES
from headtrace.vocabulary import Component, Site
from tests.tiny import prompts, tiny_model, top_two

ADDED = ("gpt2", "opt", "gpt_bigcode", "gpt_neo", "biogpt")
each = pytest.mark.parametrize("name", ADDED)
TOKEN, POSITION = Component("embedding"), Component("position")


@each
def test_a_token_writes_the_same_at_every_position_and_a_position_whatever_its_token(name: str) -> None:
    model, (ids, *_) = tiny_model(name, dtype=torch.float64), prompts()
    twice = [*ids, *ids]
    recording, other = model.record(twice), model.record([ids[0], *twice[1:][::-1]])
    size = float(recording.residuals[0].abs().max())
    close = {"rtol": 0.0, "atol": 8 * torch.finfo(torch.float64).eps * size}
    tokens, places = recording.write(TOKEN), recording.write(POSITION)
    torch.testing.assert_close(tokens[: len(ids)], tokens[len(ids) :], **close)
    torch.testing.assert_close(places, other.write(POSITION), **close)
    torch.testing.assert_close(tokens + places, recording.residuals[0, 0], **close)
    assert float((places[0] - places[1]).norm()) > 0
    assert model.record([twice, ids]).check().worst < 1e-9  # padded, in GPT-Neo beyond its window


def test_in_models_with_rotary_positions_there_is_nothing_else_than_the_embedding() -> None:
    model, (ids, *_) = tiny_model("llama"), prompts()
    recording = model.record(ids)
    assert not recording.positions_apart
    assert recording.position_embedding is None
    assert torch.equal(recording.embedding, recording.residuals[0])
    with pytest.raises(InputError, match="has no position embeddings"):
        recording.write(POSITION)
    circuit = headtrace.Tracer(model).trace(ids, *top_two(model, ids), root="linear")
    assert "positions" not in (circuit.method.settings or {})


def test_a_wrong_fact_about_positions_is_noticed(monkeypatch) -> None:
    facts = dict(ARCHITECTURES)
    wrong = replace(facts["gpt2"], position_embedding="transformer.h.0.ln_1")
    monkeypatch.setattr(ARCHITECTURES, "_known", {**facts, "gpt2": wrong})
    model = tiny_model("gpt2", dtype=torch.float64)
    with pytest.raises(IdentityError, match="position_embedding"):
        model.record(prompts()[0]).check()


@each
@pytest.mark.parametrize("kind", ["embedding", "position"])
def test_each_of_the_two_can_be_taken_away_alone(name: str, kind: str) -> None:
    model, (ids, *_) = tiny_model(name, dtype=torch.float64), prompts()
    recording = model.record([ids])
    changed = rerun(
        recording, [ComponentChange(Site(kind, dest=2), 0.0), ComponentChange(Site(kind, dest=3), 2.0)]
    )
    wanted = recording.residuals[0, 0].clone()
    wanted[2] -= recording.write(Component(kind))[2]
    wanted[3] += recording.write(Component(kind))[3]
    torch.testing.assert_close(changed.residuals[0, 0], wanted)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
@pytest.mark.parametrize("paths", ["attention", "content", "complete"])
def test_circuits_with_both_components_pass_and_a_file_of_both_as_one_still_does(
    name: str, paths: str, tmp_path, monkeypatch
) -> None:
    """A file of an earlier version says nothing of positions: its embeddings are both, and are tested as such."""
    hf, ids = tiny_model(name, dtype=torch.float64).hf, prompts()[0]
    model = headtrace.load(hf)
    answer, wrong = top_two(model, ids)
    circuit = headtrace.Tracer(model).trace(ids, answer, wrong, root="linear", paths=paths)
    assert circuit.method.settings["positions"] == "apart"
    assert paths == "attention" or "position" in {node.kind for node in circuit.nodes}
    assert headtrace.load_circuit(circuit.save(tmp_path / "new.json")) == circuit
    assert headtrace.verify(circuit, model, edges="top:3").verdict == "PASS"

    facts = dict(ARCHITECTURES)
    joined = {**facts, name: replace(facts[name], position_embedding=None)}
    with monkeypatch.context() as before:
        before.setattr(ARCHITECTURES, "_known", joined)
        old = headtrace.Tracer(headtrace.load(hf)).trace(ids, answer, wrong, root="linear", paths=paths)
    assert "positions" not in old.method.settings
    old = replace(old, method=replace(old.method, version="0.3.0.dev0"))
    report = headtrace.verify(headtrace.load_circuit(old.save(tmp_path / "old.json")), model, edges="top:3")
    assert not report.failures
