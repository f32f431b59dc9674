"""One request: every option and every field of a prompt means the same wherever it is given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import headtrace
from headtrace.circuits import Circuit
from headtrace.circuits.files import loads
from headtrace.cli import app
from headtrace.errors import InputError
from headtrace.request import ROOT_OPTIONS, TraceRequest, read_requests
from headtrace.roots import ROOTS
from tests.explorer_server.live import Live, live

MARY = "When Mary and John went to the store, John gave a drink to"
TOM = "When Tom and Anna went to the store, Anna gave a drink to"
EMMA = "When Mary and John went to the store, Emma gave a drink to"
IDS = headtrace.load("builtin").to_ids(MARY)

REQUESTS: dict[str, dict[str, Any]] = {
    "a difference": {"text": MARY, "answer": " Mary", "wrong": " John"},
    "a counterfactual": {
        "text": MARY,
        "answer": " Mary",
        "wrong": " John",
        "paths": "difference",
        "counterfactual": TOM,
    },
    "several counterfactuals": {
        "text": MARY,
        "answer": " Mary",
        "paths": "difference",
        "counterfactual": [TOM, EMMA],
    },
    "counterfactual tokens": {
        "tokens": IDS,
        "answer": IDS[2],
        "paths": "difference",
        "counterfactual": [IDS[:2] + IDS[4:5] + IDS[3:]],
    },
    "automatic counterfactuals": {"text": MARY, "paths": "difference", "counterfactual": "auto"},
    "a difference alone": {"text": MARY, "paths": "difference"},
    "neurons": {"text": MARY, "answer": " Mary", "wrong": " John", "paths": "content", "neurons": 2},
    "no start token": {"text": MARY, "answer": " Mary", "wrong": " John", "bos": False},
    "tokens and alternatives": {"tokens": IDS, "answer": [IDS[2], IDS[4]]},
    "a continuation": {"text": MARY, "answer": " Mary and"},
    "the likeliest": {"text": MARY, "top_k": 2, "root": "probability"},
    "up to a probability": {"text": MARY, "top_p": 0.5},
    "heads": {"text": MARY, "heads": ["L2H0", "L1H2"]},
    "a direction": {"text": MARY, "direction": [0.5] * 128, "layer": 2, "position": -2},
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"method": "svt", "method_options": {"channels": "all"}},
    {"method_options": {"tau": 0.3, "ig_steps": 16}, "max_firings": 8, "patterns": "recompute"},
]


SOME: list[tuple[str, int]] = [
    (name, setting) for place, name in enumerate(REQUESTS) for setting in (0, 1 + place % 2)
]
"""Every request with the settings that are there without any, and in turn with one of the others."""


@cache
def builtin() -> headtrace.Model:
    return headtrace.load("builtin")


@pytest.fixture(scope="module")
def model() -> headtrace.Model:
    return builtin()


@cache
def expected_of(name: str, setting: int = 0) -> Circuit:
    """The circuit as ``Tracer.trace`` finds it, with everything as keywords."""
    given, settings = dict(REQUESTS[name]), SETTINGS[setting]
    prompt = given.pop("text", None) or given.pop("tokens")
    options = {**settings, **settings.get("method_options", {})}
    options.pop("method_options", None)
    return headtrace.Tracer(builtin(), **options).trace(prompt, **given)


@pytest.mark.parametrize(("name", "setting"), SOME)
def test_a_request_means_the_same_in_python_and_in_a_run(
    model: headtrace.Model, tmp_path: Path, name: str, setting: int
) -> None:
    fields, settings = REQUESTS[name], SETTINGS[setting]
    expected = expected_of(name, setting)
    request = TraceRequest.from_json({**fields, **settings})
    tracer = headtrace.Tracer.for_request(model, request)
    assert tracer.trace(request) == expected
    assert tracer.trace_batch([fields]) == [expected]
    run = headtrace.run(model, [fields], out=tmp_path / "run", **settings)
    assert run.circuit(0) == expected
    again = TraceRequest.from_json(json.loads(json.dumps(request.to_json())))
    assert again == request
    assert again.hash == request.hash


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_means_the_same_on_the_command_line(
    model: headtrace.Model, tmp_path: Path, name: str
) -> None:
    """As a line of a file, for both commands that trace."""
    fields, expected = REQUESTS[name], expected_of(name)
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps(fields) + "\n")
    traced = CliRunner().invoke(app, ["trace", "builtin", "--prompts", str(lines), "--json"])
    assert traced.exit_code == 0, traced.output
    out = str(tmp_path / "run")
    ran = CliRunner().invoke(app, ["run", "builtin", "--prompts", str(lines), "--out", out])
    assert ran.exit_code == 0, ran.output
    saved = tmp_path / "expected.json"
    expected.save(saved)
    assert json.loads(traced.stdout)["circuits"] == [json.loads(saved.read_text())]
    assert headtrace.open_run(out).circuit(0) == expected


@pytest.fixture(scope="module")
def server(model: headtrace.Model) -> Iterator[Live]:
    with live(model) as found:
        yield found


@pytest.mark.parametrize(("name", "setting"), SOME)
def test_a_request_means_the_same_to_the_server(server: Live, name: str, setting: int) -> None:
    """The prompt is sent once, and its recording's id stands in its place."""
    given = {**REQUESTS[name], **SETTINGS[setting]}
    prompt = {field: given.pop(field) for field in ("text", "tokens", "bos") if field in given}
    answer = server.about("trace", prompt, given)
    assert answer.status == 202, answer.body
    id = answer.json()["id"]
    *_, (_, ended, done) = server.events(id)
    assert ended == "done", done
    circuit = loads(server.get(f"/api/jobs/{id}/circuit.json").body.decode())
    assert circuit == expected_of(name, setting)
    names: dict[str, Any] = {}
    exec(compile(done["python"], "lines", "exec"), names)
    assert names["circuit"] == circuit


@pytest.mark.slow
def test_workers_trace_requests_as_this_process_does(model: headtrace.Model, tmp_path: Path) -> None:
    """Also with settings. A worker of Ray gets the same job: tests/runs/test_ray_data.py."""
    names = ("a counterfactual", "a direction")
    fields = [REQUESTS[name] for name in names]
    run = headtrace.run(model, fields, out=tmp_path / "run", shard_size=1, workers=1, **SETTINGS[2])
    for index, name in enumerate(names):
        assert run.circuit(index) == expected_of(name, 2)
    assert run.circuit(0).difference is not None


def test_counterfactuals_on_the_command_line() -> None:
    """Once, several times, or found by the model: the option says what the field of a request says."""
    common = ["trace", "builtin", "-p", MARY, "--paths"]
    for name in ("a counterfactual", "several counterfactuals", "automatic counterfactuals"):
        fields: dict[str, Any] = REQUESTS[name]
        others = fields["counterfactual"]
        options = [
            part for each in ("answer", "wrong") if each in fields for part in (f"--{each}", fields[each])
        ]
        for other in [others] if isinstance(others, str) else others:
            options += ["--counterfactual", other]
        traced = CliRunner().invoke(app, [*common, "difference", *options, "--json"])
        assert traced.exit_code == 0, traced.output
        assert loads(traced.stdout) == expected_of(name)
    for paths in ("content", "complete", "attention"):
        refused = CliRunner().invoke(app, [*common, paths, "--answer", " Mary", "--counterfactual", TOM])
        assert refused.exit_code == 2
        assert "--paths difference" in refused.output


def test_a_run_of_differences_goes_on_where_it_stopped(model: headtrace.Model, tmp_path: Path) -> None:
    fields = [
        REQUESTS["a counterfactual"],
        REQUESTS["several counterfactuals"],
        REQUESTS["a difference alone"],
    ]
    whole = headtrace.run(model, fields, out=tmp_path / "whole", shard_size=1)
    out = tmp_path / "stopped"

    class Stopped(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done >= 1:
            raise Stopped

    with pytest.raises(Stopped):
        headtrace.run(model, fields, out=out, shard_size=1, progress=stop)
    again = headtrace.run(model, fields, out=out, shard_size=1)
    for place in range(len(fields)):
        assert again.circuit(place) == whole.circuit(place)
        assert again.circuit(place).difference is not None


def test_ids_and_labels_of_prompts_are_found_in_the_tables_for_failed_prompts_too(
    model: headtrace.Model, tmp_path: Path
) -> None:
    lines = [
        {"text": MARY, "answer": " Mary", "id": "mary-1", "labels": {"order": "ABBA"}, "source": "book"},
        {"text": MARY, "answer": " Zorblax", "id": "bad", "labels": {"order": "BABA"}},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    requests = [request.to_json() for request in read_requests(path).values]
    run = headtrace.run(model, requests, out=tmp_path / "run")
    rows = {row["id"]: row for row in run.prompts.collect().to_dicts()}
    assert rows["mary-1"]["label:order"] == "ABBA"
    assert rows["mary-1"]["label:source"] == "book"
    assert (rows["bad"]["status"], rows["bad"]["label:order"]) == ("failed", "BABA")


@pytest.mark.parametrize("root", ["probability", "linear"])
def test_a_task_works_with_any_root_of_an_answer(model: headtrace.Model, root: str, tmp_path: Path) -> None:
    from headtrace.tasks import load_task

    examples = load_task("ioi", model.tokenizer, n=3)
    run = headtrace.run(model, examples, out=tmp_path / "run", root=root)
    assert run.status().failed == 0
    assert {run.circuit(i).root.kind for i in range(3)} == {root}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text": MARY, "anwser": " Mary"}, "Did you mean 'answer'"),
        ({"text": MARY, "extra": {"a": 1}}, "unknown field 'extra'"),
        ({"text": MARY, "root": "probability", "answer": " Mary", "wrong": " John"}, "no wrong answer"),
        ({"text": MARY, "root": "heads", "answer": " Mary"}, "does not use answer"),
        ({"text": MARY, "paths": "completex"}, "choose 'attention'"),
        ({"text": MARY, "neurons": 1.5}, "whole number"),
        ({"text": MARY, "neurons": 2, "answer": " Mary"}, "neurons=2"),
        ({"text": MARY, "max_firings": 0}, "at least 1"),
        ({"text": MARY, "min_influence": 2}, "between 0 and 1"),
        ({"text": MARY, "labels": {"a": 5}}, "must be text"),
        ({"text": MARY, "id": ""}, "not empty"),
        ({"answer": " Mary"}, "needs either 'text' or 'tokens'"),
    ],
)
def test_what_a_request_cannot_mean_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TraceRequest.from_json(fields)


def test_a_setting_of_the_tracer_is_refused_in_a_single_prompt(model: headtrace.Model) -> None:
    with pytest.raises(InputError, match="method is a setting"):
        headtrace.Tracer(model).trace({"text": MARY, "answer": " Mary", "method": "svt"})


def test_every_option_of_a_root_is_an_option_of_a_request() -> None:
    assert set(ROOT_OPTIONS) == {name for root in ROOTS.values() for name in root.options}


def test_no_limit_is_not_the_default_limit() -> None:
    request = TraceRequest.from_json({"text": MARY, "max_firings": None})
    assert request.max_firings is None
    assert TraceRequest.from_json(request.to_json()) == request


ANSWERS = st.one_of(st.text(min_size=1, max_size=4), st.integers(0, 400))
FIELDS = st.fixed_dictionaries(
    {"text": st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)},
    optional={
        "answer": st.one_of(ANSWERS, st.lists(ANSWERS, min_size=1, max_size=3)),
        "wrong": ANSWERS,
        "paths": st.sampled_from(["attention", "content", "complete"]),
        "counterfactual": st.text(min_size=1, max_size=9),
        "bos": st.booleans(),
        "max_firings": st.one_of(st.none(), st.integers(1, 500)),
        "min_influence": st.floats(0, 1),
        "patterns": st.sampled_from(["auto", "keep", "recompute"]),
        "method": st.sampled_from(["acc++", "acc", "svt"]),
        "method_options": st.dictionaries(st.sampled_from(["tau"]), st.floats(0.1, 0.9)),
        "id": st.text(min_size=1, max_size=5),
        "labels": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    },
)


@settings(max_examples=200, deadline=None)
@given(FIELDS)
def test_the_json_form_says_everything(fields: dict[str, Any]) -> None:
    if "counterfactual" in fields:
        fields["paths"] = "difference"
    request = TraceRequest.from_json(fields)
    written = json.loads(json.dumps(request.to_json()))
    assert TraceRequest.from_json(written) == request
    assert TraceRequest.from_json(written).hash == request.hash
    for name, value in fields.items():
        assert written.get(name, getattr(TraceRequest("x"), name, None)) == value
