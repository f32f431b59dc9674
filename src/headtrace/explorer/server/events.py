"""A job's events as a stream (server-sent events): everything that counts, in order, until the job has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headtrace.explorer.server.answers import refusal
from headtrace.explorer.server.jobs import FINAL, Job

QUIET = 15.0
"""Seconds after which a stream says that it is still there: a client that is gone shows then."""


class Listeners:
    """How many streams are open, of how many that may be."""

    def __init__(self, most: int) -> None:
        self.most, self.now = most, 0


class EventStream(Response):
    """The answer to a client that listens to a job, from after the event it heard last."""

    media_type = "text/event-stream"

    def __init__(self, job: Job[Any], listeners: Listeners, after: int = 0) -> None:
        super().__init__(headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.job, self.listeners, self.after = job, listeners, after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.listeners.now >= self.listeners.most:
            message = (
                f"{self.listeners.now} clients listen already. Ask for /api/jobs/{self.job.id} now and then."
            )
            await refusal(429, "busy", message, {"Retry-After": "5"})(scope, receive, send)
            return
        self.listeners.now += 1
        try:
            await until_gone(receive, self._send(send))
        finally:
            self.listeners.now -= 1

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for text in heard(self.job, self.after):
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def heard(job: Job[Any], after: int = 0) -> AsyncGenerator[str]:
    """The events of a job as they are sent, each with its number, so that a client can go on where it was."""
    with woken_by(job) as news:
        while True:
            news.clear()
            ended = job.ended
            for told in job.told(after):
                after = told.number
                yield f"id: {told.number}\nevent: {told.name}\ndata: {told.data}\n\n"
                ended |= told.name in FINAL
            if ended:
                return
            try:
                await asyncio.wait_for(news.wait(), QUIET)
            except asyncio.TimeoutError:
                yield ": still here\n\n"


async def finished(job: Job[Any]) -> None:
    """Wait for a job to end."""
    with woken_by(job) as news:
        while not job.ended:
            await news.wait()
            news.clear()


async def until_gone(receive: Receive, work: Any) -> bool:
    """Do something until the client goes away; whether it stayed to the end."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextmanager
def woken_by(job: Job[Any]) -> Generator[asyncio.Event]:
    """An event of this loop that is set whenever a job, in its own thread, has news."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop may be closed when a job ends
            loop.call_soon_threadsafe(news.set)

    with job.waking(wake):
        yield news
