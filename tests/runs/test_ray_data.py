"""The engine of Ray Data on a real Ray of this machine, and what is refused before it starts."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import headtrace
from headtrace.errors import InputError
from headtrace.runs import ray_data
from tests.runs.conftest import assert_same
from tests.tiny import tiny_model

pytest.importorskip("ray", reason="Ray is not installed: pip install 'headtrace[ray]'")


def _workers() -> list[psutil.Process]:
    """The processes of this one's Ray that hold a model."""
    return [each for each in psutil.Process().children(recursive=True) if "ShardWorker" in _command(each)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


class _Killer(threading.Thread):
    """Kills one of two workers as soon as a first shard is written."""

    def __init__(self, shards: Path) -> None:
        super().__init__(daemon=True)
        self.shards, self.left = shards, 0

    def run(self) -> None:
        workers: list[psutil.Process] = []
        while len(workers) < 2:
            time.sleep(0.05)
            workers = _workers()
        while not any(self.shards.glob("*.json")):
            time.sleep(0.001)
        workers[0].kill()
        self.left = 30 - len(list(self.shards.glob("*.json")))


def test_two_workers_one_of_them_killed_give_the_circuits_of_the_local_engine(again, tmp_path: Path) -> None:
    local = again(out=tmp_path / "local", shard_size=1)
    killer = _Killer(tmp_path / "ray" / "shards")
    killer.start()
    run = again(out=tmp_path / "ray", shard_size=1, engine="ray", workers=2)
    assert killer.left > 0, "nobody was killed while there was work left"
    assert_same(run, local)


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address at which somebody listens, and says nothing."""
    monkeypatch.setattr(ray_data, "ANSWERS_IN", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_an_address_that_does_not_answer_is_told_in_bounded_time(again, deaf: str) -> None:
    with pytest.raises(InputError, match=f"No Ray answers at '{deaf}'"):
        again(engine="ray", ray_address=deaf)
    with pytest.raises(InputError, match=r"No Ray answers at '127.0.0.1:1'"):
        again(engine="ray", ray_address="127.0.0.1:1")
    with pytest.raises(InputError, match=r"expected host:port"):
        again(engine="ray", ray_address="somewhere")


def test_without_ray_the_way_to_install_it_is_told(again, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'headtrace\[ray\]'"):
        again(engine="ray")


def test_a_model_that_no_worker_could_load_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match=r"no name or folder that a worker could load"):
        headtrace.run(tiny_model("llama"), [[1, 2, 3]], out=tmp_path, engine="ray", top_k=1)


def test_a_method_that_no_worker_could_make_is_refused(model, tmp_path) -> None:
    with pytest.raises(InputError, match=r"takes the method by its name"):
        headtrace.run(model, [[1, 2, 3]], out=tmp_path, engine="ray", top_k=1, tau=lambda keys: 0.5)


def test_a_worker_whose_model_has_other_weights_says_so(model, again) -> None:
    run = again()
    made = {"method": "acc++", "max_firings": 200, "min_influence": None}
    spec = ray_data.WorkerSpec.of(run.store, run.manifest, model, made)
    good = ray_data.ShardWorker(spec)({"shard": [0]})
    assert good["problem"] == [""]
    other = ray_data.ShardWorker(ray_data.WorkerSpec(**{**vars(spec), "weights_sha256": "0" * 64}))
    assert "other weights" in other({"shard": [0]})["problem"][0]
