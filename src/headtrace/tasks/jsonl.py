"""Your own prompts: one JSON object per line.

    {"text": "The opposite of hot is", "answer": " cold", "wrong": " warm", "labels": {"kind": "opposite"}}

``answer`` and ``wrong`` follow the text as they are written, so they usually begin with a space; each may
be a list. ``labels`` (text to text) and ``roles`` (a name to the [start, end) characters of its word in the
text) may be left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.errors import InputError
from headtrace.tasks.build import Draft, build
from headtrace.tasks.examples import Example, Exclusion, TaskSet
from headtrace.tasks.tokens import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELDS = ("text", "answer", "wrong", "labels", "roles")


def read_jsonl(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> TaskSet:
    """Read a task from a file. A line that is not valid is an error; a line that does not fit the
    vocabulary (an answer of more than one token, say) is left out and counted in ``excluded``.

    >>> task_set = read_jsonl("opposites.jsonl", model.tokenizer)
    >>> task_set.excluded
    (Exclusion(item='line 7', reason="answer ' lukewarm': more than one token"),)
    """
    path = Path(path)
    drafts = [_draft(path.name, number, line) for number, line in _lines(path)]
    if not drafts:
        raise InputError(
            f"{path.name} has no lines. Write one JSON object with {_list(FIELDS[:3])} per line."
        )
    built = list(build(tokenizer, drafts))
    examples = tuple(each for each in built if isinstance(each, Example))
    excluded = tuple(_with_hint(each, drafts) for each in built if isinstance(each, Exclusion))
    if not examples:
        raise InputError(
            f"None of the {len(drafts)} lines of {path.name} fits this vocabulary. "
            f"{excluded[0].item}: {excluded[0].reason}."
        )
    return TaskSet(path.stem, examples, excluded)


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}. Give a JSONL file.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path.name} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    # Only "\n" ends a line of JSONL: other line breaks may stand inside a string.
    return [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]


def _draft(name: str, number: int, line: str) -> Draft:
    where = f"{name}, line {number}"
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object with {_list(FIELDS[:3])}, got {_kind(record)}.")
    unknown = [str(key) for key in record if key not in FIELDS]
    if unknown:
        raise InputError(f"{where}: unknown field {unknown[0]!r}. A line may have {_list(FIELDS)}.")
    text = record.get("text")
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}, field 'text': expected a text that is not empty, got {_kind(text)}.")
    return Draft(
        id=f"line {number}",
        text=text,
        answers=_continuations(where, "answer", record.get("answer")),
        wrongs=_continuations(where, "wrong", record.get("wrong")),
        spans=_spans(where, text, record.get("roles", {})),
        labels=_labels(where, record.get("labels", {})),
    )


def _continuations(where: str, field: str, value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, str) and each for each in values):
        raise InputError(
            f"{where}, field {field!r}: expected a text or a list of texts, none empty, got {_kind(value)}."
        )
    return tuple(str(each) for each in values)


def _labels(where: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise InputError(f"{where}, field 'labels': expected an object of texts, got {_kind(value)}.")
    return {str(key): str(each) for key, each in value.items()}


def _spans(where: str, text: str, value: Any) -> dict[str, Span]:
    if not isinstance(value, dict):
        raise InputError(f"{where}, field 'roles': expected an object, got {_kind(value)}.")
    spans: dict[str, Span] = {}
    for role, span in value.items():
        match span:
            case [int(start), int(end)] if 0 <= start < end <= len(text) and role != "end":
                spans[str(role)] = (start, end)
            case _:
                raise InputError(
                    f"{where}, field 'roles': {role!r} must be [start, end) characters within the text "
                    f"(0 to {len(text)}) and not be called 'end', got {json.dumps(span)}."
                )
    return spans


def _with_hint(exclusion: Exclusion, drafts: list[Draft]) -> Exclusion:
    draft = next(draft for draft in drafts if draft.id == exclusion.item)
    spaced = all(each[:1].isspace() for each in (*draft.answers, *draft.wrongs))
    if spaced or not exclusion.reason.startswith(("answer ", "wrong ")):
        return exclusion
    return Exclusion(exclusion.item, exclusion.reason + " (does it need a leading space?)")


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names)


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 60 else shown[:57] + "..."
