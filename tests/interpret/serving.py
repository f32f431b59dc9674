"""A real HTTP server on this machine that speaks like an OpenAI-compatible endpoint, with faults on demand."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Raw(NamedTuple):
    """A response as it goes over the wire, for servers that keep to no form."""

    body: str
    status: int = 200
    content_type: str = "application/json"


Answer = str | int | tuple[int, dict[str, str]] | Raw | None
"""Text of the answer, a status (with headers), or a whole response; None hangs."""


class Server:
    """Counts what it was asked; ``answer`` says what to reply to the n-th request."""

    def __init__(self, answer: Callable[[int, list[dict[str, str]]], Answer]) -> None:
        self.answer, self.asked, self.headers = answer, 0, list[dict[str, str]]()
        self.messages: list[list[dict[str, str]]] = []
        self.bodies: list[dict[str, Any]] = []
        self.hanging = 0
        """Requests that wait for an answer which never comes."""
        self.lock, self.done = threading.Lock(), threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def die(self) -> None:
        """No more connections, and no answer to those that there are."""
        self.http.socket.close()
        self.done.set()

    def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.asked += 1
                    number = server.asked
                    server.headers.append({name.lower(): value for name, value in self.headers.items()})
                    server.messages.append(body["messages"])
                    server.bodies.append(body)
                found = server.answer(number, body["messages"])
                if found is None:
                    server.hanging += 1
                    server.done.wait(60)
                    server.hanging -= 1
                    self.close_connection = True
                    return
                self.reply(*_response(found, str(self.headers.get("Authorization"))))

            def reply(self, raw: Raw, headers: dict[str, str]) -> None:
                body = raw.body.encode()
                self.send_response(raw.status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", raw.content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler


def _response(found: str | int | tuple[int, dict[str, str]] | Raw, key: str) -> tuple[Raw, dict[str, str]]:
    if isinstance(found, Raw):
        return found, {}
    if isinstance(found, str):
        return completion(
            found, usage={"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
        ), {}
    status, headers = (found, {}) if isinstance(found, int) else found
    return Raw(json.dumps({"error": {"message": f"status {status} for {key}"}}), status), headers


def completion(text: str | None, **more: Any) -> Raw:
    """An answer in the form of the protocol; ``usage`` is left out by some servers."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    told = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return Raw(json.dumps(told | more))


@contextmanager
def serving(answer: Callable[[int, list[dict[str, str]]], Answer]) -> Iterator[Server]:
    server = Server(answer)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.done.set()
        server.http.shutdown()
        server.http.server_close()
        thread.join()


def weighed(odds: float) -> Raw:
    """The answer True, with the log-odds of True and False."""
    tokens = [
        {"token": "True", "logprob": -0.25, "bytes": None},
        {"token": "False", "logprob": -0.25 - odds, "bytes": None},
    ]
    told = {"content": [{**tokens[0], "top_logprobs": tokens}]}
    choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "True"}}
    return completion(None, choices=[choice | {"logprobs": told}])


def good(_: int, messages: list[dict[str, str]]) -> Answer:
    """Says that pairs have a same token, and finds those that do (by the marks in the text)."""
    if '{"description"' in messages[0]["content"]:
        return json.dumps({"description": "The source is an earlier occurrence of the destination token."})
    if "True or False" in messages[0]["content"]:
        return weighed(1.0 if _same(messages[-1]["content"]) else 0.5)
    asked = next(each for each in reversed(messages) if "Examples:" in each["content"])
    lines = re.findall(r"^\d+\. .*$", asked["content"], re.MULTILINE)
    return json.dumps({"labels": [_same(line) for line in lines]})


def _same(line: str) -> bool:
    source, destination = (re.search(mark, line) for mark in (r"\[\[(.*?)\]\]", r"<<(.*?)>>"))
    assert source is not None
    assert destination is not None
    return source[1] == destination[1]
