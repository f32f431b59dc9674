"""Damaged JSONL: lines that were left alone are read, the others are read or skipped with a reason."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import headtrace
from headtrace.errors import InputError
from headtrace.lines import LONGEST, Lines, read_lines
from headtrace.request import TraceRequest, read_requests
from headtrace.tasks import read_jsonl
from tests.mutation import misshaped, mutated, told

RECORDS: list[dict[str, Any]] = [
    {"text": "The capital of France is", "answer": " Paris", "wrong": " Rome"},
    {
        "text": "The capital of France is",
        "answer": [" Paris"],
        "wrong": [" Rome", " London"],
        "labels": {"a": "b"},
    },
    {"tokens": [5, 17, 42], "answer": 7, "wrong": 9},
    {"messages": [{"role": "user", "content": "Who was it?"}], "answer": " Mary"},
    {"text": "Zoë ☕ \u2028 of", "answer": " Mary", "roles": {"who": [0, 3]}},
]
CONTENT = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


def read_records(path: Path, *, strict: bool = False) -> Lines[dict[str, object]]:
    """The objects of a file, unparsed."""
    return read_lines(path, lambda record, _: record, strict=strict)


def test_damaged_bytes(tmp_path: Path) -> None:
    rng, path = random.Random(0), tmp_path / "prompts.jsonl"
    good = dict(zip(CONTENT.splitlines(), RECORDS, strict=False))
    for case in range(2000):
        content = mutated(CONTENT, rng)
        path.write_bytes(content)
        reader = (read_records, read_requests)[case % 2]
        try:
            lines = reader(path)
        except InputError as error:
            told(error, str(path))
            continue
        numbers = [number for number, _ in lines] + [skipped.line for skipped in lines.skipped]
        assert len(numbers) == len(set(numbers)) <= content.count(b"\n") + 1
        report = lines.report()
        assert report.encode().count(b"\n  line ") == min(3, len(lines.skipped))
        untouched = {i: good[line] for i, line in enumerate(content.split(b"\n"), 1) if line in good}
        found = dict(lines.entries)
        for number, record in untouched.items():
            assert number in found
            if reader is read_records:
                assert found[number] == record
        strict_agrees(path, reader, bool(lines.skipped))


def strict_agrees(path: Path, reader: Any, skips: bool) -> None:
    """What is skipped is an error where lines must be good, and nothing else is."""
    try:
        reader(path, strict=True)
    except InputError as error:
        told(error, f"{path}, line ")
        assert skips
    else:
        assert not skips


def test_misshaped_records_for_tasks_and_traces(tmp_path: Path) -> None:
    rng, path = random.Random(1), tmp_path / "prompts.jsonl"
    model = headtrace.load("builtin")
    tracer = headtrace.Tracer(model)
    for _ in range(600):
        record = misshaped(json.loads(json.dumps(rng.choice(RECORDS))), rng)
        path.write_text(json.dumps(RECORDS[0]) + "\n" + json.dumps(record) + "\n")
        task_set = read_jsonl(path, model.tokenizer)
        assert len(task_set) + len(task_set.excluded) == 2
        for prompt in read_requests(path).values:
            asked_or_refused(tracer, prompt)


def asked_or_refused(tracer: headtrace.Tracer, request: TraceRequest) -> None:
    try:
        assert TraceRequest.from_json(request.to_json()) == request
        request = request if request.about else replace(request, about={"top_k": 1})
        tracer.request(request).resolve(tracer.model)
    except InputError as error:
        told(error)


def test_a_huge_file_on_one_line_is_not_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(CONTENT + b'{"text": "' + b"a" * (3 * LONGEST) + b'"}\n' + CONTENT)
    lines = read_requests(path)
    assert len(lines) == 2 * len(RECORDS)
    assert [skipped.line for skipped in lines.skipped] == [len(RECORDS) + 1]
