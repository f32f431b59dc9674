"""Files of one JSON object per line (JSONL): the one way in which headtrace reads them.

>>> from tempfile import TemporaryDirectory
>>> with TemporaryDirectory() as folder:
...     path = Path(folder) / "prompts.jsonl"
...     _ = path.write_text('{"text": "When Mary"}\\n\\n{"tokens": [5, true]}\\n{"tokens": [5, 17]}\\n')
...     lines = read_lines(path, prompt_of)
>>> list(lines)
[(1, 'When Mary'), (4, (5, 17))]
>>> print(lines.report())
1 of 3 lines skipped:
  line 3: 'tokens' must be a list of token ids, like [1, 2, 3], got [5, true].

A line that cannot be used is skipped and counted, with its reason; with ``strict=True`` the first of them is an error.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from headtrace.errors import InputError
from headtrace.errors import shown as _shown

T = TypeVar("T")
U = TypeVar("U")
Record = dict[str, object]
"""A JSON object: what its fields hold is for the reader to check."""

LONGEST = 1 << 24
"""No line has more bytes: a longer one is another format, and would fill the memory."""

_LARGEST_ID = 2**63 - 1


@dataclass(frozen=True)
class Skipped:
    """A line that could not be used, and why."""

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclass(frozen=True)
class Lines(Generic[T]):
    """What the lines of a file hold. Iterates over pairs: the number of the line, from 1, and what it holds."""

    entries: tuple[tuple[int, T], ...]
    skipped: tuple[Skipped, ...] = ()
    """In the order of the file."""
    source: str = field(default="", compare=False)
    """The name of the file."""

    def then(self, parse: Callable[[T, str], U], *, strict: bool = False) -> Lines[U]:
        """The results of ``parse`` for what the lines hold; lines that it refuses are skipped, as in ``read_lines``."""
        return _parsed(self.source, self.entries, parse, strict, self.skipped)

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def values(self) -> list[T]:
        """What the lines hold, without their numbers."""
        return [value for _, value in self.entries]

    @property
    def skipped_rows(self) -> list[dict[str, Any]]:
        """The lines that could not be used, for files of results: ``line`` and ``reason`` of each."""
        return [{"line": each.line, "reason": each.reason} for each in self.skipped]

    def report(self, first: int = 3) -> str:
        """How many lines were skipped, and why the first few of them were; empty where none was."""
        if not self.skipped:
            return ""
        total, more = len(self.entries) + len(self.skipped), len(self.skipped) - first
        report = [
            f"{len(self.skipped)} of {total} lines skipped:",
            *(f"  {each}" for each in self.skipped[:first]),
        ]
        return "\n".join([*report, f"  and {more} more."] if more > 0 else report)


# -- reading -----------------------------------------------------------------------------------------------------


def read_lines(
    path: str | Path, parse: Callable[[Record, str], T], *, what: str = "prompts", strict: bool = False
) -> Lines[T]:
    """The results of ``parse`` for each object of a file; blank lines are ignored.

    ``parse`` gets an object and its place (``prompts.jsonl, line 3``), and raises ``InputError`` for one that cannot be
    used: it is skipped, or with ``strict`` the error is raised. If no line can be used, it is always an error.
    ``what`` says what a line is, for errors.
    """
    lines = _parsed(str(path), _raw_lines(path, what), _of_raw(parse), strict)
    if not lines.entries:
        raise InputError(f"{str(path)!r} holds no {what}: write one JSON object per line.")
    return lines


def stream_lines(
    path: str | Path, parse: Callable[[Record, str], T], *, what: str = "prompts"
) -> Iterator[tuple[int, T | Skipped]]:
    """As ``read_lines``, one line at a time, for files that do not fit into memory; a line that cannot be used comes as
    ``Skipped``.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "prompts.jsonl")
    ...     _ = path.write_text('{"text": "When Mary"}\\n[5]\\n', encoding="utf-8")
    ...     [type(found).__name__ for _, found in stream_lines(path, prompt_of)]
    ['str', 'Skipped']
    """
    return _attempts(str(path), _raw_lines(path, what), _of_raw(parse), strict=False)


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
        case {"tokens": [_, *_] as ids} if all(_is_id(token) for token in ids):
            return tuple(ids)
        case _:
            given = shown(record["tokens"])
            raise InputError(f"{where}: 'tokens' must be a list of token ids, like [1, 2, 3], got {given}.")


def shown(value: object) -> str:
    """A value of a line as it was written, cut where it is long."""
    return "nothing" if value is None else _shown(value, 60)


# -- inside ------------------------------------------------------------------------------------------------------


def _of_raw(parse: Callable[[Record, str], T]) -> Callable[[bytes, str], T | None]:
    """``parse`` for the bytes of a line; None for a blank one."""

    def parse_raw(raw: bytes, where: str) -> T | None:
        record = _record(raw, where)
        return None if record is None else parse(record, where)

    return parse_raw


def _attempts(
    source: str, lines: Iterable[tuple[int, T]], parse: Callable[[T, str], U | None], strict: bool
) -> Iterator[tuple[int, U | Skipped]]:
    """The result of ``parse`` for each line, or why it was skipped; with ``strict`` that is raised."""
    for number, line in lines:
        where = f"{source}, line {number}"
        try:
            found = parse(line, where)
        except InputError as error:
            reason = str(error).removeprefix(where).lstrip(" ,:")
            if strict:
                named = str(error).startswith(where)
                raise InputError(str(error) if named else f"{where}: {reason}") from error
            yield number, Skipped(number, reason)
            continue
        if found is not None:
            yield number, found


def _parsed(
    source: str,
    lines: Iterable[tuple[int, T]],
    parse: Callable[[T, str], U | None],
    strict: bool,
    before: tuple[Skipped, ...] = (),
) -> Lines[U]:
    """Lines sorted into those that can be used and those that cannot; an error if none can."""
    entries: list[tuple[int, U]] = []
    skipped = list(before)
    for number, found in _attempts(source, lines, parse, strict):
        if isinstance(found, Skipped):
            skipped.append(found)
        else:
            entries.append((number, found))
    skipped.sort(key=lambda each: each.line)
    if skipped and not entries:
        raise InputError(f"None of the {len(skipped)} lines of {source} can be used. {source}, {skipped[0]}")
    return Lines(tuple(entries), tuple(skipped), source)


def _is_id(token: object) -> bool:
    return type(token) is int and 0 <= token <= _LARGEST_ID


def _raw_lines(path: str | Path, what: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, one at a time; of one that is too long, only as much as shows it."""
    try:
        with Path(path).open("rb") as file:
            number = 0
            while raw := file.readline(LONGEST + 1):
                rest = raw if len(raw) > LONGEST else b"\n"
                while rest and not rest.endswith(b"\n"):  # go to the end of a line that is too long
                    rest = file.readline(LONGEST + 1)
                number += 1
                yield number, raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"The file of {what} {str(path)!r} cannot be read: {reason}. Give a file with one JSON object per line."
        ) from error


def _record(raw: bytes, where: str) -> Record | None:
    """The object of a line; None for a blank one."""
    if len(raw) > LONGEST:
        raise InputError(f"{where} is longer than {LONGEST >> 20} MB. Is it one JSON object per line?")
    try:
        # Not in text mode, which would take a lone "\r" for the end of a line: only "\n" ends a line of JSONL.
        line = raw.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 text. Save the file as UTF-8.") from error
    if not line.strip():
        return None
    try:
        value: object = json.loads(
            line, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique
        )
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error.msg} at column {error.colno}).") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON that can be read ({error}).") from error
    if not isinstance(value, dict):
        raise InputError(f'{where}: expected a JSON object, like {{"text": "..."}}, got {shown(value)}.')
    for name, item in value.items():
        try:
            json.dumps({name: item}, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # JSON can spell it (``\\ud800``), and UTF-8 cannot hold it
            problem = "holds a lone surrogate (half a character; was the text cut in two?)"
        except RecursionError:
            problem = "is nested too deeply"
        else:
            continue
        raise InputError(f"{where}: {shown(name)} {problem}, got {shown(item)}.")
    return value


def _unique(pairs: list[tuple[str, object]]) -> Record:
    """The object of these keys and values; a key that is there twice is refused: which one was meant?"""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(
            f"the key {shown(twice)} occurs more than once in one object. Leave one of them out."
        )
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
