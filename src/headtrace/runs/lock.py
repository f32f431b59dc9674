"""One run at a time in one place: a lock that does not outlive its owner.

In a local folder it is the operating system's lock on the file ``lock``: it is released when the owner ends, however it
ends, so that a crash never leaves a folder locked. The file also names the owner, for the error that the second one
gets.

An object store has no such lock, nor have some network folders. There ``lock.json`` is a lease: owner, machine,
process, and a time that the owner renews while it runs. A lease that was not renewed for a minute has no owner any
more; one whose process is known to have ended, because it ran on this machine, is taken over at once. Not every store
can refuse to overwrite, so two runs that start at the same moment write, wait and look again who was last. Should both
continue nevertheless, they write the same shards: work is done twice, and nothing is lost.
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
from typing import Any

import psutil
from filelock import lock_descriptor

from headtrace.errors import HeadtraceError, InputError
from headtrace.runs.store import Store, StoreError

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
