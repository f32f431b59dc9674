"""A hub on this machine: as much of the Hugging Face hub's protocol as its own client speaks when it fetches a model.

Real HTTP on the loopback: metadata and listings of a repository at a branch, a tag or a commit; files with ETag and
commit, large ones (LFS) through a redirect to another host with their SHA-256 and size in the headers; ranges; gated
and private repositories with the error codes that the client looks for. A server can be told to misbehave.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, field
from fnmatch import fnmatch
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

LARGE = ("*.safetensors", "*.bin", "*.gguf", "*.model")
TOKEN = "hf_" + "a" * 34
"""The token that gated and private repositories accept."""


@dataclass
class Repository:
    """The commits of a repository, and which of them its branches and tags are."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    licence: str | None = None

    def find(self, revision: str) -> str | None:
        named = {**self.branches, **self.tags}
        return named.get(revision, revision if revision in self.commits else None)


@dataclass
class Fault:
    """What goes wrong with requests for files of some name, as often as ``times`` says."""

    kind: str
    """``drop`` (the connection ends in the middle), ``stall``, ``corrupt`` (a byte differs), or ``status 500``."""
    file: str
    times: int = 1_000_000

    def strikes(self, path: str) -> bool:
        if self.times and fnmatch(path, f"*{self.file}"):
            self.times -= 1
            return True
        return False


class HubServer:
    """Repositories by name, what was asked of them, and what is to go wrong."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[tuple[str, str]] = []
        self.headers: list[tuple[str, dict[str, str]]] = []
        self.faults: list[Fault] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.port = self._http.server_port
        self.address = f"http://127.0.0.1:{self.port}"
        self._stopped = threading.Event()

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._http.shutdown()
        self._http.server_close()

    def publish(self, name: str, folder: Path, *, branch: str = "main", tag: str | None = None) -> str:
        """Commit a folder's files to a branch (and give the commit a tag); the commit's id."""
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        repository = self.repositories.setdefault(name, Repository())
        commit = sha1(repr([(path, sha256(files[path]).digest()) for path in files]).encode()).hexdigest()
        repository.commits[commit] = files
        repository.branches[branch] = commit
        repository.branches.setdefault("main", commit)
        if tag is not None:
            repository.tags[tag] = commit
        return commit

    def downloads(self) -> list[str]:
        """The files whose content was asked for, in order."""
        return [
            path.rsplit("/", 1)[-1] for method, path in self.asked if method == "GET" and "/api/" not in path
        ]

    def fault(self, path: str, kinds: tuple[str, ...]) -> Fault | None:
        return next(
            (each for each in self.faults if each.kind.split()[0] in kinds and each.strikes(path)), None
        )

    def wait(self) -> None:
        """As long as a server that does not answer takes, or until the test is over."""
        self._stopped.wait(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    _ROUTES: ClassVar[dict[str, str]] = {
        r"/api/models/(?P<name>[^/]+/[^/]+)": "_facts",
        r"/api/models/(?P<name>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)": "_facts",
        r"/api/models/(?P<name>[^/]+/[^/]+)/refs": "_refs",
        r"/api/models/(?P<name>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)": "_tree",
        r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)": "_resolve",
        r"/large/(?P<digest>[0-9a-f]{64})/(?P<file>.+)": "_large",
    }

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        path = urlsplit(self.path).path
        self.hub.asked.append((self.command, path))
        self.hub.headers.append((path, dict(self.headers.items())))
        fault = self.hub.fault(path, ("status", "stall"))
        if fault is not None and fault.kind == "stall":
            return self._stall()
        if fault is not None:
            return self._send(int(fault.kind.split()[1]))
        for pattern, answer in self._ROUTES.items():
            found = re.fullmatch(pattern, path)
            if found:
                parts = {key: unquote(value) for key, value in found.groupdict().items()}
                return getattr(self, answer)(**parts)
        return self._send(200 if path == "/" else 404)

    def _stall(self) -> None:
        self.hub.wait()
        self.close_connection = True

    # -- repositories ------------------------------------------------------------------------------------------

    def _open(self, name: str, *, content: bool) -> Repository | None:
        """The repository, or None after an answer that says why there is none for whoever asks."""
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        repository = self.hub.repositories.get(name)
        if "Authorization" in self.headers and not known and not self._stranger():
            self._send(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repository is None or (repository.private and not known):
            # Whoever is not logged in is not told whether there is such a repository.
            self._send(404 if known else 401, {"X-Error-Code": "RepoNotFound"} if known else {})
        elif repository.gated and content and not known:
            self._send(403 if self._stranger() else 401, {"X-Error-Code": "GatedRepo"})
        else:
            return repository
        return None

    def _stranger(self) -> bool:
        """A valid token of somebody who was not given access."""
        return self.headers.get("Authorization", "").startswith("Bearer hf_stranger")

    def _commit(self, repository: Repository, revision: str) -> str | None:
        commit = repository.find(revision)
        if commit is None:
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
        return commit

    def _facts(self, name: str, revision: str = "main") -> None:
        repository = self._open(name, content=False)
        commit = repository and self._commit(repository, revision)
        if repository and commit:
            sizes = "blobs=true" in urlsplit(self.path).query.lower()
            files = [
                {"rfilename": path, **({"size": len(content)} if sizes else {})}
                for path, content in repository.commits[commit].items()
            ]
            facts = {"id": name, "sha": commit, "siblings": files, "private": False, "tags": []}
            self._json(facts | ({"cardData": {"license": repository.licence}} if repository.licence else {}))

    def _refs(self, name: str) -> None:
        repository = self._open(name, content=False)
        if repository:

            def listed(kind: str, refs: dict[str, str]) -> list[dict[str, str]]:
                return [
                    {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit}
                    for name, commit in refs.items()
                ]

            branches, tags = listed("heads", repository.branches), listed("tags", repository.tags)
            self._json({"branches": branches, "tags": tags, "converts": []})

    def _tree(self, name: str, revision: str) -> None:
        repository = self._open(name, content=False)
        commit = repository and self._commit(repository, revision)
        if repository and commit:
            self._json([_entry(path, content) for path, content in repository.commits[commit].items()])

    # -- files -------------------------------------------------------------------------------------------------

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self._open(name, content=True)
        commit = repository and self._commit(repository, revision)
        if not repository or not commit:
            return None
        content = repository.commits[commit].get(file)
        if content is None:
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{git_hash(content)}"', "Accept-Ranges": "bytes"}
        if not is_large(file):
            return self._content(file, content, headers)
        digest = sha256(content).hexdigest()
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        # Another host, as the hub's storage is: no token may go there.
        headers["Location"] = f"http://localhost:{self.hub.port}/large/{digest}/{file}"
        return self._send(302, headers)

    def _large(self, digest: str, file: str) -> None:
        everything = (
            content
            for repository in self.hub.repositories.values()
            for files in repository.commits.values()
            for content in files.values()
        )
        content = next((each for each in everything if sha256(each).hexdigest() == digest), None)
        if content is None:
            return self._send(404)
        return self._content(file, content, {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"})

    def _content(self, file: str, content: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if self.command == "GET" and self.hub.fault(file, ("corrupt",)):
            content = content[:-1] + bytes([content[-1] ^ 1])
        drop = self.command == "GET" and self.hub.fault(file, ("drop",))
        first = int(asked[1]) if asked else 0
        if asked:
            headers = {**headers, "Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"}
        self._send(206 if asked else 200, headers, content[first:], half=bool(drop))

    def _json(self, data: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(data).encode())

    def _send(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", *, half: bool = False
    ) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if half else body)
        if half:
            self.close_connection = True


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
    if is_large(path):
        entry["lfs"] = {"oid": sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def is_large(path: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in LARGE)


def git_hash(content: bytes) -> str:
    """What git calls a file with this content."""
    return sha1(b"blob %d\0" % len(content) + content).hexdigest()
