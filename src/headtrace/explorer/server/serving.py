"""From an application to a server on a port: the socket, the address that is printed, and a clean end."""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import quote

import uvicorn

from headtrace.errors import InputError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from headtrace.explorer.server.jobs import Compute

LONGEST_END = 5
"""Seconds that a server that is stopping waits for answers under way."""
SHORTEST_TOKEN = 16


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that what is wrong with an address is said before a model is loaded. Nobody can
    connect to it until it is served."""
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
        # A port that was used a moment ago is free. On Windows the same word would let two programs share one.
        how = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
        bound.setsockopt(socket.SOL_SOCKET, how, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise InputError(_refused(host, port, error)) from None
    return bound


def _refused(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"Port {port} is in use by another program. Give another one, or --port 0 for any that is free."
        case errno.EACCES:
            return f"Port {port} may not be used by ordinary programs. Give one from 1024 on, or --port 0."
        case errno.EADDRNOTAVAIL:
            return f"--host {host!r} is no address of this machine. Give 127.0.0.1, or one that is."
        case _:
            return f"The server cannot use {host!r}, port {port}: {error.strerror or error}."


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine can reach a socket."""
    return ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def own_names(host: str) -> tuple[str, ...]:
    """Names under which this machine is reached from others."""
    return tuple({name.lower() for name in (host, socket.gethostname(), socket.getfqdn()) if name})


def address(bound: socket.socket, token: str | None = None) -> str:
    """What to open in a browser. A server on all addresses goes by the name of the machine."""
    found, port = ip_address(bound.getsockname()[0].partition("%")[0]), bound.getsockname()[1]
    host = (
        socket.gethostname() if found.is_unspecified else f"[{found}]" if found.version == 6 else str(found)
    )
    return f"http://{host}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")


def check_token(token: str | None) -> None:
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise InputError(
            f"--token: expected at least {SHORTEST_TOKEN} printable ASCII characters, so that it cannot be guessed. "
            "Leave it out, and one is made."
        )


class Server(uvicorn.Server):
    """Stops computing when it is told to stop, so that nobody waits for an answer that will not come."""

    def __init__(self, app: FastAPI) -> None:
        config = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            timeout_graceful_shutdown=LONGEST_END,
            ws="none",
        )
        super().__init__(config)
        self.compute: Compute = app.state.compute

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.compute.cancel_all()
        await super().shutdown(sockets)
