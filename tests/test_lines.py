"""Files of one JSON object per line: everything that can be in one, and everything that can be wrong with one."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headtrace.errors import InputError
from headtrace.lines import prompt_of, read_records

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


def read(content: bytes, **options: Any) -> list[tuple[int, dict[str, Any]]]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        path.write_bytes(content)
        return read_records(path, **options)


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


def test_only_the_last_of_equal_fields_counts() -> None:
    assert read(b'{"text": "a", "text": "b"}') == [(1, {"text": "b"})]


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
