"""One worker that computes, a bounded queue before it, and jobs that say how far they are.

>>> compute = Compute(max_waiting=4)
>>> compute.start()
>>> job = compute.submit(lambda job: 6 * 7)
>>> job.wait()
>>> job.state, job.result
('done', 42)
>>> compute.stop()

A job is stopped by asking it to: it looks whenever it reports progress (`Job.check` raises `Cancelled` there).
What a job has to tell is kept as the latest event of each name, numbered: a listener that comes late, or that reads
slowly, hears everything that still counts, in order, and nothing piles up.
"""

from __future__ import annotations

import json
import secrets
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from threading import Condition, Event, Lock, Thread
from typing import Any, Generic, TypeVar

from headtrace.errors import HeadtraceError
from headtrace.explorer.server.schemas import JobState, JobView

T = TypeVar("T")

FINAL = ("done", "failed", "cancelled")
_UNEXPECTED = "The server made a mistake here; what it was is shown in the terminal where it runs."


class Cancelled(Exception):
    """Raised inside a job that is to stop."""


class QueueFullError(HeadtraceError):
    """As many computations wait as may."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        self.retry_after = retry_after
        super().__init__(
            f"{waiting} computations are waiting already, and there is one worker. Try again in {retry_after} s."
        )


@dataclass(frozen=True)
class Told:
    """Something that a job told its listeners: JSON under a name."""

    number: int
    name: str
    data: str


class Job(Generic[T]):
    """One computation: its state, its result, what it has told."""

    def __init__(self, work: Callable[[Job[T]], T]) -> None:
        self.id = secrets.token_hex(8)
        self.state: JobState = "queued"
        self.ahead = self.done = self.of = 0
        self.result: T | None = None
        self.error: Exception | None = None
        self._work: Callable[[Job[T]], T] | None = work
        self._told, self._count = dict[str, Told](), 0
        self._lock, self._cancelling, self._ended = Lock(), Event(), Event()
        self._wakers: set[Callable[[], None]] = set()

    # -- what the work itself uses -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `Cancelled` if the job is to stop."""
        if self._cancelling.is_set():
            raise Cancelled

    def progress(self, done: int, of: int) -> None:
        self.check()
        self.done, self.of = done, of
        self.tell("progress", json.dumps({"done": done, "of": of}))

    def tell(self, name: str, data: str) -> None:
        """Let listeners know; what was told under this name before is forgotten."""
        with self._lock:
            self._note(name, data)
            wakers = tuple(self._wakers)
        for wake in wakers:
            wake()

    def _note(self, name: str, data: str) -> None:
        self._count += 1
        self._told[name] = Told(self._count, name, data)

    # -- what others see ---------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> None:
        self._ended.wait(seconds)

    def told(self, after: int = 0) -> list[Told]:
        """What was told since, in order."""
        with self._lock:
            return sorted((t for t in self._told.values() if t.number > after), key=lambda told: told.number)

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Generator[None]:
        """While the block runs, ``wake`` is called (in any thread) whenever there is something new."""
        with self._lock:
            self._wakers.add(wake)
        try:
            yield
        finally:
            with self._lock:
                self._wakers.discard(wake)

    def view(self) -> JobView:
        ahead = self.ahead if self.state == "queued" else 0
        return JobView(
            id=self.id, state=self.state, ahead=ahead, done=self.done, of=self.of, error=self._message()
        )

    def _message(self) -> str | None:
        return None if self.error is None else told_to_clients(self.error)

    # -- what the queue does with it ---------------------------------------------------------------------------

    def move(self, ahead: int) -> None:
        self.ahead = ahead
        self.tell("queued", json.dumps({"ahead": ahead}))

    def cancel(self) -> None:
        self._cancelling.set()

    def run(self, log: Callable[[str], None]) -> None:
        work, self.state = self._work, "running"
        self.move(0)
        try:
            self.check()
            assert work is not None
            self.result = work(self)
            self.check()
        except Cancelled:
            self.finish("cancelled")
        except Exception as error:
            if not isinstance(error, (HeadtraceError, MemoryError)):
                log("".join(traceback.format_exception(error)))
            # Its frames hold recordings, and a failed job is kept for a while.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            self.error = error
            self.finish("failed")
        else:
            self.finish("done")

    def finish(self, state: JobState) -> None:
        """The last event, together with the state; a circuit told under way does not count any more."""
        data = "{}" if self.error is None else json.dumps({"error": self._message()})
        if state == "done" and isinstance(self.result, Finished):
            data = self.result.told
        self._work = None
        if state != "done":
            self.result = None
        with self._lock:
            self._told.pop("partial", None)
            self._note(state, data)
            self.state = state
            self._ended.set()
            wakers = tuple(self._wakers)
        for wake in wakers:
            wake()


@dataclass(frozen=True)
class Finished:
    """A result that listeners are told, as JSON, and what is kept of it."""

    told: str
    kept: Any = None


def told_to_clients(error: Exception) -> str:
    """What a client may know of an error: its own mistakes in full, the server's not at all."""
    if isinstance(error, HeadtraceError):
        return str(error)
    if isinstance(error, MemoryError):
        return "There is not enough memory for this. Try a shorter prompt."
    return _UNEXPECTED


class Compute:
    """The worker and its queue: jobs in the order in which they came, one at a time."""

    def __init__(
        self, max_waiting: int, kept_jobs: int = 32, log: Callable[[str], None] = lambda _: None
    ) -> None:
        self.max_waiting, self.kept_jobs, self.log = max_waiting, kept_jobs, log
        self._waiting: deque[Job[Any]] = deque()
        self._running: Job[Any] | None = None
        self._kept: OrderedDict[str, Job[Any]] = OrderedDict()
        self._changed, self._stopping = Condition(), False
        self._seconds = 0.1
        """What a job took of late."""
        self._thread = Thread(target=self._serve, name="headtrace-compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """Cancel everything, and wait for the work under way to notice."""
        self.cancel_all()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def cancel_all(self) -> None:
        """From now on nothing is computed any more; whoever waits is told."""
        with self._changed:
            self._stopping = True
            waiting, running = [*self._waiting], self._running
            self._waiting.clear()
            self._changed.notify_all()
        if running is not None:
            running.cancel()
        for job in waiting:
            job.finish("cancelled")

    @property
    def stopping(self) -> bool:
        return self._stopping

    def submit(self, work: Callable[[Job[T]], T], *, keep: bool = False) -> Job[T]:
        """Put work into the queue; with ``keep`` it can be found again by its id."""
        job = Job(work)
        with self._changed:
            if self._stopping:
                job.finish("cancelled")
                return job
            if len(self._waiting) >= self.max_waiting:
                raise QueueFullError(len(self._waiting), self._retry_after())
            job.move(len(self._waiting) + (self._running is not None))
            self._waiting.append(job)
            if keep:
                self._keep(job)
            self._changed.notify()
        return job

    def find(self, id: str) -> Job[Any] | None:
        """A job that is kept."""
        with self._changed:
            return self._kept.get(id)

    def cancel(self, job: Job[Any]) -> None:
        """Stop a job: at once if it waits, else where it next reports progress."""
        job.cancel()
        with self._changed:
            waited = job in self._waiting
            if waited:
                self._waiting.remove(job)
                self._moved()
        if waited:
            job.finish("cancelled")

    # -- inside ------------------------------------------------------------------------------------------------

    def _retry_after(self) -> int:
        return min(60, max(1, ceil(self._seconds * len(self._waiting))))

    def _keep(self, job: Job[Any]) -> None:
        self._kept[job.id] = job
        ended = [each.id for each in self._kept.values() if each.ended]
        for id in ended[: max(0, len(self._kept) - self.kept_jobs)]:
            del self._kept[id]

    def _moved(self) -> None:
        running = self._running is not None
        for place, job in enumerate(self._waiting):
            if job.ahead != place + running:
                job.move(place + running)

    def _next(self) -> Job[Any] | None:
        with self._changed:
            self._running = None
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            if self._stopping:
                return None
            self._running = self._waiting.popleft()
            self._moved()
            return self._running

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            start = time.monotonic()
            job.run(self.log)
            self._seconds += (time.monotonic() - start - self._seconds) / 4
