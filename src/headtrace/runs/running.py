"""Starting a run, or resuming it.

>>> import headtrace, tempfile
>>> from headtrace.tasks import load_task
>>> model = headtrace.load("builtin")
>>> with tempfile.TemporaryDirectory() as folder:
...     run = headtrace.run(model, load_task("ioi", model.tokenizer, n_per_cell=1), out=f"{folder}/ioi")
...     run.status().done
30

The same call with the same folder resumes where it stopped, or finds that nothing is left to do. In a folder that holds
a run of another model, other options or other prompts, it is refused with the difference named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from headtrace import __version__
from headtrace.errors import InputError, shown
from headtrace.models.integrity import warn_if_not_compared
from headtrace.progress import Progress, monotonic, part_of
from headtrace.request import ROOT_OPTIONS, TRACER_SETTINGS, TraceRequest, takes_request_options
from headtrace.runs.engines import Engine, Engines
from headtrace.runs.manifest import (
    MANIFEST,
    MECHANISMS,
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
from headtrace.runs.store import (
    Place,
    Store,
    StoreError,
    checksum,
    locked,
    open_store,
    parquet_bytes,
    require_lasting,
)
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
    mechanisms: bool = False,
    shard_size: int = SHARD_SIZE,
    strict: bool = False,
    progress: Progress | None = None,
    failures: Callable[[int], None] | None = None,
    **options: Any,
) -> Run:
    """Trace many prompts, one circuit each, into a folder or an object store; an existing run is resumed.

    ``examples`` is a set of a task, or a list of examples, texts, requests, or mappings in the JSON form of a request
    (`TraceRequest`), optionally with ``id``, ``labels`` and ``roles``. ``out`` is a folder or a URL that pyarrow or
    fsspec can write. ``options`` are those of `Tracer` (method and its options, budget, patterns) and of
    `Tracer.trace` (answer, wrong, root, paths, counterfactual, neurons ...). With ``signals`` the signals themselves
    are kept, as vectors: this costs a further forward pass per prompt. With ``mechanisms`` the steps of each prompt's
    mechanism are kept beside its circuit (`Run.steps`); ``paths`` are then those of the difference, unless others are
    given.

    A prompt that fails is a row with its reason; with ``strict`` one that cannot be traced is an error before anything
    runs. ``workers`` is the number of worker processes on this machine or, with ``engine="ray"``, of a local Ray or of
    the cluster at ``ray_address``; by default this process does the work. ``progress`` is called with the number of
    finished prompts and their total, ``failures`` with how many of them failed; ``seed`` is recorded in the manifest.
    """
    engines = Engines(engine, workers, ray_address)
    require_lasting(out)
    store = open_store(out)
    check_place(store)
    if isinstance(model, str):
        from headtrace.models import load

        model = load(model)
    if mechanisms and options.get("paths") is None:
        options["paths"] = "difference"
    known = {each.name for each in fields(TraceRequest)} | set(ROOT_OPTIONS)
    of_tracer = {n: v for n, v in options.items() if n in TRACER_SETTINGS and n != "method_options"}
    of_tracer |= options.get("method_options") or {}
    of_tracer |= {name: value for name, value in options.items() if name not in known}
    tracer = Tracer(model, **of_tracer)
    of_request = {
        n: v for n, v in options.items() if n in known and n not in TRACER_SETTINGS and v is not None
    }
    plan = make_plan(tracer, examples, shard_size=shard_size, strict=strict, **of_request)
    plan_file = parquet_bytes(plan.table, shard_size)
    defaults = TraceRequest("the default options", **tracer.settings)
    if isinstance(examples, TaskSet) and seed is None:
        seed = examples.seed
    thresholds = tracer.method.thresholds(plan.longest) if callable(tracer.method.tau) else None
    manifest = Manifest(
        headtrace=__version__,
        model=TracedModel(**plain(model_info(model)), dtype=model.own_dtype),
        options={
            "paths": of_request.pop("paths", defaults.paths),
            "method": plain(tracer.method.describe()),
            **({} if thresholds is None else {"thresholds": thresholds}),
            "signals": signals,
            **({MECHANISMS: True} if mechanisms else {}),
            "max_firings": defaults.max_firings,
            "min_influence": defaults.min_influence,
            "root": {
                name: list(value) if isinstance(value, (list, tuple)) else plain(value)
                for name, value in of_request.items()
            },
        },
        seed=seed,
        task=examples.task if isinstance(examples, TaskSet) else None,
        plan=plan.info(checksum(plan_file)),
        made_with=_versions(),
    )
    if store.folder is not None:
        (store.folder / SHARDS).mkdir(parents=True, exist_ok=True)
    with locked(store):
        _write_or_compare(store, manifest, plan, plan_file)
        del plan, plan_file
        launch = Launch(store, manifest, tracer, of_tracer, engines, monotonic(progress), failures)
        launch.trace_missing_shards()
    return open_run(out)


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _write_or_compare(store: Store, manifest: Manifest, plan: Plan, plan_file: bytes) -> None:
    """Write plan and manifest of a new run; those of an existing run must be the same."""
    sizes = store.sizes()
    for name in sizes:
        if is_temporary(name):
            store.delete(name)
    if MANIFEST in sizes:
        kept = read_manifest(store.read(MANIFEST), store.url)
        found = differences(kept, manifest)
        other = [each for each in found if not each.startswith("plan.sha256")]
        if len(other) < len(found) and not any(each.startswith("plan.prompts") for each in other):
            other += _prompt_differences(
                store, plan
            )  # instead of the hash of all prompts, the first that differs
        if other:
            raise InputError(
                f"{store.url} holds another run: {'; '.join(other)}. Use the same options and prompts to resume it, "
                "or give another folder."
            )
        warn_if_not_compared(f"The run in {store.url}", kept.model)
        try:
            if checksum(store.read(PLAN)) == kept.plan.file_sha256:
                return
        except FileNotFoundError:
            pass
    store.write(PLAN, plan_file)
    store.write(MANIFEST, manifest.text().encode())


def _prompt_differences(store: Store, plan: Plan) -> list[str]:
    """Where the prompts of an existing run differ: the first that does. Plans of early versions may be the same."""
    try:
        kept = store.open(PLAN).read(use_threads=False)
    except InputError:
        return ["prompts: others than there"]
    if plan.continues(kept):
        return []
    before, now = (
        table.select(["index", "id", "text"]).sort_by("index").to_pylist() for table in (kept, plan.table)
    )
    for old, new in zip(before, now, strict=False):
        if old["id"] != new["id"]:
            was, given = (shown(row["text"] or row["id"]) for row in (old, new))
            return [f"prompt {old['index']}: {was} there, {given} now"]
    return ["prompts: the same, with other labels, roles or order"]


@dataclass
class Launch:
    """A run whose plan and manifest are written, in a store that is locked."""

    store: Store
    manifest: Manifest
    tracer: Tracer
    tracer_options: dict[str, Any]
    """What the tracer was made with: a worker makes one like it."""
    engines: Engines
    progress: Progress | None
    failures: Callable[[int], None] | None

    def trace_missing_shards(self) -> None:
        """Trace the shards that are not there yet, or whose files have other checksums than their records say."""
        sizes = self.store.sizes()
        found = [record_of(self.store, shard, sizes) for shard in range(self.manifest.plan.shards)]
        records = [r for r in found if r is not None and is_intact(self.store, r, self.manifest.tables)]
        done, failed = sum(each.prompts for each in records), sum(each.failed for each in records)
        missing = sorted(set(range(self.manifest.plan.shards)) - {record.shard for record in records})
        self._report(done, failed)
        if not missing:
            return
        if self.engines.here:
            traced = self._trace_here(missing, done)
        else:
            job = trace_job(self.store, self.tracer.model, self.tracer_options)
            traced = map(ShardRecord.model_validate_json, self.engines.answers(job, missing))
        try:
            for record in traced:
                done, failed = done + record.prompts, failed + record.failed
                self._report(done, failed)
        except StoreError as error:
            raise StoreError(
                f"{error} {done} of {self.manifest.plan.prompts} prompts are done and kept. The same command "
                "resumes with the rest."
            ) from None

    def _trace_here(self, shards: Sequence[int], done: int) -> Iterator[ShardRecord]:
        """Trace shards in this process; ``done`` prompts were there before."""
        work = ShardWork(self.store, self.manifest, self.tracer)
        for shard in shards:
            record = work.trace(shard, part_of(self.progress, done, self.manifest.plan.prompts))
            done += record.prompts
            yield record

    def _report(self, done: int, failed: int) -> None:
        if self.failures is not None:
            self.failures(failed)
        if self.progress is not None:
            self.progress(done, self.manifest.plan.prompts)
