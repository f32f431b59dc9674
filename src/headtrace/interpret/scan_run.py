"""Run a scan: resume it from its folder, save it as it goes, spread it over workers.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> found = scan(model, "sampled:900", signals=["L1H2:0", "L1H2:1"], length=60)
>>> found
Scan('builtin', 2 signals over 900 tokens of sampled:900)
>>> examples = found.examples("L1H2:0")
>>> len(examples.top), len(examples.random), examples.top[0].score >= examples.top[1].score
(60, 120, True)

With ``out=``, the scan is saved to that folder every few batches, in one step, and resumed from there when called again
with the same options.

With ``workers=``, the corpus is divided into shards. The starting process reads the corpus once and writes its tokens
to ``chunks.parquet``, a row group per shard, so workers need only the folder and the model; text sampled from the
model is sampled by the worker that scores it. A worker scores a shard into a scan of its own under ``parts/``. Parts
are merged in the order of the corpus and deleted, so the scan in the folder always covers a beginning of the corpus
and can be resumed with any number of workers, or none. The result is bit for bit that of one process.
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from headtrace import __version__
from headtrace.circuits import Circuit
from headtrace.errors import InputError, shown
from headtrace.interpret.corpus import Chunk, Corpus, open_corpus
from headtrace.interpret.head_roles import HeadSums
from headtrace.interpret.scan import FILE, BatchScorer, Scan, Tally, batches, chunks_at_once
from headtrace.interpret.scored_signals import ScoredSignal, Signals, find_signals
from headtrace.models.integrity import NOT_COMPARED
from headtrace.progress import monotonic
from headtrace.runs.engines import Engine, Engines, ModelPlace, Shard, ShardJob
from headtrace.runs.store import StoreError, locked, open_store
from headtrace.writing import check_folder_writable, replacing

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.progress import Progress

TOP = 60
"""The highest pairs that are kept of a signal: half of them have to show whether words hold."""
SAMPLE = 1024
"""Pairs of the shared uniform sample, from which random pairs, middle pairs and quantiles are taken."""
CHUNKS, PARTS = "chunks.parquet", "parts"


def scan(
    model: Model,
    corpus: str | Path | Corpus,
    signals: Signals = "top:8",
    *,
    out: str | Path | None = None,
    length: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
    top: int = TOP,
    sinks: bool = False,
    heads: bool = False,
    every: int = 4,
    engine: Engine = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    progress: Progress | None = None,
) -> Scan:
    """Read a corpus once and score all signals at all pairs of tokens (`headtrace.interpret.scan`).

    ``signals`` are ``"top:8"`` (the strongest channels of every head), channels like ``"L9H6:3"``, circuits or files
    of circuits, or a list of these; ``corpus`` is as in ``open_corpus``, ``tokens`` limits its length. ``heads`` also
    measures every head. With ``out``, a folder, progress is saved every ``every`` batches; an interrupted scan is
    resumed, a complete one is read. ``workers`` is how many processes score, on this machine or with ``engine="ray"``
    on a local Ray or the cluster at ``ray_address``; they need ``out``, a folder that all of them can write to.
    """
    engines = Engines(engine, workers, ray_address)
    if not engines.here and out is None:
        raise InputError("Several workers share a folder: give out=.")
    if top < 1:
        raise InputError(f"top={top}: keep at least one pair of each signal.")
    if not isinstance(signals, (str, Path, Circuit, ScoredSignal)):
        signals = list(signals)
    text = open_corpus(corpus, model, length=length, seed=seed, tokens=tokens)
    options = {
        "version": __version__,
        "model": model.name,
        "weights_sha256": model.weights_sha256,
        "computation_sha256": model.computation_sha256,
        "dtype": model.own_dtype,
        "corpus": text.identity,
        "signals": signals if isinstance(signals, str) else _digest(signals),
        "sample": SAMPLE,
        "seed": seed,
        "top": top,
        "sinks": sinks,
        "heads": heads,
    }
    state = None if out is None else _saved(out, options)
    if state is None:
        chosen = find_signals(model, signals, text)
        tally = Tally.empty(len(chosen), model.n_layers, top, SAMPLE)
        state = Scan(chosen, options, tally, heads=HeadSums.empty(model) if heads else None)
    if state.complete:
        return state
    report = monotonic(progress)
    if out is not None and not engines.here:
        _scan_with_workers(state, model, text, Path(out), engines, every, report)
        return state

    def report_chunks() -> None:
        """Chunks read, of how many as far as their mean length so far tells."""
        if report is not None and state.n_chunks:
            expected = -(-(text.n_tokens or 0) * state.n_chunks // state.n_tokens)
            report(state.n_chunks, max(state.n_chunks, expected))

    with model.assume_weights_unchanged():
        scorer = BatchScorer(state, model)
        report_chunks()
        for number, batch in enumerate(batches(text.chunks(state.n_chunks), text.length), start=1):
            sums = scorer.read(batch)
            if state.heads is not None and sums is not None:
                state.heads.add_stacked(HeadSums.stacked([sums]))
            if out is not None and number % every == 0:
                state.tidy(model)
                state.save(out)
            report_chunks()
        _finish(state, model, out)
    return state


def _digest(signals: Signals) -> str:
    """A short name for signals given as objects: their number and a hash of their ids."""
    single = isinstance(signals, (Path, ScoredSignal, Circuit))
    several: list[Any] = [signals] if single else list(cast(Iterable[Any], signals))
    names = [str(getattr(each, "content_id", getattr(each, "id", each))) for each in several]
    return f"{len(names)} of {hashlib.sha256(repr(names).encode()).hexdigest()[:16]}"


def _saved(out: str | Path, options: dict[str, Any]) -> Scan | None:
    """The scan in a folder, if there is one; an error names the first option that differs."""
    check_folder_writable(out)
    if not (Path(out) / FILE).exists():
        return None
    before = Scan.load(out)
    for name in dict.fromkeys([*options, *before.options]):
        then, now = before.options.get(name), options.get(name)
        if name == "computation_sha256" and then is None:  # earlier versions kept the weights' alone
            warnings.warn(f"The scan in {str(out)!r} does not say {NOT_COMPARED}.", stacklevel=3)
            continue
        if then != now:
            raise InputError(
                f"{str(out)!r} holds a scan with another {name.replace('_', ' ')}: {shown(then, 200)}, now "
                f"{shown(now, 200)}. Use the same options to resume it, or another folder."
            )
    return before


def _finish(state: Scan, model: Model, out: str | Path | None) -> None:
    state.complete = True
    state.tidy(model)
    if out is not None:
        state.save(out)


# -- Several workers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shards:
    """The rest of a corpus in pieces of whole batches."""

    folder: str
    """The folder of the scan."""
    first: int
    """The chunk that the first shard begins with."""
    size: int
    """Chunks per shard, except the last."""
    n_chunks: int
    """Chunks of the whole corpus."""
    sampled: dict[str, Any] | None
    """How to open a corpus that is sampled from the model; the chunks of others are in ``chunks.parquet``."""

    def __len__(self) -> int:
        return -(-(self.n_chunks - self.first) // self.size)

    def chunks(self, shard: int) -> range:
        start = self.first + shard * self.size
        return range(start, min(start + self.size, self.n_chunks))

    def part(self, shard: int) -> Path:
        """The folder of the scan of a shard."""
        return Path(self.folder) / PARTS / f"{self.chunks(shard).start:09}"

    def load_part(self, shard: int, options: dict[str, Any]) -> Scan | None:
        """The scan of a shard; None if it is missing, damaged, or made with other options."""
        try:
            part = Scan.load(self.part(shard))
        except InputError:
            return None
        return part if part.options == options and part.n_chunks == len(self.chunks(shard)) else None


def _scan_with_workers(
    state: Scan,
    model: Model,
    corpus: Corpus,
    out: Path,
    engines: Engines,
    every: int,
    progress: Progress | None,
) -> None:
    """Score the rest of a corpus with several workers."""
    place = ModelPlace.of(model)
    out.mkdir(parents=True, exist_ok=True)
    with locked(open_store(out)):
        state.save(out)  # tells the workers which signals to score, and how
        shards = _write_shards(corpus, out, state.n_chunks, every * chunks_at_once(corpus.length))
        options = {"model": place.options(), "shards": asdict(shards)}
        job = ShardJob(f"{__name__}:open_work", options)
        ready = _leftover_parts(state, out, shards)
        missing = [shard for shard in range(len(shards)) if shard not in ready]
        merged = _merge_ready(state, model, shards, ready, 0)

        def report() -> None:
            if progress is not None:
                progress(state.n_chunks + sum(len(shards.chunks(each)) for each in ready), shards.n_chunks)

        report()
        try:
            for answer in engines.answers(job, missing) if missing else ():
                ready.add(int(answer))
                merged = _merge_ready(state, model, shards, ready, merged)
                report()
        except StoreError as error:
            raise StoreError(
                f"{error} {state.n_chunks} of {shards.n_chunks} chunks are saved: the same command resumes the scan."
            ) from None
        _finish(state, model, out)
        shutil.rmtree(out / PARTS, ignore_errors=True)
        (out / CHUNKS).unlink(missing_ok=True)


def _write_shards(corpus: Corpus, out: Path, first: int, size: int) -> Shards:
    """Divide the chunks from ``first`` on into shards, and write their tokens where workers read them."""
    folder = str(out.resolve())
    if corpus.kind == "sampled":
        how = {name: getattr(corpus, name) for name in ("source", "length", "seed", "tokens")}
        return Shards(folder, first, size, corpus.n_sampled, how)
    count, chunks = first, corpus.chunks(first)
    schema = pa.schema([("id", pa.string()), ("token_ids", pa.list_(pa.int64()))])
    with replacing(out / CHUNKS) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        while shard := list(islice(chunks, size)):
            columns = {"id": [each.id for each in shard], "token_ids": [each.token_ids for each in shard]}
            writer.write_table(pa.table(columns, schema=schema))
            count += len(shard)
    return Shards(folder, first, size, count, None)


def _leftover_parts(state: Scan, out: Path, shards: Shards) -> set[int]:
    """The shards that an interrupted scan has scored already; parts of anything else are deleted."""
    ready: set[int] = set()
    for folder in (out / PARTS).glob("*"):
        start = int(folder.name) if folder.name.isdecimal() else -1
        shard, rest = divmod(start - shards.first, shards.size)
        usable = not rest and 0 <= shard < len(shards)
        if usable and shards.load_part(shard, state.options) is not None:
            ready.add(shard)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return ready


def _merge_ready(state: Scan, model: Model, shards: Shards, ready: set[int], merged: int) -> int:
    """Merge the parts that follow the first ``merged`` ones without a gap; how many are merged then."""
    before = merged
    while merged in ready:
        part = shards.load_part(merged, state.options)
        if part is None:
            raise InputError(
                f"A part of the scan in {shards.folder!r} is missing or damaged: start it again."
            )
        state.tally.merge(part.tally)
        state.contexts |= part.contexts
        if state.heads is not None and part.heads is not None:
            state.heads.add_stacked(part.heads)
        ready.remove(merged)
        merged += 1
    if merged > before:
        state.tidy(model)
        state.save(shards.folder)
        for shard in range(before, merged):
            shutil.rmtree(shards.part(shard), ignore_errors=True)
    return merged


def open_work(model: dict[str, Any], shards: dict[str, Any]) -> Shard:
    """Open a scan in a worker: a function that scores a shard into ``parts/`` and returns its number."""
    loaded, pieces = ModelPlace(**model).load(), Shards(**shards)
    begun = Scan.load(pieces.folder)
    corpus = table = None
    if pieces.sampled is not None:
        corpus = open_corpus(model=loaded, **pieces.sampled)
    else:
        table = pq.ParquetFile(Path(pieces.folder) / CHUNKS)

    def read_shard(shard: int) -> str:
        indices = pieces.chunks(shard)
        if corpus is not None:
            chunks = islice(corpus.chunks(indices.start), len(indices))
        else:
            assert table is not None
            rows = table.read_row_group(shard, use_threads=False).to_pylist()
            pairs = zip(indices, rows, strict=True)
            chunks = iter([Chunk(index, row["id"], tuple(row["token_ids"])) for index, row in pairs])
        sizes = (begun.options["top"], len(begun.tally.sample_key))
        tally = Tally.empty(len(begun.signals), loaded.n_layers, *sizes)
        part = Scan(begun.signals, begun.options, tally, heads=begun.heads)
        with loaded.assume_weights_unchanged():
            scorer = BatchScorer(part, loaded)
            sums = [scorer.read(batch) for batch in batches(chunks, begun.options["corpus"]["length"])]
        part.tidy(loaded)
        part.heads = (
            None if part.heads is None else HeadSums.stacked([each for each in sums if each is not None])
        )
        part.complete = True
        part.save(pieces.part(shard))
        return str(shard)

    return read_shard
