"""Files of one JSON object per line (JSONL): the one way in which headtrace reads them.

>>> from tempfile import TemporaryDirectory
>>> with TemporaryDirectory() as folder:
...     path = Path(folder) / "prompts.jsonl"
...     _ = path.write_text('{"text": "When Mary"}\\n\\n{"tokens": [5, 17]}\\n', encoding="utf-8")
...     [(number, prompt_of(record, f"line {number}")) for number, record in read_records(path)]
[(1, 'When Mary'), (3, (5, 17))]
"""

from __future__ import annotations

import codecs
import json
from pathlib import Path

from headtrace.errors import InputError

Record = dict[str, object]
"""A JSON object: what its fields hold is for the reader to check."""


def read_records(path: str | Path, *, what: str = "prompts") -> list[tuple[int, Record]]:
    """The objects of a file with the numbers of their lines; blank lines are passed over.

    ``what`` says what a line is, for errors.
    """
    lines = _text(path, what).split("\n")
    records = [
        (number, _record(line, f"{path}, line {number}"))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not records:
        raise InputError(f"{str(path)!r} holds no {what}: write one JSON object per line.")
    return records


def prompt_of(record: Record, where: str) -> str | tuple[int, ...]:
    """The prompt of a line: its ``text``, or its ``tokens``."""
    if ("text" in record) == ("tokens" in record):
        raise InputError(
            f'{where} needs either \'text\' or \'tokens\': {{"text": "When Mary ..."}} or {{"tokens": [1, 2, 3]}}.'
        )
    match record:
        case {"text": str(text)} if text:
            return text
        case {"text": given}:
            raise InputError(f"{where}: 'text' must be a string that is not empty, got {shown(given)}.")
        case {"tokens": [_, *_] as ids} if all(type(token) is int for token in ids):
            return tuple(ids)
        case _:
            given = shown(record["tokens"])
            raise InputError(f"{where}: 'tokens' must be a list of token ids, like [1, 2, 3], got {given}.")


def shown(value: object) -> str:
    """A value of a line as it was written, cut where it is long."""
    if value is None:
        return "nothing"
    written = json.dumps(value, ensure_ascii=False)
    return written if len(written) <= 60 else written[:57] + "..."


def _text(path: str | Path, what: str) -> str:
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"The file of {what} {str(path)!r} cannot be read: {reason}. Give a file with one JSON object per line."
        ) from error
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        # Not in text mode, which would take a lone "\r" for the end of a line: only "\n" ends a line of JSONL.
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {number} is not UTF-8 text. Save the file as UTF-8.") from error


def _record(line: str, where: str) -> Record:
    try:
        value: object = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error.msg} at column {error.colno}).") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON that can be read ({error}).") from error
    if not isinstance(value, dict):
        raise InputError(f'{where}: expected a JSON object, like {{"text": "..."}}, got {shown(value)}.')
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
