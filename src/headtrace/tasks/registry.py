"""The tasks by name.

A package of your own adds one through the entry point group ``headtrace.tasks``, whose entries are `Task` objects, or
by ``register_task(task)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headtrace.errors import InputError
from headtrace.registry import Registry
from headtrace.tasks import facts, greater_than, ioi, pronoun
from headtrace.tasks.build import read_jsonl
from headtrace.tasks.counterfactuals import Candidates, Counterfactual, counterfactual
from headtrace.tasks.examples import Example, TaskSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STANDARD = "standard"


@dataclass(frozen=True)
class Task:
    """What ``headtrace tasks`` shows about a task."""

    name: str
    summary: str
    cells: str
    """What a balanced set has the same number of."""
    n_cells: int
    n_per_cell: int
    """How many examples per cell there are by default."""
    roles: tuple[str, ...]
    load: Callable[..., TaskSet]
    variants: tuple[str, ...] = (STANDARD,)
    counterfactuals: Mapping[str, Candidates] = field(default_factory=dict[str, Candidates])
    """The kinds of counterfactual prompts that the task can make; the first is the default."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of its counterfactuals."""
        return tuple(self.counterfactuals)

    def counterfactual(
        self, example: Example, tokenizer: PreTrainedTokenizerBase, kind: str | None = None, seed: int = 0
    ) -> Counterfactual | None:
        """A prompt of equal length to compare an example with; None if there is none."""
        return counterfactual(self.name, example, tokenizer, kind, seed)


_BUILT_IN = (
    Task(
        name="ioi",
        summary="Indirect object identification: who gets the drink?",
        cells="sentence form x order (ABBA, BABA)",
        n_cells=len(ioi.FORMS) * len(ioi.ORDERS),
        n_per_cell=10,
        roles=("IO", "S1", "S2", "end"),
        variants=ioi.VARIANTS,
        load=ioi.load,
        counterfactuals={"abc": ioi.other_names, "flip": ioi.names_exchanged},
    ),
    Task(
        name="greater-than",
        summary="A span of years ends after it began",
        cells="sentence form x century",
        n_cells=len(greater_than.FORMS) * len(greater_than.CENTURIES),
        n_per_cell=25,
        roles=("XX", "YY", "end"),
        load=greater_than.load,
        counterfactuals={"start": greater_than.another_start, "century": greater_than.another_century},
    ),
    Task(
        name="pronoun",
        summary="A name tells whether 'she' or 'he' follows",
        cells="sentence form x gender",
        n_cells=len(pronoun.FORMS) * len(pronoun.NAMES),
        n_per_cell=25,
        roles=("name", "end"),
        load=pronoun.load,
        counterfactuals={"gender": pronoun.other_gender},
    ),
    Task(
        name="facts",
        summary="Capitals, languages and continents of countries",
        cells="relation x sentence form",
        n_cells=sum(map(len, facts.FORMS.values())),
        n_per_cell=12,
        roles=("subject", "end"),
        load=facts.load,
        counterfactuals={"subject": facts.another_subject},
    ),
)
TASKS: Registry[Task] = Registry(
    "task",
    "headtrace.tasks",
    {task.name: task for task in _BUILT_IN},
    check=lambda found: isinstance(found, Task),
)
"""Every known task by its name; those of installed packages are found by entry point."""


def register_task(task: Task) -> None:
    """Make a task known under its name, for this process."""
    TASKS.add(task.name, task)


def load_task(
    name: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    n_per_cell: int | None = None,
    n: int | None = None,
    seed: int = 0,
    variant: str = STANDARD,
    strict: bool = False,
) -> TaskSet:
    """A balanced set of prompts for one tokenizer; the same arguments give the same set on any machine.

    ``n_per_cell`` is how many examples each cell of the task has; or ``n`` how many there are in all, as even over the
    cells as that number allows.

    ``name`` is a task of ``TASKS``, or the path of a JSONL file (see ``read_jsonl``), taken as it is; with ``strict`` a
    line of it that is not valid is an error.

    >>> import headtrace
    >>> task_set = load_task("ioi", headtrace.load("builtin").tokenizer, n_per_cell=2)      # 15 forms x 2 orders x 2
    >>> len(task_set), task_set.excluded_counts()
    (60, {})
    """
    if tokenizer is None:
        raise InputError(
            "A task needs a tokenizer. Pass tokenizer= to headtrace.load, if the model has none."
        )
    if str(name).endswith(".jsonl"):
        return read_jsonl(name, tokenizer, strict=strict)
    if name not in TASKS:
        raise InputError(f"There is no task {str(name)!r}. Use one of {', '.join(TASKS)}, or a .jsonl file.")
    task = TASKS[str(name)]
    if n is not None and n_per_cell is not None:
        raise InputError("Give n, the number of examples in all, or n_per_cell, not both.")
    if n is not None:
        n_per_cell = max(1, -(-n // task.n_cells))
    n_per_cell = task.n_per_cell if n_per_cell is None else n_per_cell
    if n_per_cell < 1:
        raise InputError(f"A set needs at least 1 example per cell, not {n_per_cell}.")
    if variant not in task.variants:
        raise InputError(f"Task '{name}' has no variant {variant!r}. It has: {', '.join(task.variants)}.")
    options = {} if variant == STANDARD else {"variant": variant}
    found = task.load(tokenizer, n_per_cell, seed, **options)
    return found if n is None else found.evenly(n)
