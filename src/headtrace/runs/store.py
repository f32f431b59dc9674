"""Where a run is kept: a local folder, or a place on an object store that pyarrow or fsspec can write.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     store = open_store(f"{folder}/run")
...     store.write("shards/00000.json", b"{}")
...     store.sizes(), store.read("shards/00000.json")
({'shards/00000.json': 2}, b'{}')

A file is there whole or not at all. In a folder it is written under another name, synced and renamed
(`headtrace.writing`); an object store shows an object only when all of it has arrived.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from headtrace.errors import InputError
from headtrace.writing import check_folder_writable, write_bytes

Place = str | os.PathLike[str]


class StoreError(InputError):
    """The folder or bucket of a run cannot be written: a full disk, a lost connection. What is there stays."""


@dataclass(frozen=True)
class Store:
    """The files of one run, by their names within it."""

    url: str
    """As it was given: what a message names, and what opens it again."""
    filesystem: Any
    base: str
    folder: Path | None = None
    """The folder, where it is one of this machine."""

    def read(self, name: str) -> bytes:
        """The content of a file; ``FileNotFoundError`` where there is none."""
        try:
            with self.filesystem.open_input_stream(self._path(name)) as stream:
                return stream.read()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unreadable(name, error) from None

    def write(self, name: str, content: bytes) -> None:
        """Write a file in one step."""
        if self.folder is not None:
            try:
                write_bytes(self.folder / name, content)
            except InputError as error:
                raise StoreError(str(error)) from None
            return
        try:
            with self.filesystem.open_output_stream(self._path(name)) as stream:
                stream.write(content)
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"{self.url}: {name} cannot be written: {_brief(error)}") from None

    def write_table(self, name: str, table: pa.Table, row_group_size: int | None = None) -> tuple[str, int]:
        """Write a table as Parquet; the checksum and the size of the file."""
        content = parquet_bytes(table, row_group_size)
        self.write(name, content)
        return checksum(content), len(content)

    def sizes(self) -> dict[str, int]:
        """The files of the run and how many bytes each holds."""
        selector = fs.FileSelector(self.base, recursive=True, allow_not_found=True)
        try:
            found = self.filesystem.get_file_info(selector)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{self.url} cannot be read: {_brief(error)}") from None
        start = self.base.lstrip("/") + "/"
        return {info.path.lstrip("/").removeprefix(start): info.size for info in found if info.is_file}

    def delete(self, name: str) -> None:
        """Take a file away, if it is there."""
        with suppress(OSError, pa.ArrowException):
            self.filesystem.delete_file(self._path(name))

    def open(self, name: str) -> pq.ParquetFile:
        """A Parquet file, to be read in parts; in one thread, for damaged files end a process with many."""
        try:
            return pq.ParquetFile(self.filesystem.open_input_file(self._path(name)), pre_buffer=False)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self._unreadable(name, error) from None

    def path(self, name: str) -> str:
        """Where a file is, as this machine or the file system names it."""
        return self._path(name) if self.folder is None else str(self.folder / name)

    def check_writable(self) -> None:
        """Raise ``InputError`` if nothing can be written there; leaves no trace."""
        if self.folder is not None:
            check_folder_writable(self.folder)
            return
        self.write(_PROBE, b"")
        self.delete(_PROBE)

    def _path(self, name: str) -> str:
        return f"{self.base}/{name}"

    def _unreadable(self, name: str, error: Exception) -> InputError:
        return InputError(f"{self.url}: {name} cannot be read: {_brief(error)}")


_PROBE = ".writable"


def open_store(place: Place) -> Store:
    """The store at a path or URL (``runs/ioi``, ``s3://bucket/ioi``, ``s3://bucket/ioi?endpoint_override=...``)."""
    text = os.fspath(place)
    if not text.strip():
        raise InputError("The place of the run is empty. Give a folder, or a URL such as s3://bucket/ioi.")
    if "://" not in text or text.startswith("file://"):
        path = url2pathname(text.removeprefix("file://")) if text.startswith("file://") else text
        folder = Path(os.path.abspath(os.path.expanduser(path)))
        return Store(
            text, fs.LocalFileSystem(), folder.as_posix(), folder
        )  # pyarrow lists files with slashes
    try:
        filesystem, base = fs.FileSystem.from_uri(text)
    except (pa.ArrowException, OSError, ValueError) as error:
        if not str(error).startswith("Unrecognized filesystem"):
            raise InputError(f"{text!r} cannot be opened: {_brief(error)}") from None
        filesystem, base = _by_fsspec(text)
    return Store(text, filesystem, base.rstrip("/"))


def _by_fsspec(text: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        filesystem, base = url_to_fs(text)
    except (ImportError, ValueError, OSError) as error:
        raise InputError(
            f"{text!r} cannot be opened: {_brief(error)} Give a folder, or a URL of a kind that pyarrow or fsspec can "
            "write, such as s3://bucket/ioi."
        ) from None
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), base


def require_lasting(place: Place) -> None:
    """Raise ``InputError`` for a place in this process' memory: what is written there is gone when it ends."""
    if os.fspath(place).partition("://")[0].lower() in ("memory", "mock"):
        raise InputError(
            f"{os.fspath(place)!r} is in the memory of this process and gone when it ends: no worker sees it, and "
            "nothing resumes it. Give a folder, or a URL such as s3://bucket/ioi."
        )


def parquet_bytes(table: pa.Table, row_group_size: int | None = None) -> bytes:
    """A table as a Parquet file: the same table gives the same bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=row_group_size)
    return sink.getvalue().to_pybytes()


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _brief(error: Exception) -> str:
    """The first sentence of an error of pyarrow's, without the ids of a request."""
    text = " ".join(str(error).split()).split(" (Request ID")[0].split(". Detail:")[0]
    return (text or type(error).__name__)[:300].rstrip(".") + "."
