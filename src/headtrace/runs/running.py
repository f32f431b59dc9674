"""Starting a run, or going on with it.

>>> import headtrace, tempfile
>>> from headtrace.tasks import load_task
>>> model = headtrace.load("builtin")
>>> with tempfile.TemporaryDirectory() as folder:
...     run = headtrace.run(model, load_task("ioi", model.tokenizer, n_per_cell=1), out=f"{folder}/ioi")
...     run.status().done
30

The same call in the same place goes on where it stopped, or finds that nothing is left to do. Another model, other
options or other prompts are refused there, with the difference named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from headtrace import __version__
from headtrace.errors import InputError, shown
from headtrace.progress import Progress, monotonic, part_of
from headtrace.request import ROOT_OPTIONS, TRACER_SETTINGS, TraceRequest, takes_request_options
from headtrace.runs.engines import Engine, Engines
from headtrace.runs.lock import locked
from headtrace.runs.manifest import (
    MANIFEST,
    PLAN,
    SHARDS,
    Manifest,
    ShardRecord,
    TracedModel,
    check_place,
    differences,
    is_intact,
    is_temporary,
    read_manifest,
    record_of,
)
from headtrace.runs.plan import SHARD_SIZE, Plan, make_plan
from headtrace.runs.reading import Run, open_run
from headtrace.runs.store import Place, Store, StoreError, checksum, open_store, parquet_bytes
from headtrace.runs.work import ShardWork, trace_job
from headtrace.tasks import TaskSet
from headtrace.tracing import Tracer
from headtrace.tracing.assemble import model_info
from headtrace.validation import plain

if TYPE_CHECKING:
    from headtrace.models import Model


@takes_request_options
def run(
    model: Model | str,
    examples: Any,
    *,
    out: Place,
    engine: Engine = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    seed: int | None = None,
    signals: bool = False,
    shard_size: int = SHARD_SIZE,
    strict: bool = False,
    progress: Progress | None = None,
    failures: Callable[[int], None] | None = None,
    **options: Any,
) -> Run:
    """Trace many prompts, one circuit each, into a folder or an object store; an existing run is resumed.

    ``examples`` is a set of a task, or a list of examples, texts, requests, or mappings in the JSON form of a request
    (`TraceRequest`), with ``id``, ``labels`` and ``roles``, if you like. ``out`` is a folder or a URL that pyarrow or
    fsspec can write. ``options`` are those of `Tracer` (method and its options, budget, patterns) and of
    `Tracer.trace` (answer, wrong, root, paths, counterfactual, neurons ...). With ``signals`` the signals themselves
    are kept, as vectors: this costs a further forward pass per prompt.

    A prompt that fails is a row with its reason; with ``strict`` one that cannot be traced is an error before anything
    runs. ``workers`` is how many processes work, of this machine or, with ``engine="ray"``, of a local Ray or of the
    cluster at ``ray_address``; without it, this one. ``progress`` is called with the number of finished prompts and
    their total, ``failures`` with how many of them failed; ``seed`` is noted, for sets that were drawn.
    """
    engines = Engines(engine, workers, ray_address)
    store = open_store(out)
    check_place(store)
    if isinstance(model, str):
        from headtrace.models import load

        model = load(model)
    known = {each.name for each in fields(TraceRequest)} | set(ROOT_OPTIONS)
    made = {n: v for n, v in options.items() if n in TRACER_SETTINGS and n != "method_options"}
    made |= options.get("method_options") or {}
    made |= {name: value for name, value in options.items() if name not in known}
    tracer = Tracer(model, **made)
    how = {n: v for n, v in options.items() if n in known and n not in TRACER_SETTINGS and v is not None}
    plan = make_plan(tracer, examples, shard_size=shard_size, strict=strict, **how)
    standard = TraceRequest("the default options", **tracer.settings)
    asked = {
        "paths": how.pop("paths", standard.paths),
        "method": plain(tracer.method.describe()),
        "signals": signals,
        "max_firings": standard.max_firings,
        "min_influence": standard.min_influence,
        "root": {name: _said(value) for name, value in how.items()},
    }
    drawn = examples.seed if isinstance(examples, TaskSet) and seed is None else seed
    task = examples.task if isinstance(examples, TaskSet) else None
    content = parquet_bytes(plan.table, shard_size)
    manifest = Manifest(
        headtrace=__version__,
        model=TracedModel(**plain(model_info(model)), dtype=model.own_dtype),
        options=asked,
        seed=drawn,
        task=task,
        plan=plan.info(checksum(content)),
        made_with=_versions(),
    )
    launch = Launch(store, manifest, tracer, made, engines, monotonic(progress), failures)
    _prepare(store)
    with locked(store):
        launch.begin(content, plan)
        del plan, content
        launch.go()
    return open_run(out)


def _said(value: Any) -> Any:
    """A part of the question as JSON has it."""
    return list(value) if isinstance(value, (list, tuple)) else plain(value)


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _prepare(store: Store) -> None:
    if store.folder is not None:
        (store.folder / SHARDS).mkdir(parents=True, exist_ok=True)


@dataclass
class Launch:
    """A run that is about to start, in a place that is locked."""

    store: Store
    manifest: Manifest
    tracer: Tracer
    made: dict[str, Any]
    """What the tracer was made with: a worker makes one like it."""
    engines: Engines
    progress: Progress | None
    failures: Callable[[int], None] | None

    def begin(self, plan_file: bytes, plan: Plan) -> None:
        """Write plan and manifest, or hold them against those that are there."""
        sizes = self.store.sizes()
        for name in sizes:
            if is_temporary(name):
                self.store.delete(name)
        if MANIFEST not in sizes:
            self.store.write(PLAN, plan_file)
            self.store.write(MANIFEST, self.manifest.text().encode())
            return
        kept = read_manifest(self.store.read(MANIFEST), self.store.url)
        found = differences(kept, self.manifest)
        if found:
            raise self._another(found, plan)
        try:
            intact = checksum(self.store.read(PLAN)) == kept.plan.file_sha256
        except FileNotFoundError:
            intact = False
        if not intact:
            self.store.write(PLAN, plan_file)
            self.store.write(MANIFEST, self.manifest.text().encode())

    def _another(self, found: list[str], plan: Plan) -> InputError:
        """What is different; of the prompts the first one, not the hash of all."""
        told = [each for each in found if not each.startswith("plan.sha256")]
        if len(told) < len(found) and not any(each.startswith("plan.prompts") for each in told):
            told.append(self._other_prompt(plan))
        return InputError(
            f"{self.store.url} holds another run: {'; '.join(told)}. Ask for the same again to go on with it, or give "
            "another folder."
        )

    def _other_prompt(self, plan: Plan) -> str:
        try:
            kept = self.store.open(PLAN).read(columns=["index", "id", "text"], use_threads=False)
        except InputError:
            return "prompts: others than there"
        before = kept.sort_by("index").to_pylist()
        now = plan.table.select(["index", "id", "text"]).sort_by("index").to_pylist()
        for old, new in zip(before, now, strict=False):
            if old["id"] != new["id"]:
                index, was, given = (
                    old["index"],
                    shown(old["text"] or old["id"]),
                    shown(new["text"] or new["id"]),
                )
                return f"prompt {index}: {was} there, {given} now"
        return "prompts: the same, with other labels, roles or order"

    def go(self) -> None:
        """Trace what is left."""
        records = self._whole()
        done, failed = sum(each.prompts for each in records), sum(each.failed for each in records)
        known = {record.shard for record in records}
        left = [shard for shard in range(self.manifest.plan.shards) if shard not in known]
        self._tell(done, failed)
        try:
            for record in self._records(left, done) if left else ():
                done, failed = done + record.prompts, failed + record.failed
                self._tell(done, failed)
        except StoreError as error:
            raise StoreError(
                f"{error} {done} of {self.manifest.plan.prompts} prompts are there and stay: the same command goes on "
                "with the rest."
            ) from None

    def _records(self, left: Sequence[int], done: int) -> Iterator[ShardRecord]:
        if self.engines.here:
            return self._trace_here(left, done)
        answers = self.engines.answers(trace_job(self.store, self.tracer.model, self.made), left)
        return (ShardRecord.model_validate_json(answer) for answer in answers)

    def _trace_here(self, left: Sequence[int], done: int) -> Iterator[ShardRecord]:
        """Trace shards in this process; ``done`` prompts were there before."""
        work = ShardWork(self.store, self.manifest, self.tracer)
        for shard in left:
            record = work.trace(shard, part_of(self.progress, done, self.manifest.plan.prompts))
            done += record.prompts
            yield record

    def _whole(self) -> list[ShardRecord]:
        """Records of the shards that need not be traced again: their checksums are right."""
        sizes = self.store.sizes()
        found = (record_of(self.store, shard, sizes) for shard in range(self.manifest.plan.shards))
        return [r for r in found if r is not None and is_intact(self.store, r, self.manifest.tables)]

    def _tell(self, done: int, failed: int) -> None:
        if self.failures is not None:
            self.failures(failed)
        if self.progress is not None:
            self.progress(done, self.manifest.plan.prompts)
