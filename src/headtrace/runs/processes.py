"""Workers of the engine ``local``: processes of this machine, that live no longer than the one that started them.

A worker is this module as a program. It hears numbers of shards as lines on its standard input, and says what came of
each as a line of JSON. When its input ends, because the process at the other end has ended, however it ended, so does
the worker, at once. A worker that dies itself is started again, and its shard is done again; a shard that takes
workers with it time and again is an error. Each has one thread, so that results do not depend on how many there are.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TextIO

from headtrace.runs.jobs import Job, Worker
from headtrace.runs.store import StoreError

TRIES = 3
"""How often a shard is begun, when its workers die."""
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def work_in_processes(job: Job, shards: Sequence[int], workers: int) -> Iterator[str]:
    """Do shards in processes of this machine, and give the answer of each when it is there."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for shard in shards:
        waiting.put(shard)
    told: queue.SimpleQueue[str | StoreError] = queue.SimpleQueue()
    hands = [_Hand(job, waiting, told) for _ in range(min(workers, len(shards)))]
    try:
        for hand in hands:
            hand.start()
        for _ in shards:
            answer = told.get()
            if isinstance(answer, StoreError):
                raise answer
            yield answer
    finally:
        for hand in hands:
            hand.end()
        for hand in hands:
            hand.join()


class _Hand(threading.Thread):
    """Keeps one worker at work, from this side."""

    def __init__(
        self, job: Job, waiting: queue.SimpleQueue[int], told: queue.SimpleQueue[str | StoreError]
    ) -> None:
        super().__init__(daemon=True)
        self.job, self.waiting, self.told = job, waiting, told
        self.process: subprocess.Popen[str] | None = None
        self.ended = False
        self.changing = threading.Lock()

    def run(self) -> None:
        with tempfile.TemporaryFile(
            "w+", encoding="utf-8", errors="replace"
        ) as said:  # what libraries have to say; told only if a worker dies
            with suppress(queue.Empty):
                while not self.ended:
                    self._shard(self.waiting.get_nowait(), said)
            self.end()

    def end(self) -> None:
        with self.changing:
            self.ended = True
            if self.process is not None:
                self.process.kill()
                self.process.wait()

    def _shard(self, shard: int, said: TextIO) -> None:
        code = None
        for _ in range(TRIES):
            line = self._ask(shard, said)
            if self.ended:
                return
            if line:
                answer, problem = json.loads(line)
                self.told.put(StoreError(problem) if problem else answer)
                return
            assert self.process is not None
            self.process.kill()  # its pipe is closed: if it has not ended, it ends now
            code = self.process.wait()
        self.told.put(
            StoreError(f"Shard {shard}: {TRIES} workers died of it (the last: {_end(code, said)}).")
        )

    def _ask(self, shard: int, said: TextIO) -> str:
        """What a worker says of a shard; nothing if it dies first."""
        with self.changing:
            if self.ended:
                return ""
            if self.process is None or self.process.poll() is not None:
                self.process = _started(self.job, said)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.write(f"{shard}\n")
            self.process.stdin.flush()
            return self.process.stdout.readline()
        return ""


def _started(job: Job, said: TextIO) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(asdict(job))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        env={**os.environ, **_THREADS, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        encoding="utf-8",
        **_apart(),
    )


def _apart() -> dict[str, Any]:
    """An interrupt from the keyboard is not for workers, but for the one who can tell what to do next."""
    windows = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", None)
    return {"start_new_session": True} if windows is None else {"creationflags": windows}


def _end(code: int | None, said: TextIO) -> str:
    said.seek(0)
    last = ["", *said.read().strip().splitlines()][-1]
    how = f"ended with {code}" if code is None or code >= 0 else f"killed by signal {-code}"
    return f"{how}; {last}" if last else f"{how}, without a word; is there memory for so many?"


def _work(job: Job) -> None:
    """The program of a worker."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints does not speak to the one who listens
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    worker = Worker(job)
    while True:
        print(json.dumps(worker.do(asked.get())), file=answers, flush=True)


def _listen(asked: queue.SimpleQueue[int]) -> None:
    for line in sys.stdin:
        asked.put(int(line))
    os._exit(0)  # nobody is there any more: what is half done is of no use


if __name__ == "__main__":
    _work(Job(**json.loads(sys.argv[1])))
