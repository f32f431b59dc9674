"""A run, read back: lazy Polars frames of prompts, nodes and edges, and the circuits themselves.

>>> import headtrace, tempfile, polars as pl
>>> texts = ["When Mary and John went to", "When Tom and Anna went to the"]
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = headtrace.run("builtin", texts, out=folder, top_k=1)
...     run = open_run(folder)
...     run
...     run.prompts.select("index", "status").collect().rows()
...     [circuit.prompt.text for circuit in run.circuits(pl.col("n_edges") > 0)]
Run('...', 'builtin', 2 of 2 prompts)
[(0, 'done'), (1, 'done')]
['When Mary and John went to', 'When Tom and Anna went to the']

Only shards that are done, and whole by their checksums, are read. Nothing here loads a model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import polars as pl

from headtrace.circuits import Circuit
from headtrace.circuits.files import to_json
from headtrace.circuits.rows import REST, circuit_of
from headtrace.errors import InputError
from headtrace.mechanism.mechanism import Mechanism, mechanism_from_json
from headtrace.runs.manifest import (
    DONE,
    FAILED,
    MANIFEST,
    MECHANISMS,
    SIGNALS,
    STEPS,
    TABLES,
    Manifest,
    ShardRecord,
    empty_table,
    is_intact,
    read_manifest,
    record_of,
    shard_file,
)
from headtrace.runs.store import Place, Store, open_store
from headtrace.tables import html_table, human

Filter = pl.Expr | Sequence[str] | None
"""Which prompts: an expression on ``Run.prompts``, a list of ids, or all that have a circuit."""
_KEY = ("id", "index", "shard", "status", "reason")


def open_run(place: Place) -> Run:
    """The run in a folder, or at a URL that it was written to."""
    store = open_store(place)
    try:
        return Run(store, read_manifest(store.read(MANIFEST), store.url))
    except FileNotFoundError:
        raise InputError(
            f"{store.url!r} is not a run: it holds no {MANIFEST}. `headtrace run ... --out {store.url}` makes one."
        ) from None


@dataclass(frozen=True)
class RunStatus:
    """The progress of a run, and what failed."""

    prompts: int
    """In the plan."""
    done: int
    failed: int
    shards: int
    shards_done: int
    damaged: tuple[int, ...]
    """Shards whose files changed after they were written: the same command traces them again."""
    failures: dict[str, int] = field(default_factory=dict[str, int])
    """By kind of failure: how many."""
    examples: dict[str, str] = field(default_factory=dict[str, str])
    """By kind of failure: the first reason, in full, after the id of its prompt."""
    bytes: dict[str, int] = field(default_factory=dict[str, int])
    """By table: the size of its files."""
    rows: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def left(self) -> int:
        """Prompts that were not traced yet."""
        return self.prompts - self.done - self.failed

    @property
    def complete(self) -> bool:
        """Whether nothing is left to trace."""
        return self.left == 0


class Run:
    """The circuits of many prompts. Made by ``headtrace.run``, opened again by ``headtrace.open_run``.

    A `Run` sees the shards that were done when it was made: open it again to see more.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store, self.manifest = store, manifest
        self._intact_shards: dict[str, set[int]] = {}

    @property
    def path(self) -> str:
        """Where the run is kept: a folder or a URL."""
        return self.store.url

    def __len__(self) -> int:
        """How many prompts the run has, traced or not."""
        return self.manifest.plan.prompts

    def __repr__(self) -> str:
        there = sum(record.prompts for record in self._records.values())
        return f"Run({self.path!r}, {self.manifest.model.name!r}, {there} of {len(self)} prompts)"

    def _repr_html_(self) -> str:
        status = self.status()
        rows = [("done", str(status.done)), ("failed", str(status.failed)), ("left", str(status.left))]
        rows += [(f"failed: {kind}", str(count)) for kind, count in status.failures.items()]
        rows += [(f"{name} on disk", human(size)) for name, size in status.bytes.items()]
        return html_table(("prompts", "number"), rows, title=repr(self))

    # -- frames --------------------------------------------------------------------------------------------------

    @property
    def prompts(self) -> pl.LazyFrame:
        """A row per prompt: id, tokens, answers, status, reason, labels (``label:NAME``) and roles (``role:NAME``)."""
        frame = self._frame("prompts")
        return frame.select(pl.all().exclude(f"^{REST}.*$"))

    def frame(self, of: str = "prompts") -> pl.DataFrame:
        """A row per prompt; or, with ``of``, per node, edge or signal (``"nodes"``, ``"edges"``, ``"signals"``)."""
        if of not in (*TABLES, SIGNALS):
            raise InputError(f"frame({of!r}): a run has {', '.join((*TABLES, SIGNALS))}.")
        return getattr(self, of).collect()

    @property
    def nodes(self) -> pl.LazyFrame:
        """A row per node: ``prompt`` and the fields of `headtrace.circuits.Node`; nested ones are JSON text."""
        return self._frame("nodes")

    @property
    def edges(self) -> pl.LazyFrame:
        """A row per edge: ``prompt``, the fields of `headtrace.circuits.Edge`, and where its ends are."""
        return self._frame("edges")

    @property
    def signals(self) -> pl.LazyFrame:
        """A row per query or key edge: ``prompt``, ``source``, ``target``, ``side``, and ``signal``, a vector."""
        if SIGNALS not in self.manifest.tables:
            raise InputError(
                f"{self.path} was made without signals. Make a run with signals=True (--signals) in another folder."
            )
        return self._frame(SIGNALS)

    @property
    def steps(self) -> pl.LazyFrame:
        """A row per step of a mechanism: ``prompt``, ``step``, ``rule``, ``text``, ``heads``, ``dest`` and ``src``,
        ``flow`` and its ``share`` of the whole difference, ``root``, and what was measured: the number ``before``,
        ``without`` the step and without ``random`` components."""
        self._require_mechanisms()
        return self._frame(STEPS)

    def mechanism(self, which: str | int) -> Mechanism:
        """The mechanism of a prompt, given by id or number as in ``circuit``."""
        self._require_mechanisms()
        row = self.find(which)
        found = self._frame(MECHANISMS).filter(pl.col("prompt") == row["id"]).collect()
        if not found.height:
            raise InputError(
                f"There is no mechanism of prompt {row['id']} (number {row['index']}): {row['reason']}"
            )
        said = json.loads(found["mechanism"][0])
        return mechanism_from_json({**said, "circuit": to_json(self.circuit(row["id"]))})

    def _require_mechanisms(self) -> None:
        if STEPS not in self.manifest.tables:
            raise InputError(
                f"{self.path} was made without mechanisms. Make a run with mechanisms=True (--mechanisms) in another "
                "folder."
            )

    def _frame(self, table: str) -> pl.LazyFrame:
        paths = [self.store.path(shard_file(shard, table)) for shard in sorted(self._intact(table))]
        if not paths:  # no rows yet, but the columns that there will be
            plan = self.manifest.plan
            return pl.LazyFrame(pl.from_arrow(empty_table(table, plan.labels, plan.roles)))
        if self.store.folder is not None:
            return pl.scan_parquet(paths, glob=False)
        from pyarrow import dataset

        return pl.scan_pyarrow_dataset(
            dataset.dataset(paths, format="parquet", filesystem=self.store.filesystem)
        )

    # -- circuits ------------------------------------------------------------------------------------------------

    def circuit(self, which: str | int) -> Circuit:
        """The circuit of a prompt: by id, by the beginning of an id that no other has, or by number, its ``index``."""
        row = self.find(which)
        (found,) = self._circuits(row["shard"], [row["id"]]) or [None]
        if found is None:
            raise InputError(
                f"There is no circuit of prompt {row['id']} (number {row['index']}): {row['reason']}"
            )
        return found[1]

    def circuits(self, filter: Filter = None) -> Iterator[Circuit]:
        """The circuits of the chosen prompts, with one shard in memory at a time.

        ``filter`` is a Polars expression on ``prompts`` or a list of ids; by default all prompts that are done.
        """
        return (circuit for _, circuit in self.items(filter))

    def items(self, filter: Filter = None) -> Iterator[tuple[str, Circuit]]:
        """As ``circuits``, each with the id of its prompt."""
        if filter is None:
            filter = pl.col("status") == DONE
        elif not isinstance(filter, pl.Expr):
            unknown = sorted(set(filter) - set(self._keys["id"]))
            if unknown:
                raise self._unknown(unknown[0])
            filter = pl.col("id").is_in(list(filter))
        chosen = self.prompts.filter(filter).select("id", "shard").collect()
        for (shard,), group in chosen.group_by("shard", maintain_order=True):
            yield from self._circuits(int(shard), group["id"].to_list())

    def find(self, which: str | int) -> dict[str, Any]:
        """The id, index, shard, status and reason of a prompt, by its id, its index, or the beginning of its id."""
        text = str(which)
        number = pl.col("index") == int(text) if text.isdecimal() else pl.col("id").str.starts_with(text)
        for condition in (pl.col("id") == text, number):
            found = self._keys.filter(condition).head(2).to_dicts() if text else []
            if len(found) == 1:
                return found[0]
            if found:
                raise InputError(
                    f"{text!r} is the beginning of several ids in {self.path}: write more of it."
                )
        raise self._unknown(text)

    @cached_property
    def _keys(self) -> pl.DataFrame:
        return self.prompts.select(_KEY).collect()

    def _unknown(self, text: str) -> InputError:
        return InputError(
            f"{self.path} has no prompt {text!r} among the {self._keys.height} that are there (of {len(self)}). Give "
            "an id, the beginning of one, or a number from 0; `headtrace runs` says how far the run is."
        )

    def _circuits(self, shard: int, ids: Sequence[str]) -> list[tuple[str, Circuit]]:
        """The circuits of prompts of one shard, in the shard's order; those that have none are left out."""
        rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for table in TABLES:
            if shard not in self._intact(table):
                raise InputError(
                    f"{self.path}: shard {shard} is damaged: start the run again, and it is traced again."
                )
            key = "id" if table == "prompts" else "prompt"
            found = self.store.open(shard_file(shard, table)).read(use_threads=False)
            chosen = pl.LazyFrame(pl.from_arrow(found)).filter(pl.col(key).is_in(ids)).collect()
            by_prompt = rows[table] = {name: [] for name in chosen[key]}
            for row in chosen.iter_rows(named=True):
                by_prompt[row[key]].append(row)
        return [
            (name, circuit_of(row, rows["nodes"].get(name, []), rows["edges"].get(name, [])))
            for name, (row,) in rows["prompts"].items()
            if row[f"{REST}root"] is not None
        ]

    # -- status --------------------------------------------------------------------------------------------------

    def status(self) -> RunStatus:
        """How many prompts are done, what failed and why, and the size on disk; every file is read."""
        whole = [
            record
            for shard, record in self._records.items()
            if all(shard in self._intact(table) for table in self.manifest.tables)
        ]
        failures = Counter[str]()
        bytes_, rows = Counter[str](), Counter[str]()
        for record in whole:
            failures.update(record.failures)
            for name, file in record.files.items():
                bytes_[name] += file.bytes
                rows[name] += file.rows
        kind = pl.col("reason").str.split(":").list.first().alias("kind")
        failed = self.prompts.filter(pl.col("status") == FAILED).sort("index")
        first = failed.group_by(kind, maintain_order=True).first().select("kind", "id", "reason")
        damaged = sorted(self._written - {record.shard for record in whole})
        prompts = sum(record.prompts for record in whole)
        return RunStatus(
            prompts=len(self),
            done=prompts - failures.total(),
            failed=failures.total(),
            shards=self.manifest.plan.shards,
            shards_done=len(whole),
            damaged=tuple(damaged),
            failures=dict(failures.most_common()),
            examples={kind: f"{id}: {why}" for kind, id, why in first.collect().rows()} if failures else {},
            bytes=dict(bytes_),
            rows=dict(rows),
        )

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return self.store.sizes()

    @cached_property
    def _written(self) -> set[int]:
        """Shards that have a record, valid or not."""
        names = (
            name.removeprefix("shards/").removesuffix(".json")
            for name in self._sizes
            if name.endswith(".json")
        )
        return {int(name) for name in names if name.isdecimal()}

    @cached_property
    def _records(self) -> dict[int, ShardRecord]:
        found = ((shard, record_of(self.store, shard, self._sizes)) for shard in sorted(self._written))
        return {shard: record for shard, record in found if record is not None}

    def _intact(self, table: str) -> set[int]:
        """The shards whose file of a table is the one that was written. Object stores check that themselves."""
        if table not in self._intact_shards:
            trusted = self.store.folder is None
            self._intact_shards[table] = {
                shard
                for shard, record in self._records.items()
                if table in record.files and (trusted or is_intact(self.store, record, [table]))
            }
        return self._intact_shards[table]


def named_circuits_of_run(place: Place, which: str | None) -> list[tuple[str, Circuit]]:
    """The circuits of a run as sources of circuits name them: ``runs/ioi#3f2a...``; all of them, or one."""
    run = open_run(place)
    if which is not None:
        return [(f"{place}#{which}", run.circuit(which))]
    return [(f"{place}#{name}", circuit) for name, circuit in run.items()]
