"""Counterfactual prompts: the same sentence with other words where the answer is decided, of the same length in tokens.

>>> import headtrace
>>> from headtrace.tasks import load_task
>>> task_set = load_task("ioi", headtrace.load("builtin").tokenizer, n_per_cell=1)
>>> task_set[0].text
'When Heather and Anna went to the school, Anna gave a picture to'
>>> pairs = counterfactuals(task_set, headtrace.load("builtin").tokenizer, kind="flip")
>>> pairs[0].text
'When Anna and Heather went to the school, Heather gave a picture to'

Each task has its kinds (``TASKS[name].kinds``), the first of which is taken unless another is asked for. Choices come
from the example and the seed, so they are the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from string import Formatter
from typing import TYPE_CHECKING

from headtrace.errors import InputError
from headtrace.prompts import Span, encode
from headtrace.tasks.build import fill, place_roles
from headtrace.tasks.examples import Example, Exclusion, TaskSet
from headtrace.tasks.words import Draw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIES = 200
"""So many candidates are drawn, where there is no end of them, before a prompt is said to have no counterfactual."""

Candidates = Callable[[Example, Draw], Iterator[tuple[str, Mapping[str, Span]]]]
"""Texts that could stand against an example, best first, each with the characters of its roles."""


@dataclass(frozen=True)
class Counterfactual:
    """A prompt to compare an example with."""

    id: str
    """The example's."""
    kind: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class CounterfactualSet:
    """Counterfactuals of the examples of a task, in their order; those that have none are in ``excluded``."""

    kind: str
    found: Mapping[str, Counterfactual]
    """By the id of the example."""
    excluded: tuple[Exclusion, ...]

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, example: Example | str | int) -> Counterfactual:
        """Of an example, of its id, or by number."""
        if isinstance(example, int):
            return list(self.found.values())[example]
        name = example if isinstance(example, str) else example.id
        if name not in self.found:
            reason = next((e.reason for e in self.excluded if e.item == name), "it is not in this set")
            raise InputError(f"There is no {self.kind!r} counterfactual for {name!r}: {reason}.")
        return self.found[name]

    def __iter__(self) -> Iterator[Counterfactual]:
        return iter(self.found.values())

    def __repr__(self) -> str:
        total = len(self.found) + len(self.excluded)
        return (
            f"CounterfactualSet({self.kind!r}: {len(self.found)} of {total} prompts have one of equal length)"
        )


def unfill(form: str, text: str) -> dict[str, str]:
    """The words that were put into a form: the reverse of ``fill``.

    >>> unfill("When {A} met {B}", "When Mary met John")
    {'A': 'Mary', 'B': 'John'}
    """
    pattern, seen = "", set[str]()
    for literal, slot, _, _ in Formatter().parse(form):
        pattern += re.escape(literal)
        if slot is not None:
            pattern += f"(?P={slot})" if slot in seen else f"(?P<{slot}>.+?)"
            seen.add(slot)
    match = re.fullmatch(pattern, text)
    if match is None:
        raise InputError(f"{text!r} is not of the form {form!r}.")
    return match.groupdict()


def refill(form: str, text: str, **changed: str) -> tuple[str, dict[str, Span]]:
    """The same form with other words in some slots, and where each slot is."""
    return fill(form, {**unfill(form, text), **changed})


def counterfactual(
    task: str, example: Example, tokenizer: PreTrainedTokenizerBase, kind: str | None = None, seed: int = 0
) -> Counterfactual | None:
    """The counterfactual of one example; None if no candidate has the example's length and places of roles."""
    kind, candidates = _kind(task, kind)
    stream = candidates(example, Draw("counterfactual", seed, kind, example.id))
    while some := list(islice(stream, 8)):
        for (text, spans), prompt in zip(some, encode(tokenizer, [text for text, _ in some]), strict=True):
            same_length = len(prompt.ids) == len(example.token_ids) and prompt.ids != example.token_ids
            if same_length and place_roles(tokenizer, prompt, spans) == dict(example.roles):
                return Counterfactual(example.id, kind, text, prompt.ids)
    return None


def counterfactuals(
    task_set: TaskSet, tokenizer: PreTrainedTokenizerBase, kind: str | None = None, seed: int = 0
) -> CounterfactualSet:
    """A counterfactual for every example of a task that has one of equal length; the others are counted."""
    kind, _ = _kind(task_set.task, kind)
    pairs = {
        example.id: counterfactual(task_set.task, example, tokenizer, kind, seed) for example in task_set
    }
    excluded = tuple(
        Exclusion(name, "no candidate has as many tokens, with its roles at the same places")
        for name, found in pairs.items()
        if found is None
    )
    return CounterfactualSet(kind, {name: each for name, each in pairs.items() if each}, excluded)


def _kind(task: str, kind: str | None) -> tuple[str, Candidates]:
    from headtrace.tasks.registry import TASKS

    kinds = TASKS[task].counterfactuals if task in TASKS else {}
    if not kinds:
        able = ", ".join(name for name, each in TASKS.items() if each.counterfactuals)
        raise InputError(
            f"Task {task!r} makes no counterfactuals ({able} do). Write them yourself: the same sentence "
            "with other words, of the same number of tokens."
        )
    if kind is not None and kind not in kinds:
        raise InputError(f"Task {task!r} has no counterfactual {kind!r}. It has: {', '.join(kinds)}.")
    name = next(iter(kinds)) if kind is None else kind
    return name, kinds[name]
