"""One shard, from its prompts to its files: the unit of work of every engine.

Prompts of a shard go through the model in the same batches whenever and wherever it is traced. The prompts of a batch
that fails are traced one by one; a prompt that fails alone is a row with its reason, and the others are not affected.
The tables are written before the shard's record, so a half-written shard is not mistaken for a complete one; writing it
again writes the same files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float

from headtrace.circuits import Circuit, Edge
from headtrace.circuits.rows import edge_table, node_table
from headtrace.errors import HeadtraceError, IdentityError, InputError
from headtrace.mechanism.mechanism import Mechanism
from headtrace.progress import Progress, scaled
from headtrace.request import ResolvedRequest, batch_requests
from headtrace.runs.engines import ModelPlace, Shard, ShardJob
from headtrace.runs.manifest import (
    MANIFEST,
    MECHANISMS,
    PLAN,
    SIGNALS,
    STEPS,
    Manifest,
    Outcome,
    ShardRecord,
    TableFile,
    count_failures,
    is_intact,
    mechanism_table,
    prompt_table,
    read_manifest,
    read_record,
    reason_of,
    shard_file,
    shard_record,
    signal_table,
    step_table,
)
from headtrace.runs.plan import requests_of
from headtrace.runs.store import Store, open_store
from headtrace.vocabulary import ATTENTION_SIDES

if TYPE_CHECKING:
    from torch import Tensor

    from headtrace.models import Model
    from headtrace.tracing import Tracer


class ShardWork:
    """Traces the shards of one run with one model."""

    def __init__(self, store: Store, manifest: Manifest, tracer: Tracer) -> None:
        self.store, self.manifest, self.tracer = store, manifest, tracer

    @cached_property
    def _plan(self) -> pq.ParquetFile:
        return self.store.open(PLAN)

    def trace(self, shard: int, progress: Progress | None = None) -> ShardRecord:
        """Trace a shard and write it; ``progress`` is called with the number of its prompts that are done."""
        plan = self._plan.read_row_group(shard, use_threads=False)
        rows = plan.to_pylist()
        found = self._outcomes(rows, progress)
        told = [
            (row["id"], each) for row, each in zip(rows, found, strict=True) if isinstance(each, Mechanism)
        ]
        outcomes = [each.circuit if isinstance(each, Mechanism) else each for each in found]
        named = [
            (row["id"], found)
            for row, found in zip(rows, outcomes, strict=True)
            if isinstance(found, Circuit)
        ]
        tables = {
            "prompts": prompt_table(plan, shard, outcomes),
            "nodes": node_table(named),
            "edges": edge_table(named),
        }
        if SIGNALS in self.manifest.tables:
            signals = [
                (name, edge, vector.float().cpu().numpy())
                for name, circuit in named
                for edge, vector in signals_of(self.tracer.model, circuit)
            ]
            keys = [(name, edge) for name, edge, _ in signals]
            tables[SIGNALS] = signal_table(keys, [vector for *_, vector in signals])
        if STEPS in self.manifest.tables:
            tables |= {STEPS: step_table(told), MECHANISMS: mechanism_table(told)}
        return self._write(shard, tables, outcomes)

    def known(self, shard: int) -> ShardRecord | None:
        """The record of a shard that another worker wrote before it was lost."""
        try:
            record = read_record(self.store.read(shard_record(shard)))
        except FileNotFoundError:
            return None
        intact = record is not None and is_intact(self.store, record, self.manifest.tables)
        return record if intact else None

    def _write(self, shard: int, tables: dict[str, pa.Table], outcomes: Sequence[Outcome]) -> ShardRecord:
        files: dict[str, TableFile] = {}
        for name, table in tables.items():
            digest, size = self.store.write_table(shard_file(shard, name), table)
            files[name] = TableFile(sha256=digest, bytes=size, rows=table.num_rows)
        failures = count_failures(map(reason_of, outcomes))
        record = ShardRecord(shard=shard, prompts=len(outcomes), failures=failures, files=files)
        self.store.write(shard_record(shard), record.text().encode())
        return record

    def _outcomes(
        self, rows: Sequence[dict[str, Any]], progress: Progress | None
    ) -> list[Outcome | Mechanism]:
        """The circuit or mechanism of each prompt of the plan, or why there is none."""
        outcomes: list[Outcome | Mechanism] = [row["problem"] or "" for row in rows]
        places = [place for place, row in enumerate(rows) if row["problem"] is None]
        paths = self.manifest.options.get("paths", "attention")
        requests = requests_of([rows[place] for place in places], self.tracer, paths)
        done = len(rows) - len(places)
        for batch in batch_requests(requests):
            found = self._trace([requests[i] for i in batch], scaled(progress, done, len(batch), len(rows)))
            for i, outcome in zip(batch, found, strict=True):
                outcomes[places[i]] = outcome
            done += len(batch)
            if progress is not None:
                progress(done, len(rows))
        return outcomes

    def _trace(self, batch: list[ResolvedRequest], progress: Progress | None) -> list[Outcome | Mechanism]:
        """The circuits of a batch, or their mechanisms; if it fails, its prompts are traced one by one."""
        try:
            if STEPS in self.manifest.tables:
                return [*self._mechanisms(batch, progress)]
            return [*self.tracer.trace_resolved(batch, progress)]
        except Exception as error:
            if len(batch) == 1:
                return [_reason(error)]
        return [outcome for request in batch for outcome in self._trace([request], None)]

    def _mechanisms(self, batch: list[ResolvedRequest], progress: Progress | None) -> Iterator[Mechanism]:
        """Mechanisms: of differences measured in the model, of one run as the circuits themselves tell them."""
        from headtrace.mechanism import tell

        if batch[0].request.paths != "difference":  # a batch follows the same paths
            yield from (circuit.mechanism() for circuit in self.tracer.trace_resolved(batch, progress))
            return
        for place, request in enumerate(batch):
            compared = self.tracer.compare(request, scaled(progress, place, 1, len(batch)))
            yield tell(self.tracer, compared)


def signals_of(model: Model, circuit: Circuit) -> Iterator[tuple[Edge, Float[Tensor, " d_model"]]]:
    """Each query and key edge of a circuit with its signal as a vector, from one forward pass of the prompt.

    A signal is the minimal-norm residual vector that carries the edge's channel coefficients and none in the other
    channels (`headtrace.causal.signals`): on the query side at the firing's destination, on the key side at its source.

    >>> import headtrace
    >>> model = headtrace.load("builtin")
    >>> circuit = headtrace.Tracer(model).trace("When Mary and John went to", answer=" the")
    >>> edge, vector = next(signals_of(model, circuit))
    >>> edge.side in ("query", "key"), vector.shape[0] == model.d_model
    (True, True)
    """
    from headtrace.causal.signals import signal_vectors

    if not any(edge.side in ATTENTION_SIDES for edge in circuit.edges):
        return
    recording = model.record([list(circuit.prompt.token_ids)], last_logits=1)
    for edge, _, vector in signal_vectors(recording, circuit):
        yield edge, vector


def trace_job(store: Store, model: Model, tracer: dict[str, Any]) -> ShardJob:
    """The shards of a run as a job: ``tracer`` has the options of its tracer."""
    if not isinstance(tracer.get("method", ""), str) or any(callable(value) for value in tracer.values()):
        raise InputError(
            "Workers take the method by its name, and numbers or text as its options: each makes its own. Use "
            "engine='local' without workers for a method or a function made in this process."
        )
    url = store.url if store.folder is None else str(store.folder)
    options = {"url": url, "model": ModelPlace.of(model).options(), "tracer": tracer}
    return ShardJob(f"{__name__}:open_work", options)


def open_work(url: str, model: dict[str, Any], tracer: dict[str, Any]) -> Shard:
    """Open a run where a worker is: returns a function that traces a shard and returns its record."""
    from headtrace.tracing import Tracer

    store = open_store(url)
    manifest = read_manifest(store.read(MANIFEST), store.url)
    work = ShardWork(store, manifest, Tracer(ModelPlace(**model).load(), **tracer))
    return lambda shard: (work.known(shard) or work.trace(shard)).text()


def _reason(error: Exception) -> str:
    """Why there is no circuit, after the kind of failure by which reasons are counted."""
    text = " ".join(str(error).split())
    match error:
        case IdentityError():
            return f"identity: {text}"
        case MemoryError():
            return f"memory: {text or 'not enough'}"
        case HeadtraceError():
            return f"{'input' if isinstance(error, InputError) else 'model'}: {text}"
        case _:
            return f"error: {type(error).__name__}: {text}"
