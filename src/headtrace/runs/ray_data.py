"""The engine ``ray``: Ray Data maps shard numbers to shards, with a class that holds the model.

Scheduling, retries, and how many workers there are when nodes come and go, are Ray's. A worker loads the model by
its name, makes sure by the hash of its weights that it is the same one, and writes each shard by itself; what comes
back is the shard's record. A worker that dies takes at most the shard it is at with it, and that one is traced
again elsewhere.

Without an address a Ray is started on this machine alone: on the loopback address, without dashboard, and without the
statistics that Ray sends to its makers.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headtrace.errors import HeadtraceError, InputError
from headtrace.runs.manifest import (
    MANIFEST,
    Manifest,
    ShardRecord,
    read_manifest,
    read_record,
    shard_record,
)
from headtrace.runs.records import is_whole
from headtrace.runs.store import Store, StoreError, open_store

if TYPE_CHECKING:
    from headtrace.models import Model

ANSWERS_IN = 5.0
"""Seconds in which a Ray address must answer."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""How a client of HTTP/2 begins: a server answers with its settings at once."""
_OBJECTS = 100 * 1024 * 1024
"""Bytes of a local Ray's object store: only shard numbers and records go through it."""


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs to do its part, as plain data."""

    url: str
    model: str
    """The name or place to load the model from."""
    name: str
    revision: str | None
    dtype: str
    device: str
    weights_sha256: str
    tracer: dict[str, Any]

    @classmethod
    def of(cls, store: Store, manifest: Manifest, model: Model, made: dict[str, Any]) -> WorkerSpec:
        from headtrace.models.load import loadable_place

        place = loadable_place(model.name, model.revision)
        if place is None:
            raise InputError(
                f"The model {model.name!r} was made in this process and has no name or folder that a worker could load "
                "it from. Save it (model.hf.save_pretrained(folder), and its tokenizer), load that folder with "
                "headtrace.load, or use engine='local'."
            )
        if not isinstance(made["method"], str) or any(callable(value) for value in made.values()):
            raise InputError(
                "engine='ray' takes the method by its name, and numbers or text as its options: a worker makes its "
                "own. Use engine='local' for a method or a function made in this process."
            )
        return cls(
            url=store.url if store.folder is None else str(store.folder),
            model=place,
            name=model.name,
            revision=model.revision,
            dtype=manifest.model.dtype,
            device="cpu" if model.device.type == "cpu" else "auto",
            weights_sha256=manifest.model.weights_sha256,
            tracer=made,
        )


class ShardWorker:
    """Holds the model in a process of Ray's, and traces the shards whose numbers it is given."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.problem: str | None = None
        try:
            self._open(spec)
        except HeadtraceError as error:  # the same on every worker: told once, not tried again
            self.problem = str(error)

    def _open(self, spec: WorkerSpec) -> None:
        from headtrace.models import load
        from headtrace.runs.work import ShardWork
        from headtrace.tracing import Tracer

        store = open_store(spec.url)
        manifest = read_manifest(store.read(MANIFEST), store.url)
        model = load(spec.model, revision=spec.revision, dtype=spec.dtype, device=spec.device)
        model.name = spec.name  # as circuits are to call it, wherever a worker finds it
        if model.weights_sha256 != spec.weights_sha256:
            raise InputError(
                f"{spec.model!r} has other weights where the worker runs ({socket.gethostname()}) than the model that "
                "the run was started with. Save the model in a folder that all nodes see, and load it from there."
            )
        self.work = ShardWork(store, manifest, Tracer(model, **spec.tracer))

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        answers = [self._trace(int(shard)) for shard in batch["shard"]]
        return {"record": [a for a, _ in answers], "problem": [b for _, b in answers]}

    def _trace(self, shard: int) -> tuple[str, str]:
        if self.problem is not None:
            return "", self.problem
        try:
            return self._known(shard) or self.work.trace(shard).text(), ""
        except HeadtraceError as error:
            return "", str(error)

    def _known(self, shard: int) -> str | None:
        """The record of a shard that another worker wrote before it was lost."""
        try:
            record = read_record(self.work.store.read(shard_record(shard)))
        except FileNotFoundError:
            return None
        whole = record is not None and is_whole(self.work.store, record, self.work.manifest.tables)
        return record.text() if record is not None and whole else None


def trace_with_ray(
    spec: WorkerSpec, shards: Sequence[int], workers: int | None, address: str | None
) -> Iterator[ShardRecord]:
    """Trace shards on Ray, and give the record of each when it is there.

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
        traced = numbers.map_batches(
            ShardWorker,
            fn_constructor_kwargs={"spec": spec},
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(**pool),
            num_cpus=1,
        )
        for row in traced.iter_rows():
            if row["problem"]:
                raise StoreError(row["problem"])
            yield ShardRecord.model_validate_json(row["record"])


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
    try:
        ray = import_module("ray")
        import_module("ray.data")
    except ImportError:
        raise InputError(
            "engine='ray' needs Ray, which is not installed: pip install 'headtrace[ray]'. Or use engine='local'."
        ) from None
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
