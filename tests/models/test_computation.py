"""What computes besides the weights is part of a model's identity, wherever files and models meet."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headtrace
from headtrace.errors import InputError
from headtrace.explorer.panels.circuits import RunSource
from headtrace.explorer.panels.session import Session
from headtrace.explorer.panels.why import AtlasEvidence
from headtrace.interpret import open_atlas, scan
from headtrace.interpret.atlas import atlas
from headtrace.models.recording_files import FACTS, TENSORS, _facts_sha256
from headtrace.runs.engines import ModelPlace
from headtrace.writing import file_sha256
from tests.tiny import OPTIONS, prompts, tiny_hf, tiny_model, top_two

IDS = prompts()[0]
EDITS: dict[str, object] = {
    "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "llama"
    tiny_hf("llama").save_pretrained(made)
    return made


def edited(folder: Path, to: Path, **changes: object) -> headtrace.Model:
    """The same weights with another config, under the same name as far as files can tell."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return headtrace.load(to)


@pytest.mark.parametrize("field", EDITS)
def test_a_config_that_computes_something_else_is_another_model(
    field: str, folder: Path, tmp_path: Path
) -> None:
    model, other = headtrace.load(folder), edited(folder, tmp_path / "other", **{field: EDITS[field]})
    assert not torch.allclose(model.record(IDS).logits, other.record(IDS).logits)
    assert model.weights_sha256 == other.weights_sha256
    assert model.computation_sha256 != other.computation_sha256


def test_what_cannot_change_the_computation_does_not_change_the_hash(folder: Path, tmp_path: Path) -> None:
    changes = {
        "bos_token_id": 7,
        "eos_token_id": [8, 9],
        "attention_dropout": 0.5,
        "initializer_range": 0.5,
        "use_cache": False,
        "transformers_version": "5.0.0",
        "_name_or_path": "elsewhere",
        "is_llama_config": True,
        "architectures": ["LlamaForCausalLM"],
    }
    found = edited(folder, tmp_path / "other", **changes)
    assert found.computation_sha256 == headtrace.load(folder).computation_sha256


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_model_has_the_same_hash_saved_again_and_converted(name: str, tmp_path: Path) -> None:
    hf = tiny_hf(name)
    model = headtrace.load(hf)
    hf.save_pretrained(tmp_path)
    expected = model.computation_sha256
    assert headtrace.load(tmp_path).computation_sha256 == expected
    version = model.refresh()
    model.record([*IDS, *IDS])
    assert model.refresh() is version, "a pass is no change of the model"
    assert model.computation_sha256 == expected
    assert headtrace.load(tiny_hf(name).to(torch.bfloat16)).computation_sha256 == expected


def test_exchanged_rotary_frequencies_are_another_computation_and_end_recordings() -> None:
    model = tiny_model("llama")
    before, recording = model.computation_sha256, model.record(IDS)
    model.hf.model.rotary_emb.inv_freq.mul_(1.5)
    assert model.computation_sha256 != before
    with pytest.raises(InputError, match="changed after this recording was made"):
        recording.check()


def test_frequencies_that_grow_with_the_prompt_are_one_computation() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=8)
    model.max_positions = None
    before, version = model.computation_sha256, model.refresh()
    model.record([*IDS, *IDS])
    assert (model.computation_sha256, model.refresh()) == (before, version)


# -- where files and models meet ---------------------------------------------------------------------------------


@pytest.fixture
def pair(folder: Path, tmp_path: Path) -> tuple[headtrace.Model, headtrace.Model]:
    return headtrace.load(folder), edited(folder, tmp_path / "other", **EDITS)


def test_a_circuit_is_refused_on_the_same_weights_with_another_config(pair) -> None:
    model, other = pair
    circuit = headtrace.Tracer(model).trace(IDS, *top_two(model, IDS))
    with pytest.raises(InputError, match=r"another model.*the same weights, but another computation"):
        headtrace.verify(circuit, other)
    assert headtrace.verify(circuit, model, edges="none").verdict == "PASS"


def test_an_old_circuit_is_compared_by_its_weights_and_that_is_said(pair) -> None:
    model, _ = pair
    circuit = headtrace.Tracer(model).trace(IDS, *top_two(model, IDS))
    old = replace(circuit, model=replace(circuit.model, computation_sha256=None))
    report = headtrace.verify(old, model, edges="none")
    assert report.verdict == "PASS"
    assert any("hash of the weights alone" in line for line in report.not_checked)


def as_written_before(folder: Path) -> None:
    """A saved recording as versions wrote it that had no hash of the computation, with its checksums right."""
    facts = json.loads((folder / FACTS).read_text())
    del facts["model"]["computation_sha256"], facts["tensors_sha256"]
    save_file(load_file(folder / TENSORS), folder / TENSORS, {"facts_sha256": _facts_sha256(facts)})
    facts["tensors_sha256"] = file_sha256(folder / TENSORS)
    (folder / FACTS).write_text(json.dumps(facts))


def test_a_recording_is_refused_and_an_old_one_warns(pair, tmp_path: Path) -> None:
    model, other = pair
    model.record(IDS).save(tmp_path / "kept")
    with pytest.raises(InputError, match="another model"):
        headtrace.Recording.load(tmp_path / "kept", other)
    headtrace.Recording.load(tmp_path / "kept", model).check()
    as_written_before(tmp_path / "kept")
    with pytest.warns(UserWarning, match=r"The recording in .*hash of the weights alone"):
        headtrace.Recording.load(tmp_path / "kept", model).check()


def test_a_run_is_not_resumed_with_another_config(pair, tmp_path: Path) -> None:
    model, other = pair
    other.name = model.name
    texts = [{"tokens": ids, "answer": 5, "wrong": 7} for ids in prompts(lengths=(5, 6))]
    headtrace.run(model, texts, out=tmp_path / "run", root="linear")
    with pytest.raises(InputError, match=r"holds another run: model\.computation_sha256"):
        headtrace.run(other, texts, out=tmp_path / "run", root="linear")


def test_an_old_run_is_resumed_with_a_warning(pair, tmp_path: Path) -> None:
    model, _ = pair
    texts = [{"tokens": ids, "answer": 5, "wrong": 7} for ids in prompts(lengths=(5, 6))]
    headtrace.run(model, texts, out=tmp_path / "run", root="linear")
    manifest = tmp_path / "run" / "run.json"
    data = json.loads(manifest.read_text())
    del data["model"]["computation_sha256"]
    manifest.write_text(json.dumps(data))
    with pytest.warns(UserWarning, match="hash of the weights alone"):
        headtrace.run(model, texts, out=tmp_path / "run", root="linear")


def test_workers_that_find_another_config_stop(pair, folder: Path) -> None:
    model, other = pair
    place = replace(ModelPlace.of(model), place=other.name)
    with pytest.raises(InputError, match=r"another model where the worker runs.*another computation"):
        place.load()


def test_scans_and_atlases_are_refused(pair, tmp_path: Path) -> None:
    model, other = pair
    other.name = model.name
    corpus = "sampled:64"
    scan(model, corpus, out=tmp_path / "scan", length=8)
    with pytest.raises(InputError, match="another computation sha256"):
        scan(other, corpus, out=tmp_path / "scan", length=8)
    atlas(model, corpus, out=tmp_path / "atlas", length=8)
    open_atlas(tmp_path / "atlas", model)
    for refused in (open_atlas, AtlasEvidence):
        with pytest.raises(InputError, match="made of another model"):
            refused(tmp_path / "atlas", other)


def test_the_explorer_refuses_a_run_of_another_model(pair, tmp_path: Path) -> None:
    model, other = pair
    texts = [{"tokens": ids, "answer": 5, "wrong": 7} for ids in prompts(lengths=(5, 6))]
    headtrace.run(model, texts, out=tmp_path / "run", root="linear")
    source = RunSource(tmp_path / "run")
    assert Session([model], run=source).has_run
    assert Session([other, model], run=source).has_run, "a run of the model beside"
    for wrong in (other, tiny_model("llama", seed=1)):
        with pytest.raises(InputError, match="traced on another model"):
            Session([wrong], run=source)


def test_an_interpretation_of_another_model_is_refused(pair, tmp_path: Path) -> None:
    model, other = pair
    settings = {
        "model": "it",
        "weights_sha256": model.weights_sha256,
        "computation_sha256": model.computation_sha256,
    }
    (tmp_path / "interpretation.json").write_text(json.dumps({"settings": settings, "signals": []}))
    AtlasEvidence(tmp_path, model)
    with pytest.raises(InputError, match="made of another model"):
        AtlasEvidence(tmp_path, other)


def test_families_and_networks_do_not_mix_two_computations(pair) -> None:
    circuits = [headtrace.Tracer(model).trace(IDS, *top_two(model, IDS)) for model in pair]
    same = [replace(each, model=replace(each.model, name="one name")) for each in circuits]
    with pytest.raises(InputError, match="two models cannot be merged"):
        headtrace.merge(same)
