"""From examples to shards: which prompts are traced together, settled before anything runs.

>>> import headtrace
>>> tracer = headtrace.Tracer(headtrace.load("builtin"))
>>> prompts = ["When Mary and John went to", {"text": "When Mary and", "answer": " John"}, "When Mary met Zorblax and"]
>>> plan = make_plan(tracer, prompts, shard_size=2, answer=" the")
>>> plan.table.select(["index", "problem"]).to_pylist()[0]["problem"]
"input: ...Zorblax..."
>>> [row["index"] for row in plan.table.to_pylist()], plan.info("").shards
([2, 1, 0], 2)

A prompt's id is the user's own, or a hash of its request; the second and third of the same get ``-1`` and ``-2``.
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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headtrace.errors import HeadtraceError, InputError
from headtrace.prompts import encode
from headtrace.request import ResolvedRequest, TraceRequest, check_counterfactuals, split_prompts
from headtrace.runs.manifest import PlanInfo
from headtrace.runs.tables import LABEL, ROLE, plan_schema
from headtrace.tasks.build import place_roles
from headtrace.tasks.jsonl import spans_of
from headtrace.validation import plain

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.tracing import Tracer

SHARD_SIZE = 64
"""Prompts per shard: enough for a full batch, few enough that little is lost when a run is killed."""


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
    request: str | None = None
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
    tracer: Tracer, examples: Any, *, shard_size: int = SHARD_SIZE, strict: bool = False, **options: Any
) -> Plan:
    """The plan of a run: a request for each prompt, with these options, in shards."""
    if shard_size < 1:
        raise InputError(f"shard_size={shard_size}: a shard has at least one prompt.")
    items = split_prompts(examples)
    if not items:
        raise InputError("There are no prompts to trace: give at least one.")
    planned: list[_Planned] = []
    resolved: list[ResolvedRequest] = []
    for index, item in enumerate(items):
        try:
            found = tracer.request(item, **options).resolve(tracer.model)
            planned.append(_planned(tracer, index, found))
            resolved.append(found)
        except HeadtraceError as error:  # noqa: PERF203
            if strict:
                raise InputError(f"Prompt {index}: {error}") from error
            planned.append(_failed(index, item, error))
    if all(each.problem for each in planned):
        raise InputError(f"None of the {len(planned)} prompts can be traced. The first: {planned[0].problem}")
    check_counterfactuals(resolved)
    _number(planned)
    planned.sort(key=lambda each: (len(each.token_ids or ()), each.index))
    labels = tuple(sorted({name for each in planned for name in each.labels}))
    roles = tuple(sorted({name for each in planned for name in each.roles}))
    return Plan(_table(planned, labels, roles), labels, roles, shard_size)


def requests_of(rows: Sequence[Mapping[str, Any]], tracer: Tracer) -> list[ResolvedRequest]:
    """The requests of rows of the plan, resolved as they were when it was made."""
    found: list[ResolvedRequest] = []
    for row in rows:
        request = replace(TraceRequest.from_json(json.loads(row["request"])), **tracer.settings)
        resolved = request.resolve(tracer.model)
        if resolved.ids != row["token_ids"]:
            raise InputError(
                f"The tokenizer reads prompt {row['index']} as other tokens than when the run was planned: use the "
                "tokenizer of that time, or start another run."
            )
        found.append(resolved)
    return found


def _planned(tracer: Tracer, index: int, resolved: ResolvedRequest) -> _Planned:
    root, request = resolved.root, resolved.request
    answer, wrong = (getattr(root, name, None) for name in ("answer", "wrong"))
    return _Planned(
        index,
        text=resolved.text,
        token_ids=list(resolved.ids),
        tokens=list(tracer.model.token_labels(resolved.ids)),
        answer=None if answer is None else list(answer),
        wrong=None if wrong is None else list(wrong),
        root=json.dumps(plain(root)),
        request=json.dumps(request.without_settings().to_json()),
        labels=dict(request.labels),
        roles=_roles(tracer.model, resolved),
        id=request.id or request.hash,
    )


def _failed(index: int, item: Any, error: HeadtraceError) -> _Planned:
    """A prompt that cannot be traced, with what is known of it."""
    given: Any = item if isinstance(item, Mapping) else {}
    text = item if isinstance(item, str) else given.get("text")
    name, labels = given.get("id"), given.get("labels")
    if isinstance(item, TraceRequest):
        text = item.prompt if isinstance(item.prompt, str) else item.text
        name, labels = item.id, item.labels
    digest = hashlib.sha256(repr(item).encode(errors="backslashreplace")).hexdigest()[:16]
    return _Planned(
        index,
        text=text if isinstance(text, str) else None,
        problem=f"input: {error}",
        labels={str(k): str(v) for k, v in labels.items()} if isinstance(labels, Mapping) else {},
        id=name if isinstance(name, str) and name else digest,
    )


def _number(planned: list[_Planned]) -> None:
    """Ids that occur once: equal prompts are told apart by their order."""
    seen: Counter[str] = Counter()
    for each in planned:
        name = each.id
        each.id = f"{name}-{seen[name]}" if seen[name] else name
        seen[name] += 1


def _roles(model: Model, resolved: ResolvedRequest) -> dict[str, int]:
    """Token positions by role: given as such, or as the [start, end) characters of a word in the text."""
    request = resolved.request
    roles = {str(name): value for name, value in request.roles.items() if type(value) is int}
    if len(roles) < len(request.roles):
        if not isinstance(request.prompt, str):
            raise InputError(
                "roles: characters of a text need 'text'; give token positions as whole numbers."
            )
        given = {name: list(span) for name, span in request.roles.items() if name not in roles}
        spans = spans_of("prompt", request.prompt, given)
        (encoded,) = encode(model.tokenizer, [request.prompt])
        placed = place_roles(model.tokenizer, encoded, spans)
        if isinstance(placed, str):
            raise InputError(f"roles: {placed}.")
        # Where a BOS token was asked for, or left out, positions are further along, or less far.
        ahead = len(resolved.ids) - (resolved.logits_needed - 1) - len(encoded.ids)
        roles |= {name: position + ahead for name, position in placed.items()}
    for name, position in roles.items():
        if not 0 <= position < len(resolved.ids):
            raise InputError(
                f"The role {name!r} is at {position}, and the prompt has {len(resolved.ids)} tokens."
            )
    return roles


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
