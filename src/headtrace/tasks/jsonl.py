"""Your own prompts: one JSON object per line.

    {"text": "The opposite of hot is", "answer": " cold", "wrong": " warm", "labels": {"kind": "opposite"}}

``answer`` and ``wrong`` follow the text as they are written, so they usually begin with a space; each may
be a list. ``labels`` (text to text) and ``roles`` (a name to the [start, end) characters of its word in the
text) may be left out. A line that is not valid is skipped and counted, as one that does not fit the vocabulary is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headtrace.errors import InputError
from headtrace.lines import Record, read_lines, shown
from headtrace.prompts import Span
from headtrace.tasks.build import Draft, build
from headtrace.tasks.examples import Example, Exclusion, TaskSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELDS = ("text", "answer", "wrong", "labels", "roles")


def read_jsonl(path: str | Path, tokenizer: PreTrainedTokenizerBase, *, strict: bool = False) -> TaskSet:
    """Read a task from a file. A line that is not valid, or does not fit the vocabulary (an answer of more than one
    token, say), is left out and counted in ``excluded``; with ``strict`` a line that is not valid is an error.

    >>> import headtrace, json, tempfile
    >>> fact = {"text": "The capital of France is", "answer": " Paris", "wrong": " Rome"}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "capitals.jsonl"
    ...     _ = path.write_text(json.dumps(fact) + "\\n" + json.dumps(fact | {"answer": " Atlantis"}))
    ...     task_set = read_jsonl(path, headtrace.load("builtin").tokenizer)
    >>> task_set[0].answer, task_set.excluded
    (' Paris', (Exclusion(item='line 2', reason="answer ' Atlantis': not in the vocabulary"),))
    """
    lines = read_lines(path, _draft, strict=strict)
    drafts = [replace(draft, id=f"line {number}") for number, draft in lines]
    built = list(build(tokenizer, drafts))
    examples = tuple(each for each in built if isinstance(each, Example))
    excluded = tuple(_with_hint(each, drafts) for each in built if isinstance(each, Exclusion))
    if not examples:
        raise InputError(
            f"None of the {len(drafts)} lines of {path} fits this vocabulary. "
            f"{excluded[0].item}: {excluded[0].reason}."
        )
    invalid = tuple(Exclusion(f"line {each.line}", each.reason) for each in lines.skipped)
    return TaskSet(Path(path).stem, examples, (*invalid, *excluded))


def _draft(record: Record, where: str) -> Draft:
    unknown = [key for key in record if key not in FIELDS]
    if unknown:
        fields = ", ".join(map(repr, FIELDS))
        raise InputError(f"{where}: unknown field {unknown[0]!r}. A line may have {fields}.")
    text = record.get("text")
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}, field 'text': expected a text that is not empty, got {shown(text)}.")
    return Draft(
        id=where,
        text=text,
        answers=_continuations(where, "answer", record.get("answer")),
        wrongs=_continuations(where, "wrong", record.get("wrong")),
        spans=spans_of(where, text, record.get("roles", {})),
        labels=labels_of(where, record.get("labels", {})),
    )


def _continuations(where: str, field: str, value: object) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, str) and each for each in values):
        raise InputError(
            f"{where}, field {field!r}: expected a text or a list of texts, none empty, got {shown(value)}."
        )
    return tuple(str(each) for each in values)


def labels_of(where: str, value: object) -> dict[str, str]:
    """What a line says under ``labels``: text to text."""
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise InputError(f"{where}, field 'labels': expected an object of texts, got {shown(value)}.")
    return {str(key): str(each) for key, each in value.items()}


def spans_of(where: str, text: str, value: object) -> dict[str, Span]:
    """What a line says under ``roles``: names to the [start, end) characters of their words."""
    if not isinstance(value, dict):
        raise InputError(f"{where}, field 'roles': expected an object, got {shown(value)}.")
    spans: dict[str, Span] = {}
    for role, span in value.items():
        match span:
            case [start, end] if (
                type(start) is type(end) is int and 0 <= start < end <= len(text) and role != "end"
            ):
                spans[str(role)] = (start, end)
            case _:
                raise InputError(
                    f"{where}, field 'roles': {role!r} must be [start, end) characters within the text "
                    f"(0 to {len(text)}) and not be called 'end', got {shown(span)}."
                )
    return spans


def _with_hint(exclusion: Exclusion, drafts: list[Draft]) -> Exclusion:
    draft = next(draft for draft in drafts if draft.id == exclusion.item)
    spaced = all(each[:1].isspace() for each in (*draft.answers, *draft.wrongs))
    if spaced or not exclusion.reason.startswith(("answer ", "wrong ")):
        return exclusion
    return Exclusion(exclusion.item, exclusion.reason + " (does it need a leading space?)")
