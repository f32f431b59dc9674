"""The explorer's server as clients meet it: uvicorn in a thread, on a port of the loopback."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from headtrace.explorer.panels import Settings
from headtrace.explorer.server.app import Server, bind, create_app

LONG = 30.0
"""Seconds after which something that should come soon did not come."""


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Live:
    """A server that runs, and how to ask it."""

    app: Any
    port: int
    logged: list[str] = field(default_factory=list)

    def ask(self, method: str, path: str, content: Any = None, *, body: Any = None, **headers: str) -> Answer:
        """One request on a connection of its own; ``content`` is sent as JSON, ``body`` as it is (chunked if it is an
        iterator). Underscores in names of headers are hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if content is not None:
            body = json.dumps(content).encode()
        if body is not None:
            named.setdefault("Content-Type", "application/json")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        try:
            connection.request(
                method, path, body, named, encode_chunked=body is not None and not isinstance(body, bytes)
            )
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, content: Any = None, **how: Any) -> Answer:
        return self.ask("POST", path, content, **how)

    def about(self, name: str, prompt: Any, content: Any) -> Answer:
        """A request about a prompt, which is recorded first: from then on it goes by the recording's id."""
        recorded = self.post("/api/record", prompt)
        if recorded.status != 200:
            return recorded
        return self.post(f"/api/{name}", {"recording": recorded.json()["id"], **content})

    def events(self, id: str, after: int | None = None) -> Iterator[tuple[int, str, Any]]:
        """Number, name and data of a job's events, as they come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        connection.request("GET", f"/api/jobs/{id}/events", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        for line in answer:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "event" in fields:
                yield int(fields["id"]), fields["event"], json.loads(fields["data"])
                fields = {}
        connection.close()

    def raw(self, text: bytes) -> bytes:
        """Bytes as they are, for requests that no client library would send; the answer up to its end."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=LONG) as connection:
            connection.sendall(text)
            received = b""
            while piece := connection.recv(65536):
                received += piece
        return received


@contextmanager
def live(model: Any, settings: Settings | None = None, *, port: int = 0, **beside: Any) -> Iterator[Live]:
    logged: list[str] = []
    app = create_app(model, settings, log=logged.append, **beside)
    bound, server = bind("127.0.0.1", port), Server(app)
    thread = Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    found = Live(app, bound.getsockname()[1], logged)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        yield found
    finally:
        server.should_exit = True
        thread.join(LONG)
        assert not thread.is_alive(), "the server did not stop"
