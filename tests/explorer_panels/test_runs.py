"""A run beside the model: search, map, circuits; and what is known of channels."""

from __future__ import annotations

import json

import pytest

import headtrace
from headtrace.errors import InputError
from headtrace.explorer.panels import circuits
from headtrace.explorer.panels.circuits import RunSource, shown_rows
from headtrace.explorer.panels.why import AtlasEvidence
from headtrace.figures.families import colours_of
from headtrace.tasks import load_task


@pytest.fixture(scope="module")
def source(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "ioi"
    headtrace.run(model, load_task("ioi", model.tokenizer, n_per_cell=1).spread(12), out=folder)
    return RunSource(folder)


def test_a_search_looks_at_text_ids_and_labels_and_pages_through_what_it_finds(source) -> None:
    every = source.prompts("", None, 0, 100)
    assert every.found == len(every.prompts) == 12
    first = every.prompts[0]
    assert first.answer
    assert first.wrong
    assert source.prompts(first.id, None, 0, 10).prompts == [first]
    assert first in source.prompts(first.text[:20].upper(), None, 0, 100).prompts
    label = next(iter(first.labels.values()))
    assert first in source.prompts(label, None, 0, 100).prompts
    assert source.prompts("", None, 10, 5).prompts == every.prompts[10:]
    assert source.prompts("no such thing", None, 0, 5).found == 0


def test_the_map_is_that_of_the_families_and_is_computed_once(source, monkeypatch) -> None:
    calls = []
    real = circuits.find_families
    monkeypatch.setattr(circuits, "find_families", lambda run: calls.append(1) or real(run))
    fresh = RunSource(source.place)
    found = fresh.map
    fresh.prompts("", None, 0, 100)
    assert fresh.map is found
    assert len(calls) == 1
    families = headtrace.find_families(headtrace.open_run(source.place))
    assert found.name == "ioi"
    assert dict(zip(found.ids, found.family, strict=True)) == families.labels
    assert {f.family: f.representative for f in found.families} == families.representatives
    drawn = colours_of(families.sizes)
    assert all(f.colour == drawn[f.family] for f in found.families), "as in the figures"
    assert all(row[i] == 0 and len(row) == len(found.ids) for i, row in enumerate(found.distances))
    tops = {p.id for p in fresh.prompts("", None, 0, 100).prompts if p.representative}
    assert tops == set(families.representatives.values())


def test_a_map_of_many_circuits_is_a_sample_with_all_representatives(source) -> None:
    families = headtrace.find_families(headtrace.open_run(source.place), n=3)
    whole, rows = shown_rows(families), shown_rows(families, 5)
    assert 3 <= len(rows) <= 5
    assert rows == [row for row in whole if row in rows], "in the order of the tree"
    ids = {families.population.ids[row] for row in rows}
    assert set(families.representatives.values()) <= ids


def test_a_circuit_of_the_run_and_the_lines_that_read_it(source, run_lines) -> None:
    id = source.prompts("", None, 3, 1).prompts[0].id
    view = source.circuit(id)
    circuit = run_lines(view.python)["circuit"]
    assert circuit == headtrace.open_run(source.place).circuit(id)
    assert [node["name"] for node in view.circuit["nodes"]] == [node.name for node in circuit.nodes]
    with pytest.raises(InputError, match="no prompt"):
        source.circuit("nothing")


def test_a_run_of_two_prompts_has_no_families_but_its_prompts(model, tmp_path) -> None:
    headtrace.run(
        model, ["When Mary and John went to", "When Tom and Anna went"], out=tmp_path / "two", top_k=1
    )
    small = RunSource(tmp_path / "two")
    assert [p.family for p in small.prompts("", None, 0, 5).prompts] == [None, None]
    with pytest.raises(InputError):
        _ = small.map


# -- evidence ----------------------------------------------------------------------------------------------------


def test_words_of_an_interpretation_stand_at_their_channels(model, tmp_path) -> None:
    def signal(channels, words, supported):
        about = {"layer": 1, "head": 2, "channels": channels, "description": words, "supported": supported}
        return about | {"p_value": 0.01, "examples": [{"marked": "a [b]"}] * 9}

    signals = [signal([3], "the comma", True), signal([3, 4], "names", True), signal([5], None, False)]
    (tmp_path / "interpretation.json").write_text(json.dumps({"signals": signals}))
    evidence = AtlasEvidence(tmp_path, model)
    assert evidence.channel(1, 2, 3).words == "the comma"
    assert len(evidence.channel(1, 2, 3).examples) == 3
    assert "names (channels 3, 4 together)" in evidence.channel(1, 2, 4).words
    assert evidence.channel(1, 2, 5) is None


def test_a_folder_that_is_no_evidence_is_refused(model, tmp_path) -> None:
    with pytest.raises(InputError, match="neither an atlas nor an interpretation"):
        AtlasEvidence(tmp_path, model)
    (tmp_path / "interpretation.json").write_text('{"signals": [3]}')
    with pytest.raises(InputError, match="cannot be read"):
        AtlasEvidence(tmp_path, model)


def test_an_atlas_says_what_stands_out(model, tmp_path) -> None:
    from headtrace.interpret.atlas import atlas

    made = atlas(model, "sampled:200", tmp_path, channels="top:1", length=50)
    evidence = AtlasEvidence(tmp_path, model)
    heads = [(layer, head) for layer in range(model.n_layers) for head in range(model.n_heads)]
    assert [evidence.roles(*head) for head in heads] == [made.head(*head).roles for head in heads]
    assert any(evidence.roles(*head) for head in heads)
    told = [evidence.channel(1, 2, channel) for channel in range(model.d_head)]
    (only,) = [found for found in told if found is not None]
    assert only.words
    assert only.examples
    assert only.supported is None
