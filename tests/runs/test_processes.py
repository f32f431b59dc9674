"""Several workers on this machine: real processes, that die with their starter, and may die before."""

from __future__ import annotations

from pathlib import Path

import pytest

import headtrace
from headtrace.errors import InputError
from headtrace.runs import Run
from headtrace.runs.engines import TRIES, ModelPlace, ShardJob, work_in_processes
from tests.runs.conftest import assert_same
from tests.runs.killing import workers_of_this_process
from tests.tiny import tiny_model


def test_a_worker_of_this_machine_gives_the_circuits_of_this_process(again, undisturbed: Run) -> None:
    """Two of them, and one that is killed: tests/interpret/test_scan_run.py, with another job."""
    assert_same(again(workers=1), undisturbed)
    assert not workers_of_this_process("runs.engines"), "none is left behind"


def test_work_that_kills_its_workers_is_an_error_and_not_a_loop() -> None:
    with pytest.raises(InputError, match=f"Shard 5: {TRIES} workers died of it .*ended with 3"):
        list(work_in_processes(ShardJob("os:_exit", {"status": 3}), [5], workers=2))
    with pytest.raises(InputError, match=r"workers died of it .*No module named 'nowhere'"):
        list(work_in_processes(ShardJob("nowhere:at_all", {}), [0], workers=1))


def test_a_model_that_no_worker_could_load_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no name or folder that a worker could load"):
        headtrace.run(tiny_model("llama"), [[1, 2, 3]], out=tmp_path, workers=2, top_k=1)


def test_workers_load_a_model_in_its_own_precision() -> None:
    place = ModelPlace.of(headtrace.load("builtin", dtype="bfloat16"))
    assert place.dtype == "bfloat16"
    assert place.load().half
