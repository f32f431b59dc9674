"""Your own prompts: a bad line is counted with its reason (an error, if strict), and so is a bad fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headtrace.errors import InputError
from headtrace.tasks import load_task, read_jsonl

GOOD = {"text": "The capital of France is", "answer": " Paris", "wrong": " Rome"}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "mine.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def test_fields_arrive(tmp_path: Path, tokenizer: Any) -> None:
    roles = {"country": [15, 21]}
    path = write(
        tmp_path,
        GOOD | {"labels": {"kind": "capital"}, "roles": roles},
        "",
        GOOD | {"wrong": [" Rome", " London"]},
    )
    first, second = load_task(path, tokenizer)
    assert (first.text, first.answer, first.wrong) == (GOOD["text"], " Paris", " Rome")
    assert first.labels == {"kind": "capital"}
    assert tokenizer.decode([first.token_ids[first.roles["country"]]]).strip() == "France"
    assert first.id == "line 1"
    assert second.id == "line 3"
    assert [tokenizer.decode([token]).strip() for token in second.wrong_ids] == ["Rome", "London"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a", ', r"line 2 is not JSON .*column"),
        ("[1, 2]", r"line 2: expected a JSON object"),
        ({"answer": " a", "wrong": " b"}, r"line 2, field 'text'.*got nothing"),
        (GOOD | {"text": "  "}, r"line 2, field 'text'.*not empty"),
        (GOOD | {"answer": 3}, r"line 2, field 'answer'.*got 3"),
        (GOOD | {"answer": ""}, r"line 2, field 'answer'"),
        (GOOD | {"wrong": []}, r"line 2, field 'wrong'"),
        (GOOD | {"labels": ["x"]}, r"line 2, field 'labels'"),
        (GOOD | {"labels": {"x": 1}}, r"line 2, field 'labels'"),
        (GOOD | {"roles": {"a": [3, 99]}}, r"line 2, field 'roles'.*0 to 24"),
        (GOOD | {"roles": {"end": [0, 3]}}, r"line 2, field 'roles'.*'end'"),
        (GOOD | {"roles": {"a": [False, True]}}, r"line 2, field 'roles'.*got \[false, true\]"),
        ('{"text": "a", "answer": NaN}', r"line 2 is not JSON that can be read"),
        ('{"text": "a", "answer": "\\ud800"}', r"line 2: .answer. holds a lone surrogate"),
        (GOOD | {"anwser": " x"}, r"line 2: unknown field 'anwser'"),
    ],
)
def test_bad_line_is_counted_or_an_error_with_number_and_field(
    tmp_path: Path, builtin_tokenizer: Any, line: object, message: str
) -> None:
    path = write(tmp_path, GOOD, line)
    with pytest.raises(InputError, match=message):
        read_jsonl(path, builtin_tokenizer, strict=True)
    with pytest.raises(InputError, match=message):
        load_task(path, builtin_tokenizer, strict=True)
    task_set = load_task(path, builtin_tokenizer)
    assert len(task_set) == 1
    assert [each.item for each in task_set.excluded] == ["line 2"]


def test_answer_of_several_tokens_is_counted(tmp_path: Path, gpt2_tokenizer: Any) -> None:
    path = write(tmp_path, GOOD, GOOD | {"answer": " Parisxyz"}, GOOD | {"wrong": " Romeq"})
    task_set = read_jsonl(path, gpt2_tokenizer)
    assert len(task_set) == 1
    assert [each.item for each in task_set.excluded] == ["line 2", "line 3"]
    assert task_set.excluded[0].reason == "answer ' Parisxyz': more than one token"
    assert task_set.excluded[1].reason == "wrong ' Romeq': more than one token"


def test_missing_space_gets_a_hint(tmp_path: Path, builtin_tokenizer: Any) -> None:
    task_set = read_jsonl(write(tmp_path, GOOD, GOOD | {"answer": "Paris"}), builtin_tokenizer)
    assert "leading space" in task_set.excluded[0].reason


def test_words_the_vocabulary_does_not_hold_are_counted(tmp_path: Path, builtin_tokenizer: Any) -> None:
    lines = (
        GOOD,
        GOOD | {"text": "The xylophone of France is"},
        GOOD | {"answer": " Xanadu"},
        GOOD | {"wrong": " Paris"},
    )
    reasons = [each.reason for each in read_jsonl(write(tmp_path, *lines), builtin_tokenizer).excluded]
    assert reasons == [
        "the text has a word that is not in the vocabulary",
        "answer ' Xanadu': not in the vocabulary",
        "answer and wrong are the same token",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no prompts"), (b"\xff\xfe", "line 1: is not UTF-8"), (None, "cannot be read")],
)
def test_unreadable_file_is_an_error(
    tmp_path: Path, builtin_tokenizer: Any, content: bytes | None, message: str
) -> None:
    path = tmp_path / "mine.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_jsonl(path, builtin_tokenizer)


def test_file_where_nothing_fits_is_an_error(tmp_path: Path, builtin_tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"None of the 1 lines.*Xanadu"):
        read_jsonl(write(tmp_path, GOOD | {"answer": " Xanadu"}), builtin_tokenizer)
