"""What a run's files say: the manifest (``run.json``, schema ``headtrace.run/1``) and the record of each shard.

The manifest is written once, when the run begins: versions, options, seed, the model's hash, and the plan's. The
list of prompts by content hash is the plan itself (``plan.parquet``), whose hash is here. A shard's record is
written after its tables, with their checksums: a shard whose record is there, and true, is done.

>>> shard_file(7, "edges"), shard_record(7)
('shards/00007.edges.parquet', 'shards/00007.json')
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headtrace.errors import InputError, shown

SCHEMA = "headtrace.run/1"
MANIFEST, PLAN, SHARDS = "run.json", "plan.parquet", "shards"
TABLES = ("prompts", "nodes", "edges")
SIGNALS = "signals"


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
    """A hash of the weights, which tells the model from every other."""
    dtype: str
    """The type it computes in."""


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

    @property
    def shards(self) -> int:
        return -(-self.prompts // self.shard_size)

    def size_of(self, shard: int) -> int:
        """How many prompts a shard has."""
        return min(self.shard_size, self.prompts - shard * self.shard_size)


class Manifest(_Strict):
    """What was asked for: whoever asks for the same in the same place goes on with it."""

    schema_: Literal["headtrace.run/1"] = Field(default=SCHEMA, alias="schema")
    """The form of the files."""
    headtrace: str
    """The version of headtrace that began the run."""
    model: TracedModel
    """The model that is traced."""
    options: dict[str, Any]
    """How prompts are traced: paths, method and its settings, budget, signals."""
    seed: int | None = None
    """The seed of the task that made the prompts."""
    task: str | None = None
    """The task that made them."""
    plan: PlanInfo
    """The prompts, in short."""
    made_with: dict[str, str] = Field(default_factory=dict)
    """Versions of the libraries that computed it: told, not compared."""

    def text(self) -> str:
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1) + "\n"

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that each shard has."""
        return (*TABLES, SIGNALS) if self.options.get("signals") else TABLES


class TableFile(_Strict):
    """One file of a shard."""

    sha256: str
    """Of the file."""
    bytes: int
    """Its size."""
    rows: int
    """How many rows it has."""


class ShardRecord(_Strict):
    """What one shard holds."""

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
    """A shard's record, or none where it is damaged."""
    try:
        return ShardRecord.model_validate_json(content)
    except ValidationError:
        return None


_NOT_COMPARED = ("made_with", "plan.file_sha256", "task")


def differences(kept: Manifest, now: Manifest) -> list[str]:
    """What is asked for now and was not then, field by field."""
    before, after = _flat(kept.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    return [
        f"{name}: {shown(before.get(name))} there, {shown(after.get(name))} now"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name) and not name.startswith(_NOT_COMPARED)
    ]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested mappings as one, by dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{name}.{key}" if name else key)
    return flat
