"""Files of one JSON object per line: everything that can be in one, and everything that can be wrong with one."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headtrace import lines
from headtrace.errors import InputError
from headtrace.lines import Lines, Skipped, prompt_of, read_lines
from headtrace.request import read_requests

# No halves of characters: UTF-8 cannot hold them.
strings = st.text(st.characters(codec="utf-8"), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
objects = st.dictionaries(strings, values, max_size=4)

GOOD = b'{"text": "a"}\n'


def read_records(
    path: str | Path, *, what: str = "prompts", strict: bool = False
) -> Lines[dict[str, object]]:
    """The objects of a file, unparsed."""
    return read_lines(path, lambda record, _: record, what=what, strict=strict)


def read(content: bytes, **options: Any) -> list[tuple[int, dict[str, Any]]]:
    return list(written(content, read_records, strict=True, **options))


def written(content: bytes, reader: Callable[..., Lines[Any]], **options: Any) -> Lines[Any]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        path.write_bytes(content)
        return reader(path, **options)


@given(
    rows=st.lists(objects | st.sampled_from(["", "  ", "\t"]), min_size=1, max_size=5),
    end=st.sampled_from(["\n", "\r\n"]),
    bom=st.booleans(),
    escaped=st.booleans(),
    last=st.booleans(),
)
@untimed
def test_what_is_written_is_read_with_its_line(
    rows: list[Any], end: str, bom: bool, escaped: bool, last: bool
) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=escaped) for row in rows]
    content = (codecs.BOM_UTF8 if bom else b"") + (end.join(lines) + (end if last else "")).encode()
    expected = [(number, row) for number, row in enumerate(rows, 1) if not isinstance(row, str)]
    if expected:
        assert read(content) == expected
    else:
        with pytest.raises(InputError, match="holds no prompts"):
            read(content)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_line_separators_of_other_alphabets_stand_inside_a_string(separator: str) -> None:
    record = {"text": f"one{separator}two"}
    assert read(json.dumps(record, ensure_ascii=False).encode() + b"\n" + GOOD) == [
        (1, record),
        (2, {"text": "a"}),
    ]


@given(st.binary(max_size=40))
@untimed
def test_any_bytes_are_read_or_refused_with_the_name_of_the_file(content: bytes) -> None:
    try:
        records = read(content)
    except InputError as error:
        assert "lines.jsonl" in str(error)  # noqa: PT017
    else:
        assert records


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', r"line 2 is not JSON \(.* at column 10\)"),
        (b"{'text': 1}", "line 2 is not JSON"),
        (b'{"text": "a"} {"text": "b"}', "line 2 is not JSON"),
        (b'{"text": "a\rb"}', "line 2 is not JSON"),
        (b'{"text": NaN}', "line 2 is not JSON that can be read .NaN"),
        (b'{"text": [-Infinity]}', "line 2 is not JSON that can be read .-Infinity"),
        (b'{"answer": 1e400}', "line 2 is not JSON that can be read .1e400 is too large"),
        (b'{"answer": ' + b"9" * 5000 + b"}", "line 2 is not JSON that can be read"),
        (b'{"text": "a", "answer": "\\ud83d"}', r'line 2: "answer" holds a lone surrogate .*got "\\ud83d"'),
        (b'{"labels": [{"a": "\\udfff"}]}', 'line 2: "labels" holds a lone surrogate'),
        (b"[" * 200_000, "line 2 is not JSON that can be read"),
        (b"[1, 2]", r"line 2: expected a JSON object.*got \[1, 2\]"),
        (b"null", "line 2: expected a JSON object.*got nothing"),
        (b'"' + b"a" * 100 + b'"', r"line 2: expected a JSON object.*aaa\.\.\.\.$"),
        (b'{"text": "\xff"}', "line 2 is not UTF-8"),
    ],
)
@pytest.mark.parametrize("bom", [b"", codecs.BOM_UTF8])
def test_a_bad_line_is_named_with_its_number(line: bytes, message: str, bom: bytes) -> None:
    with pytest.raises(InputError, match=rf"lines\.jsonl, {message}"):
        read(bom + GOOD + line + b"\n" + GOOD)


@pytest.mark.parametrize(
    "line", [b'{"text": "a", "text": "b"}', b'{"text": "a", "labels": {"k": 1, "k": 2}}']
)
def test_a_key_that_is_there_twice_is_refused_as_in_circuit_files(line: bytes) -> None:
    with pytest.raises(InputError, match=r"line 1: the key \"(text|k)\" occurs more than once"):
        read(line)


def test_a_file_that_is_not_there_or_a_folder_or_empty_says_what_to_do(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path, tmp_path / "no\0name"):
        with pytest.raises(
            InputError, match=r"file of firings .* cannot be read: .*one JSON object per line"
        ):
            read_records(path, what="firings")
    for content in (b"", b"\n \r\n", codecs.BOM_UTF8):
        with pytest.raises(InputError, match="holds no firings: write one JSON object per line"):
            read(content, what="firings")


@pytest.mark.parametrize(
    ("record", "prompt"),
    [({"text": "When Mary", "answer": 5}, "When Mary"), ({"tokens": [5, 6]}, (5, 6))],
)
def test_the_prompt_of_a_line(record: dict[str, Any], prompt: Any) -> None:
    assert prompt_of(record, "line 1") == prompt


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "line 1 needs either 'text' or 'tokens'"),
        ({"text": "a", "tokens": [1]}, "line 1 needs either 'text' or 'tokens'"),
        ({"text": 5}, "line 1: 'text' must be a string that is not empty, got 5"),
        ({"text": ""}, 'line 1: .text. must be a string that is not empty, got ""'),
        ({"text": None}, "line 1: 'text' must be a string.*got nothing"),
        ({"tokens": "5, 6"}, "line 1: 'tokens' must be a list of token ids"),
        ({"tokens": []}, "line 1: 'tokens' must be a list of token ids"),
        ({"tokens": [5, True]}, "line 1: 'tokens' must be a list of token ids.*got .5, true"),
        ({"tokens": [5, 6.0]}, "line 1: 'tokens' must be a list of token ids"),
        ({"tokens": [[5]]}, "line 1: 'tokens' must be a list of token ids"),
    ],
)
def test_a_line_without_one_prompt_is_an_error(record: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prompt_of(record, "line 1")


# -- lines that are skipped --------------------------------------------------------------------------------------

BAD = [
    ({}, "needs either 'text' or 'tokens'"),
    (
        {"text": "a", "answer": True},
        "'answer' must be text, a token id, or a list of them, none empty, got true.",
    ),
    ({"text": "a", "answer": 1.5}, "'answer' must be .* got 1.5."),
    ({"text": "a", "answer": [5, True]}, "'answer' must be"),
    ({"text": "a", "answer": -1}, "'answer' must be"),
    ({"text": "a", "answer": 10**30}, "'answer' must be"),
    ({"text": "a", "answer": {"text": "b"}}, "'answer' must be"),
    ({"text": "a", "wrong": []}, r"'wrong' must be .*got \[\]"),
    ({"text": "a", "wrong": ""}, "'wrong' must be"),
    ({"text": "a", "wrong": [" b", ""]}, "'wrong' must be"),
    ({"text": "a", "anwser": " b"}, "unknown field 'anwser'. Did you mean 'answer'?"),
    ({"text": "a", "tokens": [1]}, "needs either"),
    ({"tokens": [-1]}, "'tokens' must be a list of token ids"),
    ({"tokens": [10**40]}, "'tokens' must be a list of token ids"),
    ({"text": "a", "counterfactual": ""}, "'counterfactual' must be text or a list of token ids"),
    ({"text": "a", "counterfactual": [1, -1]}, "'counterfactual' must be"),
    ({"text": "a", "counterfactual": 5}, "'counterfactual' must be"),
    ({"text": "a", "counterfactuals": "b"}, "Did you mean 'counterfactual'?"),
    ({"messages": "a"}, "'messages' must be a list of messages"),
    ({"messages": ["a"]}, "'messages' must be a list of messages"),
]


@pytest.mark.parametrize(("record", "message"), BAD)
def test_a_line_of_no_use_is_skipped_with_its_reason_or_an_error(
    record: dict[str, Any], message: str
) -> None:
    content = GOOD + json.dumps(record).encode() + b"\n" + GOOD
    found = written(content, read_requests)
    assert [number for number, _ in found] == [1, 3]
    assert [request.to_json() for request in found.values] == [{"text": "a"}] * 2
    (skipped,) = found.skipped
    assert skipped.line == 2
    with pytest.raises(InputError, match=rf"lines\.jsonl, line 2.*{message}"):
        written(content, read_requests, strict=True)
    assert found.report().startswith("1 of 3 lines skipped:\n  line 2: ")


def test_prompts_keep_their_answers_ids_labels_and_fields_of_other_programs() -> None:
    records = [
        {"text": "a", "answer": " b", "wrong": [" c", 5], "labels": {"x": "y"}, "id": 7, "source": "web"},
        {"tokens": [1, 2], "answer": 3, "wrong": None},
        {"messages": [{"role": "user", "content": "a"}], "answer": "b"},
    ]
    found = written("\n".join(map(json.dumps, records)).encode(), read_requests)
    assert found.skipped == ()
    assert found.report() == ""
    assert [request.to_json() for request in found.values] == [
        {
            "text": "a",
            "answer": " b",
            "wrong": [" c", 5],
            "id": "7",
            "labels": {"source": "web", "x": "y"},
        },
        {"tokens": [1, 2], "answer": 3},
        {"messages": [{"role": "user", "content": "a"}], "answer": "b"},
    ]


def test_many_skipped_lines_are_counted_and_the_first_few_told() -> None:
    found = written(GOOD + b"{\n" * 7, read_records)
    assert len(found.skipped) == 7
    told = found.report(first=2).splitlines()
    assert [told[0], told[-1]] == ["7 of 8 lines skipped:", "  and 5 more."]
    assert len(told) == 4


def test_a_file_without_a_line_of_use_is_an_error_with_the_first_reason() -> None:
    with pytest.raises(InputError, match=r"None of the 2 lines of .*lines\.jsonl, line 1: is not JSON"):
        written(b"{\n[\n", read_records)


def test_bad_bytes_spoil_their_own_line_only() -> None:
    found = written(GOOD + b'{"text": "\xff"}\n' + GOOD, read_records)
    assert len(found) == 2
    assert found.skipped == (Skipped(2, "is not UTF-8 text. Save the file as UTF-8."),)


def test_a_line_that_is_too_long_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST", 1 << 10)
    for long in (b'{"text": "' + b"a" * 5000 + b'"}\n', b"x" * (1 << 10) + b"\n", b"x" * 1024 + b"\n\n"):
        found = written(GOOD + long + GOOD, read_records)
        assert len(found) == 2
        assert "longer than" in found.skipped[0].reason
    assert len(written(GOOD + b" " * 1000 + b"\n" + GOOD, read_records)) == 2


def test_what_a_reader_refuses_is_skipped_like_what_is_no_json() -> None:
    def parse(record: dict[str, Any], where: str) -> str:
        if record["text"] == "a":
            raise InputError("no a, please.")
        return record["text"]

    content = GOOD + b'{"text": "b"}\n'
    assert written(content, lambda path: read_lines(path, parse)) == Lines(
        ((2, "b"),), (Skipped(1, "no a, please."),)
    )
    with pytest.raises(InputError, match=r"lines\.jsonl, line 1: no a, please"):
        written(content, lambda path: read_lines(path, parse, strict=True))


def test_lines_can_be_read_further_and_keep_what_was_skipped() -> None:
    def parse(record: dict[str, Any], where: str) -> str:
        if record["text"] == "a":
            raise InputError("no a, please.")
        return record["text"]

    first = written(GOOD + b"{\n" + b'{"text": "b"}\n' + GOOD, read_records)
    found = first.then(parse)
    assert found.entries == ((3, "b"),)
    assert [skipped.line for skipped in found.skipped] == [1, 2, 4]
    with pytest.raises(InputError, match=r"lines\.jsonl, line 1: no a, please"):
        first.then(parse, strict=True)
    with pytest.raises(InputError, match=r"None of the 3 lines of .*line 1: no a"):
        written(GOOD * 3, read_records).then(parse)
