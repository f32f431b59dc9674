"""Prompts as the study of sinks takes them: token ids with a task's name, and its answers where there are any.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> [(case.task, case.length) for case in as_cases(model, ["When Mary and John went", "The capital of France is"])]
[('prompts', 6), ('prompts', 6)]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headtrace.errors import InputError
from headtrace.prompts import as_prompts
from headtrace.tasks import Example, TaskSet
from headtrace.vocabulary import Prompt

if TYPE_CHECKING:
    from headtrace.models import Model

UNNAMED = "prompts"
"""The task of prompts that come without one."""

Asked = TaskSet | Sequence[Any] | Mapping[str, Any] | Prompt
"""A task set, or several; prompts or examples; or any of these by the name of their task."""


@dataclass(frozen=True)
class Case:
    """One prompt, the task that it belongs to, and the tokens that are right and wrong after it."""

    task: str
    ids: tuple[int, ...]
    right: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return len(self.ids)


def as_cases(model: Model, prompts: Asked) -> list[Case]:
    """Everything that was given, prompt by prompt; what cannot be studied is an error that says why."""
    cases = list(_cases(model, prompts, UNNAMED))
    if not cases:
        raise InputError("There are no prompts: give some texts, token ids, or the sets of a task.")
    for place, case in enumerate(cases):
        if case.length < 2:
            raise InputError(
                f"Prompt {place} ({'|'.join(model.token_labels(case.ids))!r}) has one token, which can attend only to "
                "itself: a sink needs at least two. Give longer prompts."
            )
    return cases


def _cases(model: Model, given: Any, task: str) -> Iterator[Case]:
    if isinstance(given, TaskSet):
        yield from (_of_example(example, given.task) for example in given)
    elif isinstance(given, Example):
        yield _of_example(given, task)
    elif isinstance(given, Mapping) and "input_ids" not in given:
        for name, group in given.items():
            yield from _cases(model, group, str(name))
    elif isinstance(given, Sequence) and any(isinstance(each, (TaskSet, Example)) for each in given):
        for each in given:
            yield from _cases(model, each, task)
    elif not isinstance(given, Sequence) or len(given):
        yield from (Case(task, tuple(model.to_ids(prompt))) for prompt in as_prompts(given))


def _of_example(example: Example, task: str) -> Case:
    return Case(task, example.token_ids, example.answer_ids, example.wrong_ids)
