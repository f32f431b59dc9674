"""Engines: how the shards of a job are done, in processes of this machine or on Ray.

>>> import headtrace
>>> place = ModelPlace.of(headtrace.load("builtin"))
>>> job = ShardJob("headtrace.runs.work:open_work", {"url": "runs/ioi", "model": place.options(), "tracer": {}})
>>> place.load()
Model('builtin', ...)

A job is plain data: it names a function that opens it, and its arguments. What that function returns does one shard: it
takes the shard's number, writes the result where all can see it, and returns a line of text. Runs open a tracer
(`headtrace.runs.work`), scans of a corpus a reader (`headtrace.interpret.scan_run`).

*Processes* of this machine live no longer than the process that started them. A worker is this module as a program: it
reads numbers of shards as lines from its standard input, and writes the answer for each as a line of JSON. When its
input ends, because the process at the other end has ended, however it ended, so does the worker, at once. A worker that
dies itself is started again, and its shard is done again; a shard that kills its workers again and again is an error.
Each worker has one thread, so that results do not depend on how many there are.

*Ray Data* maps shard numbers to answers, with a class that holds the opened job. Scheduling, retries and the number of
workers when nodes come and go are Ray's. A worker that dies loses at most its current shard, which is done again
elsewhere. Without an address, Ray is started on this machine alone: on the loopback address, without dashboard, and
without sending usage statistics.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from headtrace.errors import HeadtraceError, InputError
from headtrace.lazy import require_ray
from headtrace.runs.store import StoreError

if TYPE_CHECKING:
    from headtrace.models import Model

Engine = Literal["local", "ray"]
Shard = Callable[[int], str]
TRIES = 3
"""How often a shard is begun, when its workers die."""
RAY_TIMEOUT = 5.0
"""Seconds in which a Ray address must accept a connection."""
_OBJECT_STORE = 100 * 1024 * 1024
"""Bytes of a local Ray's object store: only shard numbers and answers go through it."""


@dataclass(frozen=True)
class ShardJob:
    """How a process opens the work."""

    opener: str
    """``module:function``."""
    options: dict[str, Any]
    """Its keyword arguments, as JSON has them."""

    def open(self) -> Shard:
        module, _, name = self.opener.partition(":")
        return getattr(import_module(module), name)(**self.options)


@dataclass(frozen=True)
class ModelPlace:
    """A model as other processes find it."""

    place: str
    """The name or place to load it from."""
    name: str
    revision: str | None
    dtype: str
    device: str
    weights_sha256: str
    computation_sha256: str | None = None
    device_map: dict[str, int | str] | None = None
    """Of a model that is spread over devices, where its parts are."""

    @classmethod
    def of(cls, model: Model) -> ModelPlace:
        from headtrace.models.loading import loadable_place

        place = loadable_place(model.name, model.revision)
        read_from = str(model.hf.config.name_or_path or "")
        if place is None and os.path.isdir(read_from):  # given as a module, with a name of its own
            place = os.path.abspath(read_from)
        if place is None:
            raise InputError(
                f"The model {model.name!r} was made in this process and has no name or folder that a worker could load "
                "it from. Save it (model.hf.save_pretrained(folder), and its tokenizer), load that folder with "
                "headtrace.load, or work in this process: engine='local' without workers."
            )
        return cls(
            place=place,
            name=model.name,
            revision=model.revision,
            dtype=model.own_dtype,
            device="cpu" if model.device_map is None and model.device.type == "cpu" else "auto",
            weights_sha256=model.weights_sha256,
            computation_sha256=model.computation_sha256,
            device_map=model.device_map,
        )

    def options(self) -> dict[str, Any]:
        return asdict(self)

    def load(self) -> Model:
        """The model, where a worker runs; an error if it is another one there."""
        from headtrace.models import load
        from headtrace.models.integrity import difference

        model = load(
            self.place,
            revision=self.revision,
            dtype=self.dtype,
            device=self.device,
            device_map=self.device_map,
        )
        model.name = self.name  # as results name it, wherever a worker finds it
        other = difference(self, model)
        if other is not None:
            raise InputError(
                f"{self.place!r} is another model where the worker runs ({socket.gethostname()}) than the one that the "
                f"work was started with, which has {other}. Save the model in a folder that all nodes see, and load it "
                "from there."
            )
        return model


@dataclass(frozen=True)
class Engines:
    """Which workers there are: none but this process, several on this machine, or those of a Ray."""

    engine: Engine = "local"
    workers: int | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if self.engine not in get_args(Engine):
            choices = " or ".join(map(repr, get_args(Engine)))
            raise InputError(f"engine={self.engine!r}: choose {choices}.")
        if self.engine == "ray":
            require_ray()
        if self.engine == "local" and self.ray_address is not None:
            raise InputError("ray_address belongs to engine='ray': the local engine has its own processes.")
        if self.workers is not None and self.workers < 1:
            raise InputError(f"workers={self.workers}: at least one is needed.")

    @property
    def here(self) -> bool:
        """Whether this process does all the work."""
        return self.engine == "local" and self.workers is None

    def answers(self, job: ShardJob, shards: Sequence[int]) -> Iterator[str]:
        """Do shards with several workers, and yield the answer of each when it is there: in whatever order."""
        if self.engine == "ray":
            return work_with_ray(job, shards, self.workers, self.ray_address)
        return work_in_processes(job, shards, self.workers or 1)


class Worker:
    """Opens a job in its own process, and does the shards whose numbers it is given."""

    def __init__(self, job: ShardJob) -> None:
        self.problem = ""
        try:
            self.shard = job.open()
        except HeadtraceError as error:  # the same on every worker: reported once, not tried again
            self.problem = str(error)

    def do(self, shard: int) -> tuple[str, str]:
        """The answer, or the problem."""
        if self.problem:
            return "", self.problem
        try:
            return self.shard(shard), ""
        except HeadtraceError as error:
            return "", str(error)


# -- processes of this machine -------------------------------------------------------------------------------------


def work_in_processes(job: ShardJob, shards: Sequence[int], workers: int) -> Iterator[str]:
    """Do shards in processes of this machine, and yield the answer of each when it is there."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for shard in shards:
        waiting.put(shard)
    answers: queue.SimpleQueue[str | StoreError] = queue.SimpleQueue()
    threads = [_WorkerThread(job, waiting, answers) for _ in range(min(workers, len(shards)))]
    try:
        for thread in threads:
            thread.start()
        for _ in shards:
            answer = answers.get()
            if isinstance(answer, StoreError):
                raise answer
            yield answer
    finally:
        for thread in threads:
            thread.end()
        for thread in threads:
            thread.join()


class _WorkerThread(threading.Thread):
    """Starts a worker process, gives it shards one by one, and starts another if it dies."""

    def __init__(
        self, job: ShardJob, waiting: queue.SimpleQueue[int], answers: queue.SimpleQueue[str | StoreError]
    ) -> None:
        super().__init__(daemon=True)
        self.job, self.waiting, self.answers = job, waiting, answers
        self.process: subprocess.Popen[str] | None = None
        self.ended = False
        self.changing = threading.Lock()

    def run(self) -> None:
        # What libraries print to standard error is shown only if a worker dies.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            with suppress(queue.Empty):
                while not self.ended:
                    self._do(self.waiting.get_nowait(), log)
            self.end()

    def end(self) -> None:
        with self.changing:
            self.ended = True
            if self.process is not None:
                self.process.kill()
                self.process.wait()

    def _do(self, shard: int, log: TextIO) -> None:
        code = None
        for _ in range(TRIES):
            line = self._send(shard, log)
            if self.ended:
                return
            if line:
                answer, problem = json.loads(line)
                self.answers.put(StoreError(problem) if problem else answer)
                return
            assert self.process is not None
            self.process.kill()  # its pipe is closed: if it has not ended, it ends now
            code = self.process.wait()
        log.seek(0)
        last = ["", *log.read().strip().splitlines()][-1]
        how = f"ended with {code}" if code is None or code >= 0 else f"killed by signal {-code}"
        how += f"; {last}" if last else ", without any output; is there enough memory for this many workers?"
        self.answers.put(StoreError(f"Shard {shard}: {TRIES} workers died of it (the last: {how})."))

    def _send(self, shard: int, log: TextIO) -> str:
        """The answer of a worker to a shard; empty if it dies first."""
        with self.changing:
            if self.ended:
                return ""
            if self.process is None or self.process.poll() is not None:
                self.process = _start_worker(self.job, log)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.write(f"{shard}\n")
            self.process.stdin.flush()
            return self.process.stdout.readline()
        return ""


def _start_worker(job: ShardJob, log: TextIO) -> subprocess.Popen[str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-m", "headtrace.runs.engines", json.dumps(asdict(job))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        encoding="utf-8",
        **_own_process_group(),
    )


def _own_process_group() -> dict[str, Any]:
    """An interrupt from the keyboard is not for workers: the process that started them handles it."""
    windows = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", None)
    return {"start_new_session": True} if windows is None else {"creationflags": windows}


def _worker_main(job: ShardJob) -> None:
    """The program of a worker."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    shards: queue.SimpleQueue[int] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            shards.put(int(line))
        os._exit(0)  # the process that started it has ended: half a shard is of no use

    threading.Thread(target=listen, daemon=True).start()
    worker = Worker(job)
    while True:
        print(json.dumps(worker.do(shards.get())), file=answers, flush=True)


# -- Ray Data ------------------------------------------------------------------------------------------------------


class ShardWorker(Worker):
    """A worker in a process of Ray's, which gives it the numbers of shards in batches."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        answers = [self.do(int(shard)) for shard in batch["shard"]]
        return {"answer": [a for a, _ in answers], "problem": [b for _, b in answers]}


def work_with_ray(
    job: ShardJob, shards: Sequence[int], workers: int | None, address: str | None
) -> Iterator[str]:
    """Do shards on Ray, and yield the answer of each when it is there.

    Ray Data restarts workers that died, and does their shards again, as often as it takes. On a cluster it chooses how
    many there are, unless ``workers`` is given.
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
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray: Any = import_module("ray")
    import_module("ray.data")
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if ray.is_initialized():
        yield ray
        return
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        how |= {"address": "local", "num_cpus": workers, "include_dashboard": False}
        how |= {"object_store_memory": _OBJECT_STORE, "_node_ip_address": "127.0.0.1"}
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # the same is in its log files
    else:
        how["address"] = address
    try:
        _require_listener(address)
        ray.init(**how)
    except InputError:
        raise
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"No Ray answers at {address or 'local'!r} ({reason.rstrip('.')}). Is it started (`ray start --head`), and "
            "is the address right? Without an address Ray is started on this machine."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_listener(address: str | None) -> None:
    """Ray would try for minutes to reach an address where nothing listens."""
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(
            f"The Ray address {address!r} is not one: expected host:port, such as 10.0.0.5:6379, or auto."
        )
    socket.create_connection((host, int(port)), timeout=RAY_TIMEOUT).close()


if __name__ == "__main__":
    _worker_main(ShardJob(**json.loads(sys.argv[1])))
