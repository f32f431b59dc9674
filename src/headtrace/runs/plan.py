"""The plan of a run: all prompts with their requests, in shards, fixed before anything is traced.

>>> import headtrace
>>> tracer = headtrace.Tracer(headtrace.load("builtin"))
>>> prompts = ["When Mary and John went to", {"text": "When Mary and", "answer": " John"}, "When Mary met Zorblax and"]
>>> plan = make_plan(tracer, prompts, shard_size=2, answer=" the")
>>> plan.table.select(["index", "problem"]).to_pylist()[0]["problem"]
"input: ...Zorblax..."
>>> [row["index"] for row in plan.table.to_pylist()], plan.info("").shards
([2, 1, 0], 2)

A prompt's id is the user's own, or a hash of its request; repeated ids get the suffixes ``-1``, ``-2`` and so on.
Prompts are sorted by length, so that those of a shard need little padding; a shard is a row group of the plan's file.
Which prompts go through the model together follows from the plan alone, so a run that was interrupted and resumed has
the same result as an uninterrupted one. A prompt that cannot be traced is in the plan with its problem.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from headtrace.errors import HeadtraceError, InputError
from headtrace.lines import Lines, Skipped
from headtrace.prompts import encode
from headtrace.request import Paths, ResolvedRequest, TraceRequest, split_prompts
from headtrace.runs.manifest import LABEL, ROLE, PlanInfo, SkippedLine, plan_schema
from headtrace.tasks.build import place_roles, spans_of
from headtrace.validation import plain

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.tracing import Tracer

MOST_SKIPPED, LONGEST_REASON = 1000, 200
"""Skipped lines that the manifest lists, and characters of a reason there; the table of prompts has all of them."""
SHARD_SIZE = 64
"""Prompts per shard: enough for a full batch, few enough that little is lost when a run is killed."""


@dataclass(frozen=True)
class Plan:
    """All prompts of a run, in the order in which they are traced."""

    table: pa.Table
    labels: tuple[str, ...]
    roles: tuple[str, ...]
    shard_size: int
    skipped: tuple[SkippedLine, ...] = ()
    """Lines of a prompt file that could not be read; each is a prompt that failed."""

    def info(self, file_sha256: str) -> PlanInfo:
        """What the manifest says about the plan, whose file has this checksum."""
        digest = hashlib.sha256()
        for batch in self.table.to_batches(max_chunksize=256):  # few rows at a time are Python objects
            for row in batch.to_pylist():
                digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
        return PlanInfo(
            prompts=self.table.num_rows,
            shard_size=self.shard_size,
            sha256=digest.hexdigest(),
            file_sha256=file_sha256,
            labels=self.labels,
            roles=self.roles,
            skipped=len(self.skipped),
            skipped_lines=self.skipped[:MOST_SKIPPED],
        )

    @property
    def longest(self) -> int:
        """How many tokens can be visible in the longest prompt: its own, and those of its answer."""
        columns = (self.table[name].to_pylist() for name in ("token_ids", "answer"))
        return max(len(ids or ()) + len(answer or ()) for ids, answer in zip(*columns, strict=True)) or 1

    def continues(self, earlier: pa.Table) -> bool:
        """Whether a plan made before plans had requests, with ids of another kind, is of the same prompts."""
        names = [name for name in self.table.column_names if name not in ("id", "request", "problem")]
        if "request" in earlier.column_names or not set(names) <= set(earlier.column_names):
            return False
        return earlier.select(names).equals(self.table.select(names))


def make_plan(
    tracer: Tracer, examples: Any, *, shard_size: int = SHARD_SIZE, strict: bool = False, **options: Any
) -> Plan:
    """Make a request of each prompt, with these options, and sort them into shards."""
    if shard_size < 1:
        raise InputError(f"shard_size={shard_size}: a shard has at least one prompt.")
    if isinstance(examples, Lines):  # skipped lines have their places, too
        given = cast("Lines[Any]", examples)
        numbered = [*given, *((each.line, each) for each in given.skipped)]
        items = [found for _, found in sorted(numbered, key=lambda pair: pair[0])]
    else:
        items = split_prompts(examples)
    if not items:
        raise InputError("There are no prompts to trace: give at least one.")
    rows: list[dict[str, Any]] = []
    resolved: list[ResolvedRequest] = []
    skipped: list[SkippedLine] = []
    for index, item in enumerate(items):
        try:
            if isinstance(item, Skipped):
                skipped.append(SkippedLine(line=item.line, reason=item.reason[:LONGEST_REASON]))
                raise InputError(str(item))
            found = tracer.request(item, **options).resolve(tracer.model)
            row = _row(tracer.model, found)
            resolved.append(found)
        except HeadtraceError as error:
            if strict:
                raise InputError(f"Prompt {index}: {error}") from error
            row = _failed_row(item, error)
        rows.append(row | {"index": index})
    if not resolved:
        raise InputError(f"None of the {len(rows)} prompts can be traced. The first: {rows[0]['problem']}")

    seen: Counter[str] = Counter()
    for row in rows:
        name = row["id"]
        row["id"] = f"{name}-{seen[name]}" if seen[name] else name
        seen[name] += 1
    rows.sort(key=lambda row: (len(row.get("token_ids", ())), row["index"]))
    labels, roles = (
        tuple(sorted({name.removeprefix(kind) for row in rows for name in row if name.startswith(kind)}))
        for kind in (LABEL, ROLE)
    )
    table = pa.Table.from_pylist(rows, schema=pa.schema(plan_schema(labels, roles)))
    return Plan(table, labels, roles, shard_size, tuple(skipped))


def requests_of(
    rows: Sequence[Mapping[str, Any]], tracer: Tracer, paths: Paths = "attention"
) -> list[ResolvedRequest]:
    """The requests of rows of a plan, resolved as they were when it was made.

    Plans of early versions have no column of requests. There the request is made of the row's tokens, root and text,
    and ``paths`` are those of the whole run.
    """
    found: list[ResolvedRequest] = []
    for row in rows:
        if row.get("request") is not None:
            request = TraceRequest.from_json(json.loads(row["request"]))
        else:
            data = {"tokens": row["token_ids"], "text": row["text"], "root": json.loads(row["root"])}
            request = TraceRequest.from_json(data, paths=paths)
            # The tokens of a row end with those of a continuation, which resolving the request appends.
            root: Any = request.root
            length = len(row["token_ids"]) - len(root.answer_prefix)
            request = replace(request, prompt=tuple(row["token_ids"][:length]))
        resolved = replace(request, **tracer.settings).resolve(tracer.model)
        if resolved.ids != row["token_ids"]:
            raise InputError(
                f"The tokenizer splits prompt {row['index']} into other tokens than when the run was planned: use the "
                "tokenizer of that time, or start another run."
            )
        found.append(resolved)
    return found


def _row(model: Model, resolved: ResolvedRequest) -> dict[str, Any]:
    """The row of a prompt that can be traced."""
    root, request = resolved.root, resolved.request
    answers = {name: getattr(root, name, None) for name in ("answer", "wrong")}
    return {
        "id": request.id or request.hash,
        "text": resolved.text,
        "token_ids": resolved.ids,
        "tokens": model.token_labels(resolved.ids),
        **answers,
        "root": json.dumps(plain(root)),
        "request": json.dumps(request.without_settings().to_json()),
        **{LABEL + name: value for name, value in request.labels.items()},
        **{ROLE + name: position for name, position in _roles(model, resolved).items()},
    }


def _failed_row(item: Any, error: HeadtraceError) -> dict[str, Any]:
    """The row of a prompt that cannot be traced: what is known of it, and its problem."""
    given: Any = item if isinstance(item, Mapping) else {}
    text = item if isinstance(item, str) else given.get("text")
    name, labels = given.get("id"), given.get("labels")
    if isinstance(item, TraceRequest):
        text = item.prompt if isinstance(item.prompt, str) else item.text
        name, labels = item.id, item.labels
    digest = hashlib.sha256(repr(item).encode(errors="backslashreplace")).hexdigest()[:16]
    return {
        "id": name if isinstance(name, str) and name else digest,
        "text": text if isinstance(text, str) else None,
        "problem": f"input: {error}",
        **{f"{LABEL}{k}": str(v) for k, v in (labels.items() if isinstance(labels, Mapping) else ())},
    }


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
        # With bos=True or bos=False, positions may be one further or one less than in the encoded text.
        shift = len(resolved.ids) - (resolved.logits_needed - 1) - len(encoded.ids)
        roles |= {name: position + shift for name, position in placed.items()}
    for name, position in roles.items():
        if not 0 <= position < len(resolved.ids):
            raise InputError(
                f"The role {name!r} is at {position}, and the prompt has {len(resolved.ids)} tokens."
            )
    return roles
