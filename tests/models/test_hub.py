"""Models on the hub: fetched as folders from a hub on this machine, or from its cache when there is none."""

from __future__ import annotations

import json
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import headtrace
from headtrace.errors import InputError
from headtrace.models import hub
from tests.tiny import tiny_hf

COMMIT = "c0ffee" + "0" * 34
REPOSITORY = "someone/tiny-llama"


def cached(cache: Path, monkeypatch, *, revision: str = "main") -> Path:
    """A snapshot folder in a hub cache, empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    home = cache / f"models--{REPOSITORY.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / revision).write_text(COMMIT)
    folder = home / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def test_a_model_in_the_hubs_cache_needs_no_hub(tmp_path, monkeypatch) -> None:
    tiny_hf("llama").save_pretrained(cached(tmp_path, monkeypatch))
    model = headtrace.load(REPOSITORY)
    assert (model.name, model.revision) == (REPOSITORY, None)
    assert model.weights_sha256 == headtrace.load(tiny_hf("llama")).weights_sha256


def test_a_revision_is_looked_for_by_name_and_written_down(tmp_path, monkeypatch) -> None:
    tiny_hf("llama").save_pretrained(cached(tmp_path, monkeypatch, revision="step7"))
    model = headtrace.load(f"{REPOSITORY}@step7")
    assert (model.name, model.revision) == (REPOSITORY, "step7")
    assert headtrace.load(REPOSITORY, revision="step7").revision == "step7"
    for other in ({}, {"revision": "step8"}):
        with pytest.raises(InputError, match="hub cannot be reached"):
            headtrace.load(REPOSITORY, **other)


def test_a_cache_with_a_weight_missing_or_pickled_weights_is_refused(tmp_path, monkeypatch) -> None:
    folder = cached(tmp_path, monkeypatch)
    tiny_hf("llama").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="has no weights"):
        headtrace.load(REPOSITORY)
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="pickled weights only"):
        headtrace.load(REPOSITORY)


# -- a hub on this machine ------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as fetching takes."""

    folder: Path
    asked: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        if path == "/":
            return self._send(b"", with_body)
        if "/tree/" in path:
            entries = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}
                for file in sorted(self.folder.iterdir())
            ]
            return self._send(json.dumps(entries).encode(), with_body, "application/json")
        if path.startswith("/api/models/"):
            files = [{"rfilename": file.name} for file in sorted(self.folder.iterdir())]
            facts = {"id": REPOSITORY, "sha": COMMIT, "siblings": files, "private": False, "tags": []}
            return self._send(json.dumps(facts).encode(), with_body, "application/json")
        name = path.rsplit("/", 1)[-1]
        self.asked.append(name)
        if not (self.folder / name).exists():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        return self._send((self.folder / name).read_bytes(), with_body)

    def _send(self, content: bytes, with_body: bool, kind: str = "application/octet-stream") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(content)


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    folder = tmp_path / "served"
    folder.mkdir()
    handler = type("Served", (Hub,), {"folder": folder, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    go_online(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield handler
    server.shutdown()
    server.server_close()


def go_online(monkeypatch, address: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_a_model_is_fetched_whole_from_the_hub_and_then_from_its_cache(local_hub, monkeypatch) -> None:
    tiny_hf("llama").save_pretrained(local_hub.folder, max_shard_size="20KB")
    (local_hub.folder / "consolidated.safetensors").write_bytes(b"another copy that nobody needs")
    (local_hub.folder / "pytorch_model.bin").write_bytes(b"a pickle")
    expected = headtrace.load(tiny_hf("llama")).weights_sha256
    assert headtrace.load(f"{REPOSITORY}@main").weights_sha256 == expected
    assert not {"consolidated.safetensors", "pytorch_model.bin"} & set(local_hub.asked)
    go_online(monkeypatch, "http://127.0.0.1:9")
    assert headtrace.load(f"{REPOSITORY}@main").weights_sha256 == expected


def test_a_hub_model_with_pickled_weights_only_is_refused_unfetched(local_hub, tmp_path) -> None:
    tiny_hf("llama").config.save_pretrained(local_hub.folder)
    (local_hub.folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(InputError, match=r"pickled weights only \(pytorch_model\.bin\)"):
        headtrace.load(REPOSITORY)
    assert not list((tmp_path / "cache").rglob("pytorch_model.bin"))


def test_what_the_hub_refuses_is_said(local_hub) -> None:
    with pytest.raises(InputError, match=r"could not be read from the Hugging Face hub|has no config\.json"):
        headtrace.load("someone/nothing")


def test_no_connection_is_no_hub(monkeypatch) -> None:
    go_online(monkeypatch, "http://127.0.0.1:9")
    assert not hub.reachable()
    with pytest.raises(InputError, match=r"hub cannot be reached to look for 'a/b' \(revision 'c'\)"):
        headtrace.load("a/b@c")
