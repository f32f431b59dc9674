"""Which shards are there, and whole."""

from __future__ import annotations

from collections.abc import Sequence

from headtrace.runs.manifest import ShardRecord, read_record, shard_file, shard_record
from headtrace.runs.store import Store, checksum


def record_of(store: Store, shard: int, sizes: dict[str, int]) -> ShardRecord | None:
    """A shard's record, if it and all files it names are there, and of the right sizes."""
    if shard_record(shard) not in sizes:
        return None
    record = read_record(store.read(shard_record(shard)))
    if record is None or record.shard != shard:
        return None
    there = all(sizes.get(shard_file(shard, name)) == file.bytes for name, file in record.files.items())
    return record if there else None


def is_whole(store: Store, record: ShardRecord, tables: Sequence[str]) -> bool:
    """Whether the files of these tables are what was written, by their checksums."""
    try:
        return all(
            checksum(store.read(shard_file(record.shard, name))) == record.files[name].sha256
            for name in tables
        )
    except (FileNotFoundError, KeyError):
        return False
