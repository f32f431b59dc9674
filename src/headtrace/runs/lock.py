"""One run at a time in one place: a lock that does not outlive its owner.

In a local folder it is the operating system's lock on the file ``lock`` (``flock``; on Windows that of one byte far
behind the end, for nobody else may read a byte that is locked there): the kernel lets go of it when the owner ends,
however it ends, so that a crash never leaves a folder locked. The file also says who the owner is, for the message
that the second one gets.

An object store has no such lock, nor have some network folders. There ``lock.json`` is a lease: owner, machine,
process, and a time that the owner renews while it runs. A lease that was not renewed for a minute has no owner any
more; one whose process is known to have ended, because it ran on this machine, is taken over at once. Not every store
can refuse to overwrite, so two runs that start within the same moment write, wait and look again who was last. Should
both go on nevertheless, they write the same shards: work is done twice, and nothing is lost.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import psutil

from headtrace.errors import HeadtraceError, InputError
from headtrace.runs.store import Store, StoreError

LOCK, LEASE = "lock", "lock.json"
LEASE_BYTES = 256
"""What a lease takes, filled up with blanks."""
EXPIRES = 60.0
"""Seconds after which a lease that nobody renews has no owner."""
RENEWED = 10.0
BYTE = 1 << 20
"""Which byte of the file Windows locks."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a folder without locks answers."""
SETTLES = 0.5
"""Seconds between writing a lease and looking whose it is."""


@contextmanager
def locked(store: Store) -> Generator[None]:
    """Hold the store's lock while the block runs; ``InputError`` if another run has it."""
    descriptor = None if store.folder is None else _locked_file(store)
    with _lease(store) if descriptor is None else _named(descriptor):
        yield


def _locked_file(store: Store) -> int | None:
    """The store's lock file, open and locked; None where files cannot be locked."""
    assert store.folder is not None
    try:
        descriptor = os.open(store.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StoreError(f"{store.url} cannot be written: {error.strerror}.") from None
    try:
        if _lock(descriptor):
            return descriptor
        found = _read(os.read(descriptor, 4096))
    except OSError as error:
        os.close(descriptor)
        if error.errno not in NO_LOCKS:
            raise StoreError(f"{store.url} cannot be locked: {error.strerror}.") from None
        return None
    os.close(descriptor)
    raise _taken(store, found)


def _lock(descriptor: int) -> bool:
    """Whether this process has the lock now; an ``OSError`` where there are none."""
    if find_spec("fcntl") is not None:
        fcntl = import_module("fcntl")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
    if find_spec("msvcrt") is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    msvcrt = import_module("msvcrt")
    os.lseek(descriptor, BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EDEADLK):
            raise
        return False
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)
    return True


@contextmanager
def _named(descriptor: int) -> Generator[None]:
    """Say in a locked file who has it, while the block runs."""
    try:
        with suppress(OSError):  # on a full disk the message has no name in it
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(_owner()).encode())
        yield
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)  # which lets go of the lock


@contextmanager
def _lease(store: Store) -> Generator[None]:
    own = _owner() | {"owner": secrets.token_hex(8)}
    _refuse_if_held(store, own)
    _renew(store, own)
    time.sleep(SETTLES)
    _refuse_if_held(store, own)
    ended = threading.Event()
    keeper = threading.Thread(target=_keep, args=(store, own, ended), daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        store.delete(LEASE)


def _keep(store: Store, own: dict[str, Any], ended: threading.Event) -> None:
    while not ended.wait(RENEWED):
        with suppress(HeadtraceError):  # the next time it may answer again; shards are safe whatever happens
            _renew(store, own)


def _renew(store: Store, own: dict[str, Any]) -> None:
    # Always as long: who reads it while it is written anew may take the old length for the new one.
    store.write(LEASE, json.dumps(own | {"renewed": time.time()}).ljust(LEASE_BYTES).encode())


def _refuse_if_held(store: Store, own: dict[str, Any]) -> None:
    try:
        found = _read(store.read(LEASE))
    except FileNotFoundError:
        return
    if not found or found.get("owner") == own["owner"] or _gone(found):
        return
    age = time.time() - float(found.get("renewed", 0))
    if age < EXPIRES:
        raise _taken(store, found, f" If it was killed, its lease ends in {EXPIRES - age:.0f} seconds.")


def _owner() -> dict[str, Any]:
    process = psutil.Process()
    return {"host": socket.gethostname(), "pid": process.pid, "started": process.create_time()}


def _gone(found: dict[str, Any]) -> bool:
    """Whether the owner is a process of this machine that has ended (its number may have a new bearer)."""
    if found.get("host") != socket.gethostname():
        return False
    try:
        return psutil.Process(int(found["pid"])).create_time() != found.get("started")
    except (psutil.Error, KeyError, ValueError, TypeError):
        return True


def _read(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _taken(store: Store, found: dict[str, Any], more: str = "") -> InputError:
    who = f" (process {found['pid']} on {found['host']})" if {"pid", "host"} <= set(found) else ""
    return InputError(
        f"Another run is writing to {store.url}{who}. Wait for it to end, or give another folder.{more}"
    )
