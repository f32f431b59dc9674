"""The files of a run: its manifest (``run.json``, schema ``headtrace.run/1``), shard records, and table columns.

The manifest is written once, when the run begins: versions, options, seed, the model's hash, and the plan's. The
list of prompts by content hash is the plan itself (``plan.parquet``), whose hash is here. A shard's record is
written after its tables, with their checksums: a shard whose record is there, and matches its files, is done.

>>> shard_file(7, "edges"), shard_record(7)
('shards/00007.edges.parquet', 'shards/00007.json')
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headtrace.circuits import Circuit, Edge
from headtrace.circuits.rows import column_types, edge_table, node_table, rest_columns
from headtrace.errors import InputError, shown
from headtrace.mechanism.mechanism import Mechanism, mechanism_json
from headtrace.runs.store import LEASE, LOCK, Store, checksum

SCHEMA = "headtrace.run/1"
MANIFEST, PLAN, SHARDS = "run.json", "plan.parquet", "shards"
TABLES = ("prompts", "nodes", "edges")
SIGNALS, STEPS, MECHANISMS = "signals", "steps", "mechanisms"
LABEL, ROLE = "label:", "role:"
"""How columns begin that hold a prompt's labels, and the positions of its roles."""
DONE, FAILED = "done", "failed"
Outcome = Circuit | str
"""The result of a prompt: its circuit, or why there is none."""
_PLANNED = {
    "id": pa.string(),
    "index": pa.int64(),
    "text": pa.string(),
    "token_ids": pa.list_(pa.int64()),
    "tokens": pa.list_(pa.string()),
    "answer": pa.list_(pa.int64()),
    "wrong": pa.list_(pa.int64()),
    "root": pa.string(),
    "request": pa.string(),
    "problem": pa.string(),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TracedModel(_Strict):
    """The model, as circuits name it, and the type it computes in."""

    name: str
    """The name it was loaded by."""
    revision: str | None = None
    """The revision on the hub."""
    architecture: str | None = None
    """The family of architectures, such as ``llama``."""
    weights_sha256: str
    """A hash of the weights, which tells the model from every other with other weights."""
    computation_sha256: str | None = None
    """A hash of what else computes: the computing part of the config, and buffers; earlier versions kept none."""
    dtype: str
    """The type it computes in."""


class SkippedLine(_Strict):
    """A line of a prompt file that could not be read."""

    line: int
    """Its number, from 1."""
    reason: str
    """Why."""


class PlanInfo(_Strict):
    """The prompts, by the hash of all that the plan says about them."""

    prompts: int = Field(ge=1)
    """How many prompts there are."""
    shard_size: int = Field(ge=1)
    """How many of them a shard has; the last may have fewer."""
    sha256: str
    """Of the plan's content, prompt by prompt: tells two lists of prompts apart."""
    file_sha256: str
    """Of the file, which is made again where it was damaged."""
    labels: tuple[str, ...] = ()
    """Names of the labels that prompts came with."""
    roles: tuple[str, ...] = ()
    """Names of the roles that positions have."""
    skipped: int = 0
    """How many lines of the prompt file could not be read. They count as prompts, which failed."""
    skipped_lines: tuple[SkippedLine, ...] = ()
    """These lines, or the first thousand of them."""

    @property
    def shards(self) -> int:
        """How many shards there are."""
        return -(-self.prompts // self.shard_size)


class Manifest(_Strict):
    """The settings of a run: the same call with the same settings in the same place resumes it."""

    schema_: Literal["headtrace.run/1"] = Field(default=SCHEMA, alias="schema")
    """The form of the files."""
    headtrace: str
    """The version of headtrace that began the run."""
    model: TracedModel
    """The model that is traced."""
    options: dict[str, Any]
    """How prompts are traced: paths, method and its settings, budget, signals, mechanisms."""
    seed: int | None = None
    """The seed of the task that made the prompts."""
    task: str | None = None
    """The task that made them."""
    plan: PlanInfo
    """The prompts, in short."""
    made_with: dict[str, str] = Field(default_factory=dict)
    """Versions of the libraries that computed it: for information, not compared."""

    def text(self) -> str:
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1) + "\n"

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that each shard has."""
        signals = (SIGNALS,) if self.options.get("signals") else ()
        return (*TABLES, *signals, *((STEPS, MECHANISMS) if self.options.get(MECHANISMS) else ()))


class TableFile(_Strict):
    """One file of a shard."""

    sha256: str
    """Of the file."""
    bytes: int
    """Its size."""
    rows: int
    """How many rows it has."""


class ShardRecord(_Strict):
    """The outcome of one shard, and its files."""

    shard: int
    """Its number, from 0."""
    prompts: int
    """How many prompts it has."""
    failures: dict[str, int]
    """By kind, how many of its prompts failed."""
    files: dict[str, TableFile]
    """Its files by table."""

    def text(self) -> str:
        return json.dumps(self.model_dump(mode="json")) + "\n"

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


def shard_file(shard: int, table: str) -> str:
    return f"{SHARDS}/{shard:05d}.{table}.parquet"


def shard_record(shard: int) -> str:
    return f"{SHARDS}/{shard:05d}.json"


def read_manifest(content: bytes, where: str) -> Manifest:
    """A manifest from its file; one of another version, or damaged, is an error that says so."""
    try:
        data = json.loads(content)
    except ValueError as error:
        raise InputError(f"{where}: {MANIFEST} is not JSON ({error}); it is damaged.") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise InputError(
            f"{where}: {MANIFEST} has the schema {shown(schema)}, and this version of headtrace reads {SCHEMA!r}. Use "
            "the version that made the run, or give another folder."
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise InputError(f"{where}: {MANIFEST}, field {field!r}: {first['msg']}; it is damaged.") from None


def read_record(content: bytes) -> ShardRecord | None:
    """A shard's record, or None where it is damaged."""
    try:
        return ShardRecord.model_validate_json(content)
    except ValidationError:
        return None


def record_of(store: Store, shard: int, sizes: dict[str, int]) -> ShardRecord | None:
    """A shard's record, if it and all files it names are there, and of the right sizes."""
    if shard_record(shard) not in sizes:
        return None
    record = read_record(store.read(shard_record(shard)))
    if record is None or record.shard != shard:
        return None
    there = all(sizes.get(shard_file(shard, name)) == file.bytes for name, file in record.files.items())
    return record if there else None


def is_intact(store: Store, record: ShardRecord, tables: Sequence[str]) -> bool:
    """Whether the files of these tables are those that were written, by their checksums, and hold what the record
    says: as many rows, and of the prompts as many that failed, by kind."""
    try:
        for name in tables:
            content, file = store.read(shard_file(record.shard, name)), record.files[name]
            if checksum(content) != file.sha256:
                return False
            table = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False)
            if table.metadata.num_rows != file.rows:
                return False
            if name == "prompts":
                reasons = table.read(["reason"], use_threads=False)["reason"].to_pylist()
                if (record.prompts, record.failures) != (len(reasons), count_failures(reasons)):
                    return False
    except (FileNotFoundError, KeyError, OSError, pa.ArrowException):
        return False
    return True


def count_failures(reasons: Iterable[str | None]) -> dict[str, int]:
    """By kind, how many prompts failed: the kind stands before the colon of a reason; None is no failure."""
    return dict(sorted(Counter(each.split(":")[0] for each in reasons if each is not None).items()))


def is_temporary(name: str) -> bool:
    """Whether a killed run left it: a file under a temporary name, beside its place.

    >>> is_temporary("shards/.00003.edges.8f3e21.parquet"), is_temporary("shards/00003.edges.parquet")
    (True, False)
    """
    return name.rpartition("/")[2].startswith(".")


def check_place(store: Store) -> Manifest | None:
    """The manifest of an existing run; ``InputError`` for a place that holds other things or cannot be written."""
    if store.folder is not None and store.folder.exists() and not store.folder.is_dir():
        raise InputError(f"{store.url!r} is a file; a run is a folder. Give the name of a new one.")
    sizes = store.sizes()
    store.check_writable()
    if MANIFEST in sizes:
        return read_manifest(store.read(MANIFEST), store.url)
    others = sorted(name for name in sizes if name not in (LOCK, LEASE, PLAN) and not is_temporary(name))
    if others:
        raise InputError(
            f"{store.url!r} holds other files ({', '.join(others[:3])}{' ...' if others[3:] else ''}) and is not a "
            f"run: it has no {MANIFEST}. Give a folder that is empty, or new."
        )
    return None


_NOT_COMPARED = ("made_with", "plan.file_sha256", "plan.skipped", "task")


_UNKNOWN_BEFORE = ("model.computation_sha256",)
"""Fields that runs of earlier versions do not have: compared where both have them."""


_EXPLAINED = {
    "model.computation_sha256": " (the same weights with another config: rotary base, activation, epsilon ...)",
    "options.thresholds": " (what the function given as tau returns for 1, 2, ... visible keys; runs before 0.3 did "
    "not keep it, and cannot be resumed with a function)",
}
"""What a difference means, where its name does not say it."""


def differences(kept: Manifest, now: Manifest) -> list[str]:
    """Where the settings of a run differ from those of an existing one, field by field."""

    def flat(value: Any, name: str = "") -> dict[str, Any]:
        """Nested mappings as one, by dotted names."""
        if not isinstance(value, dict):
            return {name: value}
        items = [flat(item, f"{name}.{key}" if name else key) for key, item in value.items()]
        return {key: item for each in items for key, item in each.items()}

    before, after = flat(kept.model_dump(mode="json")), flat(now.model_dump(mode="json"))
    unknown = tuple(name for name in _UNKNOWN_BEFORE if before.get(name) is None)
    return [
        f"{name}: {shown(before.get(name))} there, {shown(after.get(name))} now{_EXPLAINED.get(name, '')}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name) and not name.startswith((*_NOT_COMPARED, *unknown))
    ]


# -- tables besides nodes and edges ---------------------------------------------------------------------------------


def plan_schema(labels: Sequence[str], roles: Sequence[str]) -> dict[str, pa.DataType]:
    """The columns of a plan whose prompts have these labels and roles."""
    own = {LABEL + name: pa.string() for name in labels} | {ROLE + name: pa.int64() for name in roles}
    return {**_PLANNED, **own}


def reason_of(outcome: Outcome) -> str | None:
    """Why a prompt failed; None for a circuit that explains something."""
    if isinstance(outcome, str):
        return outcome
    return None if outcome.reason is None else f"no circuit: {outcome.reason}"


def prompt_table(plan: pa.Table, shard: int, outcomes: Sequence[Outcome]) -> pa.Table:
    """A shard's prompts: their columns of the plan, their outcomes, and what circuits have besides their graphs."""
    circuits = [found if isinstance(found, Circuit) else None for found in outcomes]
    reasons = [reason_of(found) for found in outcomes]
    status = [DONE if reason is None else FAILED for reason in reasons]
    own = [name for name in plan.column_names if name.startswith((LABEL, ROLE))]
    columns: dict[str, Any] = {name: plan[name] for name in ("id", "index")}
    columns["shard"] = pa.array([shard] * len(outcomes), pa.int64())
    columns |= {name: plan[name] for name in ("text", "token_ids", "tokens", "answer", "wrong")}
    columns["status"] = pa.array(status, pa.string())
    columns["reason"] = pa.array(reasons, pa.string())
    columns["root_value"] = pa.array([c.root.value if c else None for c in circuits], pa.float64())
    columns["n_nodes"] = pa.array([len(c.nodes) if c else None for c in circuits], pa.int64())
    columns["n_edges"] = pa.array([len(c.edges) if c else None for c in circuits], pa.int64())
    columns |= {name: plan[name] for name in own}
    columns |= {name: pa.array(texts, pa.string()) for name, texts in rest_columns(circuits).items()}
    return pa.table(columns)


def signal_table(keys: Sequence[tuple[str, Edge]], vectors: Sequence[Any]) -> pa.Table:
    """Signals, each a vector of d_model numbers, by prompt, source, target and side."""
    columns = {"prompt": pa.array([name for name, _ in keys], pa.string())}
    for field in ("source", "target", "side"):
        columns[field] = pa.array([getattr(edge, field) for _, edge in keys], column_types(Edge)[field])
    return pa.table({**columns, "signal": pa.array(vectors, pa.list_(pa.float32()))})


_STEP = {
    "prompt": pa.string(),
    "step": pa.int64(),
    "stage": pa.int64(),
    "rule": pa.string(),
    "text": pa.string(),
    "heads": pa.list_(pa.string()),
    "dest": pa.int64(),
    "src": pa.int64(),
    "flow": pa.float64(),
    "root": pa.float64(),
    "share": pa.float64(),
    "before": pa.float64(),
    "without": pa.float64(),
    "random": pa.float64(),
}


def step_table(named: Sequence[tuple[str, Mechanism]]) -> pa.Table:
    """Steps of mechanisms, one row each: what names it, its heads and places, its flow, and what was measured."""
    rows = [
        {
            "prompt": name,
            "rule": row["role"],
            "share": row["flow"] / found.whole if found.whole else None,
            **{column: row[column] for column in _STEP if column in row},
        }
        for name, found in named
        for row in found.step_rows()
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema(_STEP))


def mechanism_table(named: Sequence[tuple[str, Mechanism]]) -> pa.Table:
    """Mechanisms, one row each: what a mechanism file says besides the circuit, as JSON."""
    texts = []
    for _, found in named:
        data = mechanism_json(found)
        texts.append(json.dumps({name: value for name, value in data.items() if name != "circuit"}))
    return pa.table(
        {
            "prompt": pa.array([name for name, _ in named], pa.string()),
            "mechanism": pa.array(texts, pa.string()),
        }
    )


def empty_table(table: str, labels: Sequence[str], roles: Sequence[str]) -> pa.Table:
    """A table of a shard without rows."""
    if table == "prompts":
        plan = {name: pa.array([], kind) for name, kind in plan_schema(labels, roles).items()}
        return prompt_table(pa.table(plan), 0, [])
    made = {
        "nodes": lambda: node_table([]),
        "edges": lambda: edge_table([]),
        SIGNALS: lambda: signal_table([], []),
        STEPS: lambda: step_table([]),
        MECHANISMS: lambda: mechanism_table([]),
    }
    return made[table]()
