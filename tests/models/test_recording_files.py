"""Saved recordings: the two files belong together, fit the model, and say what their tokens say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import headtrace
from headtrace.errors import IdentityError, InputError
from headtrace.models import Recording
from headtrace.models.observer import Rotary
from tests.conftest import IOI
from tests.tiny import NAMES, prompts, tiny_model

MODEL = tiny_model("llama")
JSON, TENSORS = "recording.json", "recording.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    MODEL.record(prompts()).save(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def change_json(folder: Path, **changes: Any) -> None:
    facts = json.loads((folder / JSON).read_text())
    (folder / JSON).write_text(json.dumps({**facts, **changes}))


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)


def of_first_version(folder: Path) -> None:
    """As files without checksums were."""
    facts = json.loads((folder / JSON).read_text())
    del facts["tensors_sha256"]
    (folder / JSON).write_text(json.dumps(facts | {"schema": "headtrace.recording/1"}))


def test_another_prompts_json_is_refused(folder: Path, tmp_path: Path) -> None:
    model = headtrace.load("builtin")
    model.record(IOI).save(tmp_path / "long")
    model.record("When Mary and John").save(tmp_path / "short")
    shutil.copy(tmp_path / "short" / JSON, tmp_path / "long" / JSON)
    with pytest.raises(
        InputError, match=r"recording.json and .* do not belong together.*Record the prompt again"
    ):
        Recording.load(tmp_path / "long", model)
    for name in ("long", "short"):
        of_first_version(tmp_path / name)
    with pytest.raises(InputError, match=r"padded to 15 tokens, cannot have the lengths \(5,\)"):
        Recording.load(tmp_path / "long", model)


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": [11, 8]},
        {"scales": [1.0] * 4},
        {"softcaps": [3.0] * 4},
        {"model": {"name": "another", "weights_sha256": MODEL.weights_sha256}},
    ],
)
def test_facts_that_were_changed_are_refused(folder: Path, changes: dict[str, Any]) -> None:
    change_json(folder, **changes)
    with pytest.raises(InputError, match="do not belong together"):
        Recording.load(folder, MODEL)


def test_tensors_that_were_changed_are_refused(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors["token_ids"].zero_())
    with pytest.raises(InputError, match="do not belong together"):
        Recording.load(folder, MODEL)
    of_first_version(folder)
    with pytest.raises(InputError, match="first residual is not the embedding of the recorded tokens"):
        Recording.load(folder, MODEL)


def test_a_recording_of_the_first_version_is_read(folder: Path) -> None:
    of_first_version(folder)
    change_tensors(folder, lambda tensors: tensors.pop("logit_positions"))
    loaded = Recording.load(folder, MODEL)
    assert torch.equal(loaded.patterns, MODEL.record(prompts()).patterns)
    loaded.check()


def nan(tensors: dict[str, Any]) -> None:
    tensors["values"][0, 0, 0, 0, 0] = torch.nan


@pytest.mark.ill_typed
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("token_ids"), "'token_ids' is missing"),
        (lambda t: t.pop("logits"), "'logits' is missing"),
        (lambda t: t.pop("visible.0"), "'visible.0' is missing"),
        (lambda t: t.pop("rotary.0.sin"), "'rotary.0.sin' is missing"),
        (
            lambda t: t.update(token_ids=t["token_ids"].float()),
            "'token_ids' holds torch.float32, expected torch.int64",
        ),
        (lambda t: t.update(patterns=t["patterns"].double()), "'patterns' holds torch.float64"),
        (
            lambda t: t.update({"visible.0": t["visible.0"].int()}),
            "'visible.0' holds torch.int32, expected torch.bool",
        ),
        (lambda t: t["token_ids"].fill_(61), "'token_ids' must hold numbers from 0 to 60"),
        (lambda t: t["token_ids"].fill_(-1), "'token_ids' must hold numbers from 0"),
        (lambda t: t["logit_positions"].fill_(11), "'logit_positions' must hold numbers from 0 to 10"),
        (nan, "'values' holds numbers that are not finite"),
        (lambda t: t["rotary.0.cos"].fill_(torch.inf), "'rotary.0.cos' holds numbers that are not finite"),
        (lambda t: t.update(patterns=t["patterns"][:, :1].clone()), "'patterns' has the axes"),
        (lambda t: t.update(token_ids=t["token_ids"][0].clone()), "have the axes"),
        (lambda t: t.update({"visible.0": t["visible.0"][:, :3].clone()}), "'visible' has the axes"),
        (lambda t: t.update({"rotary.0.cos": t["rotary.0.cos"][:, :3].clone()}), "rotary table of 11 tokens"),
        (lambda t: t.update(extra=t["logits"].clone()), "no tensor 'extra'"),
    ],
)
def test_a_damaged_recording_without_checksums_is_named(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    of_first_version(folder)
    change_tensors(folder, change)
    with pytest.raises(
        InputError, match=rf"recording in .*copy' is damaged: .*{message}.*Record the prompt again"
    ):
        Recording.load(folder, MODEL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "headtrace.recording/9"}, "is not a recording: schema .headtrace.recording/9"),
        ({"schema": ["x"]}, "is not a recording"),
        ({"tensors_sha256": None}, "tensors_sha256 is missing"),
        ({"lengths": "11"}, "lengths: .*got .11"),
        ({"lengths": [11, True]}, "lengths.1: .*got true"),
        ({"scales": None}, "scales: "),
        ({"model": 5}, "model: "),
        ({"more": 5}, "more: "),
    ],
)
def test_damaged_facts_are_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_json(folder, **changes)
    with pytest.raises(InputError, match=rf"recording\.json.*{message}"):
        Recording.load(folder, MODEL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [11]}, "cannot have the lengths"),
        ({"lengths": [11, 0]}, "cannot have the lengths"),
        ({"lengths": []}, "cannot have the lengths"),
        ({"lengths": [12, 7]}, "cannot have the lengths"),
        ({"scales": [1.0]}, "one of 'scales' for each of 4 layers, not 1"),
        ({"rotary_of_layer": [0]}, "one of 'rotary' for each"),
        ({"visible_of_layer": [0, 0, 0, 7]}, "'visible.7' is missing"),
    ],
)
def test_facts_that_do_not_fit_the_tensors_are_named(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    of_first_version(folder)
    change_json(folder, **changes)
    with pytest.raises(InputError, match=message):
        Recording.load(folder, MODEL)


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_are_missing_or_cut_short_are_named(folder: Path, version: int) -> None:
    if version == 1:
        of_first_version(folder)
    content = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"do not belong|safetensors' cannot be read.*cut short"):
        Recording.load(folder, MODEL)
    (folder / TENSORS).unlink()
    with pytest.raises(InputError, match=r"no recording in .*recording\.safetensors: No such file"):
        Recording.load(folder, MODEL)
    (folder / JSON).write_text('{"schema": ')
    with pytest.raises(InputError, match=r"recording\.json' is not JSON"):
        Recording.load(folder, MODEL)
    (folder / JSON).unlink()
    with pytest.raises(InputError, match=r"no recording in .*recording\.json: No such file"):
        Recording.load(folder, MODEL)


# -- what check() sees -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_check_finds_other_tokens_and_other_masks(name: str) -> None:
    recording = tiny_model(name).record(prompts())
    report = recording.check()
    assert 0 <= report.tokens <= report.worst
    assert 0 <= report.pattern <= report.worst
    other = recording.token_ids.clone()
    other[1, 3] = (other[1, 3] + 1) % 61
    with pytest.raises(
        IdentityError, match=r"embedding of the recorded tokens.*at prompt 1, position 3.*Record"
    ):
        recording.with_tensors(token_ids=other).check()
    with pytest.raises(IdentityError, match="embedding of the recorded tokens"):
        recording.with_tensors(token_ids=torch.zeros_like(other)).check()
    for masks in (torch.zeros_like(recording.visible[0]), torch.ones_like(recording.visible[0])):
        with pytest.raises(IdentityError, match=r"Attention logits and mask do not give .* layer 2"):
            replace(recording, visible=(*recording.visible[:2], masks, *recording.visible[3:])).check()


def test_check_finds_another_scale_softcap_and_rotary_table() -> None:
    recording = tiny_model("gemma2").record(prompts())
    changed = {
        "softcaps": (*recording.softcaps[:3], 1.0),
        "scales": (*recording.scales[:3], 3.0),
        "rotary": tuple(Rotary(r.cos, -r.sin) for r in recording.rotary if r is not None),
    }
    for name, value in changed.items():
        with pytest.raises(IdentityError):
            replace(recording, **{name: value}).check()


# -- showing -----------------------------------------------------------------------------------------------------


def test_a_recording_prints_in_a_line() -> None:
    model = headtrace.load("builtin")
    one, two = model.record(IOI), model.record([IOI, "When Mary"])
    assert repr(one).startswith("Recording('builtin': 15 tokens, 3 layers x 4 heads, 11 tensors, ")
    assert "2 prompts of 3 to 15 tokens" in repr(two)
    assert len(repr(two)) < 120
    html = two._repr_html_()
    assert html.count("<tr>") == 3
    assert "&#x27;Mary&#x27; 99%" in html
    assert len(html) < 2000


def test_hostile_tokens_are_inert_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = headtrace.load("builtin").record(IOI)
    evil = "<script>alert(1)</script>\u202e\x00"
    monkeypatch.setattr(type(recording.model), "token_labels", lambda self, ids: (evil,) * len(ids))
    html = recording._repr_html_()
    assert "<script" not in html
    assert "\u202e" not in html
    assert "\x00" not in html
