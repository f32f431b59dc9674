"""The options of a request come from one place: what `TraceRequest`, roots and methods declare."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

import headtrace
from headtrace.cli import app
from headtrace.cli.main import LazyCommands
from headtrace.cli.options import with_option_groups
from headtrace.cli.request_options import NOT_OPTIONS, RequestOptions
from headtrace.cli.run import run as run_command
from headtrace.cli.trace import trace as trace_command
from headtrace.errors import InputError
from headtrace.request import ROOT_OPTIONS, TraceRequest
from headtrace.tracing import METHODS, ACCpp, method_options, register_method

MARY = "When Mary and John went to the store, John gave a drink to"
TOM = "When Tom and Anna went to the store, Anna gave a drink to"


def called(*words: object, code: int = 0):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done


def flags(name: str) -> set[str]:
    return {flag for each in LazyCommands()[name].params for flag in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("command", ["trace", "run"])
def test_every_field_of_a_request_and_every_option_of_a_root_is_an_option(command: str) -> None:
    found = flags(command)
    names = [each.name for each in fields(TraceRequest) if each.name not in NOT_OPTIONS]
    assert {f"--{name.replace('_', '-')}" for name in (*names, *ROOT_OPTIONS)} <= found
    assert {"--answer-id", "--wrong-id", "--no-bos", "--tau", "--ig-steps", "--svt-channels"} <= found
    assert {"--prompts", "--chat", "--strict"} <= found


def test_fields_without_an_option_have_other_ways_to_be_given() -> None:
    """A new field is an option unless it is listed here: the prompt, options of roots and methods, fields of a line."""
    assert set(NOT_OPTIONS) == {"prompt", "text", "about", "method_options", "id", "labels", "roles"}
    assert all(each.metadata.get("help") for each in fields(TraceRequest) if each.name not in NOT_OPTIONS)


@dataclass(frozen=True)
class Patient(ACCpp):
    name: ClassVar[str] = "patient"
    patience: int = field(default=3, metadata={"help": "How long it waits.", "at_least": 1})
    loud: bool = field(default=False, metadata={"help": "Whether it says so."})


@pytest.fixture
def patient():
    register_method("patient", Patient)
    yield
    METHODS._known.pop("patient")


@pytest.mark.parametrize("command", [trace_command, run_command])
def test_a_method_of_another_package_brings_its_options(command, patient) -> None:
    alone = typer.Typer()
    alone.command()(with_option_groups(command))
    params = {each.name: each for each in typer.main.get_command(alone).params}
    assert params["patient_patience"].opts == ["--patient-patience"]
    assert params["patient_loud"].secondary_opts == ["--no-patient-loud"]
    assert "how long it waits" in params["patient_patience"].help
    given = RequestOptions(method="patient", patient_patience=7, tau=0.5)
    assert given.settings == {"method": "patient", "method_options": {"patience": 7, "tau": 0.5}}
    with pytest.raises(InputError, match="patience=0: expected a whole number at least 1"):
        RequestOptions(method="patient", patient_patience=0)
    with pytest.raises(InputError, match="no option 'patience'"):
        RequestOptions(patient_patience=7)


def test_options_that_were_not_given_say_nothing() -> None:
    defaults = {each.name: each.default for each in RequestOptions.parameters()}
    given = RequestOptions(**defaults)
    assert (given.options, given.settings) == ({}, {})
    assert RequestOptions(**defaults | {"max_firings": 0}).settings == {"max_firings": None}
    assert "channels" in {each.name for each in method_options("svt")}


@pytest.mark.parametrize("form", ["json", "npy", "safetensors"])
def test_a_direction_is_read_from_a_file_of_numbers(form: str, tmp_path: Path) -> None:
    model = headtrace.load("builtin")
    vector = np.linspace(-1, 1, model.d_model)
    path = tmp_path / f"direction.{form}"
    if form == "json":
        path.write_text(json.dumps(vector.tolist()))
    elif form == "npy":
        np.save(path, vector)
    else:
        save_file({"direction": vector}, path)
    expected = headtrace.Tracer(model).trace(MARY, direction=vector.tolist(), layer=2, position=-2)
    words = ("trace", "builtin", "-p", MARY, "--direction", path, "--layer", 2, "--position", -2)
    called(*words, "--out", tmp_path / "c.json")
    assert headtrace.load_circuit(tmp_path / "c.json") == expected


def test_a_direction_is_never_a_pickle(tmp_path: Path) -> None:
    path = tmp_path / "direction.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    words = ("trace", "builtin", "-p", MARY, "--direction", path, "--layer", 2)
    assert "cannot be read" in called(*words, code=2).stderr
    (tmp_path / "two.json").write_text("[[1, 2], [3, 4]]")
    words = ("trace", "builtin", "-p", MARY, "--direction", tmp_path / "two.json", "--layer", 2)
    assert "one row of numbers" in called(*words, code=2).stderr


# -- one schema of prompts for all commands ----------------------------------------------------------------------

LINE = {
    "text": MARY,
    "answer": " Mary",
    "wrong": " John",
    "root": "linear",
    "paths": "difference",
    "counterfactual": TOM,
    "bos": True,
    "method": "acc++",
    "max_firings": 200,
    "patterns": "auto",
    "id": "mary",
    "labels": {"order": "ABBA"},
    "roles": {"IO": [5, 9]},
    "source": "a book",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    other = {**LINE, "text": TOM, "answer": " Tom", "wrong": " Anna", "id": "tom"}
    other |= {"paths": "content", "neurons": 1, "counterfactual": None}
    lines = [json.dumps(LINE), "{broken", json.dumps(other), json.dumps({"text": MARY, "anwser": " Mary"})]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    model = headtrace.load("builtin")
    headtrace.Tracer(model, max_firings=3).trace(MARY, " Mary", " John").save(folder / "c.json")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("trace", "builtin", "--prompts", "{file}", "--out", "{out}.parquet"),
        ("run", "builtin", "--prompts", "{file}", "--out", "{out}"),
        ("sinks", "builtin", "--prompts", "{file}", "--directions", "1"),
        ("faithfulness", "{circuit}", "--reference", "{file}", "--controls", "0"),
    ],
    ids=lambda words: words[0],
)
def test_a_file_that_one_command_takes_all_take(words, place: Path, tmp_path: Path) -> None:
    names = {"file": place / "prompts.jsonl", "out": tmp_path / "out", "circuit": place / "c.json"}
    done = called(*(word.format(**names) for word in words), "--json", code=3)  # more than one in ten prompts
    reported = " ".join(done.stderr.split())
    assert "2 of 4 lines skipped: line 2: is not JSON" in reported
    assert "line 4: unknown field 'anwser'. Did you mean 'answer'?" in reported
    told = json.loads(done.stdout)
    kept = {
        "trace": lambda: told["skipped"],
        "run": lambda: told["manifest"]["plan"]["skipped_lines"],
        "sinks": lambda: told["settings"]["skipped"]["prompts"],
        "faithfulness": lambda: told["skipped"],
    }[words[0]]()
    assert [each["line"] for each in kept] == [2, 4]
    assert "anwser" in kept[1]["reason"]


@pytest.mark.parametrize(
    "words",
    [("sinks", "builtin", "--directions", "1", "--prompts"), ("faithfulness", "{circuit}", "--reference")],
)
def test_prompts_need_no_answers_where_nothing_is_explained(words, place: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in (MARY, TOM)))
    called(*(word.format(circuit=place / "c.json") for word in words), file)


@pytest.mark.parametrize("form", ["text", "tokens", "messages"])
def test_a_corpus_may_be_a_file_of_prompts(form: str, tmp_path: Path, monkeypatch) -> None:
    model = headtrace.load("builtin")
    monkeypatch.setattr("headtrace.models.load", lambda *_, **__: model)
    prompts = {
        "text": MARY,
        "tokens": model.to_ids(MARY),
        "messages": [{"role": "user", "content": MARY}],
    }
    line = {**LINE, form: prompts[form]}
    if form != "text":
        del line["text"]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(line) + "\n" + json.dumps(line))
    done = called(
        "atlas", "builtin", "--corpus", file, "--channels", "top:1", "--out", tmp_path / "a", "--json"
    )
    assert json.loads(done.stdout)["tokens"] >= 20
