"""Batch files in both directions: what a run writes, what it takes back, and what it says of results that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headtrace
from headtrace.cli import app
from headtrace.errors import InputError
from headtrace.interpret import (
    BatchWritten,
    EndpointExplainer,
    EndpointJudge,
    interpret_examples,
    interpretation,
    read_batch_results,
)
from headtrace.interpret.answer_files import BatchQuestions
from headtrace.interpret.explainers import RunContext
from tests.interpret.made_up_signals import same_token, signal_by
from tests.interpret.scanning import made_up_scan
from tests.interpret.serving import good, serving

SIGNALS = [signal_by(same_token, f"L0H0:{channel}", seed=channel) for channel in range(3)]
SECOND = [signal_by(same_token, f"L0H0:{channel}", seed=channel + 1000) for channel in range(3)]


def _run(folder: Path, batch_file: Path | None, url: str = "http://localhost:1/v1") -> Any:
    batch = None if batch_file is None else BatchQuestions(batch_file, folder)
    context = RunContext(None, folder, batch=batch)
    explains, judges = (
        kind(url, "m", retries=0).prepare(context) for kind in (EndpointExplainer, EndpointJudge)
    )
    return interpret_examples(SIGNALS, second=SECOND, explainer=explains, judge=judges)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def _result(line: dict[str, Any], text: str | None = None) -> dict[str, Any]:
    """What a service returns for a line: the answer of a server that finds same tokens, or another text."""
    text = good(0, line["body"]["messages"]) if text is None else text
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}
    response = {"status_code": 200, "request_id": "r", "body": body}
    return {"id": "batch", "custom_id": line["custom_id"], "response": response, "error": None}


def _write(file: Path, lines: list[Any]) -> Path:
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    file.write_text(text, "utf-8")
    return file


def _asked(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    file = folder.with_suffix(".jsonl")
    with pytest.raises(BatchWritten, match="3 questions") as told:
        _run(folder, file)
    assert (told.value.file, told.value.questions) == (file, 3)
    return file, _lines(file)


def test_a_run_by_batch_files_ends_with_the_result_of_one_that_asks_a_server(tmp_path):
    file, rounds = tmp_path / "ask.jsonl", 0
    while True:
        try:
            found = _run(tmp_path / "batch", file)
            break
        except BatchWritten:
            rounds += 1
        results = _write(tmp_path / "results.jsonl", [_result(each) for each in reversed(_lines(file))])
        assert read_batch_results(results, tmp_path / "batch").complete
    with serving(good) as server:
        direct = _run(tmp_path / "direct", None, server.url)
    assert rounds == 2, "the explainer's questions, and all of the judge's"
    told, other = found.to_dict(), direct.to_dict()
    for each in (told, other):
        each["settings"] = None  # the address of the server
    assert told == other
    assert found.fraction.value == 1.0


def test_a_batch_file_is_that_of_the_public_format(tmp_path):
    _, lines = _asked(tmp_path / "words")
    assert len({each["custom_id"] for each in lines}) == 3
    assert all(len(each["custom_id"]) <= 64 for each in lines), "the longest that services take"
    for each in lines:
        assert (each["method"], each["url"]) == ("POST", "/v1/chat/completions")
        assert each["body"]["model"] == "m"
        assert each["body"]["max_tokens"] > 0
        assert each["body"]["response_format"]["json_schema"]["schema"]["required"] == ["description"]


def test_everything_wrong_with_a_results_file_is_counted(tmp_path):
    folder = tmp_path / "words"
    _, (one, two, three) = _asked(folder)
    failed = {"custom_id": two["custom_id"], "response": None, "error": {"message": "batch expired"}}
    results = _write(
        tmp_path / "results.jsonl",
        [_result(one), _result(one), failed, "{half", "", {**_result(one), "custom_id": "another"}],
    )
    report = read_batch_results(results, folder)
    assert (report.answers, dict(report.failed), report.unreadable) == (1, {"batch expired": 1}, 1)
    assert (report.unknown, report.repeated, report.missing) == (1, 1, 2)
    assert not report.complete
    assert str(report) == (
        "1 answers read; 1 requests failed (1 x batch expired); 1 lines are not the JSON of a result; 1 results are "
        "for questions that this folder did not ask; 1 answers are to a question that had one; 2 questions still have "
        "no answer"
    )
    with pytest.raises(BatchWritten, match="2 questions"):
        _run(folder, tmp_path / "again.jsonl")
    assert {each["custom_id"] for each in _lines(tmp_path / "again.jsonl")} == {
        two["custom_id"],
        three["custom_id"],
    }


def test_an_answer_in_a_file_of_errors_and_one_of_results_is_an_answer(tmp_path):
    folder = tmp_path / "words"
    _, lines = _asked(folder)
    errors = [
        {"custom_id": each["custom_id"], "response": {"status_code": 500, "body": {}}} for each in lines
    ]
    files = [
        _write(tmp_path / "errors.jsonl", errors),
        _write(tmp_path / "results.jsonl", [*map(_result, lines)]),
    ]
    report = read_batch_results(files, folder)
    assert (report.answers, dict(report.failed), report.complete) == (3, {}, True)


def test_an_unreadable_answer_of_a_batch_is_a_failure_and_not_asked_for_without_end(tmp_path):
    folder = tmp_path / "words"
    file, lines = _asked(folder)
    results = [_result(lines[0], "They are nice."), *map(_result, lines[1:])]
    read_batch_results(_write(tmp_path / "results.jsonl", results), folder)
    with pytest.raises(BatchWritten):
        _run(folder, file)  # the judge's questions, about the two signals that have words
    read_batch_results(_write(tmp_path / "results.jsonl", [*map(_result, _lines(file))]), folder)
    found = _run(folder, file)
    assert [each.status for each in found.signals] == ["failed", "described", "described"]
    assert (found.asked.unreadable, found.asked.unanswered) == (1, 0)


def test_what_a_service_refuses_is_left_out_of_the_next_batch_file(tmp_path):
    folder = tmp_path / "words"
    file, lines = _asked(folder)
    message = {"error": {"message": "Unsupported parameter: 'max_tokens' is not supported with this model."}}
    refused = [
        {"custom_id": each["custom_id"], "response": {"status_code": 400, "body": message}} for each in lines
    ]
    report = read_batch_results(_write(tmp_path / "results.jsonl", refused), folder)
    assert sum(report.failed.values()) == report.missing == 3
    with pytest.raises(BatchWritten):
        _run(folder, file)
    assert all("max_completion_tokens" in each["body"] for each in _lines(file))
    assert not any("max_tokens" in each["body"] for each in _lines(file))


def test_a_batch_file_needs_no_key_since_nothing_is_sent(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(BatchWritten):
        _run(tmp_path / "words", tmp_path / "ask.jsonl", "https://models.example.org/v1")


def test_results_without_a_batch_file_and_files_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(InputError, match="No batch file was written"):
        read_batch_results(_write(tmp_path / "results.jsonl", []), tmp_path / "words")
    _asked(tmp_path / "words")
    with pytest.raises(InputError, match="cannot be read"):
        read_batch_results(tmp_path / "nowhere.jsonl", tmp_path / "words")


def test_the_command_writes_a_batch_file_reads_its_results_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(interpretation, "scan", made_up_scan)
    prompt = "When Mary and John went to the store, John gave a drink to"
    circuit = headtrace.Tracer(headtrace.load("builtin")).trace(prompt, " Mary", " John")
    small_circuit = circuit.save(tmp_path / "circuit.json")
    ask, results, out = tmp_path / "ask.jsonl", tmp_path / "results.jsonl", tmp_path / "words"
    command = ["interpret", str(small_circuit), "--corpus", "text", "--limit", "1", "--judge", "openai"]
    command += ["--model-name", "m", "--batch-out", str(ask), "--out", str(out), "--json"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    told = json.loads(first.stdout)
    assert (told["batch_file"], told["questions"]) == (str(ask), len(_lines(ask)))
    assert not (out / "interpretation.json").exists()
    _write(results, [*map(_result, _lines(ask))])
    second = CliRunner().invoke(app, [*command, "--batch-in", str(results)])
    assert second.exit_code == 0, second.output
    assert f"{len(_lines(ask))} answers read" in second.stderr
    assert json.loads(second.stdout)["asked"]["unanswered"] == 0


def test_batch_files_are_refused_where_no_language_model_is_asked(tmp_path):
    command = ["interpret", "circuit.json", "--corpus", "sampled:600", "--out", str(tmp_path)]
    told = CliRunner().invoke(app, [*command, "--batch-out", "ask.jsonl"])
    assert told.exit_code == 2
    assert "--judge openai" in told.stderr
