"""From sentences with marked words to examples of one vocabulary, or to the reason why they do not fit it.

Your own prompts are a file of one JSON object per line:

    {"text": "The opposite of hot is", "answer": " cold", "wrong": " warm", "labels": {"kind": "opposite"}}

``answer`` and ``wrong`` follow the text as they are written, so they usually begin with a space; each may
be a list. ``labels`` (text to text) and ``roles`` (a name to the [start, end) characters of its word in the
text) may be left out. A line that is not valid is skipped and counted, as one that does not fit the vocabulary is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING

from headtrace.errors import InputError
from headtrace.lines import Record, read_lines, shown
from headtrace.prompts import Encoded, Span, encode, following, has_unknown, is_one_token, positions_of
from headtrace.tasks.examples import Example, Exclusion, TaskSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# An endless stream of fill-ins is given up when this many in a row do not fit the vocabulary.
PATIENCE = 500


@dataclass(frozen=True)
class Draft:
    """A prompt before tokenization: roles are still spans of characters."""

    id: str
    text: str
    answers: tuple[str, ...]
    """Right continuations; most tasks have one."""
    wrongs: tuple[str, ...]
    spans: Mapping[str, Span]
    labels: Mapping[str, str]
    one_token: frozenset[str] = field(default_factory=frozenset[str])
    """Roles that must be exactly one token."""


Builder = Callable[["PreTrainedTokenizerBase", Sequence[Draft]], Iterator["Example | Exclusion"]]


@dataclass(frozen=True)
class Cell:
    """One combination of labels (such as form and order) and its stream of drafts, which may be endless."""

    name: str
    drafts: Iterable[Draft]


def fill(form: str, slots: Mapping[str, str]) -> tuple[str, dict[str, Span]]:
    """Put words into a form and remember where each one is.

    >>> fill("When {A} met {B}", {"A": "Mary", "B": "John"})
    ('When Mary met John', {'A': (5, 9), 'B': (14, 18)})
    """
    text = ""
    spans: dict[str, Span] = {}
    for literal, slot, _, _ in Formatter().parse(form):
        text += literal
        if slot is not None:
            spans[slot] = (len(text), len(text) + len(slots[slot]))
            text += slots[slot]
    return text, spans


def split_words(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[str], kind: str
) -> tuple[frozenset[str], list[Exclusion]]:
    """The words that are one token in the middle of a sentence, and an exclusion for each of the others."""
    before = "Then they met "
    encoded = encode(tokenizer, [f"{before}{word} again" for word in words])
    usable: set[str] = set()
    excluded: list[Exclusion] = []
    for word, each in zip(words, encoded, strict=True):
        if is_one_token(tokenizer, each, (len(before), len(before) + len(word))):
            usable.add(word)
        else:
            excluded.append(Exclusion(word, f"{kind} is not one token of this vocabulary"))
    return frozenset(usable), excluded


def take(
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    cells: Sequence[Cell],
    n_per_cell: int,
    builder: Builder | None = None,
) -> tuple[list[Example], list[Exclusion]]:
    """Exactly ``n_per_cell`` examples of every cell; drafts that do not fit are counted and replaced."""
    examples: list[Example] = []
    excluded: list[Exclusion] = []
    for cell in cells:
        stream = iter(cell.drafts)
        found: list[Example] = []
        failures = 0
        while len(found) < n_per_cell and failures < PATIENCE:
            drafts = list(islice(stream, n_per_cell - len(found)))
            if not drafts:
                break
            built = list((builder or build)(tokenizer, drafts))
            good = [each for each in built if isinstance(each, Example)]
            failures = 0 if good else failures + len(drafts)
            found += good
            excluded += [each for each in built if isinstance(each, Exclusion)]
        if len(found) < n_per_cell:
            raise InputError(_too_few(task, cell, len(found), n_per_cell, excluded))
        examples += found
    return examples, excluded


def build(tokenizer: PreTrainedTokenizerBase, drafts: Sequence[Draft]) -> Iterator[Example | Exclusion]:
    """Tokenize drafts; each becomes an example, or an exclusion that says what did not fit."""
    prompts = encode(tokenizer, [draft.text for draft in drafts])
    texts = [draft.text + each for draft in drafts for each in (*draft.answers, *draft.wrongs)]
    longer = iter(encode(tokenizer, texts))
    for draft, prompt in zip(drafts, prompts, strict=True):
        answers = list(islice(longer, len(draft.answers)))
        wrongs = list(islice(longer, len(draft.wrongs)))
        yield _build_one(tokenizer, draft, prompt, answers, wrongs)


def place_roles(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Encoded,
    spans: Mapping[str, Span],
    one_token: frozenset[str] = frozenset(),
) -> dict[str, int] | str:
    """Token positions of the roles (a word of several tokens is known by its last one), or what is wrong."""
    if not prompt.own:
        return "the text has no tokens"
    if has_unknown(tokenizer, prompt.text, prompt.own):
        return "the text has a word that is not in the vocabulary"
    roles: dict[str, int] = {}
    for role, span in spans.items():
        if role in one_token and not is_one_token(tokenizer, prompt, span):
            return f"{role} is not one token in this sentence"
        positions = positions_of(tokenizer, prompt, span)
        if not positions:
            return f"{role} cannot be placed among the tokens"
        roles[role] = positions[-1]
    return {**roles, "end": len(prompt.ids) - 1}


def assemble(
    draft: Draft,
    prompt: Encoded,
    roles: Mapping[str, int],
    answer_ids: Sequence[int],
    wrong_ids: Sequence[int],
) -> Example:
    """The example of a draft whose parts are known; its first answer and first wrong one stand for their sides."""
    return Example(
        id=draft.id,
        text=draft.text,
        answer=draft.answers[0],
        wrong=draft.wrongs[0],
        roles=roles,
        labels=dict(draft.labels),
        token_ids=prompt.ids,
        answer_ids=tuple(answer_ids),
        wrong_ids=tuple(wrong_ids),
    )


def _build_one(
    tokenizer: PreTrainedTokenizerBase,
    draft: Draft,
    prompt: Encoded,
    answers: Sequence[Encoded],
    wrongs: Sequence[Encoded],
) -> Example | Exclusion:
    roles = place_roles(tokenizer, prompt, draft.spans, draft.one_token)
    if isinstance(roles, str):
        return Exclusion(draft.id, roles)
    ids: dict[str, list[int]] = {"answer": [], "wrong": []}
    for kind, continuations in (("answer", answers), ("wrong", wrongs)):
        for longer in continuations:
            continuation = longer.text[len(draft.text) :]
            token = _single(tokenizer, continuation, following(prompt, longer))
            if isinstance(token, str):
                return Exclusion(draft.id, f"{kind} {continuation!r}: {token}")
            ids[kind].append(token)
    if set(ids["answer"]) & set(ids["wrong"]):
        return Exclusion(draft.id, "answer and wrong are the same token")
    return assemble(draft, prompt, roles, ids["answer"], ids["wrong"])


def _single(
    tokenizer: PreTrainedTokenizerBase, continuation: str, tokens: tuple[int, ...] | None
) -> int | str:
    """The one token that a continuation is, or why it is not one."""
    if tokens is None:
        return "the continuation changes how the prompt is split into tokens"
    if has_unknown(tokenizer, continuation, tokens):
        return "not in the vocabulary"
    return tokens[0] if len(tokens) == 1 else "more than one token"


def _too_few(task: str, cell: Cell, found: int, wanted: int, excluded: Sequence[Exclusion]) -> str:
    message = f"Task '{task}' asked for {wanted} examples of {cell.name}, but there are only {found} "
    message += "for this tokenizer's vocabulary"
    if excluded:
        message += f" (last one left out: {excluded[-1].item}: {excluded[-1].reason})"
    if found:
        return message + f". Ask for at most {found} per cell, or use a model with a larger vocabulary."
    return message + ". Use a model whose vocabulary holds these words, or bring your own prompts as JSONL."


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
