"""A real HTTP server on this machine that speaks like an OpenAI-compatible endpoint, with faults on demand."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = str | int | tuple[int, dict[str, str]] | None
"""Text of the answer, or a status (with headers); None hangs."""


class Server:
    """Counts what it was asked; ``answer`` says what to reply to the n-th request."""

    def __init__(self, answer: Callable[[int, list[dict[str, str]]], Answer]) -> None:
        self.answer, self.asked, self.headers = answer, 0, list[dict[str, str]]()
        self.messages: list[list[dict[str, str]]] = []
        self.lock, self.done = threading.Lock(), threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/v1"

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
                found = server.answer(number, body["messages"])
                if found is None:
                    server.done.wait(20)
                    self.close_connection = True
                    return
                status, headers = _status(found)
                refused = f"status {status} for {self.headers.get('Authorization')}"
                content: dict[str, Any] = {"error": {"message": refused}}
                if isinstance(found, str):
                    choice = {
                        "index": 0,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": found},
                    }
                    usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
                    content = {
                        "id": "x",
                        "object": "chat.completion",
                        "created": 0,
                        "model": "m",
                        "choices": [choice],
                    }
                    content["usage"] = usage
                raw = json.dumps(content).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        return Handler


def _status(found: str | int | tuple[int, dict[str, str]]) -> tuple[int, dict[str, str]]:
    if isinstance(found, str):
        return 200, {}
    return found if isinstance(found, tuple) else (found, {})


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


def good(_: int, messages: list[dict[str, str]]) -> str:
    """Says that pairs have a same token, and finds those that do (by the marks in the text)."""
    if '{"description"' in messages[0]["content"]:
        return json.dumps({"description": "The source is an earlier occurrence of the destination token."})
    asked = next(each for each in reversed(messages) if "Examples:" in each["content"])
    lines = re.findall(r"^\d+\. .*$", asked["content"], re.MULTILINE)
    return json.dumps({"labels": [_same(line) for line in lines]})


def _same(line: str) -> bool:
    source, destination = (re.search(mark, line) for mark in (r"\[\[(.*?)\]\]", r"<<(.*?)>>"))
    assert source is not None
    assert destination is not None
    return source[1] == destination[1]
