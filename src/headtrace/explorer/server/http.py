"""HTTP around the routes: how errors are answered, and the checks that every request passes first.

Every status from 400 on has an `ErrorView`. The checks keep pages of other sites from using this server through the
browser of whoever runs it: their requests have a foreign ``Origin`` or ``Sec-Fetch-Site``; and where such a site has
its own name point to this machine (DNS rebinding), a foreign ``Host``. Where other machines can reach the server,
requests also need its token.

There are as many connections as the machine has handles for, and none waits for ever: a client that opens connections
and never finishes a request must not keep others out. A request's head has to arrive within some seconds; where there
are too many connections, the one that has waited longest for its head makes room. A refused connection leaves no line
in the log.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import traceback
from collections.abc import Callable, Iterable, Mapping
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any, ClassVar
from urllib.parse import parse_qs

import h11
import psutil
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from headtrace.errors import HeadtraceError
from headtrace.explorer.panels.session import NotFoundError, Settings
from headtrace.explorer.server.jobs import QueueFullError, public_message

# -- errors ----------------------------------------------------------------------------------------------------


class ErrorView(BaseModel):
    """What went wrong: a code for programs, and a message that says what was given, what was expected, what to do."""

    code: str
    message: str


class RefusedError(HeadtraceError):
    """A request that is answered with a given status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code = status, code
        super().__init__(message)


def refusal(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as a response. In ASCII: text from a client may hold unpaired surrogates."""
    content = json.dumps(ErrorView(code=code, message=message).model_dump())
    return Response(content, status, dict(headers or {}), "application/json")


def failure(error: Exception) -> Response:
    """The response to a request that raised an error."""
    match error:
        case RefusedError():
            return refusal(error.status, error.code, str(error))
        case NotFoundError():
            return refusal(404, error.code, str(error))
        case QueueFullError():
            return refusal(429, "busy", str(error), {"Retry-After": str(error.retry_after)})
        case HeadtraceError():
            return refusal(422, "input", str(error))
        case RequestValidationError():
            return refusal(422, "input", _invalid_fields(error))
        case HTTPException(status_code=404):
            return refusal(404, "not_found", "There is nothing at this address.", error.headers)
        case HTTPException(status_code=405):
            message = "This address does not take requests of this method; the header Allow says which."
            return refusal(405, "method", message, error.headers)
        case HTTPException():
            return refusal(error.status_code, "request", str(error.detail), error.headers)
        case MemoryError():
            return refusal(422, "memory", public_message(error))
        case _:
            return refusal(500, "internal", public_message(error))


async def handle(_: Request, error: Exception) -> Response:
    return failure(error)


def _invalid_fields(error: RequestValidationError) -> str:
    """What is wrong with a request, field by field, without repeating all of it."""
    parts: list[str] = []
    for each in error.errors()[:5]:
        place = [str(part)[:80] for part in each["loc"] if part not in ("body", "query", "path")]
        parts.append(f"{'.'.join(place) or 'body'}: {each['msg']}")
    more = len(error.errors()) - len(parts)
    return f"The request is not as expected. {'; '.join(parts)}{f'; and {more} more' if more > 0 else ''}."


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI schema: a route's own errors, and those of any request."""
    common = (400, 401, 403, 413, 415, 422, 429, 500, 503)
    return {
        status: {"model": ErrorView, "description": _DESCRIPTIONS[status]}
        for status in sorted({*common, *statuses})
    }


_DESCRIPTIONS = {
    400: "No request that can be read",
    401: "The token is missing",
    403: "From another site",
    404: "There is no such thing, or it is not kept any more",
    408: "The body did not come in time",
    409: "Not yet: the job has not ended",
    413: "The body is too large",
    415: "The body is not JSON",
    422: "What was requested cannot be done; the message says why",
    429: "Too many at once; Retry-After says when to try again",
    500: "A mistake of the server",
    503: "The server is stopping",
}

# -- checks ----------------------------------------------------------------------------------------------------

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
SAFE = ("GET", "HEAD", "OPTIONS")


class Guard:
    """The application behind its checks: host, origin, token, number of requests, size and type of the body.

    Adds the headers that every response has, and answers errors that nobody expected.
    """

    def __init__(self, app: ASGIApp, settings: Settings, log: Callable[[str], None]) -> None:
        self.app, self.settings, self.log = app, settings, log
        self.token = None if settings.token is None else TokenCheck(settings.token)
        self.requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets here
            await send({"type": "websocket.close", "code": 1000})
            return
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            refused = self.refused(scope)
            if refused is not None:
                await refused(scope, receive, send_with_headers)
                return
            self.requests += 1
            try:
                await self.checked_body(scope, receive, send_with_headers)
            finally:
                self.requests -= 1
        except Exception as error:
            self.log("".join(traceback.format_exception(error)))
            if not started:
                await failure(error)(scope, receive, send_with_headers)

    def refused(self, scope: Scope) -> Response | None:
        """The response to a request that goes no further; None if it may."""
        headers = Headers(scope=scope)
        if not host_allowed(headers.getlist("host"), self.settings.hosts, not self.settings.loopback):
            message = "The server is not known under this host name. Open the address that it printed when it started."
            return refusal(403, "host", message)
        if not origin_allowed(scope):
            return refusal(403, "origin", "Requests of pages from other sites are not answered.")
        if self.token is not None:
            answer = self.token.answer(scope)
            if answer is not None:
                return answer
        if self.requests >= self.settings.max_requests:
            message = f"{self.requests} requests are being answered already. Try again in a second."
            return refusal(429, "busy", message, {"Retry-After": "1"})
        return None

    async def checked_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, which is limited in size and time and must be JSON, before the application runs."""
        if scope["method"] in SAFE:
            await self.app(scope, receive, send)
            return
        headers, most, seconds = Headers(scope=scope), self.settings.body_bytes, self.settings.body_seconds
        length, body = headers.get("content-length", "0"), None
        if length.isascii() and length.isdigit() and len(length) < 20 and int(length) <= most:
            try:
                body = await asyncio.wait_for(_read(receive, most), seconds)
            except asyncio.TimeoutError:
                message = f"The body did not come within {seconds:g} s."
                await refusal(408, "timeout", message, {"Connection": "close"})(scope, receive, send)
                return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body is None:
            message = f"The body is larger than {most} bytes. Send a shorter prompt."
            await refusal(413, "body", message, {"Connection": "close"})(scope, receive, send)
        elif body and kind != "application/json":
            message = "Bodies are JSON here: send them with Content-Type: application/json."
            await refusal(415, "body", message)(scope, receive, send)
        else:
            await self.app(scope, _replayed(body, receive), send)


async def _read(receive: Receive, most: int) -> bytes | None:
    """The whole body; None if it is too large."""
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Receive a body that was read already, and then what follows it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


def host_allowed(given: list[str], names: Iterable[str] = (), any_address: bool = False) -> bool:
    """Whether the Host headers of a request name this machine: by a loopback name, a given one, or an address.

    An address cannot be made to point elsewhere, a name can: with ``any_address``, which needs a token, any address is
    accepted, else those of the loopback.

    >>> [host_allowed([host]) for host in ("LocalHost:8000", "[::1]:8000", "127.0.0.1", "10.0.0.7", "example.org")]
    [True, True, True, False, False]
    """
    if len(given) != 1:
        return False
    host = given[0].lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].removesuffix(".")
    try:
        address = ip_address(name)
    except ValueError:
        return name in {"localhost", *(each.lower() for each in names)}
    return any_address or address.is_loopback


def origin_allowed(scope: Scope) -> bool:
    """Whether a request comes from the explorer's own page; other sites may only link to the start page."""
    headers = Headers(scope=scope)
    if scope["method"] in SAFE and scope["path"] == "/":
        return True
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    origin, host = headers.get("origin"), headers.get("host", "").lower()
    return origin is None or origin.lower() in (f"http://{host}", f"https://{host}")


class TokenCheck:
    """Requests need the token: in a header (``Authorization: Bearer ...``), or once in the address that the server
    prints, which sets a cookie in its place that scripts cannot read and other sites cannot send."""

    def __init__(self, token: str) -> None:
        self.token, self.session = token, secrets.token_urlsafe(32)

    def answer(self, scope: Scope) -> Response | None:
        """The response that sets the cookie, or that refuses; None for a request with the token or the cookie."""
        server = scope.get("server")
        cookie_name = (
            f"headtrace-session-{server[1] if server else 0}"  # browsers share cookies between ports
        )
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        start = scope["path"] == "/" and scope["method"] == "GET"
        if start and len(given) == 1 and same(given[0], self.token):
            # A page that goes on to the start page: within the site, the browser sends the cookie along.
            page = '<!doctype html><meta http-equiv="refresh" content="0;url=/"><title>headtrace</title>'
            answer = Response(page, media_type="text/html")
            answer.set_cookie(cookie_name, self.session, path="/", httponly=True, samesite="strict")
            return answer
        headers = Headers(scope=scope)
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and same(bearer.strip(), self.token):
            return None
        cookies = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            cookies.clear()
        cookie = cookies.get(cookie_name)
        if cookie is not None and same(cookie.value, self.session):
            return None
        message = "This needs the token that the server printed when it started: open the address it printed."
        return refusal(401, "token", message, {"WWW-Authenticate": "Bearer"})


def same(given: str, expected: str) -> bool:
    """Whether two strings are equal, in a time that does not depend on where they differ.

    >>> same("guess", "secret"), same("secret", "secret")
    (False, True)
    """
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


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
