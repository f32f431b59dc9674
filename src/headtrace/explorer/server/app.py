"""The explorer's server: an ASGI application, and how it is bound to a port and stopped.

app = create_app([headtrace.load("builtin")])
uvicorn.run(app)                              # or, with everything around it: headtrace serve builtin
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING
from urllib.parse import quote

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

import headtrace
from headtrace.errors import HeadtraceError, InputError
from headtrace.explorer.panels import Session, Settings
from headtrace.explorer.server.http import (
    BACKLOG,
    Guard,
    bounded_protocol,
    handle,
    most_connections,
    quiet_about_handles,
)
from headtrace.explorer.server.jobs import Compute
from headtrace.explorer.server.routes import GRACE_SECONDS, router, static_files, static_routes

if TYPE_CHECKING:
    from headtrace.explorer.panels.circuits import RunSource
    from headtrace.explorer.panels.session import ChannelEvidence
    from headtrace.models import Model

SHORTEST_TOKEN = 16
_LOGGER = logging.getLogger("headtrace")


def create_app(
    models: Model | Sequence[Model],
    settings: Settings | None = None,
    *,
    atlas: ChannelEvidence | None = None,
    run: RunSource | None = None,
    log: Callable[[str], None] = _LOGGER.error,
) -> FastAPI:
    """An application that serves one model, or two side by side; ``log`` receives the server's own errors."""
    session = Session(
        list(models) if isinstance(models, Sequence) else [models], settings, atlas=atlas, run=run
    )
    # Clicks are answered while a circuit is traced: what takes a while has a queue and a worker of its own.
    lanes = [Compute(session.settings.max_waiting, session.settings.kept_jobs, log) for _ in range(2)]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        for lane in lanes:
            lane.start()
        try:
            yield
        finally:
            for lane in lanes:
                lane.stop()

    app = FastAPI(
        title="headtrace explorer",
        version=headtrace.__version__,
        summary="Why does this attention head attend here? The API behind `headtrace serve`.",
        openapi_url="/api/openapi.json",
        docs_url=None,  # those pages load scripts from other sites
        redoc_url=None,
        lifespan=lifespan,
        middleware=[Middleware(Guard, settings=session.settings, log=log)],
    )
    app.state.session, (app.state.compute, app.state.quick) = session, lanes
    for kind in (HeadtraceError, RequestValidationError, HTTPException, MemoryError):
        app.add_exception_handler(kind, handle)
    app.include_router(router)
    app.include_router(static_routes(static_files()))
    return app


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, so that a bad address is reported before a model is loaded. Nobody can connect until it is
    served."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"--host {host!r}: there is no such name or address here ({error}). Give 127.0.0.1, or an address of this "
            "machine."
        ) from None
    bound = socket.socket(family, kind, protocol)
    try:
        # A port that was used a moment ago is free. On Windows SO_REUSEADDR would let two programs share one.
        how = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
        bound.setsockopt(socket.SOL_SOCKET, how, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        match error.errno:
            case errno.EADDRINUSE:
                message = f"Port {port} is in use by another program. Give another one, or --port 0 for any free one."
            case errno.EACCES:
                message = (
                    f"Port {port} may not be used by ordinary programs. Give one from 1024 on, or --port 0."
                )
            case errno.EADDRNOTAVAIL:
                message = f"--host {host!r} is no address of this machine. Give 127.0.0.1, or one that is."
            case _:
                message = f"The server cannot use {host!r}, port {port}: {error.strerror or error}."
        raise InputError(message) from None
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine can reach a socket."""
    return _address(bound).is_loopback


def own_names(host: str) -> tuple[str, ...]:
    """Names under which other machines reach this one."""
    return tuple({name.lower() for name in (host, socket.gethostname(), socket.getfqdn()) if name})


def url(bound: socket.socket, token: str | None = None) -> str:
    """What to open in a browser. A server on all addresses is named by its machine."""
    found, port = _address(bound), bound.getsockname()[1]
    host = f"[{found}]" if found.version == 6 else str(found)
    if found.is_unspecified:
        host = socket.gethostname()
    return f"http://{host}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")


def _address(bound: socket.socket) -> IPv4Address | IPv6Address:
    return ip_address(bound.getsockname()[0].partition("%")[0])


def check_token(token: str | None) -> None:
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise InputError(
            f"--token: expected at least {SHORTEST_TOKEN} printable ASCII characters, so that it cannot be guessed. "
            "Leave it out, and one is made."
        )


class Server(uvicorn.Server):
    """A server that cancels all computation when it stops, so that no client waits for an answer in vain."""

    def __init__(self, app: FastAPI) -> None:
        settings: Settings = app.state.session.settings
        most = most_connections(settings.max_connections)
        config = uvicorn.Config(
            app,
            http=bounded_protocol(most, settings.head_seconds),
            backlog=BACKLOG,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_SECONDS,
            ws="none",
        )
        super().__init__(config)
        self.lanes: tuple[Compute, Compute] = app.state.compute, app.state.quick

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(quiet_about_handles)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for lane in self.lanes:
            lane.cancel_all()
        await super().shutdown(sockets)
