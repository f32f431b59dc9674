"""A scan by several workers: the corpus in shards, each read by some process, and put together in their order.

What is to be read is written first, as tokens, to ``chunks.parquet`` (a row group per shard); so the corpus itself is
read once, by the process that starts the scan, and workers need to see the folder and the model only. Text that is
drawn from the model is drawn by the worker that reads it. A worker reads a shard into a scan of its own, in
``parts/``, whole or not at all. Parts are taken into the scan in the order of the corpus, and deleted: so the scan in
the folder is always that of a beginning of the corpus, and goes on from there with any number of workers, or none.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from headtrace.errors import InputError
from headtrace.interpret.corpus import Chunk, open_corpus
from headtrace.interpret.heads import HeadSums
from headtrace.interpret.scan import Reader, Scan, batches, chunks_at_once, finish, tidy
from headtrace.interpret.tally import Tally
from headtrace.progress import Progress, monotonic
from headtrace.runs.engines import Engines, Job, ModelPlace, Shard
from headtrace.runs.lock import locked
from headtrace.runs.store import StoreError, open_store
from headtrace.writing import replacing

if TYPE_CHECKING:
    from headtrace.interpret.corpus import Corpus
    from headtrace.models import Model

CHUNKS, PARTS = "chunks.parquet", "parts"
_COLUMNS = pa.schema([("id", pa.string()), ("token_ids", pa.list_(pa.int64()))])


@dataclass(frozen=True)
class Shards:
    """What is left to read of a corpus, in pieces of a whole number of batches."""

    first: int
    """The chunk with which the first one begins."""
    size: int
    """Chunks of each, but the last."""
    n_chunks: int
    """Of the whole corpus."""
    drawn: dict[str, Any] | None
    """How to open a corpus that is drawn from the model; of others the chunks are written."""

    def __len__(self) -> int:
        return -(-(self.n_chunks - self.first) // self.size)

    def start(self, shard: int) -> int:
        return self.first + shard * self.size


def scan_with_workers(
    state: Scan,
    model: Model,
    corpus: Corpus,
    out: Path,
    engines: Engines,
    every: int,
    progress: Progress | None,
) -> None:
    """Read the rest of a corpus with several workers into a scan and its folder."""
    place = ModelPlace.of(model)
    out.mkdir(parents=True, exist_ok=True)
    with locked(open_store(out)):
        state.save(out)  # what the workers begin with: which signals, and how
        shards = _written(corpus, out, state.n_chunks, every * chunks_at_once(corpus.length))
        options = {"folder": str(out.resolve()), "model": place.options(), "shards": asdict(shards)}
        job = Job(f"{__name__}:open_work", options)
        tell = monotonic(progress)
        try:
            _collect(_Joined(state, model, out, shards), job, engines, tell)
        except StoreError as error:
            raise StoreError(
                f"{error} {state.n_chunks} of {shards.n_chunks} chunks are there and stay: the same command goes on "
                "with the rest."
            ) from None
        finish(state, model, out)
        shutil.rmtree(out / PARTS, ignore_errors=True)
        (out / CHUNKS).unlink(missing_ok=True)


def _written(corpus: Corpus, out: Path, first: int, size: int) -> Shards:
    if corpus.kind == "sampled":
        drawn = {
            "source": corpus.source,
            "length": corpus.length,
            "seed": corpus.seed,
            "tokens": corpus.tokens,
        }
        return Shards(first, size, corpus.n_drawn, drawn)
    count, held = first, list[Chunk]()
    with replacing(out / CHUNKS) as temporary, pq.ParquetWriter(temporary, _COLUMNS) as writer:
        for chunk in corpus.chunks(first):
            held.append(chunk)
            count += 1
            if len(held) == size:
                writer.write_table(_table(held))
                held = []
        if held:
            writer.write_table(_table(held))
    return Shards(first, size, count, None)


def _table(chunks: list[Chunk]) -> pa.Table:
    columns = {"id": [each.id for each in chunks], "token_ids": [each.token_ids for each in chunks]}
    return pa.table(columns, schema=_COLUMNS)


def _collect(joined: _Joined, job: Job, engines: Engines, progress: Progress | None) -> None:
    """Have the shards done that are not there, and take each in when those before it are."""

    def told() -> None:
        if progress is not None:
            progress(joined.n_chunks, joined.shards.n_chunks)

    left = joined.begin()
    told()
    for answer in engines.answers(job, left) if left else ():
        joined.take(int(answer))
        told()


@dataclass
class _Joined:
    """A scan that grows by the parts of it."""

    state: Scan
    model: Model
    out: Path
    shards: Shards

    def __post_init__(self) -> None:
        self.next = 0
        self.ready: dict[int, int] = {}
        """Chunks of the shards that are there, and wait for one before them."""

    @property
    def n_chunks(self) -> int:
        return self.state.n_chunks + sum(self.ready.values())

    def begin(self) -> list[int]:
        """Take what an interrupted scan has left; the shards that are to be done."""
        for folder in (self.out / PARTS).glob("*"):
            start = int(folder.name) if folder.name.isdecimal() else -1
            shard, rest = divmod(start - self.shards.first, self.shards.size)
            part = None if rest or not 0 <= shard < len(self.shards) else self._part(shard)
            if part is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                self.ready[shard] = part.n_chunks
        known = set(self.ready)
        self._join()
        return [shard for shard in range(len(self.shards)) if shard not in known]

    def take(self, shard: int) -> None:
        self.ready[shard] = min(self.shards.size, self.shards.n_chunks - self.shards.start(shard))
        self._join()

    def _join(self) -> None:
        before = self.next
        while self.next in self.ready:
            part = self._part(self.next)
            if part is None:
                raise InputError(
                    f"A part of the scan in {str(self.out)!r} is gone or damaged: start it again."
                )
            self._add(part)
            del self.ready[self.next]
            self.next += 1
        if self.next > before:
            tidy(self.state, self.model)
            self.state.save(self.out)
            for shard in range(before, self.next):
                shutil.rmtree(self._folder(shard), ignore_errors=True)

    def _add(self, part: Scan) -> None:
        self.state.tally.merge(part.tally)
        self.state.contexts |= part.contexts
        if self.state.heads is not None and part.heads is not None:
            self.state.heads.add_stacked(part.heads)

    def _part(self, shard: int) -> Scan | None:
        try:
            part = Scan.load(self._folder(shard))
        except InputError:
            return None
        size = min(self.shards.size, self.shards.n_chunks - self.shards.start(shard))
        return part if part.options == self.state.options and part.n_chunks == size else None

    def _folder(self, shard: int) -> Path:
        return part_folder(self.out, self.shards.start(shard))


def part_folder(out: Path, start: int) -> Path:
    return out / PARTS / f"{start:09}"


# -- in a worker -------------------------------------------------------------------------------------------------


def open_work(folder: str, model: dict[str, Any], shards: dict[str, Any]) -> Shard:
    """Open a scan where a worker is: what it gives reads a shard into ``parts``, and answers with its number."""
    return ShardReader(Path(folder), ModelPlace(**model).load(), Shards(**shards)).read


@dataclass
class ShardReader:
    """Reads shards of a corpus with one model."""

    folder: Path
    model: Model
    shards: Shards

    def read(self, shard: int) -> str:
        begun = self.begun
        tally = Tally.empty(len(begun.signals), self.model.n_layers, *self.sizes)
        part = Scan(begun.signals, begun.options, tally, heads=begun.heads)
        reader, sums = Reader(part, self.model), list[HeadSums]()
        with self.model.assume_weights_unchanged():
            for batch in batches(self._chunks(shard), begun.options["corpus"]["length"]):
                found = reader.read(batch)
                sums += [] if found is None else [found]
        tidy(part, self.model)
        part.heads = HeadSums.stacked(sums) if sums else None
        part.complete = True
        part.save(part_folder(self.folder, self.shards.start(shard)))
        return str(shard)

    @cached_property
    def begun(self) -> Scan:
        return Scan.load(self.folder)

    @property
    def sizes(self) -> tuple[int, int]:
        """How many pairs are kept of each signal, and in the sample."""
        return self.begun.tally.top_score.shape[1], len(self.begun.tally.sample_key)

    def _chunks(self, shard: int) -> Iterator[Chunk]:
        start = self.shards.start(shard)
        end = min(start + self.shards.size, self.shards.n_chunks)
        if self.shards.drawn is not None:
            drawn = dict(self.shards.drawn)
            corpus = open_corpus(drawn.pop("source"), self.model, **drawn)
            yield from islice(corpus.chunks(start), end - start)
            return
        rows = self._table.read_row_group(shard, use_threads=False).to_pylist()
        for index, row in zip(range(start, end), rows, strict=True):
            yield Chunk(index, row["id"], tuple(row["token_ids"]))

    @cached_property
    def _table(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.folder / CHUNKS)
