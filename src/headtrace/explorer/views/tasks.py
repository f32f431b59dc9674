"""Prompts to begin with: examples of the tasks.

>>> import headtrace
>>> examples(headtrace.load("builtin"), "ioi", count=1)[0].answer
' Heather'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headtrace.errors import InputError
from headtrace.explorer.server.schemas import ExampleView, TaskView
from headtrace.tasks import TASKS, load_task

if TYPE_CHECKING:
    from headtrace.models import Model


def task_views() -> list[TaskView]:
    """The tasks that headtrace brings along."""
    return [TaskView(name=task.name, description=task.summary) for task in TASKS.values()]


def examples(model: Model, name: str, count: int = 10, seed: int = 0) -> list[ExampleView]:
    """Examples of a task, about as many of each of its cells.

    Only tasks by name: what ``load_task`` takes for a file is not read on behalf of a browser.
    """
    if name not in TASKS:
        raise InputError(f"There is no task {name!r}. Use one of {', '.join(TASKS)}.")
    if count < 1:
        raise InputError(f"count={count}: expected at least 1 example.")
    task = TASKS[name]
    per_cell = min(-(-count // task.n_cells), task.n_per_cell)
    found = load_task(name, model.tokenizer, n_per_cell=per_cell, seed=seed).spread(count)
    views: list[ExampleView] = []
    for example in found:
        other = task.counterfactual(example, model.tokenizer, seed=seed)
        views.append(
            ExampleView(
                text=example.text,
                answer=example.answer,
                wrong=example.wrong,
                counterfactual=None if other is None else other.text,
            )
        )
    return views
