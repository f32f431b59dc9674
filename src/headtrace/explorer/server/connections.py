"""Connections to the explorer's server: as many as the machine has handles for, and none that waits for ever.

A client that opens connections and never finishes a request must not keep others out. A request's head has to arrive
within some seconds; where there are too many connections, the one that has waited longest for its head makes room. A
refused connection leaves no line in the log.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
import psutil
from uvicorn.protocols.http.h11_impl import H11Protocol

BACKLOG = 16
"""Connections that are accepted at once, before any of them can be refused."""
RESERVED = 64
"""File handles for everything else: the model's files, pipes, the log."""
FEWEST = 8


def most_connections(wanted: int) -> int:
    """As many connections as are wanted, and as the limit on open files allows.

    >>> most_connections(4) == FEWEST, most_connections(100) <= 100
    (True, True)
    """
    limit: Any = getattr(psutil.Process(), "rlimit", None)
    if limit is None:  # only Linux and FreeBSD tell
        return max(FEWEST, wanted)
    soft, _ = limit(psutil.RLIMIT_NOFILE)
    if soft == psutil.RLIM_INFINITY:
        return max(FEWEST, wanted)
    return max(FEWEST, min(wanted, soft - RESERVED - 3 * BACKLOG))


def bounded_protocol(most: int, head_seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol for a server with at most so many connections, whose heads come within so many seconds."""

    class Bounded(BoundedProtocol):
        limit = most
        seconds = head_seconds
        waiting: ClassVar[dict[BoundedProtocol, None]] = {}

    return Bounded


class BoundedProtocol(H11Protocol):
    """One connection, which is closed if the head of a request does not come in time, or to make room for another."""

    limit: ClassVar[int]
    seconds: ClassVar[float]
    waiting: ClassVar[dict[BoundedProtocol, None]]
    """Connections of which no whole head has come, the longest first."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self.limit:
            oldest = next(iter(self.waiting))
            oldest.drop()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._arrived()
        elif self._timer is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection at once, without an answer."""
        self._arrived()
        self.connections.discard(self)
        self.transport.abort()

    def _wait(self) -> None:
        self.waiting[self] = None
        self._timer = self.loop.call_later(self.seconds, self.drop)

    def _arrived(self) -> None:
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def quiet_about_handles(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An exception handler for the loop: a connection for which there is no file handle is no error of the server."""
    if "out of system resource" not in context.get("message", ""):
        loop.default_exception_handler(context)
