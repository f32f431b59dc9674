"""A hub of datasets on this machine, as far as the library ``datasets`` asks one: names, files, and pieces of files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class DatasetHub(ThreadingHTTPServer):
    """Serves the files of some datasets; what was asked for is kept."""

    def __init__(self, datasets: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.datasets = datasets
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def dataset_hub(datasets: dict[str, dict[str, bytes]]) -> Generator[DatasetHub]:
    with DatasetHub(datasets) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: DatasetHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        self._get()

    def do_POST(self) -> None:
        """Which of some paths are there."""
        wanted = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        _, files, rest = self._found()
        self._json(
            [_entry(each, files[each]) for each in wanted if each in files] if "paths-info" in rest else []
        )

    def _get(self) -> None:
        name, files, rest = self._found()
        what, _, path = rest.partition("/")
        if what == "resolve" and path.partition("/")[2] in files:
            self._file(files[path.partition("/")[2]])
        elif "/api/" in self.path and what in ("", "revision") and files:
            siblings = [{"rfilename": each} for each in files]
            self._json({"id": name, "sha": COMMIT, "private": False, "siblings": siblings})
        elif "/api/" in self.path and what == "tree" and files:
            self._json([_entry(*each) for each in files.items()])
        else:
            self._json({"error": "not found"}, 404, "EntryNotFound" if files else "RepoNotFound")

    def _found(self) -> tuple[str, dict[str, bytes], str]:
        """The dataset that is asked about, its files, and what is asked."""
        path = unquote(urlparse(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        owner, name, *rest = [*path.partition("/datasets/")[2].split("/"), "", ""]
        found = self.server.datasets.get(f"{owner}/{name}", {})
        return f"{owner}/{name}", found, "/".join(rest).strip("/")

    def _file(self, content: bytes) -> None:
        start, end = 0, len(content)
        if asked := self.headers.get("Range"):
            low, _, high = asked.removeprefix("bytes=").partition("-")
            start, end = int(low), min(end, int(high) + 1) if high else end
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[start:end])

    def _json(self, content: object, code: int = 200, error: str = "") -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
