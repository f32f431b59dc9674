"""One worker thread that computes, a bounded queue in front of it, and jobs that report their progress.

>>> compute = Compute(max_waiting=4)
>>> compute.start()
>>> job = compute.submit(lambda job: 6 * 7)
>>> job.wait()
>>> job.state, job.result
('done', 42)
>>> compute.stop()

Cancellation is cooperative: a job that is cancelled stops where it next reports progress or runs the model (`Job.check`
raises `Cancelled`). Of the events of a job only the latest of each name is kept, with its number: a listener that comes
late or reads slowly gets everything that is still current, in order, and events never pile up.
"""

from __future__ import annotations

import ctypes
import json
import secrets
import sys
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from threading import Condition, Event, Lock, Thread
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from headtrace.errors import HeadtraceError
from headtrace.progress import checking

T = TypeVar("T")

JobState = Literal["queued", "running", "done", "failed", "cancelled"]
FINAL = ("done", "failed", "cancelled")
_UNEXPECTED = "The server made a mistake here; what it was is shown in the terminal where it runs."


class Cancelled(Exception):
    """Raised inside a job that was cancelled."""


class QueueFullError(HeadtraceError):
    """The queue is full; ``retry_after`` is in seconds."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        self.retry_after = retry_after
        super().__init__(
            f"{waiting} computations are waiting already, and there is one worker. Try again in {retry_after} s."
        )


class JobView(BaseModel):
    """A computation that takes a while.

    Its events are at ``/api/jobs/{id}/events`` (server-sent): ``queued`` (ahead), ``progress`` (done, of), ``partial``
    (circuit), and at the end one of ``done`` (circuit, python), ``failed`` (error), ``cancelled``.
    """

    id: str
    state: JobState
    ahead: int = 0
    done: int = 0
    of: int = 0
    error: str | None = None


@dataclass(frozen=True)
class JobEvent:
    """An event for listeners: JSON data under a name, with its number."""

    number: int
    name: str
    data: str


@dataclass(frozen=True)
class Finished:
    """A result whose JSON is sent to listeners with the event ``done``."""

    json: str
    value: Any = None


def public_message(error: Exception) -> str:
    """What a client may know about an error: its own mistakes in full, those of the server not at all."""
    if isinstance(error, HeadtraceError):
        return str(error)
    if isinstance(error, MemoryError):
        return "There is not enough memory for this. Try a shorter prompt."
    return _UNEXPECTED


class Job(Generic[T]):
    """One computation: its state, its result, its events."""

    def __init__(self, work: Callable[[Job[T]], T]) -> None:
        self.id = secrets.token_hex(8)
        self.state: JobState = "queued"
        self.ahead = self.done = self.of = 0
        self.result: T | None = None
        self.error: Exception | None = None
        self._work: Callable[[Job[T]], T] | None = work
        self._events, self._count = dict[str, JobEvent](), 0
        self._lock, self._cancelling, self._ended = Lock(), Event(), Event()
        self._listeners: set[Callable[[], None]] = set()

    # -- what the work itself uses -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `Cancelled` if the job was cancelled."""
        if self._cancelling.is_set():
            raise Cancelled

    def progress(self, done: int, of: int) -> None:
        self.check()
        self.done, self.of = done, of
        self.publish("progress", json.dumps({"done": done, "of": of}))

    def publish(self, name: str, data: str) -> None:
        """Send an event to listeners; it replaces the previous one of this name."""
        with self._lock:
            self._count += 1
            self._events[name] = JobEvent(self._count, name, data)
            listeners = tuple(self._listeners)
        for notify in listeners:
            notify()

    # -- what others see ---------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> None:
        self._ended.wait(seconds)

    def events(self, after: int = 0) -> list[JobEvent]:
        """Events since the one with this number, in order."""
        with self._lock:
            found = [event for event in self._events.values() if event.number > after]
        return sorted(found, key=lambda event: event.number)

    @contextmanager
    def listening(self, notify: Callable[[], None]) -> Generator[None]:
        """While the block runs, ``notify`` is called (in any thread) whenever there is a new event."""
        with self._lock:
            self._listeners.add(notify)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.discard(notify)

    def view(self) -> JobView:
        ahead = self.ahead if self.state == "queued" else 0
        error = None if self.error is None else public_message(self.error)
        return JobView(id=self.id, state=self.state, ahead=ahead, done=self.done, of=self.of, error=error)

    # -- what the queue does with it ---------------------------------------------------------------------------

    def move(self, ahead: int) -> None:
        self.ahead = ahead
        self.publish("queued", json.dumps({"ahead": ahead}))

    def cancel(self) -> None:
        self._cancelling.set()

    def run(self, log: Callable[[str], None]) -> None:
        work, self.state = self._work, "running"
        self.move(0)
        try:
            self.check()
            assert work is not None
            with checking(self.check):
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
        """Set the final state together with the last event, which replaces any partial circuit."""
        data = "{}" if self.error is None else json.dumps({"error": public_message(self.error)})
        if state != "done":
            self.result = None
        elif isinstance(self.result, Finished):
            data = self.result.json
        self._work = None
        with self._lock:
            self._events.pop("partial", None)
            self._count += 1
            self._events[state] = JobEvent(self._count, state, data)
            self.state = state
            self._ended.set()
            listeners = tuple(self._listeners)
        for notify in listeners:
            notify()


def give_back() -> None:
    """Return freed memory to the system. The C library of Linux (glibc) keeps what lies between blocks that are in use:
    after a trace of a long prompt, gigabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class Compute:
    """The worker and its queue: jobs in the order in which they were submitted, one at a time."""

    def __init__(
        self, max_waiting: int, kept_jobs: int = 32, log: Callable[[str], None] = lambda _: None
    ) -> None:
        self.max_waiting, self.kept_jobs, self.log = max_waiting, kept_jobs, log
        self._waiting: deque[Job[Any]] = deque()
        self._running: Job[Any] | None = None
        self._kept: OrderedDict[str, Job[Any]] = OrderedDict()
        self._changed, self._stopping = Condition(), False
        self._seconds = 0.1
        """Running average of the duration of a job."""
        self.listeners = 0
        """Event streams that are open."""
        self._thread = Thread(target=self._serve, name="headtrace-compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """Cancel everything, and wait for the running job to notice."""
        self.cancel_all()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def cancel_all(self) -> None:
        """Cancel all jobs and accept no more; whoever waits for one is notified."""
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
    def n_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, work: Callable[[Job[T]], T], *, keep: bool = False) -> Job[T]:
        """Put work into the queue; with ``keep``, `find` finds the job by its id."""
        job = Job(work)
        with self._changed:
            if self._stopping:
                job.finish("cancelled")
                return job
            if len(self._waiting) >= self.max_waiting:
                seconds = min(60, max(1, ceil(self._seconds * len(self._waiting))))
                raise QueueFullError(len(self._waiting), seconds)
            job.move(len(self._waiting) + (self._running is not None))
            self._waiting.append(job)
            if keep:
                self._kept[job.id] = job
                ended = [each.id for each in self._kept.values() if each.ended]
                for id in ended[: max(0, len(self._kept) - self.kept_jobs)]:
                    del self._kept[id]
            self._changed.notify()
        return job

    def find(self, id: str) -> Job[Any] | None:
        """A kept job."""
        with self._changed:
            return self._kept.get(id)

    def cancel(self, job: Job[Any]) -> None:
        """Cancel a job: at once if it waits, else where it next reports progress."""
        job.cancel()
        with self._changed:
            waited = job in self._waiting
            if waited:
                self._waiting.remove(job)
                self._update_places()
        if waited:
            job.finish("cancelled")

    def _update_places(self) -> None:
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
            self._update_places()
            return self._running

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            start = time.monotonic()
            job.run(self.log)
            if job.id in self._kept:  # a trace or a mechanism: what is quick takes little
                give_back()
            self._seconds += (time.monotonic() - start - self._seconds) / 4
