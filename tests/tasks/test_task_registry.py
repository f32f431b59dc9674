"""A package adds a task: by a call, or by an entry point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

import headtrace.registry
from headtrace.cli import app
from headtrace.errors import InputError
from headtrace.tasks import TASKS, Task, load_task, register_task

MINE = replace(TASKS["pronoun"], name="mine", summary="Pronouns again")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TASKS, "_known", dict(TASKS))


def test_a_registered_task_is_known_by_its_name_everywhere(builtin_tokenizer: Any) -> None:
    register_task(MINE)
    assert len(load_task("mine", builtin_tokenizer, n_per_cell=1)) == MINE.n_cells
    assert "Pronouns again" in CliRunner().invoke(app, ["tasks"]).output
    with pytest.raises(InputError, match="already known"):
        register_task(replace(MINE, summary="Others"))


def test_an_installed_package_adds_a_task_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, value = "mine", "package:MINE"

        def load(self) -> Task:
            return MINE

    monkeypatch.setattr(headtrace.registry, "entry_points", lambda group: [Point()])
    monkeypatch.setattr(TASKS, "_read", False)
    assert TASKS["mine"] is MINE


def test_only_a_task_is_registered() -> None:
    with pytest.raises(InputError, match="not something to register"):
        TASKS.add("mine", "ioi")  # type: ignore[arg-type]
