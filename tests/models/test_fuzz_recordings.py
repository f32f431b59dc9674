"""Damaged recordings: an error that says so, or the very recording."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from headtrace.errors import HeadtraceError, InputError
from headtrace.models import Recording
from tests.mutation import misshaped, mutated, told
from tests.tiny import prompts, tiny_model

MODEL = tiny_model("gemma2", num_hidden_layers=2, vocab_size=31)
IDS = [[token % 31 for token in ids] for ids in prompts(lengths=(5, 3))]
FILES = ("recording.json", "recording.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    MODEL.record(IDS).save(folder)
    return folder


def same(one: Recording, other: Recording) -> bool:
    pairs = ((one.tensors[name], other.tensors[name]) for name in other.tensors)
    return one.lengths == other.lengths and all(torch.equal(a, b) for a, b in pairs)


def damaged_cases(saved: Path, folder: Path, n: int, seed: int, first_version: bool) -> dict[str, int]:
    """Load so many damaged copies; how many were refused, and how many loaded."""
    rng, whole = random.Random(seed), Recording.load(saved, MODEL)
    outcomes = {"refused": 0, "same": 0, "other": 0}
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    contents = {name: (saved / name).read_bytes() for name in FILES}
    if first_version:
        facts = json.loads(contents[FILES[0]])
        del facts["tensors_sha256"]
        contents[FILES[0]] = json.dumps(facts | {"schema": "headtrace.recording/1"}).encode()
    for _ in range(n):
        name = rng.choice(FILES)
        for file, content in contents.items():
            (folder / file).write_bytes(mutated(content, rng) if file == name else content)
        try:
            loaded = Recording.load(folder, MODEL)
        except InputError as error:
            told(error)
            outcomes["refused"] += 1
        else:
            outcomes["same" if same(loaded, whole) else "other"] += 1
            check(loaded)
    return outcomes


def check(recording: Recording) -> None:
    """Whatever was loaded can be checked, shown and cut into prompts."""
    assert repr(recording)
    assert len(recording[0].tokens()) == recording.lengths[0]
    try:
        recording.check()
    except HeadtraceError as error:
        told(error)


def test_damaged_bytes_are_refused_or_change_nothing(saved: Path, tmp_path: Path) -> None:
    outcomes = damaged_cases(saved, tmp_path / "copy", 1000, 0, first_version=False)
    assert outcomes["other"] == 0
    assert outcomes["refused"] > 700


@pytest.mark.ill_typed
def test_without_checksums_whatever_loads_can_be_checked(saved: Path, tmp_path: Path) -> None:
    outcomes = damaged_cases(saved, tmp_path / "copy", 600, 1, first_version=True)
    assert outcomes["refused"] > 200


def test_misshaped_facts_are_refused(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    rng, text, whole = random.Random(2), (saved / FILES[0]).read_text(), Recording.load(saved, MODEL)
    for first_version in (False, True):
        for _ in range(300):
            facts = misshaped(json.loads(text), rng)
            if first_version and isinstance(facts, dict):
                facts.pop("tensors_sha256", None)
                facts["schema"] = "headtrace.recording/1"
            (folder / FILES[0]).write_text(json.dumps(facts))
            try:
                loaded = Recording.load(folder, MODEL)
            except InputError as error:
                told(error)
            else:
                check(loaded)
                assert first_version or same(loaded, whole)


def test_files_of_two_recordings_are_never_one(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    MODEL.record([ids[::-1] for ids in IDS]).save(other)
    for name in FILES:
        folder = Path(shutil.copytree(saved, tmp_path / name))
        shutil.copy(other / name, folder / name)
        with pytest.raises(InputError, match="do not belong together"):
            Recording.load(folder, MODEL)
