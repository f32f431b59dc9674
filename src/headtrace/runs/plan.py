"""From examples to shards: which prompts are traced together, settled before anything runs.

>>> import headtrace
>>> tracer = headtrace.Tracer(headtrace.load("builtin"))
>>> prompts = ["When Mary and John went to", {"text": "When Mary and", "answer": " John"}, "When Mary met Zorblax and"]
>>> plan = make_plan(tracer, prompts, shard_size=2, answer=" the")
>>> plan.table.select(["index", "problem"]).to_pylist()[0]["problem"]
"input: ...Zorblax..."
>>> [row["index"] for row in plan.table.to_pylist()], plan.info("").shards
([2, 1, 0], 2)

A prompt's id is a hash of its tokens and its answers; the second and third of the same get ``-1`` and ``-2``.
Prompts are in the order of their lengths, so that a shard's are similar and little is padded; a shard is a row
group of the plan's file. Which prompts go through the model together follows from the plan alone, so a run that was
interrupted computes what an undisturbed one does. A prompt that cannot be asked about is in the plan with its
problem.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headtrace.errors import HeadtraceError, InputError
from headtrace.prompts import encode
from headtrace.roots import ROOTS, Root
from headtrace.runs.manifest import PlanInfo
from headtrace.runs.tables import LABEL, ROLE, plan_schema
from headtrace.tasks import Example, TaskSet
from headtrace.tasks.build import place_roles
from headtrace.tasks.jsonl import spans_of
from headtrace.tracing.questions import Asked, Question, as_asked
from headtrace.validation import plain

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.tracing import Tracer

SHARD_SIZE = 64
"""Prompts per shard: enough for a full batch, few enough that little is lost when a run is killed."""
Examples = TaskSet | Asked | Sequence[Asked]


@dataclass
class _Planned:
    """One prompt, as the plan has it."""

    index: int
    text: str | None = None
    token_ids: list[int] | None = None
    tokens: list[str] | None = None
    answer: list[int] | None = None
    wrong: list[int] | None = None
    root: str | None = None
    problem: str | None = None
    labels: dict[str, str] = field(default_factory=dict[str, str])
    roles: dict[str, int] = field(default_factory=dict[str, int])
    id: str = ""


@dataclass(frozen=True)
class Plan:
    """All prompts of a run, in the order in which they are traced."""

    table: pa.Table
    labels: tuple[str, ...]
    roles: tuple[str, ...]
    shard_size: int

    def info(self, file_sha256: str) -> PlanInfo:
        """What the manifest says about the plan, whose file has this checksum."""
        digest = hashlib.sha256()
        for row in _slices(self.table):
            digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
        return PlanInfo(
            prompts=self.table.num_rows,
            shard_size=self.shard_size,
            sha256=digest.hexdigest(),
            file_sha256=file_sha256,
            labels=self.labels,
            roles=self.roles,
        )


def _slices(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows of a table, of which only a few are Python objects at a time."""
    for batch in table.to_batches(max_chunksize=256):
        yield from batch.to_pylist()


def make_plan(
    tracer: Tracer, examples: Examples, *, shard_size: int = SHARD_SIZE, strict: bool = False, **how: Any
) -> Plan:
    """The plan of a run: questions about prompts (``how`` is what ``Tracer.ask`` takes), in shards."""
    if shard_size < 1:
        raise InputError(f"shard_size={shard_size}: a shard has at least one prompt.")
    items = list(examples) if isinstance(examples, TaskSet) else as_asked(examples)
    if not items:
        raise InputError("There are no prompts to trace: give at least one.")
    planned = [_planned(tracer, item, index, strict, how) for index, item in enumerate(items)]
    if all(each.problem for each in planned):
        raise InputError(f"None of the {len(planned)} prompts can be traced. The first: {planned[0].problem}")
    _number(planned)
    planned.sort(key=lambda each: (len(each.token_ids or ()), each.index))
    labels = tuple(sorted({name for each in planned for name in each.labels}))
    roles = tuple(sorted({name for each in planned for name in each.roles}))
    return Plan(_table(planned, labels, roles), labels, roles, shard_size)


def questions_of(rows: Sequence[Mapping[str, Any]]) -> list[Question]:
    """The questions of rows of the plan, as they were asked when it was made."""
    return [Question(row["token_ids"], _root(row["root"]), row["text"]) for row in rows]


def _root(text: str) -> Root:
    said: dict[str, Any] = json.loads(text)
    made: Any = ROOTS[said["kind"]]
    return made(**{key: tuple(value) if isinstance(value, list) else value for key, value in said.items()})


def _planned(tracer: Tracer, item: Any, index: int, strict: bool, how: dict[str, Any]) -> _Planned:
    try:
        question = tracer.ask(item, **how)
        labels, roles = _labels(item), _roles(tracer.model, item, question)
    except HeadtraceError as error:
        if strict:
            raise InputError(f"Prompt {index}: {error}") from error
        text = item if isinstance(item, str) else item.get("text") if isinstance(item, Mapping) else None
        return _Planned(
            index,
            text=text if isinstance(text, str) else None,
            problem=f"input: {error}",
            id=_hash(plain(item) if not isinstance(item, Mapping) else dict(item)),
        )
    root = question.root
    answer, wrong = (getattr(root, name, None) for name in ("answer", "wrong"))
    return _Planned(
        index,
        text=question.text,
        token_ids=list(question.ids),
        tokens=list(tracer.model.token_labels(question.ids)),
        answer=None if answer is None else list(answer),
        wrong=None if wrong is None else list(wrong),
        root=json.dumps(plain(root)),
        labels=labels,
        roles=roles,
        id=_hash([question.ids, answer, wrong]),
    )


def _hash(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()[:16]


def _number(planned: list[_Planned]) -> None:
    """Ids that occur once: equal prompts are told apart by their order."""
    seen: Counter[str] = Counter()
    for each in planned:
        name = each.id
        each.id = f"{name}-{seen[name]}" if seen[name] else name
        seen[name] += 1


def _labels(item: Any) -> dict[str, str]:
    given = item.labels if isinstance(item, Example) else _field(item, "labels")
    return {str(name): str(value) for name, value in given.items()}


def _roles(model: Model, item: Any, question: Question) -> dict[str, int]:
    """Token positions by role: given as such, or as the [start, end) characters of a word in the text."""
    if isinstance(item, Example):
        return dict(item.roles)
    given = _field(item, "roles")
    roles = {str(name): value for name, value in given.items() if type(value) is int}
    if len(roles) < len(given):
        text = item.get("text")
        if not isinstance(text, str):
            raise InputError(
                "roles: characters of a text need 'text'; give token positions as whole numbers."
            )
        spans = spans_of("prompt", text, {name: span for name, span in given.items() if name not in roles})
        (encoded,) = encode(model.tokenizer, [text])
        placed = place_roles(model.tokenizer, encoded, spans)
        if isinstance(placed, str):
            raise InputError(f"roles: {placed}.")
        # Where a BOS token was asked for, or left out, positions are further along, or less far.
        ahead = len(question.ids) - (question.logits_needed - 1) - len(encoded.ids)
        roles |= {name: position + ahead for name, position in placed.items()}
    for name, position in roles.items():
        if not 0 <= position < len(question.ids):
            raise InputError(
                f"The role {name!r} is at {position}, and the prompt has {len(question.ids)} tokens."
            )
    return roles


def _field(item: Any, name: str) -> Mapping[Any, Any]:
    given = item.get(name) if isinstance(item, Mapping) else None
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f"{name!r} must be a mapping, like {{'order': 'ABBA'}}, got {type(given).__name__}.")
    return given


def _table(planned: list[_Planned], labels: tuple[str, ...], roles: tuple[str, ...]) -> pa.Table:
    columns: dict[str, list[Any]] = {
        LABEL + name: [each.labels.get(name) for each in planned] for name in labels
    }
    columns |= {ROLE + name: [each.roles.get(name) for each in planned] for name in roles}
    schema = plan_schema(labels, roles)
    return pa.table(
        {
            name: pa.array(columns[name] if name in columns else [getattr(e, name) for e in planned], kind)
            for name, kind in schema.items()
        }
    )
