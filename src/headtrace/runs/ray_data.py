"""The engine ``ray``: Ray Data maps shard numbers to answers, with a class that holds the opened job.

Scheduling, retries, and how many workers there are when nodes come and go, are Ray's. A worker loads the model by
its name, makes sure by the hash of its weights that it is the same one, and writes each shard by itself; what comes
back is the shard's answer. A worker that dies takes at most the shard it is at with it, and that one is done again
elsewhere.

Without an address a Ray is started on this machine alone: on the loopback address, without dashboard, and without the
statistics that Ray sends to its makers.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from headtrace.errors import InputError
from headtrace.runs.jobs import Job, Worker
from headtrace.runs.store import StoreError

ANSWERS_IN = 5.0
"""Seconds in which a Ray address must answer."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""How a client of HTTP/2 begins: a server answers with its settings at once."""
_OBJECTS = 100 * 1024 * 1024
"""Bytes of a local Ray's object store: only shard numbers and answers go through it."""


class ShardWorker(Worker):
    """A worker in a process of Ray's, which gives it the numbers of shards in batches."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        answers = [self.do(int(shard)) for shard in batch["shard"]]
        return {"answer": [a for a, _ in answers], "problem": [b for _, b in answers]}


def work_with_ray(job: Job, shards: Sequence[int], workers: int | None, address: str | None) -> Iterator[str]:
    """Do shards on Ray, and give the answer of each when it is there.

    Ray Data starts workers that died again, and does their shards again, as often as it takes. On a cluster it chooses
    how many there are, unless that is asked for.
    """
    count = min(workers or os.cpu_count() or 1, len(shards))
    free = address is not None and workers is None
    pool = {"min_size": 1, "max_size": len(shards)} if free else {"size": count}
    with _connected(address, count) as ray:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        numbers = ray.data.from_items([{"shard": shard} for shard in shards], override_num_blocks=len(shards))
        done = numbers.map_batches(
            ShardWorker,
            fn_constructor_kwargs={"job": job},
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(**pool),
            num_cpus=1,
        )
        for row in done.iter_rows():
            if row["problem"]:
                raise StoreError(row["problem"])
            yield row["answer"]


@contextmanager
def _connected(address: str | None, workers: int) -> Generator[Any]:
    """Ray itself, connected; one that was started here ends here, one that was there stays."""
    ray = _imported()
    if ray.is_initialized():
        yield ray
        return
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        how |= {"address": "local", "num_cpus": workers, "include_dashboard": False}
        how |= {"object_store_memory": _OBJECTS, "_node_ip_address": "127.0.0.1"}
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its notes are in its log files, too
    else:
        _require_answer(address)
        how["address"] = address
    try:
        ray.init(**how)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise _no_answer(address or "local", error) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = import_module("ray")
    import_module("ray.data")
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


def _require_answer(address: str) -> None:
    """Ray itself would try for minutes: ask first whether anybody listens, and speaks its protocol (HTTP/2)."""
    if address == "auto":
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(
            f"The Ray address {address!r} is not one: expected host:port, such as 10.0.0.5:6379, or auto."
        )
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWERS_IN) as connection:
            if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
                connection.sendall(_GREETING)
                connection.settimeout(ANSWERS_IN)
                if not connection.recv(9):
                    raise ConnectionError("it hangs up")
    except (OSError, OverflowError) as error:
        raise _no_answer(address, error) from None


def _no_answer(address: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return InputError(
        f"No Ray answers at {address!r} ({reason.rstrip('.')}). Is it started (`ray start --head`), and is the address "
        "right? Without an address a Ray is started on this machine."
    )
