"""The tasks by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headtrace.errors import InputError
from headtrace.tasks import facts, greater_than, ioi, pronoun
from headtrace.tasks.examples import TaskSet
from headtrace.tasks.jsonl import read_jsonl

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Task:
    """What ``headtrace tasks`` shows about a task."""

    name: str
    summary: str
    cells: str
    """What a balanced set has the same number of."""
    n_cells: int
    n_per_cell: int
    """How many examples per cell there are if nothing else is asked for."""
    roles: tuple[str, ...]
    variants: tuple[str, ...]
    load: Callable[..., TaskSet]


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "ioi",
            "Indirect object identification: who gets the drink?",
            "sentence form x order (ABBA, BABA)",
            len(ioi.FORMS) * len(ioi.ORDERS),
            10,
            ("IO", "S1", "S2", "end"),
            ioi.VARIANTS,
            ioi.load,
        ),
        Task(
            "greater-than",
            "A span of years ends after it began",
            "sentence form x century",
            len(greater_than.FORMS) * len(greater_than.CENTURIES),
            25,
            ("XX", "YY", "end"),
            ("standard",),
            greater_than.load,
        ),
        Task(
            "pronoun",
            "A name tells whether 'she' or 'he' follows",
            "sentence form x gender",
            len(pronoun.FORMS) * len(pronoun.NAMES),
            25,
            ("name", "end"),
            ("standard",),
            pronoun.load,
        ),
        Task(
            "facts",
            "Capitals, languages and continents of countries",
            "relation x sentence form",
            sum(map(len, facts.FORMS.values())),
            12,
            ("subject", "end"),
            ("standard",),
            facts.load,
        ),
    )
}


def load_task(
    name: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    n_per_cell: int | None = None,
    seed: int = 0,
    variant: str = "standard",
) -> TaskSet:
    """A balanced set of prompts for one tokenizer; the same arguments give the same set on any machine.

    ``name`` is a task of ``TASKS``, or the path of a JSONL file (see ``read_jsonl``), taken as it is.

    >>> task_set = load_task("ioi", model.tokenizer, n_per_cell=100)     # 15 forms x 2 orders x 100
    >>> len(task_set), task_set.excluded_counts()
    (3000, {'name is not one token of this vocabulary': 6})
    """
    if str(name).endswith(".jsonl"):
        return read_jsonl(name, tokenizer)
    if name not in TASKS:
        raise InputError(f"There is no task {str(name)!r}. Use one of {', '.join(TASKS)}, or a .jsonl file.")
    task = TASKS[str(name)]
    n_per_cell = task.n_per_cell if n_per_cell is None else n_per_cell
    if n_per_cell < 1:
        raise InputError(f"A set needs at least 1 example per cell, not {n_per_cell}.")
    if variant not in task.variants:
        raise InputError(f"Task '{name}' has no variant {variant!r}. It has: {', '.join(task.variants)}.")
    if len(task.variants) > 1:
        return task.load(tokenizer, n_per_cell, seed, variant)
    return task.load(tokenizer, n_per_cell, seed)
