"""A scan by several workers, real processes: the same as by one, whatever becomes of them."""

from __future__ import annotations

import json
import threading
import time

import psutil
import pytest
import torch

import headtrace
from headtrace.errors import InputError
from headtrace.interpret import Scan, scan
from headtrace.interpret.scan import Tally
from headtrace.interpret.scan_run import CHUNKS, PARTS
from headtrace.runs.store import locked, open_store
from tests.interpret.test_scan import same
from tests.starting import Started
from tests.tiny import tiny_model

CHANNELS = ["L0H1:0", "L1H2:0", "L1H2:3+5+9", "L2H3:1"]
HOW = {"length": 32, "heads": True, "every": 1}
"""Sixty-four chunks in a batch, and a shard of each."""


@pytest.fixture(scope="module")
def model():
    return headtrace.load("builtin")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Texts of many lengths, some of them twice: about ten shards."""
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    names = ("Mary", "John", "Anna", "Paul", "Lisa")
    texts = [
        f"When {a} and {b} went to the store, {b} gave a drink to {a}. " * (1 + number % 3)
        for number in range(16)
        for a in names
        for b in names
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def whole(model, corpus):
    return scan(model, corpus, CHANNELS, **HOW)


def assert_equal(found: Scan, whole: Scan) -> None:
    """Chosen pairs, their scores, and all sums, bit for bit: one batch is computed alike wherever it is."""
    assert same(found, whole)
    for name in ("sums", "weights", "parts"):
        assert torch.equal(getattr(found.heads, name), getattr(whole.heads, name)), name


def workers(process: psutil.Process) -> list[psutil.Process]:
    return [each for each in process.children() if "headtrace.runs.engines" in each.cmdline()]


def start(corpus: str, out: str) -> None:
    """A scan by two workers that says how far it is; for a process of its own."""
    model = headtrace.load("builtin")
    scan(
        model, corpus, CHANNELS, out=out, workers=2, progress=lambda done, of: print(done, flush=True), **HOW
    )


def test_two_workers_killed_with_their_starter_and_one_more_later_give_the_scan_of_one_process(
    model, corpus, whole, tmp_path
) -> None:
    out = tmp_path / "two"
    starter = Started(start, str(corpus), str(out))
    assert starter.stdout.readline() == "0\n"
    assert int(starter.stdout.readline()) > 0, "it got somewhere"
    orphans = workers(psutil.Process(starter.pid))
    assert len(orphans) == 2
    starter.close()
    psutil.wait_procs(orphans, timeout=60)
    assert not any(each.is_running() for each in orphans), "workers end with their starter"
    begun = Scan.load(out)
    assert begun.n_chunks < whole.n_chunks, "there was work left"

    killed: list[int] = []

    def kill_one() -> None:
        while not (found := workers(psutil.Process())):
            time.sleep(0.01)
        found[0].kill()
        killed.append(found[0].pid)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    resumed = scan(model, corpus, CHANNELS, out=out, workers=1, **HOW)
    killer.join()
    assert killed
    assert_equal(resumed, whole)
    assert_equal(Scan.load(out), whole)
    assert not (out / PARTS).exists()
    assert not (out / CHUNKS).exists()


def test_a_worker_of_a_ray_gives_the_scan_of_one_process(model, tmp_path) -> None:
    """Text is drawn by the worker that reads it. Two of them: tests/runs/test_ray_data.py, with another job."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    drawn = scan(model, "sampled:8000", CHANNELS, **HOW)
    found = scan(model, "sampled:8000", CHANNELS, out=tmp_path, engine="ray", workers=1, **HOW)
    assert_equal(found, drawn)


def test_parts_that_are_there_are_used_and_others_are_not(
    model, corpus, whole, tmp_path, monkeypatch
) -> None:
    """Shards come in the wrong order, and a part that is none of this scan lies about."""
    from headtrace.interpret import scan_run
    from headtrace.runs.engines import Engines

    done: list[int] = []

    def answers(self, job, shards):
        read = job.open()
        for shard in reversed(shards):
            done.append(shard)
            yield read(shard)

    monkeypatch.setattr(Engines, "answers", answers)
    monkeypatch.setattr(scan_run, "_finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        scan(model, corpus, CHANNELS, out=tmp_path, workers=2, tokens=6000, **HOW)
    first = Scan.load(tmp_path)
    shards = len(done)
    assert (first.complete, shards > 2) == (False, True)
    monkeypatch.undo()
    monkeypatch.setattr(Engines, "answers", answers)
    stray = tmp_path / PARTS / f"{first.n_chunks:09}"
    Scan(first.signals, first.options, Tally.empty(4, 3, 40, 1024)).save(stray)
    resumed = scan(model, corpus, CHANNELS, out=tmp_path, workers=2, tokens=6000, **HOW)
    assert len(done) == shards, "nothing was left to do"
    assert same(resumed, scan(model, corpus, CHANNELS, tokens=6000, **HOW))


def test_workers_need_a_folder_of_their_own_and_a_model_that_they_can_load(model, corpus, tmp_path) -> None:
    with pytest.raises(InputError, match="give out="):
        scan(model, corpus, CHANNELS, workers=2)
    with pytest.raises(InputError, match="no name or folder that a worker could load"):
        scan(tiny_model("llama"), "sampled:64", ["L0H0:0"], length=32, out=tmp_path, workers=2)
    with locked(open_store(tmp_path)), pytest.raises(InputError, match="Another run is writing"):
        scan(model, corpus, CHANNELS, out=tmp_path, workers=2, **HOW)
