"""Where a run is kept: a local folder, or a place on an object store that pyarrow or fsspec can write.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     store = open_store(f"{folder}/run")
...     store.write("shards/00000.json", b"{}")
...     store.sizes(), store.read("shards/00000.json")
({'shards/00000.json': 2}, b'{}')

A file is there whole or not at all. In a folder it is written under another name, synced and renamed
(`headtrace.writing`); an object store shows an object only when all of it has arrived.

One run at a time writes in one place: ``locked`` is a lock that does not outlive its owner. In a local folder it is the
operating system's lock on the file ``lock``: it is released when the owner ends, however it ends, so that a crash never
leaves a folder locked. The file also names the owner, for the error that the second one gets.

An object store has no such lock, nor have some network folders. There ``lock.json`` is a lease: owner, machine,
process, and a time that the owner renews while it runs. A lease that was not renewed for a minute has no owner any
more; one whose process is known to have ended, because it ran on this machine, is taken over at once. Not every store
can refuse to overwrite, so two runs that start at the same moment write, wait and look again who was last. Should both
continue nevertheless, they write the same shards: work is done twice, and nothing is lost.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import lock_descriptor
from pyarrow import fs

from headtrace.errors import HeadtraceError, InputError
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
        raise InputError(
            "The folder of the run is an empty text. Give a folder, or a URL such as s3://bucket/ioi."
        )
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
            f"{os.fspath(place)!r} is in the memory of this process and is lost when it ends: no worker sees it, and "
            "it cannot be resumed. Give a folder, or a URL such as s3://bucket/ioi."
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


LOCK, LEASE = "lock", "lock.json"
LEASE_BYTES = 256
"""The size of a lease, padded with blanks: who reads it while it is rewritten may take the old length for the new."""
EXPIRES = 60.0
"""Seconds after which a lease that nobody renews has no owner."""
RENEWED = 10.0
"""Seconds between renewals of a lease."""
SETTLES = 0.5
"""Seconds between writing a lease and looking whose it is."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a folder without locks."""


@contextmanager
def locked(store: Store) -> Generator[None]:
    """Hold the store's lock while the block runs; ``InputError`` if another run has it."""
    descriptor = None if store.folder is None else _open_lock(store)
    if descriptor is None:
        with _lease(store):
            yield
        return
    try:
        with suppress(OSError):  # on a full disk the error of a second run does not name this one
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(_owner()).encode())
        yield
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)  # which releases the lock


def _open_lock(store: Store) -> int | None:
    """The store's lock file, open and locked; None where files cannot be locked."""
    assert store.folder is not None
    try:
        descriptor = os.open(store.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StoreError(f"{store.url} cannot be written: {error.strerror}.") from None
    try:
        if lock_descriptor(descriptor, blocking=False):
            return descriptor
    except OSError as error:
        os.close(descriptor)
        if error.errno not in NO_LOCKS:
            raise StoreError(f"{store.url} cannot be locked: {error.strerror}.") from None
        return None
    owner: dict[str, Any] = {}
    with suppress(OSError):  # Windows does not let others read a byte that is locked
        owner = _read(os.read(descriptor, 4096))
    os.close(descriptor)
    raise _taken(store, owner)


@contextmanager
def _lease(store: Store) -> Generator[None]:
    own = _owner() | {"owner": secrets.token_hex(8)}

    def renew() -> None:
        store.write(LEASE, json.dumps(own | {"renewed": time.time()}).ljust(LEASE_BYTES).encode())

    def keep_renewing() -> None:
        while not ended.wait(RENEWED):
            with suppress(
                HeadtraceError
            ):  # the store may answer again next time; shards are safe whatever happens
                renew()

    _refuse_if_held(store, own)
    renew()
    time.sleep(SETTLES)
    _refuse_if_held(store, own)
    ended = threading.Event()
    keeper = threading.Thread(target=keep_renewing, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        store.delete(LEASE)


def _refuse_if_held(store: Store, own: dict[str, Any]) -> None:
    try:
        found = _read(store.read(LEASE))
    except FileNotFoundError:
        return
    if not found or found.get("owner") == own["owner"] or _has_ended(found):
        return
    age = time.time() - float(found.get("renewed", 0))
    if age < EXPIRES:
        raise _taken(store, found, f" If it was killed, its lease ends in {EXPIRES - age:.0f} seconds.")


def _owner() -> dict[str, Any]:
    process = psutil.Process()
    return {"host": socket.gethostname(), "pid": process.pid, "started": process.create_time()}


def _has_ended(owner: dict[str, Any]) -> bool:
    """Whether the owner is a process of this machine that has ended (its number may belong to another by now)."""
    if owner.get("host") != socket.gethostname():
        return False
    try:
        return psutil.Process(int(owner["pid"])).create_time() != owner.get("started")
    except (psutil.Error, KeyError, ValueError, TypeError):
        return True


def _read(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _taken(store: Store, owner: dict[str, Any], more: str = "") -> InputError:
    who = f" (process {owner['pid']} on {owner['host']})" if {"pid", "host"} <= set(owner) else ""
    return InputError(
        f"Another run is writing to {store.url}{who}. Wait for it to end, or give another folder.{more}"
    )
