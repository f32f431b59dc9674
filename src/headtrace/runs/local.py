"""The engine ``local`` without workers: shard after shard in this process (with some: ``processes.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headtrace.progress import Progress, part_of
from headtrace.runs.work import ShardWork

if TYPE_CHECKING:
    from headtrace.runs.manifest import ShardRecord


def trace_locally(
    work: ShardWork, shards: Sequence[int], done: int, progress: Progress | None
) -> Iterator[ShardRecord]:
    """Trace shards, and give the record of each when it is written; ``done`` prompts were there before."""
    total = work.manifest.plan.prompts
    for shard in shards:
        record = work.trace(shard, part_of(progress, done, total))
        done += record.prompts
        yield record
