"""A model, some prompts, and a run of them that nothing disturbed: what every other run is held against."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import headtrace
from headtrace.runs import Run, open_run
from headtrace.tasks import TaskSet, load_task

SHARD = 8
"""Prompts per shard: 30 prompts make four of them, the last one smaller."""


@pytest.fixture(scope="session")
def model() -> headtrace.Model:
    return headtrace.load("builtin")


@pytest.fixture(scope="session")
def prompts(model: headtrace.Model) -> TaskSet:
    return load_task("ioi", model.tokenizer, n_per_cell=1)


@pytest.fixture(scope="session")
def undisturbed(model: headtrace.Model, prompts: TaskSet, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return headtrace.run(model, prompts, out=tmp_path_factory.mktemp("runs") / "ioi", shard_size=SHARD)


@pytest.fixture
def again(model: headtrace.Model, prompts: TaskSet, tmp_path: Path) -> Callable[..., Run]:
    """The same run in a folder of the test's own; each call goes on with it."""

    def start(**how: Any) -> Run:
        return headtrace.run(model, prompts, **{"out": tmp_path / "ioi", "shard_size": SHARD, **how})

    return start


@pytest.fixture
def whole(undisturbed: Run, tmp_path: Path) -> Run:
    """The undisturbed run, copied to where ``again`` goes on with it."""
    return open_run(shutil.copytree(undisturbed.path, tmp_path / "ioi"))


def frames(run: Run) -> dict[str, pl.DataFrame]:
    return {name: getattr(run, name).collect() for name in ("prompts", "nodes", "edges")}


def assert_same(run: Run, other: Run) -> None:
    """Every row of every frame is the same, bit for bit, and there once."""
    for name, frame in frames(run).items():
        assert frame.equals(frames(other)[name]), name
    assert run.prompts.select("id").collect()["id"].n_unique() == len(run)
