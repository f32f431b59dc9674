"""What stands between the network and the routes: each a small ASGI application around the next.

A page of another site must not use this server through the browser of whoever runs it. Its requests carry a foreign
``Origin`` or ``Sec-Fetch-Site``; and where it has its own name point to this machine (DNS rebinding), a foreign
``Host``. All three are checked, whatever the route. Where other machines can reach the server, a token is needed.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import traceback
from collections.abc import Callable, Iterable
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headtrace.explorer.server.answers import failure, refusal
from headtrace.explorer.server.settings import Settings

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


def guarded(app: ASGIApp, settings: Settings, log: Callable[[str], None]) -> ASGIApp:
    """The application behind all of them; the last one listed sees a request first."""
    app = BodyLimit(app, settings.body_bytes, settings.body_seconds)
    app = RequestLimit(app, settings.max_requests)
    if settings.token is not None:
        app = TokenCheck(app, settings.token)
    app = OriginCheck(app)
    app = HostCheck(app, settings.hosts, any_address=not settings.loopback)
    return Outermost(app, log)


class Outermost:
    """Headers that every answer has, and an answer to errors that nobody expected."""

    def __init__(self, app: ASGIApp, log: Callable[[str], None]) -> None:
        self.app, self.log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            else:  # there are no web sockets here
                await send({"type": "websocket.close", "code": 1000})
            return
        begun = False

        async def with_headers(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            await self.app(scope, receive, with_headers)
        except Exception as error:
            self.log("".join(traceback.format_exception(error)))
            if not begun:
                await failure(error)(scope, receive, with_headers)


class HostCheck:
    """Only requests that name this machine: by a name of the loopback, one that was given, or an address."""

    def __init__(self, app: ASGIApp, names: Iterable[str] = (), *, any_address: bool = False) -> None:
        self.app, self.any_address = app, any_address
        self.names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self.allowed(Headers(scope=scope).getlist("host")):
            await self.app(scope, receive, send)
            return
        message = (
            "The server is not known under this host name. Open the address that it printed when it started."
        )
        await refusal(403, "host", message)(scope, receive, send)

    def allowed(self, given: list[str]) -> bool:
        """An address cannot be made to point elsewhere, a name can: with a token, any address will do."""
        if len(given) != 1:
            return False
        name = host_name(given[0])
        try:
            address = ip_address(name)
        except ValueError:
            return name in self.names
        return self.any_address or address.is_loopback


def host_name(host: str) -> str:
    """The name or address of a Host header, without its port.

    >>> host_name("LocalHost:8000"), host_name("[::1]:8000"), host_name("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


class OriginCheck:
    """Nothing is done for pages of other sites; they may only link to the start page."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self.allowed(scope):
            await self.app(scope, receive, send)
            return
        message = "Requests of pages from other sites are not answered."
        await refusal(403, "origin", message)(scope, receive, send)

    @staticmethod
    def allowed(scope: Scope) -> bool:
        headers = Headers(scope=scope)
        site = headers.get("sec-fetch-site", "none")
        if scope["method"] in SAFE and scope["path"] == "/":
            return True
        if site not in ("none", "same-origin"):
            return False
        origin = headers.get("origin")
        if origin is None:
            return True
        host = headers.get("host", "").lower()
        return origin.lower() in (f"http://{host}", f"https://{host}")


class TokenCheck:
    """Who does not know the token gets nothing.

    It comes in a header (``Authorization: Bearer ...``), or once in the address that the server prints: this is
    answered with a cookie that stands for it, which scripts cannot read and other sites cannot send.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token
        self.session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"] == "/" and scope["method"] == "GET" and self.exchanged(scope):
            await self.welcome(scope)(scope, receive, send)
        elif self.known(scope):
            await self.app(scope, receive, send)
        else:
            message = (
                "This needs the token that the server printed when it started: open the address it printed."
            )
            headers = {"WWW-Authenticate": "Bearer"}
            await refusal(401, "token", message, headers)(scope, receive, send)

    def known(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and same(given.strip(), self.token):
            return True
        cookies = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            return False
        cookie = cookies.get(self.name(scope))
        return cookie is not None and same(cookie.value, self.session)

    def exchanged(self, scope: Scope) -> bool:
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        return len(given) == 1 and same(given[0], self.token)

    def welcome(self, scope: Scope) -> Response:
        """A page that goes on to the start page: sent on by the site itself, the browser sends the cookie along."""
        page = '<!doctype html><meta http-equiv="refresh" content="0;url=/"><title>headtrace</title>'
        answer = Response(page, media_type="text/html")
        answer.set_cookie(self.name(scope), self.session, path="/", httponly=True, samesite="strict")
        return answer

    @staticmethod
    def name(scope: Scope) -> str:
        """Browsers keep the cookies of all ports of a host together."""
        server = scope.get("server")
        return f"headtrace-session-{server[1] if server else 0}"


def same(given: str, expected: str) -> bool:
    """Compared in a time that does not tell how much of it is right.

    >>> same("guess", "secret"), same("secret", "secret")
    (False, True)
    """
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


class RequestLimit:
    """So many requests at the same time."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most, self.now = app, most, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.now >= self.most:
            message = f"{self.now} requests are being answered already. Try again in a second."
            await refusal(429, "busy", message, {"Retry-After": "1"})(scope, receive, send)
            return
        self.now += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.now -= 1


class BodyLimit:
    """Bodies of so many bytes, however they are sent, and in JSON; read before anything else looks at them."""

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self.app, self.most, self.seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and len(length) < 20 and int(length) <= self.most:
            try:
                body = await asyncio.wait_for(self._read(receive), self.seconds)
            except asyncio.TimeoutError:
                message = f"The body did not come within {self.seconds:g} s."
                await refusal(408, "timeout", message, {"Connection": "close"})(scope, receive, send)
                return
        else:
            body = None
        if body is None:
            message = f"The body is larger than {self.most} bytes. Send a shorter prompt."
            await refusal(413, "body", message, {"Connection": "close"})(scope, receive, send)
        elif body and not _is_json(headers.get("content-type", "")):
            message = "Bodies are JSON here: send them with Content-Type: application/json."
            await refusal(415, "body", message)(scope, receive, send)
        else:
            await self.app(scope, _replayed(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None if it is too large."""
        parts, size = list[bytes](), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b""
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.most:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "application/json"


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A body that was read already, and afterwards whatever else there is to hear of the client."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
